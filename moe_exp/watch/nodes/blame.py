"""Which node, rank and device the errors in logs come from, causes before consequences. No torch.

Logs may be those of ranks, of srun (with `%N` in their names), of NCCL, or the kernel's (dmesg, syslog).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from moe_exp.host.progress import table_console
from moe_exp.runs.records import last_records
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.nodes.known_faults import CAUSES, Fault, recognised
from moe_exp.watch.nodes.log_lines import Origin, origin, origin_of_file

_LOGS = (".log", ".out", ".err", ".txt")
_MOST_EVENTS = 5  # of a run
_MOST_ENTRIES = 100_000  # of a folder; a run has some thousands, and / is not to be walked
_NO_LOGS = {"checkpoints", "tensorboard", "wandb"}


@dataclass(frozen=True)
class Blame:
    """One kind of fault of one host, rank and device.

    Args:
        fault: what it is.
        where: host, rank, device; the time is that of the first.
        count: how often.
        last: time of the last, or ''.
        line: the first line.
    """

    fault: Fault
    where: Origin
    count: int
    last: str
    line: str


def log_files(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, and of folders, such as those of runs, what looks like logs.

    Raises:
        ValueError: a path is not there, or a folder has no logs, or far more than a run has.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"{path}: is not there. Fix: give log files, or the folder of a run.")
        inside = sorted(_logs_inside(path))
        if not inside:
            raise ValueError(
                f"{path}: has no logs ({', '.join(_LOGS)}). Fix: give log files, or the folder of a run."
            )
        found += inside
    return list(dict.fromkeys(found))


def _logs_inside(folder: Path) -> Iterator[Path]:
    left = _MOST_ENTRIES
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NO_LOGS]
        left -= len(folders) + len(files)
        if left < 0:
            raise ValueError(
                f"{folder}: has over {_MOST_ENTRIES} files. Fix: give log files, or the folder of a run."
            )
        paths = (Path(place, name) for name in files)
        yield from (path for path in paths if path.suffix in _LOGS and path.is_file())


def told_by_runs(paths: Iterable[Path]) -> list[str]:
    """What run folders among `paths` tell of hangs and of ranks that have died, which need not be in any log;
    the latest.
    """
    lines = []
    for run in (RunFolder(path) for path in paths if path.is_dir()):
        events = last_records(run.metrics) if run.metrics.exists() else []
        for event in [event for event in events if event.get("event") in ("hang", "rank_failed")][
            -_MOST_EVENTS:
        ]:
            head = f"{run.path}: {event['event']} at iteration {event['iteration']}, {event['time']}: "
            if event["event"] == "hang":
                ranks, hosts = ", ".join(map(str, event.get("ranks", []))), ", ".join(event.get("hosts", []))
                where = f"rank {ranks} on {hosts} apart from the others" if ranks else "no rank stands out"
                lines.append(f"{head}{where}; see {run.path / str(event.get('folder', 'hang'))}/summary.txt")
            else:
                lines.append(
                    f"{head}rank {event.get('rank')} on {event.get('host')} ({event.get('device')}):"
                    f" {event.get('cause')}"
                )
    return lines


@dataclass(frozen=True)
class Seen:
    """A line that says something: of a fault, or with None which host and device a rank has."""

    fault: Fault | None
    where: Origin
    line: str = ""


def blame(files: Iterable[Path]) -> list[Blame]:
    """All faults in some logs, gathered by kind, host, rank and device; causes first, then by time."""
    logs: list[tuple[Origin, list[Seen]]] = []
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as lines:
            logs.append((origin_of_file(path), list(recognised_lines(lines))))
    return gathered(logs)


def recognised_lines(lines: Iterable[str]) -> Iterator[Seen]:
    """The lines of a log that say something. A line without a time has that of the line before: a traceback
    has none.
    """
    time = ""
    for line in lines:
        fault, here = recognised(line), origin(line)
        time = here.time or time
        if fault or (here.host and here.rank):
            yield Seen(fault, replace(here, time=time), line.strip()[:300])


def gathered(logs: Sequence[tuple[Origin, Sequence[Seen]]]) -> list[Blame]:
    """The same faults of the same place as one; `logs`: of each file what its name says, and its lines that
    say something.
    """
    hosts: dict[str, set[str]] = {}
    for _, seen in logs:
        for one in seen:
            if one.where.host and one.where.rank:
                hosts.setdefault(one.where.rank, set()).add(one.where.host)
    only = {rank: Origin(host=min(names)) for rank, names in hosts.items() if len(names) == 1}
    found: dict[tuple[Fault, str, str, str], Blame] = {}
    for of_file, seen in logs:
        for fault, where, line in _placed(seen, of_file, only):
            key = (fault, where.host, where.rank, where.device)
            before = found.get(key)
            if before is None:
                found[key] = Blame(fault, where, 1, where.time, line)
            else:
                found[key] = replace(before, count=before.count + 1, last=where.time or before.last)
    return sorted(
        found.values(), key=lambda one: (CAUSES.index(one.fault.cause), one.where.time or "~", one.where.host)
    )


def _placed(
    seen: Sequence[Seen], of_file: Origin, only: Mapping[str, Origin]
) -> Iterator[tuple[Fault, Origin, str]]:
    """The faults of a file, with where they were.

    What a line does not say of its host and device is filled in from the lines of this file that say it of
    the same rank, the ones before it first, then from the file's name, and last from other files, where these
    agree: from job to job a rank is on other hosts.
    """
    known: dict[str, Origin] = {}
    for one in reversed(seen):
        if one.where.host and one.where.rank:
            known[one.where.rank] = replace(one.where, time="").completed(
                _of_host(known.get(one.where.rank), one.where.host)
            )
    for one in seen:
        where = one.where
        if where.host and where.rank:
            known[where.rank] = replace(where, time="").completed(_of_host(known.get(where.rank), where.host))
        if one.fault is None:
            continue
        if not where.host and not where.rank:
            where = where.completed(of_file)
        there = known.get(where.rank)
        where = where.completed(_of_host(there, where.host) if where.host else there or Origin())
        yield one.fault, where.completed(of_file).completed(only.get(where.rank, Origin())), one.line


def _of_host(place: Origin | None, host: str) -> Origin:
    return place if place and place.host == host else Origin()


def hosts_to_exclude(found: Iterable[Blame]) -> dict[str, str]:
    """Hosts with faults of hardware, driver or link, each with the first reason."""
    hosts: dict[str, str] = {}
    for one in found:
        if one.fault.excludes and one.where.host:
            hosts.setdefault(one.where.host, _described(one))
    return hosts


def hardware_faults(lines: Iterable[str]) -> list[str]:
    """Faults of the hardware in kernel messages of this host, a line each."""
    found = gathered([(Origin(), list(recognised_lines(lines)))])
    return [_described(one) for one in found if one.fault.excludes]


def _described(one: Blame) -> str:
    where = f" on {one.where.device}" if one.where.device else ""
    times = "once" if one.count == 1 else f"{one.count} times"
    return f"{one.fault.name}{where}, {times}" + (f", last {one.last}" if one.last else "")


# The table of `moe-exp watch blame`, and its JSON.


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
        cells = (
            one.fault.name,
            one.where.host or "?",
            one.where.rank or "-",
            one.where.device or "-",
            str(one.count),
        )
        times = (one.where.time or "-", one.last or "-")
        table.add_row(
            Text(one.fault.cause, _COLOURS[one.fault.cause]), *map(Text, (*cells, *times, one.fault.advice))
        )
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
