"""Facts about a node: disks, shared memory, versions, kernel messages, SLURM's names. No torch."""

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

from moe_exp.runs.run_folder import existing_place
from moe_exp.watch.nodes.blame import hardware_faults

SHARED_MEMORY = Path("/dev/shm")
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")


def host_facts(run_dir: Path) -> dict[str, Any]:
    """JSON facts of this node; `run_dir` is not created."""
    disks = {
        "RUN_DIR": disk(existing_place(run_dir.expanduser().absolute())),
        "temporary folder": disk(Path(tempfile.gettempdir())),
        "/dev/shm": disk(SHARED_MEMORY),
    }
    return {"disks": disks, "versions": versions(), "kernel_faults": kernel_faults()}


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
    """Versions that must be equal on all nodes: Python, packages, the GPU driver, the kernel."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text(errors="replace") if driver.exists() else ""
    if match := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
        found["driver"] = match[0]
    return found


def kernel_faults() -> list[str]:
    """Hardware faults in the kernel's messages since boot, if this user may read them."""
    try:
        command = ["dmesg", "--time-format", "iso"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return hardware_faults(done.stdout.splitlines())


_ENTRY = re.compile(r"(?P<head>[^,\[\]]*)(\[(?P<numbers>[^\]]*)\])?(?P<tail>[^,\[\]]*)")


def expanded_hosts(text: str) -> list[str]:
    """Expands a host list in SLURM's form, such as `node[01-03,07],login`."""
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
    """This node's name in SLURM, which --exclude needs and which may differ from the host's."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def planned_hosts(num_nodes: int, given: str = "", environ: Mapping[str, str] = os.environ) -> list[str]:
    """Host names by NODE_RANK from `given` or SLURM_JOB_NODELIST, in SLURM's form; empty if unknown."""
    hosts = expanded_hosts(given or environ.get("SLURM_JOB_NODELIST", ""))
    return hosts if len(hosts) == num_nodes else []
