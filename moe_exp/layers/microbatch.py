"""Which slots of a micro-batch are kept and how many rows an expert gets, however ranks share its tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.host import gloo
from moe_exp.layers.groups import group_size, max_over
from moe_exp.layers.kernels.drops import keep_within, keep_within_torch
from moe_exp.layers.kernels.launch import takes_kernels
from moe_exp.layers.losses import AuxLoss, LossFunction, as_losses
from moe_exp.layers.router import RouterConfig, RoutingDecision, count_kept, tokens_in_group
from moe_exp.layers.router.decision import count_per_expert, without_dropped

DROP_POLICIES = ("probs", "position")


@dataclass(frozen=True)
class MoESettings:
    """Settings of the layer beside those of the router: capacity and losses."""

    capacity_factor: float | None = None  # of a micro-batch without padding; None for a dropless layer
    min_capacity: int = 0  # slots that an expert takes at least
    # Give every expert the same number of rows, the capacity. With TP or CP that of the rank's tokens, and
    # more only if a rank keeps more, which waits for the device.
    pad_to_capacity: bool = False
    drop_policy: str = "probs"  # keeps the slots of highest router weight; `position` the first ones
    # Of a dropless layer in training: each expert's slots in a micro-batch are rounded down to a multiple of
    # it, see `keep_full_tiles`; 0 for no rounding.
    token_rounding: int = 0
    losses: Sequence[AuxLoss | LossFunction] | AuxLoss | LossFunction = ()  # see `as_losses`
    z_loss_coeff: float = 0.0  # weight of the z-loss; 0 for none
    batch_dim: int = 0  # which dimension counts sequences: 0 of [B, S, D], 1 of Megatron's [S, B, D]

    def __post_init__(self) -> None:
        if self.drop_policy not in DROP_POLICIES:
            fix = f"use {' or '.join(DROP_POLICIES)}"
            raise ValueError(f"drop_policy={self.drop_policy}: is not a policy. Fix: {fix}.")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            fix = "1.0 is the fair share; None never drops"
            raise ValueError(f"capacity_factor={self.capacity_factor}: is not positive. Fix: {fix}.")
        if self.capacity_factor is None and (self.pad_to_capacity or self.min_capacity):
            field = "pad_to_capacity=True" if self.pad_to_capacity else f"min_capacity={self.min_capacity}"
            raise ValueError(f"{field}: a dropless layer has no capacity. Fix: set capacity_factor.")
        if self.token_rounding < 0 or (self.token_rounding and self.capacity_factor is not None):
            rule = "a layer with capacity has its number of rows from that"
            rule = "is negative" if self.token_rounding < 0 else rule
            fix = "set it to 0, or to a tile, 128, of a dropless layer"
            raise ValueError(f"token_rounding={self.token_rounding}: {rule}. Fix: {fix}.")
        names = [loss.name for loss in self.aux_losses]
        if len(set(names)) < len(names):
            fix = "add up their coefficients, or rename the function"
            raise ValueError(f"losses={','.join(names)}: names a loss twice. Fix: {fix}.")

    @cached_property
    def aux_losses(self) -> tuple[AuxLoss, ...]:
        """`losses`, each with its coefficient."""
        return as_losses(self.losses)


@dataclass(frozen=True)
class MicrobatchCapacity:
    """Which slots of a micro-batch are kept, and how many rows each expert gets."""

    settings: MoESettings
    config: RouterConfig  # of the router
    group: ProcessGroup | None  # ranks that hold the other tokens of the micro-batch
    context_parallel_size: int  # of `group`, see MoELayer
    context_stripes: int = 1  # parts of a sequence that its ranks share, see `sequence_blocks`

    def kept(self, decision: RoutingDecision, shape: torch.Size) -> Tensor:
        """bool [T, K]: the slots of this rank that are kept; `shape`: of the layer's input, without D."""
        weights_TK = decision.weights_TK.detach()
        num_tokens = 0 if self.settings.token_rounding else tokens_in_group(decision, self.group)
        # padding is in no expert's queue
        expert_TK = without_dropped(decision.expert_TK, decision.kept_TK, self.config.num_experts)
        if len(shape) == 1 or self.settings.batch_dim == 1:
            return self._in_sequence(expert_TK, weights_TK, num_tokens)
        # The queue is by position in the sequence, of all sequences together: that order does not depend on
        # the ranks.
        expert_TK, weights_TK = (
            x.unflatten(0, shape).transpose(0, 1).flatten(0, 1) for x in (expert_TK, weights_TK)
        )
        kept_TK = self._in_sequence(expert_TK, weights_TK, num_tokens)
        return kept_TK.unflatten(0, (shape[1], shape[0])).transpose(0, 1).flatten(0, 1)

    def _in_sequence(self, expert_TK: Tensor, weights_TK: Tensor, num_tokens: int | Tensor) -> Tensor:
        """`num_tokens`: of the micro-batch, without padding."""
        group, num_rows = self.group, expert_TK.size(0)
        if group is None or group_size(group) == 1:
            return self._keep_slots(expert_TK, weights_TK, num_tokens)
        blocks = sequence_blocks(self.context_parallel_size, self.context_stripes)
        in_order: list[Tensor] = []
        for x_TK in (expert_TK, weights_TK):
            out = x_TK.new_empty(group_size(group) * num_rows, x_TK.size(1))
            gloo.all_gather(out, x_TK.contiguous(), group=group)
            in_order.append(in_sequence_order(out, blocks))
        # Back to the order of the ranks, of which this one keeps its part.
        chunks = self._keep_slots(in_order[0], in_order[1], num_tokens).chunk(len(blocks))
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
        """Slots per expert: an int for an int, a tensor for a tensor."""
        settings, config = self.settings, self.config
        assert settings.capacity_factor is not None
        sizes = {
            "num_experts": config.num_experts,
            "topk": config.topk,
            "min_capacity": settings.min_capacity,
        }
        return expert_capacity(num_tokens, capacity_factor=settings.capacity_factor, **sizes)

    def rows_per_expert(
        self, decision: RoutingDecision, exchange_groups: Iterable[ProcessGroup | None]
    ) -> int | None:
        """Rows that this rank gives every expert, the same on all ranks that exchange rows: the capacity of
        its tokens, or the most slots that one of the ranks keeps for an expert.

        With TP or CP the capacity is shared out over the whole micro-batch, and a rank may keep more than its
        part of it; Megatron-Core would drop those.
        """
        if self.settings.capacity_factor is None or not self.settings.pad_to_capacity:
            return None
        # No rank has more than one slot per token for an expert.
        num_tokens = decision.expert_TK.size(0)
        rows = min(self._capacity(num_tokens), num_tokens)
        if group_size(self.group) == 1:
            return rows
        kept_E = count_kept(decision.expert_TK, decision.kept_TK, self.config.num_experts)
        most = kept_E.max()
        for group in exchange_groups:
            most = max_over(most, group)
        return max(rows, int(most))


def sequence_blocks(context_parallel_size: int, num_stripes: int = 1) -> list[int]:
    """Blocks of the sequence in the order of the ranks: Megatron gives rank i of C the blocks i and 2C-1-i of
    2C, for balance; so does each of several stripes, equal parts of the sequence.
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
    """A context parallel rank's pieces of each sequence, in its order, see `sequence_blocks`.

    So every rank has as much to do if tokens attend to those before them; with documents nearly as much if
    there are several stripes. With one, Megatron's `get_batch_on_this_cp_rank` gives the same, by arguments
    that differ between its versions.

    Args:
        num_tokens: S, a multiple of 2C times `num_stripes` if C > 1.
        num_stripes: equal parts of a sequence, each of which all ranks share.

    Returns:
        First token and the one after the last, of every piece in order.
    """
    blocks = sequence_blocks(cp_size, num_stripes)
    each, piece = len(blocks) // cp_size, num_tokens // len(blocks)
    return tuple((block * piece, (block + 1) * piece) for block in blocks[cp_rank * each :][:each])


def in_sequence_order(x_TK: Tensor, blocks: list[int]) -> Tensor:
    """Rows that come in the order of the ranks, in the order of the sequence: equal weights are then ranked
    alike in every layout.
    """
    chunks = x_TK.chunk(len(blocks))
    return torch.cat([chunks[blocks.index(block)] for block in range(len(blocks))])


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
