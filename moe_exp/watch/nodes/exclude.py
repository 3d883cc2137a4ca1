"""The list of nodes that no job should get: one host a line, with the date and the reason as a comment.

    node-a07    # 2026-11-03T02:14:09+01:00 preflight: matmul 41% of the other nodes' speed

Lines of people are kept as they are; an empty line or one that begins with # says nothing. The preflight,
`moe-exp watch blame` and people add to it; run_slurm.sh and `moe-exp watch exclude FILE --slurm` read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from moe_exp.host.files import write_atomically

EXCLUDE_NODES = "exclude_nodes.txt"  # in RUN_DIR

# SLURM takes a short host name, and what hostnames may be made of (RFC 1123) needs no quotes.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


def read_excluded(path: Path) -> list[str]:
    """Host names of a list in its order, each once; none where there is no file.

    Raises:
        ValueError: a line holds something that is no host name.
    """
    return list(dict.fromkeys(host for host, _ in _entries(path)))


def read_reasons(path: Path) -> dict[str, str]:
    """Host name to date and reason of a list."""
    reasons: dict[str, str] = {}
    for host, comment in _entries(path):
        reasons.setdefault(host, comment)
    return reasons


def exclude(path: Path, host: str, reason: str) -> bool:
    """Adds a host to a list, which is made where there is none; returns False where the host is in it
    already.

    Args:
        path: of the list.
        host: its name; a domain is cut off, since SLURM's names of nodes have none.
        reason: in a line.

    Raises:
        ValueError: `host` is no host name.
    """
    host = slurm_name(host)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path):
        if host in read_excluded(path):
            return False
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before and not before.endswith("\n"):
            before += "\n"
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        write_atomically(path, f"{before}{host:<24}  # {now} {' '.join(reason.split())}\n")
    return True


def readmit(path: Path, hosts: Iterable[str]) -> list[str]:
    """Takes hosts out of a list; returns those that were in it."""
    gone = {slurm_name(host) for host in hosts}
    if not path.exists():
        return []
    with _held(path):
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.partition("#")[0].strip() not in gone]
        found = [host for host in read_excluded(path) if host in gone]
        if found:
            write_atomically(path, "".join(f"{line}\n" for line in kept))
    return found


def slurm_option(hosts: Iterable[str]) -> str:
    """`--exclude=a,b` for sbatch and srun; empty without hosts."""
    names = list(dict.fromkeys(map(slurm_name, hosts)))
    return f"--exclude={','.join(names)}" if names else ""


def slurm_name(host: str) -> str:
    """A host's name as SLURM has it, without its domain.

    Raises:
        ValueError: it is none.
    """
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"host={host!r}: is not a host name. Fix: give letters, digits, '-', '_' and '.' alone."
        )
    is_address = re.fullmatch(r"[\d.]+", host)
    return host if is_address else host.partition(".")[0]


def _entries(path: Path) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8").splitlines() if path.exists() else [], start=1
    ):
        host, _, comment = line.partition("#")
        if not host.strip():
            continue
        try:
            found.append((slurm_name(host.strip()), comment.strip()))
        except ValueError:
            raise ValueError(
                f"{path}: line {number} holds {host.strip()!r}, no host name. Fix: one host a line, reasons"
                " after #."
            ) from None
    return found


def _held(path: Path) -> FileLock:
    """Two nodes that add at the same moment must not lose a line."""
    return FileLock(path.with_name(f".{path.name}.lock"), timeout=30)
