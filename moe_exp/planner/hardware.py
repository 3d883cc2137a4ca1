"""What a GPU (or a node of processors) can do: data files of `profiles/`, each number with its source. No
torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "profiles"
_ALIASES = {
    "a100": "A100-80GB",
    "v100": "V100-32GB",
    "h100": "H100-80GB",
    "h200": "H200-141GB",
    "b200": "B200-180GB",
}

_ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell", "cpu")


@dataclass(frozen=True)
class Hardware:
    """One device and what connects it with others.

    Attributes:
        name: as a CSV or `--gpu` gives it.
        architecture: volta, ampere, hopper, blackwell, or cpu.
        memory_bytes: memory of the device.
        dense_flops: peak of the matrix units by compute type (fp32, bf16, fp16), multiply and add counted as
            two, in FLOP/s.
        memory_bytes_per_second: bandwidth of the device's memory.
        num_units: streaming multiprocessors (SMs), over which a product's tiles are spread; 1 on processors.
        node_bytes_per_second: what one device sends to others of its node, in one direction (NVLink).
        network_bytes_per_second: what one device sends to other nodes, in one direction.
        node_latency_seconds: of a message inside a node.
        network_latency_seconds: of a message between nodes.
        gpus_per_node: devices of the usual node.
        network_share: share of the network's bandwidth that rings of many nodes reach, in that of the
            measured clusters.
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
    network_share: float
    matrix_share: float

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on processors."""
        return self.architecture == "cpu"

    @property
    def runs_kernels(self) -> bool:
        """Whether it is a GPU of compute capability 8.0 or newer, which `layers/kernels` asks for."""
        return self.architecture not in ("volta", "cpu")


def hardware_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json") if "dense_flops" in path.read_text())


@cache
def profile_of(device: str) -> str:
    """The profile of a device by its name, `NVIDIA A100-SXM4-80GB`: one all words of whose name are in it;
    empty: there is none.
    """
    words = set(device.upper().replace("-", " ").split())
    return next((name for name in hardware_names() if set(name.upper().split("-")) <= words), "")


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
        raise ValueError(
            f"GPU={name}: is not a known device. Fix: use one of {names}, or the path of a JSON file of that"
            " form."
        )
    return _read(path)


def _read(path: Path) -> Hardware:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: is not JSON. Fix: write it as the profiles of the package are.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not a JSON object. Fix: write it as the profiles of the package are.")
    values: dict[str, Any] = {}
    for field in fields(Hardware):
        if field.name not in content:
            raise ValueError(
                f"{path}: {field.name} is missing. Fix: write it as the profiles of the package have it."
            )
        # Every number stands with its source: {"value": ..., "source": "..."}.
        entry = content[field.name]
        values[field.name] = value = entry["value"] if isinstance(entry, dict) and "value" in entry else entry
        if problem := _value_problem(field.name, value):
            raise ValueError(f"{path}: {field.name}={value}: {problem}. Fix: mend it.")
    return Hardware(**values)


def _value_problem(name: str, value: Any) -> str:
    """What is wrong with a number of a profile, or nothing."""
    if name == "name":
        return "" if isinstance(value, str) and value else "must be a word"
    if name == "architecture":
        return "" if value in _ARCHITECTURES else f"must be one of {', '.join(_ARCHITECTURES)}"
    if name == "dense_flops":
        is_right = (
            isinstance(value, dict)
            and value.keys() >= {"fp32", "bf16", "fp16"}
            and all(map(_is_positive, value.values()))
        )
        return "" if is_right else "must have a number more than 0 for each of fp32, bf16 and fp16"
    if name in ("num_units", "gpus_per_node"):
        return (
            ""
            if _is_positive(value) and isinstance(value, int)
            else "must be a number more than 0, and whole"
        )
    return "" if _is_positive(value) else "must be a number more than 0"


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
