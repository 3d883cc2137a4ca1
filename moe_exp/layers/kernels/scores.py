"""Triton code that chooses and weighs experts by fp32 logits [tokens, experts] and computes router losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import compilable, jit, power_of_2, tl

KERNEL_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
EPSILON: tl.constexpr = tl.constexpr(1e-20) if tl else None  # added to sums of weights, as in Router
LEAST: tl.constexpr = tl.constexpr(-(2**31)) if tl else None


@jit
def softmax(z):
    """Softmax and log-sum-exp of the logits z over experts."""
    most = tl.max(z, 1)
    x = tl.exp(z - most[:, None])
    total = tl.sum(x, 1)
    return x / total[:, None], most + tl.log(total)


@jit
def sigmoid(z):
    x = tl.exp(-tl.abs(z))  # never overflows
    return tl.where(z >= 0.0, 1.0, x) / (1.0 + x)


@jit
def raw_scores(z, probabilities, SCORE: tl.constexpr):
    """Scores that determine the chosen experts and their weights, before normalization over these experts."""
    if SCORE == "softmax":
        raw = probabilities
    elif SCORE == "sigmoid":
        raw = sigmoid(z)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "no such score")
        raw = tl.sqrt(softplus(z))
    return raw


@jit
def softplus(z):
    x = tl.exp(-tl.abs(z))
    u = 1.0 + x
    # log1p(x). The quotient corrects the rounding error of 1 + x (Higham 2002, section 1.14.1).
    log1p = tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(z, 0.0) + log1p


@jit
def log_scores(z, SCORE: tl.constexpr):
    """Log of the raw sigmoid or sqrtsoftplus scores, and its derivative, as in `topk.scores_torch`."""
    if SCORE == "sigmoid":
        log, slope = -softplus(-z), sigmoid(-z)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "no such score")
        is_far = z < -18.0
        x = tl.where(is_far, 1.0, softplus(z))
        log = 0.5 * tl.where(is_far, z, tl.log(x))  # to a relative exp(-18) = 1.5e-8, less than fp32 resolves
        slope = 0.5 * tl.where(is_far, 1.0, sigmoid(z) / x)
    return log, slope


@jit
def key_of(x):
    """Maps floats to integers > LEAST, keeping the order; NaN is largest (as in torch.topk), -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@jit
def choose(key, values, experts, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """TOPK best experts, their `values` (both [BLOCK_T, BLOCK_K]), and `key` with these experts at LEAST."""
    places = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    value = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    for k in range(TOPK):
        best = tl.argmax(key, 1, tie_break_left=True)[:, None]
        is_best = experts[None, :] == best
        chosen = tl.where(places == k, best, chosen)
        value = tl.where(places == k, tl.sum(tl.where(is_best, values, 0.0), 1)[:, None], value)
        key = tl.where(is_best, LEAST, key)
    return chosen, value, key


@jit
def weigh(value, is_place, factor, SCORE: tl.constexpr, PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """Router weights of the chosen experts.

    `value` contains logits if softmax is applied after the choice, and log scores if sigmoid or sqrtsoftplus
    scores are normalized. Otherwise it contains raw scores.
    """
    if (SCORE == "softmax" and not PRE_SOFTMAX) or (SCORE != "softmax" and NORMALIZE):
        value = tl.where(is_place, value, -float("inf"))
        value = tl.exp(value - tl.max(value, 1)[:, None])
        value = value / tl.sum(value, 1)[:, None]
    if SCORE == "softmax" and NORMALIZE:
        value = value / (tl.sum(value, 1) + EPSILON)[:, None]
    return value * factor


@jit
def _losses_kernel(
    score_sums, lse_squares, counts, total, losses, unit, num_tokens, num_experts, scale, aux_coeff, z_coeff,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    number = (num_tokens if total is None else tl.maximum(tl.load(total), 1)).to(tl.float32)
    slope = tl.load(counts + experts, mask=is_expert, other=0).to(tl.float32) * (scale / number / number)
    balance = tl.sum(tl.load(score_sums + experts, mask=is_expert, other=0.0) * slope, 0)
    z = tl.load(lse_squares) / number
    tl.store(losses, aux_coeff * balance + z_coeff * z)
    tl.store(losses + 1, balance)
    tl.store(losses + 2, z)
    tl.store(unit + experts, aux_coeff * slope, mask=is_expert)
    tl.store(unit + num_experts, z_coeff / number)


def router_losses_torch(
    score_sums_E: Tensor, lse_squares: Tensor, counts_E: Tensor, total: Tensor | None, num_tokens: int,
    topk: int, aux_coeff: float, z_coeff: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    number = lse_squares.new_full((), num_tokens) if total is None else total.clamp(min=1)
    slope_E = counts_E.to(score_sums_E.dtype) * counts_E.size(0) / (topk * number**2)
    balance, z = torch.dot(score_sums_E, slope_E), lse_squares / number
    unit_E1 = torch.cat([aux_coeff * slope_E, (z_coeff / number).to(slope_E).view(1)])
    return torch.stack([aux_coeff * balance + z_coeff * z, balance, z]), unit_E1


@compilable(
    "router_losses", lambda sums_E, *_: (sums_E.new_empty(3), sums_E.new_empty(sums_E.size(0) + 1)),
    twin=router_losses_torch, takes_fp64=False,
)  # fmt: skip
def router_losses(
    score_sums_E: Tensor, lse_squares: Tensor, counts_E: Tensor, total: Tensor | None, num_tokens: int,
    topk: int, aux_coeff: float, z_coeff: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `load_balancing_loss_share` and `z_loss_share` (`layers.losses`) from a routing kernel's sums.

    Args:
        counts_E: int64, slots per expert in the whole micro-batch.
        total: number of tokens of the micro-batch. If it is None, `num_tokens` (at least 1) is used.

    Returns:
        Three losses, [3]: first the weighted sum (aux_coeff * balance + z_coeff * z), then balance, then z.
        Gradient of the weighted sum with respect to `score_sums_E` and `lse_squares`, [E + 1].
    """
    num_experts = score_sums_E.size(0)
    losses, unit_E1 = score_sums_E.new_empty(3), score_sums_E.new_empty(num_experts + 1)
    _losses_kernel[(1,)](
        score_sums_E, lse_squares, counts_E, total, losses, unit_E1, num_tokens, num_experts,
        num_experts / topk, aux_coeff, z_coeff, BLOCK_E=power_of_2(num_experts),
    )  # fmt: skip
    return losses, unit_E1


class RouterLosses(torch.autograd.Function):
    """The losses of `router_losses`; only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        losses, unit_E1 = router_losses(*args)
        ctx.save_for_backward(unit_E1)
        weighted, balance, z = losses.unbind()
        ctx.mark_non_differentiable(balance, z)
        return weighted, balance, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient_E1 = ctx.saved_tensors[0] * grads[0]
        return gradient_E1[:-1], gradient_E1[-1], *(None,) * 6
