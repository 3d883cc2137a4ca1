"""What a GPU (or a node of processors) can do: data files of `profiles/`, each number with its source. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "profiles"
_ALIASES = {"a100": "A100-80GB", "v100": "V100-32GB", "h100": "H100-80GB", "h200": "H200-141GB", "b200": "B200-180GB"}


@dataclass(frozen=True)
class Hardware:
    """One device and what connects it with others.

    Attributes:
        name: as a CSV or `--gpu` gives it.
        architecture: volta, ampere, hopper, blackwell, or cpu.
        memory_bytes: memory of the device.
        dense_flops: peak of the matrix units by compute type (fp32, bf16, fp16), multiply and add counted as two, in FLOP/s.
        memory_bytes_per_second: bandwidth of the device's memory.
        num_units: streaming multiprocessors (SMs), over which a product's tiles are spread; 1 on processors.
        node_bytes_per_second: what one device sends to others of its node, in one direction (NVLink).
        network_bytes_per_second: what one device sends to other nodes, in one direction.
        node_latency_seconds: of a message inside a node.
        network_latency_seconds: of a message between nodes.
        gpus_per_node: devices of the usual node.
        matrix_share: share of dense_flops that large products reach, in that of an A100.
    """

    name: str
    architecture: str
    memory_bytes: float
    dense_flops: dict[str, float]
    memory_bytes_per_second: float
    num_units: int
    node_bytes_per_second: float
    network_bytes_per_second: float
    node_latency_seconds: float
    network_latency_seconds: float
    gpus_per_node: int
    matrix_share: float

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on processors."""
        return self.architecture == "cpu"


def hardware_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json") if "dense_flops" in path.read_text())


@cache
def load_hardware(name: str) -> Hardware:
    """A profile of the package by name, or a JSON file of the same form by path.

    Raises:
        ValueError: there is no such profile, or a number is missing in it.
    """
    by_name = {known.lower(): known for known in hardware_names()}
    known = _ALIASES.get(name.lower()) or by_name.get(name.lower())
    path = PROFILES / f"{known}.json" if known else Path(name)
    if path.suffix != ".json" or not path.exists():
        names = ", ".join(by_name.values())
        raise ValueError(f"GPU={name}: is not a known device. Fix: use one of {names}, or the path of a JSON file of that form.")
    return _read(path)


def _read(path: Path) -> Hardware:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: is not JSON. Fix: write it as the profiles of the package are.") from None
    values: dict[str, Any] = {}
    for field in fields(Hardware):
        if field.name not in content:
            raise ValueError(f"{path}: {field.name} is missing. Fix: write it as the profiles of the package have it.")
        # Every number stands with its source: {"value": ..., "source": "..."}.
        entry = content[field.name]
        values[field.name] = value = entry["value"] if isinstance(entry, dict) and "value" in entry else entry
        for number in value.values() if isinstance(value, dict) else [value]:
            if field.name not in ("name", "architecture") and not (isinstance(number, (int, float)) and number > 0):
                raise ValueError(f"{path}: {field.name}={number}: must be a number more than 0. Fix: mend it.")
    return Hardware(**values)
