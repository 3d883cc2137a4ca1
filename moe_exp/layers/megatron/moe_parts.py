"""Our router, experts and MoE layer with Megatron's interfaces."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from moe_exp.config.choices import NO_LOSS
from moe_exp.layers.activations import Activation, quick_gelu, squared_relu
from moe_exp.layers.dispatcher import AllToAllDispatcher, Dispatcher, LocalDispatcher, experts_per_rank
from moe_exp.layers.dispatcher.allgather import AllGatherDispatcher
from moe_exp.layers.dispatcher.deepep import DeepEPDispatcher
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.experts.grouped_gemm import check_fp8, choose_backend
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.megatron.config_fields import check_fields
from moe_exp.layers.megatron.sharding import ExpertPlace, shard_experts
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer, PhaseTimers
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.router.balance import GlobalFractions, L1Factor, QuantileBias
from moe_exp.layers.statistics import MoEStatistics

from megatron.core import activations, tensor_parallel
from megatron.core.fusions import fused_bias_geglu
from megatron.core.post_training.modelopt.layers import Linear as Linear
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronMoE
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


def device_of_model() -> torch.device:
    """Device of the parameters: this rank's GPU, or the CPU."""
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def router_config(config: TransformerConfig, overrides: Mapping[str, Any]) -> RouterConfig:
    """Builds a RouterConfig from Megatron's settings. RouterConfig fields in `overrides` take precedence."""
    states = {loss.needs.state for loss in balancing_losses(config)}
    assignment = "sinkhorn" if "sinkhorn" in config.moe_router_load_balancing_type else "topk"
    mine = RouterConfig(
        hidden_size=config.hidden_size,
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        score=config.moe_router_score_function,
        # With Sinkhorn, Megatron ignores moe_router_pre_softmax.
        pre_softmax=config.moe_router_pre_softmax or assignment == "sinkhorn",
        scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
        num_groups=config.moe_router_num_groups or 0,
        group_topk=config.moe_router_group_topk or 0,
        bias=config.add_bias_linear,
        expert_bias=config.moe_router_enable_expert_bias,
        bias_update_rate=config.moe_router_bias_update_rate,
        global_fractions="global_tokens_per_expert" in states,
        dtype=config.moe_router_dtype or "fp32",
        jitter=config.moe_input_jitter_eps or 0.0,
        assignment="balanced" if config.moe_router_force_load_balancing else assignment,
    )
    return replace(mine, **overrides)


def balancing_losses(config: TransformerConfig) -> tuple[AuxLoss, ...]:
    """Balancing losses of a TransformerConfig. A single coefficient applies to all types of loss."""
    kinds, coeffs = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coeffs = list(coeffs) if isinstance(coeffs, list | tuple) else [coeffs] * len(kinds)
    return tuple(
        AuxLoss(kind, float(coeff)) for kind, coeff in zip(kinds, coeffs, strict=True) if kind not in NO_LOSS
    )


class MegatronRouter(Router):
    """Our router with the attributes that Megatron expects."""

    def __init__(
        self, config: TransformerConfig, pg_collection: Any = None,
        overrides: Mapping[str, Any] | None = None, **kwargs: Any,
    ):  # fmt: skip
        found = router_config(config, overrides or {})
        if found.expert_bias and not (found.finds_quantiles or config.moe_router_enable_expert_bias):
            rule = "would not be updated by Megatron's finalize_model_grads"
            fix = "set moe_router_enable_expert_bias=True in the TransformerConfig"
            raise ValueError(f"expert_bias=True: {rule}. Fix: {fix}.")
        super().__init__(
            found, microbatch_group=pg_collection.tp_cp, dtype=config.params_dtype, device=device_of_model()
        )
        self.batch_group = getattr(pg_collection, "tp_dp_cp", None)
        config.init_method(self.weight)

    def reset_global_aux_loss_tracker(self) -> None:
        """Updates the slot counts for `global_aux_loss`; called by Megatron's finalize_model_grads."""
        self.end_of_batch(self.batch_group, GlobalFractions)

    def end_of_global_batch(self) -> None:
        """Updates the balance rules unknown to Megatron. Call this after Megatron's finalize_model_grads."""
        self.end_of_batch(self.batch_group, QuantileBias, L1Factor)


def router_in_megatron(router_class: type[Router]) -> type[MegatronRouter]:
    """Combines a subclass of Router with MegatronRouter."""
    if not (isinstance(router_class, type) and issubclass(router_class, Router)):
        rule = "must be a subclass of moe_exp.layers.router.Router"
        raise ValueError(f"router_class={router_class}: {rule}. Fix: derive the class from Router.")
    if issubclass(router_class, MegatronRouter):
        return router_class
    # By the order of the bases, MegatronRouter calls the constructor of `router_class`.
    return type(router_class.__name__, (MegatronRouter, router_class), {})


class MegatronExperts(Experts):
    """Experts whose checkpoints are interchangeable with Megatron's SequentialMLP and TEGroupedMLP."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, backend: str, fp8: bool = False,
        pg_collection: Any = None, **kwargs: Any,
    ):  # fmt: skip
        device = device_of_model()
        backend, _ = choose_backend(backend, device_type=device.type, dtype=config.params_dtype)
        check_fp8(config.fp8, config.fp8_recipe, backend=backend)
        ep, etp, edp = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.ep_group, self.etp_group = ep, etp
        self.place = ExpertPlace(ep.rank(), ep.size(), etp.rank(), etp.size(), edp.rank())
        super().__init__(
            num_local_experts=num_local_experts,
            hidden_size=config.moe_latent_size or config.hidden_size,
            ffn_size=ffn_per_rank(config.moe_ffn_hidden_size, self.place.etp_size),
            activation=activation_name(config),
            backend=backend,
            bias=config.add_bias_linear,
            etp_rank=self.place.etp_rank,
            etp_size=self.place.etp_size,
            recompute_activation="moe_act" in recomputed_modules(config),
            recompute_hidden="experts" in recomputed_modules(config),
            adds_to_main_grad=True,  # does not need Apex, unlike gradient_accumulation_fusion
            fp8=fp8,
            dtype=config.params_dtype,
            device=device,
        )
        # Megatron's random state for experts differs between EP and ETP ranks, unlike its default state.
        # Programs with one rank need not seed the state for experts.
        tracker, name = tensor_parallel.get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
        with tracker.fork(name) if name in tracker.get_states() else nullcontext():
            config.init_method(self.weight1)
            config.output_layer_init_method(self.weight2)
        for name, weight in self.named_parameters():
            # Biases have two dimensions here, but must still be excluded from weight decay.
            weight.is_bias = name.startswith("bias")  # type: ignore[attr-defined]
            # Not reduced with dense parameters, which have another data parallel group. Megatron sets this
            # only with EP > 1, so its gradients are wrong if TP > 1 and ETP = 1. Setting it always also keeps
            # the structure of optimizer checkpoints the same for every EP.
            weight.allreduce = False  # type: ignore[attr-defined]
            # Tensor parallel ranks never hold copies of each other, so all count in the gradient norm.
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.register_load_state_dict_post_hook(_take_extra_states)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Weights and biases as shards of Megatron's tensors, see `shard_experts`."""
        return shard_experts(
            dict(self.named_parameters(recurse=False)),
            prefix,
            self.place,
            gated=self.gated,
            sharded_offsets=tuple(sharded_offsets),
            singleton_local_shards=bool((metadata or {}).get("singleton_local_shards")),
        )


def _take_extra_states(experts: torch.nn.Module, keys: Any) -> None:
    """Lets a strict load_state_dict accept the empty `_extra_state` objects of `shard_experts`."""
    keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if not key.endswith("._extra_state")]


def activation_name(config: TransformerConfig) -> str:
    """Our name for the activation of a TransformerConfig."""
    theirs = {
        activations.squared_relu: squared_relu,
        activations.quick_gelu: quick_gelu,
        fused_bias_geglu.quick_gelu: quick_gelu,
    }
    found = Activation(
        theirs.get(config.activation_func, config.activation_func),
        config.gated_linear_unit,
        config.activation_func_clamp_value,
        config.glu_linear_offset,
    )
    for name, activation in ACTIVATIONS.items():
        if found == activation:
            return name
    others = f"activation_func_clamp_value={found.limit}, glu_linear_offset={found.offset}"
    name = f"activation_func={config.activation_func} (gated_linear_unit={found.gated}, {others})"
    rule, fix = "is not supported in MoE layers", f"use one of {', '.join(ACTIVATIONS)}"
    raise ValueError(f"{name}: {rule}. Fix: {fix}.")


class MegatronMoELayer(MegatronMoE):
    """Replaces Megatron's MoE layer. It derives from that layer only because Megatron checks the type."""

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules | None = None,
        layer_number: int | None = None, pg_collection: Any = None, dispatcher: str = "auto",
        router: Mapping[str, Any] | None = None, losses: tuple[AuxLoss, ...] = (), min_capacity: int = 0,
        token_rounding: int = 0, latent_linear: Any = Linear, **kwargs: Any,
    ):  # fmt: skip
        if submodules is None:
            fix = "use moe_submodule_spec()"
            raise ValueError(f"submodules=None: the layer requires a submodule spec. Fix: {fix}.")
        check_fields(config)
        # Not MoELayer.__init__, which would build Megatron's router, dispatcher and experts.
        MegatronModule.__init__(self, config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.layer_number = layer_number or 0  # until Megatron sets it
        self.tp_group = groups.tp
        self.router = submodules.router(config=config, pg_collection=groups, overrides=router)
        for weight in self.router.parameters():
            # Each tensor parallel rank routes its part of the sequence, so Megatron must sum the gradients.
            weight.sequence_parallel = config.sequence_parallel
        num_local_experts = experts_per_rank(config.num_moe_experts, groups.ep.size())
        self.experts = build_module(submodules.experts, num_local_experts, config, pg_collection=groups)
        self.use_shared_expert = config.moe_shared_expert_intermediate_size is not None
        self.shared_experts = None
        if self.use_shared_expert:
            # With overlap, Megatron moves exchanges from the module's forward to its own dispatcher.
            plain = copy(config)
            plain.moe_shared_expert_overlap = False
            options = {"pg_collection": groups, "gate": config.moe_shared_expert_gate}
            self.shared_experts = build_module(submodules.shared_experts, config=plain, **options)
        self.fc1_latent_proj = self.fc2_latent_proj = down = up = None
        if config.moe_latent_size:
            projections = latent_projections(config, latent_linear, groups.tp, device_of_model())
            # The names that Megatron's checkpoints use.
            self.fc1_latent_proj, self.fc2_latent_proj = projections
            # Partials, not closures: deepcopy of the layer then copies the projections.
            down, up = (partial(_project, projection) for projection in projections)
        recomputed, shared = recomputed_modules(config), self.shared_experts
        self.moe_layer_recompute = "moe" in recomputed
        if shared is not None and not recomputed.isdisjoint({"shared_expert", "shared_experts"}):
            shared = partial(self._recomputed, shared)
        settings = MoESettings(
            capacity_factor=config.moe_expert_capacity_factor, min_capacity=min_capacity,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity, drop_policy=config.moe_token_drop_policy,
            token_rounding=token_rounding, losses=(*balancing_losses(config), *losses),
            z_loss_coeff=config.moe_z_loss_coeff or 0.0, batch_dim=1,
        )  # fmt: skip
        layer = MoELayer(
            router=self.router, dispatcher=_dispatcher(dispatcher, config, groups), experts=self.experts,
            settings=settings, shared=shared, down=down, up=up,
            microbatch_group=groups.tp_cp, context_parallel_size=groups.cp.size(),
            context_stripes=getattr(config, "context_stripes", 1), recompute_router="router" in recomputed,
        )  # fmt: skip
        self.loss_factor: Tensor | None = None  # of the balancing losses; see PredictingModel
        # In a tuple, so that parameters are registered only once, under Megatron's names.
        self._token_layer = (layer,)

    @property
    def statistics(self) -> MoEStatistics:
        """Statistics for the log, summed over micro-batches."""
        return self._token_layer[0].statistics

    def set_timers(self, timers: PhaseTimers) -> None:
        """Measures the phases of this layer with `timers`."""
        self._token_layer[0].timers = timers

    def set_layer_number(self, layer_number: int) -> None:
        """Sets the number of the layer in the whole model, from 1; called by Megatron's transformer layer."""
        self.layer_number = layer_number

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Maps hidden states [S, B, D] to (output [S, B, D], None); None stands for Megatron's bias."""
        if self.training and (tp := self.tp_group.size()) > 1 and not self.config.sequence_parallel:
            # Every rank would route the same tokens: the output is right, but gradients are multiplied by TP.
            rule = f"training with TP={tp} requires sequence parallelism"
            raise ValueError(f"sequence_parallel=False: {rule}. Fix: set sequence_parallel=True.")
        if padding_mask is not None:
            # In Megatron's code the mask is [B, S] and True is padding (its docstrings say the opposite).
            mask = padding_mask.transpose(0, 1).bool()
            is_own = mask.size(0) == hidden_states.size(0)  # else of all sequence parallel ranks
            padding_mask = mask if is_own else mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        if self.moe_layer_recompute and self.training:
            return self._recomputed(partial(self._forward, padding_mask=padding_mask), hidden_states), None
        return self._forward(hidden_states, padding_mask), None

    def _recomputed(self, forward: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        if self.config.fp8:  # backward runs outside of the FP8 autocast, which te_checkpoint restores
            from megatron.core.extensions.transformer_engine import te_checkpoint

            states = tensor_parallel.get_cuda_rng_tracker
            return cast(Tensor, te_checkpoint(forward, False, states, self.tp_group, hidden_states))
        return cast(Tensor, tensor_parallel.checkpoint(forward, False, hidden_states))

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        output, loss = self._token_layer[0](hidden_states, padding_mask, with_loss=torch.is_grad_enabled())
        if loss is not None and self.training:
            # Megatron's schedules set the scale of losses attached this way.
            factor = self.loss_factor
            output = MoEAuxLossAutoScaler.apply(output, loss if factor is None else factor * loss)
        return output

    def backward_dw(self, *args: Any, **kwargs: Any) -> None:
        """No-op: Megatron calls this to compute delayed weight gradients, but ours are already computed."""


def recomputed_modules(config: TransformerConfig) -> set[str]:
    """Names of the modules recomputed in backward. RECOMPUTE_MODULES also has names that Megatron lacks."""
    return set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()


def ffn_per_rank(ffn_size: int, etp: int) -> int:
    """Width of an expert's FFN on one rank. Raises a ValueError if `etp` does not divide `ffn_size`."""
    if ffn_size % etp:
        rule = f"must be divisible by ETP={etp}"
        raise ValueError(f"moe_ffn_hidden_size={ffn_size}: {rule}. Fix: set ETP to a divisor.")
    return ffn_size // etp


_DISPATCHERS: dict[str, Any] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
    "deepep": DeepEPDispatcher,
}


def _dispatcher(name: str, config: TransformerConfig, groups: Any) -> Dispatcher:
    is_local = groups.ep.size() == 1 and groups.expt_tp.size() == 1
    if name == "local" and not is_local:
        rule = f"requires EP=1 and ETP=1, not EP={groups.ep.size()} and ETP={groups.expt_tp.size()}"
        raise ValueError(f"dispatcher=local: {rule}. Fix: use alltoall.")
    if name == "local" or (name == "auto" and is_local):
        return LocalDispatcher(config.num_moe_experts)
    if name not in ("auto", *_DISPATCHERS):
        fix = f"use auto, local, {', '.join(_DISPATCHERS)}"
        raise ValueError(f"dispatcher={name}: unknown dispatcher. Fix: {fix}.")
    kind = _DISPATCHERS["alltoall" if name == "auto" else name]
    return kind(config.num_moe_experts, ep_group=groups.ep, etp_group=groups.expt_tp)


def latent_projections(
    config: TransformerConfig, linear: Any, tp_group: Any, device: torch.device
) -> tuple[Any, Any]:
    """Returns a LatentMoE's projections, which Megatron calls `fc1_latent_proj` and `fc2_latent_proj`.

    The first maps hidden to latent size, the second back (arXiv:2601.18089; Nemotron 3, arXiv:2512.20856).
    Every tensor parallel rank holds both projections and applies them to its part of the tokens. The
    projections' gradients are summed over these ranks, like the router's. `linear` is the class of the
    projections: Linear, or Transformer Engine's TELinear.
    """
    # Linear is always duplicated; TELinear finds the group itself.
    mode = {"tp_group": tp_group} if linear is Linear else {"parallel_mode": "duplicated"}
    options = {"bias": config.add_bias_linear, "skip_bias_add": False, "skip_weight_param_allocation": False}
    sizes = config.hidden_size, config.moe_latent_size
    projections: list[Any] = []
    for shape, init in ((sizes, config.init_method), (sizes[::-1], config.output_layer_init_method)):
        with device:
            projection = linear(*shape, config=config, init_method=init, **options, **mode)
        if linear is Linear:  # does not call `init_method`
            init(projection.weight)
            if projection.bias is not None:
                torch.nn.init.zeros_(projection.bias)
        projections.append(projection)
    return projections[0], projections[1]


def _project(projection: Any, x_TD: Tensor) -> Tensor:
    output_TD, _ = projection(x_TD)  # Megatron's linear layers also return a bias that is not added
    return output_TD
