"""What else may change where a run goes on: all that says how a step is computed, and nothing of what it computes.

Each case trains 8 steps in one go with some settings, and goes on with others from the checkpoint of the 4th.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from legs import Leg, Step, deviations, run_legs, write_data

STEPS, SAVED = 8, 4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data of all cases and their checkpoints."""
    folder = tmp_path_factory.mktemp("other_settings")
    write_data(folder)
    return folder


@cache
def whole(folder: Path, *settings: tuple[str, Any]) -> tuple[Path, list[Step]]:
    """Checkpoints and all steps of an uninterrupted run; runs of the same settings are one."""
    checkpoints = folder / "_".join(f"{name}-{value}" for name, value in settings).replace("/", "")
    (steps,) = run_legs([Leg({"train_data": str(folder / "tokens"), **dict(settings)}, None, STEPS, {SAVED: checkpoints})])
    return checkpoints, steps


def resumed(folder: Path, before: dict[str, Any], after: dict[str, Any], **expected: Any) -> dict[str, float]:
    """Goes on with the settings `after` on top of `before`; deviations from an uninterrupted run with `expected` on top of `before`."""
    checkpoints, _ = whole(folder, *({"gpus_per_node": 1} | before).items())
    (steps,) = run_legs([Leg({"train_data": str(folder / "tokens"), "gpus_per_node": 1} | before | after, checkpoints, STEPS - SAVED)])
    _, uninterrupted = whole(folder, *({"gpus_per_node": 1} | before | expected).items())
    assert [step.tokens_per_expert for step in steps] == [step.tokens_per_expert for step in uninterrupted[SAVED:]]
    return deviations(steps, uninterrupted[SAVED:])


def check(found: dict[str, float]) -> None:
    assert {name: value for name, value in found.items() if not value <= (1e-5 if name == "grad_norm" else 1e-6)} == {}


TP2, PP2, EP2, DP2 = ({"gpus_per_node": 2} | layout for layout in ({"tp": 2}, {"pp": 2}, {"ep": 2}, {}))
BIAS = {"router_score": "sigmoid", "router_bias_update_rate": 0.01, "aux_loss_type": "seq_aux_loss,global_aux_loss"}
FIRST_DENSE = {"first_k_dense": 2, "shared_expert_size": 16, "shared_expert_gate": True, "tie_embeddings": True, "qk_norm": True}
MIXED = {"moe_layer_freq": "0,1,0,1"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # A balancing loss per sequence: over a micro-batch it is another function for micro-batches of another size.
    "micro-batch size": ({"aux_loss_type": "seq_aux_loss"}, {"mbsz": 4}),
    "moe to dmoe": ({"moe_type": "moe", "capacity_factor": 8}, {"moe_type": "dmoe", "capacity_factor": 0}),
    "dmoe to moe": ({}, {"moe_type": "moe", "capacity_factor": 8}),
    "grouped experts": ({"expert_backend": "loop"}, {"expert_backend": "torch"}),
    "experts one by one": ({"expert_backend": "torch"}, {"expert_backend": "loop"}),
    "distributed optimizer off": (EP2, {"distributed_optimizer": False}),
    "distributed optimizer on": ({"distributed_optimizer": False}, EP2),
    "CP2": ({}, {"gpus_per_node": 2, "cp": 2}),
    "uneven stages": (PP2 | {"first_stage_layers": 1}, {"first_stage_layers": 0, "last_stage_layers": 1}),
    "stages to one": (PP2 | {"last_stage_layers": 1}, {"gpus_per_node": 1, "pp": 1, "last_stage_layers": 0}),
    "virtual stages to none": (PP2 | {"vpp": 2}, {"vpp": None}),
    "bias and fractions to DP2": (BIAS, DP2),
    "bias and fractions to PP2": (BIAS, PP2),
    # The first stage has no expert, and so another chain of optimizers than the second.
    "first dense to a stage without experts": (FIRST_DENSE, PP2),
    "a stage without experts to TP2": (FIRST_DENSE | PP2, TP2 | {"pp": 1}),
    "dense and MoE in turn to TP2": (MIXED, TP2),
    "dispatcher": (EP2, {"dispatcher": "allgather"}),
    "recompute and overlap": (DP2, {"recompute": "full", "overlap": "true"}),
}
FAST = ["moe to dmoe", "distributed optimizer off", "first dense to a stage without experts"]


@pytest.mark.parametrize("case", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES])
def test_goes_on(case, folder):
    before, after = CASES[case]
    check(resumed(folder, before, after))
