"""A router's decision, with the number of slots per expert. Shape suffixes: see `moe_exp.layers`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.groups import group_size, sum_over
from moe_exp.layers.kernels.topk import TopK


@dataclass(frozen=True)
class RoutingDecision:
    """Experts and weights of each token."""

    # Chosen experts, int64; E and above are null experts, whose slots are never kept. With ReLU scores K
    # equals E: every expert has a slot, which is kept if the score is positive.
    expert_TK: Tensor
    weights_TK: Tensor  # fp32 or fp64, with gradient; 0 for unused slots
    # For the losses, with gradient; None with `sums`. Scores include null experts; rows sum to 1 (with ReLU,
    # possibly to 0).
    scores_TE: Tensor | None
    logits_TE: Tensor | None
    tokens_per_expert_E: Tensor  # slots before dropping, without padding, int64; null experts come last
    # Slots to compute, bool; None: all. The router excludes padding and unused slots, and MoELayer.route also
    # excludes slots over capacity.
    kept_TK: Tensor | None = None
    valid_T: Tensor | None = None  # tokens that are not padding, bool; None: all
    sums: TopK | None = None  # replaces scores and logits in losses and statistics if a kernel routed
    use_kernels: bool | None = None  # from RouterConfig, for the dispatcher
    counted_TK: Tensor | None = None  # slots in `tokens_per_expert_E` except padding, bool; None: all

    @classmethod
    def of(
        cls, expert_TK: Tensor, weights_TK: Tensor, *, scores_TE: Tensor, logits_TE: Tensor,
        valid_T: Tensor | None = None, used_TK: Tensor | None = None, use_kernels: bool | None = None,
    ) -> "RoutingDecision":  # fmt: skip
        """Builds a decision and counts its slots; see the class attributes for the arguments.

        Args:
            used_TK: slots that a token uses, bool; None: all.

        Raises:
            ValueError: if shapes do not match, or `expert_TK` is not int64.
        """
        num_tokens, num_experts = scores_TE.shape
        chosen = torch.Size((num_tokens, expert_TK.size(-1)))
        shapes: dict[str, tuple[Tensor | None, torch.Size]] = {"expert_TK": (expert_TK, chosen)}
        shapes |= {"weights_TK": (weights_TK, chosen), "logits_TE": (logits_TE, scores_TE.shape)}
        shapes |= {"used_TK": (used_TK, chosen), "valid_T": (valid_T, torch.Size((num_tokens,)))}
        for name, (x, shape) in shapes.items():
            if x is not None and x.shape != shape:
                rule = f"has shape {list(x.shape)}, which does not match scores_TE {list(scores_TE.shape)}"
                raise ValueError(f"{name}: {rule}. Fix: return shape {list(shape)}.")
        if expert_TK.dtype != torch.int64:
            raise ValueError(f"expert_TK: must be torch.int64, not {expert_TK.dtype}. Fix: use .long().")
        kept_TK = kept_slots(used_TK, valid_T, expert_TK)
        counts_E = count_kept(expert_TK, kept_TK, num_experts)
        options: dict[str, Any] = {"valid_T": valid_T, "use_kernels": use_kernels, "counted_TK": used_TK}
        return cls(expert_TK, weights_TK, scores_TE, logits_TE, counts_E, kept_TK, **options)

    def for_losses(self) -> tuple[Tensor, Tensor]:
        """Scores (zero for padding) and logits, both [T, E].

        If a kernel did the routing, returns two fields of `sums` instead: `score_sums_E` and `lse_squares`.
        """
        if self.sums is not None:
            return self.sums.score_sums_E, self.sums.lse_squares
        assert self.scores_TE is not None and self.logits_TE is not None
        scores_TE = self.scores_TE if self.valid_T is None else self.scores_TE * self.valid_T.unsqueeze(1)
        return scores_TE, self.logits_TE

    def weights_for_l1(self) -> Tensor:
        """Weights of a ReLU router [T, E], zero for padding."""
        return self.weights_TK if self.valid_T is None else self.weights_TK * self.valid_T.unsqueeze(1)


def count_per_expert(expert_N: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, int64 [E]."""
    # Not torch.bincount, which would synchronize to learn the largest value.
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    return counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))


def without_dropped(expert_TK: Tensor, kept_TK: Tensor | None, num_experts: int) -> Tensor:
    """The expert of every slot, or `num_experts` if the slot is False in `kept_TK`."""
    return expert_TK if kept_TK is None else expert_TK.masked_fill(~kept_TK, num_experts)


def kept_slots(used_TK: Tensor | None, valid_T: Tensor | None, expert_TK: Tensor) -> Tensor | None:
    """Mask of the slots that are used and belong to non-padding tokens; None means all slots."""
    if valid_T is None:
        return used_TK
    valid_TK = valid_T.unsqueeze(1).expand_as(expert_TK)
    return valid_TK if used_TK is None else used_TK & valid_TK


def count_kept(expert_TK: Tensor, kept_TK: Tensor | None, num_experts: int) -> Tensor:
    """Kept slots per expert, int64 [E]."""
    if kept_TK is None:
        return count_per_expert(expert_TK.flatten(), num_experts)
    expert_N = without_dropped(expert_TK, kept_TK, num_experts).flatten()
    return count_per_expert(expert_N, num_experts + 1)[:num_experts]


def tokens_in_group(decision: RoutingDecision, group: ProcessGroup | None) -> Tensor | int:
    """Number of non-padding tokens, summed over the ranks of `group`."""
    if decision.valid_T is None:
        return decision.expert_TK.size(0) * group_size(group)
    return sum_over(decision.valid_T.sum(), group)
