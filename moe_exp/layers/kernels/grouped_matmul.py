"""Grouped GEMM: rows of every expert times its matrix, the down-projection and the gradient of rows. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, dot_constants, jit, num_programs, power_of_2, runs_kernel, tl, tuned
from moe_exp.layers.kernels.tiles import dot, find_row_tile, in_groups, num_row_tiles

# Predicted, not measured; see docs/performance.md. The first one is for deterministic algorithms.
CONFIGS = [
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
]


@tuned(CONFIGS, key=["num_experts", "width", "depth", "stride_wi"])
@jit
def _kernel(
    x, w, y, offsets, num_experts, width, depth, stride_x, stride_wl, stride_wi, stride_wo, stride_y,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_m, num_n = num_row_tiles(offsets, num_experts, BLOCK_M, BLOCK_E), tl.cdiv(width, BLOCK_N)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = in_groups(tile, num_m, num_n, GROUP_M)
        expert, row, row_end = find_row_tile(tile_m, offsets, num_experts, BLOCK_M, BLOCK_E)
        rows, columns = row + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < row_end, columns < width
        depths = tl.arange(0, BLOCK_K)
        x_block = x + rows.to(tl.int64)[:, None] * stride_x + depths[None, :]
        w_block = w + expert.to(tl.int64) * stride_wl + depths[:, None] * stride_wi + columns[None, :] * stride_wo
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            is_depth = depths < depth - start
            a = tl.load(x_block, mask=is_row[:, None] & is_depth[None, :], other=0.0)
            b = tl.load(w_block, mask=is_depth[:, None] & is_column[None, :], other=0.0)
            total = dot(a, b, total, PRECISION, INTERPRET)
            x_block += BLOCK_K
            w_block += BLOCK_K * stride_wi
        y_block = y + rows.to(tl.int64)[:, None] * stride_y + columns[None, :]
        tl.store(y_block, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_matmul_torch(x_RI: Tensor, w_LIO: Tensor, offsets_L1: Tensor) -> Tensor:
    """The twin of `grouped_matmul`."""
    y_RO = x_RI.new_zeros(x_RI.size(0), w_LIO.size(2))
    ends = offsets_L1.tolist()
    for w_IO, first, end in zip(w_LIO.unbind(0), ends, ends[1:], strict=False):
        torch.mm(x_RI[first:end], w_IO, out=y_RO[first:end])
    return y_RO


@compilable("grouped_matmul", lambda x_RI, w_LIO, offsets_L1: x_RI.new_empty(x_RI.size(0), w_LIO.size(2)))
def grouped_matmul(x_RI: Tensor, w_LIO: Tensor, offsets_L1: Tensor) -> Tensor:
    """Each row times its expert's matrix.

    Args:
        x_RI: rows sorted by expert, the last dimension contiguous.
        w_LIO: matrices of the experts; any strides, so also a transposed view.
        offsets_L1: int32, expert e has rows offsets[e] to offsets[e + 1]; the first is 0.

    Returns:
        [R, O]; rows from offsets[L] on have no values.
    """
    if not runs_kernel(x_RI):
        return grouped_matmul_torch(x_RI, w_LIO, offsets_L1)
    num_rows, depth = x_RI.shape
    num_experts, _, width = w_LIO.shape
    y_RO = x_RI.new_empty(num_rows, width)
    if num_rows == 0:
        return y_RO

    def grid(constants: dict[str, int]) -> tuple[int]:
        most_tiles = (cdiv(num_rows, constants["BLOCK_M"]) + num_experts) * cdiv(width, constants["BLOCK_N"])
        return (num_programs(x_RI, most_tiles),)

    _kernel[grid](
        x_RI, w_LIO, y_RO, offsets_L1, num_experts, width, depth, x_RI.stride(0), *w_LIO.stride(), y_RO.stride(0),
        BLOCK_E=power_of_2(num_experts), **dot_constants(x_RI),
    )  # fmt: skip
    return y_RO
