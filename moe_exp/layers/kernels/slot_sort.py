"""Counting sort of slots by expert, without a device sync. Shape suffixes: see `moe_exp.layers`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_exp.layers.kernels.launch import cdiv, compilable, contiguous, jit, power_of_2, tl

# A slot's place within its block is found by comparing all pairs, so a larger block costs more per slot.
_BLOCK = 128


@jit
def _experts_of_block(expert, kept, slots, num_slots, num_experts):
    """Expert of each slot; `num_experts` if dropped or invalid, `num_experts + 1` past the last slot."""
    is_slot = slots < num_slots
    chosen = tl.load(expert + slots, mask=is_slot, other=0).to(tl.int32)
    if kept is not None:
        chosen = tl.where(tl.load(kept + slots, mask=is_slot, other=0) != 0, chosen, num_experts)
    chosen = tl.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
    return tl.where(is_slot, chosen, num_experts + 1)


@jit
def _count_kernel(
    expert, kept, counts, num_slots, num_experts, num_blocks, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    chosen = _experts_of_block(expert, kept, slots, num_slots, num_experts)
    experts = tl.arange(0, BLOCK_E)
    # Shifted by one, so that the cumulative sum excludes the block itself.
    place = 1 + experts.to(tl.int64) * num_blocks + block
    tl.store(counts + place, tl.histogram(chosen, BLOCK_E), mask=experts <= num_experts)
    if block == 0:
        tl.store(counts, 0)


@jit
def _place_kernel(
    expert, kept, starts, slot, row, offsets, num_slots, num_experts, num_blocks, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    slots = block * BLOCK + within
    is_slot = slots < num_slots
    chosen = _experts_of_block(expert, kept, slots, num_slots, num_experts)
    others = _experts_of_block(expert, kept, slots, num_slots, num_experts)
    is_before = (chosen[:, None] == others[None, :]) & (within[None, :] < within[:, None])
    before = tl.sum(is_before.to(tl.int32), 1)
    place = tl.load(starts + chosen.to(tl.int64) * num_blocks + block, mask=is_slot, other=0) + before
    tl.store(slot + place, slots, mask=is_slot)
    tl.store(row + slots, tl.where(chosen < num_experts, place, num_slots), mask=is_slot)
    if block == 0:
        experts = tl.arange(0, BLOCK_E)
        is_expert = experts <= num_experts
        first = tl.load(starts + experts.to(tl.int64) * num_blocks, mask=is_expert, other=0)
        tl.store(offsets + experts, first, mask=is_expert)


def slot_sort_torch(
    expert_TK: Tensor, num_experts: int, kept_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    num_slots = expert_TK.numel()
    expert_N = expert_TK.reshape(-1).long()
    if kept_TK is not None:
        expert_N = expert_N.masked_fill(~kept_TK.reshape(-1), num_experts)
    expert_N = expert_N.masked_fill((expert_N < 0) | (expert_N > num_experts), num_experts)
    slot_N = torch.argsort(expert_N, stable=True)
    place_N = torch.empty_like(slot_N).scatter_(0, slot_N, torch.arange(num_slots, device=slot_N.device))
    row_N = torch.where(expert_N < num_experts, place_N, num_slots)
    counts_E1 = torch.zeros(num_experts + 1, dtype=torch.int64, device=slot_N.device).scatter_add_(
        0, expert_N, torch.ones_like(expert_N)
    )
    offsets_E1 = counts_E1.cumsum(0) - counts_E1
    return slot_N.int(), row_N.int(), offsets_E1.int()


@compilable(
    "slot_sort",
    lambda expert_TK, num_experts, kept_TK=None: tuple(
        expert_TK.new_empty(size, dtype=torch.int32)
        for size in (expert_TK.numel(), expert_TK.numel(), num_experts + 1)
    ),
    twin=slot_sort_torch,
)
def slot_sort(
    expert_TK: Tensor, num_experts: int, kept_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the N = T*K slots by expert, then by position; dropped slots come last.

    Args:
        expert_TK: expert of every slot, int32 or int64; a slot with an expert outside [0, E) is dropped.
            N must be below 2^31.
        kept_TK: bool; slots with False are also dropped. None drops only slots with an invalid expert.

    Returns:
        slot_N: slot in each sorted row, int32.
        row_N: row of each slot, int32; N for a dropped slot.
        offsets_E1: first row of each expert; the last value is the number of kept slots.
    """
    num_slots = expert_TK.numel()
    slot_N, row_N = (expert_TK.new_empty(num_slots, dtype=torch.int32) for _ in range(2))
    offsets_E1 = expert_TK.new_empty(num_experts + 1, dtype=torch.int32)
    num_blocks = cdiv(num_slots, _BLOCK)
    if num_slots == 0:
        return slot_N, row_N, offsets_E1.zero_()
    expert_TK, kept_TK = contiguous(expert_TK, kept_TK)
    sizes = num_slots, num_experts, num_blocks
    constants = {"BLOCK_E": power_of_2(num_experts + 2), "BLOCK": _BLOCK}
    # Three steps: count each block's slots per expert; sum the counts over experts, then blocks, which gives
    # the place where a block's slots of an expert begin; move every slot to its place. The order does not
    # depend on the block size, so results are bitwise reproducible.
    counts = slot_N.new_empty((num_experts + 1) * num_blocks + 1)
    _count_kernel[(num_blocks,)](expert_TK, kept_TK, counts, *sizes, **constants)
    starts = counts.cumsum(0, dtype=torch.int32)
    _place_kernel[(num_blocks,)](expert_TK, kept_TK, starts, slot_N, row_N, offsets_E1, *sizes, **constants)
    return slot_N, row_N, offsets_E1
