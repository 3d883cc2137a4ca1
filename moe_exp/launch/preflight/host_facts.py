"""What a node has beside its devices: disks, shared memory, versions, kernel messages; and how SLURM calls
the nodes. No torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.watch.nodes.blame import hardware_faults

SHARED_MEMORY = Path("/dev/shm")
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")


def host_facts(run_dir: Path) -> dict[str, Any]:
    """Facts of this node, in values that JSON has.

    Args:
        run_dir: of the run; it is not made.
    """
    return {
        "disks": {
            "RUN_DIR": disk(_existing(run_dir.expanduser().absolute())),
            "temporary folder": disk(Path(tempfile.gettempdir())),
            "/dev/shm": disk(SHARED_MEMORY),
        },
        "versions": versions(),
        "kernel_faults": kernel_faults(),
    }


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def disk(path: Path) -> dict[str, Any]:
    """Path, free bytes, and why a file cannot be written there and read back, or ''."""
    if not path.is_dir():
        return {"path": str(path), "free_bytes": None, "problem": "is not there"}
    return {"path": str(path), "free_bytes": shutil.disk_usage(path).free, "problem": _write_problem(path)}


def _write_problem(folder: Path) -> str:
    content = os.urandom(1 << 16)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moe_exp_preflight_") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return "" if file.read() == content else "other bytes are read than were written"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def versions() -> dict[str, str]:
    """Of what has to be the same on all nodes: Python, packages, the GPU driver, the kernel."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (
        match := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", driver.read_text(errors="replace"))
    ):
        found["driver"] = match[0]
    return found


def kernel_faults() -> list[str]:
    """Faults of the hardware in the kernel's messages since it was booted, where this user may read them."""
    try:
        done = subprocess.run(
            ["dmesg", "--time-format", "iso"], capture_output=True, text=True, errors="replace", timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return hardware_faults(done.stdout.splitlines())


_ENTRY = re.compile(r"(?P<head>[^,\[\]]*)(\[(?P<numbers>[^\]]*)\])?(?P<tail>[^,\[\]]*)")


def expanded_hosts(text: str) -> list[str]:
    """Host names of a list in SLURM's form, such as `node[01-03,07],login`."""
    hosts: list[str] = []
    for entry in re.split(r",(?![^\[]*\])", text):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or not entry.strip():
            continue
        if match["numbers"] is None:
            hosts.append(entry.strip())
            continue
        for part in match["numbers"].split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{match['head']}{number:0{len(first)}d}{match['tail']}" for number in numbers]
    return hosts


def own_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name as SLURM has it, which need not be the host's; --exclude takes no other."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def planned_hosts(num_nodes: int, given: str = "", environ: Mapping[str, str] = os.environ) -> list[str]:
    """Host names by number of the node, as far as they are known before the nodes have come; empty where they
    are not.

    Args:
        num_nodes: of the job.
        given: a list in SLURM's form, in the order of NODE_RANK.
        environ: of this process; SLURM_JOB_NODELIST says it, where srun numbers the nodes.
    """
    hosts = expanded_hosts(given or environ.get("SLURM_JOB_NODELIST", ""))
    return hosts if len(hosts) == num_nodes else []
