"""Environment variables that look like misspelt settings."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

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
    """Prints a line to stderr for each environment variable that looks like a misspelt setting.

    Args:
        of_command: further settings of a command, by field name.
    """
    for name, near in unknown_variables(os.environ, [name.upper() for name in of_command]):
        complain(f"warning: {name} is not a setting; did you mean {near}?")


def unknown_variables(environ: Mapping[str, str], of_command: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Environment variables that look like misspelt settings, with the nearest (NUM_EXPRTS, NUM_EXPERTS).

    `of_command` are further settings of a command. Their names may be short, so for a value that is a list of
    sizes a less similar name suffices (TPZ="1 2", TPS).
    """
    ours = [*(name.upper() for name in Config.model_fields), *of_command]
    found = []
    for name in sorted(set(environ) - set(ours) - _KNOWN_OTHERS):
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if len(name) > 3 else []
        if not near and _LIST_OF_SIZES.fullmatch(environ[name].strip()):
            near = difflib.get_close_matches(name, of_command, n=1, cutoff=0.6)
        found += [(name, one) for one in near]
    return found
