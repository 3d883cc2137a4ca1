"""Hardware profiles of GPUs and CPU nodes in `profiles/`, with a source for each number. No torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from moe_exp.host.devices import Nodes
from moe_exp.host.files import read_json

PROFILES = Path(__file__).parent / "profiles"
DEFAULT_GPU = "A100-80GB"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(gt=0, strict=True)]


def _of_all_types(flops: dict[str, float]) -> dict[str, float]:
    if not flops.keys() >= {"fp32", "bf16", "fp16"}:
        raise ValueError("must have a number for each of fp32, bf16 and fp16")
    return flops


@dataclass(frozen=True)
class Hardware:
    """A device and its interconnects."""

    name: Annotated[str, Field(min_length=1)]  # as in a CSV or `--gpu`
    architecture: Literal["volta", "ampere", "hopper", "blackwell", "blackwell_ultra", "cdna3", "cpu"]
    memory_bytes: Count | Positive
    # peak FLOP/s of the matrix units by compute type (fp32, bf16, fp16, and fp8 if supported); a multiply-add
    # counts as two
    dense_flops: Annotated[dict[str, Positive], AfterValidator(_of_all_types)]
    memory_bytes_per_second: Positive  # memory bandwidth
    num_units: Count  # streaming multiprocessors (SMs), which share the tiles of a product; 1 on CPUs
    node_bytes_per_second: Positive  # one device to others of its node, in one direction (NVLink)
    network_bytes_per_second: Positive  # one device to other nodes, in one direction
    node_latency_seconds: Positive  # of a message inside a node
    network_latency_seconds: Positive  # of a message between nodes
    gpus_per_node: Count  # devices in a typical node
    # share of the network's bandwidth that rings over many nodes reach, relative to the measured clusters
    network_share: Positive
    matrix_share: Positive  # share of dense_flops that large products reach, relative to an A100
    gpus_per_link_domain: Count = 0  # devices connected by NVLink, such as 72 for NVL72; 0: those of a node
    # softmax exponentials by the special function units (MUFU.EX2); 0: not counted
    exponentials_per_second: Positive = 0.0
    watts: Positive = 1000.0  # power limit, which determines the speed of products on Blackwell

    @property
    def is_recent(self) -> bool:
        """Whether the device is newer than Ampere; time predictions use other constants for such devices."""
        return self.architecture not in ("cpu", "volta", "ampere")

    @property
    def has_published_runs(self) -> bool:
        """Whether `profiles/public_runs.csv` contains runs on similar devices."""
        return self.architecture in ("hopper", "blackwell", "blackwell_ultra")

    def link_domain(self, gpus_per_node: int) -> int:
        """Returns how many devices NVLink connects if each node has `gpus_per_node` devices."""
        return max(self.gpus_per_link_domain, gpus_per_node)

    @property
    def is_cpu(self) -> bool:
        return self.architecture == "cpu"

    @property
    def nodes(self) -> Nodes:
        """Typical node configuration for the device, from which default settings are derived."""
        return Nodes(gpus=0 if self.is_cpu else self.gpus_per_node)

    @property
    def runs_kernels(self) -> bool:
        """Whether the device has compute capability 8.0 or newer, which `layers/kernels` requires."""
        return self.architecture not in ("volta", "cdna3", "cpu")


@cache
def hardware_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json") if "dense_flops" in path.read_text()))


@cache
def profile_of(device: str) -> str:
    """Returns the name of the profile for a device such as `NVIDIA A100-SXM4-80GB`, or "" if none fits."""
    # Drivers insert words such as SXM4 or PCIe into the name, so compare sets of words.
    words = set(device.upper().replace("-", " ").split())
    return next((name for name in hardware_names() if set(name.upper().split("-")) <= words), "")


def profile_path(name: str) -> Path:
    """Path of a profile, given by name or as a JSON file. Raises ValueError if the profile is unknown."""
    by_name = {known.lower(): known for known in hardware_names()}
    # `h100` is short for `H100-80GB`
    short = {lower.partition("-")[0]: known for lower, known in by_name.items()}
    known = (short | by_name).get(name.lower())
    path = PROFILES / f"{known}.json" if known else Path(name)
    if path.suffix != ".json" or not path.exists():
        fix = f"use one of {', '.join(by_name.values())}, or the path of a JSON profile"
        raise ValueError(f"GPU={name}: unknown device. Fix: {fix}.")
    return path


def load_hardware(name: str) -> Hardware:
    """Loads a profile. `name` is a profile's name or a JSON file in profile format. ValueError if invalid."""
    path, fix = profile_path(name), "use the format of the files in moe_exp/planner/profiles"
    content = read_json(path, fix=fix)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must contain a JSON object. Fix: {fix}.")
    # entries are values, or {"value": ..., "source": "..."}
    values = {
        key: one["value"] if isinstance(one, dict) and "value" in one else one for key, one in content.items()
    }
    try:
        return _FORM.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field, rule = str(first["loc"][0]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            raise ValueError(f"{path}: {field} is missing. Fix: {fix}.") from None
        rule = rule.replace("Input should", "must")
        raise ValueError(f"{path}: {field}={values[field]}: {rule}. Fix: {fix}.") from None


def hardware_profiles(name: str) -> dict[str, Any]:
    """Returns a profile's contents, including the sources. If `name` is empty, returns all profiles."""
    names = [name] if name else hardware_names()
    return {load_hardware(one).name: read_json(profile_path(one)) for one in names}


_FORM = TypeAdapter(Hardware)
