"""The table of `moe-exp watch blame`, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from moe_exp.host.progress import table_console
from moe_exp.watch.blame import Blame

_COLOURS = {
    "hardware": "red",
    "driver": "red",
    "network": "red",
    "memory": "yellow",
    "disk": "yellow",
    "program": "yellow",
    "consequence": "dim",
}


def print_blame(found: Sequence[Blame]) -> None:
    """One row for each kind of fault of a place, causes first."""
    console = table_console()
    if not found:
        console.print("No known error in these logs.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("cause", "what", "host", "rank", "device", "times", "first", "last", "what to do"):
        table.add_column(name, overflow="fold", no_wrap=name in ("cause", "rank", "times"))
    for one in found:
        cells = (one.fault.name, one.where.host or "?", one.where.rank or "-", one.where.device or "-", str(one.count))
        times = (one.where.time or "-", one.last or "-")
        table.add_row(Text(one.fault.cause, _COLOURS[one.fault.cause]), *map(Text, (*cells, *times, one.fault.advice)))
    console.print(table)


def blame_as_json(found: Sequence[Blame]) -> list[dict[str, Any]]:
    """The rows as objects, each with the first line."""
    return [
        {
            "cause": one.fault.cause,
            "what": one.fault.name,
            "host": one.where.host or None,
            "rank": int(one.where.rank) if one.where.rank else None,
            "device": one.where.device or None,
            "count": one.count,
            "first": one.where.time or None,
            "last": one.last or None,
            "advice": one.fault.advice,
            "excludes": one.fault.excludes,
            "line": one.line,
        }
        for one in found
    ]
