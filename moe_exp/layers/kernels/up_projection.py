"""Grouped GEMM of the up-projection. It gathers rows, and its epilogue computes the weighted activation.

Shape suffixes: see `moe_exp.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.activations import ACTIVATIONS, activate
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul_torch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.rows import gather_rows_torch
from moe_exp.layers.kernels.tiles import (
    activate_with_derivative,
    column_chunks,
    dot,
    linear_unit,
    load_where,
    row_sources,
    row_tile_ends,
    tile_place,
)
from moe_exp.layers.kernels.tuning import configs, rows_class, tuned

LARGEST_K = 64
# BLOCK_K counts elements of two bytes. If the activation is gated, half of BLOCK_N are columns of the gate.
CONFIGS = configs(
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M PROGRAMS TMA num_warps num_stages", (128, 128, 64, 8, 1, 0, 8, 4),
    (128, 256, 32, 8, 1, 0, 8, 4), (128, 128, 32, 8, 2, 0, 4, 4), (64, 128, 64, 8, 2, 0, 4, 3),
    (128, 256, 64, 8, 1, 1, 8, 4), (128, 128, 64, 8, 1, 1, 8, 4), (128, 128, 64, 8, 2, 1, 8, 3),
    (128, 128, 64, 8, 2, 1, 4, 3),
)  # fmt: skip
# Columns of the product that the epilogue processes per step.
CHUNK_COLUMNS = tl.constexpr(64) if tl else 64


@jit
def _finish(
    products, hidden_rows, active_rows, scale, is_row, column, width, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, KEEPS_HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes COLUMNS columns, starting at `column`: the weighted activation, and `hidden` if KEEPS_HIDDEN."""
    columns = column + tl.arange(0, COLUMNS)
    is_out = is_row[:, None] & (columns < width)[None, :]
    hidden_block = hidden_rows[:, None] + columns[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(products, (ROWS, COLUMNS, 2)))
        if KEEPS_HIDDEN:
            tl.store(hidden_block + width, up.to(hidden_rows.dtype.element_ty), mask=is_out)
    else:
        gate = products
    if KEEPS_HIDDEN:
        tl.store(hidden_block, gate.to(hidden_rows.dtype.element_ty), mask=is_out)
    y, _ = activate_with_derivative(gate, ACTIVATION)  # Triton removes the unused derivative
    y *= scale[:, None]
    if GATED:
        y *= linear_unit(up, ACTIVATION)
    tl.store(active_rows[:, None] + columns[None, :], y.to(active_rows.dtype.element_ty), mask=is_out)


@tuned(
    CONFIGS,
    key=["num_experts", "rows_class", "width", "depth", "GATED", "KEEPS_HIDDEN", "HAS_TMA"],
    blocks=lambda at: {
        "x_tma": [at["BLOCK_M"], at["BLOCK_K"]],
        "w_tma": [1, *([at["BLOCK_N"] // 2, 2] if at["GATED"] else [at["BLOCK_N"]]), at["BLOCK_K"]],
    },
)
@jit
def _kernel(
    x, w, hidden, active, x_tma, w_tma, bias, token, weights, offsets, num_tokens, num_experts, rows_class,
    width, depth, stride_x, stride_wl, stride_ww, stride_hidden, stride_active, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, KEEPS_HIDDEN: tl.constexpr, HAS_TMA: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    DEPTH: tl.constexpr = BLOCK_K * 16 // x.dtype.element_ty.primitive_bitwidth
    BLOCK_F: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    CHUNK: tl.constexpr = BLOCK_N if BLOCK_N < CHUNK_COLUMNS else CHUNK_COLUMNS
    OUT_CHUNK: tl.constexpr = CHUNK // 2 if GATED else CHUNK
    tile_ends = row_tile_ends(offsets, num_experts, BLOCK_M, BLOCK_E)
    num_m, num_n = tl.max(tile_ends, 0), tl.cdiv(width, BLOCK_F)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, row, row_end, tile_n = tile_place(tile, num_m, num_n, tile_ends, offsets, BLOCK_M, GROUP_M)
        rows, column = row + tl.arange(0, BLOCK_M), tile_n * BLOCK_F
        source, is_token = row_sources(token, rows, row_end, num_tokens)
        depths = tl.arange(0, DEPTH)
        x_block = x + source.to(tl.int64)[:, None] * stride_x + depths[None, :]
        # Columns of gate and up alternate in one product, so that one thread holds both values of a pair.
        each = tl.arange(0, BLOCK_N)
        of_w = tl.minimum(column + (each // 2 if GATED else each), width - 1)
        if GATED:
            of_w += (each % 2) * width
        w_block = w + expert.to(tl.int64) * stride_wl + of_w[None, :] * stride_ww + depths[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if bias is not None:
            bias_row = bias + expert.to(tl.int64) * (2 * width if GATED else width)
            total += tl.load(bias_row + of_w).to(tl.float32)[None, :]
        for start in range(0, depth, DEPTH):
            is_depth = depths < depth - start
            if TMA and x_tma is not None:
                a = x_tma.load([row, start])
            else:
                a = load_where(x_block, is_depth[None, :], EVEN_K)
            if TMA and GATED:
                b = w_tma.load([expert, column, 0, start]).reshape(BLOCK_N, DEPTH).T
            elif TMA:
                b = w_tma.load([expert, column, start]).reshape(BLOCK_N, DEPTH).T
            else:
                b = load_where(w_block, is_depth[:, None], EVEN_K)
            total = dot(a, b, total, PRECISION, INTERPRET)
            x_block += DEPTH
            w_block += DEPTH
        if token is not None:
            total = tl.where(is_token[:, None], total, 0.0)

        is_row, rows64 = rows < row_end, rows.to(tl.int64)
        scale = tl.load(weights + rows, mask=is_row, other=0.0)
        # In chunks, so that a chunk's values leave the registers before the next chunk needs them.
        chunks = column_chunks(total, BLOCK_M, BLOCK_N, CHUNK)
        for i in tl.static_range(BLOCK_N // CHUNK):
            _finish(
                chunks[i], hidden + rows64 * stride_hidden, active + rows64 * stride_active, scale, is_row,
                column + i * OUT_CHUNK, width, ACTIVATION, GATED, KEEPS_HIDDEN, BLOCK_M, OUT_CHUNK,
            )  # fmt: skip


def up_projection_torch(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, weights_R: Tensor,
    token_R: Tensor | None = None, bias1_LW: Tensor | None = None, keeps_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows_RD = x if token_R is None else gather_rows_torch(x, token_R)
    hidden_RW = grouped_matmul_torch(rows_RD, weight1_LWD.transpose(1, 2), offsets_L1)
    if bias1_LW is not None:
        hidden_RW[: int(offsets_L1[-1])] += bias1_LW.repeat_interleave(offsets_L1.diff(), dim=0)
        if token_R is not None:
            hidden_RW[token_R == x.size(0)] = 0
    wide = torch.promote_types(x.dtype, torch.float32)
    active_RF = activate(hidden_RW.to(wide), activation) * weights_R.unsqueeze(1)
    return hidden_RW if keeps_hidden else hidden_RW.new_empty(0, hidden_RW.size(1)), active_RF.to(x.dtype)


def _outputs(
    x: Tensor, weight1_LWD: Tensor, *_: Any, activation: str, token_R: Tensor | None = None,
    keeps_hidden: bool = True, **__: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, width = x.size(0) if token_R is None else token_R.size(0), weight1_LWD.size(1)
    hidden_RW = x.new_empty(num_rows if keeps_hidden else 0, width)
    return hidden_RW, x.new_empty(num_rows, width // 2 if ACTIVATIONS[activation].gated else width)


@launch.compilable("up_projection", _outputs, twin=up_projection_torch)
def up_projection(
    x: Tensor, weight1_LWD: Tensor, offsets_L1: Tensor, *, activation: str, weights_R: Tensor,
    token_R: Tensor | None = None, bias1_LW: Tensor | None = None, keeps_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes hidden = x[token] W1^T + b1 and activation(hidden) * router weight. Sums are in fp32.

    Args:
        x: tokens [T, D]; if `token_R` is None, rows [R, D], sorted by expert.
        weight1_LWD: in PyTorch's (out, in) order, gate half first.
        token_R: int32, token of each row; T for a padding row, whose result is zero.
        weights_R: fp32, router weight of each row.
        bias1_LW: b1 in the dtype of x; None: no bias.
        keeps_hidden: whether to write hidden, for backward.

    Returns:
        hidden [R, W] ([0, W] if not `keeps_hidden`) and the weighted activation [R, F], in the dtype of x.
        The rows from offsets[L] on are undefined.
    """
    hidden_RW, active_RF = _outputs(
        x, weight1_LWD, activation=activation, token_R=token_R, keeps_hidden=keeps_hidden
    )
    (num_rows, width), num_experts = active_RF.shape, weight1_LWD.size(0)
    gated = ACTIVATIONS[activation].gated
    if num_rows == 0 or x.size(0) == 0:
        return hidden_RW.zero_(), active_RF.zero_()
    offsets_L1, token_R, weights_R, bias1_LW = launch.contiguous(offsets_L1, token_R, weights_R, bias1_LW)
    x, weight1_LWD = launch.last_contiguous(x), launch.last_contiguous(weight1_LWD)

    # [L, F, 2, D], so that rows of gate and up alternate in a block.
    pairs = weight1_LWD.unflatten(1, (2, width)).transpose(1, 2) if gated else weight1_LWD
    x_tma, w_tma = launch.descriptors(x if token_R is None else None, pairs)
    _kernel[launch.grid_of_tiles(x, num_experts, num_rows, hidden_RW.size(1))](
        x, weight1_LWD, hidden_RW, active_RF, x_tma, w_tma, bias1_LW, token_R, weights_R, offsets_L1,
        x.size(0), num_experts, rows_class(num_rows, num_experts), width, x.size(1), x.stride(0),
        weight1_LWD.stride(0), weight1_LWD.stride(1), hidden_RW.stride(0), active_RF.stride(0),
        ACTIVATION=activation, GATED=gated, KEEPS_HIDDEN=keeps_hidden, HAS_TMA=w_tma is not None,
        EVEN_K=x.size(1) % LARGEST_K == 0, BLOCK_E=launch.power_of_2(num_experts), **launch.dot_constants(x),
    )  # fmt: skip
    return hidden_RW, active_RF
