"""The list of nodes that jobs must avoid: one host per line, with date and reason as a comment.

    node-a07    # 2026-11-03T02:14:09+01:00 preflight: matmul 41% of the other nodes' speed

The preflight, `moe-exp watch blame` and people add lines; run_slurm.sh and `moe-exp watch exclude FILE
--slurm` read them. Manual edits are preserved; empty lines and lines that start with # are ignored.
"""

import logging
import os
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from moe_exp.host.exit_codes import EXCLUDE_FILE
from moe_exp.host.files import expanded, write_atomically

logger = logging.getLogger(__name__)

EXCLUDE_NODES = "exclude_nodes.txt"  # in RUN_DIR

# Characters of a host name (RFC 1123), none of which a shell has to quote.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_LONGEST_SHOWN = 100  # characters


def exclude_list(run_dir: str) -> Path:
    """Path of a job's exclude list: set by the launcher, else by EXCLUDE_FILE, else a file in RUN_DIR."""
    given = os.environ.get(EXCLUDE_FILE) or os.environ.get("EXCLUDE_FILE")
    return expanded(given or Path(run_dir) / EXCLUDE_NODES).absolute()


def read_excluded(path: Path) -> dict[str, str]:
    """Maps each host name to its date and reason, in the order of the file. If several lines name a host,
    the first line counts. Returns {} if there is no file. Raises ValueError on an invalid line.
    """
    reasons: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        host, _, comment = line.partition("#")
        if not host.strip():
            continue
        try:
            reasons.setdefault(slurm_name(host.strip()), comment.strip())
        except ValueError:
            rule = f"line {number}: {host.strip()[:_LONGEST_SHOWN]!r} is not a host name"
            fix = "write one host per line; a reason may follow after #"
            raise ValueError(f"{path}: {rule}. Fix: {fix}.") from None
    return reasons


def exclude(path: Path, host: str, reason: str) -> bool:
    """Adds a host to the list, without its domain. Returns False if already listed; ValueError if invalid."""
    host = slurm_name(host)
    path.parent.mkdir(parents=True, exist_ok=True)
    # two nodes that add a line at the same time must not lose one
    with _lock(path):
        if host in read_excluded(path):
            return False
        before = _text(path)
        # a manual edit may leave the last line without a newline
        if before and not before.endswith("\n"):
            before += "\n"
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        write_atomically(path, f"{before}{host:<24}  # {now} {' '.join(reason.split())}\n")
    return True


def exclude_if_possible(path: Path, host: str, reason: str) -> None:
    """Like `exclude`, but only logs a warning on failure, so that the run does not end."""
    try:
        exclude(path, host, reason)
    except (OSError, ValueError, Timeout) as error:
        logger.warning("cannot add %s to %s: %s", host, path, error)


def readmit(path: Path, hosts: Iterable[str]) -> list[str]:
    """Removes hosts from the list; returns the removed hosts."""
    gone = set(map(slurm_name, hosts))
    if not path.exists():
        return []
    with _lock(path):
        if found := [host for host in read_excluded(path) if host in gone]:
            names = ((line, line.partition("#")[0].strip()) for line in _text(path).splitlines())
            kept = [line for line, name in names if not name or slurm_name(name) not in gone]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
    return found


def slurm_option(hosts: Collection[str]) -> str:
    """The sbatch/srun option `--exclude=a,b` for `hosts` (names used by SLURM); '' if there are no hosts."""
    return f"--exclude={','.join(hosts)}" if hosts else ""


def slurm_name(host: str) -> str:
    """Host name in SLURM: without the domain, or a whole IP address. Raises ValueError if invalid."""
    if not _HOST.fullmatch(host):
        fix = "use only letters, digits, '-', '_' and '.'"
        raise ValueError(f"host={host[:_LONGEST_SHOWN]!r}: is not a host name. Fix: {fix}.")
    return host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]


def _text(path: Path) -> str:
    """The file's text; empty if there is no file."""
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise ValueError(f"{path}: not a regular file. Fix: specify a text file with one host per line.")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f".{path.name}.lock"), timeout=30)
