"""Grouped GEMMs in e4m3: multiply each row by its expert's matrix, and compute the gradients of the matrices.

Tensor cores sum 128 products at a time. Each sum is multiplied by the scales of both input blocks, then added
in fp32, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). Hopper's tensor cores keep only about 14 bits
of FP8 sums. Each program computes all sums of one tile of the result, without atomics, so results are
bitwise reproducible. Shape suffixes: see `moe_exp.layers`; C counts blocks of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.fp8.quantize import BLOCK
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul_torch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.tiles import dot, in_groups, load_where, row_tile_ends, tile_place
from moe_exp.layers.kernels.weight_grad import weight_grad_torch

# Not tuned: the products of a step and the sums must both fit in registers, which leaves one tile size.
LAUNCH = {"num_warps": 8, "num_stages": 3}


@jit
def _matmul_kernel(
    x, x_scale, w, w_scale, y, bias, weights, offsets, num_experts, width, depth, BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] @ w[e]^T + weights[r] * bias[e], where e is the expert of row r.

    x [R, I], w [L, O, I], y [R, O]; I is `depth`, O is `width`.
    """
    tile_ends = row_tile_ends(offsets, num_experts, BLOCK, BLOCK_E)
    num_m, num_n, steps = tl.max(tile_ends, 0), tl.cdiv(width, BLOCK), tl.cdiv(depth, BLOCK)
    tile = tl.program_id(0)
    if tile >= num_m * num_n:
        return
    expert, row, row_end, tile_n = tile_place(tile, num_m, num_n, tile_ends, offsets, BLOCK, 8)
    expert, each = expert.to(tl.int64), tl.arange(0, BLOCK)
    rows, columns = row + each, tile_n * BLOCK + each
    source, of_w = tl.minimum(rows, row_end - 1).to(tl.int64), tl.minimum(columns, width - 1)
    x_block = x + source[:, None] * depth + each[None, :]
    w_block = w + expert * width * depth + of_w[None, :] * depth + each[:, None]
    x_scales, w_scales = x_scale + source * steps, w_scale + (expert * num_n + tile_n) * steps
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(steps):
        is_depth = each < depth - step * BLOCK
        a = load_where(x_block, is_depth[None, :], EVEN_K)
        b = load_where(w_block, is_depth[:, None], EVEN_K)
        scale = tl.load(x_scales + step) * tl.load(w_scales + step)
        total += dot(a, b, tl.zeros_like(total), "ieee", INTERPRET) * scale[:, None]
        x_block += BLOCK
        w_block += BLOCK
    is_row, is_column = rows < row_end, columns < width
    if bias is not None:
        bias_row = tl.load(bias + expert * width + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if weights is not None:
            bias_row = bias_row * tl.load(weights + rows, mask=is_row, other=0.0)[:, None]
        total += bias_row
    y_block = y + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(y_block, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def block_matmul_torch(
    x_RI: Tensor, x_scale_RC: Tensor, w_LOI: Tensor, w_scale_LCC: Tensor, offsets_L1: Tensor,
    dtype: torch.dtype, bias_LO: Tensor | None = None, weights_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x = x_RI.float() * x_scale_RC.repeat_interleave(BLOCK, dim=1)[:, : x_RI.size(1)]
    scale_LOC = w_scale_LCC.repeat_interleave(BLOCK, dim=1)[:, : w_LOI.size(1)]
    w = w_LOI.float() * scale_LOC.repeat_interleave(BLOCK, dim=2)[:, :, : w_LOI.size(2)]
    if bias_LO is not None:
        bias_LO = bias_LO.float()
        weights_R = x.new_ones(x.size(0)) if weights_R is None else weights_R
    return grouped_matmul_torch(x, w.transpose(1, 2), offsets_L1, bias_LO, weights_R).to(dtype)


@launch.compilable(
    "fp8_block_matmul",
    lambda x_RI, _x, w_LOI, _w, _offsets, dtype, *_: x_RI.new_empty(x_RI.size(0), w_LOI.size(1), dtype=dtype),
    twin=block_matmul_torch,
)
def block_matmul(
    x_RI: Tensor, x_scale_RC: Tensor, w_LOI: Tensor, w_scale_LCC: Tensor, offsets_L1: Tensor,
    dtype: torch.dtype, bias_LO: Tensor | None = None, weights_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies each row by its expert's matrix. Returns [R, O]; rows from offsets_L1[L] on are undefined.

    Args:
        x_RI, x_scale_RC: rows sorted by expert, from `quantize_rows`.
        w_LOI, w_scale_LCC: matrices of the experts, from `quantize_blocks`; both contiguous.
        dtype: dtype of the result.
        bias_LO: bias of each expert; multiplied by the row's weight, then added to the row. None: no bias.
        weights_R: fp32, factor on the bias for each row; None: 1.
    """
    (num_rows, depth), (num_experts, width, _) = x_RI.shape, w_LOI.shape
    y_RO = x_RI.new_empty(num_rows, width, dtype=dtype)
    if num_rows:
        offsets_L1, bias_LO, weights_R = launch.contiguous(offsets_L1, bias_LO, weights_R)
        most_tiles = (launch.cdiv(num_rows, BLOCK) + num_experts) * launch.cdiv(width, BLOCK)
        _matmul_kernel[(most_tiles,)](
            x_RI, x_scale_RC, w_LOI, w_scale_LCC, y_RO, bias_LO, weights_R, offsets_L1, num_experts, width,
            depth, BLOCK=BLOCK, EVEN_K=depth % BLOCK == 0, BLOCK_E=launch.power_of_2(num_experts),
            INTERPRET=launch.INTERPRETED, **LAUNCH,
        )  # fmt: skip
    return y_RO


@jit
def _weight_grad_kernel(
    a, a_scale, b, b_scale, dw, offsets, num_experts, size_m, size_n, stride_dl, stride_dm,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, BLOCK_E: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sums a[i] @ b[i]^T over the blocks i of each expert e. If ADDS, adds the sum to dw[e], else writes it.

    a [B, M, 128] and b [B, N, 128] hold B transposed blocks of 128 rows; dw [L, M, N].
    """
    tiles_m, tiles_n = tl.cdiv(size_m, BLOCK), tl.cdiv(size_n, BLOCK)
    expert, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    ends, experts = row_tile_ends(offsets, num_experts, BLOCK, BLOCK_E), tl.arange(0, BLOCK_E)
    first = tl.sum(tl.where(experts == expert - 1, ends, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    if ADDS and first == end:
        return
    tile_m, tile_n = in_groups(tile, tiles_m, tiles_n, 8)
    each = tl.arange(0, BLOCK)
    m, n = tile_m * BLOCK + each, tile_n * BLOCK + each
    of_a = first.to(tl.int64) * size_m + tl.minimum(m, size_m - 1)
    of_b = first.to(tl.int64) * size_n + tl.minimum(n, size_n - 1)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for _ in range(first, end):
        x = tl.load(a + of_a[:, None] * BLOCK + each[None, :])
        y = tl.load(b + of_b[None, :] * BLOCK + each[:, None])
        product = dot(x, y, tl.zeros_like(total), "ieee", INTERPRET)
        total += product * tl.load(a_scale + of_a)[:, None] * tl.load(b_scale + of_b)[None, :]
        of_a += size_m
        of_b += size_n
    block = dw + expert.to(tl.int64) * stride_dl + m.to(tl.int64)[:, None] * stride_dm + n[None, :]
    mask = (m < size_m)[:, None] & (n < size_n)[None, :]
    if ADDS:
        total += tl.load(block, mask=mask, other=0.0)
    tl.store(block, total.to(dw.dtype.element_ty), mask=mask)


def block_weight_grad_torch(
    out_LMN: Tensor, a_BMR: Tensor, a_scale_BM: Tensor, b_BNR: Tensor, b_scale_BN: Tensor, offsets_L1: Tensor,
    adds: bool,
) -> None:  # fmt: skip
    a, b = (
        (q.float() * scale.unsqueeze(2)).transpose(1, 2).flatten(0, 1)
        for q, scale in ((a_BMR, a_scale_BM), (b_BNR, b_scale_BN))
    )
    rows_L = (offsets_L1.diff() + BLOCK - 1) // BLOCK * BLOCK
    padded_L1 = torch.nn.functional.pad(rows_L.cumsum(0), (1, 0))
    sums_LMN = weight_grad_torch(a, b, padded_L1)
    if adds:
        out_LMN += sums_LMN
    else:
        out_LMN.copy_(sums_LMN)


@launch.compilable(
    "fp8_block_weight_grad", lambda *_: None, twin=block_weight_grad_torch, mutates=["out_LMN"]
)
def block_weight_grad(
    out_LMN: Tensor, a_BMR: Tensor, a_scale_BM: Tensor, b_BNR: Tensor, b_scale_BN: Tensor, offsets_L1: Tensor,
    adds: bool,
) -> None:  # fmt: skip
    """Writes each expert's weight gradient to `out_LMN`: the sum of a_r^T b_r over the expert's rows r.

    Args:
        out_LMN: the result, any dtype, last dimension contiguous.
        a_BMR, a_scale_BM, b_BNR, b_scale_BN: from `quantize_columns`.
        adds: add to `out_LMN` instead of overwriting it.
    """
    num_experts, size_m, size_n = out_LMN.shape
    (offsets_L1,) = launch.contiguous(offsets_L1)
    _weight_grad_kernel[(num_experts * launch.cdiv(size_m, BLOCK) * launch.cdiv(size_n, BLOCK),)](
        a_BMR, a_scale_BM, b_BNR, b_scale_BN, out_LMN, offsets_L1, num_experts, size_m, size_n,
        out_LMN.stride(0), out_LMN.stride(1), BLOCK=BLOCK, ADDS=adds, BLOCK_E=launch.power_of_2(num_experts),
        INTERPRET=launch.INTERPRETED, **LAUNCH,
    )  # fmt: skip
