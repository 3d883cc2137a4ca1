"""One kernel for all router steps after the logits: scores, top-k, weights and sums (losses, statistics).

The kernel never writes the scores of all experts or their gradient to memory. Shape suffixes: see
`moe_exp.layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_exp.config.choices import SCORES
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.scores import (
    EPSILON,
    LEAST,
    choose,
    key_of,
    log_scores,
    raw_scores,
    softmax,
    weigh,
)

_EPSILON = 1e-20  # added to sums of weights, as in Router

# Elements in a tile [tokens, experts]: 8 per thread with four warps.
_TILE = 1024
_MOST_TOKENS = 64
_PER_PROCESSOR = 4  # programs


class TopK(NamedTuple):
    """Router decisions, and the sums for losses and statistics. Floats are fp32."""

    expert_TK: Tensor  # chosen experts, int64, best first; ties: lowest index first
    weights_TK: Tensor  # router weights, with gradient
    lse_squares: Tensor  # squares of log-sum-exp, summed like score_sums_E, scalar, with gradient
    score_sums_E: Tensor  # scores (rows sum to 1) summed over tokens without padding, with gradient
    tokens_per_expert_E: Tensor  # slots per expert, int64, without padding
    by_score_E: Tensor  # like tokens_per_expert_E for the K highest scores; differs only with a bias
    entropy: Tensor  # entropy of the scores, summed over tokens without padding, scalar
    largest: Tensor  # each token's largest weight, summed over tokens without padding, scalar


@jit
def _load_tile(logits, valid, tokens, experts, num_tokens, num_experts, stride):
    """Logits (-inf past the last expert), mask of rows below `num_tokens`, same mask without padding rows."""
    is_token = tokens < num_tokens
    is_expert = experts < num_experts
    place = logits + tokens.to(tl.int64)[:, None] * stride + experts[None, :]
    z = tl.load(place, mask=is_token[:, None] & is_expert[None, :], other=0.0).to(tl.float32)
    counts = is_token
    if valid is not None:
        counts = tl.load(valid + tokens, mask=is_token, other=0) != 0
    return tl.where(is_expert[None, :], z, -float("inf")), is_token, counts


@jit
def _forward_kernel(
    logits, bias, valid, expert, weights, sums, counts, num_tokens, num_experts, stride, factor,
    TOPK: tl.constexpr, SCORE: tl.constexpr, PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    experts, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)[None, :]
    is_expert, is_place = experts < num_experts, places < TOPK
    score_sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    entropy_sums = tl.zeros_like(score_sums)
    lse_squares, largest_sums = tl.zeros((BLOCK_T,), tl.float32), tl.zeros((BLOCK_T,), tl.float32)
    chosen_sums = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    by_score_sums = tl.zeros_like(chosen_sums)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
        z, is_token, is_counted = _load_tile(logits, valid, tokens, experts, num_tokens, num_experts, stride)
        probabilities, logsumexp = softmax(z)
        raw = raw_scores(z, probabilities, SCORE)

        # Logits have the order of the scores, but no ties where scores round to 0 or 1.
        by_score = raw if SCORE == "softmax" else z
        choice = by_score
        if bias is not None:
            choice = raw + tl.load(bias + experts, mask=is_expert, other=0.0)[None, :]
        key = tl.where(is_expert[None, :], key_of(choice), LEAST)
        values = z if SCORE == "softmax" and not PRE_SOFTMAX else raw
        score = raw
        if SCORE != "softmax":
            log, _ = log_scores(z, SCORE)
            score, _ = softmax(log)
            values = log if NORMALIZE else raw
        chosen, value, key = choose(key, values, experts, TOPK, BLOCK_T, BLOCK_K)
        value = weigh(value, is_place, factor, SCORE, PRE_SOFTMAX, NORMALIZE)

        slots = tokens.to(tl.int64)[:, None] * TOPK + places
        is_slot = is_token[:, None] & is_place
        tl.store(expert + slots, chosen.to(tl.int64), mask=is_slot)
        tl.store(weights + slots, value, mask=is_slot)

        counted = is_counted[:, None] & is_expert[None, :]
        score = tl.where(counted, score, 0.0)
        score_sums += score
        entropy_sums -= score * tl.log(tl.where(score > 0.0, score, 1.0))
        lse_squares += tl.where(is_counted, logsumexp * logsumexp, 0.0)
        largest_sums += tl.where(is_counted, tl.max(tl.where(is_place, value, 0.0), 1), 0.0)
        chosen_sums += (counted & (key == LEAST)).to(tl.int32)
        if bias is not None:
            key = tl.where(is_expert[None, :], key_of(by_score), LEAST)
            _, _, key = choose(key, raw, experts, TOPK, BLOCK_T, BLOCK_K)
            by_score_sums += (counted & (key == LEAST)).to(tl.int32)

    # Each program's partial sums, which are later added in a fixed order instead of with atomics.
    sums += tl.program_id(0).to(tl.int64) * (num_experts + 3)
    counts += tl.program_id(0).to(tl.int64) * (2 * num_experts)
    tl.store(sums + experts, tl.sum(score_sums, 0), mask=is_expert)
    tl.store(sums + num_experts, tl.sum(lse_squares, 0))
    tl.store(sums + num_experts + 1, tl.sum(tl.sum(entropy_sums, 1), 0))
    tl.store(sums + num_experts + 2, tl.sum(largest_sums, 0))
    tl.store(counts + experts, tl.sum(chosen_sums, 0), mask=is_expert)
    by_score_count = tl.sum(chosen_sums if bias is None else by_score_sums, 0)
    tl.store(counts + num_experts + experts, by_score_count, mask=is_expert)


@jit
def _backward_kernel(
    logits, valid, expert, dweights, dsquares, dscore_sums, dlogits, num_tokens, num_experts, stride, factor,
    TOPK: tl.constexpr, SCORE: tl.constexpr, PRE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    z, is_token, is_counted = _load_tile(logits, valid, tokens, experts, num_tokens, num_experts, stride)
    probabilities, logsumexp = softmax(z)
    raw = raw_scores(z, probabilities, SCORE)

    # Scatter the values of the K chosen experts to E; the others are zero.
    is_chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    dvalue = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        slots = tokens.to(tl.int64) * TOPK + k
        is_k = experts[None, :] == tl.load(expert + slots, mask=is_token, other=-1).to(tl.int32)[:, None]
        dweight = tl.load(dweights + slots, mask=is_token, other=0.0).to(tl.float32)[:, None] * factor
        dvalue = tl.where(is_k, dweight, dvalue)
        is_chosen = is_chosen | is_k
    value = tl.where(is_chosen, raw, 0.0)
    in_logs = z  # input of a softmax over the chosen
    if SCORE != "softmax":
        in_logs, slope = log_scores(z, SCORE)
    if (SCORE == "softmax" and not PRE_SOFTMAX) or (SCORE != "softmax" and NORMALIZE):
        # Relative to the largest chosen value, which a softmax over all experts may have rounded to zero.
        chosen = tl.where(is_chosen, in_logs, -1e30)
        value = tl.where(is_chosen, tl.exp(chosen - tl.max(chosen, 1)[:, None]), 0.0)
        value = value / tl.maximum(tl.sum(value, 1), EPSILON)[:, None]
    if SCORE == "softmax" and NORMALIZE:
        total = (tl.sum(value, 1) + EPSILON)[:, None]
        dvalue = tl.where(is_chosen, (dvalue - tl.sum(dvalue * value, 1)[:, None] / total) / total, 0.0)

    dz = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    dscore = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    if dscore_sums is not None:
        dscore += tl.where(
            is_counted[:, None], tl.load(dscore_sums + experts, mask=is_expert, other=0.0)[None, :], 0.0
        )
    if SCORE == "softmax":
        draw = dvalue + dscore
        if not PRE_SOFTMAX:
            dz = value * (dvalue - tl.sum(dvalue * value, 1)[:, None])
            draw = dscore
        dz += raw * (draw - tl.sum(draw * raw, 1)[:, None])
    else:
        # Gradient with respect to the logarithms of the raw scores.
        dlog = dvalue * value
        if NORMALIZE:
            dlog -= value * tl.sum(dlog, 1)[:, None]
        if dscore_sums is not None:
            score, _ = softmax(in_logs)
            dlog += score * (dscore - tl.sum(dscore * score, 1)[:, None])
        dz += dlog * slope
    if dsquares is not None:
        dz += probabilities * tl.where(is_counted, 2.0 * logsumexp * tl.load(dsquares), 0.0)[:, None]
    place = dlogits + tokens.to(tl.int64)[:, None] * num_experts + experts[None, :]
    tl.store(place, dz.to(dlogits.dtype.element_ty), mask=is_token[:, None] & is_expert[None, :])


def scores_torch(logits_TE: Tensor, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors of scores, [T, E], in the dtype of the logits:

    raw:    each expert's value of the score function, such as the sigmoid of its logit
    log:    log of raw, up to a constant per token (unused with ReLU)
    scores: raw divided by its sum over experts
    """
    if not SCORES[score].per_expert:
        scores_TE = logits_TE.softmax(dim=-1)
        return scores_TE, logits_TE, scores_TE
    if SCORES[score].uses_positive:
        raw_TE = logits_TE.relu()
        return raw_TE, logits_TE, raw_TE / (raw_TE.sum(dim=-1, keepdim=True) + _EPSILON)
    # A softmax of the logarithms gives scores / sum of scores even where the scores underflow (in fp32,
    # sigmoid below -103). If all of a token's logits are below -14, the result equals softmax(z) for sigmoid
    # and softmax(z / 2) for sqrtsoftplus. If all logits are large, the result approaches 1/E.
    log_TE = _LogScores.apply(logits_TE, SCORE_FUNCTIONS[score])
    return SCORE_FUNCTIONS[score].raw(logits_TE, log_TE), log_TE, log_TE.softmax(dim=-1)


class ScoreFunction(NamedTuple):
    """Per-expert score `raw(logits, log_scores)`, its logarithm `log`, and derivative `slope` of `log`."""

    raw: Callable[[Tensor, Tensor], Tensor]
    log: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _log_sqrt_softplus(logits_TE: Tensor) -> Tensor:
    # log(log(1 + x)) = log(x) - x / 2 + O(x^2) with x = exp(z); below -18 the rest is lost even in fp64.
    near_TE = torch.nn.functional.softplus(logits_TE.clamp(min=-18.0)).log()
    return torch.where(logits_TE < -18.0, logits_TE - logits_TE.clamp(max=-18.0).exp() / 2, near_TE) / 2


def _slope_of_log_sqrt_softplus(logits_TE: Tensor) -> Tensor:
    near_TE = logits_TE.clamp(min=-18.0)
    slope_TE = near_TE.sigmoid() / torch.nn.functional.softplus(near_TE)
    return torch.where(logits_TE < -18.0, 1 - logits_TE.clamp(max=-18.0).exp() / 2, slope_TE) / 2


# The per-expert scores except relu. kernels/scores.py has the same functions in Triton.
SCORE_FUNCTIONS = {
    "sigmoid": ScoreFunction(
        raw=lambda logits_TE, log_TE: logits_TE.sigmoid(),
        log=torch.nn.functional.logsigmoid,
        slope=lambda logits_TE: torch.sigmoid(-logits_TE),
    ),
    "sqrtsoftplus": ScoreFunction(
        raw=lambda logits_TE, log_TE: log_TE.exp(), log=_log_sqrt_softplus, slope=_slope_of_log_sqrt_softplus
    ),
}


class _LogScores(torch.autograd.Function):
    # Saves only the logits for backward; autograd would save six tensors of their size.
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, score: ScoreFunction) -> Tensor:
        ctx.save_for_backward(logits_TE)
        ctx.score = score
        return score.log(logits_TE)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logits_TE,), (grad_TE,) = ctx.saved_tensors, grads
        return grad_TE * ctx.score.slope(logits_TE), None


def router_topk_torch(
    logits_TE: Tensor, topk: int, *, score: str = "softmax", pre_softmax: bool = True,
    normalize: bool = False, scaling_factor: float = 1.0, bias_E: Tensor | None = None,
    valid_T: Tensor | None = None,
) -> TopK:  # fmt: skip
    """Plain-torch reference of `router_topk`, in the dtype of the logits."""
    raw_TE, log_TE, scores_TE = scores_torch(logits_TE, score)
    is_softmax = not SCORES[score].per_expert
    by_score_TE = (raw_TE if is_softmax else logits_TE).detach()
    expert_TK, counts_E = _best(by_score_TE if bias_E is None else raw_TE.detach() + bias_E, topk, valid_T)
    weights_TK = raw_TE.gather(1, expert_TK)
    if is_softmax and not pre_softmax:
        weights_TK = logits_TE.gather(1, expert_TK).softmax(dim=-1)
    if normalize and not is_softmax:
        weights_TK = log_TE.gather(1, expert_TK).softmax(dim=-1)
    elif normalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _EPSILON)
    weights_TK = weights_TK * scaling_factor
    top1_T, lse_T = weights_TK.detach().amax(dim=-1), logits_TE.logsumexp(dim=-1)
    if valid_T is not None:
        scores_TE, top1_T, lse_T = scores_TE * valid_T.unsqueeze(1), top1_T * valid_T, lse_T * valid_T
    entropy = -torch.xlogy(scores_TE.detach(), scores_TE.detach()).sum()
    by_score_E = counts_E if bias_E is None else _best(by_score_TE, topk, valid_T)[1]
    sums = torch.dot(lse_T, lse_T), scores_TE.sum(dim=0)
    return TopK(expert_TK, weights_TK, *sums, counts_E, by_score_E, entropy, top1_T.sum())


def _best(choice_TE: Tensor, topk: int, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """The K best experts of each token, and the number of tokens per expert (padding tokens not counted)."""
    # Not torch.topk, which does not define the order of ties.
    expert_TK = choice_TE.argsort(dim=-1, descending=True, stable=True)[:, :topk].contiguous()
    ones_TK = torch.ones_like(expert_TK)
    if valid_T is not None:
        ones_TK = ones_TK * valid_T.unsqueeze(1)
    counts_E = expert_TK.new_zeros(choice_TE.size(1))
    return expert_TK, counts_E.scatter_add_(0, expert_TK.flatten(), ones_TK.flatten())


def router_topk(
    logits_TE: Tensor, topk: int, *, score: str = "softmax", pre_softmax: bool = True,
    normalize: bool = False, scaling_factor: float = 1.0, bias_E: Tensor | None = None,
    valid_T: Tensor | None = None,
) -> TopK:  # fmt: skip
    """Chooses the K experts with the highest scores and computes their weights; `Router` has the formulas.

    Backward recomputes the scores.

    Args:
        logits_TE: fp32.
        score: `softmax`, `sigmoid` or `sqrtsoftplus`.
        pre_softmax: apply softmax over all experts; if False, over the K chosen experts.
        normalize: divide the weights by their sum.
        scaling_factor: factor on the weights.
        bias_E: fp32, added to the scores when experts are chosen, but not to the weights.
        valid_T: bool, True for tokens that are not padding; None: no token is padding.
    """
    options: dict[str, Any] = {"score": score, "pre_softmax": pre_softmax, "normalize": normalize}
    options["scaling_factor"] = float(scaling_factor)
    if not launch.runs_kernel(logits_TE) or logits_TE.dtype == torch.float64:
        return router_topk_torch(logits_TE, topk, **options, bias_E=bias_E, valid_T=valid_T)
    *found, other_sums, counts = _RouterTopK.apply(logits_TE, bias_E, valid_T, topk, *options.values())
    return TopK._make((*found, *counts, *other_sums))


class _RouterTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, *options: Any
    ) -> tuple[Tensor, ...]:
        logits_TE = launch.last_contiguous(logits_TE)
        expert_TK, weights_TK, sums, counts = _topk_forward(logits_TE, bias_E, valid_T, *options)
        ctx.save_for_backward(logits_TE, valid_T, expert_TK)
        ctx.options = options
        score_sums_E, lse_squares, other_sums = sums.split([logits_TE.size(1), 1, 2])
        ctx.mark_non_differentiable(expert_TK, other_sums, counts)
        ctx.set_materialize_grads(False)
        return expert_TK, weights_TK, lse_squares.squeeze(0), score_sums_E, other_sums, counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TE, valid_T, expert_TK = ctx.saved_tensors
        _, dweights_TK, dsquares, dscore_sums_E, *_ = grads
        if dweights_TK is None:
            dweights_TK = logits_TE.new_zeros(expert_TK.shape)
        gradients = dweights_TK, dsquares, dscore_sums_E
        dlogits_TE = _topk_backward(logits_TE, valid_T, expert_TK, *gradients, *ctx.options[1:])
        return dlogits_TE, *[None] * (2 + len(ctx.options))


def _fake_forward(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, topk: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    expert_TK = logits_TE.new_empty(num_tokens, topk, dtype=torch.int64)
    weights_TK = logits_TE.new_empty(num_tokens, topk, dtype=torch.float32)
    sums = logits_TE.new_empty(num_experts + 3, dtype=torch.float32)
    return expert_TK, weights_TK, sums, logits_TE.new_empty(2, num_experts, dtype=torch.int64)


@launch.compilable("topk_forward", _fake_forward)
def _topk_forward(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, topk: int, score: str,
    pre_softmax: bool, normalize: bool, scaling_factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    expert_TK, weights_TK, sums, counts = _fake_forward(logits_TE, bias_E, valid_T, topk)
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return expert_TK, weights_TK, sums.zero_(), counts.zero_()
    blocks = _blocks(num_experts)
    num_blocks = launch.cdiv(num_tokens, blocks["BLOCK_T"])
    # Uses all processors regardless of MOE_SM_MARGIN: the bits of the sums depend on the number of programs.
    programs = launch.num_programs(logits_TE, num_blocks, per_processor=_PER_PROCESSOR, takes_all=True)
    partial_sums = sums.new_empty(programs, num_experts + 3)
    partial_counts = sums.new_empty(programs, 2, num_experts, dtype=torch.int32)
    _forward_kernel[(programs,)](
        logits_TE, *launch.contiguous(bias_E, valid_T), expert_TK, weights_TK, partial_sums,
        partial_counts, num_tokens, num_experts, logits_TE.stride(0), scaling_factor, TOPK=topk, SCORE=score,
        PRE_SOFTMAX=pre_softmax, NORMALIZE=normalize, BLOCK_K=launch.power_of_2(topk), **blocks,
    )  # fmt: skip
    return expert_TK, weights_TK, partial_sums.sum(0), partial_counts.sum(0)


@launch.compilable(
    "topk_backward", lambda logits_TE, *_: torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
)
def _topk_backward(
    logits_TE: Tensor, valid_T: Tensor | None, expert_TK: Tensor, dweights_TK: Tensor,
    dsquares: Tensor | None, dscore_sums_E: Tensor | None, score: str, pre_softmax: bool, normalize: bool,
    scaling_factor: float,
) -> Tensor:  # fmt: skip
    dlogits_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return dlogits_TE
    blocks = _blocks(num_experts)
    _backward_kernel[(launch.cdiv(num_tokens, blocks["BLOCK_T"]),)](
        logits_TE, *launch.contiguous(valid_T, expert_TK, dweights_TK, dsquares, dscore_sums_E), dlogits_TE,
        num_tokens, num_experts, logits_TE.stride(0), scaling_factor, TOPK=expert_TK.size(1), SCORE=score,
        PRE_SOFTMAX=pre_softmax, NORMALIZE=normalize, **blocks,
    )  # fmt: skip
    return dlogits_TE


def _blocks(num_experts: int) -> dict[str, int]:
    block_e = launch.power_of_2(num_experts)
    return {"BLOCK_T": max(1, min(_MOST_TOKENS, _TILE // block_e)), "BLOCK_E": block_e}
