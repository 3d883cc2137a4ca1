"""Megatron layer specs with our MoE layer, attention and norm. Neither Transformer Engine nor Apex is needed.

In a Megatron program, replace Megatron's MoE spec with `moe_submodule_spec()`. Settings that this function
does not take come from TransformerConfig. In `layers/`, only this file and `megatron/` import megatron.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from moe_exp.host.megatron_versions import PartsOfSpec, patch_latent_attention
from moe_exp.layers.losses import AuxLoss, LossFunction, as_losses
from moe_exp.layers.megatron.attention import CausalAttention, Norm, ProjectionNorm
from moe_exp.layers.megatron.config_fields import check_attention, check_fields
from moe_exp.layers.megatron.moe_parts import (
    MegatronExperts,
    MegatronMoELayer,
    MegatronRouter,
    router_in_megatron,
)
from moe_exp.layers.megatron.residual import change_residuals
from moe_exp.layers.router import Router

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention, transformer_layer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

patch_latent_attention(multi_latent_attention, Linear)

__all__ = [
    "MegatronExperts", "MegatronMoELayer", "MegatronRouter", "decoder_spec", "local_layer_spec",
    "moe_submodule_spec", "te_layer_spec",
]  # fmt: skip


def moe_submodule_spec(
    backend: str = "auto", *, dispatcher: str = "auto", router: Mapping[str, Any] | None = None,
    router_class: type[Router] = MegatronRouter,
    losses: Sequence[AuxLoss | LossFunction] | AuxLoss | LossFunction = (), min_capacity: int = 0,
    token_rounding: int = 0, fp8: bool = False, use_te: bool = False,
) -> ModuleSpec:  # fmt: skip
    """Spec of our MoE layer, for the submodule `mlp` of a transformer layer.

    Args:
        backend: expert backend, see grouped_gemm.choose_backend.
        dispatcher: `local`, `alltoall`, `allgather`, `deepep` or `auto` (`local` if EP = ETP = 1, else
            `alltoall`).
        router: fields of RouterConfig that TransformerConfig does not have.
        router_class: a subclass of Router or MegatronRouter.
        losses: auxiliary losses in addition to those of TransformerConfig, such as a custom function.
        min_capacity, token_rounding: see MoESettings.
        fp8: the `triton` backend multiplies in e4m3, see Experts. Transformer Engine uses `config.fp8`.
        use_te: build the shared expert and the latent projections with Transformer Engine's linear layers.
    """
    own_losses = as_losses(losses)
    for loss in own_losses:
        if loss.needs.state:
            rule = "cannot be passed here: Megatron's finalize_model_grads would not update the loss's state"
            fix = "add the loss to moe_router_load_balancing_type of the TransformerConfig"
            raise ValueError(f"losses={loss.name}: {rule}. Fix: {fix}.")
    linears: tuple[Any, Any, Any] = (ColumnParallelLinear, RowParallelLinear, Linear)
    if use_te:
        from megatron.core.extensions import transformer_engine as te

        linears = te.TEColumnParallelLinear, te.TERowParallelLinear, te.TELinear
    return ModuleSpec(
        module=MegatronMoELayer,
        params={
            "dispatcher": dispatcher,
            "router": router,
            "losses": own_losses,
            "min_capacity": min_capacity,
            "token_rounding": token_rounding,
            "latent_linear": linears[2],
        },
        submodules=MoESubmodules(
            experts=ModuleSpec(module=MegatronExperts, params={"backend": backend, "fp8": fp8}),
            shared_experts=ModuleSpec(
                module=SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=linears[0], linear_fc2=linears[1])
            ),
            router=router_in_megatron(router_class),
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )


def local_layer_spec(
    config: TransformerConfig, *, mlp: ModuleSpec | None, projection_norm: bool = False,
    rotated_norm: bool = False, attention: Mapping[str, Any] | None = None,
) -> ModuleSpec:  # fmt: skip
    """Megatron's local transformer layer with our attention core and norm; its MLP is dense if `mlp` is None.

    `attention`: arguments of CausalAttention.
    """
    check_attention(config)
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    # In Megatron's checkpoints, as in Transformer Engine, a norm belongs to the linear layer after it.
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if config.multi_latent_attention:
        # Only Transformer Engine has names for these norms: Megatron's local attention does not support MLA.
        keys = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    if mlp is None:
        # Megatron's checkpoints store a dense MLP's norm with its first linear layer, but not an MoE's.
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    qk_norm = Norm if config.qk_layernorm and not rotated_norm else IdentityOp
    core = ModuleSpec(module=CausalAttention, params={"normalizes": rotated_norm, **(attention or {})})
    if rotated_norm:
        for name in ("q_layernorm.", "k_layernorm."):
            keys[f"self_attention.core_attention.{name}"] = f"self_attention.{name}"
    if config.multi_latent_attention:
        self_attention = latent_attention_spec(config, norm=qk_norm, core=core)
    else:
        self_attention = ModuleSpec(
            module=ProjectionNormAttention if projection_norm else GroupedAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=core,
                linear_proj=RowParallelLinear,
                q_layernorm=qk_norm,
                k_layernorm=qk_norm,
            ),
        )
    return ModuleSpec(
        module=transformer_layer.TransformerLayer,
        submodules=transformer_layer.TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=dense if mlp is None else mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def te_layer_spec(
    config: TransformerConfig, *, mlp: ModuleSpec | None, projection_norm: bool = False,
    own_attention: bool = False, attention: Mapping[str, Any] | None = None,
) -> ModuleSpec:  # fmt: skip
    """Megatron's Transformer Engine layer; if `mlp` is given, it replaces the dense MLP.

    `own_attention`: use our attention core, with `attention` as its arguments. Transformer Engine's core
    ignores document boundaries and cannot measure attention logits.
    """
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=None if mlp is None else config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if mlp is not None:
        spec.submodules.mlp = mlp
    if own_attention:
        check_attention(config)
        core = ModuleSpec(module=CausalAttention, params=dict(attention or {}))
        spec.submodules.self_attention.submodules.core_attention = core
    usual = LatentAttention if config.multi_latent_attention else GroupedAttention
    spec.submodules.self_attention.module = ProjectionNormAttention if projection_norm else usual
    return spec


def decoder_spec(
    config: TransformerConfig, *, use_te: bool = False, vp_stage: int | None = None,
    projection_norm: bool = False, own_attention: bool = False, rotated_norm: bool = False,
    norm_placement: str = "pre", residual_multiplier: float = 1.0,
    attention: Mapping[str, Any] | None = None, **moe_options: Any,
) -> TransformerBlockSubmodules:  # fmt: skip
    """The layers of this pipeline stage; `config.moe_layer_freq` (interval or 0/1 list) selects MoE layers.

    Args:
        use_te: use Transformer Engine's layers around the MoE layer.
        vp_stage: index of the model chunk in an interleaved pipeline.
        projection_norm: normalize queries and keys over all heads together, see ProjectionNorm.
        own_attention: use our attention core even with `use_te`, see `te_layer_spec`.
        rotated_norm: normalize queries and keys after the rotary embedding; not supported with `use_te`.
        norm_placement: see NORM_PLACEMENT. With `use_te`, only `pre` is supported.
        residual_multiplier: factor on the results of attention and MLP.
        attention: arguments of our attention core, see CausalAttention.
        moe_options: arguments of `moe_submodule_spec`.
    """
    layer_spec = partial(te_layer_spec, own_attention=own_attention)
    if not use_te:
        layer_spec = partial(local_layer_spec, rotated_norm=rotated_norm)
    layer_spec = partial(layer_spec, projection_norm=projection_norm, attention=attention)
    dense = layer_spec(config, mlp=None)
    of_dense = "pre" if norm_placement == "around_moe" else norm_placement
    change_residuals(dense, config, placement=of_dense, multiplier=residual_multiplier)
    layers = [dense] * config.num_layers
    if config.num_moe_experts is not None:
        check_fields(config)
        moe = layer_spec(config, mlp=moe_submodule_spec(use_te=use_te, **moe_options))
        change_residuals(moe, config, placement=norm_placement, multiplier=residual_multiplier)
        pattern = frequency = config.moe_layer_freq
        if isinstance(frequency, int):
            pattern = [index % frequency == 0 for index in range(config.num_layers)]
        layers = [moe if is_moe else dense for is_moe in pattern]
    first = transformer_layer.get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    if not use_te:
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    from megatron.core.extensions.transformer_engine import TENorm

    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


class GroupedAttention(SelfAttention):  # type: ignore[misc]
    """SelfAttention in which sliding-window layers may have their own number of key/value heads."""

    def __init__(self, config: TransformerConfig, *args: Any, layer_number: int, **options: Any):
        groups, skipped = getattr(config, "window_query_groups", 0), config.window_attn_skip_freq
        if groups and is_layer_window_attention(config.window_size, skipped, layer_number):
            config = copy.copy(config)
            config.num_query_groups = groups
        super().__init__(config, *args, layer_number=layer_number, **options)


class ProjectionNormAttention(GroupedAttention):
    """SelfAttention that normalizes queries and keys over all heads together."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # With qk_layernorm, Megatron sums the gradients of parameters called `q_layernorm` over tensor
        # parallel ranks. Here the ranks hold different parts, not copies.
        assert not config.qk_layernorm
        head, group = config.kv_channels, self.pg_collection.tp
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads * head, group=group)
        self.k_layernorm = ProjectionNorm(config, self.config.num_query_groups * head, group=group)


class LatentAttention(PartsOfSpec, MLASelfAttention):  # type: ignore[misc]
    """MLASelfAttention that always uses its spec's norms and can restart positions at each document."""

    def get_query_key_value_tensors(
        self, hidden_states: Any, key_value_states: Any = None, position_ids: Any = None,
        packed_seq_params: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Hides `packed_seq_params` from Megatron, which would otherwise drop a batch dimension of 1."""
        self.rotary_pos_emb.documents = packed_seq_params  # for RestartingPositions
        try:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, None, **options
            )
        finally:
            self.rotary_pos_emb.documents = None


def latent_attention_spec(config: TransformerConfig, *, norm: type, core: ModuleSpec) -> ModuleSpec:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with the attention core `core`.

    `norm` is applied before the up projection of queries and before the up projection of keys and values.
    """
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        rule = "multi-latent attention with TP > 1 requires sequence parallelism to sum its gradients"
        raise ValueError(f"sequence_parallel=False: {rule}. Fix: set sequence_parallel=True.")
    # Every tensor parallel rank has the full down projections, as with Transformer Engine. Megatron's local
    # spec splits them and gathers their output. All heads share the part of the keys with position embedding,
    # but its gradient would then come from this rank's heads only, and all earlier gradients would be wrong.
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear, linear_q_down_proj=Linear, linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Linear, linear_kv_up_proj=ColumnParallelLinear, core_attention=core,
        linear_proj=RowParallelLinear, q_layernorm=norm, kv_layernorm=norm,
    )  # fmt: skip
    return ModuleSpec(
        module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )
