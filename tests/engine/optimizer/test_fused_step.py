"""The optimizer's step by `adamw_step`, in plain torch, against Megatron's step with torch's AdamW."""

import math
from typing import Any

import pytest

from helpers.checkpoint.legs import Step, _step, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import runtime
from moe_exp.engine.fused_step import use_kernel
from moe_exp.engine.optimizer_setup import skip_steps_not_finite
from moe_exp.layers.kernels import launch
from moe_exp.training import loop
from moe_exp.training import step as one_iteration
from moe_exp.training.interval import Interval


def trained(settings: dict[str, Any], port: int, kernel: bool) -> list[Step]:
    """Three steps, of which the second has a gradient that is not finite."""
    launch.INTERPRETED = False  # the plain-torch reference, which is much faster
    job = start_job(settings, port)
    optimizer, model = job.trained.optimizer, job.trained.model
    if kernel:
        use_kernel(optimizer, whole_step=job.config.optimizer == "adam")
    skip_steps_not_finite(optimizer, model)
    interval, progress, steps = Interval(job.config, job.runtime, model), Progress(), []
    finalize = one_iteration.run_schedule

    def schedule(*args, **kwargs):
        found = finalize(*args, **kwargs)
        if progress.iteration == 1:
            next(model[0].parameters()).main_grad.view(-1)[0] = math.nan
        return found

    one_iteration.run_schedule = schedule
    try:
        for _ in range(3):
            step = loop.train_step(job, progress, interval, count_zeros=True)
            loop.settle(job, progress, interval, step)
            steps.append(_step(job, progress, interval, step.grad_norm))
    finally:
        one_iteration.run_schedule = finalize
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    assert {group["step"] for group in groups if group["params"]} == {2}
    runtime.stop()
    return steps


def on_rank(jobs):
    return in_turn(trained, jobs)


CASES = [
    {"dtype": "fp32"},
    {"dtype": "bf16"},
    {"dtype": "bf16", "main_params": "remainder"},
    {"dtype": "bf16", "distributed_optimizer": False},
    {"dtype": "bf16", "grad_dtype": "bf16", "main_params": "remainder"},
    {"dtype": "bf16", "grad_dtype": "bf16", "distributed_optimizer": False},
    {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
    {"dtype": "fp32", "lr_groups": "*.router.*:lr=0.5,wd=0", "expert_lr_mult": 0.5},
    {"dtype": "fp32", "optimizer": "muon", "distributed_optimizer": False},
    {"dtype": "fp32", "clip_grad": 0.0},
]


@pytest.mark.parametrize(
    "layout",
    [
        {"gpus_per_node": 1},
        {"gpus_per_node": 2, "ep": 2},
        pytest.param({"gpus_per_node": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_torch(layout, tmp_path):
    base = layout | {
        "num_layers": 2,
        "mbsz": 1,
        "gbsz": 2,
        "clip_grad": 0.05,
        "train_data": str(write_data(tmp_path)),
        "run_dir": str(tmp_path / "run"),
    }
    # all cases on one rank; on two, those in which ranks share the optimizer or exchange the norm
    cases = CASES if layout["gpus_per_node"] == 1 else CASES[1:5]
    jobs = [(base | case, free_port(), kernel) for case in cases for kernel in (False, True)]
    found = run_on_ranks(layout["gpus_per_node"], on_rank, jobs, join=False, timeout=300)[0]
    for case, expected, ours in zip(cases, found[::2], found[1::2], strict=True):
        limit = 1e-5 if case["dtype"] == "fp32" else 2e-3
        for one, other in zip(ours, expected, strict=True):
            for name in ("lm_loss", "params_norm"):
                assert math.isclose(getattr(one, name), getattr(other, name), rel_tol=limit), (case, name)
            assert math.isclose(one.grad_norm, other.grad_norm, rel_tol=20 * limit) or (
                math.isnan(one.grad_norm) and math.isnan(other.grad_norm)
            ), case
    # with and without the kernel, and with steps that are not finite
    plain, remainder = (cases.index({"dtype": "bf16"} | kept) for kept in ({}, {"main_params": "remainder"}))
    assert repr(found[2 * plain :][:2]) == repr(found[2 * remainder :][:2])
