"""Auxiliary losses of the router, as pure functions.

Every loss is a mean over tokens of a micro-batch, a sequence or the global batch. Each tensor or context
parallel rank holds a part of the tokens, and every function returns the scalar *share* of its rank. The
shares of all ranks add up to the loss. Ranks exchange only values without a gradient (token counts, sums), so
the gradients of the shares add up to the gradient of the loss, and no differentiable collective is needed.
The trainer averages these losses over micro-batches and data parallel ranks, as it does the main loss, so
the gradient does not depend on TP, EP, PP, CP, DP or the number of micro-batches.

Arguments that several functions share (shape suffixes as in `moe_exp.layers`; B: sequences of S tokens):
    scores: router scores of this rank's tokens, [T, E]. Each row sums to 1; rows of padding are zero.
        With a routing kernel: the sums of the scores over tokens, [E]; `num_tokens` is then required.
    tokens_per_expert_E: slots per expert in the micro-batch (all ranks of `group`), including dropped slots.
    valid_T: bool, True for tokens that are not padding; None: no token is padding.
    num_tokens: number of tokens of the micro-batch; None: all ranks hold the same number of tokens.
    group: ranks that share the micro-batch or, for the sequence loss, each sequence.
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

# A custom loss. Arguments: the decision, and the ranks that hold the rest of the micro-batch (None: this rank
# holds all of it). Returns this rank's share, a scalar, like the functions below.
LossFunction = Callable[[RoutingDecision, ProcessGroup | None], Tensor]


@dataclass(frozen=True)
class AuxLoss:
    """One auxiliary loss of a layer."""

    kind: str | LossFunction  # a name in `choices.LOSSES`, or a custom loss
    coeff: float  # weight in the sum of losses (for `l1`: its initial weight)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            _check_function(self.kind)
        elif self.kind not in LOSSES:
            fix = f"use {', '.join(LOSSES)}, or none"
            raise ValueError(f"aux_loss_type={self.kind}: unknown loss. Fix: {fix}.")
        if self.coeff < 0:
            rule = "must not be negative, which would reward imbalance"
            raise ValueError(f"aux_loss_coeff={self.coeff}: {rule}. Fix: use 0 to disable the loss.")

    @property
    def name(self) -> str:
        """Name of the loss in the statistics: `kind` or, for a custom loss, the name of the function."""
        if isinstance(self.kind, str):
            return self.kind
        function = getattr(self.kind, "func", self.kind)  # unwraps functools.partial
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def needs(self) -> Loss:
        """Scores and state of the router that the loss needs."""
        return LOSSES[self.kind] if isinstance(self.kind, str) else Loss(needs_scores=True)


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a layer's losses: this rank's part of a micro-batch, and counts summed over all ranks."""

    decision: RoutingDecision
    scores: Tensor  # from `RoutingDecision.for_losses`
    counts_E: Tensor  # slots per expert in the whole micro-batch, see `MoELayer._choice_by_score`
    expert_TK: Tensor | None  # None after a routing kernel, which never runs with a sequence loss
    counted_TK: Tensor | None  # slots that tokens use; None: all
    topk: int
    sizes: dict[str, Any]  # for the loss functions: `num_tokens` in the whole micro-batch, and `group`
    shape: torch.Size  # of the layer's input, without D
    batch_dim: int  # dimension of `shape` that counts sequences, if it has two
    balance: Tensor  # the load-balancing loss of the micro-batch, which the statistics always need
    global_counts_E: Tensor | None  # slots in the last global batch, if a loss needs them

    def by_sequence(self, x: Tensor) -> Tensor:
        """Reshapes [T, ...] to [B, S, ...]."""
        if len(self.shape) == 1:
            return x.unsqueeze(0)
        x = x.unflatten(0, self.shape)
        return x.transpose(0, 1) if self.batch_dim == 1 else x


def share_of(loss: AuxLoss, inputs: LossInputs) -> Tensor:
    """This rank's share of a loss, without its coefficient; ValueError if a custom loss is not a scalar."""
    if isinstance(loss.kind, str):
        return AUX_LOSSES[loss.kind](inputs)
    share = loss.kind(inputs.decision, inputs.sizes["group"])
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
        rule = "must be a function with the arguments (decision, group)"
        raise ValueError(f"losses={kind!r}: {rule}. Fix: pass such a function or AuxLoss(name, coefficient).")


def as_losses(losses: Sequence[AuxLoss | LossFunction] | AuxLoss | LossFunction) -> tuple[AuxLoss, ...]:
    """Converts one or several losses to a tuple of AuxLoss; a LossFunction gets the coefficient 1."""
    given = [losses] if isinstance(losses, AuxLoss) or callable(losses) else losses
    for loss in given:
        if not isinstance(loss, AuxLoss):
            _check_function(loss)
    return tuple(loss if isinstance(loss, AuxLoss) else AuxLoss(loss, 1.0) for loss in given)


def load_balancing_loss_share(
    scores: Tensor, tokens_per_expert_E: Tensor, *, topk: Tensor | int,
    num_tokens: Tensor | int | None = None, group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """This rank's share of the load-balancing loss of a micro-batch, E * sum_e f_e * P_e.

    f_e is expert e's fraction of the T*K slots, and P_e is the expert's mean score. Perfect balance gives
    1.0. The loss is from Fedus et al. 2021, Switch Transformers, eq. 4 to 6 (arXiv:2101.03961), but f counts
    all K slots of a token, as in Megatron-Core.

    The loss `l1` (ReMoE's L1 loss with load balancing, arXiv:2412.14711, equation 11) calls this function.
    For `l1`, `topk` is the target K, and `scores` are a ReLU router's weights, whose rows do not sum to 1.

    Args:
        topk: number of slots per token (the mean, if it varies between tokens).
    """
    num_experts = scores.size(-1)
    num_tokens = _num_tokens(scores, num_tokens, group)
    sums_E = scores.sum(dim=0) if scores.dim() == 2 else scores
    balance = torch.dot(sums_E, tokens_per_expert_E.to(scores.dtype)) * num_experts
    return balance / (topk * num_tokens**2)


def sequence_balancing_loss_share(
    scores_BSE: Tensor, expert_BSK: Tensor, valid_BS: Tensor | None, *, counted_BSK: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """This rank's share of the mean of E * sum_e f_e * P_e over sequences; f and P are per sequence.

    The loss is from DeepSeek-V3 (arXiv:2412.19437), eq. 17 to 20, whose f includes the factor E/K. Megatron
    calls it `seq_aux_loss`.

    Args:
        scores_BSE: router scores of this rank's part of every sequence, each row summing to 1.
        counted_BSK: bool, True for slots in use; None: all slots are in use.
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
    scores: Tensor, global_tokens_per_expert_E: Tensor, tokens_per_expert_E: Tensor, *,
    num_tokens: Tensor | int | None = None, group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """This rank's share of E * sum_e F_e P_e, with F of the global batch and P of the micro-batch.

    F_e is expert e's fraction of the slots, and P_e is the expert's mean score. The loss is from Qiu et al.
    2025, Demons in the Detail (arXiv:2501.11873). The mean of this loss over micro-batches and data parallel
    ranks is the loss of the global batch. The paper and Megatron-Core compute F from the counts accumulated
    so far. This function uses the counts of the previous global batch. In the first global batch, it uses
    the counts of this micro-batch.

    Args:
        global_tokens_per_expert_E: slots per expert in the previous global batch; zeros in the first batch.
    """
    # A micro-batch runs backward before later ones are routed, so their counts are unknown. With the counts
    # so far, the gradient would depend on the number and order of micro-batches, and every micro-batch would
    # wait for a collective over all data parallel ranks.
    global_E = global_tokens_per_expert_E.to(scores.dtype)
    counts_E = torch.where(global_E.sum() > 0, global_E, tokens_per_expert_E.to(scores.dtype))
    fractions_E = counts_E / counts_E.sum().clamp(min=1)
    sums_E = scores.sum(dim=0) if scores.dim() == 2 else scores
    return torch.dot(sums_E, fractions_E) * scores.size(-1) / _num_tokens(scores, num_tokens, group)


def entropy_loss_share(
    scores_TE: Tensor, *, num_tokens: Tensor | int | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's share of the mean entropy of the scores, -sum_e s_e * log(s_e), in nats.

    Without this loss, a router with `top_p` learns uniform scores, and every token uses K experts. The loss
    is from Huang et al. 2024 (arXiv:2403.07652), equation 8.
    """
    return entropy_sum(scores_TE) / _num_tokens(scores_TE, num_tokens, group)


def entropy_sum(scores_TE: Tensor) -> Tensor:
    """The entropy of the scores, in nats, summed over tokens."""
    # Clamped so that the log is finite at 0; torch.xlogy is five times slower on a CPU.
    return -(scores_TE * scores_TE.clamp_min(1e-30).log()).sum()


def z_loss_share(
    logits: Tensor, *, valid_T: Tensor | None = None, num_tokens: Tensor | int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """This rank's share of a micro-batch's router z-loss, the mean over tokens of logsumexp(logits)^2.

    The loss is from Zoph et al. 2022, ST-MoE, eq. 5 (arXiv:2202.08906).

    Args:
        logits: router logits of this rank's tokens, [T, E]. If a routing kernel was used, the sum
            over tokens of logsumexp^2 (a scalar) instead; `num_tokens` is then required.
    """
    squares = logits
    if logits.dim():
        log_sums_T = torch.logsumexp(logits, dim=-1)
        log_sums_T = log_sums_T if valid_T is None else log_sums_T * valid_T
        squares = torch.dot(log_sums_T, log_sums_T)
    return squares / _num_tokens(logits, num_tokens, group)


def _num_tokens(x: Tensor, num_tokens: Tensor | int | None, group: ProcessGroup | None) -> Tensor | int:
    if num_tokens is None:
        num_tokens = x.size(0) * group_size(group)
    return num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(1, num_tokens)


def _of_sequences(inputs: LossInputs) -> Tensor:
    assert inputs.expert_TK is not None
    valid_T, counted_TK = inputs.decision.valid_T, inputs.counted_TK
    return sequence_balancing_loss_share(
        inputs.by_sequence(inputs.scores),
        inputs.by_sequence(inputs.expert_TK),
        None if valid_T is None else inputs.by_sequence(valid_T),
        counted_BSK=None if counted_TK is None else inputs.by_sequence(counted_TK),
        group=inputs.sizes["group"],
    )


def _of_global_batch(inputs: LossInputs) -> Tensor:
    assert inputs.global_counts_E is not None
    return global_balancing_loss_share(inputs.scores, inputs.global_counts_E, inputs.counts_E, **inputs.sizes)


# The functions of `choices.LOSSES`.
AUX_LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {
    "aux_loss": lambda inputs: inputs.balance,
    "seq_aux_loss": _of_sequences,
    "global_aux_loss": _of_global_batch,
    "l1": lambda inputs: load_balancing_loss_share(
        inputs.decision.weights_for_l1(), inputs.counts_E, topk=inputs.topk, **inputs.sizes
    ),
    "entropy": lambda inputs: entropy_loss_share(inputs.scores, **inputs.sizes),
}
