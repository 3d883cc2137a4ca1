"""MAIN_PARAMS=remainder: training, checkpoints and averages have the bits of MAIN_PARAMS=fp32.

`test_main_weights_are_not_kept_twice` is also about OFFLOAD_OPTIMIZER.
"""

import gc
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import LAYOUTS, Leg, run_legs, start_job, write_data
from helpers.checkpoint.saving import save
from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.ranks import free_port, in_turn, run_on_ranks
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.load import load
from moe_exp.checkpoint.state import Progress
from moe_exp.config import load_config
from moe_exp.engine import optimizer_setup, runtime
from moe_exp.engine.adamw import adamw_step, adamw_step_torch, check_step, join, split
from moe_exp.engine.averaged_weights import averaged_weights
from moe_exp.engine.fused_step import keeps_remainders
from moe_exp.engine.optimizer_classes import AVERAGE, joined
from moe_exp.engine.optimizer_setup import choose_optimizer
from moe_exp.training import loop
from moe_exp.training.interval import Interval

BETAS, EPS = (0.9, 0.95), 1e-8


def all_kinds_of_bits() -> torch.Tensor:
    """Every upper half with lower halves around zero, the tie and the largest, but no NaN."""
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    main = ((torch.arange(1 << 16)[:, None] << 16) + lower).int().view(torch.float32).flatten()
    return main[~main.isnan()]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_split_keeps_every_bit(moments):
    main = all_kinds_of_bits()
    for value in (0.0, 1e-3):
        square = torch.full_like(main, value, dtype=moments)
        weight, remainder, marked = split(main, square)
        assert remainder.dtype == torch.int16 and marked.dtype == moments
        assert torch.equal(bits(weight), bits(main.bfloat16()))
        assert torch.equal(bits(join(weight, remainder, marked)), bits(main))
        assert torch.equal(bits(marked.abs()), bits(square)) and 30_000 < marked.signbit().sum() < 35_000
    broken = torch.tensor([0x7F800001, 0x7FC08000, -1], dtype=torch.int64).int().view(torch.float32)
    assert join(*split(broken, torch.zeros(3))).isnan().all()


@needs_kernels
@pytest.mark.parametrize("function", [adamw_step, adamw_step_torch])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factors", [(1.0, 0.0, 1.0, 1.0), (0.5, 0.01, 1.1, 0.99), (math.nan, 0.1, 1.0, 1.0)])
def test_a_step_is_that_of_fp32(factors, moments, function):
    """Without a learning rate, so that ties stay ties; with one; and skipped."""
    drawn = torch.randn(3001, generator=torch.Generator().manual_seed(0))
    main = torch.cat([all_kinds_of_bits()[:: 1 if factors[1] == 0 else 97], drawn]).to(DEVICE)
    main = main[main.isfinite()]
    grad, mean = torch.randn_like(main), torch.randn_like(main).to(moments)
    square, at = torch.rand_like(main).to(moments), torch.tensor(factors, device=DEVICE)
    weight, remainder, marked = split(main, square)
    before = [x.clone() for x in (weight, remainder, marked, mean)]
    ours, other = mean.clone(), weight.clone()
    function(remainder, grad, ours, marked, weight, at, betas=BETAS, eps=EPS)
    function(main, grad, mean, square, other, at, betas=BETAS, eps=EPS)
    assert torch.equal(bits(join(weight, remainder, marked)), bits(main))
    for one, two in ((weight, other), (marked.abs(), square), (ours, mean)):
        assert torch.equal(bits(one), bits(two))
    pairs = zip(before, (weight, remainder, marked, ours), strict=True)
    assert all(torch.equal(bits(x), bits(y)) for x, y in pairs) == math.isnan(factors[0])


LONG, SAVED = 5, 3
RUN: dict[str, Any] = {"dtype": "bf16", "lr": 5e-3, "min_lr": 0.0, "warmup_iters": 0, "clip_grad": 0.5}
RUN |= {"num_layers": 2, "mbsz": 1, "gbsz": 2, "ema_decay": 0.9, "average_every": 2}
RUN |= {"lr_groups": "*.router.*:lr=0.5,wd=0", "expert_lr_mult": 0.5}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder / f"iter_{LONG:07d}")
    return {key: reader.read(key) for key in reader.tensors if "rng_state" not in key}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("saved_at", "loaded_at"),
    [
        pytest.param("one", "DP2", marks=SLOW), pytest.param("DP2", "DP2", marks=SLOW), ("DP2 whole", "EP2"),
        pytest.param("EP2", "one whole", marks=SLOW), pytest.param("TP2", "PP2", marks=SLOW),
    ],
)  # fmt: skip
@pytest.mark.parametrize("moments", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_runs_and_resumes_are_those_of_fp32(saved_at, loaded_at, moments, tmp_path):
    base = RUN | {"train_data": str(write_data(tmp_path)), "optimizer_state_dtype": moments}
    ends, legs = itertools.count(), []

    def add(layout: str, kind: str, start: Path | None = None, steps: int = LONG, **saves: Path) -> None:
        written = {LONG: tmp_path / str(next(ends))} | ({} if start else {SAVED: tmp_path / kind})
        legs.append(Leg(base | LAYOUTS[layout] | {"main_params": kind}, start, steps, written))

    for kind in ("fp32", "remainder"):
        add(saved_at, kind)
    for saved, kind in (("fp32", "fp32"), ("fp32", "remainder"), ("remainder", "fp32")):
        add(loaded_at, kind, tmp_path / saved, LONG - SAVED)
    steps = run_legs(legs)
    assert steps[0] == steps[1] and steps[2] == steps[3] == steps[4]
    if saved_at == loaded_at and moments == "fp32":
        assert steps[2] == steps[0][SAVED:]
    ended = [tensors_of(tmp_path / str(number)) for number in range(5)]
    for place, other in ((0, 1), (2, 3), (2, 4)):
        assert ended[place].keys() == ended[other].keys()
        assert any(key.startswith("optimizer.state.ema.") for key in ended[place])
        for key, value in ended[place].items():
            assert ended[other][key].dtype == value.dtype and torch.equal(ended[other][key], value), key


def looked_into(settings: dict[str, Any], port: int) -> None:
    """On a rank: what is allocated, and changes of the weights without a step."""
    job = start_job(settings, port)
    optimizer, model = job.trained.optimizer, job.trained.model
    progress, interval = Progress(), Interval(job.config, job.runtime, model)
    for _ in range(3):  # the average is that of step 2
        loop.train_step(job, progress, interval, count_zeros=True)
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    pairs = [(part, p) for part in parts for p in part.stored]
    states = [x for part in parts for state in part.state.values() for x in state.values()]
    assert pairs and all(set(part.stored) == set(part.weights) for part in parts)
    places = {x.untyped_storage().data_ptr() for x in (*states, *(part.stored[p] for part, p in pairs))}
    sizes = {p.numel() for _, p in pairs}

    def check_memory() -> None:
        assert all(p.untyped_storage().nbytes() == 4 and p.isnan().all() for _, p in pairs)
        gc.collect()
        for x in gc.get_objects():
            if type(x) is torch.Tensor and x.dtype == torch.float32 and x.numel() in sizes - {1}:
                memory = x.untyped_storage()  # larger for views of gradient buffers
                is_own = 4 < memory.nbytes() <= 4 * x.numel()
                assert not is_own or memory.data_ptr() in places, x.shape

    def kept() -> list[torch.Tensor]:
        tensors = [(part.weights[p], part.stored[p], part.state[p]["exp_avg_sq"]) for part, p in pairs]
        return [bits(x).clone() for x in itertools.chain(*tensors)]

    check_memory()
    # the model has the rounded average, and then every bit as before
    before, averages = kept(), [part.state[p][AVERAGE].clone() for part, p in pairs]
    with averaged_weights(optimizer, model):
        for (part, p), average in zip(pairs, averages, strict=True):
            with joined(part, p):
                assert torch.equal(p, average) and not torch.equal(part.state[p][AVERAGE], average)
            assert torch.equal(part.weights[p], average.bfloat16())
    assert all(map(torch.equal, before, kept()))
    # a rollback
    folder = Path(settings["run_dir"])
    save(job.config, job.runtime, folder, job.trained, progress)
    optimizer.zero_grad()
    assert all(map(torch.equal, before, kept()))
    del average, averages
    check_memory()
    loop.train_step(job, progress, interval, count_zeros=True)
    assert not any(map(torch.equal, before, kept()))
    load(job.config, job.runtime, folder, job.trained)
    optimizer.zero_grad()
    assert all(map(torch.equal, before, kept()))
    # weights that are loaded into the model become the main weights
    optimizer.reload_model_params()
    for part, p in pairs:
        with joined(part, p):
            assert torch.equal(p, part.weights[p].float())
    assert not all(map(torch.equal, before, kept()))
    runtime.stop()


def look_into(jobs: list[tuple[dict[str, Any], int]]) -> None:
    in_turn(looked_into, jobs)


def test_main_weights_are_not_kept_twice(tmp_path):
    settings = RUN | {"train_data": str(write_data(tmp_path)), "gpus_per_node": 2}
    layouts, kinds = ({}, {"ep": 2, "distributed_optimizer": False}), ("main_params", "offload_optimizer")
    jobs = []
    for layout, (name, value) in itertools.product(layouts, zip(kinds, ("remainder", True), strict=True)):
        folder = str(tmp_path / f"{name} {len(layout)}")
        jobs.append((settings | layout | {name: value, "run_dir": folder}, free_port()))
    run_on_ranks(2, look_into, jobs, join=False)


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({}, "whole", True), ({}, "torch", False), ({"dtype": "fp32"}, "whole", False),
        ({"qk_clip": 100.0, "distributed_optimizer": False}, "whole", False),
        ({"main_params": "fp32"}, "whole", False), ({"main_params": "remainder"}, "torch", True),
        ({"main_params": "remainder", "optimizer_state_dtype": "bf16"}, "torch", True),
    ],
)  # fmt: skip
def test_where_remainders_are_kept(settings, step, expected, monkeypatch):
    monkeypatch.setattr(optimizer_setup, "choose_step", lambda *_, **__: step)
    config = load_config({"dtype": "bf16", "optimizer": "adam"} | settings, {})
    assert keeps_remainders(config, step) == expected
    assert ("emainder" in "".join(choose_optimizer(config))) == expected


@needs_kernels
def test_the_self_test_also_covers_remainders():
    found = list(check_step(torch.bfloat16, torch.device(DEVICE)))
    assert [check.problem for check in found] == [""] * 4
    assert sum("remainders" in check.shape for check in found) == 2
