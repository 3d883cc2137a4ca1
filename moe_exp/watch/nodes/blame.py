"""Finds the node, rank and device behind the errors in logs, causes before consequences. No torch.

Logs may come from ranks, srun (with `%N` in their names), NCCL, or the kernel (dmesg, syslog).
"""

import os
from collections import defaultdict
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
from moe_exp.watch.nodes.known_faults import CAUSES, Fault, Origin, origin, origin_of_file, recognised

_LOGS = (".log", ".out", ".err", ".txt")
_MOST_EVENTS = 5  # per run
_MOST_ENTRIES = 100_000  # per folder; a run has some thousands, and / should not be walked
_FIX = "Fix: give log files, or the folder of a run."
_NO_LOGS = {"checkpoints", "tensorboard", "wandb"}


@dataclass(frozen=True)
class Blame:
    """Equal faults on a host, rank and device: `where` has the first time, `last` the last one or ''."""

    fault: Fault
    where: Origin
    count: int
    last: str
    line: str


def log_files(paths: Iterable[Path]) -> list[Path]:
    """Expands folders, such as run folders, to the log files in them.

    Raises:
        ValueError: a path does not exist, or a folder has no logs, or far more files than a run has.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: is not there. {_FIX}")
        inside, left = [] if path.is_dir() else [path], _MOST_ENTRIES
        for place, folders, files in os.walk(path):
            folders[:] = [name for name in folders if name not in _NO_LOGS]
            left -= len(folders) + len(files)
            if left < 0:
                raise ValueError(f"{path}: has over {_MOST_ENTRIES} files. {_FIX}")
            logs = (Path(place, name) for name in files if Path(name).suffix in _LOGS)
            inside += filter(Path.is_file, logs)
        if not inside:
            raise ValueError(f"{path}: has no logs ({', '.join(_LOGS)}). {_FIX}")
        found += sorted(inside)
    return list(dict.fromkeys(found))


def reported_by_runs(paths: Iterable[Path]) -> list[str]:
    """The latest hangs and dead ranks in the events of run folders among `paths`; logs may miss them."""
    lines = []
    for run in (RunFolder(path) for path in paths if path.is_dir()):
        events = last_records(run.metrics) if run.metrics.exists() else []
        ended = [event for event in events if event.get("event") in ("hang", "rank_failed")]
        for event in ended[-_MOST_EVENTS:]:
            if event["event"] == "hang":
                lists = (event.get("ranks") or [], event.get("hosts") or [])
                ranks, hosts = (", ".join(map(str, values)) for values in lists)
                what = f"rank {ranks} on {hosts} apart from the others" if ranks else "no rank stands out"
                what += f"; see {run.path / str(event.get('folder', 'hang'))}/summary.txt"
            else:
                who = f"rank {event.get('rank')} on {event.get('host')} ({event.get('device')})"
                what = f"{who}: {event.get('cause')}"
            when = f"at iteration {event.get('iteration')}, {event.get('time')}"
            lines.append(f"{run.path}: {event['event']} {when}: {what}")
    return lines


@dataclass(frozen=True)
class Seen:
    """A recognized line: a fault, or None if it only shows the host and device of a rank."""

    fault: Fault | None
    where: Origin
    line: str = ""


def blame(files: Iterable[Path]) -> list[Blame]:
    """All faults in the logs, grouped by kind, host, rank and device; causes first, then by time."""
    logs: list[tuple[Origin, list[Seen]]] = []
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as lines:
            logs.append((origin_of_file(path), list(recognised_lines(lines))))
    return gathered(logs)


def recognised_lines(lines: Iterable[str]) -> Iterator[Seen]:
    """The recognized lines of a log. Lines without a time, as in tracebacks, get that of the line before."""
    time = ""
    for line in lines:
        fault, here = recognised(line), origin(line)
        time = here.time or time
        if fault or (here.host and here.rank):
            yield Seen(fault, replace(here, time=time), line.strip()[:300])


def gathered(logs: Sequence[tuple[Origin, Sequence[Seen]]]) -> list[Blame]:
    """Groups equal faults by place; `logs`: origin by file name and recognized lines of each file."""
    hosts = defaultdict[str, set[str]](set)
    for where in (one.where for _, seen in logs for one in seen):
        if where.host and where.rank:
            hosts[where.rank].add(where.host)
    # where all files agree: a rank changes hosts from job to job
    only = {rank: Origin(host=min(names)) for rank, names in hosts.items() if len(names) == 1}
    found: dict[tuple[Fault, str, str, str], Blame] = {}
    for of_file, seen in logs:
        for fault, where, line in _placed(seen, of_file, only):
            key = (fault, where.host, where.rank, where.device)
            before = found.get(key) or Blame(fault, where, 0, "", line)
            found[key] = replace(before, count=before.count + 1, last=where.time or before.last)

    def order(one: Blame) -> tuple[int, str, str]:
        return CAUSES.index(one.fault.cause), one.where.time or "~", one.where.host

    return sorted(found.values(), key=order)


def _placed(
    seen: Sequence[Seen], of_file: Origin, only: Mapping[str, Origin]
) -> Iterator[tuple[Fault, Origin, str]]:
    """Yields faults; missing places come from the same rank's lines, then the file name, then other files."""
    known = defaultdict[str, Origin](Origin)

    def learn(where: Origin) -> None:
        if where.host and where.rank:
            before = known[where.rank]
            same = before if before.host == where.host else Origin()
            known[where.rank] = replace(where, time="").completed(same)

    for one in reversed(seen):
        learn(one.where)
    for one in seen:
        learn(one.where)
        if one.fault is None:
            continue
        where = one.where if one.where.host or one.where.rank else one.where.completed(of_file)
        there = known[where.rank]
        if not where.host or where.host == there.host:
            where = where.completed(there)
        yield one.fault, where.completed(of_file).completed(only.get(where.rank, Origin())), one.line


def hosts_to_exclude(found: Iterable[Blame]) -> dict[str, str]:
    """Hosts with faults of hardware, driver or link, each with the first reason."""
    hosts: dict[str, str] = {}
    for one in found:
        if one.fault.excludes and one.where.host:
            hosts.setdefault(one.where.host, _described(one))
    return hosts


def hardware_faults(lines: Iterable[str]) -> list[str]:
    """Hardware faults in this host's kernel messages, a line each."""
    found = gathered([(Origin(), list(recognised_lines(lines)))])
    return [_described(one) for one in found if one.fault.excludes]


def _described(one: Blame) -> str:
    where = f" on {one.where.device}" if one.where.device else ""
    times = "once" if one.count == 1 else f"{one.count} times"
    return f"{one.fault.name}{where}, {times}" + (f", last {one.last}" if one.last else "")


# The table of `moe-exp watch blame`, and its JSON.


_COLOURS = dict.fromkeys(CAUSES, "yellow") | {"consequence": "dim"}
_COLOURS |= dict.fromkeys(("hardware", "driver", "network"), "red")


def print_blame(found: Sequence[Blame]) -> None:
    """Prints a row for each kind of fault at a place, causes first."""
    console = table_console()
    if not found:
        console.print("No known error in these logs.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("cause", "what", "host", "rank", "device", "times", "first", "last", "what to do"):
        table.add_column(name, overflow="fold", no_wrap=name in ("cause", "rank", "times"))
    for one in found:
        where = one.where
        times = (str(one.count), where.time or "-", one.last or "-")
        place = (where.host or "?", where.rank or "-", where.device or "-")
        cells = (one.fault.name, *place, *times, one.fault.advice)
        table.add_row(Text(one.fault.cause, _COLOURS[one.fault.cause]), *map(Text, cells))
    console.print(table)


def blame_as_json(found: Sequence[Blame]) -> list[dict[str, Any]]:
    """The rows as objects, each with the first line."""
    rows = []
    for one in found:
        fault, where = one.fault, one.where
        rank = int(where.rank) if where.rank else None
        row = {"cause": fault.cause, "what": fault.name, "host": where.host or None, "rank": rank}
        row |= {"device": where.device or None, "count": one.count, "first": where.time or None}
        row |= {"last": one.last or None, "advice": fault.advice, "excludes": fault.excludes}
        rows.append(row | {"line": one.line})
    return rows
