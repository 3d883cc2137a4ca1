"""Which slots an expert keeps when it has a capacity. Pure functions; shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.kernel_choice import takes_kernels
from moe_exp.layers.kernels.drops import keep_within, keep_within_torch

DROP_POLICIES = ("probs", "position")


def expert_capacity(
    num_tokens: Any, *, num_experts: int, topk: int, capacity_factor: float, min_capacity: int = 0
) -> Any:
    """Slots per expert: max(min_capacity, ceil(capacity_factor * num_tokens * topk / num_experts)).

    An int for an int; a number of tokens on the device stays there. Lepikhin et al. 2020, GShard
    (arXiv:2006.16668); rounds like Megatron-Core.
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


def keep_within_capacity(
    expert_TK: Tensor,
    weights_TK: Tensor | None,
    *,
    num_experts: int,
    capacity: int | Tensor,
    use_kernels: bool | None = None,
) -> Tensor:
    """Slots that remain when every expert keeps `capacity` of its slots, bool [T, K].

    Args:
        expert_TK: chosen experts, integer; E for a padding slot, which is never kept.
        weights_TK: router weights; detached. The highest stay, ties by position. None: the first of the
            sequence stay.
        use_kernels: see RouterConfig.
    """
    most = expert_TK.numel()
    if isinstance(capacity, Tensor):
        limits_E = capacity.clamp(max=most).int().repeat(num_experts)
    else:
        limits_E = torch.full((num_experts,), min(capacity, most), dtype=torch.int32, device=expert_TK.device)
    return _keep(expert_TK, weights_TK, limits_E, use_kernels)


def keep_full_tiles(
    expert_TK: Tensor, weights_TK: Tensor, *, num_experts: int, tile: int, use_kernels: bool | None = None
) -> Tensor:
    """Slots that remain when every expert's row count is rounded down to a multiple of `tile`, bool [T, K].

    A grouped GEMM computes whole tiles of rows, and an expert's last tile is half empty on average. Each
    expert drops its lowest weights; one with fewer slots than a tile keeps them all. Guo et al. 2025,
    SonicMoE (arXiv:2512.14080), "token rounding", rounds to the nearest multiple and may add tokens; here
    slots are only dropped, so no token gets an expert that it did not choose.

    Args:
        expert_TK, weights_TK, use_kernels: as for `keep_within_capacity`.
        tile: rows per tile.
    """
    counts_E = count_per_expert(expert_TK.flatten(), num_experts + 1)[:num_experts]
    limits_E = torch.where(counts_E < tile, counts_E, counts_E // tile * tile)
    return _keep(expert_TK, weights_TK, limits_E.int(), use_kernels)


def _keep(expert_TK: Tensor, weights_TK: Tensor | None, limits_E: Tensor, use_kernels: bool | None) -> Tensor:
    keep = keep_within if takes_kernels(expert_TK, use_kernels) else keep_within_torch
    return keep(expert_TK, None if weights_TK is None else weights_TK.detach(), limits_E)
