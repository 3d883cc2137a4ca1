"""Settings, device, constants and budget of `moe-exp plan ...`, from its flags and the environment."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands.guard import add_json
from moe_exp.config import Config, ConfigError, add_arguments, problem, setting_error
from moe_exp.planner.hardware import DEFAULT_GPU, Hardware, load_hardware

if TYPE_CHECKING:
    from moe_exp.planner.prediction import Constants

# The library is imported by the commands that use it: `moe-exp --help` answers at once.
FAILURE_FLAGS = ("mtbf_hours", "restart_minutes", "save_seconds")


def add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="devices in all, instead of NNODES")
    about = f"kind of device, or its JSON file (default: {DEFAULT_GPU}); see moe-exp plan hardware"
    add("--gpu", metavar="NAME", help=about)
    add("--profile", type=Path, metavar="FILE", help="constants that moe-exp plan calibrate wrote")
    add("--tokens", metavar="N", help="token budget such as 300B, instead of TRAIN_ITERS")
    add("--price", metavar="X", help="of a GPU-hour, in any currency")
    add_json(parser)
    add_arguments(parser)


def loaded(arguments: argparse.Namespace) -> tuple[Config, Hardware, Constants]:
    """Settings, device and constants of a plan of one layout."""
    from moe_exp.config import load_config

    hardware, constants = hardware_and_constants(arguments)
    flags = _settings(arguments, hardware)
    return _as_of_data(load_config(flags, nodes=hardware.nodes), flags), hardware, constants


def hardware_and_constants(arguments: argparse.Namespace) -> tuple[Hardware, Constants]:
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    return load_hardware(arguments.gpu or DEFAULT_GPU), load_constants(arguments.profile or CONSTANTS)


def _settings(arguments: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Flags and --config by field name; --gpus as NNODES and GPUS_PER_NODE."""
    from moe_exp.config.loading import with_file
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.planner.run_plan import settings_for

    warn_of_misspelt()
    given = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    return settings_for(hardware, with_file(given, os.environ), arguments.gpus)


def searched(arguments: argparse.Namespace, hardware: Hardware) -> tuple[Config, dict[str, str]]:
    """The settings without a layout, and the flags that fix one."""
    from moe_exp.config import load_config
    from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS

    flags = _settings(arguments, hardware)
    asked = {name: flags.pop(name) for name in LAYOUT_SETTINGS if name in flags}
    fixed = {name: str(value) for name, value in asked.items() if getattr(arguments, name) is not None}
    from_environ = {name: os.environ.get(name.upper(), "") for name in LAYOUT_SETTINGS if name not in fixed}
    from_file = {name: value for name, value in asked.items() if name not in fixed}
    for values, place in ((from_environ, "the environment"), (from_file, arguments.config)):
        if ignored := [f"{name.upper()}={value}" for name, value in values.items() if value]:
            rule = "searched all the same, a flag would fix it"
            print(f"moe-exp plan: {', '.join(ignored)} of {place}: {rule}", file=sys.stderr)
    environ = {name: value for name, value in os.environ.items() if name.lower() not in LAYOUT_SETTINGS}
    if "gpus_per_node" not in flags and not environ.get("GPUS_PER_NODE"):
        flags["gpus_per_node"] = hardware.gpus_per_node  # also with PRESET=cpu
    return _as_of_data(load_config(flags, environ, nodes=hardware.nodes), flags), fixed


def _as_of_data(config: Config, flags: dict[str, Any]) -> Config:
    """The settings with VOCAB_SIZE and DOCUMENT_TOKENS of the data, as training would have them."""
    if not config.train_data and not config.tokenizer:
        return config  # without loading numpy
    from moe_exp.config.loading import given_values
    from moe_exp.config.setting_types import blend_members
    from moe_exp.data.tokens.manifests import with_vocab_size

    config, reason = with_vocab_size(config, given_values(flags, os.environ))
    if reason:
        print(f"moe-exp plan: VOCAB_SIZE={config.vocab_size}: {reason}", file=sys.stderr)
    members = [prefix for _, prefix in blend_members(config.train_data)]
    if not all(Path(f"{prefix}.idx").is_file() for prefix in members):
        return config  # text that is not prepared, or data of another machine
    from moe_exp.data.tokens.manifests import with_document_tokens

    return with_document_tokens(config, config.train_data)


def budget(arguments: argparse.Namespace) -> dict[str, Any]:
    """Token budget and price, as `estimate.cost_of` takes them."""
    from moe_exp.planner.search.layout_text import parse_budget

    return parse_budget(arguments.tokens, arguments.price)


def refuse_settings(arguments: argparse.Namespace) -> None:
    """Settings given before a command that has none would have no effect."""
    refuse(arguments, "config", *Config.model_fields, "gpus", "gpu", "tokens", "price", *FAILURE_FLAGS)


def refuse(arguments: argparse.Namespace, *names: str) -> None:
    """ConfigError if one of these flags, which have no effect in the command, is given."""
    fix = f"leave it out of moe-exp plan {arguments.plan_command}"
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if given:
        raise ConfigError([problem(name, value, "has no effect here", fix) for name, value in given.items()])


def check_new_file(name: str, path: Path) -> None:
    """Refuses a path that a new file cannot or must not take."""
    # a directory; or a device such as /dev/stdout, which a file would take the place of
    if path.exists() and not path.is_file():
        raise setting_error(name, path, "is there and is no regular file", "name a file")
    if not path.parent.is_dir():
        raise setting_error(name, path, f"{path.parent} is no directory", "make it, or name a file elsewhere")
