"""The MoE layer: route, dispatch, experts, combine. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.host import gloo
from moe_exp.layers.capacity import (
    DROP_POLICIES,
    expert_capacity,
    keep_first,
    keep_full_tiles,
    keep_most_probable,
    without_dropped,
)
from moe_exp.layers.dispatcher import Dispatcher, LocalDispatcher
from moe_exp.layers.experts import Experts, OrderedTokens, Slots
from moe_exp.layers.groups import group_size, max_over, sum_over
from moe_exp.layers.losses import (
    AuxLoss,
    global_balancing_loss_share,
    importance_loss_share,
    load_balancing_loss_share,
    sequence_balancing_loss_share,
    z_loss_share,
)
from moe_exp.layers.phase_marks import PhaseTimers, mark
from moe_exp.layers.recompute import is_counted_forward
from moe_exp.layers.router import Router, RoutingDecision, count_kept, tokens_in_group


@dataclass(frozen=True)
class MoESettings:
    """What the layer does beside routing.

    Args:
        capacity_factor: None for a dropless layer. Capacity is that of a micro-batch, padding tokens
            included.
        min_capacity: slots that an expert takes at least.
        pad_to_capacity: give every expert the same number of rows, the capacity. With TP or CP that of the
            rank's tokens, and more only where a rank keeps more, which waits for the device.
        drop_policy: `probs` keeps the slots of highest router weight, `position` the first of the sequence.
        token_rounding: of a dropless layer in training: rows that the slots of each expert in a micro-batch
            are rounded down to a multiple of, see capacity.keep_full_tiles; 0 for no rounding.
        losses: balancing losses with their coefficients.
        z_loss_coeff: weight of the z-loss; 0 for none.
        batch_dim: which of the two leading dimensions of the input counts sequences: 0 for [B, S, D], 1 for
            Megatron's [S, B, D].

    Raises:
        ValueError: for a value that cannot work.
    """

    capacity_factor: float | None = None
    min_capacity: int = 0
    pad_to_capacity: bool = False
    drop_policy: str = "probs"
    token_rounding: int = 0
    losses: tuple[AuxLoss, ...] = ()
    z_loss_coeff: float = 0.0
    batch_dim: int = 0

    def __post_init__(self) -> None:
        if self.drop_policy not in DROP_POLICIES:
            raise ValueError(
                f"drop_policy={self.drop_policy}: is not a policy. Fix: use {' or '.join(DROP_POLICIES)}."
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor={self.capacity_factor}: is not positive. Fix: 1.0 is the fair share; None"
                " never drops."
            )
        if self.capacity_factor is None and (self.pad_to_capacity or self.min_capacity):
            field = "pad_to_capacity=True" if self.pad_to_capacity else f"min_capacity={self.min_capacity}"
            raise ValueError(f"{field}: a dropless layer has no capacity. Fix: set capacity_factor.")
        if self.token_rounding < 0 or (self.token_rounding and self.capacity_factor is not None):
            rule = (
                "is negative"
                if self.token_rounding < 0
                else "a layer with capacity has its number of rows from that"
            )
            raise ValueError(
                f"token_rounding={self.token_rounding}: {rule}. Fix: set it to 0, or to a tile, 128, of a"
                " dropless layer."
            )
        kinds = [loss.kind for loss in self.losses]
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"aux_loss_type={','.join(kinds)}: names a loss twice. Fix: add up their coefficients."
            )


def needs_scores(losses: Iterable[AuxLoss]) -> bool:
    """Whether a loss looks at the router's scores of all experts, and not at their sums alone."""
    return any(loss.kind == "seq_aux_loss" for loss in losses)


class MoEStatistics:
    """Sums over micro-batches of what one layer did, on the device; read and reset once per log interval.

    Sums are over this rank's tokens, but for the losses, whose shares add up over the ranks of a micro-batch.
    """

    def __init__(self, num_experts: int, num_losses: int, device: torch.device):
        self.tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        # dropped slots, entropy and largest router weight summed over tokens, the busiest expert's slots over
        # the mean of micro-batches, load-balancing loss of micro-batches, z-loss, then the losses of the
        # settings
        self.sums = torch.zeros(6 + num_losses, dtype=torch.float64, device=device)
        self.num_microbatches = 0

    def to(self, device: torch.device) -> None:
        """Moves the sums; from the meta device, where they have no values, starts them at zero."""
        if self.sums.device != device:
            for name in ("tokens_per_expert_E", "sums"):
                old = getattr(self, name)
                setattr(self, name, torch.zeros_like(old, device=device) if old.is_meta else old.to(device))

    def reset(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.sums.zero_()
        self.num_microbatches = 0


class MoELayer(nn.Module):
    """A mixture of experts over tokens: y_t = sum_k w_tk * expert_k(x_t) + shared(x_t).

    Args:
        router: see Router.
        dispatcher: Dispatcher, or one for experts on several ranks.
        experts: the experts of this rank.
        settings: capacity and losses.
        shared: a module from the input to an output of the same shape, added to that of the experts: the
            shared expert.
        microbatch_group: ranks that hold the other tokens of a micro-batch (tensor and context parallel), or
            None.
        context_parallel_size: of `microbatch_group`, whose ranks then hold the sequence as Megatron splits it
            (see `_in_sequence`).

    Attributes:
        statistics: sums for the log, in training.
        timers: told of the phases `all_to_all` (dispatch and combine) and `experts` in training, or None.

    Raises:
        ValueError: when the settings need what the router does not keep.
    """

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: Dispatcher,
        experts: Experts,
        settings: MoESettings,
        shared: nn.Module | None = None,
        microbatch_group: ProcessGroup | None = None,
        context_parallel_size: int = 1,
    ):
        super().__init__()
        if (
            any(loss.kind == "global_aux_loss" for loss in settings.losses)
            and not router.config.global_fractions
        ):
            raise ValueError(
                "aux_loss_type=global_aux_loss: the router keeps no global fractions. Fix: set"
                " global_fractions=True in RouterConfig."
            )
        self.router, self.dispatcher, self.experts, self.settings, self.shared = (
            router,
            dispatcher,
            experts,
            settings,
            shared,
        )
        router.needs_scores = needs_scores(settings.losses)
        self.microbatch_group, self.context_parallel_size = microbatch_group, context_parallel_size
        self.statistics = MoEStatistics(router.config.num_experts, len(settings.losses), router.weight.device)
        self.timers: PhaseTimers | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The statistics follow the layer to another device, and stay in their dtype."""
        super()._apply(fn, recurse)
        self.statistics.to(self.router.weight.device)
        return self

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Routes, dispatches, computes and combines.

        Args:
            x: hidden states of this rank's tokens, [T, D], or with two leading dimensions of which
                `batch_dim` counts sequences.
            padding_mask: bool, the shape of `x` without D, True for padding: no expert sees it, and it counts
                nowhere.

        Returns:
            The output in the shape and dtype of `x`, and this rank's share of the weighted auxiliary losses
            (scalar), or None when there are none; its gradient has to be added to that of the main loss.
        """
        x_TD = x.flatten(0, -2)
        decision = self.route(
            x_TD, None if padding_mask is None else padding_mask.flatten(), shape=x.shape[:-1]
        )
        # In evaluation without gradients nobody asks for the losses, and for a single token they would be a
        # good part of the work. By the router's mode: Megatron's wrapper of this layer does not hand on its
        # own.
        is_wanted = self.router.training or torch.is_grad_enabled()
        loss = self.auxiliary_loss(decision, x.shape[:-1]) if is_wanted else None
        rows_per_expert = self._rows_per_expert(decision)
        if type(self.dispatcher) is LocalDispatcher and (
            self.experts.takes_slots() or self.experts.runs_one_by_one(x_TD)
        ):
            x_TD = self._mark(x_TD, begins="experts")
            output = self._mark(
                self._in_one(self.dispatcher, x_TD, decision, rows_per_expert).view_as(x), ends="experts"
            )
            return (output if self.shared is None else output + self.shared(x)), loss
        pending = self.dispatcher.start(
            self._mark(x_TD, begins="all_to_all"), decision, rows_per_expert=rows_per_expert
        )
        # While the tokens travel, and in backward while their gradients do.
        shared = None if self.shared is None else self.shared(x)
        dispatched = self.dispatcher.finish(pending)
        if self.timers is not None:
            dispatched = replace(
                dispatched, rows_RD=self._mark(dispatched.rows_RD, ends="all_to_all", begins="experts")
            )
        rows_RD = self._mark(self.experts(dispatched), ends="experts", begins="all_to_all")
        output_TD = self._mark(self.dispatcher.combine(rows_RD, dispatched.record), ends="all_to_all")
        output = output_TD.view_as(x)
        return (output if shared is None else output + shared), loss

    def _mark(self, x: Tensor, *, ends: str | None = None, begins: str | None = None) -> Tensor:
        """Tells the timers, in training, and returns `x`."""
        return (
            x
            if self.timers is None or not self.router.training
            else mark(x, self.timers, ends=ends, begins=begins)
        )

    def _in_one(
        self,
        dispatcher: LocalDispatcher,
        x_TD: Tensor,
        decision: RoutingDecision,
        rows_per_expert: int | None,
    ) -> Tensor:
        """Dispatch, experts and combine as one function, with all experts on this rank."""
        # its shapes do not depend on the data, with or without rows of padding
        if self.experts.takes_slots():
            return self.experts(Slots(x_TD, decision.weights_TK, decision.expert_TK, decision.kept_TK))
        order, counts_E, splits = dispatcher.row_order(decision, rows_per_expert=rows_per_expert)
        splits = tuple(counts_E.tolist()) if splits is None else splits
        return self.experts(OrderedTokens(x_TD, order.weights(decision.weights_TK), order, splits))

    def route(
        self, x_TD: Tensor, padding_mask_T: Tensor | None = None, *, shape: torch.Size | None = None
    ) -> RoutingDecision:
        """The routing decision, with the slots over capacity marked as dropped. `shape`: of the input,
        without D; None for [T].
        """
        decision: RoutingDecision = self.router(x_TD, padding_mask_T)
        # a token's output must not depend on others when evaluated
        rounds = self.settings.token_rounding > 0 and self.router.training
        if self.settings.capacity_factor is None and not rounds:
            return decision
        return replace(decision, kept_TK=self._kept(decision, x_TD.shape[:1] if shape is None else shape))

    def auxiliary_loss(self, decision: RoutingDecision, shape: torch.Size) -> Tensor | None:
        """This rank's share of the weighted losses; also adds to the statistics. `shape`: of the input,
        without D.
        """
        settings, group = self.settings, self.microbatch_group
        scores, logits = _scores_and_logits(decision)
        num_tokens = tokens_in_group(decision, group)
        counts_E, expert_TK = self._counts_by_score(decision)
        counts_E = sum_over(counts_E, group)
        balance = load_balancing_loss_share(
            scores, counts_E, topk=expert_TK.size(1), num_tokens=num_tokens, group=group
        )
        z = z_loss_share(logits, valid_T=decision.valid_T, num_tokens=num_tokens, group=group)
        shares = {"aux_loss": balance}
        kinds = [loss.kind for loss in settings.losses]
        if "seq_aux_loss" in kinds:
            shares["seq_aux_loss"] = self._sequence_loss(scores, expert_TK, decision.valid_T, shape)
        if "global_aux_loss" in kinds:
            global_E = self.router.global_tokens_per_expert
            shares["global_aux_loss"] = global_balancing_loss_share(
                scores, global_E, counts_E, num_tokens=num_tokens, group=group
            )
        if "importance" in kinds:
            shares["importance"] = importance_loss_share(scores, num_tokens=num_tokens, group=group)
        if self.training and is_counted_forward():
            self._add_statistics(decision, scores, [balance, z, *(shares[kind] for kind in kinds)])
        weighted = [shares[loss.kind] * loss.coeff for loss in settings.losses if loss.coeff]
        weighted += [z * settings.z_loss_coeff] if settings.z_loss_coeff else []
        return torch.stack(weighted).sum() if weighted else None

    def _counts_by_score(self, decision: RoutingDecision) -> tuple[Tensor, Tensor]:
        """Slots per expert and experts that the losses count: those of highest score, whatever bias or groups
        made of them.

        So in DeepSeek-V3 (eq. 18) and Megatron-Core: a loss that counted the biased choice would pull against
        the bias.
        """
        config = self.router.config
        if config.chooses_by_score or not self.settings.losses:
            return decision.tokens_per_expert_E, decision.expert_TK
        if decision.sums is not None:
            # of which only the shape matters where there are sums
            return decision.sums.by_score_E, decision.expert_TK
        assert decision.logits_TE is not None
        expert_TK = decision.logits_TE.detach().topk(config.topk, dim=-1).indices
        valid_TK = None if decision.valid_T is None else decision.valid_T.unsqueeze(1).expand_as(expert_TK)
        return count_kept(expert_TK, valid_TK, config.num_experts), expert_TK

    def _sequence_loss(
        self, scores_TE: Tensor, expert_TK: Tensor, valid_T: Tensor | None, shape: torch.Size
    ) -> Tensor:
        def by_sequence(x: Tensor) -> Tensor:
            x = x.unflatten(0, shape) if len(shape) == 2 else x.unsqueeze(0)
            return x.transpose(0, 1) if len(shape) == 2 and self.settings.batch_dim == 1 else x

        valid_BS = None if valid_T is None else by_sequence(valid_T)
        return sequence_balancing_loss_share(
            by_sequence(scores_TE), by_sequence(expert_TK), valid_BS, group=self.microbatch_group
        )

    def _kept(self, decision: RoutingDecision, shape: torch.Size) -> Tensor:
        """Which slots stay, decided over the whole micro-batch: so drops do not depend on how its tokens are
        split over ranks.
        """
        weights_TK = decision.weights_TK.detach()
        # padding is in no expert's queue
        expert_TK = without_dropped(decision.expert_TK, decision.kept_TK, self.router.config.num_experts)
        if len(shape) == 1 or self.settings.batch_dim == 1:
            return self._kept_in_sequence(expert_TK, weights_TK)
        # The queue is by position in the sequence, of all sequences together: that order does not depend on
        # the ranks.
        expert_TK, weights_TK = (
            x.unflatten(0, shape).transpose(0, 1).flatten(0, 1) for x in (expert_TK, weights_TK)
        )
        kept_TK = self._kept_in_sequence(expert_TK, weights_TK)
        return kept_TK.unflatten(0, (shape[1], shape[0])).transpose(0, 1).flatten(0, 1)

    def _kept_in_sequence(self, expert_TK: Tensor, weights_TK: Tensor) -> Tensor:
        group, num_tokens = self.microbatch_group, expert_TK.size(0)
        if group is None or group_size(group) == 1:
            return self._keep(expert_TK, weights_TK)
        blocks = _sequence_blocks(self.context_parallel_size)
        expert_TK = _in_sequence(_gather(expert_TK, group), blocks)
        weights_TK = _in_sequence(_gather(weights_TK, group), blocks)
        # Back to the order of the ranks, of which this one keeps its part.
        chunks = self._keep(expert_TK, weights_TK).chunk(len(blocks))
        kept_TK = torch.cat([chunks[block] for block in blocks])
        return kept_TK[group.rank() * num_tokens : (group.rank() + 1) * num_tokens]

    def _keep(self, expert_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_experts = self.router.config.num_experts
        if self.settings.token_rounding:
            return keep_full_tiles(
                expert_TK, weights_TK, num_experts=num_experts, tile=self.settings.token_rounding
            )
        capacity = self._capacity(expert_TK.size(0))
        if self.settings.drop_policy == "position":
            return keep_first(expert_TK, num_experts=num_experts, capacity=capacity)
        return keep_most_probable(expert_TK, weights_TK, num_experts=num_experts, capacity=capacity)

    def _capacity(self, num_tokens: int) -> int:
        settings, config = self.settings, self.router.config
        assert settings.capacity_factor is not None
        return expert_capacity(
            num_tokens,
            num_experts=config.num_experts,
            topk=config.topk,
            capacity_factor=settings.capacity_factor,
            min_capacity=settings.min_capacity,
        )

    def _rows_per_expert(self, decision: RoutingDecision) -> int | None:
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
        if group_size(self.microbatch_group) == 1:
            return rows
        kept_E = count_kept(decision.expert_TK, decision.kept_TK, self.router.config.num_experts)
        most = kept_E.max()
        for group in self.dispatcher.exchange_groups:
            most = max_over(most, group)
        return max(rows, int(most))

    @torch.no_grad()
    def _add_statistics(self, decision: RoutingDecision, scores: Tensor, losses: list[Tensor]) -> None:
        statistics = self.statistics
        counts_E = decision.tokens_per_expert_E
        statistics.tokens_per_expert_E += counts_E
        entropy, top1 = _entropy_and_largest_weight(decision, scores)
        dropped = (
            entropy.new_zeros(()) if decision.kept_TK is None else counts_E.sum() - decision.kept_TK.sum()
        )
        max_over_mean = counts_E.max() * counts_E.numel() / counts_E.sum().clamp(min=1)
        statistics.sums += torch.stack(
            [dropped.to(entropy.dtype), entropy, top1, max_over_mean.to(entropy.dtype), *losses]
        )
        statistics.num_microbatches += 1


def _scores_and_logits(decision: RoutingDecision) -> tuple[Tensor, Tensor]:
    """What the losses take: of all tokens and experts with zero scores for padding, or their sums where the
    decision has those.
    """
    if decision.sums is not None:
        return decision.sums.score_sums_E, decision.sums.lse_T
    scores_TE, logits_TE, valid_T = decision.scores_TE, decision.logits_TE, decision.valid_T
    assert scores_TE is not None and logits_TE is not None
    return (scores_TE if valid_T is None else scores_TE * valid_T.unsqueeze(1)), logits_TE


def _entropy_and_largest_weight(decision: RoutingDecision, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Summed over tokens, without padding."""
    if decision.sums is not None:
        return decision.sums.entropy, decision.sums.largest
    top1_T = decision.weights_TK.amax(dim=1)
    top1 = (top1_T if decision.valid_T is None else top1_T * decision.valid_T).sum()
    return -torch.xlogy(scores, scores).sum(), top1


def _sequence_blocks(context_parallel_size: int) -> list[int]:
    """Blocks of the sequence in the order of the ranks: Megatron gives rank i of C the blocks i and 2C-1-i of
    2C, for balance.
    """
    if context_parallel_size == 1:
        return [0]
    return [block for i in range(context_parallel_size) for block in (i, 2 * context_parallel_size - 1 - i)]


def _in_sequence(x_TK: Tensor, blocks: list[int]) -> Tensor:
    """Rows that come in the order of the ranks, in the order of the sequence: equal weights are then ranked
    alike in every layout.
    """
    chunks = x_TK.chunk(len(blocks))
    return torch.cat([chunks[blocks.index(block)] for block in range(len(blocks))])


def _gather(x_TK: Tensor, group: ProcessGroup | None) -> Tensor:
    out = x_TK.new_empty(group_size(group) * x_TK.size(0), x_TK.size(1))
    gloo.all_gather(out, x_TK.contiguous(), group=group)
    return out
