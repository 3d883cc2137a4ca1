"""The router: scores, top-k, weights, expert bias. Shape suffixes: see `moe_exp.layers`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_exp.config.choices import LOSSES, SCORES
from moe_exp.config.sections.router import RouterConfig
from moe_exp.layers.kernels.launch import multiplies_16_bits, takes_kernels
from moe_exp.layers.kernels.scores import KERNEL_SCORES
from moe_exp.layers.kernels.topk import router_topk, scores_torch
from moe_exp.layers.router.assignment import best_experts, sinkhorn, within_top_p, zipf_experts
from moe_exp.layers.router.balance import BalanceRule, rules_of
from moe_exp.layers.router.decision import RoutingDecision, count_kept, kept_slots
from moe_exp.layers.router.replay import RoutingReplay, is_counted_forward

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Scores tokens against experts and picks the top k.

    From the logits z = x W^T (+ b), it computes scores s and weights w:
        softmax, pre:  s = softmax(z), w = the K chosen s
        softmax, post: w = softmax over the K chosen z
        sigmoid:       s = sigmoid(z), choice by s + bias, w = s / sum of the chosen s
            (DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16)
        sqrtsoftplus:  like sigmoid with s = sqrt(softplus(z))
        relu:          w = s = max(z, 0), for all experts with positive z
    Weights are multiplied by the scaling factor. With null experts or `top_p`, a token uses only some of its
    K slots, and the weights of these slots are normalized.

    Losses and normalized weights use the ratios s / sum(s). The ratios are computed as softmax(log s),
    which is exact to 1e-6 in fp32 for any logits. If s underflows, unnormalized weights are 0, and the
    choice depends only on `expert_bias`.

    Args:
        microbatch_group: ranks that share a micro-batch's tokens; Sinkhorn balances over all these ranks.

    Attributes:
        weight: [E, D]; here and below, E includes null experts.
        bias: [E], added to the logits, or None.
        expert_bias: [E], fp32, if configured.
        l1_factor: fp32 scalar that multiplies the coefficient of the loss `l1`; only with ReLU scores.
        slots_and_tokens: [2], int64, slots and tokens of the current global batch; only with ReLU scores.
        gap_counts: [E, B], int64, sum of `count_gaps` over this global batch; only for quantile balancing.
        global_tokens_per_expert: [E], fp32, slots per expert in the last global batch, initially zero.
        replay: RoutingReplay that records or replays decisions, or None.
        needs_scores: whether a loss needs the scores and logits themselves, not only their sums; if True,
            routing cannot use the Triton kernel.
    """

    bias: nn.Parameter | None
    expert_bias: Tensor
    slots_and_tokens: Tensor

    def __init__(
        self, config: RouterConfig, *, microbatch_group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.microbatch_group = config, microbatch_group
        self.replay: RoutingReplay | None = None
        self.needs_scores = True
        num_experts = config.num_outputs
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=dtype, device=device))
        bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if config.bias else None
        self.register_parameter("bias", bias)
        self.rules = rules_of(config)
        for rule in self.rules:
            for name, buffer in rule.buffers(num_experts, device).items():
                self.register_buffer(name, buffer, persistent=name in rule.saved)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initializes weight, biases and buffers; FSDP2 calls this method after `to_empty`."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        initial = {name: rule.initial for rule in self.rules for name in rule.saved}
        for name, buffer in self.named_buffers(recurse=False):
            nn.init.constant_(buffer, initial.get(name, 0.0))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keeps counters and accumulators in their dtype when the model is cast to bf16."""
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            setattr(self, name, getattr(self, name).to(dtype))
        return self

    def forward(self, x_TD: Tensor, padding_mask_T: Tensor | None = None) -> RoutingDecision:
        """Routes tokens; `padding_mask_T` (bool) marks padding, which is neither routed nor counted."""
        valid_T = None if padding_mask_T is None else ~padding_mask_T
        with torch.autocast(x_TD.device.type, enabled=False):  # autocast would compute the logits in bf16
            logits_TE = self.logits(x_TD)
            if self.bias is not None:
                logits_TE = logits_TE + self.bias.to(logits_TE.dtype)
            decision = self.route(logits_TE, valid_T)
        for rule in self._counting_rules:
            rule.count(self, decision)
        return decision

    def logits(self, x_TD: Tensor) -> Tensor:
        """Logits [T, E] of tokens [T, D], in fp32 or fp64, without the bias. Subclasses may override this."""
        dtype = _DTYPES[self.config.dtype]
        if self.config.jitter and self.training:
            x_TD = x_TD.to(dtype)
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        return _LinearIn.apply(x_TD, self.weight, dtype)

    def route(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        """Routes tokens by their logits. `valid_T` (bool) is False for padding (None: no padding).

        A subclass may override this method and return `RoutingDecision.of(...)`. `forward` then
        counts this decision's slots, for the expert bias (rule `sign`) and for the losses.
        """
        problem = kernel_problem(self.config, needs_scores=self.needs_scores)
        if problem == "" and self.replay is None and takes_kernels(logits_TE, self.config.use_kernels):
            return self._route_with_kernel(logits_TE, valid_T)
        return self._route_with_torch(logits_TE, valid_T)

    def _route_with_kernel(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        config = self.config
        sums = router_topk(
            logits_TE, config.topk, score=config.score, pre_softmax=config.pre_softmax,
            normalize=config.normalizes, scaling_factor=config.scaling_factor,
            bias_E=self.expert_bias if config.expert_bias else None, valid_T=valid_T,
        )  # fmt: skip
        kept_TK = kept_slots(None, valid_T, sums.expert_TK)
        options: dict[str, Any] = {"valid_T": valid_T, "sums": sums, "use_kernels": config.use_kernels}
        chosen = sums.expert_TK, sums.weights_TK
        return RoutingDecision(*chosen, None, None, sums.tokens_per_expert_E, kept_TK, **options)

    def _route_with_torch(self, logits_TE: Tensor, valid_T: Tensor | None) -> RoutingDecision:
        config = self.config
        raw_TE, log_TE, scores_TE = scores_torch(logits_TE, config.score)
        expert_TK = self._choose_experts(raw_TE.detach(), scores_TE.detach(), logits_TE.detach(), valid_T)
        if self.replay is not None:
            if config.has_free_number:
                rule = "cannot be combined with a number of experts per token that depends on the scores"
                raise ValueError(f"routing replay: {rule}. Fix: set top_p=1 and a score other than relu.")
            expert_TK = self.replay.apply(expert_TK, training=self.training)
        counted_TK = used_TK = self.counted(scores_TE.detach(), expert_TK)
        if config.num_null_experts:  # their slots are counted but never kept
            is_real_TK = expert_TK < config.num_experts
            used_TK = is_real_TK if counted_TK is None else counted_TK & is_real_TK
        weights_TK = self._weights(raw_TE, log_TE, logits_TE, expert_TK, used_TK)
        counts_E = count_kept(expert_TK, kept_slots(counted_TK, valid_T, expert_TK), config.num_outputs)
        kept_TK = kept_slots(used_TK, valid_T, expert_TK)
        options: dict[str, Any] = {"valid_T": valid_T, "use_kernels": config.use_kernels}
        options["counted_TK"] = counted_TK
        return RoutingDecision(expert_TK, weights_TK, scores_TE, logits_TE, counts_E, kept_TK, **options)

    @property
    def _counting_rules(self) -> tuple[BalanceRule, ...]:
        """Rules that count this pass: none in evaluation, or if the layer's other pass (recompute) counts."""
        return self.rules if self.training and is_counted_forward() else ()

    def count_by_score(self, tokens_per_expert_E: Tensor) -> None:
        """Counts a micro-batch's slots per expert [E]. As in the losses, score alone chooses the experts."""
        for rule in self._counting_rules:
            rule.count_by_score(self, tokens_per_expert_E)

    @torch.no_grad()
    def end_of_batch(self, group: ProcessGroup | None = None, *kinds: type[BalanceRule]) -> None:
        """Updates expert bias and loss state after a global batch's last forward pass.

        Args:
            group: all (data, context and tensor parallel) ranks that route tokens to these experts.
            kinds: rules to update (default: all). In Megatron, omit SignBias: Megatron updates the bias.
        """
        for rule in self.rules:
            if isinstance(rule, kinds or BalanceRule):
                rule.end_of_batch(self, group)

    def counted(self, scores_TE: Tensor, expert_TK: Tensor) -> Tensor | None:
        """Mask of the used slots, bool [T, K], including slots of null experts; None if all are used."""
        if SCORES[self.config.score].uses_positive:
            return scores_TE > 0
        if self.config.top_p < 1:
            return within_top_p(scores_TE.gather(1, expert_TK), self.config.top_p)
        return None

    def _weights(
        self, raw_TE: Tensor, log_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, used_TK: Tensor | None
    ) -> Tensor:
        config, is_softmax = self.config, not SCORES[self.config.score].per_expert

        def chosen(x_TE: Tensor, unused: float) -> Tensor:
            x_TK = x_TE.gather(1, expert_TK)
            return x_TK if used_TK is None else torch.where(used_TK, x_TK, unused)

        if config.assignment == "sinkhorn" and config.topk == 1 and is_softmax:
            # w = sigmoid(z), as in Megatron-Core: Clark et al. 2022 (arXiv:2202.01169), S-BASE
            weights_TK = logits_TE.sigmoid().gather(1, expert_TK)
        elif is_softmax and not config.pre_softmax:  # softmax over the chosen
            weights_TK = chosen(logits_TE, -1e30).softmax(dim=-1)
        elif config.normalizes and not is_softmax:
            # s / sum of the chosen s, already normalized; exact even if all of them underflow
            weights_TK = chosen(log_TE, -1e30).softmax(dim=-1)
        else:
            weights_TK = chosen(raw_TE, 0.0)
        if config.normalizes and is_softmax:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        # If a token uses no slot, the softmax above gave all of them equal weights.
        weights_TK = weights_TK if used_TK is None else weights_TK * used_TK
        return weights_TK * config.scaling_factor

    def _choose_experts(
        self, raw_TE: Tensor, scores_TE: Tensor, logits_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor:
        config = self.config
        num_tokens, device = raw_TE.size(0), raw_TE.device
        if SCORES[config.score].uses_positive:
            return torch.arange(config.num_experts, device=device).expand(num_tokens, -1)
        if config.assignment == "balanced":
            slots_N = torch.arange(num_tokens * config.topk, device=device)
            return (slots_N % config.num_experts).view(num_tokens, config.topk)
        if config.assignment == "zipf":
            sizes = {"num_experts": config.num_experts, "topk": config.topk}
            return zipf_experts(num_tokens, **sizes, exponent=config.zipf_exponent, device=device)
        if config.assignment == "sinkhorn":
            # Balanced over the batch only in training; in evaluation, tokens are routed independently.
            if self.training:
                logits_TE = sinkhorn(logits_TE, valid_T, group=self.microbatch_group)
            return logits_TE.topk(config.topk, dim=-1).indices
        if config.expert_bias:
            choice_TE = raw_TE + self.expert_bias
            for rule in self._counting_rules:
                rule.count_choice(self, choice_TE, valid_T)
        else:
            # Logits have the order of the scores, without ties at 0 and 1. Groups need the sums of scores.
            by_logit = SCORES[config.score].per_expert and not config.num_groups
            choice_TE = logits_TE if by_logit else scores_TE
        return best_experts(
            choice_TE, topk=config.topk, num_groups=config.num_groups, group_topk=config.group_topk,
            group_best=config.group_best,
        )  # fmt: skip


class _LinearIn(torch.autograd.Function):
    """x W^T, computed in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        # Saves `x` unconverted, as other functions do: autograd would keep an additional copy in `dtype`.
        ctx.save_for_backward(x_TD, weight_ED)
        if multiplies_16_bits(x_TD, weight_ED) and dtype == torch.float32:
            return torch.mm(x_TD, weight_ED.t(), out_dtype=dtype)
        return nn.functional.linear(x_TD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, weight_ED = ctx.saved_tensors
        dlogits_TE, dx_TD, dweight_ED = grads[0], None, None
        is_bf16 = x_TD.dtype == torch.bfloat16 and dlogits_TE.dtype == torch.float32
        if is_bf16 and multiplies_16_bits(x_TD, weight_ED):
            return *bf16_grads(dlogits_TE, x_TD, weight_ED), None
        if ctx.needs_input_grad[0]:
            dx_TD = (dlogits_TE @ weight_ED.to(dlogits_TE.dtype)).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            dweight_ED = (dlogits_TE.t() @ x_TD.to(dlogits_TE.dtype)).to(weight_ED.dtype)
        return dx_TD, dweight_ED, None


def bf16_grads(
    dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, *, mm: Callable[..., Tensor] = torch.mm
) -> tuple[Tensor, Tensor]:
    """Gradients of `x_TD` and `weight_ED` (both bf16), from bf16 products that are summed in fp32.
    `dlogits_TE` (fp32) is split into a sum of two bf16 terms."""
    # The sum of two bf16 values has 16 bits of an fp32 value's mantissa, twice as many as the results have.
    high_TE = dlogits_TE.bfloat16()
    halves_T2E = torch.cat([high_TE, (dlogits_TE - high_TE).bfloat16()], dim=1)
    dx_TD = mm(halves_T2E, torch.cat([weight_ED, weight_ED]))
    dweight_2ED = mm(halves_T2E.t(), x_TD, out_dtype=torch.float32)
    return dx_TD, dweight_2ED.unflatten(0, (2, -1)).sum(dim=0).bfloat16()


def kernel_problem(config: RouterConfig, *, needs_scores: bool) -> str:
    """Reason why kernels/topk.py cannot route with this config; "" if it can. `needs_scores`: see Router."""
    by_all = [name for name, loss in LOSSES.items() if loss.needs_scores]
    problems = {
        f"the router kernel supports only top-k, not {config.assignment}": config.assignment != "topk",
        "the router kernel does not support groups of experts": config.num_groups > 0,
        "the router kernel gives every token K experts": config.top_p < 1 or config.num_null_experts > 0,
        "quantile balancing needs the scores of all experts": config.finds_quantiles,
        f"the router kernel computes in fp32, not in {config.dtype}": config.dtype != "fp32",
        f"the router kernel does not support the score {config.score}": config.score not in KERNEL_SCORES,
        f"{' or '.join(by_all)} needs the scores of all experts": needs_scores,
    }
    return next((problem for problem, holds in problems.items() if holds), "")
