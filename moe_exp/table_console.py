"""Where tables are printed: on a terminal as wide as it is, elsewhere as wide as they want to be. No torch."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

_NO_LIMIT = 1000  # characters; rich takes 80 for a file or a pipe, and breaks words


def table_console(file: TextIO | None = None, *, highlight: bool = True) -> Console:
    """A console on `file`, standard output by default."""
    console = Console(file=file, highlight=highlight)
    return console if console.is_terminal else Console(file=file, highlight=highlight, width=_NO_LIMIT)
