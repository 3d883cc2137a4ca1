"""Grouped GEMM: multiplies each row by its expert's matrix, and optionally adds a bias.

Used for the down-projection and the rows' gradients; up_projection.py contains the up-projection's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.tiles import dot, load_where, row_tile_ends, tile_place
from moe_exp.layers.kernels.tuning import configs, rows_class, tuned

LARGEST_N, LARGEST_K = 256, 64  # BLOCK_N and BLOCK_K of the configs below
# BLOCK_K counts elements of two bytes; DEPTH is the same number of bytes in elements of x.
CONFIGS = configs(
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M PROGRAMS TMA num_warps num_stages", (128, 128, 64, 8, 1, 0, 8, 4),
    (128, 256, 32, 8, 1, 0, 8, 4), (128, 128, 32, 8, 2, 0, 4, 4), (64, 128, 64, 8, 2, 0, 4, 3),
    (128, 256, 64, 8, 1, 1, 8, 4), (128, 128, 64, 8, 2, 1, 8, 3), (128, 128, 64, 8, 2, 1, 4, 3),
)  # fmt: skip


def _by_library(at: dict[str, Any]) -> None:
    """Calls torch._grouped_mm in place of `_kernel`. Like `_kernel`, does not initialize the rows after
    the last expert's rows. The result is not copied: `y` takes over its memory.
    """
    memory = at["y"].untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)  # the result needs as much
    try:
        at["y"].set_(torch._grouped_mm(at["x"], at["w"], offs=at["offsets"][1:]))
    except Exception:  # another config then writes to y
        memory.resize_(size)
        raise


@tuned(
    CONFIGS,
    key=["num_experts", "rows_class", "width", "depth", "TRANSPOSED", "HAS_TMA"],
    blocks=lambda at: {
        "x_tma": [at["BLOCK_M"], at["BLOCK_K"]],
        "w_tma": [1, at["BLOCK_N"], at["BLOCK_K"]] if at["TRANSPOSED"] else [1, at["BLOCK_K"], at["BLOCK_N"]],
    },
    library=_by_library,
)
@jit
def _kernel(
    x, w, y, x_tma, w_tma, bias, weights, offsets, num_experts, rows_class, width, depth, stride_x, stride_wl,
    stride_wi, stride_wo, stride_y, TRANSPOSED: tl.constexpr, HAS_TMA: tl.constexpr,
    HAS_LIBRARY: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PROGRAMS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] @ w[e] + weights[r] * bias[e], where e is the expert of row r.

    x [R, I], w [L, I, O] with any strides, y [R, O]; depth is I, width is O. Only the tuner
    uses `rows_class`, HAS_TMA and HAS_LIBRARY. Only the grid uses PROGRAMS.
    """
    DEPTH: tl.constexpr = BLOCK_K * 16 // x.dtype.element_ty.primitive_bitwidth
    tile_ends = row_tile_ends(offsets, num_experts, BLOCK_M, BLOCK_E)
    num_m, num_n = tl.max(tile_ends, 0), tl.cdiv(width, BLOCK_N)
    # Persistent: each program computes several tiles of BLOCK_M rows of one expert by BLOCK_N columns. Rows
    # past the expert's last row are computed from arbitrary data but not stored.
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        expert, row, row_end, tile_n = tile_place(tile, num_m, num_n, tile_ends, offsets, BLOCK_M, GROUP_M)
        rows, columns = row + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < width
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if TMA:
            for start in range(0, depth, DEPTH):
                a = x_tma.load([row, start])
                if TRANSPOSED:
                    b = w_tma.load([expert, tile_n * BLOCK_N, start]).reshape(BLOCK_N, DEPTH).T
                else:
                    b = w_tma.load([expert, start, tile_n * BLOCK_N]).reshape(DEPTH, BLOCK_N)
                total = dot(a, b, total, PRECISION, INTERPRET)
        else:
            depths = tl.arange(0, DEPTH)
            x_block = x + tl.minimum(rows, row_end - 1).to(tl.int64)[:, None] * stride_x + depths[None, :]
            matrix = w + expert.to(tl.int64) * stride_wl
            w_block = matrix + depths[:, None] * stride_wi + columns[None, :] * stride_wo
            for start in range(0, depth, DEPTH):
                is_depth = depths < depth - start
                a = load_where(x_block, is_depth[None, :], EVEN_K)
                if EVEN_N:
                    b = load_where(w_block, is_depth[:, None], EVEN_K)
                else:
                    b = tl.load(w_block, mask=is_depth[:, None] & is_column[None, :], other=0.0)
                total = dot(a, b, total, PRECISION, INTERPRET)
                x_block += DEPTH
                w_block += DEPTH * stride_wi
        if bias is not None:
            bias_row = tl.load(bias + expert.to(tl.int64) * width + columns, mask=is_column, other=0.0)
            scale = tl.load(weights + rows, mask=rows < row_end, other=0.0)
            total += scale[:, None] * bias_row.to(tl.float32)[None, :]
        y_block = y + rows.to(tl.int64)[:, None] * stride_y + columns[None, :]
        tl.store(y_block, total.to(y.dtype.element_ty), mask=(rows < row_end)[:, None] & is_column[None, :])


def grouped_matmul_torch(
    x_RI: Tensor, w_LIO: Tensor, offsets_L1: Tensor, bias_LO: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    y_RO = x_RI.new_zeros(x_RI.size(0), w_LIO.size(2))
    ends = offsets_L1.tolist()
    for w_IO, first, end in zip(w_LIO.unbind(0), ends, ends[1:], strict=False):
        torch.mm(x_RI[first:end], w_IO, out=y_RO[first:end])
    if bias_LO is not None and weights_R is not None:
        y_RO[: ends[-1]] += weights_R[: ends[-1], None] * bias_LO.repeat_interleave(offsets_L1.diff(), dim=0)
    return y_RO


@launch.compilable(
    "grouped_matmul", lambda x_RI, w_LIO, *_: x_RI.new_empty(x_RI.size(0), w_LIO.size(2)),
    twin=grouped_matmul_torch,
)  # fmt: skip
def grouped_matmul(
    x_RI: Tensor, w_LIO: Tensor, offsets_L1: Tensor, bias_LO: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies each row by its expert's matrix. Returns [R, O]; rows from offsets[L] on are undefined.

    Args:
        x_RI: rows sorted by expert.
        w_LIO: the experts' matrices, with any strides (for example a transposed view).
        bias_LO: bias of each expert, multiplied by the row's weight and added to the result. None: no bias.
        weights_R: fp32, factor on the bias for each row.
    """
    (num_rows, depth), (num_experts, _, width) = x_RI.shape, w_LIO.shape
    y_RO = x_RI.new_empty(num_rows, width)
    if num_rows == 0:
        return y_RO
    offsets_L1, bias_LO, weights_R = launch.contiguous(offsets_L1, bias_LO, weights_R)
    x_RI = launch.last_contiguous(x_RI)

    transposed = w_LIO.stride(1) == 1
    x_tma, w_tma = launch.descriptors(x_RI, w_LIO.transpose(1, 2) if transposed else w_LIO)
    # PyTorch refuses operands that TMA does not support, and pads the rows of its result to 16 bytes.
    has_library = bias_LO is None and w_tma is not None and width % 8 == 0 and launch.has_grouped_mm(x_RI)
    _kernel[launch.grid_of_tiles(x_RI, num_experts, num_rows, width)](
        x_RI, w_LIO, y_RO, x_tma, w_tma, bias_LO, weights_R, offsets_L1, num_experts,
        rows_class(num_rows, num_experts), width, depth, x_RI.stride(0), *w_LIO.stride(), y_RO.stride(0),
        TRANSPOSED=transposed, HAS_TMA=w_tma is not None, HAS_LIBRARY=has_library,
        EVEN_N=width % LARGEST_N == 0, EVEN_K=depth % LARGEST_K == 0, BLOCK_E=launch.power_of_2(num_experts),
        **launch.dot_constants(x_RI),
    )  # fmt: skip
    return y_RO
