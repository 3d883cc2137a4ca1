"""Megatron's self-attention plus what it lacks for published models."""

from typing import Any

from moe_exp.host.megatron_versions import PartsOfSpec, patch_latent_attention
from moe_exp.layers.megatron.attention import CausalAttention
from moe_exp.layers.megatron.norm import ProjectionNorm

from megatron.core import tensor_parallel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

patch_latent_attention(multi_latent_attention, Linear)


class MegatronProjectionNorm(ProjectionNorm):
    """ProjectionNorm with weights that Megatron treats as split over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, num_channels: int, *, group: Any):
        super().__init__(config, num_channels, eps=config.layernorm_epsilon, group=group)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """This rank's weights as their part of `weight` [H*d]."""
        groups = {
            "tp_group": self.group,
            "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        }
        state = self.state_dict(prefix="", keep_vars=True)
        return dict(
            make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)
        )


class ProjectionNormAttention(SelfAttention):  # type: ignore[misc]
    """SelfAttention that normalizes queries, and keys, over all heads together.

    TransformerConfig.qk_layernorm must be false: with it Megatron sums the gradients of parameters called
    `q_layernorm` over tensor parallel ranks, which here hold parts of a whole, not copies.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert not config.qk_layernorm
        head, group = config.kv_channels, self.pg_collection.tp
        self.q_layernorm = MegatronProjectionNorm(config, config.num_attention_heads * head, group=group)
        self.k_layernorm = MegatronProjectionNorm(config, config.num_query_groups * head, group=group)


class LatentAttention(PartsOfSpec, MLASelfAttention):  # type: ignore[misc]
    """MLASelfAttention built from the parts that its spec names; its positions may restart in documents."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Any,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Any:
        """Megatron's, which would take the batch dimension away from a micro-batch of one sample."""
        if packed_seq_params is not None:
            self.rotary_pos_emb.documents = packed_seq_params
        try:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, None, **options
            )
        finally:
            if packed_seq_params is not None:
                self.rotary_pos_emb.documents = None


def latent_attention_spec(config: TransformerConfig, *, norm: type) -> ModuleSpec:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) with our attention core.

    Every tensor parallel rank has the full down projections, as with Transformer Engine. Megatron's local
    spec splits them and gathers their output; the gradient of the part of the keys with position embedding,
    which all heads share, is then only that of this rank's heads, and with two ranks the gradients of
    everything before it are wrong.

    Args:
        norm: applied before the up projections of queries, and of keys and values.

    Raises:
        ValueError: for several tensor parallel ranks without sequence parallelism to sum those gradients.
    """
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        rule = "multi-latent attention adds up gradients over tensor parallel ranks by sequence parallelism"
        raise ValueError(f"sequence_parallel=False: {rule}. Fix: set sequence_parallel=True.")
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=Linear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Linear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    return ModuleSpec(
        module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )
