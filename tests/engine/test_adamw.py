"""The kernel of AdamW: against torch's AdamW, its twin, and as compiled for GPUs that are not there."""

import math
from typing import Any

import pytest
import torch

from helpers.layers.compiled import compiled, on_gpu
from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.engine.adamw import StepNumbers, adamw_step, adamw_step_torch, join, split

BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-8, 1e-2, 0.1
MODES = ("main", "main and weight", "remainder")


def numbers(norm: float | None = 2.0, step: int = 3, *, clip: float = 1.0) -> StepNumbers:
    found = None if norm is None else torch.tensor(norm, device=DEVICE)
    count = torch.tensor(float(step), dtype=torch.float64, device=DEVICE)
    return StepNumbers.of(found, count, lr=LR, betas=BETAS, weight_decay=DECAY, clip=clip)


def tensors(size: int, mode: str, moments: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(size)
    main = torch.randn(size, device=DEVICE)
    weight, remainder = split(main)
    found: dict[str, Any] = {
        "main": None if mode == "remainder" else main,
        "grad": torch.randn(size, device=DEVICE) * 0.01,
        "mean": (torch.randn(size, device=DEVICE) * 0.01).to(moments),
        "square": (torch.rand(size, device=DEVICE) * 1e-4).to(moments),
        "weight": None if mode == "main" else weight,
        "remainder": remainder if mode == "remainder" else None,
    }
    return found


def stepped(function: Any, found: dict[str, Any], at: StepNumbers) -> dict[str, Any]:
    found = {name: None if value is None else value.clone() for name, value in found.items()}
    function(**found, numbers=at, betas=BETAS, eps=EPS)
    return found


@needs_kernels
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 1023, 1024, 3001, at_real_size(1 << 27)])
def test_kernel_steps_as_its_twin(size, mode, moments):
    before = tensors(size, mode, moments)
    found, expected = (stepped(function, before, numbers()) for function in (adamw_step, adamw_step_torch))
    for name, value in expected.items():
        if value is None or name == "grad":
            continue
        if name in ("weight", "remainder"):  # a value may be rounded to the other neighbor
            continue
        limit = 1e-6 if value.dtype == torch.float32 else 2**-7
        assert relative_error(found[name].float(), value.float()) <= limit, name
    if mode == "remainder":
        ours, theirs = (join(x["weight"], x["remainder"]) for x in (found, expected))
        assert relative_error(ours, theirs) <= 1e-6
    elif mode == "main and weight":
        assert torch.equal(found["weight"], split(found["main"])[0])


@needs_kernels
@pytest.mark.parametrize("function", [adamw_step, adamw_step_torch])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(norm, mode, function):
    before = tensors(2050, mode)
    before["grad"][7] = norm
    after = stepped(function, before, numbers(norm))
    for name in before.keys() - {"grad"}:
        assert before[name] is None or torch.equal(before[name], after[name]), name


@needs_kernels
@pytest.mark.parametrize("function", [adamw_step, adamw_step_torch])
def test_remainders_have_the_bits_of_fp32_weights(function):
    both = [tensors(2050, mode) for mode in ("main and weight", "remainder")]
    for step in range(1, 6):
        both = [stepped(function, found, numbers(step=step)) for found in both]
        assert torch.equal(both[0]["main"], join(both[1]["weight"], both[1]["remainder"]))
        assert torch.equal(both[0]["weight"], both[1]["weight"])


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_thousand_steps_are_those_of_torch(clip):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(400, generator=generator))
    main, mean, square = p.detach().clone(), torch.zeros(400), torch.zeros(400)
    weight, remainder = split(main)
    optimizer = torch.optim.AdamW([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(1, 1001):
        grad = torch.randn(400, generator=generator) * 0.1
        norm = grad.norm()
        p.grad = grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([p], clip)
        optimizer.step()
        at = StepNumbers.of(
            norm, torch.tensor(float(step), dtype=torch.float64), lr=LR, betas=BETAS, weight_decay=DECAY,
            clip=clip,
        )  # fmt: skip
        adamw_step(None, grad, mean, square, at, betas=BETAS, eps=EPS, weight=weight, remainder=remainder)
    assert relative_error(join(weight, remainder), p.detach()) <= 1e-6
    assert relative_error(mean, optimizer.state[p]["exp_avg"]) <= 1e-6


def test_splitting_keeps_the_bits_and_rounds_to_nearest():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).int()
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0, -(2**31), 1, 0x7F7F0000], dtype=torch.int64)
    main = torch.cat([bits, ties.int()]).view(torch.float32)
    main = main[main.isfinite()]
    weight, remainder = split(main)
    assert torch.equal(join(weight, remainder).view(torch.int32), main.view(torch.int32))
    # torch rounds ties to even
    high = main.view(torch.int32) >> 16
    is_tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    expected = torch.where(is_tie, (high + 1).to(torch.int16).view(torch.bfloat16), main.bfloat16())
    assert torch.equal(weight.view(torch.int16), expected.view(torch.int16))
    assert is_tie.sum() >= 3


def step_with_remainders() -> None:
    size = 1 << 20
    fp32, half = (lambda: on_gpu(size, dtype=torch.float32)), (lambda: on_gpu(size))
    adamw_step(
        None, fp32(), fp32(), fp32(), StepNumbers(on_gpu(4, dtype=torch.float32)), betas=BETAS, eps=EPS,
        weight=half(), remainder=on_gpu(size, dtype=torch.int16),
    )  # fmt: skip


def step_with_bf16_moments() -> None:
    size = 1 << 20
    fp32, half = (lambda: on_gpu(size, dtype=torch.float32)), (lambda: on_gpu(size))
    at = StepNumbers(on_gpu(4, dtype=torch.float32))
    adamw_step(fp32(), fp32(), half(), half(), at, betas=BETAS, eps=EPS, weight=half())


@pytest.mark.parametrize("launch", [step_with_remainders, step_with_bf16_moments])
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_compiled_it_moves_16_bytes_at_a_time(launch, capability):
    pytest.importorskip("triton")
    (kernel,) = compiled(launch, capability)
    assert kernel.stack_bytes == 0 and kernel.registers <= 64, kernel
    wide = sum(kernel.ptx.count(f"{kind}.global.v4.b32") for kind in ("ld", "st"))
    assert wide >= 7, kernel.ptx
