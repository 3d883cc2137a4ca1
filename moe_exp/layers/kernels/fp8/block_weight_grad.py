"""Gradients of the experts' matrices in e4m3: sums over the rows of an expert, 128 at a time.

One program computes one tile from all rows of its expert: no atomics, so results are bitwise reproducible.
Shape suffixes in `moe_exp.layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.fp8.block_matmul import LAUNCH
from moe_exp.layers.kernels.fp8.quantize import BLOCK
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.tiles import dot, in_groups, row_tile_ends
from moe_exp.layers.kernels.weight_grad import weight_grad_torch


@jit
def _kernel(
    a, a_scale, b, b_scale, dw, offsets, num_experts, size_m, size_n, stride_dl, stride_dm,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, BLOCK_E: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dw[e] = a[rows of e]^T @ b[rows of e], or added to: a [B, M, 128], b [B, N, 128], dw [L, M, N]."""
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
    out_LMN: Tensor,
    a_BMR: Tensor,
    a_scale_BM: Tensor,
    b_BNR: Tensor,
    b_scale_BN: Tensor,
    offsets_L1: Tensor,
    adds: bool,
) -> None:
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


@launch.compilable("fp8_block_weight_grad", lambda *_: None, mutates=["out_LMN"])
def block_weight_grad(
    out_LMN: Tensor,
    a_BMR: Tensor,
    a_scale_BM: Tensor,
    b_BNR: Tensor,
    b_scale_BN: Tensor,
    offsets_L1: Tensor,
    adds: bool,
) -> None:
    """Writes the sum over the rows of every expert, dw_e = sum_r a_r^T b_r, into `out`.

    Args:
        out_LMN: the result, any dtype, last dimension contiguous.
        a_BMR, a_scale_BM: from `quantize_columns`.
        b_BNR, b_scale_BN: the same.
        adds: add to `out`, which stays unchanged for an expert without rows; else these get zeros.
    """
    if not launch.runs_kernel(a_BMR):
        return block_weight_grad_torch(out_LMN, a_BMR, a_scale_BM, b_BNR, b_scale_BN, offsets_L1, adds)
    num_experts, size_m, size_n = out_LMN.shape
    (offsets_L1,) = launch.contiguous(offsets_L1)
    _kernel[(num_experts * launch.cdiv(size_m, BLOCK) * launch.cdiv(size_n, BLOCK),)](
        a_BMR, a_scale_BM, b_BNR, b_scale_BN, out_LMN, offsets_L1, num_experts, size_m, size_n,
        out_LMN.stride(0), out_LMN.stride(1), BLOCK=BLOCK, ADDS=adds, BLOCK_E=launch.power_of_2(num_experts),
        INTERPRET=launch.INTERPRETED, **LAUNCH,
    )  # fmt: skip
    return None
