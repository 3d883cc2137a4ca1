"""Extracts the origin of a log line from the line or its file's name: host, rank, device and time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """Origin of a line; empty fields are unknown."""

    host: str = ""
    rank: str = ""
    device: str = ""  # `cuda:3`, or its bus address, `0000:c1:00`
    time: str = ""  # `11-22 03:14:07`, or since boot `12345.7 s`

    def completed(self, other: Origin) -> Origin:
        """Fills missing fields from `other`."""
        names = ("host", "rank", "device", "time")
        return Origin(*(getattr(self, name) or getattr(other, name) for name in names))


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d)"
_TIMES = (
    re.compile(rf"\b\d{{4}}-(?P<month>\d\d)-(?P<day>\d\d)[ T]{_CLOCK}"),  # ours, ISO 8601
    re.compile(rf"\b(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d{{1,2}}) {_CLOCK}"),  # syslog, dmesg -T
    # glog as in torch, without leading 0
    re.compile(rf"\[[EWIF](?P<month>\d\d?)(?P<day>\d\d) {_CLOCK}"),
)
_SINCE_BOOT = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+\.\d)\d*\]")

_NAME = r"[A-Za-z0-9][\w.-]*"
_LEVELS = "(?i:debug|info|note|warn|warning|error|critical|fatal|message|what)"
_LOUD = "(?:WARNING|ERROR|CRITICAL)"
_PROGRAM = r"[\w.()/-]+(?:\[\d+\])?: "
_NO_ERROR = r"(?!\S*(Error|Exception|Interrupt): )"
_NO_PROGRAM = rf"(?!(moe-exp|srun|terminate|NVRM|kernel|\d+|{_LEVELS}): )"
# Each has one of host, rank, device as a named group.
_SOURCES = (
    # a rank's own errors, and its log messages
    re.compile(rf"rank (?P<rank>\d+) on (?P<host>{_NAME})(?: \((?P<device>[\w:]+)\))?"),
    re.compile(rf"\] {_LOUD} (?P<host>{_NAME}) rank (?P<rank>\d+)(?: (?P<device>cuda:\d+|cpu))?"),
    re.compile(rf"(?:^|[\s>|])(?P<host>{_NAME}):\d+:\d+ \[(?P<gpu>\d+)\] "),  # NCCL
    re.compile(rf"srun: error: (?P<host>{_NAME}): tasks? "),
    re.compile(rf"slurmstepd(?:-(?P<host>{_NAME}))?: error: "),
    # syslog, and systemd's
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
    found: dict[str, str] = {"time": _time(line)}
    for source in _SOURCES:
        if match := source.search(line):
            values = {name: value for name, value in match.groupdict().items() if value}
            if "gpu" in values:
                values["device"] = f"cuda:{values.pop('gpu')}"
            found = values | {name: value for name, value in found.items() if value}
    if rank := next((match[1] for pattern in _RANK if (match := pattern.search(line))), ""):
        found.setdefault("rank", rank)
    if bus := _BUS.search(line):
        found["device"] = next(filter(None, bus.groups())).lower()
    elif device := _DEVICE.search(line):
        found.setdefault("device", device[1] or f"cuda:{device[2]}")
    known = {name: value for name, value in found.items() if value}
    if "host" in known:
        known["host"] = known["host"].partition(".")[0]
    return Origin(**known)


def _time(line: str) -> str:
    for pattern in _TIMES:
        if match := pattern.search(line):
            month = match.groupdict().get("month") or str(_MONTHS.index(match["name"]) + 1)
            return f"{int(month):02d}-{int(match['day']):02d} {match['clock']}"
    since = _SINCE_BOOT.search(line)
    return f"{since[1]} s" if since else ""


# Parts of file names that are not hosts.
_WORDS = re.compile(
    r"(slurm|job|train|log|logs|out|err|stdout|stderr|rank|dmesg|syslog|messages|kern|journal|run|attempt|hang"
    r"|gz|txt|summary|launcher|nccl)?[-_]?\d*|node|all",
    re.IGNORECASE,
)
_HOST = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def origin_of_file(path: Path) -> Origin:
    """Origin from a file's name: SLURM's `%N` (`123_4.node17.out`), `rank3`, torchrun's rank folders."""
    rank = re.search(r"rank[-_]?(\d+)", path.name)
    if not rank and path.stem in ("stdout", "stderr") and path.parent.name.isdigit():
        return Origin(rank=path.parent.name)
    words = re.split(r"[._]", re.sub(r"rank[-_]?\d+", "", path.name))
    parts = [part for part in words if part and not _WORDS.fullmatch(part)]
    parts = [re.sub(r"^(slurm|dmesg|syslog|kern|job)-(\d+-)?", "", part) for part in parts]
    named = [part for part in parts if _HOST.fullmatch(part) and not _WORDS.fullmatch(part)]
    return Origin(host=named[-1] if named else "", rank=rank[1] if rank else "")
