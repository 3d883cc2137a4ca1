"""The kernel of AdamW: against torch's AdamW, its twin, and as compiled for GPUs that are not there."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from helpers.layers.compiled import compiled, on_gpu
from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.engine.adamw import adamw_step, adamw_step_torch, step_factors

BETAS, EPS, LR, DECAY = (0.9, 0.95), 1e-8, 1e-2, 0.1


def factors(norm: float | None = 2.0, step: int = 3, *, clip: float = 1.0) -> torch.Tensor:
    found = None if norm is None else torch.tensor(norm, device=DEVICE)
    count = torch.tensor(float(step), dtype=torch.float64, device=DEVICE)
    return step_factors(found, count, lr=LR, betas=BETAS, weight_decay=DECAY, clip=clip)


def tensors(size: int, has_weight: bool, moments: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(size)
    main = torch.randn(size, device=DEVICE)
    return {
        "main": main,
        "grad": torch.randn(size, device=DEVICE) * 0.01,
        "mean": (torch.randn(size, device=DEVICE) * 0.01).to(moments),
        "square": (torch.rand(size, device=DEVICE) * 1e-4).to(moments),
        "weight": main.bfloat16() if has_weight else None,
    }


def stepped(function: Any, found: dict[str, Any], at: torch.Tensor) -> dict[str, Any]:
    found = {name: None if value is None else value.clone() for name, value in found.items()}
    function(**found, factors=at, betas=BETAS, eps=EPS)
    return found


@needs_kernels
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("size", [1, 1023, 1024, 3001, at_real_size(1 << 27)])
def test_adamw_step_is_its_reference(size, has_weight, moments):
    before = tensors(size, has_weight, moments)
    found, expected = (stepped(function, before, factors()) for function in (adamw_step, adamw_step_torch))
    for name in ("main", "mean", "square"):
        limit = 1e-6 if expected[name].dtype == torch.float32 else 2**-7
        assert relative_error(found[name].float(), expected[name].float()) <= limit, name
    if has_weight:  # to the bit what a resume copies from the main weights
        assert torch.equal(found["weight"], found["main"].bfloat16())


@needs_kernels
def test_adamw_step_rounds_ties_to_even():
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 1, 0x7F7F0000], dtype=torch.int64)
    main = ties.int().view(torch.float32).to(DEVICE)
    zero, weight = torch.zeros_like(main), torch.zeros_like(main, dtype=torch.bfloat16)
    at = torch.tensor([1.0, 0.0, 1.0, 1.0], device=DEVICE)  # a learning rate of zero
    adamw_step(main, zero, zero.clone(), zero.clone(), weight, at, betas=BETAS, eps=EPS)
    assert torch.equal(weight, ties.int().view(torch.float32).bfloat16().to(DEVICE))


@needs_kernels
@pytest.mark.parametrize("function", [adamw_step, adamw_step_torch])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(norm, has_weight, function):
    before = tensors(2050, has_weight)
    before["grad"][7] = norm
    after = stepped(function, before, factors(norm))
    for name in before.keys() - {"grad"}:
        assert before[name] is None or torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_thousand_steps_are_those_of_torch(clip):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(400, generator=generator))
    main, mean, square = p.detach().clone(), torch.zeros(400), torch.zeros(400)
    optimizer = torch.optim.AdamW([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(1, 1001):
        grad = torch.randn(400, generator=generator) * 0.1
        norm, count = grad.norm(), torch.tensor(float(step), dtype=torch.float64)
        p.grad = grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_([p], clip)
        optimizer.step()
        at = step_factors(norm, count, lr=LR, betas=BETAS, weight_decay=DECAY, clip=clip)
        adamw_step_torch(main, grad, mean, square, None, at, betas=BETAS, eps=EPS)
    assert relative_error(main, p.detach()) <= 1e-6
    assert relative_error(mean, optimizer.state[p]["exp_avg"]) <= 1e-6


def step_on_gpu(kept: torch.dtype, moments: torch.dtype) -> None:
    main, grad = (on_gpu(1 << 20, dtype=dtype) for dtype in (kept, torch.float32))
    mean, square = (on_gpu(1 << 20, dtype=moments) for _ in range(2))
    at = on_gpu(4, dtype=torch.float32)
    adamw_step(main, grad, mean, square, on_gpu(1 << 20), at, betas=BETAS, eps=EPS)


@pytest.mark.parametrize("kept", [torch.float32, torch.int16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_compiled_it_moves_16_bytes_at_a_time(moments, capability, kept):
    pytest.importorskip("triton")
    (kernel,) = compiled(partial(step_on_gpu, kept, moments), capability)
    assert kernel.stack_bytes == 0 and kernel.registers <= 64, kernel
    wide = sum(kernel.ptx.count(f"{kind}.global.v4.b32") for kind in ("ld", "st"))
    assert wide >= 7, kernel.ptx
