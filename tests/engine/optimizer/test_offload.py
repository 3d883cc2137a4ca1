"""OFFLOAD_OPTIMIZER: the host trains with the bits of torch's AdamW, in buckets whose copies overlap.

What is kept where: `test_main_weights_are_not_kept_twice` in test_remainders.py.
"""

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, Leg, run_legs, start_job, write_data
from helpers.layers.streams import Device
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.state import Progress
from moe_exp.config import load_config
from moe_exp.engine import offloaded_adam, runtime
from moe_exp.engine.offloaded_adam import OffloadedAdam
from moe_exp.engine.optimizer_classes import Adam
from moe_exp.engine.optimizer_setup import _megatron_builds, choose_optimizer, skip_steps_not_finite
from moe_exp.training import loop
from moe_exp.training import step as one_iteration
from moe_exp.training.interval import Interval

SIZES, BUCKET = (2500, 1, 400, 999, 3100), 1000  # no value of the fourth fits in the third bucket


@pytest.fixture
def device(request, monkeypatch):
    monkeypatch.setattr(offloaded_adam, "BUCKET", BUCKET)
    return Device(monkeypatch, late=request.param)


def in_groups(params: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "lr": 0.1}, {"params": params[4:], "lr": 0.2, "weight_decay": 0.1}]


@pytest.mark.parametrize("device", list(itertools.product((False, True), repeat=2)), indirect=True)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_copies_may_be_late_and_buckets_small(state_dtype, device, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(size, generator=generator).bfloat16() for size in SIZES]
    plain, ours = [x.float() for x in models], [torch.empty(size) for size in SIZES]
    expected = Adam(in_groups(plain), state_dtype=state_dtype)
    adam = OffloadedAdam(in_groups(ours), state_dtype=state_dtype)
    adam.weights = dict(zip(ours, models, strict=True))
    for group in adam.param_groups:
        for p in group["params"]:
            adam.allocate(p, group)
            adam.split(p)
    update = adam._update
    monkeypatch.setattr(adam, "_update", lambda *x: (x[1] and device.log.append("update"), update(*x)))
    for _ in range(4):
        for p, other in zip(ours, plain, strict=True):
            other.grad = torch.randn(p.shape, generator=generator)
            p.grad = 2 * other.grad
            device.now.add(partial(p.grad.div_, 2))  # as clipping
        expected.step()
        device.log.clear()
        adam.step()
        device.now.finish(len(device.now.queue))
        for p, other in zip(ours, plain, strict=True):
            assert torch.equal(adam.stored[p], other) and torch.equal(adam.weights[p], other.bfloat16())
            assert p.isnan().all() and p.untyped_storage().nbytes() == 4
            for name, moment in expected.state[other].items():
                assert adam.state[p][name].dtype == moment.dtype
                assert torch.equal(adam.state[p][name], moment), name
        assert set(adam.state) == set(ours)
    order = []
    for _ in range(2):  # groups, each with four buckets
        order.append("fetch 0")
        for here, there in ((0, 1), (1, 0)) * 2:
            order += [f"fetch {there}", f"wait for fetch {here}", "update"]
            order += [f"wait for send {here}", f"send {here}"]
    assert device.log == order


LONG, SAVED = 5, 3
ON: dict[str, Any] = {"dtype": "bf16", "optimizer": "adam", "offload_optimizer": True}
RUN: dict[str, Any] = {"dtype": "bf16", "lr": 5e-3, "min_lr": 0.0, "warmup_iters": 0, "clip_grad": 0.5}
RUN |= {"num_layers": 2, "mbsz": 1, "gbsz": 2, "lr_groups": "*.router.*:lr=0.5,wd=0", "expert_lr_mult": 0.5}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder / f"iter_{LONG:07d}")
    return {key: reader.read(key) for key in reader.tensors if "rng_state" not in key}


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "more"),
    [
        ("DP2", "EP2", {"ema_decay": 0.9, "average_every": 2}),
        pytest.param("TP2 whole", "one", {"optimizer_state_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("PP2", "PP2", {"grad_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_runs_and_resumes_have_the_bits_of_the_device(saved_at, loaded_at, more, tmp_path):
    """Without offloading and with it; then resumed in another layout from either, with and without it."""
    base, legs = RUN | more | {"train_data": str(write_data(tmp_path))}, []
    folders = {offloads: tmp_path / f"saved {offloads}" for offloads in (False, True)}
    for offloads, saved in ((False, None), (True, None), (False, False), (True, False), (False, True)):
        settings = base | LAYOUTS[saved_at if saved is None else loaded_at] | {"offload_optimizer": offloads}
        saves = {LONG: tmp_path / f"end {len(legs)}"} | ({SAVED: folders[offloads]} if saved is None else {})
        start, steps = (None, LONG) if saved is None else (folders[saved], LONG - SAVED)
        legs.append(Leg(settings, start, steps, saves))
    done = run_legs(legs, timeout=500)
    assert done[0] == done[1] and done[2] == done[3] == done[4]
    if saved_at == loaded_at:
        assert done[2] == done[0][SAVED:]
    for place, other in ((0, 1), (2, 3), (2, 4)):
        expected, ours = (tensors_of(tmp_path / f"end {number}") for number in (place, other))
        assert expected.keys() == ours.keys()
        for key, value in expected.items():
            assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key


def skipped(settings: dict[str, Any], port: int) -> None:
    """On a rank: a step whose gradient norm is not finite, between others."""
    offloaded_adam.BUCKET = 5000
    job = start_job(settings, port)
    optimizer, model = job.trained.optimizer, job.trained.model
    skip_steps_not_finite(optimizer, model)
    interval, progress = Interval(job.config, job.runtime, model), Progress()
    schedule = one_iteration.run_schedule

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = schedule(*args, **kwargs)
        next(model[0].parameters()).main_grad.view(-1)[0] = math.nan
        return found

    def kept() -> list[torch.Tensor]:
        adams = [part.optimizer for part in optimizer.chained_optimizers]
        found = [torch.tensor(group["step"]) for adam in adams for group in adam.param_groups]
        for adam in adams:
            assert isinstance(adam, OffloadedAdam) and sum(p.numel() for p in adam.stored) > 5000
            for p, main in adam.stored.items():
                found += [main.clone(), adam.weights[p].clone(), *(x.clone() for x in adam.state[p].values())]
        return found

    try:
        for run_schedule, is_skipped in ((schedule, False), (broken, True), (schedule, False)):
            one_iteration.run_schedule, before = run_schedule, kept() if progress.iteration else None
            step = loop.train_step(job, progress, interval, count_zeros=True)
            loop.settle(job, progress, interval, step)
            if before:
                same = list(map(torch.equal, before, kept()))
                assert all(same) if is_skipped else not any(same)
    finally:
        one_iteration.run_schedule = schedule
    runtime.stop()


def skip(jobs: list[tuple[dict[str, Any], int]]) -> None:
    in_turn(skipped, jobs)


def test_a_norm_that_is_not_finite_changes_nothing(tmp_path):
    settings = RUN | {"train_data": str(write_data(tmp_path)), "gpus_per_node": 2, "offload_optimizer": True}
    run_on_ranks(2, skip, [(settings | {"run_dir": str(tmp_path / "run")}, free_port())], join=False)


def test_main_weights_are_never_on_the_device():
    half = torch.ones(3, dtype=torch.bfloat16)
    with _megatron_builds(load_config(ON, {}), "torch"):
        assert half.float().isnan().all() and half.float().untyped_storage().nbytes() == 4
    assert torch.equal(half.float(), torch.ones(3))


def test_the_log_names_the_host():
    name, reason = choose_optimizer(load_config(ON, {}))
    assert name == "torch fused AdamW on the host"
    assert reason == "OFFLOAD_OPTIMIZER=true, two buckets of 64 Mi values in flight, moments in fp32"
