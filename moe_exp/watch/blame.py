"""Finds the node, rank and device behind errors in logs, and lists causes before consequences. No torch.

Logs may come from ranks, srun (with the host, `%N`, in the file name), NCCL, or the kernel (dmesg, syslog).
`known_errors.py` lists the recognized messages.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from moe_exp.host.progress import table_console
from moe_exp.runs.records import last_records
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.known_errors import CAUSES, Fault, recognised


@dataclass(frozen=True)
class Origin:
    """The source of a log line; empty fields are unknown."""

    host: str = ""
    rank: str = ""
    device: str = ""  # `cuda:3`, or its bus address `0000:c1:00`
    time: str = ""  # `11-22 03:14:07`, or the time since boot `12345.7 s`

    def completed(self, other: Origin) -> Origin:
        """Copy with missing fields filled from `other`."""
        return Origin(*(mine or theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d)"
_TIMES = (
    re.compile(rf"\b\d{{4}}-(?P<month>\d\d)-(?P<day>\d\d)[ T]{_CLOCK}"),  # ours, ISO 8601
    re.compile(rf"\b(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d{{1,2}}) {_CLOCK}"),  # syslog, dmesg -T
    # glog, as torch writes it: the month has no leading zero
    re.compile(rf"\[[EWIF](?P<month>\d\d?)(?P<day>\d\d) {_CLOCK}"),
)
_SINCE_BOOT = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+\.\d)\d*\]")

_NAME = r"[A-Za-z0-9][\w.-]*"
_LEVELS = "(?i:debug|info|note|warn|warning|error|critical|fatal|message|what)"
_LOUD = "(?:WARNING|ERROR|CRITICAL)"
_PROGRAM = r"[\w.()/-]+(?:\[\d+\])?: "
_NO_ERROR = r"(?!\S*(Error|Exception|Interrupt): )"
_NO_PROGRAM = rf"(?!(moe-exp|srun|terminate|NVRM|kernel|\d+|{_LEVELS}): )"
# Each pattern captures at least one of host, rank and device.
_SOURCES = (
    # a rank's errors and log messages
    re.compile(rf"rank (?P<rank>\d+) on (?P<host>{_NAME})(?: \((?P<device>[\w:]+)\))?"),
    re.compile(rf"\] {_LOUD} (?P<host>{_NAME}) rank (?P<rank>\d+)(?: (?P<device>cuda:\d+|cpu))?"),
    re.compile(rf"(?:^|[\s>|])(?P<host>{_NAME}):\d+:\d+ \[(?P<gpu>\d+)\] "),  # NCCL
    re.compile(rf"srun: error: (?P<host>{_NAME}): tasks? "),
    re.compile(rf"slurmstepd(?:-(?P<host>{_NAME}))?: error: "),
    # syslog and systemd
    re.compile(rf"(?:{'|'.join(_MONTHS)}) +\d+ \d\d:\d\d:\d\d (?P<host>{_NAME}) {_PROGRAM}"),
    re.compile(rf"^\d{{4}}-\d\d-\d\dT[\d:.,+-]+Z? (?P<host>{_NAME}) {_PROGRAM}"),
    # pdsh, clush; not `RuntimeError: CUDA error: ...`, `ERROR: ...`, or the task number of `srun --label`
    re.compile(rf"^{_NO_ERROR}{_NO_PROGRAM}(?P<host>{_NAME}): (?=\[|moe-exp|NVRM|CUDA|\S*Error)"),
)
_RANK = (re.compile(r"\[rank(\d+)\]"), re.compile(r"\[Rank (\d+)\]"), re.compile(r"\bRank (\d+)\]"))
_BUS = re.compile(
    r"\(PCI:([0-9a-fA-F:.]+)\)|NVIDIA GPU ([0-9a-fA-F]{4}:[0-9a-fA-F:.]+)"
    r"|GPU ([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F.]+)"
)
_DEVICE = re.compile(r"\b(cuda:\d+)\b|\bGPU (\d+) has a total capacity")


def origin(line: str) -> Origin:
    found: dict[str, str] = {}
    if clock := next(filter(None, (pattern.search(line) for pattern in _TIMES)), None):
        month = clock.groupdict().get("month") or str(_MONTHS.index(clock["name"]) + 1)
        found["time"] = f"{int(month):02d}-{int(clock['day']):02d} {clock['clock']}"
    elif since := _SINCE_BOOT.search(line):
        found["time"] = f"{since[1]} s"
    # the first source that matches a field wins: a rank's own line is more specific than a syslog prefix
    for source in _SOURCES:
        if match := source.search(line):
            values = {name: value for name, value in match.groupdict().items() if value}
            if "gpu" in values:
                values["device"] = f"cuda:{values.pop('gpu')}"
            found = values | found
    if rank := next((match[1] for pattern in _RANK if (match := pattern.search(line))), ""):
        found.setdefault("rank", rank)
    # a bus address identifies the card on the whole host, `cuda:0` only inside one process
    if bus := _BUS.search(line):
        found["device"] = next(filter(None, bus.groups())).lower()
    elif device := _DEVICE.search(line):
        found.setdefault("device", device[1] or f"cuda:{device[2]}")
    if "host" in found:
        found["host"] = found["host"].partition(".")[0]
    return Origin(**found)


# Parts of file names that are not host names.
_WORDS = re.compile(
    r"(slurm|job|train|log|logs|out|err|stdout|stderr|rank|dmesg|syslog|messages|kern|journal|run|attempt|hang"
    r"|gz|txt|summary|launcher|nccl)?[-_]?\d*|node|all",
    re.IGNORECASE,
)


def origin_of_file(path: Path) -> Origin:
    """Origin given by a path: a node (`123_4.node17.out`) or a rank (`rank3`, torchrun's `3/stdout.log`)."""
    rank = re.search(r"rank[-_]?(\d+)", path.name)
    if not rank and path.stem in ("stdout", "stderr") and path.parent.name.isdigit():
        return Origin(rank=path.parent.name)
    words = re.split(r"[._]", re.sub(r"rank[-_]?\d+", "", path.name))
    parts = [re.sub(r"^(slurm|dmesg|syslog|kern|job)-(\d+-)?", "", word) for word in words]
    named = [p for p in parts if re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", p) and not _WORDS.fullmatch(p)]
    return Origin(host=named[-1] if named else "", rank=rank[1] if rank else "")


_LOGS = (".log", ".out", ".err", ".txt")
_MOST_EVENTS = 5  # per run
_MOST_ENTRIES = 100_000  # per folder; a run has a few thousand, and a scan of / would take hours
_FIX = "Fix: give log files or a run folder."
_NO_LOGS = {"checkpoints", "tensorboard", "wandb"}


@dataclass(frozen=True)
class Blame:
    """Equal faults on one host, rank and device. `where` has the host, rank, device and time of the first
    fault. `last` is the time of the latest fault, or '' if no time is known.
    """

    fault: Fault
    where: Origin
    count: int
    last: str
    line: str


def log_files(paths: Iterable[Path]) -> list[Path]:
    """Replaces each folder, such as a run folder, with the log files in it. Raises ValueError if a path does
    not exist, if a folder has no logs, or if a folder has too many files to be a run folder.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: not found. {_FIX}")
        inside, left = [] if path.is_dir() else [path], _MOST_ENTRIES
        for place, folders, files in os.walk(path):
            folders[:] = [name for name in folders if name not in _NO_LOGS]
            left -= len(folders) + len(files)
            if left < 0:
                raise ValueError(f"{path}: has more than {_MOST_ENTRIES} files. {_FIX}")
            logs = (Path(place, name) for name in files if Path(name).suffix in _LOGS)
            inside += filter(Path.is_file, logs)
        if not inside:
            raise ValueError(f"{path}: has no logs ({', '.join(_LOGS)}). {_FIX}")
        found += sorted(inside)
    return list(dict.fromkeys(found))


def reported_by_runs(paths: Iterable[Path]) -> list[str]:
    """One line per recent hang or failed rank in the events of run folders. Logs may not show them."""
    lines = []
    for run in (RunFolder(path) for path in paths if path.is_dir()):
        events = last_records(run.metrics) if run.metrics.exists() else []
        ended = [event for event in events if event.get("event") in ("hang", "rank_failed")]
        for event in ended[-_MOST_EVENTS:]:
            if event["event"] == "hang":
                lists = (event.get("ranks") or [], event.get("hosts") or [])
                ranks, hosts = (", ".join(map(str, values)) for values in lists)
                what = f"rank {ranks} on {hosts} differs from the others" if ranks else "no rank stands out"
                what += f"; see {run.path / str(event.get('folder', 'hang'))}/summary.txt"
            else:
                who = f"rank {event.get('rank')} on {event.get('host')} ({event.get('device')})"
                what = f"{who}: {event.get('cause')}"
            when = f"at iteration {event.get('iteration')}, {event.get('time')}"
            lines.append(f"{run.path}: {event['event']} {when}: {what}")
    return lines


# A recognized line; without a fault, it only links a rank to its host and device.
Seen = tuple[Fault | None, Origin, str]


def blame(files: Iterable[Path]) -> list[Blame]:
    """Groups faults in logs by kind, host, rank and device; sorts by cause (order: CAUSES), then time."""
    logs: list[tuple[Origin, list[Seen]]] = []
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as lines:
            logs.append((origin_of_file(path), list(recognised_lines(lines))))
    return gathered(logs)


def recognised_lines(lines: Iterable[str]) -> Iterator[Seen]:
    """Yields a log's recognized lines. A line without a time (in a traceback) gets the last time above it."""
    time = ""
    for line in lines:
        fault, here = recognised(line), origin(line)
        time = here.time or time
        if fault or (here.host and here.rank):
            yield fault, replace(here, time=time), line.strip()[:300]


def gathered(logs: Sequence[tuple[Origin, Sequence[Seen]]]) -> list[Blame]:
    """Groups equal faults by place. `logs`: each file's origin (from its name) and recognized lines."""
    hosts = defaultdict[str, set[str]](set)
    for _, where, _ in (one for _, seen in logs for one in seen):
        if where.host and where.rank:
            hosts[where.rank].add(where.host)
    # only if all files agree: a rank may change hosts from job to job
    only = {rank: Origin(host=min(names)) for rank, names in hosts.items() if len(names) == 1}

    def learn(where: Origin, known: dict[str, Origin]) -> None:
        if where.host and where.rank:
            before = known[where.rank]
            same = before if before.host == where.host else Origin()
            known[where.rank] = replace(where, time="").completed(same)

    found: dict[tuple[Fault, str, str, str], Blame] = {}
    for of_file, seen in logs:
        # Read backwards first: early lines use facts from later ones. The forward pass then corrects them,
        # since a file may contain several jobs.
        known = defaultdict[str, Origin](Origin)
        for _, where, _ in reversed(seen):
            learn(where, known)
        for fault, where, line in seen:
            learn(where, known)
            if fault is None:
                continue
            # missing facts come from the same rank's lines, then the file name, then other files
            if not (where.host or where.rank):
                where = where.completed(of_file)
            there = known[where.rank]
            if not where.host or where.host == there.host:
                where = where.completed(there)
            where = where.completed(of_file).completed(only.get(where.rank, Origin()))
            key = (fault, where.host, where.rank, where.device)
            before = found.get(key) or Blame(fault, where, 0, "", line)
            found[key] = replace(before, count=before.count + 1, last=where.time or before.last)

    def order(one: Blame) -> tuple[int, str, str]:
        return CAUSES.index(one.fault.cause), one.where.time or "~", one.where.host  # without a time: last

    return sorted(found.values(), key=order)


def hosts_to_exclude(found: Iterable[Blame]) -> dict[str, str]:
    """Maps each host with a hardware, driver or link fault to its first fault."""
    hosts: dict[str, str] = {}
    for one in found:
        if one.fault.excludes and one.where.host:
            hosts.setdefault(one.where.host, _described(one))
    return hosts


def hardware_faults(lines: Iterable[str]) -> list[str]:
    """Hardware faults in this host's kernel messages, one line each."""
    found = gathered([(Origin(), list(recognised_lines(lines)))])
    return [_described(one) for one in found if one.fault.excludes]


def _described(one: Blame) -> str:
    where = f" on {one.where.device}" if one.where.device else ""
    times = "once" if one.count == 1 else f"{one.count} times"
    return f"{one.fault.name}{where}, {times}" + (f", last {one.last}" if one.last else "")


_COLOURS = dict.fromkeys(CAUSES, "yellow") | {"consequence": "dim"}
_COLOURS |= dict.fromkeys(("hardware", "driver", "network"), "red")


def print_blame(found: Sequence[Blame]) -> None:
    """Prints a table with one row per kind of fault and place, causes first."""
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
        cells = (one.fault.name, where.host or "?", where.rank or "-", where.device or "-", *times)
        cause = Text(one.fault.cause, _COLOURS[one.fault.cause])
        table.add_row(cause, *map(Text, cells), Text(one.fault.advice))
    console.print(table)


def blame_as_json(found: Sequence[Blame]) -> list[dict[str, Any]]:
    """The table's rows as JSON objects, each with the first log line that reports the fault."""
    return [
        {
            "cause": one.fault.cause, "what": one.fault.name, "host": one.where.host or None,
            "rank": int(one.where.rank) if one.where.rank else None, "device": one.where.device or None,
            "count": one.count, "first": one.where.time or None, "last": one.last or None,
            "advice": one.fault.advice, "excludes": one.fault.excludes, "line": one.line,
        }
        for one in found
    ]  # fmt: skip
