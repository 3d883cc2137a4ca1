"""Which slots an expert keeps when it has a capacity. Pure functions; shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from moe_exp.layers.kernel_choice import takes_kernels
from moe_exp.layers.kernels.drops import keep_within

DROP_POLICIES = ("probs", "position")


@overload
def expert_capacity(
    num_tokens: int, *, num_experts: int, topk: int, capacity_factor: float, min_capacity: int = 0
) -> int: ...
@overload
def expert_capacity(
    num_tokens: Tensor, *, num_experts: int, topk: int, capacity_factor: float, min_capacity: int = 0
) -> Tensor: ...
def expert_capacity(
    num_tokens: int | Tensor, *, num_experts: int, topk: int, capacity_factor: float, min_capacity: int = 0
) -> int | Tensor:
    """Slots per expert: max(min_capacity, ceil(capacity_factor * num_tokens * topk / num_experts)).

    A number of tokens on the device stays there. Lepikhin et al. 2020, GShard (arXiv:2006.16668); rounds like
    Megatron-Core.
    """
    if isinstance(num_tokens, Tensor):
        slots = num_tokens.double() * topk / num_experts * capacity_factor
        return slots.ceil().clamp(min=min_capacity).int()
    return max(min_capacity, math.ceil(num_tokens * topk / num_experts * capacity_factor))


def count_per_expert(expert_N: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, int64 [E]. torch.bincount would synchronize to learn the largest value."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    return counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))


def without_dropped(expert_TK: Tensor, kept_TK: Tensor | None, num_experts: int) -> Tensor:
    """The expert of every slot, or `num_experts` (none) for slots that `kept_TK` excludes."""
    return expert_TK if kept_TK is None else expert_TK.masked_fill(~kept_TK, num_experts)


def rank_in_expert(expert_N: Tensor, priority_N: Tensor | None, *, num_experts: int) -> Tensor:
    """Position [N] of every slot in its expert's queue, starting at 0.

    Args:
        expert_N: expert of each slot, integer, in [0, num_experts]; slots with E belong to no expert.
        priority_N: higher goes first; ties, and None, by position.
    """
    first_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if priority_N is not None:
        first_N = torch.argsort(priority_N, descending=True, stable=True)
    order_N = first_N[torch.argsort(expert_N[first_N], stable=True)]
    counts_E1 = count_per_expert(expert_N, num_experts + 1)
    starts_E1 = counts_E1.cumsum(0) - counts_E1
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device) - starts_E1[expert_N[order_N]]
    return place_N


def keep_most_probable(
    expert_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    capacity: int | Tensor,
    use_kernels: bool | None = None,
) -> Tensor:
    """Slots that remain when every expert keeps its `capacity` slots of highest router weight, bool [T, K].

    Args:
        expert_TK: chosen experts, integer; E for a padding slot, which is never kept.
        weights_TK: router weights; detached.
        use_kernels: see RouterConfig.
    """
    if takes_kernels(expert_TK, use_kernels):
        return keep_within(expert_TK, weights_TK.detach(), _limits(expert_TK, num_experts, capacity))
    place_N = rank_in_expert(expert_TK.flatten(), weights_TK.detach().flatten(), num_experts=num_experts)
    return (place_N < capacity).view_as(expert_TK) & (expert_TK < num_experts)


def keep_first(
    expert_TK: Tensor, *, num_experts: int, capacity: int | Tensor, use_kernels: bool | None = None
) -> Tensor:
    """Like `keep_most_probable`, but every expert keeps its first `capacity` slots in the sequence."""
    if takes_kernels(expert_TK, use_kernels):
        return keep_within(expert_TK, None, _limits(expert_TK, num_experts, capacity))
    place_N = rank_in_expert(expert_TK.flatten(), None, num_experts=num_experts)
    return (place_N < capacity).view_as(expert_TK) & (expert_TK < num_experts)


def keep_full_tiles(
    expert_TK: Tensor, weights_TK: Tensor, *, num_experts: int, tile: int, use_kernels: bool | None = None
) -> Tensor:
    """Slots that remain when every expert's row count is rounded down to a multiple of `tile`, bool [T, K].

    A grouped GEMM computes whole tiles of rows, and an expert's last tile is half empty on average. Each
    expert drops its lowest weights; one with fewer slots than a tile keeps them all. Guo et al. 2025,
    SonicMoE (arXiv:2512.14080), "token rounding", rounds to the nearest multiple and may add tokens; here
    slots are only dropped, so no token gets an expert that it did not choose.

    Args:
        expert_TK: chosen experts, integer; E for a padding slot, which is never kept.
        weights_TK: router weights; detached.
        tile: rows per tile.
        use_kernels: see RouterConfig.
    """
    expert_N, weights_TK = expert_TK.flatten(), weights_TK.detach()
    counts_E = count_per_expert(expert_N, num_experts + 1)[:num_experts]
    limits_E = torch.where(counts_E < tile, counts_E, counts_E // tile * tile)
    if takes_kernels(expert_TK, use_kernels):
        return keep_within(expert_TK, weights_TK, limits_E.int())
    place_N = rank_in_expert(expert_N, weights_TK.flatten(), num_experts=num_experts)
    return (place_N < torch.cat([limits_E, limits_E.new_zeros(1)])[expert_N]).view_as(expert_TK)


def _limits(expert_TK: Tensor, num_experts: int, capacity: int | Tensor) -> Tensor:
    if isinstance(capacity, Tensor):
        return capacity.clamp(max=expert_TK.numel()).int().repeat(num_experts)
    return torch.full(
        (num_experts,), min(capacity, expert_TK.numel()), dtype=torch.int32, device=expert_TK.device
    )
