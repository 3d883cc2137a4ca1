"""Settings of routers, with checks: `RouterConfig` for a single router, `RouterSettings` for a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from moe_exp.config.choices import LOSSES, NO_LOSS, SCORES, one_of
from moe_exp.config.errors import choices, divisors
from moe_exp.config.sections.attention import AttentionSettings
from moe_exp.config.setting_types import Losses, NonNegative, Numbers, NumExperts, Probability, Rate, as_given
from moe_exp.config.traits import experts, model

# Values that the layers implement.
NAMES = {
    "score": tuple(SCORES),
    "assignment": ("topk", "sinkhorn", "balanced", "zipf"),
    "dtype": ("fp32", "fp64"),
    "bias_rule": ("sign", "quantile"),
}


@dataclass(frozen=True)
class RouterRules:
    """Settings of a router; `problems` lists invalid settings.

    Args:
        hidden_size: model width D.
        num_experts: number of experts E; null experts are not counted.
        topk: number of experts per token (K).
        score: `softmax`, `sigmoid` (DeepSeek-V3), `sqrtsoftplus` (square root of softplus) or `relu` (ReMoE,
            arXiv:2412.14711). With `relu`, a token uses every expert whose logit is positive, and this
            logit is the expert's weight. The loss `l1` adjusts the mean number of experts per token to K.
        top_p: of its K experts, a token uses the fewest whose scores add up to this fraction; 1: all K.
        num_null_experts: number of null experts, which compute nothing and are not counted in E. For each
            null expert that a token chooses, the token uses one real expert fewer. Null experts are balanced
            like other experts.
        pre_softmax: apply the softmax to all experts before top-k (Switch, OLMoE); False: only to the chosen
            K (Mixtral).
        normalize: divide the chosen weights by their sum. None: True for sigmoid and sqrtsoftplus if
            K > 1, otherwise False, as in the literature. For softmax, True has the effect of Qwen3's
            `norm_topk_prob`.
        scaling_factor: the weights are multiplied by this factor after normalization.
        num_groups: number of expert groups for group-limited top-k; 0: none.
        group_topk: number of groups that a token may use.
        group_best: groups are ranked by the sum of their `group_best` highest scores; 0: K / group_topk.
        bias: learn a bias per expert, added to the logits (`add_bias_linear` of a TransformerConfig,
            ADD_BIAS_LINEAR).
        expert_bias: keep a bias per expert and add it to the scores when choosing experts. The weights do not
            include it. In a run, True if ROUTER_BIAS_UPDATE_RATE is above 0 or ROUTER_BIAS_RULE=quantile.
        bias_rule: how to set the expert bias after a batch (ROUTER_BIAS_RULE): `sign` changes it by one
            step, so that the load moves towards the mean; `quantile` sets it to the value that would have
            balanced the batch (router/balance.py).
        bias_update_rate: step size of the rule `sign` (ROUTER_BIAS_UPDATE_RATE).
        global_fractions: store each expert's share of the tokens of the last global batch, for the loss
            `global_aux_loss`.
        dtype: dtype of logits, scores and weights, whatever the input dtype: `fp32` or `fp64`.
        jitter: in training, multiply inputs by uniform noise in [1 - jitter, 1 + jitter] (Switch, sec. 2.2).
        assignment: how experts are chosen: `topk` or `sinkhorn` (AUX_LOSS_TYPE=sinkhorn); for benchmarks,
            `balanced` or `zipf` (FORCE_ROUTING), which ignore the scores.
        zipf_exponent: with `zipf`, expert e is chosen in proportion to (e + 1)^-exponent.
        use_kernels: True: use Triton kernels to route, drop and order rows; False: use plain PyTorch; None:
            use the kernels on CUDA devices that support them. On a CPU, True is only for tests: if
            TRITON_INTERPRET=1 is set, Triton's interpreter runs the kernels; otherwise, equivalent PyTorch
            code runs.
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
    group_best: int = 0
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

    def problems(self, names: Mapping[str, str] | None = None) -> Iterator[str]:
        """Yields a line for each invalid value or combination.

        Args:
            names: maps each field to the setting name shown in messages; None: messages show field names.
        """
        name = {field.name: (names or {}).get(field.name, field.name) for field in fields(self)}
        write = as_given if names else str
        given = {field: f"{name[field]}={write(getattr(self, field))}" for field in name}

        def line(field: str, rule: str, fix: str) -> str:
            return f"{given[field]}: {rule}. Fix: {fix}."

        for field, allowed in NAMES.items():
            if getattr(self, field) not in allowed:
                yield line(field, f"must be one of {', '.join(allowed)}", "use one of them")
        num_experts, topk = self.num_experts, self.topk
        if topk < 1:
            yield line("topk", "must be at least 1", f"set {name['topk']} to 1 to {num_experts}")
        if topk > num_experts:
            fix = f"set {name['topk']} to at most {num_experts}"
            yield line("topk", f"must be at most {given['num_experts']}", fix)
        if not 0 <= self.jitter < 1:
            yield line("jitter", "must be in [0, 1)", "use 0.01 as in Switch Transformers, or 0 for none")
        if self.zipf_exponent < 0:
            yield line("zipf_exponent", "must not be negative", "use 0 (uniform) or 1 (Zipf's law)")
        if not 0 < self.top_p <= 1:
            yield line("top_p", "must be in (0, 1]", "use 0.4, or 1 for all K experts")
        if self.num_null_experts < 0:
            yield line("num_null_experts", "must not be negative", "use 0 for none")
        is_sinkhorn = self.assignment == "sinkhorn"
        if topk == 1 and not is_sinkhorn:
            # the gradient of a constant weight is 0
            rule = f"with {given['topk']} the router weight is always 1, so the router would not learn"
            if self.score == "softmax" and not self.pre_softmax:
                yield line("pre_softmax", rule, f"set {name['pre_softmax']}={write(True)}")
            elif self.normalize:
                yield line("normalize", rule, f"set {name['normalize']}={write(False)}")

        # Balancing.
        if self.finds_quantiles:
            others = {
                f"{name['num_groups']}: each group has its own cutoff": bool(self.num_groups),
                f"{given['assignment']}, which already balances loads": is_sinkhorn,
                f"{given['topk']}: every token uses every expert": topk == num_experts,
            }
            for other in (other for other, is_set in others.items() if is_set):
                yield line("bias_rule", f"cannot be combined with {other}", "use sign instead of quantile")
        elif is_sinkhorn and (self.num_groups or self.expert_bias):
            other = name["num_groups" if self.num_groups else "expert_bias"]
            yield line("assignment", f"balances loads and cannot be combined with {other}", "use only one")
        yield from self._number_problems(name, given, line)
        yield from self._group_problems(name, line)

    def _number_problems(
        self, name: Mapping[str, str], given: Mapping[str, str], line: Callable[[str, str, str], str]
    ) -> Iterator[str]:
        """Checks for conflicts with settings that let the number of experts per token vary."""
        is_relu = self._uses_positive
        free = {"score": is_relu, "top_p": self.top_p < 1, "num_null_experts": self.num_null_experts > 0}
        number = [field for field, is_set in free.items() if is_set]
        if number:
            others = {
                given["assignment"]: self.assignment != "topk",
                name["num_groups"]: self.num_groups > 0,
                given["bias_rule"]: self.finds_quantiles and self.top_p < 1,
                name["expert_bias"]: self.expert_bias and is_relu,
                given["normalize"]: bool(self.normalize) and is_relu,
                name[number[-1]]: is_relu and len(number) > 1,
            }
            for other in (other for other, is_set in others.items() if is_set):
                yield line(number[0], f"cannot be combined with {other}", "use only one of the two")

    def _group_problems(self, name: Mapping[str, str], line: Callable[[str, str, str], str]) -> Iterator[str]:
        groups, used, num_experts = self.num_groups, self.group_topk, self.num_experts
        if bool(groups) != bool(used):
            field, other = ("num_groups", "group_topk") if groups else ("group_topk", "num_groups")
            yield line(field, f"has no effect while {name[other]}=0", f"set both, or {name[field]}=0")
        if self.group_best > (num_experts // groups if groups else 0):
            rule = f"must be at most the number of experts in a group ({name['num_groups']}={groups})"
            yield line("group_best", rule, f"set {name['group_best']}=0")
        if not groups or not used:
            return
        if num_experts % groups:
            fix = f"set {name['num_groups']} to {choices(divisors(num_experts, groups))}"
            yield line("num_groups", f"must divide {name['num_experts']}={num_experts}", fix)
        if not 1 <= used <= groups:
            fix = f"set {name['group_topk']} to at most {groups}"
            yield line("group_topk", f"must be from 1 to {name['num_groups']}={groups}", fix)
        elif num_experts % groups == 0 and self.topk > (reach := used * num_experts // groups):
            rule = f"must be at most {reach}, the number of experts in {name['group_topk']}={used} groups"
            least = -(-self.topk * groups // num_experts)
            fix = f"set {name['topk']} to at most {reach}, or {name['group_topk']} to at least {least}"
            yield line("topk", rule, fix)

    @property
    def _uses_positive(self) -> bool:
        # an unknown score is a problem of its own
        return self.score in SCORES and SCORES[self.score].uses_positive

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
        """Number of experts that the router scores, including null experts."""
        return self.num_experts + self.num_null_experts

    @property
    def has_free_number(self) -> bool:
        """Whether the scores decide how many experts a token uses (at most K; with ReLU, K on average)."""
        return self._uses_positive or self.top_p < 1

    @property
    def chooses_by_score(self) -> bool:
        """Whether the K experts with the highest scores are chosen."""
        return self.assignment == "topk" and not (self.num_groups or self.expert_bias)


@dataclass(frozen=True)
class RouterConfig(RouterRules):
    """Settings of a router; takes the arguments of RouterRules.

    Raises:
        ValueError: if a value or combination is invalid.
    """

    def __post_init__(self) -> None:
        for line in self.problems():
            raise ValueError(line)


# Fields of RouterRules and the settings that provide them.
_ROUTER = {
    "hidden_size": "hidden_size", "num_experts": "num_experts", "topk": "topk", "score": "router_score",
    "top_p": "router_top_p", "num_null_experts": "null_experts", "pre_softmax": "router_pre_softmax",
    "num_groups": "num_router_groups", "group_topk": "router_group_topk", "bias_rule": "router_bias_rule",
    "group_best": "router_group_best",
}  # fmt: skip


class RouterSettings(AttentionSettings):
    """Settings of the section Mixture of experts: USE_MOE, the router and its losses."""

    use_moe: bool = model(True, "train a mixture of experts; false: a dense model")
    num_experts: NumExperts = experts(8, "routed experts per MoE layer")
    topk: NumExperts = experts(1, "experts per token")
    null_experts: NonNegative = experts(
        0,
        "number of null experts, which compute nothing; NUM_EXPERTS does not include them. With balanced "
        "loads, a token uses TOPK * NUM_EXPERTS / (NUM_EXPERTS + NULL_EXPERTS) experts on average",
    )
    router_score: Annotated[str, one_of(SCORES)] = experts(
        "softmax",
        "score function of the router; relu: a token uses all experts with positive logits, and "
        "AUX_LOSS_TYPE=l1 adjusts the mean number of experts per token to TOPK",
    )
    router_top_p: float = experts(
        1.0,
        "top-p routing: of a token's TOPK experts, use the fewest whose scores add up to at least this "
        "fraction; 1: use all",
        gt=0,
        le=1,
    )
    router_pre_softmax: bool = experts(
        True, "apply softmax to all logits before top-k; false: only to the top-k logits"
    )
    router_normalize: Literal["auto", "true", "false"] = experts(
        "auto",
        "divide a token's router weights by their sum; auto: only if ROUTER_SCORE is "
        + " or ".join(name for name, score in SCORES.items() if score.normalizes)
        + ", and TOPK > 1",
    )
    router_scaling_factor: float = experts(1.0, "factor applied to a token's router weights", gt=0)
    router_dtype: Literal["fp32", "fp64"] = experts(
        "fp32", "data type in which the router computes logits, scores and weights"
    )
    router_jitter: Probability = experts(
        0.0, "router input jitter j: in training, multiply the input by random factors from [1-j, 1+j]"
    )
    router_bias_update_rate: Rate = experts(
        0.0,
        "with ROUTER_BIAS_RULE=sign: step size of expert biases (aux-loss-free balancing); 0: no bias",
    )
    router_bias_rule: Literal["sign", "quantile"] = experts(
        "sign",
        "how expert biases change after each iteration; sign: by ROUTER_BIAS_UPDATE_RATE towards equal "
        "loads; quantile: to the values that would have made this iteration's loads equal (no step size)",
    )
    num_router_groups: NonNegative = experts(0, "number of expert groups for group-limited top-k; 0: none")
    router_group_topk: NonNegative = experts(
        0, "number of expert groups that a token may use (if NUM_ROUTER_GROUPS is set)"
    )
    router_group_best: NonNegative = experts(
        0, "rank each group by the sum of this many of its highest scores; 0: TOPK / ROUTER_GROUP_TOPK"
    )
    force_routing: Literal["none", "balanced", "zipf"] = experts(
        "none",
        "replace the router's choice, for benchmarks; balanced: equal loads; zipf: loads that follow "
        "Zipf's law",
    )
    aux_loss_type: Losses = experts(
        "aux_loss",
        "one or more load-balancing losses, separated by commas: "
        + ", ".join(f"{name} ({loss.text})" if loss.text else name for name, loss in LOSSES.items())
        + "; or, instead of losses: sinkhorn (Sinkhorn routing) or none",
    )
    aux_loss_coeff: Numbers = experts(
        "0.01",
        "weight of the load-balancing losses, or a comma-separated list with one weight per loss",
        costs=False,
    )
    z_loss_coeff: Rate = experts(0.0, "weight of the router z-loss")

    @property
    def num_router_outputs(self) -> int:
        """Number of experts plus null experts."""
        return self.num_experts + self.null_experts

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts per token with balanced loads; with ROUTER_TOP_P, the mean may be lower."""
        if self.null_experts:
            return self.topk * self.num_experts / self.num_router_outputs
        return self.topk

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers have a bias per expert."""
        return self.router_bias_update_rate > 0 or self.router_bias_rule == "quantile"

    @property
    def router_weights_sum(self) -> float | None:
        """The sum of a token's router weights, or None if this sum differs between tokens."""
        score = SCORES[self.router_score]
        if score.uses_positive or self.router_top_p < 1 or self.null_experts:
            return None  # 0 for a token without experts
        by_default = score.normalizes and self.topk > 1
        normalized = {"auto": by_default, "true": True, "false": False}[self.router_normalize]
        softmax_of_chosen = not self.router_pre_softmax or self.topk == self.num_experts
        sums_to_1 = softmax_of_chosen and not score.per_expert and self.aux_loss_type != "sinkhorn"
        return self.router_scaling_factor if normalized or sums_to_1 else None

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Weight of each load-balancing loss; a single weight in AUX_LOSS_COEFF applies to all losses."""
        kinds = [kind for kind in self.aux_loss_type.split(",") if kind not in NO_LOSS]
        coeffs = [float(coeff) for coeff in self.aux_loss_coeff.split(",")]
        return dict(zip(kinds, coeffs + coeffs[-1:] * len(kinds), strict=False))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.use_moe:
            yield from self._router_problems()
            yield from self._balancing_problems()

    def _router_problems(self) -> Iterator[str]:
        is_quantile, is_sinkhorn = self.router_bias_rule == "quantile", self.aux_loss_type == "sinkhorn"
        is_forced = self.force_routing != "none"
        assignment = self.force_routing if is_forced else "sinkhorn" if is_sinkhorn else "topk"
        rules = RouterRules(
            **{field: getattr(self, name) for field, name in _ROUTER.items()},
            normalize={"auto": None, "true": True, "false": False}[self.router_normalize],
            expert_bias=self.has_expert_bias,
            assignment=assignment,
        )
        others = {
            "normalize": "router_normalize",
            "expert_bias": "router_bias_rule" if is_quantile else "router_bias_update_rate",
            "assignment": "aux_loss_type" if assignment == "sinkhorn" else "force_routing",
        }
        yield from rules.problems({field: name.upper() for field, name in (_ROUTER | others).items()})

    def _balancing_problems(self) -> Iterator[str]:
        """Checks the load-balancing settings that RouterRules does not cover."""
        num_losses, num_coeffs = len(self.aux_loss_type.split(",")), len(self.aux_loss_coeff.split(","))
        coeff, is_relu = self.balancing_losses.get("l1"), SCORES[self.router_score].uses_positive
        return self.broken(
            (num_coeffs not in (1, num_losses), "aux_loss_coeff",
             f"has {num_coeffs} weights, but {num_losses} losses are in AUX_LOSS_TYPE={self.aux_loss_type}",
             "give one weight for all losses, or one per loss"),
            (self.router_bias_rule == "quantile" and self.router_bias_update_rate, "router_bias_update_rate",
             "has no effect with ROUTER_BIAS_RULE=quantile", "set ROUTER_BIAS_UPDATE_RATE=0"),
            (self.aux_loss_type == "sinkhorn" and self.force_routing != "none", "force_routing",
             "cannot be combined with AUX_LOSS_TYPE=sinkhorn: both choose the experts",
             "set FORCE_ROUTING=none or AUX_LOSS_TYPE=none"),
            (is_relu and not coeff, "router_score",
             "requires the loss l1, which limits the number of experts per token",
             "set AUX_LOSS_TYPE=l1, and AUX_LOSS_COEFF=1e-8 as its initial weight"),
            (coeff is not None and not is_relu, "aux_loss_type",
             "l1 requires ROUTER_SCORE=relu", "set ROUTER_SCORE=relu, or another AUX_LOSS_TYPE"),
        )  # fmt: skip
