"""Every optimizer continues from a checkpoint under another layout with the loss of the whole run."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, MODEL, Leg, deviations, run_legs, start_job, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.load import load
from moe_exp.checkpoint.optimizer_state import owned_state
from moe_exp.checkpoint.state import unwrapped
from moe_exp.checkpoint.tools.info import describe
from moe_exp.config import ConfigError, load_config
from moe_exp.config.model_changes import refuse_other_model
from moe_exp.launch.machine_checks import bitsandbytes_problem
from moe_exp.planner.costs.params import checkpoint_bytes

STEPS, SAVED = 8, 5
# The loss moves in a few steps.
QUICK: dict[str, Any] = {"lr": 5e-3, "min_lr": 0.0, "warmup_iters": 0}
SGD: dict[str, Any] = QUICK | {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.01}
MUON: dict[str, Any] = QUICK | {"optimizer": "muon"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": MUON | {"lr_groups": "*.router.*:lr=0.5;*.layers.3.*:lr=0.7,wd=3", "expert_lr_mult": 2.0},
    "sgd": SGD,
    "sgd without momentum": SGD | {"sgd_momentum": 0.0},
    "bf16 moments": QUICK | {"optimizer_state_dtype": "bf16"},
    # Wide enough for tensors of more than 4096 values, which have codes.
    "adam8bit": QUICK | {"optimizer": "adam8bit", "hidden_size": 64, "ffn_hidden_size": 96},
}
MOMENTS = {
    "sgd": {"momentum_buffer"},
    "sgd without momentum": set(),
    "bf16 moments": {"exp_avg", "exp_avg_sq"},
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "adam8bit": {"exp_avg", "exp_avg_sq"},
}
SLOW = pytest.mark.slow


def interrupted(name: str, saved_at: str, loaded_at: list[str], folder: Path) -> tuple[Any, Any]:
    """The steps of a run after it has saved, and those of runs that continue from there."""
    settings = OPTIMIZERS[name] | {"train_data": str(write_data(folder)), "mbsz": 4}
    first = Leg(settings | LAYOUTS[saved_at], steps=STEPS, saves={SAVED: folder / "checkpoints"})
    later = [Leg(settings | LAYOUTS[layout], folder / "checkpoints", STEPS - SAVED) for layout in loaded_at]
    steps, *found = run_legs([first, *later])
    assert steps[-1].lm_loss < steps[0].lm_loss - 0.2
    return steps[SAVED:], found


@pytest.mark.parametrize(
    ("name", "saved_at", "loaded_at"),
    [
        pytest.param("sgd", "TP2", ["PP2"], marks=SLOW),
        pytest.param("sgd", "DP2 whole", ["one", "DP2", "EP2", "TP2"], marks=SLOW),
        pytest.param("sgd without momentum", "DP2", ["TP2"], marks=SLOW),
        pytest.param("bf16 moments", "DP2", ["TP2"], marks=SLOW),
        ("muon", "DP2 whole", ["DP2 whole", "TP2_ETP2 whole"]),
        pytest.param("muon", "TP2 whole", ["EP2 whole", "PP2 whole"], marks=SLOW),
        pytest.param("bf16 moments", "DP2 whole", ["one", "PP2"], marks=SLOW),
    ],
)
def test_goes_on_under_another_layout(name, saved_at, loaded_at, tmp_path):
    expected, found = interrupted(name, saved_at, loaded_at, tmp_path)
    folder = tmp_path / "checkpoints" / f"iter_{SAVED:07d}"
    assert set(describe(folder)["optimizer"]) == MOMENTS[name] | {"param"}
    tensors = CheckpointReader(folder).tensors.items()
    assert {one.dtype for key, one in tensors if key.startswith("optimizer.")} == {torch.float32}
    # bf16 moments are rounded: what another order of additions changes in a value may change it by 2^-8.
    limit = 3e-4 if name == "bf16 moments" else 1e-5
    if saved_at in loaded_at:
        assert found[loaded_at.index(saved_at)] == expected  # to the bit
    for steps in found:
        deviation = deviations(steps, expected)
        assert max(deviation["lm_loss"], deviation["params_norm"], deviation["grad_norm"] / 10) < limit


@pytest.mark.slow
def test_muon_shared_out_trains_as_on_one_rank(tmp_path):
    """Over data, context, expert and tensor parallel ranks."""
    settings = MUON | {"train_data": str(write_data(tmp_path)), "distributed_optimizer": False}
    settings |= {"first_k_dense": 1, "shared_expert_size": 16}
    (expected,) = run_legs([Leg(settings | {"gpus_per_node": 1}, steps=5)])
    layouts = ({}, {"ep": 2}, {"ep": 4}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2})
    for steps in run_legs([Leg(settings | {"gpus_per_node": 4} | layout, steps=5) for layout in layouts]):
        found = deviations(steps, expected)
        assert found["lm_loss"] < 1e-5 > found["params_norm"]


@pytest.mark.skipif(bool(bitsandbytes_problem("CPU")), reason=bitsandbytes_problem("CPU"))
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adam8bit_goes_on(dtype, tmp_path, monkeypatch):
    """With the same codes under its own layout; under another blocks have other borders, and new scales."""
    monkeypatch.setitem(OPTIMIZERS["adam8bit"], "dtype", dtype)
    expected, (same, other) = interrupted("adam8bit", "DP2", ["DP2", "TP2"], tmp_path)
    folder = tmp_path / "checkpoints" / f"iter_{SAVED:07d}"
    assert set(describe(folder)["optimizer"]) == MOMENTS["adam8bit"] | {"param"}
    assert deviations(same, expected)["lm_loss"] < 1e-6
    assert deviations(other, expected)["lm_loss"] < 5e-3


@pytest.mark.parametrize("name", ["sgd", "bf16 moments", "muon"])
def test_bytes_of_a_checkpoint(name, tmp_path):
    settings = OPTIMIZERS[name] | LAYOUTS["one whole" if name == "muon" else "one"]
    settings |= {"train_data": str(write_data(tmp_path)), "dtype": "bf16"}
    leg = Leg(settings, steps=0, saves={0: tmp_path})
    run_legs([leg])
    tensors = CheckpointReader(tmp_path / "iter_0000000").tensors.items()
    trained = sum(tensor.num_bytes for key, tensor in tensors if "rng_state" not in key)
    # What Muon leaves to Adam: of norms and routers the planner does not count the second moment.
    c = leg.config
    num_small = c.hidden_size * (2 * c.num_layers + 1 + c.num_layers * c.num_experts) if name == "muon" else 0
    assert trained == checkpoint_bytes(c) + 4 * num_small


def test_muon_takes_the_matrices_and_adam_the_rest(tmp_path):
    settings = MUON | LAYOUTS["one whole"] | {"train_data": str(write_data(tmp_path)), "dtype": "bf16"}
    settings |= {"shared_expert_size": 16, "first_k_dense": 1, "qkv_bias": True}
    run_legs([Leg(settings, steps=0, saves={0: tmp_path})])
    keys = CheckpointReader(tmp_path / "iter_0000000").tensors
    moments = {name: of_state(keys, name) for name in MOMENTS["muon"]}
    assert moments["exp_avg"] == moments["exp_avg_sq"]
    by_adam = ("norm.weight", "norm_weight", "word_embeddings.weight", "output_layer.weight", "router.weight")
    assert all(key.endswith((*by_adam, "bias")) for key in moments["exp_avg"])
    assert not any(key.endswith((*by_adam, "bias")) for key in moments["momentum_buffer"])
    assert any("experts.experts" in key for key in moments["momentum_buffer"])
    assert moments["exp_avg"] | moments["momentum_buffer"] == of_state(keys, "param")


def of_state(keys: Iterable[str], name: str) -> set[str]:
    """The parameters that have a state."""
    prefix = f"optimizer.state.{name}."
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


ONE = MODEL | {"gpus_per_node": 1}


def refuse(before: dict[str, Any], after: dict[str, Any]) -> None:
    saved = load_config(ONE | before, {}).model_dump()
    refuse_other_model(load_config(ONE | after, {}), saved, "the checkpoint")


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({}, {"optimizer": "sgd"}, "OPTIMIZER=sgd: the checkpoint has OPTIMIZER=adam. Fix: "),
        (SGD, {"optimizer": "adam8bit"}, "OPTIMIZER=adam8bit: the checkpoint has OPTIMIZER=sgd. Fix: "),
        (SGD, SGD | {"sgd_momentum": 0.0}, "SGD_MOMENTUM=0.0: the checkpoint has SGD_MOMENTUM=0.9. Fix: "),
    ],
)
def test_other_moments_are_refused_unless_they_are_given_up(before, after, line, caplog):
    with pytest.raises(ConfigError, match=f"^{line}.* ALLOW_OTHER_OPTIMIZER=true to continue"):
        refuse(before, after)
    with caplog.at_level(logging.WARNING):
        refuse(before, after | {"allow_other_optimizer": True})
    assert "ALLOW_OTHER_OPTIMIZER=true: continuing with moments reset to zero" in caplog.text


def test_the_same_moments_go_on_whatever_they_are_kept_in():
    refuse({}, {"optimizer": "adam8bit"})
    refuse({"optimizer": "adam8bit"}, {"optimizer_state_dtype": "bf16"})
    refuse(SGD, SGD | {"sgd_momentum": 0.5})
    # Of versions that had Adam alone.
    saved = load_config(ONE, {}).model_dump()
    for name in ("optimizer", "optimizer_state_dtype", "sgd_momentum", "allow_other_optimizer"):
        del saved[name]
    refuse_other_model(load_config(ONE, {}), saved, "the checkpoint")


def changed_optimizer(settings: dict[str, Any], port: int, source: str) -> tuple[bool, bool, set[int]]:
    """On one rank: whether main weights are those saved and moments zero, and the steps of the groups."""
    job = start_job(settings, port)
    load(job.config, job.runtime, Path(source), job.trained)
    reader = CheckpointReader(one_checkpoint(Path(source)))
    saved = reader.read("optimizer.state.param.embedding.word_embeddings.weight")
    weights = unwrapped(job.trained.model[0]).embedding.word_embeddings.weight.detach()
    owned = list(owned_state(job.trained.optimizer))
    are_zero = all(not value.any() for one in owned for name, value in one.values.items() if name != "param")
    parts = job.trained.optimizer.chained_optimizers
    steps = {group.get("step", 0) for part in parts for group in part.optimizer.param_groups}
    return torch.equal(weights, saved), are_zero, steps


def test_another_optimizer_takes_the_weights_and_begins_at_step_zero(tmp_path):
    settings: dict[str, Any] = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 1, "mbsz": 8}
    run_legs([Leg(settings, steps=SAVED, saves={SAVED: tmp_path / "adam"})])
    changed = settings | SGD | {"allow_other_optimizer": True}
    # And back: Adam corrects the bias of its moments from step 1 on.
    back = settings | {"allow_other_optimizer": True}
    for after, start, end in ((changed, "adam", "sgd"), (back, "sgd", "")):
        args = (changed_optimizer, after, free_port(), str(tmp_path / start))
        assert run_on_ranks(1, *args, join=False) == [(True, True, {0})]
        if end:
            run_legs([Leg(after, tmp_path / start, steps=2, saves={SAVED + 2: tmp_path / end})])
