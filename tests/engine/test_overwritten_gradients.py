"""Gradients of experts that the first micro-batch of an iteration overwrites instead of adding to zeros."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, Step, _step, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import optimizer_setup, runtime
from moe_exp.layers.experts.experts import Experts
from moe_exp.layers.kernels import launch
from moe_exp.training import loop
from moe_exp.training.interval import Interval


def trained(settings: dict[str, Any], zeroed: bool, port: int) -> list[Step]:
    """Two steps. Unless all gradients are `zeroed`, those of the experts are NaN before each step."""
    launch.INTERPRETED = False  # the plain-torch references, which are much faster
    found = optimizer_setup.leave_to_kernels
    with patch.object(optimizer_setup, "leave_to_kernels", (lambda chunk: []) if zeroed else found):
        job = start_job(settings, port)
    model, num_nan = job.trained.model, 0
    for chunk in model:
        reset = chunk.zero_grad_buffer

        def reset_and_spoil(chunk: Any = chunk, reset: Any = reset) -> None:
            nonlocal num_nan
            experts = {
                w for one in chunk.modules() if isinstance(one, Experts) for w in (one.weight1, one.weight2)
            }
            for parameter in experts if not zeroed else ():
                parameter.main_grad.fill_(math.nan)
            reset()
            for parameter in chunk.params_with_grad:
                is_left = not zeroed and parameter in experts and job.config.expert_backend == "triton"
                num_nan += is_left
                expected = torch.isnan(parameter.main_grad) if is_left else parameter.main_grad == 0
                assert expected.all()

        chunk.zero_grad_buffer = reset_and_spoil
    interval, progress, steps = Interval(job.config, job.runtime, model), Progress(), []
    for _ in range(2):
        done = loop.train_step(job, progress, interval, count_zeros=False)
        steps.append(_step(job, progress, interval, done.grad_norm))
    assert bool(num_nan) == (not zeroed and job.config.expert_backend == "triton")
    runtime.stop()
    return steps


def on_rank(jobs):
    return in_turn(trained, jobs)


@pytest.mark.parametrize(
    "layout",
    [
        "one", "EP2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("DP2", "PP2_VPP2", "DP2 whole", "EP4")),
    ],
)  # fmt: skip
def test_steps_are_those_with_zeroed_gradients(layout, tmp_path):
    base = LAYOUTS[layout] | {
        "train_data": str(write_data(tmp_path)),
        "run_dir": str(tmp_path / "run"),
        "expert_backend": "triton",
        "num_layers": 4 if "VPP" in layout else 2,
        "mbsz": 1,
        "gbsz": 2 * LAYOUTS[layout]["gpus_per_node"],
    }
    # two micro-batches per iteration and more, and one
    cases = [base, base | {"dtype": "bf16", "overlap": "true"}, base | {"mbsz": 2}]
    if base["gpus_per_node"] == 1:
        cases.append(base | {"expert_backend": "loop"})
    jobs = [(case, zeroed, free_port()) for case in cases for zeroed in (True, False)]
    for found in run_on_ranks(base["gpus_per_node"], on_rank, jobs, join=False, timeout=300):
        for zeroed, overwritten in zip(found[::2], found[1::2], strict=True):
            assert overwritten == zeroed
