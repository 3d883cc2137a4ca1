"""How much memory there is to use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_UNKNOWN_BYTES = 2 * 2**30


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Memory that this process may still use: the least of the machine's and its control groups' (version 2
    or 1).

    If neither says (macOS), 2 GB.
    """
    found = [left for left in (_of_machine(proc), *_of_groups(proc, cgroup)) if left is not None]
    return max(0, min(found, default=_UNKNOWN_BYTES))


def _of_machine(proc: Path) -> int | None:
    lines = (line for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in lines), None)


def _lines(path: Path) -> list[str]:
    """Empty if the file cannot be read."""
    with suppress(OSError):
        return path.read_text().splitlines()
    return []


def _of_groups(proc: Path, cgroup: Path) -> list[int | None]:
    """Left in each group from the process's own up to the root: any of them may have the limit."""
    left: list[int | None] = []
    for line in _lines(proc / "self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = cgroup if not controllers else cgroup / "memory"
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / name.lstrip("/")
        # In a container the name may be one of the host, which is hidden: the root is the container's.
        groups = [group for group in (folder, *folder.parents) if group == root or root in group.parents]
        left += [_left(group, *names) for group in groups]
    return left


def _left(group: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return None
    return limit - used + int(statistics.get("inactive_file", 0))  # cache that goes when memory is asked for
