"""Auxiliary losses of the router. Pure functions; shape suffixes in `moe_exp.layers`, plus B sequences of S
tokens.

Every loss is a mean over tokens (of a micro-batch, a sequence or the global batch), which tensor (sequence)
and context parallel ranks hold in parts. Every function returns its rank's scalar *share*: the shares of a
micro-batch's ranks add up to the loss, and their gradients to its gradient, because what couples the ranks
(token counts, sums) carries no gradient. So no differentiable collective is needed; the trainer averages
micro-batches and data parallel ranks as for the main loss, and the gradient is the same for every TP, EP, PP,
CP, DP and number of micro-batches.

Scores of padding tokens must be zero. A loss that needs only the sum of scores over tokens also accepts that,
[E], with `num_tokens`: a routing kernel emits the sum without writing the scores.

`share_of` computes a loss of a layer: AUX_LOSSES has the function of each name.

Arguments that mean the same in every function:
    scores: router scores of this rank's tokens, each row summing to 1, [T, E]; or their sum, [E].
    tokens_per_expert_E: slots of the micro-batch per expert, over all of `group`, before any drop.
    valid_T: tokens that are not padding, bool; None for all.
    num_tokens: tokens of the micro-batch; None if every rank holds as many as this one.
    group: ranks that hold the rest of the micro-batch (of the same sequences, for the sequence loss).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config.choices import LOSSES, Loss
from moe_exp.layers.groups import group_size, sum_over
from moe_exp.layers.router.decision import RoutingDecision

# A loss of your own: takes the decision and the ranks that hold the rest of the micro-batch (None: this rank
# holds all of it), and returns this rank's share as the functions below do, a scalar.
LossFunction = Callable[[RoutingDecision, ProcessGroup | None], Tensor]


@dataclass(frozen=True)
class AuxLoss:
    """One auxiliary loss of a layer."""

    # `aux_loss` per micro-batch, `seq_aux_loss` per sequence, `global_aux_loss` per global batch, `l1` of
    # ReLU scores, or `entropy` of the scores; or a LossFunction.
    kind: str | LossFunction
    coeff: float  # weight in the sum of losses; of `l1` at the start

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            _check_function(self.kind)
        elif self.kind not in LOSSES:
            fix = f"use {', '.join(LOSSES)}, or none"
            raise ValueError(f"aux_loss_type={self.kind}: is not a loss. Fix: {fix}.")
        if self.coeff < 0:
            rule = "is negative, which rewards imbalance"
            raise ValueError(f"aux_loss_coeff={self.coeff}: {rule}. Fix: use 0 for none.")

    @property
    def name(self) -> str:
        """Name of the loss in the statistics: its kind, or the name of its function."""
        if isinstance(self.kind, str):
            return self.kind
        function = getattr(self.kind, "func", self.kind)  # of functools.partial
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def needs(self) -> Loss:
        """Scores and state of the router that the loss needs."""
        return LOSSES[self.kind] if isinstance(self.kind, str) else Loss(needs_scores=True)


@dataclass(frozen=True)
class LossInputs:
    """What the losses of a layer are made from: a micro-batch of this rank, and counts over its ranks."""

    decision: RoutingDecision
    scores: Tensor  # of `RoutingDecision.for_losses`
    # as the losses count slots: by highest score, see `MoELayer.auxiliary_loss`; of the whole micro-batch
    counts_E: Tensor
    expert_TK: Tensor | None  # None after a routing kernel, which no sequence loss follows
    counted_TK: Tensor | None  # slots that tokens fill; None for all
    topk: int
    num_tokens: Tensor | int  # of the whole micro-batch
    group: ProcessGroup | None
    shape: torch.Size  # of the layer's input, without D
    batch_dim: int  # of `shape`, if it has two dimensions
    balance: Tensor  # the load-balancing loss of the micro-batch, which statistics need in any case
    global_counts_E: Tensor | None  # slots of the last global batch, if a loss needs them

    def by_sequence(self, x: Tensor) -> Tensor:
        """[T, ...] to [B, S, ...]."""
        if len(self.shape) == 1:
            return x.unsqueeze(0)
        x = x.unflatten(0, self.shape)
        return x.transpose(0, 1) if self.batch_dim == 1 else x


def share_of(loss: AuxLoss, inputs: LossInputs) -> Tensor:
    """This rank's share of a loss, without its coefficient; ValueError if a function returns no scalar."""
    if isinstance(loss.kind, str):
        return AUX_LOSSES[loss.kind](inputs)
    share = loss.kind(inputs.decision, inputs.group)
    if not isinstance(share, Tensor) or share.dim():
        rule = f"returned {list(share.shape) if isinstance(share, Tensor) else share!r}"
        fix = "return this rank's share of the loss, a scalar tensor"
        raise ValueError(f"losses={loss.name}: {rule}. Fix: {fix}.")
    return share


def _check_function(kind: LossFunction) -> None:
    try:
        takes = callable(kind) and not isinstance(kind, type)
        takes = takes and bool(inspect.signature(kind).bind(None, None))
    except TypeError:
        takes = False
    if not takes:
        rule = "is no function of (decision, group)"
        raise ValueError(f"losses={kind!r}: {rule}. Fix: give one, or the name of a loss in an AuxLoss.")


def as_losses(losses: Sequence[AuxLoss | LossFunction] | AuxLoss | LossFunction) -> tuple[AuxLoss, ...]:
    """One loss or several, each with its coefficient: that of a LossFunction alone is 1."""
    given = [losses] if isinstance(losses, AuxLoss) or callable(losses) else losses
    for loss in given:
        if not isinstance(loss, AuxLoss):
            _check_function(loss)
    return tuple(loss if isinstance(loss, AuxLoss) else AuxLoss(loss, 1.0) for loss in given)


def load_balancing_loss_share(
    scores: Tensor,
    tokens_per_expert_E: Tensor,
    *,
    topk: Tensor | int,
    num_tokens: Tensor | int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of the load-balancing loss of a micro-batch, E * sum_e f_e * P_e.

    f_e is the fraction of the T*K slots that went to expert e, P_e the mean score of expert e; 1.0 is perfect
    balance. Fedus et al. 2021, Switch Transformers, eq. 4 to 6 (arXiv:2101.03961), with top-k slots in f as
    in Megatron-Core.

    With the weights of a ReLU router as scores, whose rows do not sum to 1, and the wanted K it is ReMoE's L1
    loss with load balancing (arXiv:2412.14711, equation 11), the loss `l1`.

    Args:
        topk: slots per token, or their mean.
    """
    num_experts = scores.size(-1)
    num_tokens = _num_tokens(scores, num_tokens, group)
    sums_E = scores.sum(dim=0) if scores.dim() == 2 else scores
    balance = torch.dot(sums_E, tokens_per_expert_E.to(scores.dtype)) * num_experts
    return balance / (topk * num_tokens**2)


def sequence_balancing_loss_share(
    scores_BSE: Tensor,
    expert_BSK: Tensor,
    valid_BS: Tensor | None,
    *,
    counted_BSK: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of the mean over sequences of E * sum_e f_e * P_e, with f and P per sequence.

    DeepSeek-V3 (arXiv:2412.19437), eq. 17 to 20, where the factor E/K is inside f; Megatron's `seq_aux_loss`.

    Args:
        scores_BSE: router scores of this rank's part of every sequence, each row summing to 1.
        counted_BSK: slots that tokens fill, if they decide how many; None for all.
    """
    num_sequences, _, num_experts = scores_BSE.shape
    ones_BSK = torch.ones_like(expert_BSK, dtype=scores_BSE.dtype)
    if valid_BS is not None:
        ones_BSK = ones_BSK * valid_BS.unsqueeze(-1)
    topk = expert_BSK.size(-1)
    lengths_B = None
    if counted_BSK is not None:
        lengths_B = sum_over(ones_BSK[..., 0].sum(dim=1), group).clamp(min=1)
        ones_BSK = ones_BSK * counted_BSK
    counts_BE = scores_BSE.new_zeros(num_sequences, num_experts).scatter_add_(
        1, expert_BSK.flatten(1), ones_BSK.flatten(1)
    )
    counts_BE = sum_over(counts_BE, group)
    slots_B = counts_BE.sum(dim=1)
    lengths_B = (slots_B / topk).clamp(min=1) if lengths_B is None else lengths_B
    losses_B = (scores_BSE.sum(dim=1) * counts_BE).sum(dim=1) * num_experts
    losses_B = losses_B / (slots_B.clamp(min=1) * lengths_B)
    return losses_B.sum() / max(1, num_sequences)


def global_balancing_loss_share(
    scores: Tensor,
    global_tokens_per_expert_E: Tensor,
    tokens_per_expert_E: Tensor,
    *,
    num_tokens: Tensor | int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of E * sum_e F_e * P_e, F of the global batch, P of the micro-batch.

    Qiu et al. 2025, Demons in the Detail (arXiv:2501.11873). The mean over micro-batches and data parallel
    ranks is the loss of the global batch. The paper and Megatron-Core take F from the counts so far; here it
    is that of the previous global batch over all ranks (of this micro-batch, in the first one).

    Args:
        global_tokens_per_expert_E: slots per expert of the previous global batch; zeros before the first.
    """
    # A micro-batch runs backward before later ones are routed, so their counts are unknown. With the counts
    # so far, the gradient would depend on the number and order of micro-batches; with those of the last batch
    # it does not, and no micro-batch waits for a collective over all data parallel ranks.
    global_E = global_tokens_per_expert_E.to(scores.dtype)
    counts_E = torch.where(global_E.sum() > 0, global_E, tokens_per_expert_E.to(scores.dtype))
    fractions_E = counts_E / counts_E.sum().clamp(min=1)
    sums_E = scores.sum(dim=0) if scores.dim() == 2 else scores
    return torch.dot(sums_E, fractions_E) * scores.size(-1) / _num_tokens(scores, num_tokens, group)


def entropy_loss_share(
    scores_TE: Tensor, *, num_tokens: Tensor | int | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's share of the mean entropy of the scores, -sum_e s_e * log(s_e), in nats.

    Without it, scores of a router with `top_p` become even, and all tokens use K experts. Huang et al. 2024
    (arXiv:2403.07652), equation 8.
    """
    return entropy_sum(scores_TE) / _num_tokens(scores_TE, num_tokens, group)


def entropy_sum(scores_TE: Tensor) -> Tensor:
    """The entropy of the scores, in nats, summed over tokens."""
    # A log that is finite at 0, instead of torch.xlogy, which a CPU computes at a fifth of the speed.
    return -(scores_TE * scores_TE.clamp_min(1e-30).log()).sum()


def z_loss_share(
    logits: Tensor,
    *,
    valid_T: Tensor | None = None,
    num_tokens: Tensor | int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of the router z-loss of a micro-batch, mean over tokens of logsumexp(logits)^2.

    Zoph et al. 2022, ST-MoE, eq. 5 (arXiv:2202.08906).

    Args:
        logits: router logits of this rank's tokens, [T, E]; or their log-sum-exp, [T].
    """
    log_sums_T = torch.logsumexp(logits, dim=-1) if logits.dim() == 2 else logits
    if valid_T is not None:
        log_sums_T = log_sums_T * valid_T
    return torch.dot(log_sums_T, log_sums_T) / _num_tokens(logits, num_tokens, group)


def _num_tokens(x: Tensor, num_tokens: Tensor | int | None, group: ProcessGroup | None) -> Tensor | int:
    if num_tokens is None:
        num_tokens = x.size(0) * group_size(group)
    return num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(1, num_tokens)


def _of_microbatch(inputs: LossInputs) -> Tensor:
    return inputs.balance


def _of_sequences(inputs: LossInputs) -> Tensor:
    assert inputs.expert_TK is not None
    valid_T, counted_TK = inputs.decision.valid_T, inputs.counted_TK
    return sequence_balancing_loss_share(
        inputs.by_sequence(inputs.scores),
        inputs.by_sequence(inputs.expert_TK),
        None if valid_T is None else inputs.by_sequence(valid_T),
        counted_BSK=None if counted_TK is None else inputs.by_sequence(counted_TK),
        group=inputs.group,
    )


def _of_global_batch(inputs: LossInputs) -> Tensor:
    assert inputs.global_counts_E is not None
    sizes: dict[str, Any] = {"num_tokens": inputs.num_tokens, "group": inputs.group}
    return global_balancing_loss_share(inputs.scores, inputs.global_counts_E, inputs.counts_E, **sizes)


def _l1(inputs: LossInputs) -> Tensor:
    weights_TE = inputs.decision.weights_for_l1()
    sizes: dict[str, Any] = {"num_tokens": inputs.num_tokens, "group": inputs.group}
    return load_balancing_loss_share(weights_TE, inputs.counts_E, topk=inputs.topk, **sizes)


def _entropy(inputs: LossInputs) -> Tensor:
    return entropy_loss_share(inputs.scores, num_tokens=inputs.num_tokens, group=inputs.group)


# Name to function; config/choices.py has the traits of each, for the settings.
AUX_LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {
    "aux_loss": _of_microbatch,
    "seq_aux_loss": _of_sequences,
    "global_aux_loss": _of_global_batch,
    "l1": _l1,
    "entropy": _entropy,
}
