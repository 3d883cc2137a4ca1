"""The router: scores, top-k, weights, expert bias. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.layers.capacity import count_per_expert, without_dropped
from moe_exp.layers.groups import group_size, sum_over
from moe_exp.layers.kernels.choice import takes_kernels
from moe_exp.layers.kernels.topk import TopK, router_topk, scores_torch
from moe_exp.layers.recompute import is_counted_forward
from moe_exp.layers.router.assignment import balanced_experts, best_experts, sinkhorn, zipf_experts
from moe_exp.layers.router.config import ROUTER_DTYPES, RouterConfig, kernel_problem
from moe_exp.layers.router.quantile import NUM_BINS, balanced_bias, count_gaps
from moe_exp.layers.router.replay import RoutingReplay


@dataclass(frozen=True)
class RoutingDecision:
    """Experts and weights of each token.

    Args:
        expert_TK: chosen experts, int64.
        weights_TK: router weights, fp32 or fp64, with gradient.
        scores_TE: scores of all experts, rows sum to 1, with gradient (for the losses); None with `sums`.
        logits_TE: router logits, with gradient (for the z-loss); None with `sums`.
        tokens_per_expert_E: slots per expert before any drop, int64, without padding.
        kept_TK: bool, slots that count; None for all. Without padding from the router, and also without
            dropped slots once MoELayer.route has applied the capacity.
        valid_T: bool, tokens that are not padding; None for all.
        sums: what losses and statistics need of scores and logits, if a kernel routed; else None.
        use_kernels: of RouterConfig, for the dispatcher.
    """

    expert_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor | None
    logits_TE: Tensor | None
    tokens_per_expert_E: Tensor
    kept_TK: Tensor | None = None
    valid_T: Tensor | None = None
    sums: TopK | None = None
    use_kernels: bool | None = None

    def for_losses(self) -> tuple[Tensor, Tensor]:
        """Scores and logits, both [T, E], with zero scores for padding; after a routing kernel the sums of
        the scores [E] and the log-sum-exp of the logits [T].
        """
        if self.sums is not None:
            return self.sums.score_sums_E, self.sums.lse_T
        assert self.scores_TE is not None and self.logits_TE is not None
        scores_TE = self.scores_TE if self.valid_T is None else self.scores_TE * self.valid_T.unsqueeze(1)
        return scores_TE, self.logits_TE


class Router(nn.Module):
    """Scores tokens against experts and picks the top k.

    Logits z = x W^T, then
        softmax, pre:  s = softmax(z), w = the K chosen of s
        softmax, post: w = softmax over the K chosen z
        sigmoid:       s = sigmoid(z), choice by s + bias, w = s / sum of the chosen s
            (DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16)
        sqrtsoftplus:  like sigmoid with s = sqrt(softplus(z))
    all times the scaling factor.

    Quotients s / sum of s (scores of the losses, normalized weights) are computed as softmax(log s): exact to
    1e-6 in fp32 for any logits. If all of a token's logits are below -14, they equal softmax(z) (sigmoid) and
    softmax(z / 2) (sqrtsoftplus), independent of a common shift; shifted upward they tend to 1/E and 1/K,
    more slowly for sqrtsoftplus. Unnormalized weights are s itself and vanish with it; the bias is added to s
    itself and decides alone once all s have vanished.

    Args:
        microbatch_group: ranks that hold the micro-batch's other tokens, over which Sinkhorn balances.

    Attributes:
        weight: [E, D].
        expert_bias: [E], fp32, if configured.
        gap_counts: [E, B], int64, of the global batch so far, for quantile balancing.
        global_tokens_per_expert: [E], fp32, slots per expert in the last global batch, zeros before it.
        mean_scores: [E], fp32, moving average of the mean score of each expert over global batches, zeros
            before the first.
        replay: RoutingReplay that records or replays decisions, or None.
        needs_scores: scores and logits are needed, not only their sums, so no kernel can route.
    """

    expert_bias: Tensor
    gap_counts: Tensor
    local_tokens_per_expert: Tensor
    global_tokens_per_expert: Tensor
    batch_tokens_per_expert: Tensor
    mean_scores: Tensor
    batch_scores: Tensor

    def __init__(
        self,
        config: RouterConfig,
        *,
        microbatch_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.config, self.microbatch_group = config, microbatch_group
        self.replay: RoutingReplay | None = None
        self.needs_scores = True
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        )
        zeros_E = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        if config.expert_bias:  # Megatron's finalize_model_grads finds these two by name
            self.register_buffer("expert_bias", zeros_E.clone())
            if config.finds_quantiles:
                gaps_EB = torch.zeros(config.num_experts, NUM_BINS, dtype=torch.int64, device=device)
                self.register_buffer("gap_counts", gaps_EB, persistent=False)
            else:
                self.register_buffer("local_tokens_per_expert", zeros_E.clone(), persistent=False)
        if config.global_fractions:
            self.register_buffer("global_tokens_per_expert", zeros_E.clone())
            self.register_buffer("batch_tokens_per_expert", zeros_E.clone(), persistent=False)
        if config.mean_scores_rate:
            self.register_buffer("mean_scores", zeros_E.clone())
            # fp64, so that the order of micro-batches and ranks does not matter
            self.register_buffer("batch_scores", zeros_E.double(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initializes the weight and zeros counts and bias; FSDP2 calls it after `to_empty`."""
        nn.init.normal_(self.weight, std=std)
        for buffer in self.buffers(recurse=False):
            nn.init.zeros_(buffer)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keeps counters and accumulators in their dtype when the model is cast to bf16."""
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            setattr(self, name, getattr(self, name).to(dtype))
        return self

    def forward(self, x_TD: Tensor, padding_mask_T: Tensor | None = None) -> RoutingDecision:
        """Routes tokens; `padding_mask_T` (bool) marks padding, which gets no expert or count."""
        valid_T = None if padding_mask_T is None else ~padding_mask_T
        with torch.autocast(x_TD.device.type, enabled=False):  # autocast would compute the logits in bf16
            logits_TE = self._logits(x_TD)
            decision = (
                self._route_with_kernel(logits_TE, valid_T)
                if self._takes_kernel(logits_TE)
                else self._route_with_torch(logits_TE, valid_T)
            )
        if self.training and is_counted_forward():
            self._count(decision)
        return decision

    def _takes_kernel(self, logits_TE: Tensor) -> bool:
        """Whether kernels/topk.py routes: on CUDA, if it supports the rule and sums of the scores suffice."""
        problem = kernel_problem(self.config, needs_scores=self.needs_scores)
        return problem == "" and self.replay is None and takes_kernels(logits_TE, self.config.use_kernels)

    def _route_with_kernel(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        config = self.config
        sums = router_topk(
            logits_TE,
            config.topk,
            score=config.score,
            pre_softmax=config.pre_softmax,
            normalize=config.normalizes,
            scaling_factor=config.scaling_factor,
            bias_E=self.expert_bias if config.expert_bias else None,
            valid_T=valid_T,
        )
        return RoutingDecision(
            expert_TK=sums.expert_TK,
            weights_TK=sums.weights_TK,
            scores_TE=None,
            logits_TE=None,
            tokens_per_expert_E=sums.tokens_per_expert_E,
            kept_TK=_kept_of_valid(valid_T, sums.expert_TK),
            valid_T=valid_T,
            sums=sums,
            use_kernels=config.use_kernels,
        )

    def _route_with_torch(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        scores_TE, expert_TK, weights_TK = self._choose(logits_TE, valid_T)
        kept_TK = _kept_of_valid(valid_T, expert_TK)
        return RoutingDecision(
            expert_TK=expert_TK,
            weights_TK=weights_TK,
            scores_TE=scores_TE,
            logits_TE=logits_TE,
            tokens_per_expert_E=count_kept(expert_TK, kept_TK, self.config.num_experts),
            kept_TK=kept_TK,
            valid_T=valid_T,
            use_kernels=self.config.use_kernels,
        )

    @torch.no_grad()
    def end_of_batch(self, group: ProcessGroup | None = None) -> None:
        """Updates the expert bias and the global fractions, after the last forward pass of a global batch.

        With the rule `sign` the bias of an expert rises by `bias_update_rate` if it has fewer slots than the
        mean and falls if it has more: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing
        (arXiv:2408.15664), algorithm 1; then it shrinks by `bias_decay`. Only for use outside Megatron: in
        moe_exp's training, Megatron's finalize_model_grads does this, and `end_of_own_state` the rest.

        Args:
            group: all ranks that route tokens to these experts: data, context and tensor parallel.
        """
        if self.config.expert_bias and not self.config.finds_quantiles:
            counts_E = sum_over(self.local_tokens_per_expert, group)
            self.expert_bias += torch.sign(counts_E.mean() - counts_E) * self.config.bias_update_rate
            self.local_tokens_per_expert.zero_()
        self.end_of_global_fractions(group)
        self.end_of_own_state(group)

    @torch.no_grad()
    def end_of_own_state(self, group: ProcessGroup | None = None) -> None:
        """The part of `end_of_batch` that Megatron does not have: quantile balancing, decay of the bias, and
        the moving average of the scores.
        """
        config = self.config
        if config.finds_quantiles:
            counts_EB = sum_over(self.gap_counts, group)
            self.expert_bias.copy_(balanced_bias(self.expert_bias, counts_EB, config.topk))
            self.gap_counts.zero_()
        elif config.expert_bias and config.bias_decay:
            self.expert_bias *= 1 - config.bias_decay
        if config.mean_scores_rate:
            sums_E = sum_over(self.batch_scores, group)
            newest_E = sums_E / sums_E.sum().clamp(min=1e-20)  # a token's scores sum to 1
            rate = torch.where(self.mean_scores.sum() > 0, config.mean_scores_rate, 1.0)
            self.mean_scores.lerp_(newest_E.float(), rate)
            self.batch_scores.zero_()

    @torch.no_grad()
    def end_of_global_fractions(self, group: ProcessGroup | None = None) -> None:
        """The part of `end_of_batch` for `global_aux_loss`."""
        if self.config.global_fractions:
            self.global_tokens_per_expert.copy_(sum_over(self.batch_tokens_per_expert, group))
            self.batch_tokens_per_expert.zero_()

    @torch.no_grad()
    def _count(self, decision: RoutingDecision) -> None:
        if self.config.expert_bias and not self.config.finds_quantiles:
            self.local_tokens_per_expert += decision.tokens_per_expert_E
        if self.config.global_fractions:
            self.batch_tokens_per_expert += decision.tokens_per_expert_E
        if self.config.mean_scores_rate:
            scores, _ = decision.for_losses()
            self.batch_scores += scores.sum(dim=0) if scores.dim() == 2 else scores

    def _logits(self, x_TD: Tensor) -> Tensor:
        dtype = ROUTER_DTYPES[self.config.dtype]
        x_TD = x_TD.to(dtype)
        if self.config.jitter and self.training:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        return nn.functional.linear(x_TD, self.weight.to(dtype))

    def _choose(self, logits_TE: Tensor, valid_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores for the losses [T, E], chosen experts and weights [T, K], by these tensors [T, E]:

        raw:    the score function of each expert, such as the sigmoid of its logit
        log:    log of raw, up to a constant per token
        scores: raw divided by its sum over experts
        choice: what top-k ranks (in `_choose_experts`): raw plus expert bias, or scores or logits
        """
        config = self.config
        if config.score == "softmax":
            raw_TE = scores_TE = logits_TE.softmax(dim=-1)
            log_TE = logits_TE  # up to a term that is the same for all experts
        else:
            raw_TE, log_TE = scores_torch(logits_TE, config.score)
            scores_TE = log_TE.softmax(dim=-1)
        expert_TK = self._choose_experts(raw_TE.detach(), scores_TE.detach(), logits_TE.detach(), valid_T)
        if self.replay is not None:
            expert_TK = self.replay.apply(expert_TK, training=self.training)
        return scores_TE, expert_TK, self._weights(raw_TE, log_TE, logits_TE, expert_TK)

    def _weights(self, raw_TE: Tensor, log_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        config = self.config
        if config.assignment == "sinkhorn" and config.topk == 1 and config.score == "softmax":
            # w = sigmoid(z), as in Megatron-Core: Clark et al. 2022 (arXiv:2202.01169), S-BASE
            weights_TK = logits_TE.sigmoid().gather(1, expert_TK)
        elif config.score == "softmax" and not config.pre_softmax:  # softmax over the chosen
            weights_TK = logits_TE.gather(1, expert_TK).softmax(dim=-1)
        elif config.score != "softmax" and config.normalizes:
            # s / sum of the chosen s, normalized already: exact also if all of them vanish
            return log_TE.gather(1, expert_TK).softmax(dim=-1) * config.scaling_factor
        else:
            weights_TK = raw_TE.gather(1, expert_TK)
        if config.normalizes:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK * config.scaling_factor

    def _choose_experts(
        self, raw_TE: Tensor, scores_TE: Tensor, logits_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor:
        config = self.config
        num_tokens = raw_TE.size(0)
        if config.assignment == "balanced":
            return balanced_experts(
                num_tokens, num_experts=config.num_experts, topk=config.topk, device=raw_TE.device
            )
        if config.assignment == "zipf":
            return zipf_experts(
                num_tokens,
                num_experts=config.num_experts,
                topk=config.topk,
                exponent=config.zipf_exponent,
                device=raw_TE.device,
            )
        if config.assignment == "sinkhorn":
            # Balanced over the batch only in training; in evaluation, tokens are routed independently.
            choice_TE = (
                sinkhorn(logits_TE, valid_T, group=self.microbatch_group) if self.training else logits_TE
            )
            return choice_TE.topk(config.topk, dim=-1).indices
        if config.expert_bias:
            choice_TE = raw_TE + self.expert_bias
            if config.finds_quantiles and self.training and is_counted_forward():
                cutoff_T = choice_TE.topk(config.topk + 1, dim=-1).values[:, -1]
                self.gap_counts += count_gaps(choice_TE, cutoff_T, valid_T)
        else:
            # The same order as the scores, but without ties at 0 and 1; groups add up scores.
            by_logit = config.score != "softmax" and not config.num_groups
            choice_TE = logits_TE if by_logit else scores_TE
        return best_experts(
            choice_TE, topk=config.topk, num_groups=config.num_groups, group_topk=config.group_topk
        )


def _kept_of_valid(valid_T: Tensor | None, expert_TK: Tensor) -> Tensor | None:
    return None if valid_T is None else valid_T.unsqueeze(1).expand_as(expert_TK)


def count_kept(expert_TK: Tensor, kept_TK: Tensor | None, num_experts: int) -> Tensor:
    """Kept slots per expert, int64 [E]."""
    if kept_TK is None:
        return count_per_expert(expert_TK.flatten(), num_experts)
    return count_per_expert(without_dropped(expert_TK, kept_TK, num_experts).flatten(), num_experts + 1)[
        :num_experts
    ]


def tokens_in_group(decision: RoutingDecision, group: ProcessGroup | None) -> Tensor | int:
    """Number of tokens of the micro-batch over `group`, without padding."""
    if decision.valid_T is None:
        return decision.expert_TK.size(0) * group_size(group)
    return sum_over(decision.valid_T.sum(), group)
