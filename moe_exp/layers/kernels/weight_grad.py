"""Gradients of the experts' matrices: sums of products over rows. The rows may be read through an index.

Each program computes one tile of an expert's gradient from all of the expert's rows. No atomics are used, so
results are bitwise reproducible. Shape suffixes: see `moe_exp.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.launch import jit, tl
from moe_exp.layers.kernels.tiles import column_chunks, dot, in_groups, load_where
from moe_exp.layers.kernels.tuning import configs, rows_class, tuned

CONFIGS = configs(
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M TMA num_warps num_stages", (128, 128, 64, 8, 0, 8, 3),
    (128, 256, 64, 8, 0, 8, 3), (128, 256, 32, 8, 0, 8, 4), (128, 128, 32, 8, 0, 4, 4),
    (64, 128, 64, 8, 0, 4, 3), (128, 256, 64, 8, 1, 8, 4), (128, 128, 64, 8, 1, 8, 3),
)  # fmt: skip

# Experts per step of `_order_kernel`, which compares all pairs.
_BLOCK_E = 64


@jit
def _num_rows(experts, offsets, num_experts):
    """Number of rows of each expert; -1 past the last expert."""
    is_expert = experts < num_experts
    end = tl.load(offsets + experts + 1, mask=is_expert, other=0)
    return end - tl.load(offsets + experts, mask=is_expert, other=1)


@jit
def _order_kernel(offsets, order, num_experts, BLOCK: tl.constexpr):
    """Sorts experts by number of rows, descending; ties by index. Each program ranks BLOCK experts."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    my_rows = _num_rows(mine, offsets, num_experts)[:, None]
    places = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK):
        others = first + tl.arange(0, BLOCK)
        rows = _num_rows(others, offsets, num_experts)[None, :]
        is_before = (rows > my_rows) | ((rows == my_rows) & (others[None, :] < mine[:, None]))
        places += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + places, mine, mask=mine < num_experts)


@tuned(
    CONFIGS,
    key=["num_experts", "rows_class", "num_m", "num_n", "ADDS", "HAS_TMA"],
    blocks=lambda at: {"a_tma": [at["BLOCK_K"], at["BLOCK_M"]], "b_tma": [at["BLOCK_K"], at["BLOCK_N"]]},
)
@jit
def _kernel(
    a, b, dw, a_index, b_index, a_tma, b_tma, offsets, order, num_experts, rows_class, stride_dl, stride_dm,
    is_trial, num_m: tl.constexpr, num_n: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr,
    ADDS: tl.constexpr, HAS_TMA: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 64 if ADDS and BLOCK_N > 64 else BLOCK_N
    DEPTH: tl.constexpr = BLOCK_K * 16 // a.dtype.element_ty.primitive_bitwidth
    EVEN_M: tl.constexpr = num_m % BLOCK_M == 0
    EVEN_N: tl.constexpr = num_n % BLOCK_N == 0
    tiles_m, tiles_n = tl.cdiv(num_m, BLOCK_M), tl.cdiv(num_n, BLOCK_N)
    place, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    # Experts with most rows come first, so that the last tiles to run are short.
    expert = tl.load(order + place)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    if ADDS and first == end:
        return
    tile_m, tile_n = in_groups(tile, tiles_m, tiles_n, GROUP_M)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps = tl.arange(0, DEPTH)
    # Whole steps need no masks. Row indices are loaded one step ahead (the last step reloads its own),
    # because a load that depends on another starts later. The block of `a` is loaded as [M, DEPTH], as the
    # product needs it: with a transpose, Triton does not pipeline it on Ampere.
    whole = first + (end - first) // DEPTH * DEPTH
    rows, is_row = first + steps, first + steps < whole
    a_rows, b_rows = _rows_of(a_index, rows, is_row), _rows_of(b_index, rows, is_row)
    for start in range(first, whole, DEPTH):
        a_now, b_now = a_rows, b_rows
        ahead = tl.minimum(start + DEPTH, whole - DEPTH) + steps
        a_rows, b_rows = _rows_of(a_index, ahead, None), _rows_of(b_index, ahead, None)
        if TMA and a_tma is not None:
            x = tl.trans(a_tma.load([start, tile_m * BLOCK_M]))
        else:
            x = _load(a, a_now[None, :], m[:, None], STRIDE_A, None, num_m, EVEN_M)
        if TMA and b_tma is not None:
            y = b_tma.load([start, tile_n * BLOCK_N])
        else:
            y = _load(b, b_now[:, None], n[None, :], STRIDE_B, None, num_n, EVEN_N)
        total = dot(x, y, total, PRECISION, INTERPRET)
    for start in tl.range(whole, end, DEPTH, num_stages=1):  # the remainder
        rows, is_row = start + steps, start + steps < end
        a_now, b_now = _rows_of(a_index, rows, is_row), _rows_of(b_index, rows, is_row)
        x = _load(a, a_now[None, :], m[:, None], STRIDE_A, is_row[None, :], num_m, EVEN_M)
        y = _load(b, b_now[:, None], n[None, :], STRIDE_B, is_row[:, None], num_n, EVEN_N)
        total = dot(x, y, total, PRECISION, INTERPRET)
    block = dw + expert.to(tl.int64) * stride_dl + m.to(tl.int64)[:, None] * stride_dm
    chunks = column_chunks(total, BLOCK_M, BLOCK_N, CHUNK)
    for i in tl.static_range(BLOCK_N // CHUNK):
        columns = tile_n * BLOCK_N + i * CHUNK + tl.arange(0, CHUNK)
        mask = (m < num_m)[:, None] & (columns < num_n)[None, :]
        sums = chunks[i]
        if ADDS:
            before = tl.load(block + columns[None, :], mask=mask, other=0.0)
            # Launches for timing cost the same as real ones but leave main_grad unchanged.
            sums = tl.where(is_trial != 0, before, before + sums)
        tl.store(block + columns[None, :], sums.to(dw.dtype.element_ty), mask=mask)


@jit
def _rows_of(index, rows, is_row):
    """Row indices into an operand; undefined where `is_row` is False. `is_row` is None if all rows exist."""
    if index is not None:
        rows = tl.load(index + rows) if is_row is None else tl.load(index + rows, mask=is_row, other=0)
    return rows


@jit
def _load(x, rows, columns, STRIDE: tl.constexpr, is_row, num_columns: tl.constexpr, EVEN: tl.constexpr):
    """A block of an operand, in the broadcast shape of `rows` and `columns`; zero where `is_row` is False."""
    block = x + rows.to(tl.int64) * STRIDE + columns
    if is_row is None:
        values = load_where(block, columns < num_columns, EVEN)
    elif EVEN:
        values = tl.load(block, mask=is_row, other=0.0)
    else:
        values = tl.load(block, mask=is_row & (columns < num_columns), other=0.0)
    return values


@launch.compilable("expert_order", lambda offsets_L1: offsets_L1[1:].clone())
def expert_order(offsets_L1: Tensor) -> Tensor:
    """Expert indices, int32 [L], from most to fewest rows; experts with equally many rows stay in order."""
    if not launch.runs_kernel(offsets_L1):
        return offsets_L1.diff().argsort(descending=True, stable=True).int()
    num_experts, offsets_L1 = offsets_L1.size(0) - 1, offsets_L1.contiguous()
    order_L, block = offsets_L1.new_empty(num_experts), min(_BLOCK_E, launch.power_of_2(num_experts))
    _order_kernel[(launch.cdiv(num_experts, block),)](offsets_L1, order_L, num_experts, BLOCK=block)
    return order_L


def weight_grad_torch(
    a: Tensor, b: Tensor, offsets_L1: Tensor, *, a_index_R: Tensor | None = None,
    b_index_R: Tensor | None = None, out: Tensor | None = None, adds: bool = True,
) -> Tensor:  # fmt: skip
    if out is not None and not adds:
        out.zero_()
    ends = offsets_L1.tolist()
    dw_LMN = a.new_empty(len(ends) - 1, a.size(1), b.size(1)) if out is None else out
    for dw_MN, first, end in zip(dw_LMN.unbind(0), ends, ends[1:], strict=False):
        a_rows = a[first:end] if a_index_R is None else a[a_index_R[first:end]]
        b_rows = b[first:end] if b_index_R is None else b[b_index_R[first:end]]
        if out is None:
            torch.mm(a_rows.t(), b_rows, out=dw_MN)
        elif first < end:
            dw_MN.addmm_(a_rows.t().to(dw_MN.dtype), b_rows.to(dw_MN.dtype))
    return dw_LMN


def weight_grad(
    a: Tensor, b: Tensor, offsets_L1: Tensor, *, a_index_R: Tensor | None = None,
    b_index_R: Tensor | None = None, order_L: Tensor | None = None, out: Tensor | None = None,
    adds: bool = True,
) -> Tensor:  # fmt: skip
    """Computes dw_e = sum_r a_r^T b_r over the rows r of every expert e, accumulated in fp32.

    Args:
        a: rows [R, M] sorted by expert, or the tensor that `a_index_R` indexes.
        b: rows [R, N] sorted by expert, or the tensor that `b_index_R` indexes.
        a_index_R: int32, index into `a` for each sorted row; None: `a` is already sorted.
        b_index_R: int32, index into `b` for each sorted row; None: `b` is already sorted.
        order_L: `expert_order(offsets_L1)`; None: computed here. Affects only the run time.
        out: fp32 or bf16 [L, M, N], such as Megatron's main_grad; modified in place. The last dimension must
            be contiguous.
        adds: True: add to `out`; False: overwrite it.

    Returns:
        `out`. If `out` is None: a new tensor [L, M, N] in the dtype of `a`, zero for experts without rows.
    """
    if out is None:
        return _new_grad(a, b, offsets_L1, a_index_R, b_index_R, order_L)
    if out.stride(-1) != 1:
        rule = "the last dimension must be contiguous"
        raise ValueError(f"out={tuple(out.stride())} strides: {rule}. Fix: pass a contiguous tensor.")
    _write_grad(out, a, b, offsets_L1, a_index_R, b_index_R, order_L, adds)
    return out


# Two operators, because for torch.compile an operator must not return a tensor that it writes to.
@launch.compilable(
    "weight_grad", lambda a, b, offsets_L1, *_: a.new_empty(offsets_L1.size(0) - 1, a.size(1), b.size(1))
)
def _new_grad(
    a: Tensor, b: Tensor, offsets_L1: Tensor, a_index_R: Tensor | None, b_index_R: Tensor | None,
    order_L: Tensor | None,
) -> Tensor:  # fmt: skip
    if not launch.runs_kernel(a):
        return weight_grad_torch(a, b, offsets_L1, a_index_R=a_index_R, b_index_R=b_index_R)
    dw_LMN = a.new_empty(offsets_L1.size(0) - 1, a.size(1), b.size(1))
    _launch(dw_LMN, a, b, offsets_L1, a_index_R, b_index_R, order_L, adds=False)
    return dw_LMN


@launch.compilable("weight_grad_add", lambda *_: None, mutates=["out"])
def _write_grad(
    out: Tensor, a: Tensor, b: Tensor, offsets_L1: Tensor, a_index_R: Tensor | None,
    b_index_R: Tensor | None, order_L: Tensor | None, adds: bool,
) -> None:  # fmt: skip
    if not launch.runs_kernel(a):
        weight_grad_torch(a, b, offsets_L1, a_index_R=a_index_R, b_index_R=b_index_R, out=out, adds=adds)
    else:
        _launch(out, a, b, offsets_L1, a_index_R, b_index_R, order_L, adds=adds)


def _launch(
    dw_LMN: Tensor, a: Tensor, b: Tensor, offsets_L1: Tensor, *indices: Tensor | None, adds: bool
) -> None:
    a_index_R, b_index_R, order_L = indices
    num_experts, num_m, num_n = dw_LMN.shape
    num_rows = (a if a_index_R is None else a_index_R).size(0)
    if num_rows == 0:
        if not adds:
            dw_LMN.zero_()
        return
    offsets_L1, a_index_R, b_index_R = launch.contiguous(offsets_L1, a_index_R, b_index_R)
    a, b = launch.last_contiguous(a), launch.last_contiguous(b)
    order_L = expert_order(offsets_L1) if order_L is None else order_L

    def grid(constants: dict[str, int]) -> tuple[int]:
        # Not persistent: tiles have different numbers of rows, and the device balances them.
        tiles = launch.cdiv(num_m, constants["BLOCK_M"]) * launch.cdiv(num_n, constants["BLOCK_N"])
        return (num_experts * tiles,)

    a_tma, b_tma = (
        launch.descriptors(x if index is None else None)[0] for x, index in ((a, a_index_R), (b, b_index_R))
    )
    _kernel[grid](
        a, b, dw_LMN, a_index_R, b_index_R, a_tma, b_tma, offsets_L1, order_L, num_experts,
        rows_class(num_rows, num_experts), dw_LMN.stride(0), dw_LMN.stride(1), num_m=num_m, num_n=num_n,
        STRIDE_A=a.stride(0), STRIDE_B=b.stride(0), ADDS=adds,
        HAS_TMA=a_tma is not None or b_tma is not None, **launch.dot_constants(a),
    )  # fmt: skip


def main_grad_of(parameter: Any) -> Tensor | None:
    """`main_grad`, or None if backward may not add to it. See Megatron's tensor_parallel/layers.py."""
    # Megatron-FSDP creates `main_grad` on access, without valid old values.
    return None if hasattr(parameter, "__fsdp_param__") else getattr(parameter, "main_grad", None)


def placeholder(parameter: Any) -> Tensor | None:
    """Placeholder gradient of a weight whose real gradient was added to `main_grad`."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    # Megatron's DDP hooks, which start the reduction, expect a gradient and free it immediately. This
    # gradient is created last in backward, when other memory has been freed.
    make = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return make(parameter)
