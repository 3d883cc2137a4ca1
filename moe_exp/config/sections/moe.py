"""MoE layer settings: position, expert sizes, capacity, router and load-balancing losses.

The remaining settings of the section Mixture of experts are in sections/backends.py.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from moe_exp.config.choices import LOSSES, NO_LOSS, SCORES, one_of
from moe_exp.config.router import RouterRules
from moe_exp.config.sections.model import ModelSettings
from moe_exp.config.setting_types import (
    LayerPattern,
    LossKinds,
    NonNegative,
    Numbers,
    NumExperts,
    OptionalWidth,
    Probability,
    Rate,
    experts,
    layers_of_pattern,
    model,
)

# Fields of RouterRules and the settings that provide them.
_ROUTER = {
    "hidden_size": "hidden_size", "num_experts": "num_experts", "topk": "topk", "score": "router_score",
    "top_p": "router_top_p", "num_null_experts": "null_experts", "pre_softmax": "router_pre_softmax",
    "num_groups": "num_router_groups", "group_topk": "router_group_topk", "bias_rule": "router_bias_rule",
}  # fmt: skip


class ExpertSettings(ModelSettings):
    """Settings of the section Mixture of experts, up to the router's losses."""

    use_moe: bool = model(True, "train a mixture of experts; false: a dense model")
    num_experts: NumExperts = experts(8, "routed experts per MoE layer")
    topk: NumExperts = experts(1, "experts per token")
    null_experts: NonNegative = experts(
        0,
        "null experts, which compute nothing, in addition to NUM_EXPERTS. With balanced loads, a token uses "
        "TOPK * NUM_EXPERTS / (NUM_EXPERTS + NULL_EXPERTS) experts on average",
    )
    moe_type: Literal["moe", "dmoe"] = experts(
        "dmoe", "type of the MoE layers; moe: experts drop tokens above their capacity; dmoe: dropless"
    )
    moe_ffn_hidden_size: OptionalWidth = experts(0, "width of each routed expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = experts(
        "1", "every n-th layer is an MoE layer, or a pattern (1: MoE, 0: dense): '[0]*3+[1]*21', '0,1,1,1'"
    )
    first_k_dense: NonNegative = experts(0, "number of dense layers at the start of the model")
    shared_expert_size: OptionalWidth = experts(
        0, "width of the shared expert, which processes every token; 0: no shared expert"
    )
    shared_expert_gate: bool = experts(
        False, "scale the shared expert's output with a sigmoid gate per token"
    )
    moe_latent_size: OptionalWidth = experts(
        0,
        "latent width (LatentMoE): a shared projection reduces tokens to this width before dispatch and "
        "another restores it after combine; 0: none",
    )
    capacity_factor: Rate = experts(
        0.0, "expert capacity relative to an equal share of the tokens (MOE_TYPE=moe); 0: 1.0"
    )
    min_capacity: NonNegative = experts(0, "minimum expert capacity (tokens per micro-batch; MOE_TYPE=moe)")
    pad_to_capacity: bool = experts(
        True, "pad every expert's input to its capacity, for fixed shapes (MOE_TYPE=moe)"
    )
    drop_policy: Literal["probs", "position"] = experts(
        "probs",
        "which tokens above the capacity are dropped (MOE_TYPE=moe); probs: lowest router weights; "
        "position: last in the sequence",
    )
    token_rounding: NonNegative = experts(
        0,
        "in training, round each expert's tokens per micro-batch down to a multiple of this number, such as "
        "128, so that the grouped GEMM has full tiles; drops the tokens with the lowest router weights "
        "(MOE_TYPE=dmoe); 0: off",
    )
    router_score: Annotated[str, one_of(SCORES)] = experts(
        "softmax",
        "score function of the router; relu: a token uses all experts with positive logits, and "
        "AUX_LOSS_TYPE=l1 adjusts their mean number to TOPK",
    )
    router_top_p: float = experts(
        1.0,
        "top-p routing: use the fewest of a token's TOPK experts whose scores add up to this fraction; "
        "1: use all",
        gt=0,
        le=1,
    )
    router_pre_softmax: bool = experts(True, "apply softmax before top-k; false: only over the top-k logits")
    router_normalize: Literal["auto", "true", "false"] = experts(
        "auto",
        "divide a token's router weights by their sum; auto: with "
        + " and ".join(name for name, score in SCORES.items() if score.normalizes)
        + " when TOPK > 1",
    )
    router_scaling_factor: float = experts(1.0, "scaling factor of the router weights", gt=0)
    router_dtype: Literal["fp32", "fp64"] = experts(
        "fp32", "data type in which the router computes logits, scores and weights"
    )
    router_jitter: Probability = experts(
        0.0, "router input jitter j: in training, multiply the input by random factors from [1-j, 1+j]"
    )
    router_bias_update_rate: Rate = experts(
        0.0,
        "step size of the expert bias (aux-loss-free balancing); 0: off, unless ROUTER_BIAS_RULE=quantile",
    )
    router_bias_rule: Literal["sign", "quantile"] = experts(
        "sign",
        "update of the expert bias after each iteration; sign: move by ROUTER_BIAS_UPDATE_RATE towards equal "
        "load; quantile: set to the value that would have balanced the iteration (no step size)",
    )
    num_router_groups: NonNegative = experts(0, "number of expert groups for group-limited top-k; 0: none")
    router_group_topk: NonNegative = experts(
        0, "number of groups that a token may use (with NUM_ROUTER_GROUPS)"
    )
    force_routing: Literal["none", "balanced", "zipf"] = experts(
        "none",
        "replace the router's choice, for benchmarks; balanced: equal loads; zipf: loads that follow "
        "Zipf's law",
    )
    aux_loss_type: LossKinds = experts(
        "aux_loss",
        "load-balancing losses, one or a comma-separated list: "
        + ", ".join(f"{name} ({loss.text})" if loss.text else name for name, loss in LOSSES.items())
        + "; or sinkhorn (Sinkhorn routing), or none",
    )
    aux_loss_coeff: Numbers = experts(
        "0.01",
        "weight of the load-balancing losses, or a comma-separated list with one per loss",
        costs=False,
    )
    z_loss_coeff: Rate = experts(0.0, "weight of the router z-loss")

    @property
    def moe_layers(self) -> list[bool]:
        """Flag per layer, true for MoE layers. A pattern keeps its length even if it is not NUM_LAYERS."""
        if not self.use_moe:
            return [False] * self.num_layers
        return list(layers_of_pattern(self.moe_layer_freq, self.num_layers, self.first_k_dense))

    @property
    def expert_ffn_size(self) -> int:
        """Width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_ffn_setting(self) -> str:
        """Setting that provides `expert_ffn_size`."""
        return "moe_ffn_hidden_size" if self.moe_ffn_hidden_size else "ffn_hidden_size"

    @property
    def expert_hidden_size(self) -> int:
        """Width of a routed expert's input and output: MOE_LATENT_SIZE, or the model's."""
        return self.moe_latent_size or self.hidden_size

    @property
    def expert_hidden_setting(self) -> str:
        """Setting that provides `expert_hidden_size`."""
        return "moe_latent_size" if self.moe_latent_size else "hidden_size"

    @property
    def expert_capacity_factor(self) -> float | None:
        """CAPACITY_FACTOR, or None for dropless layers."""
        return None if self.moe_type == "dmoe" else self.capacity_factor or 1.0

    @property
    def num_router_outputs(self) -> int:
        """Number of experts and null experts."""
        return self.num_experts + self.null_experts

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts per token with balanced loads; an upper bound with ROUTER_TOP_P."""
        if self.null_experts:
            return self.topk * self.num_experts / self.num_router_outputs
        return self.topk

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers have a bias per expert."""
        return self.router_bias_update_rate > 0 or self.router_bias_rule == "quantile"

    @property
    def router_weights_sum(self) -> float | None:
        """The sum of a token's router weights, or None if it depends on the token."""
        balanced_by_sinkhorn = self.aux_loss_type == "sinkhorn"
        normalized = self.router_normalize == "true" or (
            self.router_normalize == "auto" and SCORES[self.router_score].normalizes and self.topk > 1
        )
        if self.router_score == "relu" or self.router_top_p < 1 or self.null_experts:
            return None  # 0 for a token without experts
        softmax_of_chosen = not self.router_pre_softmax or self.topk == self.num_experts
        if normalized or (self.router_score == "softmax" and softmax_of_chosen and not balanced_by_sinkhorn):
            return self.router_scaling_factor
        return None

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Weight of each load-balancing loss. The last weight repeats for further losses."""
        kinds = [kind for kind in self.aux_loss_type.split(",") if kind not in NO_LOSS]
        coeffs = [float(coeff) for coeff in self.aux_loss_coeff.split(",")]
        return dict(zip(kinds, coeffs + coeffs[-1:] * len(kinds), strict=False))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.use_moe:
            yield from self._layer_problems()
            yield from self._size_problems()
            yield from self._capacity_problems()
            yield from self._router_problems()
            yield from self._balancing_problems()

    def _layer_problems(self) -> Iterator[str]:
        """Checks MOE_LAYER_FREQ and FIRST_K_DENSE."""
        layers = self.moe_layers
        if len(layers) != self.num_layers:
            rule = f"has {len(layers)} layers, but NUM_LAYERS={self.num_layers}"
            fix = f"give a number, or a pattern of {self.num_layers} zeros and ones"
            yield self.problem("moe_layer_freq", rule, fix)
        elif not any(layers):
            rule = f"leaves no MoE layer among NUM_LAYERS={self.num_layers}"
            if self.first_k_dense:
                fix = f"set FIRST_K_DENSE to at most {self.num_layers - 1}, or USE_MOE=false"
                yield self.problem("first_k_dense", rule, fix)
            else:
                yield self.problem("moe_layer_freq", rule, "add a 1 to the pattern, or set USE_MOE=false")

    def _size_problems(self) -> Iterator[str]:
        """Checks the shared expert and the latent width."""
        latent = self.moe_latent_size
        return self.broken(
            (self.add_bias_linear and self.shared_expert_size, "add_bias_linear",
             "Megatron's shared expert has no bias", "set ADD_BIAS_LINEAR=false or SHARED_EXPERT_SIZE=0"),
            (self.shared_expert_gate and not self.shared_expert_size, "shared_expert_gate",
             "has no effect without a shared expert", "set SHARED_EXPERT_SIZE, or SHARED_EXPERT_GATE=false"),
            (latent > self.hidden_size, "moe_latent_size",
             f"must be at most HIDDEN_SIZE={self.hidden_size}",
             f"set MOE_LATENT_SIZE to at most {self.hidden_size}, or 0 for none"),
            (latent and self.parametrization == "mup", "parametrization",
             f"cannot be combined with MOE_LATENT_SIZE={latent}: no rule covers its projections",
             "set MOE_LATENT_SIZE=0"),
        )  # fmt: skip

    def _capacity_problems(self) -> Iterator[str]:
        for name in ("capacity_factor", "min_capacity"):
            if self.moe_type == "dmoe" and getattr(self, name):
                fix = f"set MOE_TYPE=moe, or {name.upper()}=0"
                yield self.problem(name, "only applies to MOE_TYPE=moe, MOE_TYPE=dmoe has no capacity", fix)
        if self.moe_type == "moe" and self.token_rounding:
            fix = "set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0"
            yield self.problem(
                "token_rounding",
                "only applies to MOE_TYPE=dmoe, with MOE_TYPE=moe the capacity sets the number of rows",
                fix,
            )

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
        coeff, is_relu = self.balancing_losses.get("l1"), self.router_score == "relu"
        return self.broken(
            (num_coeffs not in (1, num_losses), "aux_loss_coeff",
             f"{num_coeffs} weights for {num_losses} losses in AUX_LOSS_TYPE={self.aux_loss_type}",
             "give one weight, or one per loss"),
            (self.router_bias_rule == "quantile" and self.router_bias_update_rate, "router_bias_update_rate",
             "ROUTER_BIAS_RULE=quantile has no step size", "set it to 0"),
            (self.aux_loss_type == "sinkhorn" and self.force_routing != "none", "force_routing",
             "cannot be combined with AUX_LOSS_TYPE=sinkhorn: both choose the experts",
             "set one of them to none"),
            (is_relu and not coeff, "router_score",
             "requires the loss l1, which limits the experts per token",
             "set AUX_LOSS_TYPE=l1 and AUX_LOSS_COEFF=1e-8, the initial weight"),
            (coeff is not None and not is_relu, "aux_loss_type",
             "l1 requires ROUTER_SCORE=relu", "set ROUTER_SCORE=relu, or another AUX_LOSS_TYPE"),
        )  # fmt: skip
