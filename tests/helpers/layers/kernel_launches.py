"""Launches of all kernels on tensors without values, for `compiled.py`: `up` to `weight_gradient` are the
grouped GEMMs at one size, the rest is routing, row order and loss.
"""

from __future__ import annotations

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
from moe_exp.layers.kernels.slot_sort import slot_sort
from moe_exp.layers.kernels.topk import _topk_backward, _topk_forward
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

TOKENS, ROWS, DIM, FFN, EXPERTS = 1024, 4096, 1024, 512, 64
ROUTED, TOPK = 128, 8  # experts of the kernels that are not GEMMs, and how many of them a token uses
INT, LONG, FP32, BF16, BOOL = torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool


def gathered(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {"token_R": on_gpu(rows, dtype=INT), "weights_R": on_gpu(rows, dtype=FP32)}


def offsets(experts: int) -> torch.Tensor:
    return on_gpu(experts + 1, dtype=INT)


def up(
    activation: str = "swiglu",
    gather: bool = True,
    dtype: torch.dtype = BF16,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    dim: int = DIM,
    ffn: int = FFN,
    keeps_hidden: bool = True,
    bias: bool = False,
) -> None:
    width = 2 * ffn if ACTIVATIONS[activation].gated else ffn
    x, w = on_gpu(tokens if gather else rows, dim, dtype=dtype), on_gpu(experts, width, dim, dtype=dtype)
    up_projection(
        x,
        w,
        offsets(experts),
        activation=activation,
        keeps_hidden=keeps_hidden,
        bias1_LW=on_gpu(experts, width, dtype=dtype) if bias else None,
        **(gathered(rows) if gather else {}),
    )


def down(
    transposed: bool = True,
    dtype: torch.dtype = BF16,
    tf32: bool = False,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    dim: int = DIM,
    ffn: int = FFN,
    bias: bool = False,
) -> None:
    del tokens  # as all of GEMMS
    torch.backends.cuda.matmul.allow_tf32 = tf32
    w = (
        on_gpu(experts, dim, ffn, dtype=dtype).transpose(1, 2)
        if transposed
        else on_gpu(experts, ffn, dim, dtype=dtype)
    )
    of_bias = (on_gpu(experts, dim, dtype=dtype), on_gpu(rows, dtype=FP32)) if bias else ()
    grouped_matmul(on_gpu(rows, ffn, dtype=dtype), w, offsets(experts), *of_bias)


def activation_gradient(
    activation: str = "swiglu",
    gather: bool = True,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    dim: int = DIM,
    ffn: int = FFN,
) -> None:
    dy, w = on_gpu(tokens if gather else rows, dim), on_gpu(experts, dim, ffn)
    hidden = on_gpu(rows, ffn * (2 if ACTIVATIONS[activation].gated else 1))
    activation_grad(
        dy, w, hidden, offsets(experts), activation=activation, **(gathered(rows) if gather else {})
    )


def weight_gradient(
    gather: bool = True,
    main_grad: bool = False,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    dim: int = DIM,
    ffn: int = FFN,
) -> None:
    index = on_gpu(rows, dtype=INT) if gather else None
    out = on_gpu(experts, 2 * ffn, dim, dtype=FP32) if main_grad else None
    weight_grad(
        on_gpu(rows, 2 * ffn),
        on_gpu(tokens if gather else rows, dim),
        offsets(experts),
        b_index_R=index,
        out=out,
    )


def bias_gradient(
    gather: bool = True,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    dim: int = DIM,
    ffn: int = FFN,
) -> None:
    """Of the second bias; without gathering of the first."""
    index, dy = (on_gpu(rows, dtype=INT), on_gpu(tokens, dim)) if gather else (None, on_gpu(rows, 2 * ffn))
    weight_grad(on_gpu(rows, 1), dy, offsets(experts), b_index_R=index)


GEMMS = [up, down, activation_gradient, weight_gradient]
# As gpt-oss has them.
BIASED = [
    partial(up, "clamped_swiglu", bias=True),
    partial(down, bias=True),
    partial(activation_gradient, "clamped_swiglu"),
    bias_gradient,
    partial(bias_gradient, False),
]


def combined(weighted: bool = True, *, tokens: int = TOKENS, rows: int = ROWS, dim: int = DIM) -> None:
    weights = on_gpu(tokens, TOPK, dtype=FP32) if weighted else None
    combine(on_gpu(rows, dim), on_gpu(tokens, TOPK, dtype=INT), weights)


def rows_in_order(*, tokens: int = TOKENS, rows: int = ROWS, dim: int = DIM) -> None:
    gather_rows(on_gpu(tokens, dim), on_gpu(rows, dtype=INT), TOPK)


def sorted_slots(*, tokens: int = TOKENS) -> None:
    slot_sort(on_gpu(tokens, TOPK, dtype=LONG), ROUTED)


def chunks(sources: int = 8, experts: int = ROUTED, *, rows: int = ROWS) -> None:
    chunk_order(on_gpu(sources, experts, dtype=LONG), rows)


def kept(by_weight: bool = True, *, tokens: int = TOKENS) -> None:
    weights = on_gpu(tokens, TOPK, dtype=FP32) if by_weight else None
    keep_within(on_gpu(tokens, TOPK, dtype=LONG), weights, on_gpu(ROUTED, dtype=INT))


def padded(*, tokens: int = TOKENS, rows: int = ROWS) -> None:
    padded_order(on_gpu(tokens, TOPK, dtype=LONG), ROUTED, rows, on_gpu(tokens, TOPK, dtype=BOOL))


def routed(
    score: str = "softmax", experts: int = ROUTED, extras: bool = False, *, tokens: int = TOKENS
) -> None:
    bias, valid = (on_gpu(experts, dtype=FP32), on_gpu(tokens, dtype=BOOL)) if extras else (None, None)
    options: Any = (score, not extras, extras, 1.0)
    _topk_forward(on_gpu(tokens, experts, dtype=FP32), bias, valid, TOPK, *options)


def routed_back(
    score: str = "softmax", experts: int = ROUTED, extras: bool = False, *, tokens: int = TOKENS
) -> None:
    logits, chosen = on_gpu(tokens, experts, dtype=FP32), on_gpu(tokens, TOPK, dtype=LONG)
    valid = on_gpu(tokens, dtype=BOOL) if extras else None
    gradients = on_gpu(tokens, TOPK, dtype=FP32), on_gpu(tokens, dtype=FP32), on_gpu(experts + 2, dtype=FP32)
    _topk_backward(logits, valid, chosen, *gradients, score, not extras, extras, 1.0)


def loss(*, tokens: int = TOKENS, words: int = 128256) -> None:
    cross_entropy_statistics(on_gpu(tokens, words), on_gpu(tokens, dtype=LONG), 0)


def loss_back(*, tokens: int = TOKENS, words: int = 128256) -> None:
    numbers = on_gpu(tokens, dtype=FP32), on_gpu(tokens, dtype=FP32)
    cross_entropy_gradient(on_gpu(tokens, words), on_gpu(tokens, dtype=LONG), *numbers, 0)


def micro_batch(tokens: int, rows: int, dim: int = DIM, ffn: int = FFN, routed_to: int = ROUTED) -> None:
    """All kernels but those of the loss. Another micro-batch would have other numbers of tokens and rows."""
    sizes = {"tokens": tokens, "rows": rows, "dim": dim, "ffn": ffn}
    for gemm in GEMMS:
        gemm(**sizes)
    up(gather=False, **sizes)
    down(False, **sizes)
    activation_gradient(gather=False, **sizes)
    weight_gradient(False, True, **sizes)
    for biased in BIASED:
        biased(**sizes)
    combined(tokens=tokens, rows=rows, dim=dim)
    rows_in_order(tokens=tokens, rows=rows, dim=dim)
    chunks(rows=rows)
    sorted_slots(tokens=tokens)
    padded(tokens=tokens, rows=rows)
    kept(False, tokens=tokens)
    kept(tokens=tokens)
    routed(experts=routed_to, tokens=tokens)
    routed_back(experts=routed_to, tokens=tokens)


def all_kernels(tokens: int = TOKENS, rows: int = ROWS, *sizes: int) -> None:
    micro_batch(tokens, rows, *sizes)
    loss(tokens=tokens)
    loss_back(tokens=tokens)
