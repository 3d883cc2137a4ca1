"""Rules that balance the load of the experts over global batches, and the state that each keeps.

The state is in buffers of the router, where Megatron's finalize_model_grads and checkpoints look for them by
name. A rule counts in each training forward pass and updates at the end of the global batch. Shape suffixes
in `moe_exp.layers`; B bins.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.config.router import RouterConfig
from moe_exp.layers.groups import sum_over
from moe_exp.layers.router.decision import RoutingDecision, tokens_in_group

Device = torch.device | str | None


class BalanceRule:
    """A rule without state of its own; `router` is the Router whose buffers hold it."""

    saved: tuple[str, ...] = ()  # buffers in checkpoints; others hold counts of the current global batch
    initial = 0.0  # value of the buffers of `saved`

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        """New buffers, by name."""
        raise NotImplementedError

    def count(self, router: Any, decision: RoutingDecision) -> None:
        """Counts a forward pass."""

    def count_choice(self, router: Any, choice_TE: Tensor, valid_T: Tensor | None) -> None:
        """Counts the sums of score and expert bias by which a forward pass chooses."""

    def count_by_score(self, router: Any, tokens_per_expert_E: Tensor) -> None:
        """Counts the slots of a micro-batch as the losses do, by highest score."""

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        """Updates the state after a global batch, whose other tokens the ranks of `group` have routed."""


class SignBias(BalanceRule):
    """The bias of an expert rises by `bias_update_rate` if it has fewer slots than the mean and falls if it
    has more: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664), algorithm 1.
    """

    saved = ("expert_bias",)

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        names = "expert_bias", "local_tokens_per_expert"
        return {name: torch.zeros(num_experts, dtype=torch.float32, device=device) for name in names}

    @torch.no_grad()
    def count(self, router: Any, decision: RoutingDecision) -> None:
        router.local_tokens_per_expert += decision.tokens_per_expert_E

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        # Outside Megatron, whose finalize_model_grads does this in training.
        counts_E = sum_over(router.local_tokens_per_expert, group)
        router.expert_bias += torch.sign(counts_E.mean() - counts_E) * router.config.bias_update_rate
        router.local_tokens_per_expert.zero_()


class QuantileBias(BalanceRule):
    """Quantile balancing: an expert's bias is the value that would have given it its share of the last batch,
    without a step size or a coefficient. Kimi K3's report, section 2.3.3; Megatron-LM#5349.
    """

    # For each token, the cutoff is the (K+1)-th largest sum of score and bias. An expert would have been at
    # the cutoff of token t with the bias cutoff_t - score_te, which is its bias plus the gap that
    # `count_gaps` counts. The new bias is the K/E quantile of these values: a share K/E of the tokens is
    # above its cutoff.
    saved = ("expert_bias",)

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        gaps_EB = torch.zeros(num_experts, NUM_BINS, dtype=torch.int64, device=device)
        return {
            "expert_bias": torch.zeros(num_experts, dtype=torch.float32, device=device),
            "gap_counts": gaps_EB,
        }

    def count_choice(self, router: Any, choice_TE: Tensor, valid_T: Tensor | None) -> None:
        cutoff_T = choice_TE.topk(router.config.topk + 1, dim=-1).values[:, -1]
        router.gap_counts += count_gaps(choice_TE, cutoff_T, valid_T)

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        counts_EB = sum_over(router.gap_counts, group)
        router.expert_bias.copy_(balanced_bias(router.expert_bias, counts_EB, router.config.topk))
        router.gap_counts.zero_()


class GlobalFractions(BalanceRule):
    """Slots per expert of the last global batch, for the loss `global_aux_loss`."""

    saved = ("global_tokens_per_expert",)

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        names = *self.saved, "batch_tokens_per_expert"
        return {name: torch.zeros(num_experts, dtype=torch.float32, device=device) for name in names}

    def count_by_score(self, router: Any, tokens_per_expert_E: Tensor) -> None:
        router.batch_tokens_per_expert += tokens_per_expert_E.detach()

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        router.global_tokens_per_expert.copy_(sum_over(router.batch_tokens_per_expert, group))
        router.batch_tokens_per_expert.zero_()


class L1Factor(BalanceRule):
    """The weight of the loss `l1` grows by a fifth if tokens had more than K experts on average and shrinks
    if they had fewer: ReMoE (arXiv:2412.14711), equation 8.
    """

    saved = ("l1_factor",)
    initial = 1.0

    def buffers(self, num_experts: int, device: Device) -> dict[str, Tensor]:
        slots_and_tokens = torch.zeros(2, dtype=torch.int64, device=device)
        return {
            "l1_factor": torch.ones((), dtype=torch.float32, device=device),
            "slots_and_tokens": slots_and_tokens,
        }

    @torch.no_grad()
    def count(self, router: Any, decision: RoutingDecision) -> None:
        router.slots_and_tokens[0] += decision.tokens_per_expert_E.sum()
        router.slots_and_tokens[1] += tokens_in_group(decision, None)

    def end_of_batch(self, router: Any, group: ProcessGroup | None) -> None:
        slots, tokens = sum_over(router.slots_and_tokens, group).double()
        router.l1_factor *= 1.2 ** torch.sign(slots - tokens * router.config.topk).float()
        # Of the smallest numbers of fp32 a fifth more is the same, so the factor could not grow again.
        router.l1_factor.clamp_(1e-20, 1e20)
        router.slots_and_tokens.zero_()


def rules_of(config: RouterConfig) -> tuple[BalanceRule, ...]:
    """The rules of a router with these settings."""
    rules: list[BalanceRule] = []
    if config.expert_bias:
        rules.append(QuantileBias() if config.finds_quantiles else SignBias())
    if config.global_fractions:
        rules.append(GlobalFractions())
    if config.score == "relu":
        rules.append(L1Factor())
    return tuple(rules)


# Gaps are counted in bins, so that sums over micro-batches and ranks are exact in any order. The bins are
# those of asinh(gap / 1e-5), narrow near 0, where the quantile is once the bias is right: 3% of the gap,
# whatever the scale of the scores.
NUM_BINS = 1024
_SCALE, _LARGEST = 1e-5, 64.0  # of a gap; a larger one is in the outermost bin
_RANGE = math.asinh(_LARGEST / _SCALE)


def count_gaps(choice_TE: Tensor, cutoff_T: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Tokens per expert and bin of cutoff - choice, int64 [E, B], without padding: choice is score plus bias,
    the cutoff its (K+1)-th largest value.
    """
    num_experts = choice_TE.size(1)
    place_TE = torch.asinh((cutoff_T.unsqueeze(1) - choice_TE) / _SCALE) / _RANGE
    bin_TE = ((place_TE + 1) * (NUM_BINS // 2)).long().clamp_(0, NUM_BINS - 1)
    bin_TE += torch.arange(num_experts, device=choice_TE.device) * NUM_BINS
    counts = torch.zeros(num_experts * NUM_BINS, dtype=torch.int64, device=choice_TE.device)
    ones_TE = torch.ones_like(bin_TE) if valid_T is None else valid_T.long().unsqueeze(1).expand_as(bin_TE)
    return counts.scatter_add_(0, bin_TE.flatten(), ones_TE.flatten()).view(num_experts, NUM_BINS)


def balanced_bias(bias_E: Tensor, counts_EB: Tensor, topk: int) -> Tensor:
    """The bias plus the K/E quantile of each expert's gaps, with mean 0; `bias_E` if nothing is counted."""
    cumulative_EB = counts_EB.cumsum(dim=1).double()
    total_E1 = cumulative_EB[:, -1:]
    target_E1 = total_E1 * topk / bias_E.numel()
    bin_E1 = (cumulative_EB < target_E1).sum(dim=1, keepdim=True).clamp(max=NUM_BINS - 1)
    inside_E1 = counts_EB.gather(1, bin_E1).clamp(min=1)
    below_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    place_E1 = (bin_E1 + (target_E1 - below_E1) / inside_E1) / (NUM_BINS // 2) - 1
    new_E = bias_E.double() + _SCALE * torch.sinh(place_E1.squeeze(1) * _RANGE)
    # A constant added to all biases changes no choice.
    return torch.where(total_E1.squeeze(1) > 0, new_E - new_E.mean(), bias_E.double()).to(bias_E.dtype)
