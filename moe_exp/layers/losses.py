"""Auxiliary losses of the router. Pure functions; shape suffixes in `moe_exp.layers`.

Both losses are means over the tokens of one micro-batch, wherever those tokens are: tensor (sequence) parallel and
context parallel ranks each hold a part. Every function returns this rank's *share* of the loss: the shares add up to the
loss, and their gradients to its gradient, because what couples the ranks (the token counts) carries no gradient. So no
differentiable collective is needed, and the gradient is the same in every layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in `group`; None stands for this rank alone."""
    return 1 if group is None else group.size()


def load_balancing_loss_share(scores_TE: Tensor, tokens_per_expert_E: Tensor, *, topk: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's share of the load-balancing loss, E * sum_e f_e * P_e.

    f_e is the fraction of the T*K slots that went to expert e, P_e the mean score of expert e; 1.0 is perfect balance.
    Fedus et al. 2021, Switch Transformers, eq. 4 to 6 (arXiv:2101.03961), with top-k slots in f as in Megatron-Core.

    Args:
        scores_TE: router scores of this rank's tokens, each row summing to 1, float.
        tokens_per_expert_E: slots of this rank's tokens per expert, before any drop, integer.
        topk: K.
        group: the ranks that hold the rest of the micro-batch.

    Returns:
        Scalar; the sum over `group` is the loss.
    """
    num_experts = scores_TE.size(1)
    num_tokens = max(1, scores_TE.size(0) * group_size(group))
    counts_E = tokens_per_expert_E.to(scores_TE.dtype)
    if group_size(group) > 1:
        torch.distributed.all_reduce(counts_E, group=group)
    return torch.dot(scores_TE.sum(dim=0), counts_E) * (num_experts / (topk * num_tokens**2))


def z_loss_share(logits_TE: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """This rank's share of the router z-loss, mean over tokens of logsumexp(logits)^2.

    Zoph et al. 2022, ST-MoE, eq. 5 (arXiv:2202.08906).

    Args:
        logits_TE: router logits of this rank's tokens, float.
        group: the ranks that hold the rest of the micro-batch.

    Returns:
        Scalar; the sum over `group` is the loss.
    """
    num_tokens = max(1, logits_TE.size(0) * group_size(group))
    return torch.logsumexp(logits_TE, dim=-1).square().sum() / num_tokens
