"""Grouped GEMM for the down-projection's input gradient; its epilogue computes the activation's gradient.

The gradient of the weighted activation is never written to memory. Shape suffixes: see `moe_exp.layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.activations import ACTIVATIONS, weighted_activation_backward
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul_torch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.rows import gather_rows_torch
from moe_exp.layers.kernels.tiles import (
    activate_with_derivative,
    column_chunks,
    dot,
    linear_unit,
    linear_unit_grad,
    load_where,
    row_sources,
    row_tile_ends,
    tile_place,
)
from moe_exp.layers.kernels.tuning import configs, rows_class, tuned

CONFIGS = configs(
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M PROGRAMS TMA num_warps num_stages",
    (128, 128, 64, 8, 1, 0, 8, 3),
    (128, 256, 32, 8, 1, 0, 8, 4),
    (128, 128, 64, 8, 1, 0, 8, 4),
    (64, 128, 64, 8, 2, 0, 4, 4),
    (128, 256, 64, 8, 1, 1, 8, 4),
    (128, 128, 64, 8, 1, 1, 8, 4),
)

LARGEST_K = 64  # BLOCK_K
# A router weight's gradient is a sum over its row. The sum is first taken over chunks of this many columns,
# so that results do not depend on the tile size and need no atomics.
CHUNK_COLUMNS = 16 if launch.INTERPRETED else 32


@jit
def _load(
    hidden_rows, is_row, first, width: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Loads one chunk of columns of gate and up. Without a gate, returns the pre-activation twice."""
    columns, mask = first + tl.arange(0, CHUNK), is_row[:, None]
    if not EVEN:
        mask = mask & (columns < width)[None, :]
    gate = tl.load(hidden_rows[:, None] + columns[None, :], mask=mask, other=0.0)
    up = gate
    if GATED:
        up = tl.load(hidden_rows[:, None] + (width + columns)[None, :], mask=mask, other=0.0)
    return gate, up


@jit
def _finish(
    dactive, gate, up, dhidden_rows, weighted_rows, partials, scale, is_row, first, num_rows,
    width: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes all results for one chunk of columns; `dactive` is the gradient of the weighted activation."""
    columns, mask = first + tl.arange(0, CHUNK), is_row[:, None]
    if not EVEN:
        mask = mask & (columns < width)[None, :]
    # The activation is recomputed from the saved pre-activation while the product is in registers, so that
    # nothing else of width F is saved for backward.
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    active, derivative = activate_with_derivative(gate, ACTIVATION)
    dproduct = dactive * scale[:, None]
    if GATED:
        dup = linear_unit_grad(dproduct * active, up, ACTIVATION).to(dhidden_rows.dtype.element_ty)
        tl.store(dhidden_rows[:, None] + (width + columns)[None, :], dup, mask=mask)
        up = linear_unit(up, ACTIVATION)
        dproduct *= up
        active *= up
    tl.store(
        dhidden_rows[:, None] + columns[None, :],
        (dproduct * derivative).to(dhidden_rows.dtype.element_ty),
        mask=mask,
    )
    weighted = (active * scale[:, None]).to(weighted_rows.dtype.element_ty)
    tl.store(weighted_rows[:, None] + columns[None, :], weighted, mask=mask)
    # In masked columns both factors are zero.
    partial = partials + (first // CHUNK).to(tl.int64) * num_rows
    tl.store(partial, tl.sum(dactive * active, 1), mask=tl.where(is_row, first, width) < width)


@tuned(
    CONFIGS,
    key=["num_experts", "rows_class", "width", "depth", "GATED", "HAS_TMA"],
    blocks=lambda at: {"dy_tma": [at["BLOCK_M"], at["BLOCK_K"]], "w_tma": [1, at["BLOCK_K"], at["BLOCK_N"]]},
)
@jit
def _kernel(
    dy, w, hidden, weights, tokens, offsets, dhidden, weighted, partials, dy_tma, w_tma, num_experts,
    num_tokens, num_rows, rows_class, stride_dy, stride_wl, stride_wd, stride_wf, stride_hidden,
    depth, width: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_TMA: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    DEPTH: tl.constexpr = BLOCK_K * 16 // dy.dtype.element_ty.primitive_bitwidth
    EVEN_N: tl.constexpr = width % BLOCK_N == 0
    HIDDEN: tl.constexpr = 2 * width if GATED else width
    tile_ends = row_tile_ends(offsets, num_experts, BLOCK_M, BLOCK_E)
    num_m, num_n = tl.max(tile_ends, 0), tl.cdiv(width, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, row, row_end, tile_n = tile_place(tile, num_m, num_n, tile_ends, offsets, BLOCK_M, GROUP_M)
        rows, first = row + tl.arange(0, BLOCK_M), tile_n * BLOCK_N
        is_row, columns = rows < row_end, first + tl.arange(0, BLOCK_N)
        source, is_token = row_sources(tokens, rows, row_end, num_tokens)
        depths = tl.arange(0, DEPTH)
        dy_block = dy + source.to(tl.int64)[:, None] * stride_dy + depths[None, :]
        w_block = (
            w + expert.to(tl.int64) * stride_wl + depths[:, None] * stride_wd + columns[None, :] * stride_wf
        )
        dactive = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            is_depth = depths < depth - start
            if TMA and dy_tma is not None:
                a = dy_tma.load([row, start])
            else:
                a = load_where(dy_block, is_depth[None, :], EVEN_K)
            if TMA:
                b = w_tma.load([expert, start, first]).reshape(DEPTH, BLOCK_N)
            else:
                b = load_where(w_block, is_depth[:, None] & (columns < width)[None, :], EVEN_K and EVEN_N)
            dactive = dot(a, b, dactive, PRECISION, INTERPRET)
            dy_block += DEPTH
            w_block += DEPTH * stride_wd
        if tokens is not None:
            dactive = tl.where(is_token[:, None], dactive, 0.0)
        rows64 = rows.to(tl.int64)
        hidden_rows, dhidden_rows = hidden + rows64 * stride_hidden, dhidden + rows64 * HIDDEN
        weighted_rows = weighted + rows64 * width
        scale = tl.load(weights + rows, mask=is_row, other=0.0).to(tl.float32)
        # In chunks, so that a chunk's values leave the registers before the next chunk needs them. The next
        # chunk's operands are loaded before this chunk's results are stored.
        chunks = column_chunks(dactive, BLOCK_M, BLOCK_N, CHUNK)
        gate, up = _load(hidden_rows, is_row, first, width, EVEN_N, GATED, CHUNK)
        for i in tl.static_range(BLOCK_N // CHUNK):
            this_gate, this_up = gate, up
            if i + 1 < BLOCK_N // CHUNK:
                gate, up = _load(hidden_rows, is_row, first + (i + 1) * CHUNK, width, EVEN_N, GATED, CHUNK)
            _finish(
                chunks[i], this_gate, this_up, dhidden_rows, weighted_rows, partials + rows, scale, is_row,
                first + i * CHUNK, num_rows, width, EVEN_N, ACTIVATION, GATED, CHUNK,
            )  # fmt: skip


def activation_grad_torch(
    dy: Tensor, weight2_LDF: Tensor, hidden_RW: Tensor, offsets_L1: Tensor, *, activation: str,
    weights_R: Tensor, token_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dactive_RF = grouped_matmul_torch(
        dy if token_R is None else gather_rows_torch(dy, token_R), weight2_LDF, offsets_L1
    )
    return activation_backward_torch(dactive_RF, hidden_RW, weights_R, activation)


def activation_backward_torch(
    dactive_RF: Tensor, hidden_RW: Tensor, weights_R: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the results of `activation_grad`, given `dactive_RF` = dy W2. Like the kernel, uses fp32."""
    wide = torch.promote_types(hidden_RW.dtype, torch.float32)
    weights_R1 = weights_R.to(wide).unsqueeze(1)
    dhidden_RW, dweights_R, product_RF = weighted_activation_backward(
        dactive_RF.to(wide), hidden_RW.to(wide), weights_R1, activation
    )
    return dhidden_RW.to(hidden_RW.dtype), product_RF.mul_(weights_R1).to(hidden_RW.dtype), dweights_R


@launch.compilable(
    "activation_grad",
    lambda dy, weight2_LDF, hidden_RW, *_, **__: (
        hidden_RW.new_empty(hidden_RW.shape),
        hidden_RW.new_empty(hidden_RW.size(0), weight2_LDF.size(2)),
        hidden_RW.new_empty(hidden_RW.size(0), dtype=torch.promote_types(hidden_RW.dtype, torch.float32)),
    ),
    twin=activation_grad_torch,
)
def activation_grad(
    dy: Tensor, weight2_LDF: Tensor, hidden_RW: Tensor, offsets_L1: Tensor, *, activation: str,
    weights_R: Tensor, token_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the pre-activation h and the router weight w.

    With a = activation(h): da = dy W2; dh = d(a w)/dh da; dw = sum over F of da * a.

    Args:
        dy: output gradient, in the dtype of the weights; rows [R, D], or tokens [T, D] if `token_R` is given.
        weight2_LDF: second projection of the experts, in PyTorch's (out, in) order.
        hidden_RW: pre-activation, gate half first.
        token_R: int32, token index of each row; T for a padding row, whose gradient is zero.
        weights_R: fp32 router weights.

    Returns:
        Three tensors: the gradient of hidden_RW; a * w [R, F], needed for the gradient of W2; and the
        gradient of the router weights [R]. The first two have the dtype of hidden_RW, the third is fp32.
        Rows >= offsets[L] are undefined.
    """
    num_rows, (num_experts, depth, width) = hidden_RW.size(0), weight2_LDF.shape
    dhidden_RW, weighted_RF = hidden_RW.new_empty(hidden_RW.shape), hidden_RW.new_empty(num_rows, width)
    partials_CR = hidden_RW.new_empty(launch.cdiv(width, CHUNK_COLUMNS), num_rows, dtype=torch.float32)
    if num_rows == 0:
        return dhidden_RW, weighted_RF, partials_CR.sum(dim=0)
    if dy.size(0) == 0:  # all rows are padding, which reads row 0
        dy = dy.new_zeros(1, depth)
    offsets_L1, token_R, weights_R = launch.contiguous(offsets_L1, token_R, weights_R)
    dy, hidden_RW = launch.last_contiguous(dy), launch.last_contiguous(hidden_RW)

    dy_tma, w_tma = launch.descriptors(dy if token_R is None else None, weight2_LDF)
    _kernel[launch.grid_of_tiles(dy, num_experts, num_rows, width)](
        dy, weight2_LDF, hidden_RW, weights_R, token_R, offsets_L1, dhidden_RW, weighted_RF, partials_CR,
        dy_tma, w_tma, num_experts, dy.size(0), num_rows, rows_class(num_rows, num_experts), dy.stride(0),
        *weight2_LDF.stride(), hidden_RW.stride(0), depth, width=width, EVEN_K=depth % LARGEST_K == 0,
        ACTIVATION=activation, GATED=ACTIVATIONS[activation].gated, HAS_TMA=w_tma is not None,
        CHUNK=CHUNK_COLUMNS, BLOCK_E=launch.power_of_2(num_experts), **launch.dot_constants(dy),
    )  # fmt: skip
    return dhidden_RW, weighted_RF, partials_CR.sum(dim=0)
