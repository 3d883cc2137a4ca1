"""Gradients of the experts' matrices: sums over rows, either side of which may be gathered.

One program computes one tile of one expert's matrix from all of its rows: no atomics, so results are bitwise
reproducible. Experts differ in rows; tiles of the fullest come first, so that the last ones are short. Shape
suffixes in `moe_exp.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import (
    cdiv,
    compilable,
    configs,
    contiguous,
    descriptors,
    dot_constants,
    jit,
    last_contiguous,
    power_of_2,
    rows_class,
    runs_kernel,
    tl,
    tuned,
)
from moe_exp.layers.kernels.tiles import column_chunks, dot, in_groups

# Predicted, not measured; see docs/kernels.md. The first one is for deterministic algorithms.
CONFIGS = configs(
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M TMA num_warps num_stages",
    (128, 128, 64, 8, 0, 8, 3),
    (128, 256, 64, 8, 0, 8, 3),
    (128, 256, 32, 8, 0, 8, 4),
    (128, 128, 32, 8, 0, 4, 4),
    (64, 128, 64, 8, 0, 4, 3),
    (128, 256, 64, 8, 1, 8, 4),
    (128, 128, 64, 8, 1, 8, 3),
)

# Every program compares all pairs of experts; for 256 there are not enough registers.
_MOST_ORDERED = 128


@jit
def _expert_of_place(place, offsets, num_experts, BLOCK_E: tl.constexpr, ORDERED: tl.constexpr):
    """The expert at this place when sorted by rows, most first; ties by lower number."""
    if ORDERED:
        mine = tl.arange(0, BLOCK_E)
        is_mine = mine < num_experts
        rows = tl.load(offsets + mine + 1, mask=is_mine, other=0) - tl.load(
            offsets + mine, mask=is_mine, other=1
        )
        is_before = (rows[None, :] > rows[:, None]) | (
            (rows[None, :] == rows[:, None]) & (mine[None, :] < mine[:, None])
        )
        places = tl.sum(is_before.to(tl.int32), 1)
        place = tl.sum(tl.where(places == place, mine, 0), 0)
    return place


def _set_blocks(args: dict[str, Any]) -> None:
    depth = args["BLOCK_K"] * 2 // args["a"].element_size()
    for descriptor, columns in (("a_tma", "BLOCK_M"), ("b_tma", "BLOCK_N")):
        if args[descriptor] is not None:
            args[descriptor].block_shape = [depth, args[columns]]


@tuned(
    CONFIGS,
    key=["num_experts", "rows_class", "num_m", "num_n", "ADDS", "HAS_TMA"],
    trial="is_trial",
    set_blocks=_set_blocks,
)
@jit
def _kernel(
    a, b, dw, a_index, b_index, a_tma, b_tma, offsets, num_experts, rows_of_a, rows_of_b, rows_class,
    stride_a, stride_b, stride_dl, stride_dm, is_trial, num_m: tl.constexpr, num_n: tl.constexpr,
    ADDS: tl.constexpr, HAS_TMA: tl.constexpr, ORDERED: tl.constexpr, BLOCK_E: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 64 if ADDS and BLOCK_N > 64 else BLOCK_N
    DEPTH: tl.constexpr = BLOCK_K * 16 // a.dtype.element_ty.primitive_bitwidth
    EVEN_M: tl.constexpr = num_m % BLOCK_M == 0
    EVEN_N: tl.constexpr = num_n % BLOCK_N == 0
    tiles_m, tiles_n = tl.cdiv(num_m, BLOCK_M), tl.cdiv(num_n, BLOCK_N)
    place, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    expert = _expert_of_place(place, offsets, num_experts, BLOCK_E, ORDERED)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if ADDS and first == end:
        return
    tile_m, tile_n = in_groups(tile, tiles_m, tiles_n, GROUP_M)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Looks up the rows of the next step one step ahead: a load that depends on another would start later. The
    # block of `a` is loaded as the product takes it, [M, DEPTH]: if transposed, Ampere's is not pipelined.
    rows = first + tl.arange(0, DEPTH)
    a_rows, b_rows = _rows_of(a_index, rows, end, rows_of_a), _rows_of(b_index, rows, end, rows_of_b)
    if TMA:
        # Whole steps, without masks but for gathered rows; the rest is the only step of the next loop.
        rest = first + (end - first) // DEPTH * DEPTH
        for start in range(first, rest, DEPTH):
            a_now, b_now = a_rows, b_rows
            rows += DEPTH
            a_rows, b_rows = _rows_of(a_index, rows, end, rows_of_a), _rows_of(b_index, rows, end, rows_of_b)
            if a_tma is None:
                x = _load(a, a_now[None, :], m[:, None], stride_a, rows_of_a, num_m, EVEN_M)
            else:
                x = tl.trans(a_tma.load([start, tile_m * BLOCK_M]))
            if b_tma is None:
                y = _load(b, b_now[:, None], n[None, :], stride_b, rows_of_b, num_n, EVEN_N)
            else:
                y = b_tma.load([start, tile_n * BLOCK_N])
            total = dot(x, y, total, PRECISION, INTERPRET)
        first = rest
    for _ in tl.range(first, end, DEPTH, num_stages=1 if TMA else None):
        a_now, b_now = a_rows, b_rows
        rows += DEPTH
        a_rows, b_rows = _rows_of(a_index, rows, end, rows_of_a), _rows_of(b_index, rows, end, rows_of_b)
        x = _load(a, a_now[None, :], m[:, None], stride_a, rows_of_a, num_m, EVEN_M)
        y = _load(b, b_now[:, None], n[None, :], stride_b, rows_of_b, num_n, EVEN_N)
        total = dot(x, y, total, PRECISION, INTERPRET)
    block = dw + expert.to(tl.int64) * stride_dl + m.to(tl.int64)[:, None] * stride_dm
    chunks = column_chunks(total, BLOCK_M, BLOCK_N, CHUNK)
    for i in tl.static_range(BLOCK_N // CHUNK):
        columns = tile_n * BLOCK_N + i * CHUNK + tl.arange(0, CHUNK)
        mask = (m < num_m)[:, None] & (columns < num_n)[None, :]
        sums = chunks[i]
        if ADDS:
            before = tl.load(block + columns[None, :], mask=mask, other=0.0)
            # Timed launches cost the same as real ones but leave main_grad unchanged.
            sums = tl.where(is_trial != 0, before, before + sums)
        tl.store(block + columns[None, :], sums.to(dw.dtype.element_ty), mask=mask)


@jit
def _load(x, rows, columns, stride, num_rows, num_columns: tl.constexpr, EVEN: tl.constexpr):
    """A block of an operand, zero where there is no row; its order of dimensions is that of the indices."""
    mask = rows < num_rows
    if not EVEN:
        mask = mask & (columns < num_columns)
    return tl.load(x + rows.to(tl.int64) * stride + columns, mask=mask, other=0.0)


@jit
def _rows_of(index, rows, end, num_rows):
    """Row indices into an operand of `num_rows`; one past the last from the end on, and for padding."""
    if index is None:  # no early return: Triton would keep compiling the rest
        rows = tl.where(rows < end, rows, num_rows)
    else:
        rows = tl.load(index + rows, mask=rows < end, other=num_rows)
    return rows


def gathered(x: Tensor, index_R: Tensor) -> Tensor:
    """x[index] in plain torch; an index of len(x) gives zeros."""
    return torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, index_R)


def weight_grad_torch(
    a: Tensor,
    b: Tensor,
    offsets_L1: Tensor,
    *,
    a_index_R: Tensor | None = None,
    b_index_R: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Plain-torch twin of `weight_grad`."""
    ends = offsets_L1.tolist()
    dw_LMN = a.new_empty(len(ends) - 1, a.size(1), b.size(1)) if out is None else out
    for dw_MN, first, end in zip(dw_LMN.unbind(0), ends, ends[1:], strict=False):
        a_rows = a[first:end] if a_index_R is None else gathered(a, a_index_R[first:end])
        b_rows = b[first:end] if b_index_R is None else gathered(b, b_index_R[first:end])
        if out is None:
            torch.mm(a_rows.t(), b_rows, out=dw_MN)
        elif first < end:
            dw_MN.addmm_(a_rows.t().to(dw_MN.dtype), b_rows.to(dw_MN.dtype))
    return dw_LMN


def weight_grad(
    a: Tensor,
    b: Tensor,
    offsets_L1: Tensor,
    *,
    a_index_R: Tensor | None = None,
    b_index_R: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum over the rows of every expert: dw_e = sum_r a_r^T b_r, accumulated in fp32.

    Args:
        a: [R, M], sorted by expert, or the source of `a_index_R`; last dimension contiguous.
        b: [R, N], the same.
        offsets_L1: int32, expert e has rows offsets[e] to offsets[e + 1]; the first is 0. Others are unread.
        a_index_R: int32, index into `a` of each row; one past the last gives zeros. None: already in order.
        b_index_R: the same for `b`.
        out: fp32 [L, M, N], Megatron's main_grad: added to in place; unchanged for an expert without rows.

    Returns:
        `out`, or a new [L, M, N] in the dtype of `a`, zero for an expert without rows.

    Raises:
        ValueError: if the last dimension of `out` is not contiguous.
    """
    if out is None:
        return _new_grad(a, b, offsets_L1, a_index_R, b_index_R)
    if out.stride(-1) != 1:
        rule = "its last dimension has to be contiguous"
        raise ValueError(f"out={tuple(out.stride())} strides: {rule}. Fix: give out.contiguous().")
    _add_grad(out, a, b, offsets_L1, a_index_R, b_index_R)
    return out


# Two operators: under torch.compile an operator may not return what it writes to.
@compilable(
    "weight_grad",
    lambda a, b, offsets_L1, a_index_R, b_index_R: a.new_empty(offsets_L1.size(0) - 1, a.size(1), b.size(1)),
)
def _new_grad(
    a: Tensor, b: Tensor, offsets_L1: Tensor, a_index_R: Tensor | None, b_index_R: Tensor | None
) -> Tensor:
    if not runs_kernel(a):
        return weight_grad_torch(a, b, offsets_L1, a_index_R=a_index_R, b_index_R=b_index_R)
    dw_LMN = a.new_empty(offsets_L1.size(0) - 1, a.size(1), b.size(1))
    _launch(dw_LMN, a, b, offsets_L1, a_index_R, b_index_R, adds=False)
    return dw_LMN


@compilable("weight_grad_add", lambda out, a, b, offsets_L1, a_index_R, b_index_R: None, mutates=["out"])
def _add_grad(
    out: Tensor, a: Tensor, b: Tensor, offsets_L1: Tensor, a_index_R: Tensor | None, b_index_R: Tensor | None
) -> None:
    if not runs_kernel(a):
        weight_grad_torch(a, b, offsets_L1, a_index_R=a_index_R, b_index_R=b_index_R, out=out)
    else:
        _launch(out, a, b, offsets_L1, a_index_R, b_index_R, adds=True)


def _launch(
    dw_LMN: Tensor,
    a: Tensor,
    b: Tensor,
    offsets_L1: Tensor,
    a_index_R: Tensor | None,
    b_index_R: Tensor | None,
    *,
    adds: bool,
) -> None:
    num_experts, num_m, num_n = dw_LMN.shape
    num_rows, block_e = (a if a_index_R is None else a_index_R).size(0), power_of_2(num_experts)
    if num_rows == 0:
        if not adds:
            dw_LMN.zero_()
        return
    offsets_L1, a_index_R, b_index_R = contiguous(offsets_L1, a_index_R, b_index_R)
    a, b = last_contiguous(a), last_contiguous(b)

    def grid(constants: dict[str, int]) -> tuple[int]:
        # Not persistent: the device schedules the next tile when one is done, whatever its number of rows.
        return (num_experts * cdiv(num_m, constants["BLOCK_M"]) * cdiv(num_n, constants["BLOCK_N"]),)

    a_tma, b_tma = (
        descriptors(x if index is None else None)[0] for x, index in ((a, a_index_R), (b, b_index_R))
    )
    _kernel[grid](
        a, b, dw_LMN, a_index_R, b_index_R, a_tma, b_tma, offsets_L1, num_experts, a.size(0), b.size(0),
        rows_class(num_rows, num_experts), a.stride(0), b.stride(0), dw_LMN.stride(0), dw_LMN.stride(1),
        num_m=num_m, num_n=num_n, ADDS=adds, HAS_TMA=a_tma is not None or b_tma is not None,
        ORDERED=block_e <= _MOST_ORDERED, BLOCK_E=block_e, **dot_constants(a),
    )  # fmt: skip
