"""Models, devices and constants of the planner's tests: priors, so that none depends on what was fitted."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from moe_exp.config import Config, load_config
from moe_exp.planner.costs.memory import MemoryConstants
from moe_exp.planner.costs.timing import TimeConstants
from moe_exp.planner.hardware import Hardware, load_hardware
from moe_exp.planner.prediction import Constants
from moe_exp.planner.search.topology import Search, search

ERRORS = {"memory_error": 0.05, "time_error": 0.05}
PRIORS = Constants(MemoryConstants(), TimeConstants(), **ERRORS, hardware=("A100-80GB",))
A100 = load_hardware("A100-80GB")
# 176 billion parameters, as trained on 48 nodes of 8 A100: a large vocabulary.
LARGE = {
    "preset": "reference", "use_moe": False, "num_layers": 70, "hidden_size": 14336, "ffn_hidden_size": 57344,
    "num_heads": 112, "num_query_groups": 112, "activation": "gelu", "vocab_size": 250880,
    "tie_embeddings": True, "gbsz": 2048, "gpus_per_node": 8,
}  # fmt: skip
SMALL = {
    "preset": "reference", "num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_heads": 8,
    "num_query_groups": 4, "num_experts": 8, "vocab_size": 8192, "gbsz": 32, "gpus_per_node": 4,
}  # fmt: skip


def model(base: dict[str, object], **settings: object) -> Config:
    """A configuration that does not depend on the environment or on this machine."""
    return load_config({name: str(value) for name, value in (base | settings).items()}, {})


@cache
def found(nnodes: int, **settings: object) -> Search:
    """The search for the 176B model."""
    return search(model(LARGE, nnodes=nnodes, **settings), A100, constants=PRIORS)


def total(parts: dict[str, float]) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def with_memory(gibibytes: float) -> Hardware:
    """An A100 with another memory."""
    return replace(A100, memory_bytes=gibibytes * 2**30)


def write_profile(folder: Path) -> Path:
    """The priors as a file for --profile."""
    fit = {"left_out_90_percent_within": 0.05}
    constants = {"memory": asdict(PRIORS.memory), "time": asdict(PRIORS.time)}
    path = folder / "profile.json"
    profile = {"constants": constants, "fit": {"memory": fit, "time": fit}, "hardware": ["A100-80GB"]}
    path.write_text(json.dumps(profile))
    return path
