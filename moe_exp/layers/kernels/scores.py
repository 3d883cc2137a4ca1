"""Parts of the router's kernels: scores of a tile of logits, [tokens, experts], the choice of the best, and
their weights. All in fp32.
"""

from __future__ import annotations

from moe_exp.layers.kernels.launch import jit, tl

EPSILON: tl.constexpr = tl.constexpr(1e-20) if tl else None  # added to sums that divide, as in Router
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
    """What the router chooses by and weighs with."""
    if SCORE == "softmax":
        raw = probabilities
    elif SCORE == "sigmoid":
        raw = sigmoid(z)
    else:
        x = tl.exp(-tl.abs(z))
        u = 1.0 + x
        # log1p: what the addition rounds off is put right by the quotient (Higham 2002, section 1.14.1).
        log1p = tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
        raw = tl.sqrt(tl.maximum(z, 0.0) + log1p)
    return raw


@jit
def key_of(x):
    """Integers in the order of the floats; NaN is the largest, as for torch.topk. None is LEAST, which stands
    for no expert.
    """
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def choose(key, values, experts, TOPK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """TOPK times the best of what is left: experts and their values, [BLOCK_T, BLOCK_K], and the keys, now
    LEAST for the chosen.
    """
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
    """From the raw scores of the chosen, or their logits for a softmax after the choice, to router
    weights.
    """
    if SCORE == "softmax" and not PRE_SOFTMAX:
        most = tl.max(tl.where(is_place, value, -float("inf")), 1)[:, None]
        value = tl.where(is_place, tl.exp(value - most), 0.0)
        value = value / tl.sum(value, 1)[:, None]
    if NORMALIZE:
        value = value / (tl.sum(value, 1) + EPSILON)[:, None]
    return value * factor
