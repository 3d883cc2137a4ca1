"""Settings of MoE layers (position, expert sizes, capacity), backends, token dispatcher, FP8 and upcycling.

Router settings are in sections/router.py.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from moe_exp.config.choices import DISPATCHERS, EXPERT_BACKENDS, one_of
from moe_exp.config.errors import choices, divisors, multiples, problem
from moe_exp.config.sections.router import RouterSettings
from moe_exp.config.setting_types import LayerPattern, NonNegative, OptionalWidth, PathText, Positive, Rate
from moe_exp.config.traits import experts, model


class ExpertSettings(RouterSettings):
    """Settings of the section Mixture of experts: MOE_TYPE and the settings after it."""

    moe_type: Literal["moe", "dmoe"] = experts(
        "dmoe", "type of the MoE layers; moe: experts drop tokens above their capacity; dmoe: dropless"
    )
    moe_ffn_hidden_size: OptionalWidth = experts(0, "width of each routed expert; 0: FFN_HIDDEN_SIZE")
    moe_layer_freq: LayerPattern = experts(
        "1",
        "which layers are MoE: a number (2: every second layer, beginning with the first), a ratio (1:3: one "
        "MoE layer, then three dense layers, repeated), or a list of 1 (MoE) and 0 (dense), such as "
        "'[0]*3+[1]*21' or '0,1,1,1'",
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
        "latent width (LatentMoE): a shared projection reduces tokens to this width before dispatch, and "
        "another projection restores the model width after combine; 0: none",
    )
    capacity_factor: Rate = experts(
        0.0, "expert capacity relative to an equal share of the tokens (MOE_TYPE=moe); 0: same as 1.0"
    )
    min_capacity: NonNegative = experts(0, "minimum expert capacity (tokens per micro-batch; MOE_TYPE=moe)")
    pad_to_capacity: bool = experts(
        True, "pad every expert's input to its capacity, for fixed shapes (MOE_TYPE=moe)"
    )
    drop_policy: Literal["probs", "position"] = experts(
        "probs",
        "which tokens to drop if an expert receives more than its capacity (MOE_TYPE=moe); probs: those with "
        "the lowest router weights; position: those last in the sequence",
    )
    token_rounding: NonNegative = experts(
        0,
        "with MOE_TYPE=dmoe, in training: round down each expert's number of tokens per micro-batch to a "
        "multiple of this value, such as 128, so that the grouped GEMM has full tiles; this drops the "
        "tokens with the lowest router weights; 0: off",
    )

    expert_backend: Annotated[str, one_of(EXPERT_BACKENDS, "auto")] = experts(
        "auto",
        "implementation of the experts (grouped GEMM); triton: this package's kernels (on a CPU: plain "
        "PyTorch), in one autograd function for all experts",
    )
    routing_kernels: Literal["auto", "off"] = experts(
        "auto",
        "implementation of routing, token dropping and row ordering; auto: Triton kernels on GPUs that "
        "support them; off: plain PyTorch",
    )
    moe_sm_margin: NonNegative = experts(
        0,
        "number of GPU multiprocessors that expert GEMMs leave free for communication "
        "(EXPERT_BACKEND=triton)",
    )
    dispatcher: Annotated[str, one_of(DISPATCHERS, "auto")] = experts(
        "auto", "token dispatcher; local requires EP=1 and ETP=1; deepep requires the DeepEP package and GPUs"
    )
    upcycle_from: PathText = experts(
        "",
        "checkpoints folder of the dense run whose weights initialize the model, or the folder of one of its "
        "iterations; empty: no upcycling",
        costs=False,
    )
    upcycle_granularity: Positive = experts(
        1,
        "number of parts into which each dense MLP is split; the experts are copies of these parts "
        "(UPCYCLE_FROM)",
        costs=False,
    )
    cross_entropy: Literal["auto", "megatron", "triton", "linear"] = model(
        "auto",
        "implementation of the output layer's loss; triton: this package's kernel, which stores only the "
        "logits for backward, not the probabilities; linear: computes the output layer and the loss "
        "together, one chunk of tokens at a time, and stores the output layer's gradients instead of the "
        "logits; auto: triton on GPUs that support it, else megatron",
    )
    impl: Literal["auto", "local", "te"] = model(
        "auto",
        "implementation of all layers except MoE layers; local: this package; te: Transformer "
        "Engine; auto: te on GPUs if installed, else local",
    )
    fp8: Literal["none", "e4m3", "hybrid"] = model(
        "none",
        "FP8 format of matrix products; e4m3: all operands in e4m3; hybrid: gradients in e5m2, other "
        "operands in e4m3. With EXPERT_BACKEND=te, the experts and Transformer Engine's other linear "
        "layers use FP8; with triton, only the experts do (requires FP8=e4m3 and FP8_RECIPE=blockwise)",
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = model(
        "tensorwise",
        "FP8 scaling; tensorwise: per tensor (Ada, Hopper); blockwise: per block of 128 (Hopper); "
        "mxfp8: per block of 32 (Blackwell)",
    )

    @property
    def moe_layers(self) -> list[bool]:
        """For each layer, whether it is MoE. If MOE_LAYER_FREQ is a list, the result has its length."""
        if not self.use_moe:
            return [False] * self.num_layers
        return self.layers_in(self.moe_layer_freq, self.first_k_dense)

    @property
    def all_moe_layers(self) -> list[bool]:
        """`moe_layers`, followed by one copy of its last value per multi-token prediction layer."""
        return self.moe_layers + self.moe_layers[-1:] * self.mtp_num_layers

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
        """Width of a routed expert's input and output: MOE_LATENT_SIZE if set, else HIDDEN_SIZE."""
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
    def is_fp8_by_kernels(self) -> bool:
        """Whether the Triton expert kernels compute in FP8, without Transformer Engine."""
        return self.fp8 != "none" and self.use_moe and self.expert_backend == "triton"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.use_moe:
            yield from self._layer_problems()
            yield from self._size_problems(self.moe_latent_size)
        is_fp8, width, setting = self.fp8 != "none", self.expert_hidden_size, self.expert_hidden_setting
        yield from self.broken(
            (self.is_fp8_by_kernels and (self.fp8, self.fp8_recipe) != ("e4m3", "blockwise"), "fp8",
             f"is not supported by EXPERT_BACKEND=triton with FP8_RECIPE={self.fp8_recipe}",
             "set FP8=e4m3 FP8_RECIPE=blockwise, or EXPERT_BACKEND=te"),
            (is_fp8 and self.use_moe and self.expert_backend not in ("te", "triton"), "fp8",
             f"requires EXPERT_BACKEND=te or triton, not {self.expert_backend}",
             "set EXPERT_BACKEND=te, or FP8=none"),
            (is_fp8 and not self.use_moe and self.impl == "local", "fp8",
             "has no effect in a dense model with IMPL=local", "set IMPL=te, or FP8=none"),
            (self.use_moe and self.dispatcher == "deepep" and width % 8, setting,
             "must be a multiple of 8 with DISPATCHER=deepep",
             f"set {setting.upper()} to {multiples(8, width)}, or DISPATCHER=alltoall"),
        )  # fmt: skip
        yield from self._upcycling_problems()

    def _layer_problems(self) -> Iterator[str]:
        """Checks MOE_LAYER_FREQ and FIRST_K_DENSE."""
        problems = list(self.pattern_problems("moe_layer_freq", self.moe_layers))
        yield from problems
        if not (problems or any(self.moe_layers)):
            name, fix = "moe_layer_freq", "add a 1 to the pattern, or set USE_MOE=false"
            if self.first_k_dense:
                name = "first_k_dense"
                fix = f"set FIRST_K_DENSE to at most {self.num_layers - 1}, or USE_MOE=false"
            yield self.problem(name, f"leaves no MoE layer among NUM_LAYERS={self.num_layers}", fix)

    def _size_problems(self, latent: int) -> Iterator[str]:
        """Checks the shared expert, the latent width and the capacity."""
        is_dropless = self.moe_type == "dmoe"
        return self.broken(
            (self.add_bias_linear and self.shared_expert_size, "add_bias_linear",
             "Megatron's shared expert has no bias", "set ADD_BIAS_LINEAR=false or SHARED_EXPERT_SIZE=0"),
            (self.shared_expert_gate and not self.shared_expert_size, "shared_expert_gate",
             "has no effect without a shared expert", "set SHARED_EXPERT_SIZE, or SHARED_EXPERT_GATE=false"),
            (latent > self.hidden_size, "moe_latent_size",
             f"must be at most HIDDEN_SIZE={self.hidden_size}",
             f"set MOE_LATENT_SIZE to at most {self.hidden_size}, or 0 for none"),
            (latent and self.parametrization == "mup", "parametrization",
             f"cannot be combined with MOE_LATENT_SIZE={latent}: no muP rule covers the latent projections",
             "set MOE_LATENT_SIZE=0"),
            *((is_dropless and getattr(self, name), name,
               "only applies to MOE_TYPE=moe; MOE_TYPE=dmoe has no capacity",
               f"set MOE_TYPE=moe, or {name.upper()}=0") for name in ("capacity_factor", "min_capacity")),
            (self.token_rounding and not is_dropless, "token_rounding",
             "only applies to MOE_TYPE=dmoe; with MOE_TYPE=moe, the capacity sets the rows per expert",
             "set MOE_TYPE=dmoe, or TOKEN_ROUNDING=0"),
        )  # fmt: skip

    def _upcycling_problems(self) -> Iterator[str]:
        """Checks that upcycling does not change the outputs of the dense model."""
        if not self.upcycle_from:
            if self.upcycle_granularity > 1:
                fix = "set UPCYCLE_FROM, or UPCYCLE_GRANULARITY=1"
                yield self.problem("upcycle_granularity", "has no effect without UPCYCLE_FROM", fix)
            return
        if not self.use_moe:
            rule = "a dense model has no experts to initialize"
            yield self.problem("upcycle_from", rule, "set USE_MOE=true, or omit UPCYCLE_FROM")
            return
        yield from self.broken(
            (self.router_weights_sum is None, "topk" if self.topk == 1 else "router_normalize",
             "upcycling requires router weights that add up to the same value for every token",
             "set ROUTER_NORMALIZE=true and TOPK to at least 2, or set ROUTER_SCORE=softmax and"
             " ROUTER_PRE_SOFTMAX=false"),
            (self.shared_expert_size, "shared_expert_size",
             "a shared expert would change the output of the dense model",
             "set SHARED_EXPERT_SIZE=0 with UPCYCLE_FROM"),
            (self.moe_latent_size, "moe_latent_size",
             "with UPCYCLE_FROM, the experts require full-width hidden states", "set MOE_LATENT_SIZE=0"),
            (self.norm_placement == "around_moe", "norm_placement",
             "norms after MoE layers would change the output of the dense model in UPCYCLE_FROM",
             "set NORM_PLACEMENT=pre"),
            (self.mtp_num_layers, "mtp_num_layers",
             "the dense model of UPCYCLE_FROM has no weights for MTP layers", "set MTP_NUM_LAYERS=0"),
        )  # fmt: skip
        factor = self.expert_capacity_factor
        if factor is not None and factor * self.topk < self.num_experts:
            least = math.ceil(self.num_experts / self.topk)
            rule = "may drop tokens, which would change the output of the dense model"
            fix = f"set MOE_TYPE=dmoe, or CAPACITY_FACTOR to at least {least}"
            yield problem("capacity_factor", factor, rule, fix)
        yield from self._granularity_problems(self.upcycle_granularity)

    def _granularity_problems(self, shards: int) -> Iterator[str]:
        whole = self.ffn_hidden_size
        if self.expert_ffn_size * shards != whole:
            rule = f"must be FFN_HIDDEN_SIZE / UPCYCLE_GRANULARITY = {whole} / {shards}"
            fix = f"set MOE_FFN_HIDDEN_SIZE={whole // shards}"
            if whole % shards:
                fix = f"set UPCYCLE_GRANULARITY to {choices(divisors(whole, shards))}"
            yield problem("moe_ffn_hidden_size", self.expert_ffn_size, rule, fix)
        for name in ("num_experts", "topk"):
            if getattr(self, name) % shards:
                rule = f"must be a multiple of UPCYCLE_GRANULARITY={shards}"
                # or a token would use some shards of the dense MLP more often than others
                fix = f"set {name.upper()} to {multiples(shards, getattr(self, name))}"
                yield self.problem(name, rule, fix)
        if shards > 1 and self.num_router_groups and self.num_experts // self.num_router_groups % shards:
            rule = f"NUM_EXPERTS/NUM_ROUTER_GROUPS must be a multiple of UPCYCLE_GRANULARITY={shards}"
            yield self.problem("num_router_groups", rule, "set NUM_ROUTER_GROUPS=0")
        for name in ("force_routing", "aux_loss_type"):
            if shards > 1 and getattr(self, name) in ("balanced", "zipf", "sinkhorn"):
                rule = f"does not select all UPCYCLE_GRANULARITY={shards} shards of a dense MLP"
                yield self.problem(name, rule, f"set {name.upper()}=none")
