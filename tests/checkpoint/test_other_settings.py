"""After 2 of 4 steps a run continues with other settings of how a step is computed: the same numbers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint.legs import MODEL, Leg, Step, deviations, run_legs, write_data
from helpers.ranks import RankError
from moe_exp.config.learning_rate import learning_rate
from moe_exp.host.exit_codes import BAD_INPUT
from moe_exp.launch.launch import train

STEPS, SAVED = 4, 2


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
    settings = {"train_data": str(folder / "tokens"), **dict(settings)}
    (steps,) = run_legs([Leg(settings, None, STEPS, {SAVED: checkpoints})])
    return checkpoints, steps


def resumed(
    folder: Path, before: dict[str, Any], after: dict[str, Any], *, same_routing: bool = True
) -> dict[str, float]:
    """Continues with `after` on top of `before`; deviations from the run that was not interrupted."""
    before = {"gpus_per_node": 1} | before
    checkpoints, uninterrupted = whole(folder, *before.items())
    settings, expected = {"train_data": str(folder / "tokens")} | before | after, uninterrupted[SAVED:]
    (steps,) = run_legs([Leg(settings, checkpoints, STEPS - SAVED)])
    tokens, others = ([step.tokens_per_expert for step in some] for some in (steps, expected))
    assert (tokens == others) is same_routing
    return deviations(steps, expected)


def check(found: dict[str, float]) -> None:
    limits = dict.fromkeys(found, 1e-6) | {"grad_norm": 1e-5}
    assert {name: value for name, value in found.items() if not value <= limits[name]} == {}


# A balancing loss per sequence: over a micro-batch it is another function for micro-batches of another size.
PER_SEQUENCE = {"aux_loss_type": "seq_aux_loss"}
TP2, PP2, EP2, DP2 = ({"gpus_per_node": 2} | layout for layout in ({"tp": 2}, {"pp": 2}, {"ep": 2}, {}))
SIGMOID = {"router_score": "sigmoid", "router_bias_update_rate": 0.01}
BIAS = SIGMOID | {"aux_loss_type": "seq_aux_loss,global_aux_loss"}
FIRST_DENSE = {"first_k_dense": 2, "shared_expert_size": 16, "shared_expert_gate": True}
FIRST_DENSE |= {"tie_embeddings": True, "qk_norm": True}
MIXED = {"moe_layer_freq": "0,1,0,1"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe to dmoe": ({"moe_type": "moe", "capacity_factor": 8}, {"moe_type": "dmoe", "capacity_factor": 0}),
    "dmoe to moe": (PER_SEQUENCE, {"moe_type": "moe", "capacity_factor": 8}),
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
FAST = ["dmoe to moe", "first dense to a stage without experts"]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CASES]
)
def test_goes_on(case, folder):
    before, after = CASES[case]
    check(resumed(folder, before, after))


def test_micro_batch_size(folder):
    """What is shown as balancing loss is that of a micro-batch, whatever loss is trained on."""
    found = resumed(folder, PER_SEQUENCE, {"mbsz": 4})
    assert found.pop("balancing_loss") > 1e-4
    check(found)


def test_learning_rate_is_that_of_the_run_that_goes_on(folder):
    """Of the optimizer's settings in a checkpoint nothing but the number of steps is taken."""
    found = resumed(folder, PER_SEQUENCE, {"lr": 2e-3, "min_lr": 2e-4}, same_routing=False)
    assert found["learning_rate"] == pytest.approx(1.0)
    assert found["lm_loss"] > 1e-4


def test_another_batch_size_is_refused_or_continues_the_schedule(tmp_path, capsys):
    """The logged learning rates are those of the dry run, and of the run before in samples."""
    before = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 1, "gbsz": 4, "eval_iters": 0}
    saved = tmp_path / "checkpoints"
    old = Leg(before, None, 6, {6: saved})
    run_legs([old])
    rule = r"GBSZ=8: after training with GBSZ=4 to iteration 6.* jump from 0\.0006 to 0\.0003"
    with pytest.raises(RankError, match=rule):
        run_legs([Leg(before | {"gbsz": 8}, saved, 1)])
    dry_run = MODEL | before | {"load_dir": str(saved), "run_dir": str(tmp_path)}
    assert train(dry_run | {"gbsz": 8}, dry_run=True) == BAD_INPUT
    fix = "set TRAIN_ITERS=13 WARMUP_ITERS=5 DECAY_ITERS=10 (the same schedule in batches of 8)"
    assert fix in capsys.readouterr().err
    after = {"gbsz": 8, "train_iters": 13, "warmup_iters": 5, "decay_iters": 10}
    (steps,) = run_legs([Leg(before | after, saved, 7)])
    rates = [learning_rate(old.config, 24 + step * 8) for step in range(1, 8)]
    assert [step.learning_rate for step in steps] == pytest.approx(rates, rel=1e-9)
    assert rates[-1] == old.config.min_lr
    assert train(dry_run | after, dry_run=True) == 0
    assert f"0.0006 at 6 (resumed), {rates[2]:.3g} at 9 (75%), 0.0003 at 13" in capsys.readouterr().out
