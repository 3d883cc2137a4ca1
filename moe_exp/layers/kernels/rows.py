"""Kernels that permute rows and sort chunks of rows. Shape suffixes: see `moe_exp.layers`.

The backward pass gathers rows, too: `combine` (combine.py) computes the gradient of `gather_rows` with the
inverse index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, jit, power_of_2, tl

# Elements per program: 8 per thread with four warps.
_TILE = 1024
_BLOCK_R = 128


@jit
def _gather_kernel(
    x, index, out, num_sources, num_rows, divisor, stride_x, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
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
    ends_by_expert, ends_by_source, slot, row, num_rows, num_sources, num_experts, BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Finds the chunk of each sorted row; the bisection takes STEPS steps."""
    mine = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_mine, num_chunks = mine < num_rows, num_sources * num_experts
    chunk = tl.zeros((BLOCK_R,), dtype=tl.int32)  # chunks that end at or before the row
    for step in tl.static_range(STEPS):
        further = chunk + (1 << (STEPS - 1 - step))
        is_chunk = is_mine & (further <= num_chunks)
        end = tl.load(ends_by_expert + further - 1, mask=is_chunk, other=0)
        chunk = tl.where(is_chunk & (end <= mine), further, chunk)
    as_it_came = (chunk % num_sources) * num_experts + chunk // num_sources
    shift = tl.load(ends_by_source + as_it_came, mask=is_mine, other=0) - tl.load(
        ends_by_expert + chunk, mask=is_mine, other=0
    )
    source = mine + shift.to(tl.int32)
    tl.store(slot + mine, source, mask=is_mine)
    tl.store(row + source, mine, mask=is_mine)


def gather_rows_torch(x: Tensor, index_R: Tensor, divisor: int = 1) -> Tensor:
    with_zero = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return with_zero.index_select(0, (index_R // divisor).clamp(max=x.size(0)))


@compilable(
    "gather_rows", lambda x, index_R, divisor=1: x.new_empty(index_R.size(0), *x.shape[1:]),
    twin=gather_rows_torch,
)  # fmt: skip
def gather_rows(x: Tensor, index_R: Tensor, divisor: int = 1) -> Tensor:
    """Returns the rows x[index // divisor], [R, D] or [R]. Rows past the end of x are zero.

    Args:
        x: [T, D] or [T], any dtype.
        index_R: for each output row, a row of x, or a slot if `divisor` is the top-k K; int32 or int64, >= 0.
    """
    num_rows, width = index_R.size(0), 1 if x.dim() == 1 else x.size(1)
    out = x.new_empty(num_rows, *x.shape[1:])
    if out.numel() == 0:
        return out
    x = x.contiguous() if x.dim() == 1 or x.stride(1) != 1 else x
    # The largest power of 2 that divides the width, unless too small, so that no column is masked.
    block_d = min(_TILE, width & -width)
    block_d = block_d if block_d >= _TILE // 8 else min(_TILE, power_of_2(width))
    block_r = _TILE // block_d
    _gather_kernel[cdiv(num_rows, block_r), cdiv(width, block_d)](
        x, index_R.contiguous(), out, x.size(0), num_rows, divisor, x.stride(0), WIDTH=width, BLOCK_R=block_r,
        BLOCK_D=block_d,
    )  # fmt: skip
    return out


def chunk_order_torch(rows_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    ends_SL = rows_SL.flatten().cumsum(0).view_as(rows_SL)
    first_C, rows_C = (ends_SL - rows_SL).t().flatten(), rows_SL.t().flatten()
    # All rows of a chunk move by the same distance, so no sort is needed.
    shift_C = first_C - (rows_C.cumsum(0) - rows_C)
    mine_R = torch.arange(num_rows, device=rows_SL.device)
    slot_R = torch.repeat_interleave(shift_C, rows_C, output_size=num_rows) + mine_R
    return slot_R.int(), torch.empty_like(slot_R).scatter_(0, slot_R, mine_R).int()


@compilable(
    "chunk_order",
    lambda rows_SL, num_rows: tuple(rows_SL.new_empty(num_rows, dtype=torch.int32) for _ in range(2)),
    twin=chunk_order_torch,
)
def chunk_order(rows_SL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row order that sorts chunks by expert, then source. Rows must arrive sorted by source, then expert.

    Args:
        rows_SL: number of rows from each of S sources for each of L experts, int64 or int32, on the device.
        num_rows: R, the sum of `rows_SL`, below 2^31.

    Returns:
        slot_R: original index of each sorted row, int32.
        row_R: sorted index of each original row, int32.
    """
    slot_R, row_R = (rows_SL.new_empty(num_rows, dtype=torch.int32) for _ in range(2))
    if num_rows == 0:
        return slot_R, row_R
    _chunk_kernel[(cdiv(num_rows, _BLOCK_R),)](
        rows_SL.t().flatten().cumsum(0), rows_SL.flatten().cumsum(0), slot_R, row_R, num_rows, *rows_SL.shape,
        BLOCK_R=_BLOCK_R, STEPS=rows_SL.numel().bit_length(),
    )  # fmt: skip
    return slot_R, row_R
