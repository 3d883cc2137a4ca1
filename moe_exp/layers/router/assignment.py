"""Assignment of tokens to experts by scores, as pure functions. Shape suffixes: see `moe_exp.layers`."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_exp.layers.groups import group_size, sum_over


def best_experts(
    choice_TE: Tensor, *, topk: int, num_groups: int = 0, group_topk: int = 0, group_best: int = 0
) -> Tensor:
    """Each token's K experts of highest value, [T, K]; with groups, only from the `group_topk` best groups.

    A group's value is the sum of the `group_best` highest values of its experts. A `group_best` of 0 means
    K/group_topk, as in DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.
    """
    if num_groups:
        grouped_TGe = choice_TE.view(choice_TE.size(0), num_groups, -1)
        best = min(group_best or max(1, topk // group_topk), grouped_TGe.size(-1))
        group_score_TG = grouped_TGe.topk(best, dim=-1).values.sum(dim=-1)
        allowed_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
        allowed_TG.scatter_(1, group_score_TG.topk(group_topk, dim=-1).indices, True)
        choice_TE = grouped_TGe.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return choice_TE.topk(topk, dim=-1).indices


def within_top_p(scores_TK: Tensor, top_p: float) -> Tensor:
    """Bool mask [T, K]: selects each token's best slots until their scores add up to at least `top_p`.

    Selects at least one slot, and all K slots if their scores add up to less than `top_p`. This is
    equation 5 of Huang et al. 2024, Harder Tasks Need More Experts (arXiv:2403.07652), limited to K
    experts per token.

    Args:
        scores_TK: scores of the chosen experts, best first; the scores of all experts sum to 1.
    """
    # Not torch.cumsum, which is not deterministic on a GPU.
    earlier_KK = scores_TK.new_ones(scores_TK.size(1), scores_TK.size(1)).tril(-1)
    return (scores_TK.unsqueeze(1) * earlier_KK).sum(dim=-1) < top_p


_MOST_ITERATIONS = 1000  # Sinkhorn-Knopp converges too slowly for extreme logits


def sinkhorn(
    logits_TE: Tensor, valid_T: Tensor | None = None, *, group: ProcessGroup | None = None,
    tolerance: float = 1e-4,
) -> Tensor:  # fmt: skip
    """Scales rows and columns of exp(logits): all tokens get equal mass, and all experts get equal mass.

    Applies Sinkhorn-Knopp to the tokens of a micro-batch on all ranks of `group`, as in Clark et al. 2022,
    Unified Scaling Laws for Routed Language Models (arXiv:2202.01169), section 3.1. As in
    Megatron-Core, scaling stops when the mean change of the column factors is at most `tolerance`. Unlike
    Megatron-Core, this function covers the whole micro-batch and cannot overflow: logits are shifted per
    row, and the row factors cancel the shift.

    Args:
        valid_T: bool, True for tokens that are not padding; padding has no mass.
        group: ranks that hold the micro-batch's other tokens.

    Returns:
        [T, E]; each row is proportional to the same row of the transport plan. A token's experts are
        the top-k of its row.
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
        if change.item() <= tolerance:  # synchronizes with the device
            break
    return token_T.unsqueeze(1) * cost_TE * expert_E


def zipf_experts(
    num_tokens: int, *, num_experts: int, topk: int, exponent: float, device: torch.device
) -> Tensor:
    """Draws K distinct experts e per token in proportion to (e + 1)^-exponent, to benchmark imbalance.

    Takes the top-k of log weights plus Gumbel noise. The seed is fixed: equal calls draw the same experts.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    uniform_TE = torch.rand(num_tokens, num_experts, generator=generator, device=device, dtype=torch.float64)
    gumbel_TE = -torch.log(-torch.log(uniform_TE.clamp(min=1e-300)))
    weight_E = -exponent * torch.log(torch.arange(1, num_experts + 1, device=device, dtype=torch.float64))
    return (weight_E + gumbel_TE).topk(topk, dim=-1).indices
