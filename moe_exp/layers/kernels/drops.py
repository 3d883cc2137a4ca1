"""Kernels for expert capacity: they select the kept slots and pad the experts' rows, without device syncs.

The kernels start from the result of `slot_sort`. Shape suffixes: see `moe_exp.layers`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, contiguous, jit, power_of_2, tl
from moe_exp.layers.kernels.scores import key_of
from moe_exp.layers.kernels.slot_sort import slot_sort, slot_sort_torch

_BLOCK = 1024
_BLOCK_ROWS = 4096  # rows of one expert per step; one expert may have all rows


@jit
def _largest_kernel(slot, offsets, weights, limits, kept, BLOCK: tl.constexpr):
    """Keeps the slots with the largest weights of one expert, by a radix selection with 8-bit digits."""
    expert = tl.program_id(0)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    limit = tl.load(limits + expert).to(tl.int32)
    wanted = tl.minimum(limit, end - first)  # remaining slots to select among keys that start with `prefix`
    prefix, known = tl.zeros((1,), dtype=tl.int32), tl.zeros((1,), dtype=tl.int32)
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        count = tl.zeros((256,), dtype=tl.int32)
        for start in range(first, end, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            mine = tl.load(slot + rows, mask=rows < end, other=0)
            # As unsigned: with the sign bit flipped, digits have the order of the keys.
            key = key_of(tl.load(weights + mine, mask=rows < end, other=0.0)) ^ (-(2**31))
            is_candidate = (rows < end) & ((key & known) == prefix)
            count += tl.histogram((key >> shift) & 255, 256, mask=is_candidate)
        at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32), 0) - 1, 0)
        wanted -= tl.sum(tl.where(digits > digit, count, 0), 0)
        prefix = prefix | (digit << shift)
        known = known | (255 << shift)
    least = prefix ^ (-(2**31))  # smallest key that is kept
    equal_before = wanted * 0
    for start in range(first, end, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mine = tl.load(slot + rows, mask=rows < end, other=0)
        key = key_of(tl.load(weights + mine, mask=rows < end, other=0.0))
        is_equal = (key == least) & (rows < end)
        place = equal_before + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        keeps = ((key > least) | (is_equal & (place < wanted))) & (limit > 0)
        tl.store(kept + mine, keeps, mask=rows < end)
        equal_before += tl.sum(is_equal.to(tl.int32), 0)


@jit
def _pad_kernel(
    expert, slot, row, offsets, slot_out, row_out, num_slots, num_experts, rows_per_expert,
    BLOCK: tl.constexpr
):  # fmt: skip
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows = num_experts * rows_per_expert
    # Index as a slot: find its row.
    is_slot = mine < num_slots
    sorted_row = tl.load(row + mine, mask=is_slot, other=num_slots)
    is_kept = sorted_row < num_slots
    chosen = tl.load(expert + mine, mask=is_slot & is_kept, other=0).to(tl.int32)
    place = sorted_row - tl.load(offsets + chosen, mask=is_slot & is_kept, other=0)
    fits = is_kept & (place < rows_per_expert)
    tl.store(row_out + mine, tl.where(fits, chosen * rows_per_expert + place, num_rows), mask=is_slot)
    # Index as a row: find its slot.
    is_row = mine < num_rows
    owner = mine // rows_per_expert
    source = tl.load(offsets + owner, mask=is_row, other=0) + mine - owner * rows_per_expert
    has_slot = is_row & (source < tl.load(offsets + owner + 1, mask=is_row, other=0))
    tl.store(slot_out + mine, tl.load(slot + source, mask=has_slot, other=num_slots), mask=is_row)


@jit
def _first_kernel(expert, row, offsets, limits, kept, num_slots, BLOCK: tl.constexpr):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slot = slots < num_slots
    sorted_row = tl.load(row + slots, mask=is_slot, other=num_slots)
    is_sorted = sorted_row < num_slots
    chosen = tl.load(expert + slots, mask=is_sorted, other=0).to(tl.int32)
    place = sorted_row - tl.load(offsets + chosen, mask=is_sorted, other=0)
    limit = tl.load(limits + chosen, mask=is_sorted, other=0)
    tl.store(kept + slots, is_sorted & (place < limit), mask=is_slot)


def keep_within_torch(expert_TK: Tensor, weights_TK: Tensor | None, limits_E: Tensor) -> Tensor:
    num_slots, num_experts = expert_TK.numel(), limits_E.numel()
    expert_N = expert_TK.reshape(-1).long()
    first_N = torch.arange(num_slots, device=expert_N.device)
    if weights_TK is not None:
        first_N = torch.argsort(weights_TK.reshape(-1), descending=True, stable=True)
    slot_N, _, offsets_E1 = slot_sort_torch(expert_N[first_N], num_experts)
    rows_N = torch.arange(num_slots, device=expert_N.device)
    by_row_N = expert_N[first_N][slot_N]
    starts_E1, limits_E1 = offsets_E1.long(), torch.cat([limits_E.long(), limits_E.new_zeros(1).long()])
    keeps_N = rows_N - starts_E1[by_row_N] < limits_E1[by_row_N]
    return torch.empty_like(keeps_N).scatter_(0, first_N[slot_N], keeps_N).view(expert_TK.shape)


@compilable(
    "keep_within",
    lambda expert_TK, weights_TK, limits_E: expert_TK.new_empty(expert_TK.shape, dtype=torch.bool),
    twin=keep_within_torch,
)
def keep_within(expert_TK: Tensor, weights_TK: Tensor | None, limits_E: Tensor) -> Tensor:
    """Bool mask [T, K] of the kept slots: each expert keeps at most `limits_E` slots.

    Args:
        expert_TK: chosen experts, int32 or int64; padding has the value E and is never kept.
        weights_TK: fp32 router weights; each expert keeps its slots of highest weight. Of slots with
            equal weights, the earlier slots are kept. None: each expert keeps its first slots.
        limits_E: maximum number of kept slots of each expert, int32, on the device.
    """
    if weights_TK is not None and weights_TK.dtype != torch.float32:
        return keep_within_torch(expert_TK, weights_TK, limits_E)
    num_slots, num_experts = expert_TK.numel(), limits_E.numel()
    kept_TK = torch.zeros(expert_TK.shape, dtype=torch.bool, device=expert_TK.device)
    if num_slots == 0:
        return kept_TK
    expert_TK, weights_TK, limits_E = contiguous(expert_TK, weights_TK, limits_E)
    slot_N, row_N, offsets_E1 = slot_sort(expert_TK, num_experts)
    if weights_TK is None:
        _first_kernel[(cdiv(num_slots, _BLOCK),)](
            expert_TK, row_N, offsets_E1, limits_E, kept_TK, num_slots, BLOCK=_BLOCK
        )
    else:
        block = min(_BLOCK_ROWS, power_of_2(num_slots))
        _largest_kernel[(num_experts,)](
            slot_N, offsets_E1, weights_TK, limits_E, kept_TK, BLOCK=block, num_warps=8
        )
    return kept_TK


def padded_order_torch(
    expert_TK: Tensor, num_experts: int, rows_per_expert: int, kept_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_slots, num_rows = expert_TK.numel(), num_experts * rows_per_expert
    row_N, offsets_E1 = (x.long() for x in slot_sort_torch(expert_TK, num_experts, kept_TK)[1:])
    is_kept_N = row_N < num_slots
    expert_N = expert_TK.reshape(-1).long().where(is_kept_N, 0)
    place_N = row_N - offsets_E1[expert_N]
    row_N = torch.where(
        is_kept_N & (place_N < rows_per_expert), expert_N * rows_per_expert + place_N, num_rows
    )
    slot_R = torch.full((num_rows + 1,), num_slots, device=row_N.device)
    slot_R[row_N] = torch.arange(num_slots, device=row_N.device)
    return slot_R[:num_rows].int(), row_N.int()


@compilable(
    "padded_order",
    lambda expert_TK, num_experts, rows_per_expert, kept_TK=None: tuple(
        expert_TK.new_empty(size, dtype=torch.int32)
        for size in (num_experts * rows_per_expert, expert_TK.numel())
    ),
    twin=padded_order_torch,
)
def padded_order(
    expert_TK: Tensor, num_experts: int, rows_per_expert: int, kept_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Row order in which every expert has the same number of rows.

    Args:
        expert_TK, kept_TK: as for `slot_sort`.
        rows_per_expert: number of rows of each expert; slots that do not fit are dropped.

    Returns:
        slot_R: slot of each row, int32; N for a padding row.
        row_N: row of each slot, int32; R for a dropped slot.
    """
    slot_N, row_N, offsets_E1 = slot_sort(expert_TK, num_experts, kept_TK)
    slot_R, padded_row_N = slot_N.new_empty(num_experts * rows_per_expert), torch.empty_like(row_N)
    most = max(slot_R.numel(), padded_row_N.numel())
    if most:
        _pad_kernel[(cdiv(most, _BLOCK),)](
            expert_TK.contiguous(), slot_N, row_N, offsets_E1, slot_R, padded_row_N,
            padded_row_N.numel(), num_experts, rows_per_expert, BLOCK=_BLOCK,
        )  # fmt: skip
    return slot_R, padded_row_N
