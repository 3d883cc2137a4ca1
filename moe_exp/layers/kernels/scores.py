"""Scores, choice and weights of the router for a tile of logits [tokens, experts], in fp32."""

from __future__ import annotations

from moe_exp.layers.kernels.launch import jit, tl

KERNEL_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
EPSILON: tl.constexpr = tl.constexpr(1e-20) if tl else None  # added to sums of weights, as in Router
LEAST: tl.constexpr = tl.constexpr(-(2**31)) if tl else None


@jit
def softmax(z):
    """Softmax over experts, and log-sum-exp."""
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
    """Unnormalized scores, which determine the chosen experts and their weights."""
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
    """Maps floats to ordered integers above LEAST; NaN is largest (as in torch.topk), -0 equals 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@jit
def choose(key, values, experts, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """TOPK best experts and their values [BLOCK_T, BLOCK_K], and a `key` that is LEAST for these experts."""
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

    `value` is logits if softmax follows the choice, log scores if per-expert scores are normalized, and raw
    scores otherwise.
    """
    if (SCORE == "softmax" and not PRE_SOFTMAX) or (SCORE != "softmax" and NORMALIZE):
        value = tl.where(is_place, value, -float("inf"))
        value = tl.exp(value - tl.max(value, 1)[:, None])
        value = value / tl.sum(value, 1)[:, None]
    if SCORE == "softmax" and NORMALIZE:
        value = value / (tl.sum(value, 1) + EPSILON)[:, None]
    return value * factor
