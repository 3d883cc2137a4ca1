"""GPU health from nvidia-smi: memory errors, pending row remaps, throttling, links. No torch."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator, Sequence

# Names of `nvidia-smi --help-query-gpu`; drivers before 535 have another name for the clock reasons.
FIELDS = (
    "index", "name", "pci.bus_id", "driver_version", "temperature.gpu", "power.draw",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total",
    "remapped_rows.pending", "remapped_rows.failure", "retired_pages.pending",
    "clocks_event_reasons.active", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
_OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}

# nvml.h, nvmlClocksEventReason*: those that indicate a problem; idle, power cap and settings are normal.
THROTTLING = {
    0x8: "hardware slowdown", 0x20: "too hot (driver)", 0x40: "too hot (hardware)", 0x80: "power brake",
}  # fmt: skip


def query_gpus() -> tuple[list[dict[str, str]], str]:
    """FIELDS of each GPU from nvidia-smi, except those an older driver rejects, and the error or ''."""
    fields = list(FIELDS)
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
        return _rows(fields, done.stdout), ""
    return [], "nvidia-smi knows none of the fields"


def _rows(fields: Sequence[str], text: str) -> list[dict[str, str]]:
    names = {new: old for old, new in _OLD_NAMES.items()}
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    columns = [names.get(field, field) for field in fields]
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(fields)]


def gpu_findings(gpus: Sequence[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Problems of GPUs from `query_gpus`, as a grade of `verdicts` and a line."""
    for gpu in gpus:
        where = f"GPU {gpu.get('index', '?')} ({gpu.get('pci.bus_id', 'unknown bus')})"
        if (errors := _number(gpu.get("ecc.errors.uncorrected.volatile.total"))) > 0:
            yield "failed", f"{where}: {errors} uncorrectable memory errors (ECC) since the driver was loaded"
        if _is_set(gpu.get("remapped_rows.failure")):
            yield "failed", f"{where}: a row of its memory could not be remapped"
        if _is_set(gpu.get("remapped_rows.pending")) or _is_set(gpu.get("retired_pages.pending")):
            yield "warning", f"{where}: damaged memory waits for a reset of the GPU to be taken out of use"
        if (lifetime := _number(gpu.get("ecc.errors.uncorrected.aggregate.total"))) > 0 >= errors:
            yield "warning", f"{where}: {lifetime} uncorrectable memory errors (ECC) in its life"
        reasons = gpu.get("clocks_event_reasons.active", "")
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
        if found := [name for bit, name in THROTTLING.items() if bits & bit]:
            heat = f"{gpu.get('temperature.gpu', '?')} C"
            yield "slow", f"{where}: clocks are held down: {', '.join(found)}, {heat}"
        width, most = _number(gpu.get("pcie.link.width.current")), _number(gpu.get("pcie.link.width.max"))
        if 0 < width < most:
            yield "warning", f"{where}: PCIe has {width} of {most} lanes"


def _number(text: str | None) -> int:
    match = re.fullmatch(r"\d+", text or "")
    return int(match[0]) if match else 0  # [N/A], [Not Supported], [Unknown Error]


def _is_set(text: str | None) -> bool:
    """`Yes`, or a count from newer drivers."""
    return text == "Yes" or _number(text) > 0
