"""LR_GROUPS in training: the same parameters in every layout, multiples of the update, frozen weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learning_rates import updates_of
from test_qk_clip import MLA

from helpers.checkpoint.legs import MODEL, Leg, run_legs, start_job, write_data
from helpers.ranks import run_jobs
from helpers.relative_error import relative_error
from moe_exp.checkpoint.format.naming import logical_tensors
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.config import load_config
from moe_exp.config.parameter_groups import multiples_of
from moe_exp.config.parameter_names import parameter_sizes
from moe_exp.engine import runtime
from moe_exp.engine.model import build_model
from moe_exp.engine.optimizer_setup import parameter_names
from moe_exp.planner.costs.params import count_parameters
from moe_exp.training.replica_checks import replica_problems

ONE: dict[str, Any] = {"gpus_per_node": 1, "warmup_iters": 0, "num_layers": 2}
MODELS: list[dict[str, Any]] = [
    {},
    {"first_k_dense": 1, "shared_expert_size": 16, "shared_expert_gate": True, "qkv_bias": True},
    {"add_bias_linear": True, "normalization": "LayerNorm", "qk_norm": True, "tie_embeddings": True,
     "moe_latent_size": 20},
    {"activation": "gelu", "use_moe": False, "qk_norm": True, "qk_norm_scope": "all"},
    {**MLA, "q_lora_rank": 16, "qk_norm": True, "first_k_dense": 1},
    {**MLA, "q_lora_rank": 0},
]  # fmt: skip


def sizes_by_name(settings: dict[str, Any], port: int) -> dict[str, int]:
    """The names that training gives to this rank's parameters, and their numbers of values."""
    config = load_config(MODEL | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    model = build_model(config, runtime.start(config))
    names = parameter_names(model)
    found = {names[id(one)]: one.numel() for chunk in model for one in chunk.parameters()}
    runtime.stop()
    return found


def test_names_and_sizes_are_those_of_the_model():
    jobs = [(ONE | model,) for model in MODELS]
    for (settings,), (sizes,) in zip(jobs, run_jobs(1, sizes_by_name, jobs), strict=True):
        c = load_config(MODEL | settings, {})
        assert parameter_sizes(c) == sizes
        assert sum(sizes.values()) == count_parameters(c).total


def test_names_are_the_same_on_every_stage_and_that_of_a_tied_embedding():
    settings = {"gpus_per_node": 2, "pp": 2, "vpp": 2, "tie_embeddings": True, "gbsz": 8, "mbsz": 2}
    ((first, last),) = run_jobs(2, sizes_by_name, [(settings,)])
    expected = parameter_sizes(load_config(MODEL | settings, {}))
    assert first.keys() | last.keys() == expected.keys()
    assert first.keys() & last.keys() == {"embedding.word_embeddings.weight"}


GROUPS = (
    "*.router.*:lr=4,wd=0;decoder.layers.3.*:lr=0;*.experts.*fc1*:wd=5,lr=0.5;"
    "decoder.layers.self_attention.linear_qkv.*:lr=3;embedding*:wd=0"
)


def after_three_steps(folder: Path, layouts: dict[str, dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """The logical tensors of each layout after three steps; `start` has those before the first."""
    settings = {
        "train_data": str(write_data(folder)), "warmup_iters": 0, "lr": 5e-3, "weight_decay": 0.5,
        # Adam would divide rounding errors of gradients near 0 by their own size.
        "adam_eps": 1e-5, "lr_groups": GROUPS, **settings,
    }  # fmt: skip
    for name, layout in layouts.items():
        before = {0: folder / "start"} if layout["gpus_per_node"] == 1 else {}
        run_legs([Leg(settings | layout, steps=3, saves={3: folder / name, **before})])
    iterations = {name: 0 if name == "start" else 3 for name in ("start", *layouts)}
    readers = {name: CheckpointReader(folder / name / f"iter_{i:07d}") for name, i in iterations.items()}
    return {
        name: {key: one.read() for key, one in logical_tensors(reader).items()}
        for name, reader in readers.items()
    }


SLOW = [
    ({}, ["TP 2", "EP 2"]),
    ({"optimizer": "sgd", "lr": 0.5}, ["TP 2", "PP 2", "EP 2"]),
    ({"optimizer": "muon", "distributed_optimizer": False}, ["TP 2", "PP 2", "EP 2"]),
    ({"tie_embeddings": True}, ["PP 2"]),
    ({"distributed_optimizer": False, "first_k_dense": 1}, ["PP 2", "EP 2"]),
]


@pytest.mark.parametrize(
    ("settings", "names"),
    [({}, ["PP 2"]), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=["adam PP", "adam", "sgd", "muon", "tied", "not distributed"],
)
def test_weights_are_the_same_in_every_layout(settings, names, tmp_path):
    layouts = {name: {"gpus_per_node": 2, name[:2].lower(): 2} for name in names}
    found = after_three_steps(tmp_path, {"one rank": {"gpus_per_node": 1}} | layouts, **settings)
    start, one = found["start"], found["one rank"]
    frozen = {name for name, value in start.items() if torch.equal(value, one[name])}
    assert frozen == {name for name in start if ".layers.3." in name and ".router." not in name}
    for name in names:
        worst = max(relative_error(found[name][key], value) for key, value in one.items())
        assert found[name].keys() == one.keys() and worst < 1e-5, name


def test_weight_decay_by_group(tmp_path):
    """In the first step, decay adds -rate * WEIGHT_DECAY * weight to the update, with any optimizer."""
    settings = ONE | {"train_data": str(write_data(tmp_path)), "lr": 0.5, "min_lr": 0.5}
    settings["distributed_optimizer"] = False
    settings["lr_groups"] = "*.router.*:wd=0;*.experts.*:wd=3,lr=0.5;*linear_proj*:lr=2"
    optimizers = ("adam", "sgd", "muon")
    kinds = [{"optimizer": name, "weight_decay": decay} for name in optimizers for decay in (0.0, 0.2)]
    found = [updates for ((updates, _),) in run_jobs(1, updates_of, [(settings | kind,) for kind in kinds])]
    of = load_config(MODEL | settings, {})
    for optimizer, plain, decayed in zip(optimizers, found[::2], found[1::2], strict=True):
        for name, (weight, update) in plain.items():
            own = multiples_of(of, name)
            expected = -(0.5 * own.lr) * (0.2 * own.wd) * weight
            # with a decay of 0, exactly nothing
            assert relative_error(decayed[name][1] - update, expected) < 1e-4, (optimizer, name)
    assert {multiples_of(of, name) for name in plain} == {(1, 1), (1, 0), (0.5, 3), (2, 1)}


def wrong_groups(settings: dict[str, Any], port: int) -> list[list[str]]:
    """Problems of sound groups, and of those whose learning rate, and then whose decay, is another one."""
    job = start_job(settings, port)
    groups, lr = job.trained.optimizer.param_groups, job.config.lr
    (routers,) = [group for group in groups if group["params"] and group["max_lr"] == 4 * lr]
    found = []
    for changes in ({}, {"max_lr": lr}, {"wd_mult": 1.0}):
        before = dict(routers)
        routers.update(changes)
        found.append(replica_problems(job.config, job.runtime, job.trained))
        routers.update(before)
    return [[line.replace(job.runtime.host, "HOST") for line in lines] for lines in found]


def test_groups_that_are_not_those_of_the_settings_are_found(tmp_path):
    settings = ONE | {"train_data": str(write_data(tmp_path)), "lr": 1e-3}
    settings["lr_groups"] = "*.router.*:lr=4,wd=0"
    (((sound, rates, decays),),) = run_jobs(1, wrong_groups, [(settings,)])
    routers = [f"decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1)]
    assert sound == []
    line = "optimizer: %s has %s, on rank 0 (HOST)"
    assert rates == [line % (name, "LR 0.001 instead of 0.004") for name in routers]
    assert decays == [line % (name, "1 times WEIGHT_DECAY instead of 0 times") for name in routers]
