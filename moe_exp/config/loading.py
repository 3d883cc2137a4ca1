"""From flags and the environment to a Config, and back. No torch."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from moe_exp.config.presets import PRESETS, preset_values
from moe_exp.config.setting_types import (
    ONE_LINE_FIX,
)
from moe_exp.config.settings import Config, ConfigError, problem
from moe_exp.host.devices import count_gpus


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds one flag per setting to `parser`; values stay text, `load_config` checks them."""
    for name, field in Config.model_fields.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, metavar=name.upper(), help=field.description
        )


def load_config(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Resolves default < preset < environment < `flags` into one Config.

    Args:
        flags: field name to value, as parsed from the command line; None values count as not given.
        environ: the environment; os.environ by default.

    Raises:
        ConfigError: with every value that cannot be read, all at once.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {k: environ[k.upper()] for k in Config.model_fields if environ.get(k.upper())}
    given |= {k: v for k, v in (flags or {}).items() if v is not None}
    preset = str(given.get("preset") or ("reference" if count_gpus() else "cpu"))
    if preset not in PRESETS:
        raise ConfigError([problem("preset", preset, "is not a preset", "use one of " + ", ".join(PRESETS))])
    try:
        return Config(**(preset_values(preset) | given | {"preset": preset}))
    except ValidationError as error:
        raise ConfigError([_explain(e) for e in error.errors()]) from None


def _explain(error: Any) -> str:
    name = str(error["loc"][0])
    message = error["msg"].removeprefix("Value error, ")
    rule = message[0].lower() + message[1:].partition(", unable to")[0]
    rule = rule.replace("input should be", "must be").replace(
        "must be a valid boolean", "must be true or false"
    )
    return problem(name, error["input"], rule, _fix(name, error))


def _fix(name: str, error: Any) -> str:
    if name not in Config.model_fields:
        return "see moe-exp train --help"
    if error["type"] == "one_line":
        return ONE_LINE_FIX
    field = Config.model_fields[name]
    if error["type"] == "literal_error":
        choices = [str(choice) for choice in get_args(field.annotation)]
        nearest = difflib.get_close_matches(str(error["input"]), choices, 1)
        value = nearest[0] if nearest else f"{field.default}, as is the default, or another of these"
        return f"set {name.upper()}={value}"
    if error["type"] == "less_than_equal":
        return f"set {name.upper()} to at most {error['ctx']['le']}"
    if error["type"].startswith("bool_"):
        return f"set {name.upper()}=true or {name.upper()}=false"
    return f"give {name.upper()}, {field.description}"


def to_yaml(config: Config) -> str:
    """The settings as YAML, in field order, for `config.yaml` of the run folder."""
    return str(yaml.safe_dump(config.model_dump(), sort_keys=False))


def module_arguments(flags: Mapping[str, Any]) -> list[str]:
    """`flags` as command-line arguments, in the form that `config.add_arguments` reads."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
