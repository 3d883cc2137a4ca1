"""Which node, rank and device the errors in logs come from, causes before consequences. No torch.

Logs may be those of ranks, of srun (with `%N` in their names), of NCCL, or the kernel's (dmesg, syslog).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_exp.watch.known_faults import CAUSES, Fault, recognised
from moe_exp.watch.log_lines import Origin, origin, origin_of_file

_LOGS = (".log", ".out", ".err", ".txt")
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
        ValueError: a path is not there, or a folder has no logs.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"{path}: is not there. Fix: give log files, or the folder of a run.")
        inside = [file for file in sorted(path.rglob("*")) if file.suffix in _LOGS and file.is_file()]
        inside = [file for file in inside if not _NO_LOGS & set(file.relative_to(path).parts)]
        if not inside:
            raise ValueError(f"{path}: has no logs ({', '.join(_LOGS)}). Fix: give log files, or the folder of a run.")
        found += inside
    return list(dict.fromkeys(found))


def blame(files: Iterable[Path]) -> list[Blame]:
    """All faults in some logs, gathered by kind, host, rank and device; causes first, then by time."""
    seen: list[tuple[Fault | None, Origin, str]] = []
    for path in files:
        of_file = origin_of_file(path)
        with path.open(encoding="utf-8", errors="replace") as lines:
            seen += recognised_lines(lines, of_file)
    return gathered(seen)


def recognised_lines(lines: Iterable[str], of_file: Origin | None = None) -> Iterator[tuple[Fault | None, Origin, str]]:
    """Faults with their origins and lines, and with None for a fault lines that say on which host a rank is."""
    time = ""
    for line in lines:
        fault = recognised(line)
        here = origin(line, of_file)
        time = here.time or time  # a traceback has no times; what was said before it has
        if fault:
            yield fault, replace(here, time=here.time or time), line.strip()
        elif here.host and here.rank:
            yield None, here, ""


def gathered(seen: Sequence[tuple[Fault | None, Origin, str]]) -> list[Blame]:
    """The same faults of the same place as one, with hosts and devices of ranks filled in where another line has them."""
    places: dict[str, Origin] = {}
    for _, where, _ in seen:
        if where.host and where.rank and (where.device or where.rank not in places):
            places[where.rank] = where
    found: dict[tuple[Fault, str, str, str], Blame] = {}
    for fault, where, line in seen:
        if fault is None:
            continue
        if where.rank in places:
            known = places[where.rank]
            where = replace(where, host=where.host or known.host, device=where.device or known.device)
        key = (fault, where.host, where.rank, where.device)
        before = found.get(key)
        if before is None:
            found[key] = Blame(fault, where, 1, where.time, line[:300])
        else:
            found[key] = replace(before, count=before.count + 1, last=where.time or before.last)
    return sorted(found.values(), key=lambda one: (CAUSES.index(one.fault.cause), one.where.time or "~", one.where.host))


def hosts_to_exclude(found: Iterable[Blame]) -> dict[str, str]:
    """Hosts with faults of hardware, driver or link, each with the first reason."""
    hosts: dict[str, str] = {}
    for one in found:
        if one.fault.excludes and one.where.host:
            where = f" on {one.where.device}" if one.where.device else ""
            hosts.setdefault(one.where.host, f"{one.fault.name}{where}, {one.count} times, last {one.last or 'at an unknown time'}")
    return hosts


def hardware_faults(lines: Iterable[str]) -> list[str]:
    """Faults of the hardware in kernel messages of this host, a line each."""
    found = gathered(list(recognised_lines(lines)))
    return [
        f"{one.fault.name}{f' on {one.where.device}' if one.where.device else ''}, {one.count} times, last {one.last or 'at an unknown time'}"
        for one in found
        if one.fault.excludes
    ]
