"""Rules that balance the experts' load over global batches.

The state of a rule is in buffers of the router, where Megatron's finalize_model_grads and checkpoints expect
it. A rule updates its counts in each training forward pass, and its state at the end of the global batch.
Shape suffixes: see `moe_exp.layers`; B: number of histogram bins.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config.choices import SCORES
from moe_exp.config.sections.router import RouterConfig
from moe_exp.layers.groups import sum_over
from moe_exp.layers.router.decision import RoutingDecision, tokens_in_group

Device = torch.device | str | None


class BalanceRule:
    """Base class of the rules. In its methods, `router` is the Router whose buffers hold the rule's state."""

    saved: tuple[str, ...] = ()  # buffers in checkpoints
    counts: tuple[str, ...] = ()  # buffers that count the current global batch
    initial = 0.0  # initial value of the buffers in `saved`

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        """Returns new buffers by name. They are fp32 [E] unless a subclass overrides this method."""
        names = *self.saved, *self.counts
        return {name: torch.zeros(num_experts, dtype=torch.float32, device=device) for name in names}

    def count(self, router: Any, decision: RoutingDecision) -> None:
        """Counts the slots of a forward pass."""

    def count_choice(self, router: Any, choice_TE: Tensor, valid_T: Tensor | None) -> None:
        """Updates the counts from a forward pass's selection values (score plus expert bias)."""

    def count_by_score(self, router: Any, tokens_per_expert_E: Tensor) -> None:
        """Counts a micro-batch's slots per expert. Here, score alone chooses experts, as in the losses."""

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        """Updates the state after a global batch; `group`: all ranks that routed its tokens."""


class SignBias(BalanceRule):
    """Changes each bias by `bias_update_rate`: up if its expert has fewer slots than the mean, else down.

    Wang et al. 2024, Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664), algorithm 1.
    """

    saved, counts = ("expert_bias",), ("local_tokens_per_expert",)

    @torch.no_grad()
    def count(self, router: Any, decision: RoutingDecision) -> None:
        router.local_tokens_per_expert += decision.tokens_per_expert_E

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        # Not called in Megatron, whose finalize_model_grads updates the bias.
        counts_E = sum_over(router.local_tokens_per_expert, group)
        router.expert_bias += torch.sign(counts_E.mean() - counts_E) * router.config.bias_update_rate
        router.local_tokens_per_expert.zero_()


class QuantileBias(BalanceRule):
    """Quantile balancing: sets the biases that would have given each expert an equal share of the last batch.

    It has no step size or coefficient. Kimi K3's report, section 2.3.3; Megatron-LM#5349.
    """

    # A token's cutoff is its (K+1)-th largest sum of score and bias. Expert e would be exactly at the cutoff
    # of token t with the bias cutoff_t - score_te, its current bias plus the gap that `count_gaps` counts.
    # The new bias is the K/E quantile of these values, which puts the expert above the cutoff of a fraction
    # K/E of the tokens.
    saved = ("expert_bias",)

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        gaps_EB = torch.zeros(num_experts, NUM_BINS, dtype=torch.int64, device=device)
        return super().buffers(num_experts, device) | {"gap_counts": gaps_EB}

    def count_choice(self, router: Any, choice_TE: Tensor, valid_T: Tensor | None) -> None:
        cutoff_T = choice_TE.topk(router.config.topk + 1, dim=-1).values[:, -1]
        router.gap_counts += count_gaps(choice_TE, cutoff_T, valid_T)

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        counts_EB = sum_over(router.gap_counts, group)
        router.expert_bias.copy_(balanced_bias(router.expert_bias, counts_EB, router.config.topk))
        router.gap_counts.zero_()


class GlobalFractions(BalanceRule):
    """Keeps the last global batch's slot counts per expert for the loss `global_aux_loss`."""

    saved, counts = ("global_tokens_per_expert",), ("batch_tokens_per_expert",)

    def count_by_score(self, router: Any, tokens_per_expert_E: Tensor) -> None:
        router.batch_tokens_per_expert += tokens_per_expert_E.detach()

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        router.global_tokens_per_expert.copy_(sum_over(router.batch_tokens_per_expert, group))
        router.batch_tokens_per_expert.zero_()


class L1Factor(BalanceRule):
    """Adapts the factor of the loss `l1` so that tokens use K experts on average.

    If a batch's tokens used more experts, the factor is multiplied by 1.2; if fewer, by 1/1.2.
    ReMoE (arXiv:2412.14711), equation 8.
    """

    saved = ("l1_factor",)
    initial = 1.0

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        return {
            "l1_factor": torch.ones((), dtype=torch.float32, device=device),
            "slots_and_tokens": torch.zeros(2, dtype=torch.int64, device=device),
        }

    @torch.no_grad()
    def count(self, router: Any, decision: RoutingDecision) -> None:
        router.slots_and_tokens[0] += decision.tokens_per_expert_E.sum()
        router.slots_and_tokens[1] += tokens_in_group(decision, None)

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        slots, tokens = sum_over(router.slots_and_tokens, group).double()
        router.l1_factor *= 1.2 ** torch.sign(slots - tokens * router.config.topk).float()
        # The smallest subnormal numbers times 1.2 round to themselves, so the factor could not grow again.
        router.l1_factor.clamp_(1e-20, 1e20)
        router.slots_and_tokens.zero_()


def rules_of(config: RouterConfig) -> tuple[BalanceRule, ...]:
    """Balance rules that a router with these settings uses."""
    rules: list[BalanceRule] = []
    if config.expert_bias:
        rules.append(QuantileBias() if config.finds_quantiles else SignBias())
    if config.global_fractions:
        rules.append(GlobalFractions())
    if SCORES[config.score].uses_positive:
        rules.append(L1Factor())
    return tuple(rules)


# Gaps are counted in bins so that sums over micro-batches and ranks are exact in any order. The bins are
# equal in asinh(gap / 1e-5): narrow near 0, where the quantile is once the bias has converged, and elsewhere
# 3% of the gap for any scale of the scores.
NUM_BINS = 1024
_SCALE, _LARGEST = 1e-5, 64.0  # larger gaps are counted in the outermost bin
_RANGE = math.asinh(_LARGEST / _SCALE)


def count_gaps(choice_TE: Tensor, cutoff_T: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Histogram of `cutoff - choice` for each expert, over tokens that are not padding: int64 [E, B].

    `choice` is the score plus the bias; `cutoff` is a token's (K+1)-th largest choice.
    """
    num_experts = choice_TE.size(1)
    place_TE = torch.asinh((cutoff_T.unsqueeze(1) - choice_TE) / _SCALE) / _RANGE
    bin_TE = ((place_TE + 1) * (NUM_BINS // 2)).long().clamp_(0, NUM_BINS - 1)
    bin_TE += torch.arange(num_experts, device=choice_TE.device) * NUM_BINS
    counts = torch.zeros(num_experts * NUM_BINS, dtype=torch.int64, device=choice_TE.device)
    ones_TE = torch.ones_like(bin_TE) if valid_T is None else valid_T.long().unsqueeze(1).expand_as(bin_TE)
    return counts.scatter_add_(0, bin_TE.flatten(), ones_TE.flatten()).view(num_experts, NUM_BINS)


def balanced_bias(bias_E: Tensor, counts_EB: Tensor, topk: int) -> Tensor:
    """Adds the K/E quantile of an expert's gaps to its bias; makes the mean bias 0. No counts: no change."""
    cumulative_EB = counts_EB.cumsum(dim=1).double()
    total_E1 = cumulative_EB[:, -1:]
    target_E1 = total_E1 * topk / bias_E.numel()
    bin_E1 = (cumulative_EB < target_E1).sum(dim=1, keepdim=True).clamp(max=NUM_BINS - 1)
    inside_E1 = counts_EB.gather(1, bin_E1).clamp(min=1)
    below_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    place_E1 = (bin_E1 + (target_E1 - below_E1) / inside_E1) / (NUM_BINS // 2) - 1
    new_E = bias_E.double() + _SCALE * torch.sinh(place_E1.squeeze(1) * _RANGE)
    # Shifting all biases by a constant does not change any choice, and keeps them from drifting.
    return torch.where(total_E1.squeeze(1) > 0, new_E - new_E.mean(), bias_E.double()).to(bias_E.dtype)
