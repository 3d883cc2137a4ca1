"""Quantization to e4m3 with an fp32 scale per block of 1 x 128, 128 x 1 or 128 x 128 values.

As in DeepSeek-V3 (arXiv:2412.19437, section 3.3): q = x / s, rounded to nearest. Each block has the scale
s = max |x| / 448, because 448 is the largest value of e4m3. Shape suffixes: see `moe_exp.layers`; C is
the number of blocks of 128 columns.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.rows import gather_rows_torch
from moe_exp.layers.kernels.tiles import row_tile, row_tile_ends

BLOCK = 128  # values that share a scale, in each direction
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest value of e4m3
LEAST = 1e-30  # lower limit of a block's max |x|, so that blocks of zeros have a nonzero scale
_ROWS, _COLUMNS = 32, 32  # per program of `quantize_rows` and `quantize_columns`

if tl is not None:
    _BLOCK, _LARGEST, _LEAST = tl.constexpr(BLOCK), tl.constexpr(LARGEST), tl.constexpr(LEAST)


@jit
def scale_of(values, AXIS: tl.constexpr):
    """Scales of blocks. Each block consists of the values along AXIS. NaN values are ignored."""
    largest = tl.max(tl.where(values == values, tl.abs(values), 0.0), AXIS)
    return tl.div_rn(tl.maximum(largest, _LEAST), tl.full(largest.shape, _LARGEST, tl.float32))


@jit
def to_e4m3(x, scale, INTERPRET: tl.constexpr):
    """x / scale in e4m3, rounded to the nearest, ties to even."""
    x, scale = tl.broadcast(x, scale)
    x = tl.div_rn(x, scale)
    if INTERPRET:
        # The interpreter rounds differently, so the value is rounded here by bit operations.
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = (size + 0x7FFFF + ((size >> 20) & 1)) & -0x100000  # to 3 bits of the mantissa
        small = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)  # to a multiple of 2^-9
        size = tl.where(tl.abs(x) < 0.015625, small, normal) | (bits ^ size)
        x = size.to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)


@jit
def _kernel(
    x, index, q, scales, num_rows, num_sources, width, stride_l, stride_r, stride_c,
    ROWS: tl.constexpr, SQUARE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Quantizes a block of ROWS rows and 128 columns, with one scale per row or, if SQUARE, per block."""
    num_blocks, matrix = tl.cdiv(width, _BLOCK), tl.program_id(2).to(tl.int64)
    rows, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    columns = column * _BLOCK + tl.arange(0, _BLOCK)
    is_row, source = rows < num_rows, rows
    if index is not None:
        source = tl.load(index + rows, mask=is_row, other=0)
    is_source = (is_row & (source < num_sources))[:, None] & (columns < width)[None, :]
    block = x + matrix * stride_l + source.to(tl.int64)[:, None] * stride_r + columns[None, :] * stride_c
    values = tl.load(block, mask=is_source, other=0.0).to(tl.float32)
    scale = scale_of(values, 1)
    rows = rows.to(tl.int64)
    if SQUARE:
        scale = tl.zeros_like(scale) + tl.max(scale, 0)
        place = (matrix * tl.num_programs(0) + tl.program_id(0)) * num_blocks + column
        tl.store(scales + place + rows * 0, scale)
    else:
        tl.store(scales + rows * num_blocks + column, scale, mask=is_row)
    out = q + matrix * num_rows * width + rows[:, None] * width + columns[None, :]
    tl.store(
        out, to_e4m3(values, scale[:, None], INTERPRET), mask=is_row[:, None] & (columns < width)[None, :]
    )


@jit
def _columns_kernel(
    x, index, q, scales, offsets, num_experts, num_sources, width, stride_r, BLOCK_E: tl.constexpr,
    COLUMNS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Quantizes and transposes COLUMNS columns of one expert's block, padded with zeros to 128 rows."""
    # FP8 tensor cores require that the summed dimension, here the rows, is contiguous: hence transposed.
    tile = tl.program_id(0)
    tile_ends = row_tile_ends(offsets, num_experts, _BLOCK, BLOCK_E)
    if tile >= tl.max(tile_ends, 0):
        return
    _, first, end = row_tile(tile, tile_ends, offsets, _BLOCK)
    steps, columns = tl.arange(0, _BLOCK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, source = first + steps < end, columns < width, first + steps
    if index is not None:
        source = tl.load(index + source, mask=is_row, other=0)
    is_source = (is_row & (source < num_sources))[:, None] & is_column[None, :]
    block = x + source.to(tl.int64)[:, None] * stride_r + columns[None, :]
    values = tl.load(block, mask=is_source, other=0.0).to(tl.float32)
    scale = scale_of(values, 0)
    out = tile.to(tl.int64) * width + columns
    tl.store(scales + out, scale, mask=is_column)
    values = tl.trans(to_e4m3(values, scale[None, :], INTERPRET))
    tl.store(q + out[:, None] * _BLOCK + steps[None, :], values, mask=is_column[:, None])


def num_blocks_of_rows(num_rows: int, num_experts: int) -> int:
    """Upper limit on the number of 128-row blocks of all experts, computed without a device sync."""
    return num_rows // BLOCK + num_experts


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each vector along the last dimension as one block; returns e4m3 values and scales."""
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=torch.inf)  # NaN values stay NaN with any scale
    largest = magnitude.amax(dim=-1).clamp(min=LEAST)
    # Divide by a tensor: on a GPU, PyTorch replaces division by a number with a rounded reciprocal.
    scale = largest / torch.full_like(largest, LARGEST)
    return (x / scale.unsqueeze(-1)).to(E4M3), scale


def quantize_rows_torch(x: Tensor, index_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x_RD = x if index_R is None else gather_rows_torch(x, index_R)
    padded = torch.nn.functional.pad(x_RD.float(), (0, -x_RD.size(1) % BLOCK))
    q_RCB, scale_RC = _quantized(padded.unflatten(1, (-1, BLOCK)))
    return q_RCB.flatten(1)[:, : x_RD.size(1)].contiguous(), scale_RC


def _empty_rows(x: Tensor, index_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_rows = (x if index_R is None else index_R).size(0)
    q_RD = x.new_empty(num_rows, x.size(1), dtype=E4M3)
    return q_RD, x.new_empty(num_rows, launch.cdiv(x.size(1), BLOCK), dtype=torch.float32)


@launch.compilable("fp8_quantize_rows", _empty_rows, twin=quantize_rows_torch)
def quantize_rows(x: Tensor, index_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes each row in blocks of 128 columns: e4m3 [R, D] and fp32 scales [R, C].

    Args:
        x: rows [R, D] or, if `index_R` is given, the tensor [T, D] to gather rows from.
        index_R: int32, each row's index in `x`; an index of T or more gives a row of zeros.
    """
    (q_RD, scale_RC), x = _empty_rows(x, index_R), launch.last_contiguous(x)
    (index_R,), num_rows = launch.contiguous(index_R), q_RD.size(0)
    if num_rows:
        _kernel[launch.cdiv(num_rows, _ROWS), scale_RC.size(1), 1](
            x, index_R, q_RD, scale_RC, num_rows, x.size(0), x.size(1), 0, x.stride(0), 1,
            ROWS=_ROWS, SQUARE=False, INTERPRET=launch.INTERPRETED,
        )  # fmt: skip
    return q_RD, scale_RC


def quantize_blocks_torch(w_LOI: Tensor) -> tuple[Tensor, Tensor]:
    _, height, width = w_LOI.shape
    padded = torch.nn.functional.pad(w_LOI.float(), (0, -width % BLOCK, 0, -height % BLOCK))
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3)
    q, scale_LCC = _quantized(blocks.flatten(3))
    q_LOI = q.unflatten(3, (BLOCK, BLOCK)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return q_LOI[:, :height, :width].contiguous(), scale_LCC


def _empty_blocks(w_LOI: Tensor) -> tuple[Tensor, Tensor]:
    num_experts, height, width = w_LOI.shape
    scale_LCC = w_LOI.new_empty(
        num_experts, launch.cdiv(height, BLOCK), launch.cdiv(width, BLOCK), dtype=torch.float32
    )
    return w_LOI.new_empty(num_experts, height, width, dtype=E4M3), scale_LCC


@launch.compilable("fp8_quantize_blocks", _empty_blocks, twin=quantize_blocks_torch)
def quantize_blocks(w_LOI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes matrices (any strides) in blocks of 128 x 128: e4m3 [L, O, I], scales [L, O/128, I/128].

    A transposed matrix has the same blocks, so forward and backward use the same quantized values.
    """
    q_LOI, scale_LCC = _empty_blocks(w_LOI)
    _, height, width = w_LOI.shape
    _kernel[scale_LCC.size(1), scale_LCC.size(2), scale_LCC.size(0)](
        w_LOI, None, q_LOI, scale_LCC, height, height, width, *w_LOI.stride(), ROWS=BLOCK, SQUARE=True,
        INTERPRET=launch.INTERPRETED,
    )  # fmt: skip
    return q_LOI, scale_LCC


def quantize_columns_torch(
    x: Tensor, offsets_L1: Tensor, index_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x_RM = (x if index_R is None else gather_rows_torch(x, index_R)).float()
    ends, place = offsets_L1.tolist(), 0
    blocks_BMR = x_RM.new_zeros(num_blocks_of_rows(x_RM.size(0), len(ends) - 1), x_RM.size(1), BLOCK)
    for first, end in itertools.pairwise(ends):
        for row in range(first, end, BLOCK):
            rows = x_RM[row : min(row + BLOCK, end)]
            blocks_BMR[place, :, : rows.size(0)] = rows.t()
            place += 1
    return _quantized(blocks_BMR)


def _empty_columns(x: Tensor, offsets_L1: Tensor, index_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    num_blocks = num_blocks_of_rows((x if index_R is None else index_R).size(0), offsets_L1.size(0) - 1)
    scale_BM = x.new_empty(num_blocks, x.size(1), dtype=torch.float32)
    return x.new_empty(num_blocks, x.size(1), BLOCK, dtype=E4M3), scale_BM


@launch.compilable("fp8_quantize_columns", _empty_columns, twin=quantize_columns_torch)
def quantize_columns(x: Tensor, offsets_L1: Tensor, index_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes B blocks of 128 rows, with a scale per column: e4m3 [B, M, 128], fp32 scales [B, M].

    Each block belongs to one expert. An expert's last block is padded with zeros. Unused blocks at
    the end have undefined values.

    Args:
        x: rows [R, M] sorted by expert or, if `index_R` is given, the tensor [T, M] to gather rows from.
        index_R: int32, each row's index in `x`; an index of T or more gives a row of zeros.
    """
    (q_BMR, scale_BM), x = _empty_columns(x, offsets_L1, index_R), launch.last_contiguous(x)
    (offsets_L1, index_R), num_experts = launch.contiguous(offsets_L1, index_R), offsets_L1.size(0) - 1
    _columns_kernel[q_BMR.size(0), launch.cdiv(x.size(1), _COLUMNS)](
        x, index_R, q_BMR, scale_BM, offsets_L1, num_experts, x.size(0), x.size(1), x.stride(0),
        BLOCK_E=launch.power_of_2(num_experts), COLUMNS=_COLUMNS, INTERPRET=launch.INTERPRETED,
    )  # fmt: skip
    return q_BMR, scale_BM
