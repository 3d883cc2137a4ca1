"""Facts about a node: disks, shared memory, versions, kernel messages, GPUs, SLURM's host names. No torch."""

import csv
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_exp.runs.run_folder import existing_place, package_versions
from moe_exp.watch.blame import hardware_faults

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")


def host_facts(run_dir: Path) -> dict[str, Any]:
    """Facts about this node in JSON types; does not create `run_dir`."""
    disks = {
        "RUN_DIR": disk(existing_place(run_dir.expanduser().absolute())),
        "temporary folder": disk(Path(tempfile.gettempdir())),
        "/dev/shm": disk(Path("/dev/shm")),
    }
    return {"disks": disks, "versions": versions(), "kernel_faults": kernel_faults()}


def disk(path: Path) -> dict[str, Any]:
    """Path and free bytes of a disk, and the error of a write-and-read test ('' if it passed)."""
    if not path.is_dir():
        return {"path": str(path), "free_bytes": None, "problem": "not found"}
    # random bytes, since zeros could come from a hole in the file
    content, problem = os.urandom(1 << 16), ""
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".moe_exp_preflight_") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            problem = "" if file.read() == content else "bytes read differ from bytes written"
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    return {"path": str(path), "free_bytes": shutil.disk_usage(path).free, "problem": problem}


def versions() -> dict[str, str]:
    """Versions of Python, packages, GPU driver and Linux kernel, which should be equal on all nodes."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    found |= {name: version for name, version in package_versions().items() if name in _PACKAGES}
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text(errors="replace") if driver.exists() else ""
    if match := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
        found["driver"] = match[0]
    return found


def kernel_faults() -> list[str]:
    """Hardware faults in kernel messages since boot; empty if the user may not read kernel messages."""
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
            # 01-03 keeps its leading zeros
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{match['head']}{number:0{len(first)}d}{match['tail']}" for number in numbers]
    return hosts


def own_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node's name in SLURM, as SLURM's option --exclude requires it; the host name may differ."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def planned_hosts(num_nodes: int, given: str = "", environ: Mapping[str, str] = os.environ) -> list[str]:
    """Hosts in `given` (default: SLURM_JOB_NODELIST), in NODE_RANK order; [] unless there are `num_nodes`."""
    # a list of another length belongs to another job or has a typo: better no names than wrong ones
    hosts = expanded_hosts(given or environ.get("SLURM_JOB_NODELIST", ""))
    return hosts if len(hosts) == num_nodes else []


# Names from `nvidia-smi --help-query-gpu`; drivers before 535 have another name for the clock reasons.
FIELDS = (
    "index", "name", "pci.bus_id", "driver_version", "temperature.gpu", "power.draw",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total",
    "remapped_rows.pending", "remapped_rows.failure", "retired_pages.pending",
    "clocks_event_reasons.active", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
_OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}

# nvml.h, nvmlClocksEventReason*: only those that indicate a problem; idle, power cap and settings are normal.
THROTTLING = {
    0x8: "hardware slowdown", 0x20: "too hot (driver)", 0x40: "too hot (hardware)", 0x80: "power brake",
}  # fmt: skip


def query_gpus() -> tuple[list[dict[str, str]], str]:
    """Each GPU's values of the FIELDS that nvidia-smi supports, and nvidia-smi's error ('' if no error)."""
    fields = list(FIELDS)
    # nvidia-smi reports only the first unknown field: each round removes or renames one
    for _ in FIELDS:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
        except FileNotFoundError:
            return [], ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"nvidia-smi: {error}"
        unknown = re.search(r'Field "([\w.]+)" is not a valid field to query', done.stdout + done.stderr)
        if unknown and unknown[1] in fields:
            place = fields.index(unknown[1])
            fields[place : place + 1] = [_OLD_NAMES[unknown[1]]] if unknown[1] in _OLD_NAMES else []
            continue
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
            return [], f"nvidia-smi: {' '.join(lines)[:200]}"
        names = {old: new for new, old in _OLD_NAMES.items()}
        columns = [names.get(field, field) for field in fields]
        rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
        return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)], ""
    return [], "nvidia-smi supports none of the queried fields"


def gpu_findings(gpus: Sequence[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields a grade (see verdicts.py) and a line of text for each GPU problem. `gpus`: from `query_gpus`."""
    for gpu in gpus:
        where = f"GPU {gpu.get('index', '?')} ({gpu.get('pci.bus_id', 'unknown bus')})"
        if (errors := _number(gpu.get("ecc.errors.uncorrected.volatile.total"))) > 0:
            yield "failed", f"{where}: {errors} uncorrectable memory errors (ECC) since the driver was loaded"
        if _is_set(gpu.get("remapped_rows.failure")):
            yield "failed", f"{where}: a memory row could not be remapped"
        if _is_set(gpu.get("remapped_rows.pending")) or _is_set(gpu.get("retired_pages.pending")):
            yield "warning", f"{where}: reset required to retire damaged memory"
        if (lifetime := _number(gpu.get("ecc.errors.uncorrected.aggregate.total"))) > 0 >= errors:
            yield "warning", f"{where}: {lifetime} uncorrectable memory errors (ECC) over its lifetime"
        # a bit mask as text, or [N/A]
        reasons = gpu.get("clocks_event_reasons.active", "")
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        if found := [name for bit, name in THROTTLING.items() if bits & bit]:
            heat = f"{gpu.get('temperature.gpu', '?')} C"
            yield "slow", f"{where}: clocks throttled: {', '.join(found)}, {heat}"
        width, most = _number(gpu.get("pcie.link.width.current")), _number(gpu.get("pcie.link.width.max"))
        if 0 < width < most:
            yield "warning", f"{where}: PCIe link uses {width} of {most} lanes"


def _number(text: str | None) -> int:
    match = re.fullmatch(r"\d+", text or "")
    return int(match[0]) if match else 0  # [N/A], [Not Supported], [Unknown Error]


def _is_set(text: str | None) -> bool:
    """Whether a field of nvidia-smi is set: older drivers report `Yes`, newer drivers report a count."""
    return text == "Yes" or _number(text) > 0
