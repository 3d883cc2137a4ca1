"""The list of nodes to exclude from jobs: one host a line, with date and reason as a comment.

    node-a07    # 2026-11-03T02:14:09+01:00 preflight: matmul 41% of the other nodes' speed

Lines written by people are kept; empty lines and lines that start with # are ignored. The preflight,
`moe-exp watch blame` and people add to it; run_slurm.sh and `moe-exp watch exclude FILE --slurm` read it.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from moe_exp.host.files import write_atomically

EXCLUDE_NODES = "exclude_nodes.txt"  # in RUN_DIR

# SLURM uses short host names; host name characters (RFC 1123) need no quotes.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_LONGEST_SHOWN = 100  # characters


def read_excluded(path: Path) -> list[str]:
    """Unique host names in file order, empty without a file; raises ValueError on an invalid line."""
    return list(read_reasons(path))


def read_reasons(path: Path) -> dict[str, str]:
    """Maps host names to date and reason; of a host that is listed twice, the first."""
    reasons: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        host, _, comment = line.partition("#")
        if not host.strip():
            continue
        try:
            reasons.setdefault(slurm_name(host.strip()), comment.strip())
        except ValueError:
            rule = f"line {number} holds {host.strip()[:_LONGEST_SHOWN]!r}, no host name"
            raise ValueError(f"{path}: {rule}. Fix: one host a line, reasons after #.") from None
    return reasons


def exclude(path: Path, host: str, reason: str) -> bool:
    """Adds a host, without its domain; False if it is listed, ValueError if its name is invalid."""
    host = slurm_name(host)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two nodes that add at the same moment must not lose a line.
    with _lock(path):
        if host in read_reasons(path):
            return False
        before = _text(path)
        # a person's last line may have no newline
        if before and not before.endswith("\n"):
            before += "\n"
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        write_atomically(path, f"{before}{host:<24}  # {now} {' '.join(reason.split())}\n")
    return True


def readmit(path: Path, hosts: Iterable[str]) -> list[str]:
    """Removes hosts from the list; returns those that were in it."""
    gone = set(map(slurm_name, hosts))
    if not path.exists():
        return []
    with _lock(path):
        lines = _text(path).splitlines()
        kept = [line for line in lines if line.partition("#")[0].strip() not in gone]
        found = [host for host in read_reasons(path) if host in gone]
        if found:
            write_atomically(path, "".join(f"{line}\n" for line in kept))
    return found


def slurm_option(hosts: Iterable[str]) -> str:
    """`--exclude=a,b` for sbatch and srun; empty without hosts."""
    names = list(dict.fromkeys(map(slurm_name, hosts)))
    return f"--exclude={','.join(names)}" if names else ""


def slurm_name(host: str) -> str:
    """Host name without its domain, as SLURM uses it; raises ValueError if it is not valid."""
    if not _HOST.fullmatch(host):
        fix = "give letters, digits, '-', '_' and '.' alone"
        raise ValueError(f"host={host[:_LONGEST_SHOWN]!r}: is not a host name. Fix: {fix}.")
    is_address = re.fullmatch(r"[\d.]+", host)
    return host if is_address else host.partition(".")[0]


def _text(path: Path) -> str:
    """The file's text; empty without a file."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path}: is not a file. Fix: name a file with one host a line.")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f".{path.name}.lock"), timeout=30)
