"""Environment variables that look like misspelt settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from moe_exp.config.settings import Config

# Variables of other programs that are close to one of ours.
_KNOWN_OTHERS = {
    "EDITOR",
    "HOME",
    "HOSTNAME",
    "LANG",
    "LOGNAME",
    "MAIL",
    "PATH",
    "PWD",
    "SHELL",
    "TERM",
    "USER",
    "WORLD_SIZE",
    "RANK",
}
# A value that is hardly meant for another program.
_LIST_OF_SIZES = re.compile(r"(\d+|none)([ ,]+(\d+|none))+")


def unknown_variables(environ: Mapping[str, str], of_command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Environment variables that look like misspelt settings, each with the nearest setting (NUM_EXPRTS,
    NUM_EXPERTS).

    Args:
        environ: the environment.
        of_command: further settings of a command, lists of sizes among them: where the value is such a list,
            their short names need not be as near (TPZ="1 2", TPS).
    """
    ours = [*(name.upper() for name in Config.model_fields), *of_command]
    found = []
    for name in sorted(set(environ) - set(ours) - _KNOWN_OTHERS):
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if len(name) > 3 else []
        if not near and _LIST_OF_SIZES.fullmatch(environ[name].strip()):
            near = difflib.get_close_matches(name, of_command, n=1, cutoff=0.6)
        found += [(name, one) for one in near]
    return found
