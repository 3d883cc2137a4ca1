"""Settings of a router and the rules between them. No torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from moe_exp.config.choices import SCORES
from moe_exp.config.errors import choices, divisors
from moe_exp.config.setting_types import as_given

# Values that the layers implement; choices.SCORES describes the score functions.
NAMES = {
    "score": ("softmax", "sigmoid", "sqrtsoftplus", "relu"),
    "assignment": ("topk", "sinkhorn", "balanced", "zipf"),
    "dtype": ("fp32", "fp64"),
    "bias_rule": ("sign", "quantile"),
}


@dataclass(frozen=True)
class RouterRules:
    """Settings of a router, which `problems` checks.

    Args:
        hidden_size: D.
        num_experts: E.
        topk: K.
        score: `softmax`, `sigmoid` (DeepSeek-V3), `sqrtsoftplus`, the square root of softplus, or `relu`
            (ReMoE, arXiv:2412.14711): a token uses the experts with positive logits, which are the weights;
            the loss `l1` adjusts their mean number to K.
        top_p: fraction of its scores for which a token uses the fewest of its K experts; 1: all K.
        num_null_experts: null experts in addition to E, which compute nothing: a token that chooses one uses
            one expert less. They are balanced like the others.
        pre_softmax: softmax over all experts before top-k (Switch, OLMoE), else over the chosen K (Mixtral).
        normalize: divide the chosen weights by their sum. None: as in the literature, True for sigmoid and
            sqrtsoftplus with K > 1, False for softmax. True with softmax is Qwen3's `norm_topk_prob`.
        scaling_factor: factor on the weights, after normalization.
        num_groups: number of expert groups for group-limited top-k; 0: none.
        group_topk: number of groups that a token may use.
        bias: learn a bias per expert, added to the logits (`add_bias_linear` of a TransformerConfig,
            ADD_BIAS_LINEAR).
        expert_bias: keep a bias per expert, added to the scores for the choice but not to the weights
            (on if ROUTER_BIAS_UPDATE_RATE is above 0, and with ROUTER_BIAS_RULE=quantile).
        bias_rule: how `end_of_batch` sets the expert bias (ROUTER_BIAS_RULE): `sign` by a step towards the
            mean load, `quantile` to the value that would have balanced the batch (router/balance.py).
        bias_update_rate: size of that step (ROUTER_BIAS_UPDATE_RATE).
        global_fractions: store the token fractions of the last global batch, for the loss `global_aux_loss`.
        dtype: `fp32` or `fp64`, for logits, scores and weights regardless of the input dtype.
        jitter: in training, multiply inputs by uniform noise in [1 - jitter, 1 + jitter] (Switch, sec. 2.2).
        assignment: `topk`, `sinkhorn` (AUX_LOSS_TYPE=sinkhorn), or for benchmarks `balanced` and `zipf`
            (FORCE_ROUTING), which ignore the scores.
        zipf_exponent: with `zipf`, expert e is chosen in proportion to (e + 1)^-exponent.
        use_kernels: use Triton kernels for routing, drops and row ordering; False: plain PyTorch; None:
            kernels on CUDA devices that support them. True on a CPU is for tests: it runs Triton's
            interpreter with TRITON_INTERPRET=1, else equivalent plain PyTorch.
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

    def problems(self, names: Mapping[str, str] | None = None) -> Iterator[str]:
        """Yields a line for each invalid value or combination.

        Args:
            names: names of the fields as settings, whose notation is then used for values; None: field names.
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
                yield line("bias_rule", f"cannot be combined with {other}", "set it to sign")
        elif is_sinkhorn and (self.num_groups or self.expert_bias):
            other = name["num_groups" if self.num_groups else "expert_bias"]
            yield line("assignment", f"balances loads and cannot be combined with {other}", "use one of them")
        yield from self._number_problems(name, given, line)
        yield from self._group_problems(name, line)

    def _number_problems(
        self, name: Mapping[str, str], given: Mapping[str, str], line: Callable[[str, str, str], str]
    ) -> Iterator[str]:
        """Checks combinations in which tokens use different numbers of experts."""
        is_relu = self.score == "relu"
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
                yield line(number[0], f"cannot be combined with {other}", "use one of them")

    def _group_problems(self, name: Mapping[str, str], line: Callable[[str, str, str], str]) -> Iterator[str]:
        groups, used, num_experts = self.num_groups, self.group_topk, self.num_experts
        if bool(groups) != bool(used):
            field, other = ("num_groups", "group_topk") if groups else ("group_topk", "num_groups")
            yield line(field, f"has no effect while {name[other]}=0", f"set both, or {name[field]}=0")
        if not groups or not used:
            return
        if num_experts % groups:
            fix = f"set {name['num_groups']} to {choices(divisors(num_experts, groups))}"
            yield line("num_groups", f"must divide {name['num_experts']}={num_experts}", fix)
        if not 1 <= used <= groups:
            fix = f"set {name['group_topk']} to at most {groups}"
            yield line("group_topk", f"must be from 1 to {name['num_groups']}={groups}", fix)
        elif num_experts % groups == 0 and self.topk > (reach := used * num_experts // groups):
            rule = f"must be at most {reach}, the experts in {name['group_topk']}={used} groups"
            least = -(-self.topk * groups // num_experts)
            fix = f"set {name['topk']} to at most {reach}, or {name['group_topk']} to at least {least}"
            yield line("topk", rule, fix)

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
        """Number of experts and null experts that the router scores."""
        return self.num_experts + self.num_null_experts

    @property
    def has_free_number(self) -> bool:
        """Whether the number of experts per token depends on scores; K is then a mean (ReLU) or a limit."""
        return self.score == "relu" or self.top_p < 1

    @property
    def chooses_by_score(self) -> bool:
        """Whether the chosen experts are those with the K highest scores."""
        return self.assignment == "topk" and not (self.num_groups or self.expert_bias)


@dataclass(frozen=True)
class RouterConfig(RouterRules):
    """Settings of a router, with the arguments of RouterRules.

    Raises:
        ValueError: if a value or combination is invalid.
    """

    def __post_init__(self) -> None:
        for line in self.problems():
            raise ValueError(line)
