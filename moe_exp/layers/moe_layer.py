"""The MoE layer: route, dispatch, experts, combine. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp import gloo
from moe_exp.layers.capacity import expert_capacity, keep_most_probable
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts
from moe_exp.layers.losses import group_size, load_balancing_loss_share, z_loss_share
from moe_exp.layers.router import Router, RoutingDecision


@dataclass(frozen=True)
class MoESettings:
    """What the layer does beside routing.

    Args:
        capacity_factor: None for a dropless layer.
        pad_to_capacity: give every expert the same number of rows.
        aux_loss_coeff: weight of the load-balancing loss; 0 for none.
        z_loss_coeff: weight of the z-loss; 0 for none.
    """

    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0


class MoEStatistics:
    """Sums over micro-batches of what one layer did, on the device; read and reset once per log interval.

    Sums are over this rank's tokens, but for the two losses, whose shares add up over the ranks of a micro-batch.
    """

    def __init__(self, num_experts: int, device: torch.device):
        self.tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        # dropped slots, entropy summed over tokens, load-balancing loss, z-loss
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.num_microbatches = 0

    def reset(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.sums.zero_()
        self.num_microbatches = 0


class MoELayer(nn.Module):
    """A mixture of experts over tokens: y_t = sum_k w_tk * expert_k(x_t).

    Args:
        router: see Router.
        dispatcher: LocalDispatcher or AllToAllDispatcher.
        experts: the experts of this rank.
        settings: capacity and losses. The statistics count a layer once under reentrant checkpointing (Megatron's, and
            torch.utils.checkpoint with use_reentrant=True), twice under non-reentrant, whose first forward keeps gradients on.
        microbatch_group: ranks that hold the other tokens of a micro-batch (tensor and context parallel), or None.
        context_parallel_size: of `microbatch_group`, whose ranks then hold the sequence as Megatron splits it (see `_in_sequence`).
    """

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: LocalDispatcher,
        experts: Experts,
        settings: MoESettings,
        microbatch_group: ProcessGroup | None = None,
        context_parallel_size: int = 1,
    ):
        super().__init__()
        self.router, self.dispatcher, self.experts, self.settings = router, dispatcher, experts, settings
        self.microbatch_group, self.context_parallel_size = microbatch_group, context_parallel_size
        self.statistics = MoEStatistics(router.config.num_experts, router.weight.device)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Routes, dispatches, computes and combines.

        Args:
            x_TD: hidden states of this rank's tokens.

        Returns:
            The output [T, D] in the dtype of `x_TD`, and this rank's share of the weighted auxiliary losses (scalar), or None
            when there are none; its gradient has to be added to that of the main loss.
        """
        decision = self.route(x_TD)
        loss = self.auxiliary_loss(decision)
        if self._stays_in_cache(x_TD):
            order, counts_E = self.dispatcher.row_order(decision, self._rows_per_expert(x_TD.size(0)))
            weights_R = order.weights(decision.weights_TK)
            return self.experts.forward_tokens(x_TD, weights_R, order, tuple(counts_E.tolist())), loss
        dispatched = self.dispatcher.dispatch(x_TD, decision, rows_per_expert=self._rows_per_expert(x_TD.size(0)))
        expert_output_RD = self.experts(dispatched)
        return self.dispatcher.combine(expert_output_RD, dispatched.record), loss

    def _stays_in_cache(self, x_TD: Tensor) -> bool:
        """Whether dispatch, experts and combine run as one function: on a CPU with all experts on this rank."""
        return type(self.dispatcher) is LocalDispatcher and self.experts.runs_one_by_one(x_TD)

    def route(self, x_TD: Tensor) -> RoutingDecision:
        """The routing decision, with the slots over capacity marked as dropped."""
        decision: RoutingDecision = self.router(x_TD)
        if self.settings.capacity_factor is None:
            return decision
        return replace(decision, kept_TK=self._kept(decision))

    def auxiliary_loss(self, decision: RoutingDecision) -> Tensor | None:
        """This rank's share of the weighted losses; also adds to the statistics."""
        settings, group = self.settings, self.microbatch_group
        balance = load_balancing_loss_share(decision.scores_TE, decision.tokens_per_expert_E, topk=decision.expert_TK.size(1), group=group)
        z = z_loss_share(decision.logits_TE, group=group)
        # Under recompute a layer runs forward twice, the first time without gradients: it is counted once.
        if self.training and torch.is_grad_enabled():
            self._add_statistics(decision, balance, z)
        if settings.aux_loss_coeff == 0 and settings.z_loss_coeff == 0:
            return None
        return balance * settings.aux_loss_coeff + z * settings.z_loss_coeff

    def _kept(self, decision: RoutingDecision) -> Tensor:
        """Which slots stay, decided over the whole micro-batch: so drops do not depend on how its tokens are split over ranks."""
        group, num_ranks = self.microbatch_group, group_size(self.microbatch_group)
        expert_TK, weights_TK = decision.expert_TK, decision.weights_TK.detach()
        num_tokens = expert_TK.size(0)
        if group is None or num_ranks == 1:
            return self._keep(expert_TK, weights_TK)
        blocks = _sequence_blocks(self.context_parallel_size)
        expert_TK = _in_sequence(_gather(expert_TK, group), blocks)
        weights_TK = _in_sequence(_gather(weights_TK, group), blocks)
        # Back to the order of the ranks, of which this one keeps its part.
        kept_TK = self._keep(expert_TK, weights_TK).unflatten(0, (len(blocks), -1))[blocks].flatten(0, 1)
        return kept_TK[group.rank() * num_tokens : (group.rank() + 1) * num_tokens]

    def _keep(self, expert_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_experts, capacity = self.router.config.num_experts, self._capacity(expert_TK.size(0))
        return keep_most_probable(expert_TK, weights_TK, num_experts=num_experts, capacity=capacity)

    def _capacity(self, num_tokens: int) -> int:
        factor = self.settings.capacity_factor
        assert factor is not None
        config = self.router.config
        return expert_capacity(num_tokens, num_experts=config.num_experts, topk=config.topk, capacity_factor=factor)

    def _rows_per_expert(self, num_tokens: int) -> int | None:
        if self.settings.capacity_factor is None or not self.settings.pad_to_capacity:
            return None
        # All slots that an expert keeps may be on one rank, but no rank has more than one slot per token for it.
        return min(self._capacity(num_tokens * group_size(self.microbatch_group)), num_tokens)

    @torch.no_grad()
    def _add_statistics(self, decision: RoutingDecision, balance: Tensor, z: Tensor) -> None:
        statistics = self.statistics
        statistics.tokens_per_expert_E += decision.tokens_per_expert_E
        entropy = -torch.xlogy(decision.scores_TE, decision.scores_TE).sum()
        dropped = entropy.new_zeros(()) if decision.kept_TK is None else (~decision.kept_TK).sum()
        statistics.sums += torch.stack([dropped.to(entropy.dtype), entropy, balance, z])
        statistics.num_microbatches += 1


def _sequence_blocks(context_parallel_size: int) -> list[int]:
    """Blocks of the sequence in the order of the ranks: Megatron gives rank i of C the blocks i and 2C-1-i of 2C, for balance."""
    if context_parallel_size == 1:
        return [0]
    return [block for i in range(context_parallel_size) for block in (i, 2 * context_parallel_size - 1 - i)]


def _in_sequence(x_TK: Tensor, blocks: list[int]) -> Tensor:
    """Rows that come in the order of the ranks, in the order of the sequence: equal weights are then ranked alike in every layout."""
    inverse = torch.argsort(torch.tensor(blocks)).tolist()
    return x_TK.unflatten(0, (len(blocks), -1))[inverse].flatten(0, 1)


def _gather(x_TK: Tensor, group: ProcessGroup | None) -> Tensor:
    out = x_TK.new_empty(group_size(group) * x_TK.size(0), x_TK.size(1))
    gloo.all_gather(out, x_TK.contiguous(), group=group)
    return out
