"""The router: scores, top-k, expert bias. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.layers.capacity import count_per_expert


@dataclass(frozen=True)
class RouterConfig:
    """What a router computes.

    Args:
        hidden_size: D.
        num_experts: E.
        topk: K.
        score: `softmax` or `sigmoid`.
        pre_softmax: softmax over all experts before top-k (Switch, OLMoE), else over the chosen K (Mixtral, Qwen3).
        scaling_factor: factor on the weights.
        num_groups: groups of experts for group-limited top-k; 0 for none.
        group_topk: groups that a token may use.
        expert_bias: keep a bias per expert that is added to the scores for the choice and not to the weights.
    """

    hidden_size: int
    num_experts: int
    topk: int
    score: str = "softmax"
    pre_softmax: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 0
    group_topk: int = 0
    expert_bias: bool = False

    def __post_init__(self) -> None:
        if self.topk > self.num_experts:
            raise ValueError(f"topk={self.topk}: is larger than num_experts={self.num_experts}. Fix: choose at most {self.num_experts}.")
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score}: is not a score function. Fix: use softmax or sigmoid.")
        if self.num_groups:
            self._check_groups()

    def _check_groups(self) -> None:
        groups, used = self.num_groups, self.group_topk
        if self.num_experts % groups:
            raise ValueError(f"num_groups={groups}: does not divide num_experts={self.num_experts}. Fix: use a divisor.")
        if not 1 <= used <= groups:
            raise ValueError(f"group_topk={used}: is not between 1 and num_groups={groups}. Fix: choose how many groups a token may use.")
        if self.topk > used * (self.num_experts // groups):
            available = used * (self.num_experts // groups)
            raise ValueError(f"topk={self.topk}: {used} of {groups} groups have {available} experts. Fix: raise group_topk or lower topk.")


@dataclass(frozen=True)
class RoutingDecision:
    """Where every token goes.

    Args:
        expert_TK: chosen experts, int64.
        weights_TK: router weights, fp32, with gradient.
        scores_TE: scores of all experts, rows sum to 1, fp32, with gradient (for the load-balancing loss).
        logits_TE: router logits, fp32, with gradient (for the z-loss).
        tokens_per_expert_E: slots per expert before any drop, int64.
        kept_TK: slots that are not dropped, bool; None when nothing is dropped.
    """

    expert_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor
    logits_TE: Tensor
    tokens_per_expert_E: Tensor
    kept_TK: Tensor | None = None


class Router(nn.Module):
    """Scores tokens against experts and picks the top k, in fp32 whatever the dtype of its input.

    The formulas: softmax, pre: s = softmax(x W^T), w = top-k of s (no normalization); post: w = softmax(top-k of x W^T).
    Sigmoid (DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16): s = sigmoid(x W^T), the choice by s + bias, w = s / sum of chosen s.
    """

    expert_bias: Tensor
    local_tokens_per_expert: Tensor

    def __init__(self, config: RouterConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        if config.expert_bias:
            # The names are those that megatron's finalize_model_grads looks for when it updates the bias.
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32, device=device))
            self.register_buffer("local_tokens_per_expert", torch.zeros(config.num_experts, device=device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follows its model to another device, but not to bf16 with what counts and accumulates."""
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.float())
        return self

    def forward(self, x_TD: Tensor) -> RoutingDecision:
        logits_TE = nn.functional.linear(x_TD.float(), self.weight.float())
        scores_TE, expert_TK, weights_TK = self._choose(logits_TE)
        tokens_per_expert_E = count_per_expert(expert_TK.flatten(), self.config.num_experts)
        if self.config.expert_bias and self.training and torch.is_grad_enabled():
            self.local_tokens_per_expert += tokens_per_expert_E
        return RoutingDecision(expert_TK, weights_TK, scores_TE, logits_TE, tokens_per_expert_E)

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        if config.score == "sigmoid":
            raw_TE = logits_TE.sigmoid()
            expert_TK = self._top_experts(raw_TE)
            weights_TK = raw_TE.gather(1, expert_TK)
            if config.topk > 1:
                weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
            scores_TE = raw_TE / (raw_TE.sum(dim=-1, keepdim=True) + 1e-20)
        else:
            scores_TE = logits_TE.softmax(dim=-1)
            expert_TK = self._top_experts(scores_TE)
            weights_TK = (scores_TE if config.pre_softmax else logits_TE).gather(1, expert_TK)
            if not config.pre_softmax:
                weights_TK = weights_TK.softmax(dim=-1)
        return scores_TE, expert_TK, weights_TK * config.scaling_factor

    def _top_experts(self, scores_TE: Tensor) -> Tensor:
        config = self.config
        choice_TE = scores_TE.detach()
        if config.expert_bias:
            choice_TE = choice_TE + self.expert_bias
        if config.num_groups:
            choice_TE = _mask_groups(choice_TE, config)
        return choice_TE.topk(config.topk, dim=-1).indices


def _mask_groups(choice_TE: Tensor, config: RouterConfig) -> Tensor:
    """Leaves only the experts of the best groups; a group is as good as the sum of its K/group_topk best (DeepSeek-V3)."""
    grouped_TGe = choice_TE.view(choice_TE.size(0), config.num_groups, -1)
    best = max(1, config.topk // config.group_topk)
    group_score_TG = grouped_TGe.topk(best, dim=-1).values.sum(dim=-1)
    allowed_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
    allowed_TG.scatter_(1, group_score_TG.topk(config.group_topk, dim=-1).indices, True)
    return grouped_TGe.masked_fill(~allowed_TG.unsqueeze(-1), float("-inf")).flatten(1)
