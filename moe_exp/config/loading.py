"""From flags, the environment and settings files to a Config, and back. No torch."""

import argparse
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from moe_exp.config.choices import choices_of
from moe_exp.config.errors import ConfigError, problem
from moe_exp.config.presets import PRESETS, preset_values
from moe_exp.config.setting_types import ONE_LINE_FIX, shown
from moe_exp.config.settings import Config, names_by_section
from moe_exp.config.settings_file import NOT_TAKEN_OVER, is_run_record, read_settings
from moe_exp.host.devices import Nodes, count_gpus
from moe_exp.host.exit_codes import EXIT_CODE_FILE, complain, settings_file
from moe_exp.host.files import expanded, read_yaml


def add_arguments(
    parser: argparse.ArgumentParser, settings: type[BaseModel] = Config, names: Iterable[str] = ()
) -> None:
    """Adds a flag per setting of `settings`, by default for all `names`; values stay text, for `load_config`.
    All settings of Config are in a group for each section, with --config.
    """
    if settings is Config and not names:
        about = "settings in a file: config.yaml of a run, or lines such as NUM_EXPERTS=64 (docs/settings.md)"
        parser.add_argument("--config", metavar="FILE", help=about)
        for heading, of_section in names_by_section().items():
            _add_flags(parser.add_argument_group(f"{heading} settings"), settings, of_section)
    else:
        _add_flags(parser, settings, names or settings.model_fields)


# Flags of Megatron-LM that are the same setting. There they have no value, so here they need none.
_MEGATRON_FLAGS = {"document_mask": ("--reset-attention-mask", "--reset-position-ids"), "eod_mask_loss": ()}


def _add_flags(group: argparse._ActionsContainer, settings: type[BaseModel], names: Iterable[str]) -> None:
    for name in names:
        field = settings.model_fields[name]
        has_default = settings is not Config and field.default not in ("", ())
        text = f"{field.description}" + (f" (default: {str(field.default).lower()})" if has_default else "")
        options: dict[str, Any] = {"dest": name, "metavar": name.upper(), "help": text.replace("%", "%%")}
        if name in _MEGATRON_FLAGS:
            options |= {"nargs": "?", "const": "true"}
        group.add_argument(f"--{name.replace('_', '-')}", *_MEGATRON_FLAGS.get(name, ()), **options)


def given_values(
    flags: Mapping[str, Any], environ: Mapping[str, str], settings: type[BaseModel] = Config
) -> dict[str, Any]:
    """Given values by field name, `flags` before `environ` before the file of --config (`with_file`); None,
    and '' in `environ`, are not given.
    """
    of_shell = {name: environ.get(name.upper()) for name in settings.model_fields}
    return {name: value for name, value in of_shell.items() if value} | with_file(flags, environ)


def with_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """`flags` that are given, and the settings of the file `flags["config"]` that neither they nor `environ`
    give. The file may have settings of the names of `flags`, too.

    The ranks get the result as flags, so that a file which changes later cannot change a running job. Raises
    ConfigError if the file, or values in it, cannot be read; each line names the file.
    """
    given = {name: value for name, value in flags.items() if value is not None and name != "config"}
    if flags.get("config") is None:
        return given
    path = settings_path(flags["config"])
    values = read_settings(path, also=flags)
    is_record = is_run_record(values)
    if is_record:
        values = {name: value for name, value in values.items() if name not in NOT_TAKEN_OVER}
    try:
        config = load_config(known_settings(values), {})
    except ConfigError as error:
        raise ConfigError([f"{path}: {line}" for line in error.problems]) from None
    if is_record:  # without those that followed TRAIN_ITERS, so that they follow another one, too
        usual = load_config({"preset": config.preset, "train_iters": config.train_iters}, {})
        for name in ("decay_iters", "warmup_iters"):
            if getattr(config, name) == getattr(usual, name):
                values.pop(name, None)
    preset = given.get("preset") or environ.get("PRESET") or values.get("preset")
    if is_record and preset != values.get("preset"):
        rule = f"{path} has all settings of a run, so that another preset changes none"
        raise ConfigError([problem("preset", preset, rule, f"leave it out, or set {values.get('preset')}")])
    exported = {name: environ[name.upper()] for name in values if environ.get(name.upper())}
    differing = [name for name in exported if name not in given and exported[name] != values[name]]
    if ours := ", ".join(f"{name.upper()}={shown(exported[name])}" for name in differing):
        complain(f"warning: {ours} of the environment: used instead of what {path} has")
    return {name: value for name, value in values.items() if name not in exported} | given


def settings_path(text: str) -> Path:
    """The file that --config names, itself or by its run folder."""
    path = expanded(text)
    return inside if (inside := path / "config.yaml").is_file() else path


# Settings whose default depends on the devices.
_BY_DEVICES = ("preset", "gpus_per_node", "num_workers")


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    nodes: Nodes | None = None,
) -> Config:
    """Resolves default < preset < file < environment < `flags` into one Config.

    The preset's DECAY_ITERS and WARMUP_ITERS belong to its TRAIN_ITERS. With another one, unless they are
    given, DECAY_ITERS follows it and WARMUP_ITERS is at most a tenth of the decay.

    Args:
        flags: by field name; None counts as not given. `config` is the path of a settings file.
        environ: os.environ by default.
        nodes: where the run will be, if not on this machine. With GPUs there, PRESET=reference is the default
            with and without TRAIN_DATA.

    Raises:
        ConfigError: lists every value that cannot be read.
    """
    given = given_values(flags or {}, os.environ if environ is None else environ)
    # the embedded corpus is for a small model: PRESET=reference would read it 490 times
    on_gpus = nodes.gpus != 0 if nodes else count_gpus() and given.get("train_data")
    preset = str(given.get("preset") or ("reference" if on_gpus else "cpu"))
    if preset not in PRESETS:
        raise ConfigError([problem("preset", preset, "is not a preset", "use one of " + ", ".join(PRESETS))])
    if nodes and nodes.gpus is None and not given.get("gpus_per_node"):
        rule = "must be given, as this host need not be like the nodes"
        fix = "set GPUS_PER_NODE, or choose CPU nodes: CPU_NODES=true, for a sweep GPU=CPU"
        raise ConfigError([problem("gpus_per_node", "none", rule, fix)])
    values = preset_values(preset, nodes)
    try:
        config = Config(**(values | given | {"preset": preset}))
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    if config.train_iters == values.get("train_iters", Config.model_fields["train_iters"].default):
        return config
    if "decay_iters" not in given:
        config = config.model_copy(update={"decay_iters": 0})
    if "warmup_iters" not in given:
        config = config.model_copy(update={"warmup_iters": min(config.warmup_iters, config.decay_end // 10)})
    return config


def settings_from_launcher() -> Config | None:
    """The settings of a rank that a launcher has started, which resolved and checked them; else None."""
    launched = os.environ.get(EXIT_CODE_FILE)
    if not launched or not (path := settings_file(launched)).is_file():
        return None
    return Config.model_validate_json(path.read_text())


def recorded_settings(path: Path) -> dict[str, Any]:
    """The settings in config.yaml of a run, of any version; ValueError, in one line, if it has none."""
    try:
        settings = read_yaml(path)
    except OSError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise ValueError("it holds no settings")
    return {str(name).lower(): value for name, value in settings.items()}


def known_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the settings that this version has, for Config; the others get their defaults."""
    return {name: value for name, value in recorded.items() if name in Config.model_fields}


def fixed_for(nodes: Nodes, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` and the settings that depend on the devices, as on `nodes`, for loads on any machine."""
    config = load_config(given, {}, nodes=nodes)
    return {**given, **{name: str(getattr(config, name)) for name in _BY_DEVICES}}


def main_settings(config: Config) -> str:
    """PRESET, DTYPE and OPTIMIZER, which commands print before they submit a run."""
    return f"PRESET={config.preset} DTYPE={config.dtype} OPTIMIZER={config.optimizer}"


# Words of pydantic, and ours.
_WORDS = {
    "extra inputs are not permitted": "is not a setting",
    "input should be": "must be",
    "must be a valid boolean": "must be true or false",
}


def explain(error: ValidationError, settings: type[BaseModel] = Config) -> list[str]:
    """A line for each invalid value."""
    lines = []
    for one in error.errors():
        name, message = str(one["loc"][0]), one["msg"].removeprefix("Value error, ")
        rule = message[0].lower() + message[1:].partition(", unable to")[0]
        for words, ours in _WORDS.items():
            rule = rule.replace(words, ours)
        lines.append(problem(name, one["input"], rule, _fix(name, one, settings)))
    return lines


def _fix(name: str, error: Any, settings: type[BaseModel]) -> str:
    if name not in settings.model_fields:
        near = difflib.get_close_matches(name, settings.model_fields, 1)
        return f"use {near[0].upper()}, if that is meant" if near else "see moe-exp train --help"
    if error["type"] == "one_line":
        return ONE_LINE_FIX
    field = settings.model_fields[name]
    if error["type"] == "literal_error":
        choices = [str(choice) for choice in get_args(field.annotation)] or choices_of(field)
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
