"""Misspelt names: of environment variables, of flags, and in settings files."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from moe_exp.config.settings import Config
from moe_exp.host.exit_codes import complain

# Variables of other programs with names similar to ours.
_KNOWN_OTHERS = {
    "EDITOR", "HOME", "HOSTNAME", "LANG", "LOGNAME", "MAIL", "PATH", "PWD", "SHELL", "TERM", "USER",
    "WORLD_SIZE", "RANK",
}  # fmt: skip
# A value hardly meant for another program.
_LIST_OF_SIZES = re.compile(r"(\d+|none)([ ,]+(\d+|none))+")


def warn_of_misspelt(of_command: Iterable[str] = ()) -> None:
    """Prints a line to stderr for each environment variable that looks like a misspelt setting, also of
    `of_command`, further settings of a command.
    """
    for name, near in unknown_variables(os.environ, [name.upper() for name in of_command]):
        complain(f"warning: {name} is not a setting; did you mean {near}?")


def unknown_variables(environ: Mapping[str, str], of_command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Environment variables that look like misspelt settings, with the nearest (NUM_EXPRTS, NUM_EXPERTS).

    `of_command` are further settings of a command. Their names may be short, so for a value that is a list of
    sizes a less similar name suffices (TPZ="1 2", TPS).
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
    """Settings that `name`, a variable, flag or field, may mean: at most two of `names`, by default of all,
    by name (num_exprts), a part of it (hidden), or the description (learning-rate: lr).
    """
    known = list(Config.model_fields if names is None else names)
    words = re.split(r"[-_\s]+", name.strip("-_ ").lower())
    start = "_".join(words)
    if near := difflib.get_close_matches(start, known, n=1, cutoff=0.8):
        return near
    if described := _described(words, known):
        return described
    parts = [
        one for one in known if one.startswith(start) or set(words) < set(one.split("_")) or one in words
    ]
    return sorted(parts, key=len)[:2] if len(parts) <= 3 else []


def _described(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """Settings whose description begins with nearly these words; the rest of a description does not count."""
    scores = {}
    for setting in Config.model_fields.keys() & set(known):
        text = re.findall("[a-z]+", (Config.model_fields[setting].description or "").lower())
        start = " ".join(text[: len(words) + 1])
        scores[setting] = difflib.SequenceMatcher(None, " ".join(words), start).ratio()
    cutoff = 0.73 if len(words) > 1 else 0.95
    return sorted((one for one in scores if scores[one] >= cutoff), key=lambda one: (-scores[one], one))[:2]
