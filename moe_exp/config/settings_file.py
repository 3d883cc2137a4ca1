"""Reads settings files (YAML or NAME=value lines) and finds misspelled names. Does not import torch."""

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import yaml

from moe_exp.config.errors import ConfigError, problem, raise_for
from moe_exp.config.settings import TRAITS, Config
from moe_exp.host.exit_codes import complain
from moe_exp.host.files import regular, shallow

# Settings in a run's config.yaml that another run ignores: it must not write to the recorded run folder.
NOT_TAKEN_OVER = ("master_addr", "master_port", "node_rank", "run_name")

# Removed settings, with the values that equal today's behavior; (): any value.
REMOVED = {"router_bias_decay": ("0", "0.0"), "phi_balancing_rate": (), "attention_flops": ("causal",)}

# A run's config.yaml also records where the run was started.
PLACES = {name for name, traits in TRAITS.items() if traits.part == "place"}
_MOST_BYTES = 2**20
_NAME_VALUE = re.compile(r"\s*(export\s+)?[A-Za-z_]\w*=")
_FIX = "specify config.yaml of a run, or a file with lines such as NUM_EXPERTS=64 or num_experts: 64"


def read_settings(path: Path, also: Iterable[str] = ()) -> dict[str, str]:
    """Reads a settings file; returns the text of each value by field name.

    The first line with content decides whether the file is YAML or has NAME=value lines. In NAME=value
    lines, values are quoted as in a shell, and empty values are ignored. In YAML, null means `none`; it is
    ignored if the setting cannot be `none`. `also`: names that are valid in addition to those of Config.
    Raises ConfigError if the file cannot be read, or if names are unknown or repeated (one line per name).
    """
    text = _text(path)
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    pairs = _name_value_pairs if _NAME_VALUE.match(next(lines, "")) else _yaml_pairs
    try:
        found = list(pairs(text))
        if not found:
            raise ValueError("it contains no settings")
    except ValueError as error:
        raise _unreadable(path, error) from None
    values: dict[str, str | None] = {}
    problems = []
    for written, value in found:
        name = _field_name(written)
        if name in REMOVED:
            if REMOVED[name] and value not in REMOVED[name]:
                fix = "use the version that wrote this run; commit 9b039c76 is the last to have this setting"
                problems.append(problem(name, value, "was removed in this version", fix))
            continue
        if name not in Config.model_fields and name not in also:
            near = " or ".join(one.upper() for one in similar_settings(name))
            fix = f"write {near} if you meant that" if near else "remove it; --help lists all settings"
            problems.append(problem(written.upper(), value, "is not a setting of this command", fix))
        elif name in values:
            problems.append(problem(name, value, "is in the file twice", "remove one of the two lines"))
        values[name] = value
    raise_for(f"{path}: {line}" for line in problems)
    return {name: value for name, value in values.items() if value is not None}


def _field_name(written: str) -> str:
    return written.strip().lower().replace("-", "_")


def _unreadable(path: Path, reason: object) -> ConfigError:
    return ConfigError([problem("config", path, f"cannot be read ({' '.join(str(reason).split())})", _FIX)])


def _text(path: Path) -> str:
    try:
        if (size := regular(path).stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, more than the limit of {_MOST_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([problem("config", path, "not found", _FIX)]) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "it is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or error) from None


def _name_value_pairs(text: str) -> Iterator[tuple[str, str | None]]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if words and re.search(r"[$`]", re.sub(r"'[^']*'|(^|\s)#.*", "", line)):
            rule = "variables are not expanded; write the variable's value, or '$' for a literal $"
            raise ValueError(f"line {number}: {rule}")
        for word in words[words[:1] == ["export"] :]:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"line {number}: {word} is not NAME=value")
            yield name, value or None


def _yaml_pairs(text: str) -> Iterator[tuple[str, str | None]]:
    # compose instead of load: text stays as written (007, 12:30, 1e-4), and duplicates are visible
    try:
        root = yaml.compose(shallow(text), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}; text with special characters needs quotes") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)[:200]) from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it contains no settings")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            line = value.start_mark.line + 1
            raise ValueError(f"line {line}: must be one name and one value; put lists in quotes")
        if value.tag.endswith(":null"):
            field = Config.model_fields.get(_field_name(key.value))
            yield key.value, "none" if field and type(None) in get_args(field.annotation) else None
        else:
            yield key.value, value.value


# Variables of other programs whose names are similar to our settings.
_KNOWN_OTHERS = {
    "EDITOR", "HOME", "HOSTNAME", "LANG", "LOGNAME", "MAIL", "PATH", "PWD", "SHELL", "TERM", "USER",
    "WORLD_SIZE", "RANK",
}  # fmt: skip
# A value that other programs are unlikely to use.
_LIST_OF_SIZES = re.compile(r"(\d+|none)([ ,]+(\d+|none))+")


def warn_of_misspelt(of_command: Iterable[str] = ()) -> None:
    """Warns of environment variables that look like misspelled settings of Config or a command."""
    for name, near in unknown_variables(os.environ, [name.upper() for name in of_command]):
        complain(f"warning: {name} is not a setting; did you mean {near}?")


def unknown_variables(environ: Mapping[str, str], of_command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns (variable, most similar setting) for each environment variable that looks misspelled, such as
    (NUM_EXPRTS, NUM_EXPERTS).

    A command's settings (`of_command`) may have short names. A variable whose value is a list of sizes may
    therefore differ more from a command's setting: TPZ="1 2" is taken for TPS.
    """
    ours = (*(name.upper() for name in Config.model_fields), *of_command)
    found = []
    for name in sorted(set(environ) - set(ours) - _KNOWN_OTHERS):
        near = _nearest(name, ours) if len(name) > 3 else []
        if not near and _LIST_OF_SIZES.fullmatch(environ[name].strip()):
            near = difflib.get_close_matches(name, of_command, n=1, cutoff=0.6)
        found += [(name, one) for one in near]
    return found


@cache
def _nearest(name: str, ours: tuple[str, ...]) -> list[str]:
    return difflib.get_close_matches(name, ours, n=1, cutoff=0.85)


def similar_settings(name: str, names: Iterable[str] | None = None) -> list[str]:
    """Returns at most two settings that a user may mean by `name` (a variable, flag or field), chosen from
    `names` (default: all settings). A setting is found by a misspelled name (num_exprts), by a part of its
    name (hidden finds hidden_size), or by words of its description (learning-rate finds lr).
    """
    known = list(Config.model_fields if names is None else names)
    words = re.split(r"[-_\s]+", name.strip("-_ ").lower())
    start = "_".join(words)
    if near := difflib.get_close_matches(start, known, n=1, cutoff=0.8):
        return near
    scores = {}  # of settings whose description begins with nearly these words
    for setting in Config.model_fields.keys() & set(known):
        text = re.findall("[a-z]+", (Config.model_fields[setting].description or "").lower())
        first = " ".join(text[: len(words) + 1])
        scores[setting] = difflib.SequenceMatcher(None, " ".join(words), first).ratio()
    cutoff = 0.73 if len(words) > 1 else 0.95
    if described := [one for one in scores if scores[one] >= cutoff]:
        return sorted(described, key=lambda one: (-scores[one], one))[:2]
    parts = [
        one for one in known if one.startswith(start) or set(words) < set(one.split("_")) or one in words
    ]
    return sorted(parts, key=len)[:2] if len(parts) <= 3 else []
