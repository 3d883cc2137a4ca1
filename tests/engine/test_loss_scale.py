"""fp16: all parts of the optimizer have one loss scale, and the experts' gradients are those of fp32."""

from typing import Any

import pytest
import torch

from helpers.checkpoint.small_job import build_small, small_settings, write_tokens
from helpers.ranks import run_jobs
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval

from megatron.core.utils import get_model_config


def train_some(settings: dict[str, Any], port: int) -> dict[str, Any]:
    """On one rank: iterations on one batch until a step is made, two where a dense gradient of the last rank
    overflows, one more.
    """
    job, progress = build_small(settings, port)
    interval = Interval(job.config, job.runtime, job.trained.model)
    model_settings = get_model_config(job.trained.model[0])
    dense = [p for p in job.trained.model[0].parameters() if getattr(p, "allreduce", True)]
    finalize, overflows = model_settings.finalize_model_grads_func, []

    def spoilt(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        if overflows and torch.distributed.get_rank() == job.config.world_size - 1:
            for parameter in dense:
                parameter.main_grad.fill_(float("inf"))

    model_settings.finalize_model_grads_func = spoilt
    found: dict[str, Any] = {"scales": [], "updated": [], "grad_norms": []}

    def iterate() -> bool:
        progress.consumed_samples = 0
        step = loop.train_step(job, progress, interval, count_zeros=False)
        parts = job.trained.optimizer.chained_optimizers
        found["scales"].append([float(part.get_loss_scale()) for part in parts])
        found["updated"].append(step.updated)
        found["grad_norms"].append(step.grad_norm)
        return step.updated

    while not iterate():
        pass
    overflows.append(True)
    iterate(), iterate()
    overflows.clear()
    iterate()
    runtime.stop()
    return found


@pytest.mark.parametrize(
    "layout",
    [pytest.param({}, marks=pytest.mark.slow), {"gpus_per_node": 2, "ep": 2}],
    ids=["1", "EP=2"],
)
def test_a_part_that_overflows_alone_takes_all_others_along(tmp_path, layout):
    write_tokens(tmp_path)
    found = {}
    for dtype in ("fp16", "fp32"):
        settings = small_settings(tmp_path, f"run_{dtype}", dtype=dtype, num_workers=0, **layout)
        (found[dtype],) = run_jobs(settings["gpus_per_node"], train_some, [(settings,)])
    for rank in found["fp16"]:
        assert len(rank["scales"][0]) == 2  # dense parameters and experts
        assert all(len(set(scales)) == 1 for scales in rank["scales"])
        assert rank["scales"] == found["fp16"][0]["scales"]
        assert rank["updated"][-4:] == [True, False, False, True]
        assert rank["scales"][-1][0] < rank["scales"][-4][0]
        # Of the first step and of the one after the overflows: where the scales differ, that of the experts
        # is off by their ratio.
        assert rank["grad_norms"][-4] == pytest.approx(found["fp32"][0]["grad_norms"][0], rel=2e-3)
        assert rank["grad_norms"][-1] == pytest.approx(found["fp32"][0]["grad_norms"][-1], rel=2e-3)
