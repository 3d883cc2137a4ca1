"""Settings for expert backends, token dispatcher, FP8 and upcycling."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from moe_exp.config.choices import DISPATCHERS, EXPERT_BACKENDS, one_of
from moe_exp.config.errors import choices, divisors, multiples, problem
from moe_exp.config.sections.moe import ExpertSettings
from moe_exp.config.setting_types import NonNegative, PathText, Positive, experts, model


class BackendSettings(ExpertSettings):
    """Settings of the section Mixture of experts, starting with EXPERT_BACKEND."""

    expert_backend: Annotated[str, one_of(EXPERT_BACKENDS, "auto")] = experts(
        "auto",
        "expert backend (grouped GEMM); triton: this package's kernels in one autograd function, or plain "
        "PyTorch on a CPU",
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
        "dense run whose weights initialize the model: its checkpoints folder, or the folder of one "
        "iteration; empty: no upcycling",
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
        "implementation of the output layer's loss; triton: this package's kernel, which stores logits "
        "but no probabilities for backward; linear: output layer and loss by chunks of tokens, stores "
        "gradients of the output layer but no logits; auto: triton on GPUs that support it, else megatron",
    )
    impl: Literal["auto", "local", "te"] = model(
        "auto",
        "implementation of the layers around the MoE layer; local: this package; te: Transformer "
        "Engine; auto: te on GPUs if installed, else local",
    )
    fp8: Literal["none", "e4m3", "hybrid"] = model(
        "none",
        "FP8 matrix products; e4m3: all in e4m3; hybrid: gradients in e5m2. With EXPERT_BACKEND=te, "
        "by Transformer Engine; with EXPERT_BACKEND=triton, only in the experts (e4m3, FP8_RECIPE=blockwise)",
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = model(
        "tensorwise",
        "FP8 scaling; tensorwise: per tensor (Ada, Hopper); blockwise: per block of 128 (Hopper); "
        "mxfp8: per block of 32 (Blackwell)",
    )

    @property
    def is_fp8_by_kernels(self) -> bool:
        """Whether the Triton expert kernels compute in FP8, without Transformer Engine."""
        return self.fp8 != "none" and self.use_moe and self.expert_backend == "triton"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        is_fp8, width, setting = self.fp8 != "none", self.expert_hidden_size, self.expert_hidden_setting
        yield from self.broken(
            (self.is_fp8_by_kernels and (self.fp8, self.fp8_recipe) != ("e4m3", "blockwise"), "fp8",
             f"with FP8_RECIPE={self.fp8_recipe} is not supported by EXPERT_BACKEND=triton",
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

    def _upcycling_problems(self) -> Iterator[str]:
        """Checks that the upcycled model initially computes the same as the dense model."""
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
             "upcycling requires router weights with the same sum for every token",
             "set TOPK to at least 2 and ROUTER_NORMALIZE=true, or with softmax scores"
             " ROUTER_PRE_SOFTMAX=false"),
            (self.shared_expert_size, "shared_expert_size",
             "a shared expert would change the output of the dense model",
             "set SHARED_EXPERT_SIZE=0 with UPCYCLE_FROM"),
            (self.moe_latent_size, "moe_latent_size",
             "upcycled experts require full-width hidden states", "set MOE_LATENT_SIZE=0 with UPCYCLE_FROM"),
            (self.norm_placement == "around_moe", "norm_placement",
             "norms after MoE layers would change the output of the dense model",
             "set NORM_PLACEMENT=pre with UPCYCLE_FROM"),
            (self.mtp_num_layers, "mtp_num_layers", "the dense model has no weights for these layers",
             "set MTP_NUM_LAYERS=0 with UPCYCLE_FROM"),
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
