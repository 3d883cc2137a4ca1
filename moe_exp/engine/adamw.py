"""A step of AdamW in one pass (Loshchilov and Hutter 2019, arXiv:1711.05101), with clipping and bf16 weights.

    g <- c g                                          c: clip factor; if it is NaN, nothing changes
    m <- m + (1 - b1) (g - m)
    v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

Megatron's step reads the gradient norm on the host, scales the gradients (moving 8 bytes per fp32 parameter),
runs the optimizer (28 bytes) and copies the main weights to the model (6 bytes). One pass moves 30 bytes. The
factors that depend on the norm are on the device (`step_factors`), so that the host does not wait for the
norm.

With MAIN_PARAMS=remainder, w is the bf16 weight (the upper 16 bits) plus a 16-bit remainder, as with
Transformer Engine's `store_param_remainders`. One pass then moves 28 bytes. The bf16 weight is w rounded to
nearest, ties to even, whereas Transformer Engine rounds ties away from zero. An even bf16 value can therefore
have 2^16 + 1 different remainders, from -2^15 to 2^15; both ends are ties. The remainder 2^15 does not fit in
16 bits, so the otherwise unused sign bit of v marks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, jit, runs_kernel, tl
from moe_exp.layers.kernels.self_test import LIMITS, KernelCheck, error_of

_BLOCK = 1024  # values of a program of four warps, so that every load and store moves 16 bytes


@jit
def _kernel(main, grad, mean, square, weight, factors, size, beta1, beta2, eps, BLOCK: tl.constexpr):
    clip = tl.load(factors)
    if clip == clip:  # not NaN
        rate, root, keep = tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3)
        # int64 before the multiplication: a tensor may have more than 2^31 values
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_value = places < size
        g = tl.load(grad + places, mask=is_value, other=0.0).to(tl.float32) * clip
        m = tl.load(mean + places, mask=is_value, other=0.0).to(tl.float32)
        v = tl.load(square + places, mask=is_value, other=0.0).to(tl.float32)
        w = tl.load(main + places, mask=is_value, other=0)
        if main.dtype.element_ty == tl.int16:
            is_tie = v.to(tl.int32, bitcast=True) < 0
            v = tl.abs(v)
            high = tl.load(weight + places, mask=is_value, other=0).to(tl.int32) + is_tie.to(tl.int32)
            w = (high * 65536 + w.to(tl.int32)).to(tl.float32, bitcast=True)
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        w = keep * w - rate * m / (tl.sqrt(v) * root + eps)
        tl.store(mean + places, m.to(mean.dtype.element_ty), mask=is_value)
        if weight is not None:
            # to nearest, ties to even, as torch copies main weights; Triton's interpreter would truncate
            bits = w.to(tl.int32, bitcast=True)
            high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            high = tl.where(w == w, high, 0x7FC0)  # the sum would turn NaN into a number
            tl.store(weight + places, high.to(tl.int16), mask=is_value)
            if main.dtype.element_ty == tl.int16:
                w = bits - high * 65536
                sign = (w == 32768).to(tl.int32) << 31
                v = (v.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        tl.store(main + places, w.to(main.dtype.element_ty), mask=is_value)
        tl.store(square + places, v.to(square.dtype.element_ty), mask=is_value)


def join(weight: Tensor, remainder: Tensor, square: Tensor) -> Tensor:
    """fp32 main weights, rebuilt from bf16 weights, int16 remainders and the signs of second moments."""
    high = weight.view(torch.int16).int() + square.signbit()
    return (high * 65536 + remainder).view(torch.float32)


def split(main: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits main weights (fp32) and second moments (fp32 or bf16) into the three arguments of `join`."""
    weight = main.bfloat16()
    low = main.view(torch.int32) - weight.view(torch.int16).int() * 65536
    return weight, low.short(), square.copysign(torch.where(low == 32768, -1.0, 1.0).to(square.dtype))


def step_factors(
    norm: Tensor | None, step: Tensor, *, lr: float, betas: tuple[float, float], weight_decay: float,
    clip: float,
) -> Tensor:  # fmt: skip
    """Factors of one step, fp32 [4]: c, lr / (1 - b1^t), 1 / sqrt(1 - b2^t), 1 - lr wd.

    c is the clip factor; if it is NaN, the step is skipped. Does not wait for the device.

    Args:
        norm: norm of all gradients, one fp32 value; None: no clipping and no skipping.
        step: t in the formulas, fp64 []: number of this step, not counting skipped steps.
        clip: maximum gradient norm; 0: no clipping.
    """
    factor = torch.ones_like(step)
    if norm is not None:
        if clip > 0:  # the formula of torch.nn.utils.clip_grad_norm_ and Megatron
            factor = (clip / (norm.double() + 1e-6)).clamp(max=1.0)
        factor = factor.where(norm.isfinite(), torch.nan).view_as(step)
    # in fp64, because 1 - 0.999 loses three digits
    rate, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step).rsqrt()
    return torch.stack([factor, rate, root, torch.full_like(rate, 1 - lr * weight_decay)]).float()


def adamw_step_torch(
    main: Tensor, grad: Tensor, mean: Tensor, square: Tensor, weight: Tensor | None, factors: Tensor, *,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    clip, rate, root, keep = factors.unbind()
    g, m = grad.float() * clip, mean.float()
    w = main if weight is None or main.dtype != torch.int16 else join(weight, main, square)
    m = m + (1.0 - betas[0]) * (g - m)
    v = betas[1] * square.float().abs() + (1.0 - betas[1]) * g * g
    w = keep * w - rate * m / (v.sqrt() * root + eps)
    parts = (w, w, v) if main.dtype != torch.int16 else split(w, v)
    for target, value in zip((mean, weight, main, square), (m, *parts), strict=True):
        if target is not None:
            target.copy_(torch.where(clip.isnan(), target, value.to(target.dtype)))


def adamw_step(
    main: Tensor, grad: Tensor, mean: Tensor, square: Tensor, weight: Tensor | None, factors: Tensor, *,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """One step of AdamW, in place; formulas at the top of the file. All tensors must be contiguous.

    Args:
        main: fp32 weights, or int16 remainders (see `split`).
        grad: gradients, fp32 or bf16.
        mean, square: first and second moments, fp32 or bf16.
        weight: bf16 copy of the weights, or None. The copy is an output; with remainders, also an input.
        factors: result of `step_factors`.
    """
    if not runs_kernel(grad):
        adamw_step_torch(main, grad, mean, square, weight, factors, betas=betas, eps=eps)
    elif size := grad.numel():
        grid = (cdiv(size, _BLOCK),)
        bits = None if weight is None else weight.view(torch.int16)
        _kernel[grid](main, grad, mean, square, bits, factors, size, *betas, eps, BLOCK=_BLOCK)


def check_step(dtype: torch.dtype, device: torch.device) -> Iterator[KernelCheck]:
    """Compares the kernel with its PyTorch reference on weights of `dtype`, for normal and skipped steps."""
    generator = torch.Generator(device).manual_seed(0)
    count = torch.tensor(3.0, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}
    is_half = dtype == torch.bfloat16
    for moments, splits in product((torch.float32, torch.bfloat16), (False, True)[: 1 + is_half]):
        main, grad, mean = (torch.randn(3000, generator=generator, device=device) for _ in range(3))
        main[7] = torch.nan  # must stay one in the bf16 weights
        weight = main.bfloat16() if is_half else None
        errors = []
        for norm in (40.0, torch.inf):
            factors = step_factors(torch.tensor(norm, device=device), count, **options)
            results = []
            step: Any
            for step in (adamw_step, adamw_step_torch):
                given = [main, grad, mean.to(moments), mean.square().to(moments), weight]
                changed: list[Any] = [x if x is None else x.clone() for x in given]
                if splits:
                    changed[4], changed[0], changed[3] = split(main, changed[3])
                step(*changed, factors, betas=options["betas"], eps=1e-8)
                if splits:
                    changed[0], changed[3] = join(changed[4], changed[0], changed[3]), changed[3].abs()
                results.append([x.nan_to_num(1.0) for x in changed if x is not None])
                rounded = changed[0].bfloat16().float()
                if weight is not None and not rounded.allclose(changed[4].float(), 0, 0, equal_nan=True):
                    errors.append(torch.inf)
            errors.append(error_of(*results))
        error, limit = max(errors), LIMITS[moments if weight is None else weight.dtype]
        problem = "" if error <= limit else f"relative error {error:.2g} (limit {limit:g})"
        kept = "remainders" if splits else "main weights"
        shape = f"3000 {kept}, moments in {str(moments).removeprefix('torch.')}"
        yield KernelCheck("adamw_step", str(dtype).removeprefix("torch."), shape, 1, error, problem)
