"""Which machine, which versions, and when: what the results of the GPU benchmarks say of themselves."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl",
    "scattermoe", "grouped-gemm", "nv-grouped-gemm", "transformer-engine", "megatron-core",
)  # fmt: skip


def origin(device: torch.device) -> dict[str, Any]:
    """`date` (UTC) and `machine` of results."""
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "machine": machine(device)}


def machine(device: torch.device) -> dict[str, Any]:
    """Card, driver and versions."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
        }
        facts["driver"] = _output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        ).split("\n")[0]
    else:
        facts["card"] = f"none, {platform.machine()} CPU"
    return facts | {"versions": {name: found for name in PACKAGES if (found := _installed(name))}}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
