"""Statistics of one MoE layer, summed over micro-batches on the device, for the log. Shape suffixes in
`moe_exp.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moe_exp.layers.losses import entropy_sum
from moe_exp.layers.router import RoutingDecision, tokens_in_group

# Sums that every layer keeps: dropped slots, entropy and largest router weight over tokens; over
# micro-batches the busiest expert's slots over the mean, load-balancing loss and z-loss without coefficients;
# tokens.
STATISTICS = ("dropped", "entropy", "top1_weight", "max_over_mean", "load_balancing_loss", "z_loss", "tokens")


def statistics_names(losses: Iterable[str]) -> tuple[str, ...]:
    """Names of the sums of a layer with these balancing losses, in order."""
    return *STATISTICS, *(f"aux_losses.{name}" for name in losses)


class MoEStatistics:
    """Sums over micro-batches of what one layer did, on the device; read and reset once per log interval.

    Sums are over this rank's tokens, but for the losses, whose shares add up over the ranks of a micro-batch.

    Args:
        num_experts: E.
        losses: names of the balancing losses.
        device: of the sums.
    """

    def __init__(self, num_experts: int, losses: Sequence[str], device: torch.device):
        self.names = statistics_names(losses)
        self.tokens_per_expert_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.num_microbatches = 0

    @torch.no_grad()
    def add(
        self,
        decision: RoutingDecision,
        scores: Tensor,
        *,
        load_balancing_loss: Tensor,
        z_loss: Tensor,
        aux_losses: Mapping[str, Tensor],
    ) -> None:
        """Counts a micro-batch; `scores` as the losses take them, losses before their coefficients."""
        counts_E = decision.tokens_per_expert_E[: self.tokens_per_expert_E.numel()]  # no null experts
        kept_TK = decision.kept_TK
        tokens = tokens_in_group(decision, None)
        entropy, top1_weight = _entropy_and_largest_weight(decision, scores)
        zero = entropy.new_zeros(())
        dropped = zero if kept_TK is None else counts_E.sum() - kept_TK.sum()
        max_over_mean = counts_E.max() * counts_E.numel() / counts_E.sum().clamp(min=1)
        values = {
            "tokens": zero + tokens,  # copying an int to a GPU would wait for all that is queued there
            "dropped": dropped.to(entropy.dtype),
            "entropy": entropy,
            "top1_weight": top1_weight,
            "max_over_mean": max_over_mean.to(entropy.dtype),
            "load_balancing_loss": load_balancing_loss,
            "z_loss": z_loss,
            **{f"aux_losses.{name}": share for name, share in aux_losses.items()},
        }
        self.tokens_per_expert_E += counts_E
        self.sums += torch.stack([values[name] for name in self.names])
        self.num_microbatches += 1

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


def _entropy_and_largest_weight(decision: RoutingDecision, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Summed over tokens, without padding."""
    if decision.sums is not None:
        return decision.sums.entropy, decision.sums.largest
    top1_T = decision.weights_TK.amax(dim=1)
    top1 = (top1_T if decision.valid_T is None else top1_T * decision.valid_T).sum()
    return entropy_sum(scores), top1
