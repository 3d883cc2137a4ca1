"""Launches of all kernels on tensors without values, for `compiled.py`: `up` to `weight_gradient` are the
grouped GEMMs at one size, the rest is routing, row order and loss.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from helpers.layers.compiled import on_gpu
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_statistics
from moe_exp.layers.kernels.drops import keep_within, padded_order
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.rows import chunk_order, gather_rows
from moe_exp.layers.kernels.scores import router_losses
from moe_exp.layers.kernels.slot_sort import slot_sort
from moe_exp.layers.kernels.topk import _topk_backward, _topk_forward
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad
from moe_exp.layers.megatron.residual import sum_norm, sum_norm_gradient
from moe_exp.layers.megatron.rotary import rotated

TOPK = 8
INT, LONG, FP32, BF16, BOOL = torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch; `routed`: experts of the kernels that are not GEMMs."""

    tokens: int = 1024
    rows: int = 4096
    dim: int = 1024
    ffn: int = 512
    experts: int = 64
    routed: int = 128

    def width(self, activation: str) -> int:
        return self.ffn * (2 if ACTIVATIONS[activation].gated else 1)


SIZES = Sizes()


def gathered(gather: bool, at: Sizes) -> dict[str, torch.Tensor | None]:
    token_R = on_gpu(at.rows, dtype=INT) if gather else None
    return {"token_R": token_R, "weights_R": on_gpu(at.rows, dtype=FP32)}


def offsets(at: Sizes) -> torch.Tensor:
    return on_gpu(at.experts + 1, dtype=INT)


def up(
    activation: str = "swiglu", gather: bool = True, dtype: torch.dtype = BF16, *, keeps_hidden: bool = True,
    bias: bool = False, at: Sizes = SIZES,
) -> None:  # fmt: skip
    width = at.width(activation)
    x = on_gpu(at.tokens if gather else at.rows, at.dim, dtype=dtype)
    w = on_gpu(at.experts, width, at.dim, dtype=dtype)
    up_projection(
        x, w, offsets(at), activation=activation, keeps_hidden=keeps_hidden,
        bias1_LW=on_gpu(at.experts, width, dtype=dtype) if bias else None, **gathered(gather, at),
    )  # fmt: skip


def down(
    transposed: bool = True, dtype: torch.dtype = BF16, tf32: bool = False, *, bias: bool = False,
    at: Sizes = SIZES,
) -> None:  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = tf32
    sizes = (at.dim, at.ffn) if transposed else (at.ffn, at.dim)
    w = on_gpu(at.experts, *sizes, dtype=dtype)
    w = w.transpose(1, 2) if transposed else w
    of_bias = (on_gpu(at.experts, at.dim, dtype=dtype), on_gpu(at.rows, dtype=FP32)) if bias else ()
    grouped_matmul(on_gpu(at.rows, at.ffn, dtype=dtype), w, offsets(at), *of_bias)


def activation_gradient(activation: str = "swiglu", gather: bool = True, *, at: Sizes = SIZES) -> None:
    dy, w = on_gpu(at.tokens if gather else at.rows, at.dim), on_gpu(at.experts, at.dim, at.ffn)
    hidden = on_gpu(at.rows, at.width(activation))
    activation_grad(dy, w, hidden, offsets(at), activation=activation, **gathered(gather, at))


def weight_gradient(gather: bool = True, main_grad: bool = False, *, at: Sizes = SIZES) -> None:
    index = on_gpu(at.rows, dtype=INT) if gather else None
    out = on_gpu(at.experts, 2 * at.ffn, at.dim, dtype=FP32) if main_grad else None
    b = on_gpu(at.tokens if gather else at.rows, at.dim)
    weight_grad(on_gpu(at.rows, 2 * at.ffn), b, offsets(at), b_index_R=index, out=out)


def bias_gradient(gather: bool = True, *, at: Sizes = SIZES) -> None:
    """Of the second bias; without gathering of the first."""
    index = on_gpu(at.rows, dtype=INT) if gather else None
    dy = on_gpu(at.tokens, at.dim) if gather else on_gpu(at.rows, 2 * at.ffn)
    weight_grad(on_gpu(at.rows, 1), dy, offsets(at), b_index_R=index)


GEMMS = [up, down, activation_gradient, weight_gradient]
# As gpt-oss has them.
BIASED = {
    "up, clamped, with bias": partial(up, "clamped_swiglu", bias=True),
    "down, with bias": partial(down, bias=True),
    "activation_grad, clamped": partial(activation_gradient, "clamped_swiglu"),
    "gradient of b2": bias_gradient,
    "gradient of b1": partial(bias_gradient, False),
}


def combined(*, at: Sizes = SIZES) -> None:
    combine(on_gpu(at.rows, at.dim), on_gpu(at.tokens, TOPK, dtype=INT))


def rows_in_order(*, at: Sizes = SIZES) -> None:
    gather_rows(on_gpu(at.tokens, at.dim), on_gpu(at.rows, dtype=INT), TOPK)


def sorted_slots(*, at: Sizes = SIZES) -> None:
    slot_sort(on_gpu(at.tokens, TOPK, dtype=LONG), at.routed)


def chunks(sources: int = 8, *, at: Sizes = SIZES) -> None:
    chunk_order(on_gpu(sources, at.routed, dtype=LONG), at.rows)


def kept(by_weight: bool = True, *, at: Sizes = SIZES) -> None:
    weights = on_gpu(at.tokens, TOPK, dtype=FP32) if by_weight else None
    keep_within(on_gpu(at.tokens, TOPK, dtype=LONG), weights, on_gpu(at.routed, dtype=INT))


def padded(*, at: Sizes = SIZES) -> None:
    kept_TK = on_gpu(at.tokens, TOPK, dtype=BOOL)
    padded_order(on_gpu(at.tokens, TOPK, dtype=LONG), at.routed, at.rows, kept_TK)


def routed(score: str = "softmax", extras: bool = False, *, at: Sizes = SIZES) -> None:
    bias, valid = (on_gpu(at.routed, dtype=FP32), on_gpu(at.tokens, dtype=BOOL)) if extras else (None, None)
    options: Any = (score, not extras, extras, 1.0)
    _topk_forward(on_gpu(at.tokens, at.routed, dtype=FP32), bias, valid, TOPK, *options)


def routed_back(score: str = "softmax", extras: bool = False, *, at: Sizes = SIZES) -> None:
    logits, chosen = on_gpu(at.tokens, at.routed, dtype=FP32), on_gpu(at.tokens, TOPK, dtype=LONG)
    valid = on_gpu(at.tokens, dtype=BOOL) if extras else None
    gradients = [on_gpu(*sizes, dtype=FP32) for sizes in ((at.tokens, TOPK), (), (at.routed,))]
    _topk_backward(logits, valid, chosen, *gradients, score, not extras, extras, 1.0)


def rotated_keys(*, at: Sizes = SIZES, interleaved: bool = False) -> None:
    keys, cos = on_gpu(at.tokens, 2, 8, 384).narrow(-1, 256, 128), on_gpu(at.tokens, 1, 1, 96)
    rotated(keys, cos, on_gpu(at.tokens, 1, 1, 48), interleaved, -1)


def norms_of_sums(*, at: Sizes = SIZES) -> None:
    x, other, total = (on_gpu(at.tokens, 1, at.dim) for _ in range(3))
    weight, scale = on_gpu(at.dim), on_gpu(at.tokens, 1, dtype=FP32)
    sum_norm(x, other, weight, 1e-5)
    sum_norm_gradient(x, other, total, scale, weight)


def losses_of_sums(*, at: Sizes = SIZES) -> None:
    counts, total = (on_gpu(*size, dtype=LONG) for size in ((at.routed,), ()))
    options: Any = (total, 0, TOPK, 0.01, 0.001)
    router_losses(on_gpu(at.routed, dtype=FP32), on_gpu(dtype=FP32), counts, *options)


def loss(*, at: Sizes = SIZES, words: int = 128256) -> None:
    cross_entropy_statistics(on_gpu(at.tokens, words), on_gpu(at.tokens, dtype=LONG), 0)


def loss_back(*, at: Sizes = SIZES, words: int = 128256) -> None:
    numbers = on_gpu(at.tokens, dtype=FP32), on_gpu(at.tokens, dtype=FP32)
    cross_entropy_gradient(on_gpu(at.tokens, words), on_gpu(at.tokens, dtype=LONG), *numbers, 0)


def micro_batch(at: Sizes) -> None:
    """All kernels but those of the loss. Another micro-batch would have other numbers of tokens and rows."""
    for launch in [
        *GEMMS, partial(up, gather=False), partial(down, False), partial(activation_gradient, gather=False),
        partial(weight_gradient, False, True), *BIASED.values(), combined, rows_in_order, chunks,
        sorted_slots, padded, partial(kept, False), kept, routed, routed_back, losses_of_sums,
    ]:  # fmt: skip
        launch(at=at)


def all_kernels(at: Sizes = SIZES) -> None:
    micro_batch(at)
    loss(at=at)
    loss_back(at=at)
