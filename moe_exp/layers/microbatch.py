"""Capacity of a micro-batch: slots to keep and rows per expert, for any split of the tokens over ranks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.dispatcher.collectives import gathered
from moe_exp.layers.groups import group_size
from moe_exp.layers.kernels.drops import keep_within, keep_within_torch
from moe_exp.layers.kernels.launch import takes_kernels
from moe_exp.layers.losses import AuxLoss, LossFunction, as_losses
from moe_exp.layers.router import RouterConfig, RoutingDecision, count_kept, tokens_in_group
from moe_exp.layers.router.decision import count_per_expert, without_dropped

DROP_POLICIES = ("probs", "position")


@dataclass(frozen=True)
class MoESettings:
    """Settings of capacity and losses."""

    capacity_factor: float | None = None  # of the fair share of a micro-batch without padding; None: dropless
    min_capacity: int = 0  # lower limit of an expert's capacity (slots)
    # Pad every expert to the same number of rows, the capacity. With TP or CP this is the capacity for this
    # rank's tokens, or more if a rank keeps more slots. Checking that waits for the device.
    pad_to_capacity: bool = False
    drop_policy: str = "probs"  # which slots to keep: `probs`: highest router weight, `position`: first
    # For a dropless layer in training: round each expert's slots in a micro-batch down to a multiple, see
    # `keep_full_tiles`; 0: no rounding.
    token_rounding: int = 0
    losses: Sequence[AuxLoss | LossFunction] | AuxLoss | LossFunction = ()  # see `as_losses`
    z_loss_coeff: float = 0.0  # weight of the z-loss; 0: no z-loss
    batch_dim: int = 0  # dimension that counts sequences: 0 in [B, S, D], 1 in Megatron's [S, B, D]

    def __post_init__(self) -> None:
        if self.drop_policy not in DROP_POLICIES:
            fix = f"use {' or '.join(DROP_POLICIES)}"
            raise ValueError(f"drop_policy={self.drop_policy}: unknown policy. Fix: {fix}.")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            fix = "use 1.0 for the fair share, or None for a dropless layer"
            raise ValueError(f"capacity_factor={self.capacity_factor}: must be positive. Fix: {fix}.")
        if self.capacity_factor is None and (self.pad_to_capacity or self.min_capacity):
            field = "pad_to_capacity=True" if self.pad_to_capacity else f"min_capacity={self.min_capacity}"
            raise ValueError(f"{field}: requires a capacity. Fix: set capacity_factor.")
        if self.token_rounding < 0 or (self.token_rounding and self.capacity_factor is not None):
            rule = "cannot be combined with capacity_factor"
            rule = "must not be negative" if self.token_rounding < 0 else rule
            fix = "set token_rounding to 0 or, in a dropless layer, to the tile size 128"
            raise ValueError(f"token_rounding={self.token_rounding}: {rule}. Fix: {fix}.")
        names = [loss.name for loss in self.aux_losses]
        if len(set(names)) < len(names):
            fix = "pass each loss once with the sum of its coefficients, or rename the function"
            raise ValueError(f"losses={','.join(names)}: names must be unique. Fix: {fix}.")

    @cached_property
    def aux_losses(self) -> tuple[AuxLoss, ...]:
        """The losses of the setting `losses`, each with its coefficient."""
        return as_losses(self.losses)


@dataclass(frozen=True)
class MicrobatchCapacity:
    """Computes which slots of a micro-batch are kept, and how many rows each expert gets."""

    settings: MoESettings
    config: RouterConfig
    group: ProcessGroup | None  # ranks that hold the other tokens of the micro-batch
    context_parallel_size: int  # within `group`, see MoELayer
    context_stripes: int = 1  # see `sequence_blocks`

    def kept(self, decision: RoutingDecision, shape: torch.Size) -> Tensor:
        """This rank's kept slots, bool [T, K]. `shape` is the layer input's shape without the dimension D."""
        weights_TK = decision.weights_TK.detach()
        num_tokens = 0 if self.settings.token_rounding else tokens_in_group(decision, self.group)
        # Padding must not take capacity from real tokens.
        expert_TK = without_dropped(decision.expert_TK, decision.kept_TK, self.config.num_experts)
        if len(shape) == 1 or self.settings.batch_dim == 1:
            return self._in_sequence(expert_TK, weights_TK, num_tokens)
        # The drop order is by position first, then by sequence, so it is the same in every parallel layout.
        expert_TK, weights_TK = (
            x.unflatten(0, shape).transpose(0, 1).flatten(0, 1) for x in (expert_TK, weights_TK)
        )
        kept_TK = self._in_sequence(expert_TK, weights_TK, num_tokens)
        return kept_TK.unflatten(0, (shape[1], shape[0])).transpose(0, 1).flatten(0, 1)

    def _in_sequence(self, expert_TK: Tensor, weights_TK: Tensor, num_tokens: int | Tensor) -> Tensor:
        group, num_rows = self.group, expert_TK.size(0)
        if group is None or group_size(group) == 1:
            return self._keep_slots(expert_TK, weights_TK, num_tokens)
        blocks = sequence_blocks(self.context_parallel_size, self.context_stripes)
        experts, weights = (in_sequence_order(gathered(x, group), blocks) for x in (expert_TK, weights_TK))
        # Every rank decides for the whole micro-batch; restore rank order and return this rank's part.
        chunks = self._keep_slots(experts, weights, num_tokens).chunk(len(blocks))
        kept_TK = torch.cat([chunks[block] for block in blocks])
        return kept_TK[group.rank() * num_rows : (group.rank() + 1) * num_rows]

    def _keep_slots(self, expert_TK: Tensor, weights_TK: Tensor, num_tokens: int | Tensor) -> Tensor:
        config = self.config
        options: dict[str, Any] = {"num_experts": config.num_experts, "use_kernels": config.use_kernels}
        if self.settings.token_rounding:
            return keep_full_tiles(expert_TK, weights_TK, tile=self.settings.token_rounding, **options)
        by_weight = None if self.settings.drop_policy == "position" else weights_TK
        return keep_within_capacity(expert_TK, by_weight, capacity=self._capacity(num_tokens), **options)

    def _capacity(self, num_tokens: Any) -> Any:
        settings, config = self.settings, self.config
        assert settings.capacity_factor is not None
        sizes: dict[str, Any] = {"num_experts": config.num_experts, "topk": config.topk}
        sizes["capacity_factor"], sizes["min_capacity"] = settings.capacity_factor, settings.min_capacity
        return expert_capacity(num_tokens, **sizes)

    def rows_per_expert(
        self, decision: RoutingDecision, exchange_groups: Iterable[ProcessGroup | None]
    ) -> int | None:
        """Number of rows to which each expert is padded; None: no padding.

        The number is equal on all ranks that exchange rows, and at least the capacity for this rank's tokens.
        With TP or CP, capacity applies to the whole micro-batch, so a rank may keep more slots than its
        share. Megatron-Core applies capacity per rank and drops these extra slots.
        """
        if self.settings.capacity_factor is None or not self.settings.pad_to_capacity:
            return None
        # No rank has more than one slot per token for an expert.
        num_tokens = decision.expert_TK.size(0)
        rows = min(self._capacity(num_tokens), num_tokens)
        if group_size(self.group) == 1:
            return rows
        most = count_kept(decision.expert_TK, decision.kept_TK, self.config.num_experts).max()
        for group in exchange_groups:
            if group_size(group) > 1:
                torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        return max(rows, int(most))


def sequence_blocks(context_parallel_size: int, num_stripes: int = 1) -> list[int]:
    """Indices of a sequence's blocks, ordered by the rank that holds them.

    To balance causal attention, Megatron assigns blocks i and 2C-1-i of 2C blocks to rank i of C ranks. With
    several stripes (equal parts of the sequence), each stripe is split in this way.
    """
    if context_parallel_size == 1:
        return [0]
    width = 2 * context_parallel_size
    return [
        stripe * width + block
        for i in range(context_parallel_size)
        for stripe in range(num_stripes)
        for block in (i, width - 1 - i)
    ]


def context_ranges(
    num_tokens: int, *, cp_rank: int, cp_size: int, num_stripes: int = 1
) -> tuple[tuple[int, int], ...]:
    """Ranges [first, end) of a sequence that a context parallel rank holds, in order (see `sequence_blocks`).

    With these ranges, causal attention costs the same on every rank. If attention is restricted to documents,
    several stripes are needed to keep the cost nearly equal on all ranks.

    Args:
        num_tokens: length of the whole sequence; if `cp_size` > 1, a multiple of
            2 * `cp_size` * `num_stripes`.
    """
    # With one stripe, as in Megatron's get_batch_on_this_cp_rank, whose arguments differ between versions.
    blocks = sequence_blocks(cp_size, num_stripes)
    each, piece = len(blocks) // cp_size, num_tokens // len(blocks)
    return tuple((block * piece, (block + 1) * piece) for block in blocks[cp_rank * each :][:each])


def in_sequence_order(x_TK: Tensor, blocks: list[int]) -> Tensor:
    """Reorders rows from rank order to sequence order."""
    # Ties between equal weights are broken by position, so the result must not depend on the layout.
    chunks = x_TK.chunk(len(blocks))
    return torch.cat([chunks[blocks.index(block)] for block in range(len(blocks))])


def expert_capacity(
    num_tokens: Any, *, num_experts: int, topk: int, capacity_factor: float, min_capacity: int = 0
) -> Any:
    """Slots per expert: max(min_capacity, ceil(capacity_factor * num_tokens * topk / num_experts)).

    Returns an int if `num_tokens` is an int, else a device tensor. The formula is from GShard
    (Lepikhin et al. 2020, arXiv:2006.16668), rounded as in Megatron-Core.
    """
    if isinstance(num_tokens, Tensor):
        slots = num_tokens.double() * topk / num_experts * capacity_factor
        return slots.ceil().clamp(min=min_capacity).int()
    return max(min_capacity, math.ceil(num_tokens * topk / num_experts * capacity_factor))


def keep_within_capacity(
    expert_TK: Tensor, weights_TK: Tensor | None, *, num_experts: int, capacity: int | Tensor,
    use_kernels: bool | None = None,
) -> Tensor:  # fmt: skip
    """Bool mask [T, K] of the slots to keep; every expert keeps at most `capacity` slots.

    Args:
        expert_TK: integer indices of the chosen experts; padding slots have the index E and are never kept.
        weights_TK: router weights. Slots of highest weight are kept; in ties, or if None, the first slots.
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
    """Bool mask [T, K] of slots to keep; each expert's row count is rounded down to a multiple of `tile`.

    A grouped GEMM computes whole tiles of rows, and an expert's last tile is half empty on average. Each
    expert drops its slots of lowest weight; an expert with fewer slots than a tile keeps all slots. Token
    rounding in SonicMoE (Guo et al. 2025, arXiv:2512.14080) rounds to the nearest multiple and may add
    tokens; here slots are only dropped, so no token is sent to an expert that it did not choose.
    Other arguments: as for `keep_within_capacity`.
    """
    counts_E = count_per_expert(expert_TK.flatten(), num_experts + 1)[:num_experts]
    limits_E = torch.where(counts_E < tile, counts_E, counts_E // tile * tile)
    return _keep(expert_TK, weights_TK, limits_E.int(), use_kernels)


def _keep(expert_TK: Tensor, weights_TK: Tensor | None, limits_E: Tensor, use_kernels: bool | None) -> Tensor:
    keep = keep_within if takes_kernels(expert_TK, use_kernels) else keep_within_torch
    return keep(expert_TK, None if weights_TK is None else weights_TK.detach(), limits_E)
