"""Environment variables that look like misspelt settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from moe_exp.config import Config

# Variables of other programs that are close to one of ours.
_KNOWN_OTHERS = {"EDITOR", "HOME", "HOSTNAME", "LANG", "LOGNAME", "MAIL", "PATH", "PWD", "SHELL", "TERM", "USER", "WORLD_SIZE", "RANK"}
_OUR_WORDS = {word for name in Config.model_fields for word in name.upper().split("_") if len(word) > 2}


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Environment variables that look like misspelt settings, each with the nearest setting (NUM_EXPRTS, NUM_EXPERTS)."""
    ours = [name.upper() for name in Config.model_fields]
    found = []
    for name in sorted(set(environ) - set(ours) - _KNOWN_OTHERS):
        if len(name) > 3 and (near := difflib.get_close_matches(name, ours, n=1, cutoff=0.85)):
            found.append((name, near[0]))
    return found
