"""Builds a Config from flags, environment variables and settings files, and converts it to YAML.

Does not import torch.
"""

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
from moe_exp.config.settings import TRAITS, Config, names_by_section
from moe_exp.config.settings_file import NOT_TAKEN_OVER, PLACES, read_settings
from moe_exp.host.devices import Nodes, count_gpus
from moe_exp.host.exit_codes import EXIT_CODE_FILE, RESOLVED_SETTINGS, complain
from moe_exp.host.files import expanded, read_yaml


def add_arguments(
    parser: argparse.ArgumentParser, settings: type[BaseModel] = Config, names: Iterable[str] = ()
) -> None:
    """Adds a flag for each setting in `names` (default: all fields of `settings`). Values are kept as text
    for `load_config`. If `settings` is Config and `names` is empty, the flags are grouped by section, and
    --config is added.
    """
    if settings is Config and not names:
        about = "settings file: config.yaml of a run, or lines such as NUM_EXPERTS=64 (docs/settings.md)"
        parser.add_argument("--config", metavar="FILE", help=about)
        for heading, of_section in names_by_section().items():
            _add_flags(parser.add_argument_group(f"{heading} settings"), settings, of_section)
    else:
        _add_flags(parser, settings, names or settings.model_fields)


def _add_flags(group: argparse._ActionsContainer, settings: type[BaseModel], names: Iterable[str]) -> None:
    for name in names:
        field = settings.model_fields[name]
        has_default = settings is not Config and field.default not in ("", ())
        text = f"{field.description}" + (f" (default: {str(field.default).lower()})" if has_default else "")
        options: dict[str, Any] = {"dest": name, "metavar": name.upper(), "help": text.replace("%", "%%")}
        others = TRAITS[name].megatron_flags if settings is Config else None
        if others is not None:
            options |= {"nargs": "?", "const": "true"}  # in Megatron-LM, the flag has no value
        group.add_argument(f"--{name.replace('_', '-')}", *(others or ()), **options)


def given_values(
    flags: Mapping[str, Any], environ: Mapping[str, str], settings: type[BaseModel] = Config
) -> dict[str, Any]:
    """Returns the values that the user set, by field name. `flags` override `environ`, and `environ`
    overrides the file of --config (see `with_file`). None counts as not set, and so does '' in `environ`.
    """
    of_shell = {name: environ.get(name.upper()) for name in settings.model_fields}
    return {name: value for name, value in of_shell.items() if value} | with_file(flags, environ)


def with_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Adds the settings in the file `flags["config"]` to `flags`; `flags` and `environ` take precedence.
    Besides settings, the file may contain any argument whose name is a key of `flags`. If UPCYCLE_FROM is
    set, settings of a dense model are converted to settings of the upcycled MoE model.

    Ranks receive the result as flags, so that editing the file does not change a running job. Raises
    ConfigError if the file or a value cannot be read; each line of the error names the file.
    """
    given = {name: value for name, value in flags.items() if value is not None and name != "config"}
    if flags.get("config") is None:
        return given
    path = settings_path(flags["config"])
    values = read_settings(path, also=flags)
    is_record = values.keys() >= PLACES  # else written by a user
    if is_record:
        values = {name: value for name, value in values.items() if name not in NOT_TAKEN_OVER}
    try:
        config = load_config(known_settings(values), {})
    except ConfigError as error:
        raise ConfigError([f"{path}: {line}" for line in error.problems]) from None
    if is_record:  # drop settings derived from TRAIN_ITERS, so that they follow a new value
        usual = load_config({"preset": config.preset, "train_iters": config.train_iters}, {})
        for name in ("decay_iters", "warmup_iters"):
            if getattr(config, name) == getattr(usual, name):
                values.pop(name, None)
    if not config.use_moe and (given.get("upcycle_from") or environ.get("UPCYCLE_FROM")):
        # The file describes the dense model. These values of it would contradict UPCYCLE_FROM.
        values |= {"use_moe": "true", "moe_ffn_hidden_size": "0", "router_pre_softmax": "false"}
        values.pop("load_dir", None)
    preset = given.get("preset") or environ.get("PRESET") or values.get("preset")
    if is_record and preset != values.get("preset"):
        rule = f"has no effect, as {path} sets all settings of a run"
        raise ConfigError([problem("preset", preset, rule, f"omit it, or set PRESET={values.get('preset')}")])
    exported = {name: environ[name.upper()] for name in values if environ.get(name.upper())}
    differing = [name for name in exported if name not in given and exported[name] != values[name]]
    if ours := ", ".join(f"{name.upper()}={shown(exported[name])}" for name in differing):
        complain(f"warning: {ours} in the environment overrides {path}")
    return {name: value for name, value in values.items() if name not in exported} | given


def settings_path(text: str) -> Path:
    """Returns the path given by --config; for a run folder, the path of its config.yaml."""
    path = expanded(text)
    return inside if (inside := path / "config.yaml").is_file() else path


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    nodes: Nodes | None = None,
) -> Config:
    """Builds one Config from defaults, preset, file, environment and `flags`, in increasing precedence.

    A preset's DECAY_ITERS and WARMUP_ITERS apply only if TRAIN_ITERS has the preset's value. Otherwise,
    DECAY_ITERS defaults to TRAIN_ITERS, and the default of WARMUP_ITERS is at most a tenth of DECAY_ITERS.

    Args:
        flags: values by field name; None counts as not given. Key `config`: path of a settings file.
        environ: environment variables (default: os.environ).
        nodes: the nodes of the run; None: the run uses this machine. If `nodes` have GPUs, PRESET
            defaults to reference even without TRAIN_DATA.

    Raises:
        ConfigError: if values are invalid. The error has a line for each invalid value.
    """
    given = given_values(flags or {}, os.environ if environ is None else environ)
    # the embedded corpus only suits a short run: PRESET=reference would repeat it 490 times
    on_gpus = nodes.gpus != 0 if nodes else count_gpus()
    for_gpus = "reference" if nodes or given.get("train_data") else "gpu"
    preset = str(given.get("preset") or (for_gpus if on_gpus else "cpu"))
    if preset not in PRESETS:
        raise ConfigError([problem("preset", preset, "unknown preset", "use one of " + ", ".join(PRESETS))])
    if nodes and nodes.gpus is None and not given.get("gpus_per_node"):
        rule = "must be given, as the nodes may differ from this host"
        fix = "set GPUS_PER_NODE, or choose CPU nodes (CPU_NODES=true; for a sweep GPU=CPU)"
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
    """Returns the settings that the launcher of this rank resolved and checked; None without a launcher."""
    launched = os.environ.get(EXIT_CODE_FILE)
    if not launched or not (path := Path(launched).with_name(RESOLVED_SETTINGS)).is_file():
        return None
    return Config.model_validate_json(path.read_text())


def recorded_settings(path: Path) -> dict[str, Any]:
    """Reads a config.yaml written by any version of moe_exp; raises a one-line ValueError on failure."""
    try:
        settings = read_yaml(path)
    except OSError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise ValueError("it contains no settings")
    return {str(name).lower(): value for name, value in settings.items()}


def known_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps only the settings that this version has; Config sets defaults for missing settings."""
    return {name: value for name, value in recorded.items() if name in Config.model_fields}


def fixed_for(nodes: Nodes, given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the device-dependent settings of `nodes` to `given`, so that all machines use the same values."""
    config, by_devices = load_config(given, {}, nodes=nodes), ("preset", "gpus_per_node", "num_workers")
    return {**given, **{name: str(getattr(config, name)) for name in by_devices}}


def main_settings(config: Config) -> str:
    """Text with PRESET, DTYPE and OPTIMIZER, printed before a run is submitted."""
    return f"PRESET={config.preset} DTYPE={config.dtype} OPTIMIZER={config.optimizer}"


# Pydantic's words and our replacements.
_WORDS = {
    "extra inputs are not permitted": "is not a setting",
    "input should be": "must be",
    "must be a valid boolean": "must be true or false",
}


def explain(error: ValidationError, settings: type[BaseModel] = Config) -> list[str]:
    """Returns an error line for each invalid value."""
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
        return f"use {near[0].upper()} if you meant that" if near else "see moe-exp train --help"
    if error["type"] == "one_line":
        return ONE_LINE_FIX
    field = settings.model_fields[name]
    if error["type"] == "literal_error":
        choices = [str(choice) for choice in get_args(field.annotation)] or choices_of(field)
        nearest = difflib.get_close_matches(str(error["input"]), choices, 1)
        value = nearest[0] if nearest else f"{field.default} (the default), or another of these values"
        return f"set {name.upper()}={value}"
    if error["type"] == "less_than_equal":
        return f"set {name.upper()} to at most {error['ctx']['le']}"
    if error["type"].startswith("bool_"):
        return f"set {name.upper()}=true or {name.upper()}=false"
    return f"correct {name.upper()}: {field.description}"


def to_yaml(config: Config) -> str:
    """Returns the settings as YAML, in field order, for the run folder's config.yaml."""
    return str(yaml.safe_dump(config.model_dump(), sort_keys=False))


def module_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Returns `flags` as command-line arguments, in the form that `add_arguments` declares."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
