"""The MoE layer (start at `MoELayer.forward`) and phase timers. Shape suffixes: see `moe_exp.layers`."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from moe_exp.config.choices import SCORES
from moe_exp.layers import losses
from moe_exp.layers.dispatcher import (
    Dispatched,
    Dispatcher,
    DispatchRecord,
    Pending,
    RoutedTokens,
    TokensDispatcher,
)
from moe_exp.layers.experts import Experts
from moe_exp.layers.groups import sum_over
from moe_exp.layers.kernels.scores import RouterLosses
from moe_exp.layers.losses import AuxLoss, LossInputs, share_of
from moe_exp.layers.microbatch import MicrobatchCapacity, MoESettings
from moe_exp.layers.router import Router, RoutingDecision, count_kept, kept_slots, tokens_in_group
from moe_exp.layers.router.replay import is_counted_forward
from moe_exp.layers.statistics import MoEStatistics


def needs_scores(aux_losses: Iterable[AuxLoss]) -> bool:
    """Whether a loss needs every token's score for every expert; for other losses, sums of scores suffice."""
    return any(loss.needs.needs_scores for loss in aux_losses)


class MoELayer(nn.Module):
    """A mixture of experts over tokens: y_t = up(sum_k w_tk * expert_k(down(x_t))) + shared(x_t).

    `down` and `up` are the projections of a LatentMoE (arXiv:2601.18089), by default the identity. All
    experts share both projections, so tokens are sent at the latent width. Router and shared expert use x_t.

    Args:
        shared: the shared expert, a module whose output has the shape of its input. The layer adds this
            output to the experts' output.
        down: maps tokens [T, D] to the experts' input [T, latent] before dispatch. After combine, `up` maps
            the output back to [T, D]. Pass both projections or neither.
        microbatch_group: tensor and context parallel ranks that share a micro-batch; None: this rank alone.
        context_parallel_size: number of context parallel ranks within `microbatch_group`; each rank holds
            the blocks of a sequence that Megatron assigns to it (see `sequence_blocks`).
        context_stripes: number of stripes of a sequence, see `sequence_blocks`.
        recompute_router: run the router again in backward instead of keeping scores and chosen experts.

    Attributes:
        statistics: sums for the log, collected in training.
        timers: timers used in training, or None. The phases are `all_to_all` (dispatch, combine) and
            `experts`.
    """

    def __init__(
        self, *, router: Router, dispatcher: Dispatcher, experts: Experts, settings: MoESettings,
        shared: Callable[[Tensor], Tensor] | None = None, down: Callable[[Tensor], Tensor] | None = None,
        up: Callable[[Tensor], Tensor] | None = None, microbatch_group: ProcessGroup | None = None,
        context_parallel_size: int = 1, context_stripes: int = 1, recompute_router: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.recompute_router = recompute_router
        for loss in settings.aux_losses:
            if (state := loss.needs.state) and not hasattr(router, state):
                rule, field = f"requires the router's buffer {state}", loss.needs.state_field
                raise ValueError(f"aux_loss_type={loss.name}: {rule}. Fix: set {field} in RouterConfig.")
        self.router, self.dispatcher, self.experts = router, dispatcher, experts
        self._by_tokens = TokensDispatcher(pads=experts.needs_padding)
        self.settings, self.shared = settings, shared
        if (down is None) != (up is None):
            raise ValueError("down, up: must be set together. Fix: pass both projections, or neither.")
        self.down, self.up = down, up
        # If no loss needs the scores, the routing kernel may run, which returns only their sums.
        router.needs_scores = needs_scores(settings.aux_losses)
        self.microbatch_group = microbatch_group
        self.capacity = MicrobatchCapacity(
            settings, router.config, microbatch_group, context_parallel_size, context_stripes
        )
        self.statistics = MoEStatistics(
            router.config.num_experts, [loss.name for loss in settings.aux_losses], router.weight.device
        )
        self.timers: PhaseTimers | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the layer and its statistics; the statistics keep their dtypes."""
        super()._apply(fn, recurse)
        self.statistics.to(self.router.weight.device)
        return self

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, *, with_loss: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Routes tokens to experts, and returns the combined outputs and the auxiliary losses.

        Args:
            x: hidden states of this rank's tokens: [T, D], or three dimensions that flatten to [T, D];
                `settings.batch_dim` is the index of the batch dimension.
            padding_mask: bool, in the shape of `x` without D. True marks padding, which is sent to no expert
                and is excluded from losses, capacity and statistics.
            with_loss: whether to compute the losses (default: in training or if gradients are enabled).

        Returns:
            The output in the shape and dtype of `x`, and this rank's share of the weighted auxiliary losses
            (a scalar; None without losses). The caller adds the share to the main loss.
        """
        padding_mask_T = None if padding_mask is None else padding_mask.flatten()
        decision = self.route(x.flatten(0, -2), padding_mask_T, shape=x.shape[:-1])

        # Evaluation does not use the losses: for a single token they take a large part of the time.
        if with_loss is None:
            with_loss = self.is_training or torch.is_grad_enabled()
        loss = self.auxiliary_loss(decision, x.shape[:-1]) if with_loss else None

        x_TD = x.flatten(0, -2) if self.down is None else self.down(x.flatten(0, -2))
        dispatcher = self._dispatcher_for(x)
        rows_per_expert = None
        if dispatcher.pads:
            # The ranks that exchange rows must agree on their number.
            rows_per_expert = self.capacity.rows_per_expert(decision, dispatcher.exchange_groups)
        pending = dispatcher.start(x_TD, decision, rows_per_expert=rows_per_expert)
        # Overlaps with the exchange of the tokens, and in backward with the exchange of the gradients.
        shared = None if self.shared is None else self.shared(x)
        dispatched = dispatcher.finish(pending)
        output_TD = dispatcher.combine(self.experts(dispatched), dispatched.record)
        output = (output_TD if self.up is None else self.up(output_TD)).view_as(x)
        return (output if shared is None else output + shared), loss

    @property
    def is_training(self) -> bool:
        """Whether the router is in training mode."""
        # Megatron's wrapper does not register this layer as a submodule, so train() and eval() miss it.
        return self.router.training

    def _dispatcher_for(self, x: Tensor) -> Dispatcher:
        """`self.dispatcher`, or a TokensDispatcher if all experts are local and accept RoutedTokens."""
        # With a slot for every expert, most slots are unused.
        few_kept = SCORES[self.router.config.score].uses_positive
        by_tokens = self.dispatcher.is_local and self.experts.takes_tokens(x, few_kept=few_kept)
        dispatcher = self._by_tokens if by_tokens else self.dispatcher
        if self.timers is None or not self.is_training:
            return dispatcher
        return TimedDispatcher(dispatcher, self.timers)

    def route(
        self, x_TD: Tensor, padding_mask_T: Tensor | None = None, *, shape: torch.Size | None = None
    ) -> RoutingDecision:
        """Routes tokens and drops slots over capacity. `shape`: the input shape without D (default: [T])."""
        decision: RoutingDecision
        if self.recompute_router and self.is_training:
            # reading the random state would wait for the device
            is_random = self.router.config.jitter > 0 or self.router.config.assignment == "zipf"
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
            decision = checkpoint(self.router, x_TD, padding_mask_T, **options)
        else:
            decision = self.router(x_TD, padding_mask_T)
        # Only in training: in evaluation, a token's output must not depend on other tokens.
        rounds = self.settings.token_rounding > 0 and self.is_training
        if self.settings.capacity_factor is None and not rounds:
            return decision
        kept_TK = self.capacity.kept(decision, x_TD.shape[:1] if shape is None else shape)
        return replace(decision, kept_TK=kept_TK)

    def auxiliary_loss(self, decision: RoutingDecision, shape: torch.Size) -> Tensor | None:
        """Updates the statistics; returns this rank's share of the weighted losses (`moe_exp.layers.losses`).

        `shape`: shape of the layer's input without D.
        """
        settings, config, group = self.settings, self.router.config, self.microbatch_group
        scores, logits = decision.for_losses()
        num_tokens = tokens_in_group(decision, group)
        counts_E, expert_TK, counted_TK = self._choice_by_score(decision)
        self.router.count_by_score(counts_E)
        counts_E = sum_over(counts_E, group)
        # If the number of experts per token varies, use its mean: f_e is a fraction of the used slots.
        topk: Tensor | int = config.topk
        if decision.counted_TK is not None or decision.expert_TK.size(1) != topk:
            topk = counts_E.sum().clamp(min=1) / num_tokens
        sizes: dict[str, Any] = {"num_tokens": num_tokens, "group": group}
        weighted_loss = None
        if decision.sums is not None and all(loss.kind == "aux_loss" for loss in settings.aux_losses):
            total, number = (num_tokens, 0) if isinstance(num_tokens, Tensor) else (None, max(1, num_tokens))
            coeffs = float(sum(loss.coeff for loss in settings.aux_losses)), float(settings.z_loss_coeff)
            weighted_loss, balance, z = RouterLosses.apply(
                scores, logits, counts_E, total, number, config.topk, *coeffs
            )
        else:
            balance = losses.load_balancing_loss_share(scores, counts_E, topk=topk, **sizes)
            z = losses.z_loss_share(logits, valid_T=decision.valid_T, **sizes)
        inputs = LossInputs(
            decision, scores, counts_E, expert_TK, counted_TK, config.topk, sizes, shape, settings.batch_dim,
            balance, getattr(self.router, "global_tokens_per_expert", None),
        )  # fmt: skip
        shares = {loss.name: share_of(loss, inputs) for loss in settings.aux_losses}
        if self.is_training and is_counted_forward():
            self.statistics.add(decision, scores, load_balancing_loss=balance, z_loss=z, aux_losses=shares)
        if weighted_loss is not None:
            return weighted_loss if any(coeffs) else None
        weighted = [
            shares[loss.name]
            * (loss.coeff * getattr(self.router, loss.needs.state) if loss.needs.scales_coeff else loss.coeff)
            for loss in settings.aux_losses
            if loss.coeff
        ]
        weighted += [z * settings.z_loss_coeff] if settings.z_loss_coeff else []
        return sum(weighted[1:], weighted[0]) if weighted else None

    def _choice_by_score(self, decision: RoutingDecision) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Chooses experts by score alone (without expert bias and groups), for the losses. Returns the number
        of slots per expert [E], the chosen experts [T, K] (can be None if a kernel did the routing), and a
        mask [T, K] of the slots to count (None: all slots).
        """
        # As in DeepSeek-V3 (eq. 18) and Megatron-Core: a loss on the biased choice would work against the
        # bias.
        config = self.router.config
        if config.chooses_by_score or not self.settings.losses:
            return decision.tokens_per_expert_E, decision.expert_TK, decision.counted_TK
        if decision.sums is not None:
            return decision.sums.by_score_E, None, None
        assert decision.logits_TE is not None and decision.scores_TE is not None
        expert_TK = decision.logits_TE.detach().topk(config.topk, dim=-1).indices
        counted_TK = self.router.counted(decision.scores_TE.detach(), expert_TK)
        counts_E = count_kept(
            expert_TK, kept_slots(counted_TK, decision.valid_T, expert_TK), config.num_outputs
        )
        return counts_E, expert_TK, counted_TK


class PhaseTimers(Protocol):
    """Timers for the phases of a layer; stopping a phase that was not started has no effect."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...


class TimedDispatcher(Dispatcher):
    """Wraps a dispatcher to time the experts and, if rows are exchanged, the exchange."""

    def __init__(self, dispatcher: Dispatcher, timers: PhaseTimers):
        self.dispatcher, self.timers = dispatcher, timers
        self.exchange_groups, self.pads = dispatcher.exchange_groups, dispatcher.pads
        self._exchange = "all_to_all" if dispatcher.moves_rows else None

    def start(self, x_TD: Tensor, decision: RoutingDecision, rows_per_expert: int | None = None) -> Pending:
        x_TD = mark(x_TD, self.timers, begins=self._exchange)
        return self.dispatcher.start(x_TD, decision, rows_per_expert=rows_per_expert)

    def finish(self, pending: Pending) -> Dispatched | RoutedTokens:
        found = self.dispatcher.finish(pending)
        if isinstance(found, RoutedTokens):
            return replace(found, x_TD=mark(found.x_TD, self.timers, begins="experts"))
        return replace(found, rows_RD=mark(found.rows_RD, self.timers, ends=self._exchange, begins="experts"))

    def combine(self, y_RD: Tensor, record: DispatchRecord) -> Tensor:
        y_RD = mark(y_RD, self.timers, ends="experts", begins=self._exchange)
        return mark(self.dispatcher.combine(y_RD, record), self.timers, ends=self._exchange)


def mark(x: Tensor, timers: PhaseTimers, *, ends: str | None = None, begins: str | None = None) -> Tensor:
    """Returns `x` unchanged; marks the end of phase `ends` and the start of phase `begins` (None: no phase).

    A recomputed forward pass is timed again. If non-reentrant checkpointing (not used by Megatron) starts
    recomputation within a phase, the remainder of this phase is not measured.
    """
    return _Mark.apply(x, timers, ends, begins)


def _switch(timers: PhaseTimers, ends: str | None, begins: str | None) -> None:
    if ends is not None:
        timers.stop(ends)
    if begins is not None:
        timers.start(begins)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, timers: PhaseTimers, ends: str | None, begins: str | None) -> Tensor:
        ctx.phases = timers, ends, begins
        _switch(timers, ends, begins)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Backward crosses the mark in the opposite direction: the phase that began here now ends.
        timers, ends, begins = ctx.phases
        _switch(timers, begins, ends)
        return grads[0], None, None, None
