"""Which experts a token goes to, given scores. Pure functions; shape suffixes in `moe_exp.layers`; B bins.

Quantile balancing: an expert's bias is the value that would have given it its share of the last batch. For
each token, the cutoff is the (K+1)-th largest sum of score and bias. An expert would have been at the cutoff
of token t with the bias cutoff_t - score_te, which is its bias plus the gap that `count_gaps` counts. The new
bias is the K/E quantile of these values: with it a share K/E of the tokens lie above their cutoff. There is
no step size and no coefficient. Kimi K3's report, section 2.3.3; Megatron-LM#5349.

Gaps are counted in bins, so sums over micro-batches and ranks are exact in any order. The bins are those of
asinh(gap / 1e-5), narrow near 0, where the quantile is once the bias is right: 3% of the gap, whatever the
scale of the scores.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.groups import group_size, sum_over


def best_experts(choice_TE: Tensor, *, topk: int, num_groups: int = 0, group_topk: int = 0) -> Tensor:
    """The K experts of highest value, [T, K]; with groups, only from the `group_topk` best groups.

    A group's value is the sum of its K/group_topk best experts: DeepSeek-V3 (arXiv:2412.19437), sec. 2.1.2.
    """
    if num_groups:
        grouped_TGe = choice_TE.view(choice_TE.size(0), num_groups, -1)
        best = min(max(1, topk // group_topk), grouped_TGe.size(-1))
        group_score_TG = grouped_TGe.topk(best, dim=-1).values.sum(dim=-1)
        allowed_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
        allowed_TG.scatter_(1, group_score_TG.topk(group_topk, dim=-1).indices, True)
        choice_TE = grouped_TGe.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return choice_TE.topk(topk, dim=-1).indices


def within_top_p(scores_TK: Tensor, top_p: float) -> Tensor:
    """The first slots of each token that together have at least `top_p` of the scores, bool [T, K].

    At least one, and all K if they have less. Huang et al. 2024, Harder Tasks Need More Experts
    (arXiv:2403.07652), equation 5, with the cap K.

    Args:
        scores_TK: of the chosen experts, as parts of a sum of 1, best first.
    """
    # Not by cumsum, which is no deterministic algorithm on a GPU.
    earlier_KK = scores_TK.new_ones(scores_TK.size(1), scores_TK.size(1)).tril(-1)
    before_TK = (scores_TK.unsqueeze(1) * earlier_KK).sum(dim=-1)
    return before_TK < top_p


_MOST_ITERATIONS = 1000  # of Sinkhorn-Knopp; extreme logits converge too slowly


def sinkhorn(
    logits_TE: Tensor,
    valid_T: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    tolerance: float = 1e-4,
) -> Tensor:
    """exp(logits) with rows and columns scaled so that all tokens have equal mass, and all experts.

    Sinkhorn-Knopp over the tokens of a micro-batch on all ranks of `group`: Clark et al. 2022, Unified
    Scaling Laws for Routed Language Models (arXiv:2202.01169), section 3.1. Stops, like Megatron-Core, when
    the mean change of the expert factors is at most `tolerance`. Unlike Megatron-Core, it covers the whole
    micro-batch and cannot overflow: logits are shifted per row, which the row factors undo.

    Args:
        valid_T: tokens that are not padding; padding has no mass.
        group: ranks that hold the rest of the micro-batch.
        tolerance: each check synchronizes with the device.

    Returns:
        [T, E], each row proportional to that of the transport plan; its top-k is the assignment.
    """
    cost_TE = (logits_TE - logits_TE.amax(dim=-1, keepdim=True)).exp() if logits_TE.numel() else logits_TE
    num_tokens = torch.tensor(float(logits_TE.size(0) * group_size(group)))
    if valid_T is not None:
        cost_TE = cost_TE * valid_T.unsqueeze(1)
        num_tokens = sum_over(valid_T.sum(), group)
    num_tokens = num_tokens.clamp(min=1)
    expert_E = cost_TE.new_ones(cost_TE.size(1))
    token_T = cost_TE.new_ones(cost_TE.size(0))
    for _ in range(_MOST_ITERATIONS):
        token_T = 1 / (num_tokens * (cost_TE @ expert_E) + 1e-8)
        new_E = 1 / (expert_E.numel() * sum_over(token_T @ cost_TE, group) + 1e-8)
        change = (new_E - expert_E).abs().mean()
        expert_E = new_E
        if change.item() <= tolerance:
            break
    return token_T.unsqueeze(1) * cost_TE * expert_E


def zipf_experts(
    num_tokens: int, *, num_experts: int, topk: int, exponent: float, device: torch.device
) -> Tensor:
    """K different experts per token, drawn in proportion to (e + 1)^-exponent. For benchmarks of imbalance.

    Takes the top-k of log weights plus Gumbel noise from its own generator: the same draw in every call.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    uniform_TE = torch.rand(num_tokens, num_experts, generator=generator, device=device, dtype=torch.float64)
    gumbel_TE = -torch.log(-torch.log(uniform_TE.clamp(min=1e-300)))
    weight_E = -exponent * torch.log(torch.arange(1, num_experts + 1, device=device, dtype=torch.float64))
    return (weight_E + gumbel_TE).topk(topk, dim=-1).indices


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
