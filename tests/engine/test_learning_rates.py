"""What the optimizer does to each parameter: multiples of the learning rate, clipping, weight decay."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoint.legs import MODEL, start_job, write_data
from helpers.ranks import run_jobs
from helpers.relative_error import relative_error
from moe_exp.checkpoint.state import Progress
from moe_exp.config.parameter_groups import KINDS, kind_of
from moe_exp.engine import runtime
from moe_exp.engine.optimizer_setup import parameter_names
from moe_exp.training import loop
from moe_exp.training.interval import Interval

# Without momentum, decay and clipping an update is the gradient times the learning rate.
SGD: dict[str, Any] = {
    "optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "min_lr": 0.25, "warmup_iters": 0, "decay_iters": 2,
    "weight_decay": 0.0, "clip_grad": 0.0, "shared_expert_size": 24,
}  # fmt: skip
MULTIPLES = {"router_lr_mult": 0.25, "expert_lr_mult": 4.0}


def test_factors_of_mup_are_in_the_optimizer(tmp_path):
    """LR and weight decay of every parameter; without it both are those of the run."""
    settings = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 1, "shared_expert_size": 24}
    settings |= {"shared_expert_gate": True, "distributed_optimizer": False, "router_lr_mult": 0.5}
    mup = {"parametrization": "mup", "mup_base_hidden_size": MODEL["hidden_size"] // 4}
    ((found,),) = run_jobs(1, rates_of, [(settings | mup,)])
    kinds = {kind_of(name) for name in found if "norm" not in name}
    assert kinds == set(KINDS)
    for name, (rate, decay) in found.items():
        if "norm" in name or "word_embeddings" in name:
            expected = (1.0, 0.0 if "norm" in name else 1.0)
        else:
            expected = (0.125 if ".router." in name else 0.25, 4.0)
        assert (rate, decay) == pytest.approx(expected), name


def rates_of(settings: dict[str, Any], port: int) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, over those of the run."""
    job, found = start_job(settings, port), {}
    for group in job.trained.optimizer.param_groups:
        rate = group["max_lr"] / job.config.lr
        assert group["min_lr"] == pytest.approx(rate * job.config.min_lr)
        found |= {id(parameter): (rate, group["wd_mult"]) for parameter in group["params"]}
    named = job.trained.model[0].named_parameters()
    return {name.removeprefix("module."): found[id(parameter)] for name, parameter in named}


def updates_of(settings: dict[str, Any], port: int) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """This rank's parameters, each with its update in the first iteration, and the rate that is logged."""
    job = start_job(settings, port)
    names, parameters = parameter_names(job.trained.model), list(job.trained.model[0].parameters())
    before = [parameter.detach().double() for parameter in parameters]
    interval = Interval(job.config, job.runtime, job.trained.model)
    loop.train_step(job, Progress(), interval, count_zeros=False)
    rate = job.trained.scheduler.get_lr({})
    runtime.stop()
    pairs = zip(parameters, before, strict=True)
    return {names[id(p)]: (start, p.detach().double() - start) for p, start in pairs}, rate


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {"ep": 2})], ids=["one rank", "EP 2"])
def test_updates_are_multiplied(num_ranks, layout, tmp_path):
    settings = SGD | {"train_data": str(write_data(tmp_path)), "gpus_per_node": num_ranks} | layout
    of_jobs = run_jobs(num_ranks, updates_of, [(settings,), (settings | MULTIPLES,)])
    for (plain, rate), (multiplied, other_rate) in zip(*of_jobs, strict=True):
        assert rate == other_rate  # of the parameters without a multiple
        seen = set()
        for name, (_, update) in plain.items():
            kind = "router" if ".router." in name else "expert" if ".mlp.experts." in name else ""
            multiple = MULTIPLES[f"{kind}_lr_mult"] if kind else 1.0
            assert update.abs().max() > 0, name
            assert relative_error(multiplied[name][1], multiple * update) < 1e-4, name
            seen.add(kind)
        assert seen == {"router", "expert", ""}


def test_updates_are_clipped_to_the_norm_of_all_gradients(tmp_path):
    settings = SGD | {"train_data": str(write_data(tmp_path)), "gpus_per_node": 1}
    jobs = [(settings | {"clip_grad": clip},) for clip in (0.0, 0.1, 1e6)]
    plain, clipped, not_clipped = (updates for ((updates, _),) in run_jobs(1, updates_of, jobs))
    norm = torch.cat([update.flatten() for _, update in plain.values()]).norm() / SGD["lr"]
    assert norm > 0.2
    for name, (_, update) in plain.items():
        if update.dim() == 1:
            continue  # norms: near 1, small updates are rounded
        assert relative_error(clipped[name][1], update * 0.1 / norm) < 1e-3, name
        assert relative_error(not_clipped[name][1], update) < 1e-6, name


def test_norms_and_biases_have_no_weight_decay(tmp_path):
    settings = {
        "train_data": str(write_data(tmp_path)), "gpus_per_node": 1, "add_bias_linear": True,
        "weight_decay": 0.1, "distributed_optimizer": False,
    }  # fmt: skip
    ((found,),) = run_jobs(1, rates_of, [(settings,)])
    assert any(".mlp.experts.bias" in name for name in found)
    for name, (_, decay) in found.items():
        assert decay == (0.0 if "bias" in name or "norm" in name else 1.0), name
