"""ROUTER_LR_MULT and EXPERT_LR_MULT scale the updates of their parameters and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers.checkpoint.legs import MODEL, build_job, write_data
from helpers.ranks import free_port, run_on_ranks
from helpers.relative_error import relative_error
from moe_exp.config import load_config

# Without momentum, decay and clipping an update is the gradient times the learning rate.
SGD: dict[str, Any] = {
    "optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "min_lr": 0.25, "warmup_iters": 0, "decay_iters": 2,
    "weight_decay": 0.0, "clip_grad": 0.0, "shared_expert_size": 24,
}  # fmt: skip
MULTIPLES = {"router_lr_mult": 0.25, "expert_lr_mult": 4.0}


def updates_of(jobs: list[tuple[dict[str, Any], int]]) -> list[tuple[dict[str, Tensor], float]]:
    """This rank's update of every parameter in one iteration, and the learning rate that is logged."""
    return [_update(settings, port) for settings, port in jobs]


def _update(settings: dict[str, Any], port: int) -> tuple[dict[str, Tensor], float]:
    from moe_exp import train
    from moe_exp.checkpoint.state import Progress
    from moe_exp.engine import runtime
    from moe_exp.engine.optimizer_setup import base_learning_rate
    from moe_exp.training.interval import Interval

    config = load_config(MODEL | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    rank = runtime.start(config)
    job = build_job(config, rank)
    parameters = dict(job.trained.model[0].named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    train.train_step(job, Progress(), Interval(config, rank, job.trained.model), count_zeros=False)
    rate = base_learning_rate(job.trained.optimizer)
    runtime.stop()
    return {name: parameter.detach() - before[name] for name, parameter in parameters.items()}, rate


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {"ep": 2})], ids=["one rank", "EP 2"])
def test_updates_are_multiplied(num_ranks: int, layout: dict[str, Any], tmp_path: Path):
    settings = SGD | {"train_data": str(write_data(tmp_path)), "gpus_per_node": num_ranks} | layout
    jobs = [(settings, free_port()), (settings | MULTIPLES, free_port())]
    for (plain, rate), (multiplied, other_rate) in run_on_ranks(num_ranks, updates_of, jobs, join=False):
        assert rate == other_rate  # of the parameters without a multiple
        seen = set()
        for name, update in plain.items():
            kind = "router" if ".router." in name else "expert" if ".mlp.experts." in name else ""
            multiple = MULTIPLES[f"{kind}_lr_mult"] if kind else 1.0
            assert update.abs().max() > 0, name
            assert relative_error(multiplied[name], multiple * update) < 1e-4, name
            seen.add(kind)
        assert seen == {"router", "expert", ""}
