"""Figures of GPUs (or nodes of processors): the files of `profiles/`, with sources. No torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from moe_exp.host.devices import Nodes
from moe_exp.host.files import read_json

PROFILES = Path(__file__).parent / "profiles"
DEFAULT_GPU = "A100-80GB"
_ALIASES = {
    "a100": "A100-80GB", "v100": "V100-32GB", "h100": "H100-80GB", "h200": "H200-141GB", "b200": "B200-180GB",
    "gb200": "GB200-186GB", "b300": "B300-288GB", "gb300": "GB300-288GB", "mi300x": "MI300X-192GB",
}  # fmt: skip
_ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell", "blackwell_ultra", "cdna3", "cpu")


@dataclass(frozen=True)
class Hardware:
    """One device and what connects it with others."""

    name: str  # as a CSV or `--gpu` gives it
    architecture: str  # volta, ampere, hopper, blackwell, blackwell_ultra, cdna3, or cpu
    memory_bytes: float  # memory of the device
    # peak of the matrix units by compute type (fp32, bf16, fp16, and fp8 if there is one), multiply and add
    # counted as two, in FLOP/s
    dense_flops: dict[str, float]
    memory_bytes_per_second: float  # bandwidth of the device's memory
    # streaming multiprocessors (SMs), over which a product's tiles are spread; 1 on processors
    num_units: int
    node_bytes_per_second: float  # what one device sends to others of its node, in one direction (NVLink)
    network_bytes_per_second: float  # what one device sends to other nodes, in one direction
    node_latency_seconds: float  # of a message inside a node
    network_latency_seconds: float  # of a message between nodes
    gpus_per_node: int  # devices of the usual node
    # share of the network's bandwidth that rings of many nodes reach, in that of the measured clusters
    network_share: float
    matrix_share: float  # share of dense_flops that large products reach, in that of an A100
    # devices that are connected as those of one node are: 72 for NVL72; not given: those of a node
    gpus_per_link_domain: int = 0
    # of softmax, by the special function units (MUFU.EX2); 0: not counted beside attention's products
    exponentials_per_second: float = 0.0
    watts: float = 1000.0  # power limit, where the speed of products depends on it: Blackwell

    @property
    def is_recent(self) -> bool:
        """Whether it is newer than Ampere: `TimeConstants` has other constants for such devices."""
        return self.architecture == "cdna3" or self.has_published_runs

    @property
    def has_published_runs(self) -> bool:
        """Whether `profiles/public_runs.csv` has runs on devices like it."""
        return self.architecture in ("hopper", "blackwell", "blackwell_ultra")

    def link_domain(self, gpus_per_node: int) -> int:
        """Devices that are connected as those of a node are, with nodes of `gpus_per_node`."""
        return max(self.gpus_per_link_domain, gpus_per_node)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on processors."""
        return self.architecture == "cpu"

    @property
    def nodes(self) -> Nodes:
        """The usual nodes, by which settings get their defaults."""
        return Nodes(gpus=0 if self.is_cpu else self.gpus_per_node)

    @property
    def runs_kernels(self) -> bool:
        """Whether it is a GPU of compute capability 8.0 or newer, which `layers/kernels` asks for."""
        return self.architecture not in ("volta", "cdna3", "cpu")


def hardware_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return list(_names(PROFILES))


@cache
def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.json") if "dense_flops" in path.read_text()))


def hardware_profiles() -> dict[str, Any]:
    """Profiles as they are in their files, each number with its source."""
    return {name: read_json(PROFILES / f"{name}.json") for name in hardware_names()}


@cache
def profile_of(device: str) -> str:
    """The profile whose name's words are all in a device's name, `NVIDIA A100-SXM4-80GB`; or empty."""
    words = set(device.upper().replace("-", " ").split())
    return next((name for name in hardware_names() if set(name.upper().split("-")) <= words), "")


def load_hardware(name: str) -> Hardware:
    """A profile by name, or a JSON file of that form by path; a ValueError if it is no such thing."""
    by_name = {known.lower(): known for known in hardware_names()}
    known = _ALIASES.get(name.lower()) or by_name.get(name.lower())
    path = PROFILES / f"{known}.json" if known else Path(name)
    if path.suffix != ".json" or not path.exists():
        fix = f"use one of {', '.join(by_name.values())}, or the path of a JSON file of that form"
        raise ValueError(f"GPU={name}: is not a known device. Fix: {fix}.")
    return _read(path)


def _read(path: Path) -> Hardware:
    try:
        content = read_json(path)
    except ValueError:
        raise ValueError(f"{path}: is not JSON. Fix: write it as the profiles of the package are.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not a JSON object. Fix: write it as the profiles of the package are.")
    values: dict[str, Any] = {}
    for field in fields(Hardware):
        if field.name not in content and field.default is not MISSING:
            continue
        if field.name not in content:
            raise ValueError(
                f"{path}: {field.name} is missing. Fix: write it as the profiles of the package have it."
            )
        # Every number stands with its source: {"value": ..., "source": "..."}.
        entry = content[field.name]
        values[field.name] = value = entry["value"] if isinstance(entry, dict) and "value" in entry else entry
        if problem := _value_problem(field.name, value):
            raise ValueError(f"{path}: {field.name}={value}: {problem}. Fix: correct it.")
    return Hardware(**values)


def _value_problem(name: str, value: Any) -> str:
    """Problem with a number of a profile, or empty."""
    holds, rule = _is_positive(value), "a number more than 0"
    if name == "name":
        holds, rule = isinstance(value, str) and bool(value), "a word"
    elif name == "architecture":
        holds, rule = value in _ARCHITECTURES, f"one of {', '.join(_ARCHITECTURES)}"
    elif name == "dense_flops":
        has_types = isinstance(value, dict) and value.keys() >= {"fp32", "bf16", "fp16"}
        if has_types and all(map(_is_positive, value.values())):
            return ""
        return "must have a number more than 0 for each of fp32, bf16 and fp16"
    elif name in ("num_units", "gpus_per_node", "gpus_per_link_domain"):
        holds, rule = holds and isinstance(value, int), "a number more than 0, and whole"
    return "" if holds else f"must be {rule}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
