"""Permute, unpermute and chunk sort: rows moved as they are, for the paths where they travel. Shape suffixes
in `moe_exp.layers`.

Both directions are gathers: the gradient of `gather_rows` by the rows of slots is `combine` by the slots of
rows, and the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, jit, power_of_2, runs_kernel, tl

# Elements of a program: 8 per thread of four warps.
_TILE = 1024
_BLOCK_R = 128


@jit
def _gather_kernel(
    x,
    index,
    out,
    num_sources,
    num_rows,
    divisor,
    stride_x,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    source = tl.load(index + rows, mask=is_row, other=0).to(tl.int64) // divisor
    is_source = (is_row & (source < num_sources))[:, None]
    is_wanted = is_row[:, None]
    if WIDTH % BLOCK_D != 0:
        is_source = is_source & (columns < WIDTH)[None, :]
        is_wanted = is_wanted & (columns < WIDTH)[None, :]
    values = tl.load(x + source[:, None] * stride_x + columns[None, :], mask=is_source, other=0.0)
    tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=is_wanted)


@jit
def _chunk_kernel(
    rows, first, slot, row, num_rows, num_sources, num_experts, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Every program adds up all chunks' sizes for itself: there are few."""
    chunks = tl.arange(0, BLOCK_C)
    is_chunk = chunks < num_sources * num_experts
    by_source = (chunks % num_sources) * num_experts + chunks // num_sources
    size = tl.load(rows + by_source, mask=is_chunk, other=0).to(tl.int32)
    ends = tl.cumsum(size, 0)
    shift = tl.load(first + by_source, mask=is_chunk, other=0).to(tl.int32) - (ends - size)
    mine = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_mine = ((ends - size)[None, :] <= mine[:, None]) & (mine[:, None] < ends[None, :])
    source = mine + tl.sum(tl.where(is_mine, shift[None, :], 0), 1)
    tl.store(slot + mine, source, mask=mine < num_rows)
    tl.store(row + source, mine, mask=mine < num_rows)


def gather_rows_torch(x: Tensor, index_R: Tensor, divisor: int = 1) -> Tensor:
    """The twin of `gather_rows`."""
    with_zero = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return with_zero.index_select(0, (index_R // divisor).clamp(max=x.size(0)))


@compilable("gather_rows", lambda x, index_R, divisor=1: x.new_empty(index_R.size(0), *x.shape[1:]))
def gather_rows(x: Tensor, index_R: Tensor, divisor: int = 1) -> Tensor:
    """x[index // divisor]; zero where that is past the last row of x.

    Args:
        x: [T, D] or [T], any dtype.
        index_R: int32 or int64, not negative: the token of each row, or the slot with `divisor` K.
        divisor: of the index.

    Returns:
        [R, D] or [R].
    """
    if not runs_kernel(x):
        return gather_rows_torch(x, index_R, divisor)
    num_rows, width = index_R.size(0), 1 if x.dim() == 1 else x.size(1)
    out = x.new_empty(num_rows, *x.shape[1:])
    if out.numel() == 0:
        return out
    x = x.contiguous() if x.dim() == 1 or x.stride(1) != 1 else x
    # The largest power of 2 in the width, so that no column is masked; a narrow or odd width is one block.
    block_d = min(_TILE, width & -width)
    block_d = block_d if block_d >= _TILE // 8 else min(_TILE, power_of_2(width))
    block_r = _TILE // block_d
    _gather_kernel[cdiv(num_rows, block_r), cdiv(width, block_d)](
        x,
        index_R.contiguous(),
        out,
        x.size(0),
        num_rows,
        divisor,
        x.stride(0),
        WIDTH=width,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return out


def chunk_order_torch(rows_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The twin of `chunk_order`."""
    ends_SL = rows_SL.flatten().cumsum(0).view_as(rows_SL)
    first_C, rows_C = (ends_SL - rows_SL).t().flatten(), rows_SL.t().flatten()
    shift_C = first_C - (rows_C.cumsum(0) - rows_C)
    mine_R = torch.arange(num_rows, device=rows_SL.device)
    slot_R = torch.repeat_interleave(shift_C, rows_C, output_size=num_rows) + mine_R
    return slot_R.int(), torch.empty_like(slot_R).scatter_(0, slot_R, mine_R).int()


def _fake_order(rows_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    slot_R = rows_SL.new_empty(num_rows, dtype=torch.int32)
    return slot_R, torch.empty_like(slot_R)


@compilable("chunk_order", _fake_order)
def chunk_order(rows_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Where rows go that come in chunks by source and, from every source, by expert, and shall be by expert
    and then by source.

    Args:
        rows_SL: rows of every chunk, int64 or int32, on the device.
        num_rows: their sum: R, below 2^31.

    Returns:
        slot_R: for each row by expert its place as it came, int32; row_R: the inverse.
    """
    if not runs_kernel(rows_SL):
        return chunk_order_torch(rows_SL, num_rows)
    slot_R, row_R = _fake_order(rows_SL, num_rows)
    if num_rows == 0:
        return slot_R, row_R
    rows_SL = rows_SL.contiguous()
    first_C = rows_SL.view(-1).cumsum(0) - rows_SL.view(-1)
    _chunk_kernel[(cdiv(num_rows, _BLOCK_R),)](
        rows_SL,
        first_C,
        slot_R,
        row_R,
        num_rows,
        *rows_SL.shape,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=power_of_2(rows_SL.numel()),
    )
    return slot_R, row_R
