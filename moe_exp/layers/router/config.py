"""Settings of a router, and whether its kernel supports them. Shape suffixes in `moe_exp.layers`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_exp.config.choices import LOSSES, SCORES
from moe_exp.layers.kernels.scores import KERNEL_SCORES
from moe_exp.layers.kernels.topk import SCORE_FUNCTIONS

BIAS_RULES = ("sign", "quantile")
ASSIGNMENTS = ("topk", "sinkhorn", "balanced", "zipf")
ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class RouterConfig:
    """Settings of a router.

    Args:
        hidden_size: D.
        num_experts: E.
        topk: K.
        score: `softmax`, `sigmoid` (DeepSeek-V3), `sqrtsoftplus`, the square root of softplus, or `relu`
            (ReMoE, arXiv:2412.14711): a token uses the experts of positive logit, with the logits as weights;
            the loss `l1` brings their mean number to K.
        top_p: a token uses no more of its K experts than it needs for this part of its scores; 1: all K.
        num_null_experts: null experts beside the E, which compute nothing: a token that chooses one uses an
            expert less. They are balanced like the others.
        pre_softmax: softmax over all experts before top-k (Switch, OLMoE), else over the chosen K (Mixtral).
        normalize: divide the chosen weights by their sum. None: as in the literature, True for sigmoid and
            sqrtsoftplus with K > 1, False for softmax. True with softmax is Qwen3's `norm_topk_prob`.
        scaling_factor: factor on the weights, after normalization.
        num_groups: groups of experts for group-limited top-k; 0 for none.
        group_topk: groups that a token may use.
        bias: learn a bias per expert, added to the logits (`add_bias_linear` of a TransformerConfig,
            ADD_BIAS_LINEAR).
        expert_bias: keep a bias per expert, added to the scores for the choice but not to the weights
            (on if ROUTER_BIAS_UPDATE_RATE is above 0, and with ROUTER_BIAS_RULE=quantile).
        bias_rule: how `end_of_batch` sets the expert bias (ROUTER_BIAS_RULE): `sign` by a step towards the
            mean load, `quantile` to the value that would have balanced the batch (router/quantile.py).
        bias_update_rate: that step (ROUTER_BIAS_UPDATE_RATE).
        global_fractions: keep the token fractions of the last global batch, for the loss `global_aux_loss`.
        dtype: `fp32` or `fp64`, of logits, scores and weights whatever the input dtype.
        jitter: in training, multiply inputs by uniform noise in [1 - jitter, 1 + jitter] (Switch, sec. 2.2).
        assignment: `topk`, `sinkhorn` (AUX_LOSS_TYPE=sinkhorn), or for benchmarks `balanced` and `zipf`
            (FORCE_ROUTING), which ignore the scores.
        zipf_exponent: with `zipf`, expert e is chosen in proportion to (e + 1)^-exponent.
        use_kernels: use Triton kernels for the router, drops and row orders, False: plain torch. None:
            kernels on a CUDA device that can run them. True on a CPU only makes sense in tests: it runs
            Triton's interpreter with TRITON_INTERPRET=1, else the kernels' plain-torch twins.

    Raises:
        ValueError: for an invalid value or combination.
    """

    hidden_size: int
    num_experts: int
    topk: int
    score: str = "softmax"
    top_p: float = 1.0
    num_null_experts: int = 0
    pre_softmax: bool = True
    normalize: bool | None = None
    scaling_factor: float = 1.0
    num_groups: int = 0
    group_topk: int = 0
    bias: bool = False
    expert_bias: bool = False
    bias_rule: str = "sign"
    bias_update_rate: float = 1e-3
    global_fractions: bool = False
    dtype: str = "fp32"
    jitter: float = 0.0
    assignment: str = "topk"
    zipf_exponent: float = 1.0
    use_kernels: bool | None = None

    def __post_init__(self) -> None:
        for field, choices in (
            ("score", ("softmax", *SCORE_FUNCTIONS, "relu")),
            ("assignment", ASSIGNMENTS),
            ("dtype", tuple(ROUTER_DTYPES)),
            ("bias_rule", BIAS_RULES),
        ):
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(
                    f"{field}={value}: is not one of {', '.join(choices)}. Fix: use one of them."
                )
        if not 1 <= self.topk <= self.num_experts:
            rule = f"is not between 1 and num_experts={self.num_experts}"
            raise ValueError(
                f"topk={self.topk}: {rule}. Fix: choose 1 to {self.num_experts} experts per token."
            )
        if not 0 <= self.jitter < 1:
            raise ValueError(
                f"jitter={self.jitter}: is not in [0, 1). Fix: Switch Transformers used 0.01; 0 for none."
            )
        if self.zipf_exponent < 0:
            raise ValueError(
                f"zipf_exponent={self.zipf_exponent}: is negative. Fix: 0 is uniform, 1 is Zipf's law."
            )
        if self.finds_quantiles and (self.num_groups or self.topk == self.num_experts):
            rule = "groups have cutoffs of their own" if self.num_groups else "every token gets every expert"
            raise ValueError(f"bias_rule=quantile: {rule}. Fix: use bias_rule=sign, or no expert bias.")
        self._check_weights()
        self._check_number()
        if self.num_groups:
            self._check_groups()
        if self.assignment == "sinkhorn" and (self.num_groups or self.expert_bias):
            raise ValueError(
                "assignment=sinkhorn: balances by itself, without groups or expert bias. Fix: use"
                " assignment=topk, or neither."
            )

    def _check_weights(self) -> None:
        constant = self.topk == 1 and (self.normalize or (self.score == "softmax" and not self.pre_softmax))
        if constant and self.assignment != "sinkhorn":
            field = "normalize=True" if self.normalize else "pre_softmax=False"
            raise ValueError(
                f"{field}: with topk=1 every weight is 1 and the router would not learn. Fix: use"
                " pre_softmax=True, normalize=False."
            )

    def _check_number(self) -> None:
        """Rules by which tokens use different numbers of experts."""
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: is not in (0, 1]. Fix: use 0.4, or 1 for all K experts.")
        if self.num_null_experts < 0:
            raise ValueError(f"num_null_experts={self.num_null_experts}: is negative. Fix: use 0 for none.")
        rules = {
            "score=relu": self.score == "relu",
            f"top_p={self.top_p}": self.top_p < 1,
            f"num_null_experts={self.num_null_experts}": self.num_null_experts > 0,
        }
        others = {
            f"assignment={self.assignment}": self.assignment != "topk",
            "num_groups": self.num_groups > 0,
            "bias_rule=quantile": self.finds_quantiles and self.top_p < 1,
            "expert_bias": self.expert_bias and self.score == "relu",
            "normalize": bool(self.normalize) and self.score == "relu",
            "another rule for the number of experts": self.score == "relu" and sum(rules.values()) > 1,
        }
        for rule, is_set in rules.items():
            for other, is_other in others.items():
                if is_set and is_other:
                    raise ValueError(f"{rule}: does not go with {other}. Fix: use one of the two.")

    def _check_groups(self) -> None:
        groups, used = self.num_groups, self.group_topk
        if self.num_experts % groups:
            raise ValueError(
                f"num_groups={groups}: does not divide num_experts={self.num_experts}. Fix: use a divisor."
            )
        if not 1 <= used <= groups:
            raise ValueError(
                f"group_topk={used}: is not between 1 and num_groups={groups}. Fix: choose how many groups a"
                " token may use."
            )
        if self.topk > used * (self.num_experts // groups):
            available = used * (self.num_experts // groups)
            raise ValueError(
                f"topk={self.topk}: {used} of {groups} groups have {available} experts. Fix: raise group_topk"
                " or lower topk."
            )

    @property
    def normalizes(self) -> bool:
        """Whether the chosen weights are divided by their sum."""
        return (SCORES[self.score].normalizes and self.topk > 1) if self.normalize is None else self.normalize

    @property
    def finds_quantiles(self) -> bool:
        """Whether the expert bias is set by quantile balancing."""
        return self.expert_bias and self.bias_rule == "quantile"

    @property
    def num_outputs(self) -> int:
        """Experts and null experts: what the router scores."""
        return self.num_experts + self.num_null_experts

    @property
    def has_free_number(self) -> bool:
        """Whether the scores decide how many slots a token has: K is then a mean (ReLU) or a limit."""
        return self.score == "relu" or self.top_p < 1

    @property
    def chooses_by_score(self) -> bool:
        """Whether the chosen experts are the K of highest score."""
        return self.assignment == "topk" and not (self.num_groups or self.expert_bias)


def kernel_problem(config: RouterConfig, *, needs_scores: bool) -> str:
    """Why kernels/topk.py cannot route with this config, or "". `needs_scores`: see Router."""
    if config.assignment != "topk":
        return f"it has top-k alone, not {config.assignment}"
    if config.num_groups:
        return "it has no groups of experts"
    if config.top_p < 1 or config.num_null_experts:
        return "every token has K experts there"
    if config.finds_quantiles:
        return "quantile balancing needs the scores of all experts"
    if config.dtype != "fp32":
        return f"it computes in fp32, not in {config.dtype}"
    if config.score not in KERNEL_SCORES:
        return f"it has no score {config.score}"
    by_all = [name for name, loss in LOSSES.items() if loss.needs_scores]
    return f"{' or '.join(by_all)} needs the scores of all experts" if needs_scores else ""
