"""Quantile balancing: an expert's bias is the value that would have given it its share of the last batch.

For each token, the cutoff is the (K+1)-th largest sum of score and bias. An expert would have been at the
cutoff of token t with the bias cutoff_t - score_te, which is its bias plus the gap that is counted here. The
new bias is the K/E quantile of these values: with it a share K/E of the tokens lie above their cutoff. There
is no step size and no coefficient. Kimi K3's report, section 2.3.3; Megatron-LM#5349.

Gaps are counted in bins, so sums over micro-batches and ranks are exact in any order. The bins are those of
asinh(gap / 1e-5), narrow near 0, where the quantile is once the bias is right: 3% of the gap, whatever the
scale of the scores. Shape suffixes in `moe_exp.layers`; B is for bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUM_BINS = 1024
_SCALE, _LARGEST = 1e-5, 64.0  # of a gap; a larger one is in the outermost bin
_RANGE = math.asinh(_LARGEST / _SCALE)


def count_gaps(choice_TE: Tensor, cutoff_T: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Tokens per expert and bin of cutoff - choice, int64 [E, B]; without padding.

    Args:
        choice_TE: score plus bias.
        cutoff_T: its (K+1)-th largest value.
        valid_T: tokens that are not padding; None for all.
    """
    num_experts = choice_TE.size(1)
    place_TE = torch.asinh((cutoff_T.unsqueeze(1) - choice_TE) / _SCALE) / _RANGE
    bin_TE = ((place_TE + 1) * (NUM_BINS // 2)).long().clamp_(0, NUM_BINS - 1)
    bin_TE += torch.arange(num_experts, device=choice_TE.device) * NUM_BINS
    counts = torch.zeros(num_experts * NUM_BINS, dtype=torch.int64, device=choice_TE.device)
    ones_TE = torch.ones_like(bin_TE) if valid_T is None else valid_T.long().unsqueeze(1).expand_as(bin_TE)
    return counts.scatter_add_(0, bin_TE.flatten(), ones_TE.flatten()).view(num_experts, NUM_BINS)


def balanced_bias(bias_E: Tensor, counts_EB: Tensor, topk: int) -> Tensor:
    """The bias plus the K/E quantile of each expert's gaps, with mean 0; `bias_E` if nothing is counted.

    A constant added to all biases changes no choice.
    """
    cumulative_EB = counts_EB.cumsum(dim=1).double()
    total_E1 = cumulative_EB[:, -1:]
    target_E1 = total_E1 * topk / bias_E.numel()
    bin_E1 = (cumulative_EB < target_E1).sum(dim=1, keepdim=True).clamp(max=NUM_BINS - 1)
    inside_E1 = counts_EB.gather(1, bin_E1).clamp(min=1)
    below_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    place_E1 = (bin_E1 + (target_E1 - below_E1) / inside_E1) / (NUM_BINS // 2) - 1
    new_E = bias_E.double() + _SCALE * torch.sinh(place_E1.squeeze(1) * _RANGE)
    return torch.where(total_E1.squeeze(1) > 0, new_E - new_E.mean(), bias_E.double()).to(bias_E.dtype)
