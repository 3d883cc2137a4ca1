"""One kernel for a step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): reads every value once.

    g <- c g                                          c: clip factor; if it is not finite, nothing changes
    m <- m + (1 - b1) (g - m)
    v <- b2 v + (1 - b2) g^2
    w <- (1 - lr wd) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

The same pass clips the gradient and writes the bf16 weight that the model uses. `c`, `t` and what follows
from them are on the device (`StepNumbers`), so that no rank waits for the norm of its gradients.

The fp32 main weight may be stored as the bf16 weight and a 16-bit remainder, 4 bytes instead of 6:

    bits(main) = (bits(weight) << 16) + remainder     -2^15 <= remainder < 2^15

The bf16 weight is the main weight rounded to nearest. In a tie it is rounded away from zero (torch rounds to
even): otherwise the remainder would have 2^16 + 1 values. Transformer Engine's FusedAdam stores the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl

_BLOCK = 1024  # values of a program of four warps: all loads and stores move 16 bytes


@jit
def _step_kernel(
    main, weight, remainder, grad, mean, square, numbers, size, beta1, beta2, eps, BLOCK: tl.constexpr
):
    clip = tl.load(numbers)
    if clip == clip:  # not NaN
        rate, root, keep = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        # before the multiplication: a tensor may have more than 2^31 values
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_value = places < size
        g = tl.load(grad + places, mask=is_value, other=0.0).to(tl.float32) * clip
        m = tl.load(mean + places, mask=is_value, other=0.0).to(tl.float32)
        v = tl.load(square + places, mask=is_value, other=0.0).to(tl.float32)
        if remainder is not None:
            high = tl.load(weight + places, mask=is_value, other=0).to(tl.int32)
            low = tl.load(remainder + places, mask=is_value, other=0).to(tl.int32)
            w = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            w = tl.load(main + places, mask=is_value, other=0.0)
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        w = keep * w - rate * m / (tl.sqrt(v) * root + eps)
        tl.store(mean + places, m.to(mean.dtype.element_ty), mask=is_value)
        tl.store(square + places, v.to(square.dtype.element_ty), mask=is_value)
        if main is not None:
            tl.store(main + places, w, mask=is_value)
        if weight is not None:
            bits = w.to(tl.int32, bitcast=True)
            high = (bits + 0x8000) >> 16
            tl.store(weight + places, high.to(tl.int16), mask=is_value)
            if remainder is not None:
                tl.store(remainder + places, (bits - (high << 16)).to(tl.int16), mask=is_value)


def split(main: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 weight and the int16 remainder of fp32 values, see the top of the file."""
    bits = main.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that `split` split."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a step that depend on the gradients or on the steps so far, fp32 [4] on the device:
    clip factor (NaN: skip the step), lr / (1 - b1^t), 1 / sqrt(1 - b2^t), 1 - lr wd.
    """

    values: Tensor

    @classmethod
    def of(
        cls, norm: Tensor | None, step: Tensor, *, lr: float, betas: tuple[float, float],
        weight_decay: float, clip: float,
    ) -> StepNumbers:  # fmt: skip
        """The numbers of one step, without a wait.

        Args:
            norm: of all gradients, fp32, one value; None: do not clip or skip.
            step: t of this step, a count that skipped steps do not increase, fp64 [].
            clip: maximum norm; 0: none.
        """
        factor = torch.ones_like(step)
        if norm is not None:
            if clip > 0:  # the formula of torch.nn.utils.clip_grad_norm_ and Megatron
                factor = (clip / (norm.double() + 1e-6)).clamp(max=1.0)
            factor = factor.where(norm.isfinite(), torch.nan).view_as(step)
        # In fp64: 1 - 0.999 has three digits less than 0.999.
        rate, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step).rsqrt()
        return cls(torch.stack([factor, rate, root, torch.full_like(rate, 1 - lr * weight_decay)]).float())


def adamw_step(
    main: Tensor | None,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    numbers: StepNumbers,
    *,
    betas: tuple[float, float],
    eps: float,
    weight: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """One step of AdamW on a tensor, in place; see the top of the file.

    Args:
        main: fp32 weights, contiguous; None if `weight` and `remainder` are given.
        grad: fp32 or bf16, of the same number of values, as all others.
        mean, square: moments, fp32 or bf16.
        weight: bf16 weights, which are written, and read if there is no `main`.
        remainder: int16, see `split`.
    """
    if not launch.runs_kernel(grad):
        adamw_step_torch(
            main, grad, mean, square, numbers, betas=betas, eps=eps, weight=weight, remainder=remainder
        )
        return
    bits = None if weight is None else weight.view(torch.int16)
    num_values = grad.numel()
    if num_values:
        with launch.current_device(grad.device) if grad.is_cuda else torch.no_grad():
            _step_kernel[(launch.cdiv(num_values, _BLOCK),)](
                main, bits, remainder, grad, mean, square, numbers.values, num_values, *betas, eps,
                BLOCK=_BLOCK,
            )  # fmt: skip


@torch.no_grad()
def adamw_step_torch(
    main: Tensor | None,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    numbers: StepNumbers,
    *,
    betas: tuple[float, float],
    eps: float,
    weight: Tensor | None = None,
    remainder: Tensor | None = None,
) -> None:
    """Twin of `adamw_step` in plain torch."""
    clip, rate, root, keep = numbers.values.unbind()
    if weight is not None and remainder is not None:
        main = join(weight, remainder)
    assert main is not None
    is_step = clip.isfinite()
    g = grad.float() * clip
    m = mean.float()
    m = m + (1.0 - betas[0]) * (g - m)
    v = betas[1] * square.float() + (1.0 - betas[1]) * g * g
    w = keep * main - rate * m / (v.sqrt() * root + eps)
    for target, value in ((mean, m), (square, v), (main, w)):
        target.copy_(torch.where(is_step, value.to(target.dtype), target))
    if weight is not None:
        high, low = split(main)
        weight.copy_(torch.where(is_step, high, weight))
        if remainder is not None:
            remainder.copy_(torch.where(is_step, low, remainder))
