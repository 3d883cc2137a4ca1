"""The MoE layer and its neighbours as Megatron layer specs. The only file in `layers/` that imports megatron.

For a Megatron user: put `moe_submodule_spec()` in the place of Megatron's own MoE spec; the layer takes everything else from
TransformerConfig. Works without Transformer Engine and Apex.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronMoE
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor

from moe_exp.layers.attention import CausalAttention
from moe_exp.layers.dispatcher import AllToAllDispatcher, LocalDispatcher
from moe_exp.layers.experts import ACTIVATIONS, Experts
from moe_exp.layers.grouped_gemm import choose_backend
from moe_exp.layers.moe_layer import MoELayer, MoESettings, MoEStatistics
from moe_exp.layers.norm import Norm
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.sharding import ExpertPlace, shard_experts


def device_of_model() -> torch.device:
    """Where parameters live: this rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class MegatronRouter(Router):
    """Our router with the attributes that Megatron looks for on a router."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, **kwargs: Any):
        super().__init__(
            RouterConfig(
                hidden_size=config.hidden_size,
                num_experts=config.num_moe_experts,
                topk=config.moe_router_topk,
                score=config.moe_router_score_function,
                pre_softmax=config.moe_router_pre_softmax,
                scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
                num_groups=config.moe_router_num_groups or 0,
                group_topk=config.moe_router_group_topk or 0,
                expert_bias=config.moe_router_enable_expert_bias,
            ),
            dtype=config.params_dtype,
            device=device_of_model(),
        )
        config.init_method(self.weight)
        # Every tensor parallel rank routes its own part of the sequence: their gradients have to be summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_number: int | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Called by Megatron's transformer layer; 1 is the first layer of the model."""
        self.layer_number = layer_number

    def reset_global_aux_loss_tracker(self) -> None:
        """Called by Megatron once per step; there is nothing to reset, our losses look at one micro-batch."""


class MegatronExperts(Experts):
    """Our experts with Megatron's sharded keys, so that checkpoints interchange with SequentialMLP and TEGroupedMLP."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *, backend: str, pg_collection: Any = None, **kwargs: Any):
        self.ep_group, self.etp_group, self.edp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        super().__init__(
            num_local_experts=num_local_experts,
            hidden_size=config.hidden_size,
            ffn_size=config.moe_ffn_hidden_size // pg_collection.expt_tp.size(),
            activation=activation_name(config),
            backend=backend,
            dtype=config.params_dtype,
            device=device_of_model(),
        )
        for weight, init in ((self.weight1, config.init_method), (self.weight2, config.output_layer_init_method)):
            init(weight)
            # Not reduced with the dense parameters: their data parallel group is another one. Megatron sets this only with
            # EP > 1, and so gets wrong gradients where TP > 1 and ETP = 1; always setting it also keeps the optimizer's
            # structure, hence its checkpoints, the same at every EP.
            weight.allreduce = False  # type: ignore[attr-defined]
            # Never a duplicate of another tensor parallel rank's: counts in the gradient norm on every rank.
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:  # type: ignore[type-arg]
        """Weights and biases as shards of Megatron's tensors, see `shard_experts`."""
        return shard_experts(
            dict(self.named_parameters(recurse=False)),
            prefix,
            ExpertPlace.of(ep_group=self.ep_group, etp_group=self.etp_group, edp_group=self.edp_group),
            gated=self.gated,
            sharded_offsets=tuple(sharded_offsets),
            singleton_local_shards=bool((metadata or {}).get("singleton_local_shards")),
        )

    def backward_dw(self) -> None:
        """Called by Megatron when weight gradients are delayed; ours are computed in the backward pass."""


def activation_name(config: TransformerConfig) -> str:
    """Our name for the activation of a TransformerConfig."""
    for name, (function, gated) in ACTIVATIONS.items():
        if config.activation_func is function and config.gated_linear_unit == gated:
            return name
    raise ValueError(f"activation_func={config.activation_func}: is not supported in MoE layers. Fix: use one of {', '.join(ACTIVATIONS)}.")


class MegatronMoELayer(MegatronMoE):
    """Our MoE layer in the place of Megatron's: a subclass, because Megatron tests for it, that shares none of its parts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        dispatcher: str = "auto",
        **kwargs: Any,
    ):
        # Not MoELayer.__init__, which would build Megatron's router, dispatcher and experts.
        MegatronModule.__init__(self, config)
        assert submodules is not None
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.layer_number = layer_number or 0  # until Megatron sets it
        self.router = submodules.router(config=config, pg_collection=groups)
        num_local_experts = config.num_moe_experts // groups.ep.size()
        self.experts = build_module(submodules.experts, num_local_experts, config, pg_collection=groups)
        self.use_shared_expert = config.moe_shared_expert_intermediate_size is not None
        self.shared_experts = None
        if self.use_shared_expert:
            self.shared_experts = build_module(submodules.shared_experts, config=config, pg_collection=groups, gate=False)
        self.moe_layer_recompute = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        layer = MoELayer(
            router=self.router,
            dispatcher=_dispatcher(dispatcher, config, groups),
            experts=self.experts,
            settings=_settings(config),
            microbatch_group=groups.tp_cp,
            context_parallel_size=groups.cp.size(),
        )
        # In a tuple, so that its parameters are registered once, under Megatron's names.
        self._token_layer = (layer,)

    @property
    def statistics(self) -> MoEStatistics:
        """Sums over micro-batches, for the log."""
        return self._token_layer[0].statistics

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """[S, B, D] to [S, B, D]; the second value is Megatron's bias, which there is none of."""
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._forward, False, hidden_states), None
        return self._forward(hidden_states), None

    def _forward(self, hidden_states: Tensor) -> Tensor:
        output_TD, loss = self._token_layer[0](hidden_states.flatten(0, 1))
        output = output_TD.view_as(hidden_states)
        if loss is not None and self.training:
            # Megatron's schedules set the scale of the losses that are attached so.
            output = MoEAuxLossAutoScaler.apply(output, loss)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output

    def backward_dw(self, *args: Any, **kwargs: Any) -> None:
        self.experts.backward_dw()


def _settings(config: TransformerConfig) -> MoESettings:
    balanced = config.moe_router_load_balancing_type == "aux_loss"
    return MoESettings(
        capacity_factor=config.moe_expert_capacity_factor,
        pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        aux_loss_coeff=float(config.moe_aux_loss_coeff) if balanced else 0.0,
        z_loss_coeff=config.moe_z_loss_coeff or 0.0,
    )


def _dispatcher(name: str, config: TransformerConfig, groups: Any) -> LocalDispatcher:
    is_local = groups.ep.size() == 1 and groups.expt_tp.size() == 1
    if name == "local" and not is_local:
        raise ValueError(f"dispatcher=local: needs EP=1 and ETP=1, not {groups.ep.size()} and {groups.expt_tp.size()}. Fix: use alltoall.")
    if is_local and name != "alltoall":
        return LocalDispatcher(config.num_moe_experts)
    return AllToAllDispatcher(config.num_moe_experts, ep_group=groups.ep, etp_group=groups.expt_tp)


def moe_submodule_spec(
    backend: str = "auto", *, dispatcher: str = "auto", params_dtype: torch.dtype = torch.float32, use_te: bool = False
) -> ModuleSpec:
    """The `mlp` of an MoE transformer layer.

    Args:
        backend: grouped GEMM of the experts, see grouped_gemm.choose_backend.
        dispatcher: `local`, `alltoall`, or `auto`: local where EP and ETP are 1.
        params_dtype: dtype of the weights.
        use_te: build the shared expert from Transformer Engine's linear layers.
    """
    backend, _ = choose_backend(backend, device_type=device_of_model().type, dtype=params_dtype)
    linears: tuple[Any, Any] = (ColumnParallelLinear, RowParallelLinear)
    if use_te:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        linears = TEColumnParallelLinear, TERowParallelLinear
    return ModuleSpec(
        module=MegatronMoELayer,
        params={"dispatcher": dispatcher},
        submodules=MoESubmodules(
            experts=ModuleSpec(module=MegatronExperts, params={"backend": backend}),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1])),
            router=MegatronRouter,
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )


def local_layer_spec(config: TransformerConfig, *, mlp: ModuleSpec | None) -> ModuleSpec:
    """A transformer layer of Megatron's local parts, our attention core and our norm; `mlp` None is the dense MLP."""
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    qk_norm = Norm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if mlp is None:
        # In Megatron's checkpoints the norm of a dense MLP is a part of its first linear layer, that of an MoE is not.
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=dense if mlp is None else mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def te_layer_spec(config: TransformerConfig, *, mlp: ModuleSpec | None) -> ModuleSpec:
    """Megatron's Transformer Engine layer; with `mlp`, that in the place of its MoE."""
    if mlp is None:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    spec.submodules.mlp = mlp
    return spec


def decoder_spec(
    config: TransformerConfig, *, backend: str = "auto", dispatcher: str = "auto", use_te: bool = False, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or MoE as `config.moe_layer_freq` says: every n-th, or a list of 0 and 1 per layer.

    Args:
        config: Megatron's; everything about the MoE layer that is not an argument here.
        backend: grouped GEMM of the experts, see grouped_gemm.choose_backend.
        dispatcher: `local`, `alltoall` or `auto`.
        use_te: Transformer Engine's layers around the MoE layer.
        vp_stage: model chunk of an interleaved pipeline.
    """
    layer_spec = te_layer_spec if use_te else local_layer_spec
    dense = layer_spec(config, mlp=None)
    layers = [dense] * config.num_layers
    if config.num_moe_experts is not None:
        moe = layer_spec(config, mlp=moe_submodule_spec(backend, dispatcher=dispatcher, params_dtype=config.params_dtype, use_te=use_te))
        frequency = config.moe_layer_freq
        pattern = [index % frequency == 0 for index in range(config.num_layers)] if isinstance(frequency, int) else frequency
        layers = [moe if is_moe else dense for is_moe in pattern]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    if use_te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
