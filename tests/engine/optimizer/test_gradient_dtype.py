"""Gradients that are accumulated and reduced in bf16 (GRAD_DTYPE)."""

import math
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, Leg, Step, _step, run_legs, start_job, write_data
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.engine import runtime
from moe_exp.engine.fused_step import use_kernel
from moe_exp.layers.kernels import launch
from moe_exp.training import loop
from moe_exp.training.interval import Interval


def trained(settings: dict[str, Any], port: int) -> list[Step]:
    """Two steps with the optimizer of a GPU (in plain torch), which reads gradients in GRAD_DTYPE."""
    launch.INTERPRETED = False  # the plain-torch references, which are much faster
    job = start_job(settings, port)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[job.config.grad_dtype]
    buffers = [one for chunk in job.trained.model for one in chunk.buffers + chunk.expert_parallel_buffers]
    use_kernel(job.trained.optimizer, whole_step=True)
    interval, progress, steps = Interval(job.config, job.runtime, job.trained.model), Progress(), []
    for _ in range(2):
        step = loop.train_step(job, progress, interval, count_zeros=True)
        loop.settle(job, progress, interval, step)
        steps.append(_step(job, progress, interval, step.grad_norm))
        # the main weights have the gradients of the buffers, not copies of them
        places = {one.grad_data.untyped_storage().data_ptr() for one in buffers if one.grad_data.numel()}
        mains = [p for part in job.trained.optimizer.chained_optimizers for p in part.get_parameters()]
        grads = [p.grad for p in mains if p.grad is not None]
        assert grads and {grad.dtype for grad in grads} == {dtype}
        assert {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()} <= places
    runtime.stop()
    return steps


def on_rank(jobs):
    return in_turn(trained, jobs)


SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("DP2", "PP2_VPP2", "TP2_ETP2")]


@pytest.mark.parametrize("layout", ["one", "DP2 whole", "EP2", *SLOW])
def test_gradients_in_bf16(layout, tmp_path):
    base = LAYOUTS[layout] | {
        "train_data": str(write_data(tmp_path)),
        "run_dir": str(tmp_path / "run"),
        "dtype": "bf16",
        "lr": 1e-3,
        "num_layers": 4 if "VPP" in layout else 2,
        "mbsz": 1,
        "gbsz": 4,
    }
    # With one micro-batch on one rank, nothing is added: all gradients of autograd are bf16 already.
    one_microbatch = {"mbsz": 4} if layout == "one" else {}
    cases = [
        one_microbatch | {"expert_backend": "loop"},
        {"expert_backend": "triton", "cross_entropy": "linear"},
    ]
    if base["gpus_per_node"] == 1:
        cases.append({"expert_backend": "triton", "gbsz": 16})
    jobs = [
        (base | case | {"grad_dtype": dtype}, free_port()) for case in cases for dtype in ("fp32", "bf16")
    ]
    for found in run_on_ranks(base["gpus_per_node"], on_rank, jobs, join=False, timeout=300):
        for case, plain, rounded in zip(cases, found[::2], found[1::2], strict=True):
            if "mbsz" in case:
                assert rounded == plain
                continue
            assert rounded != plain, case
            for one, other in zip(rounded, plain, strict=True):
                assert math.isclose(one.grad_norm, other.grad_norm, rel_tol=4e-3), case
                assert math.isclose(one.params_norm, other.params_norm, rel_tol=1e-5), case


def test_checkpoints_do_not_depend_on_it(tmp_path):
    """With one micro-batch and one rank, the bits do not depend on it either; nor on what is recomputed."""
    base = {
        "train_data": str(write_data(tmp_path)),
        "dtype": "bf16",
        "num_layers": 2,
        "mbsz": 8,
        "gbsz": 8,
        "gpus_per_node": 1,
    }
    kinds = [{"grad_dtype": "bf16", "recompute_modules": "norm,experts"}, {"grad_dtype": "fp32"}]
    kinds.append({"recompute": "selective"})
    saved = [tmp_path / str(number) for number in range(len(kinds))]
    legs = [Leg(base | kind, steps=2, saves={1: place}) for kind, place in zip(kinds, saved, strict=True)]
    legs += [Leg(base | kind, start, 1) for start in saved for kind in kinds]
    whole, *others = run_legs(legs)
    assert others[:2] == [whole, whole] and others[2:] == [whole[1:]] * 9
