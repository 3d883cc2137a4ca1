"""Megatron's self-attention with what published models have and it lacks. With `spec`, the Megatron side of
`layers/`.
"""

from typing import Any

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

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine its names are stand-ins, and Megatron takes them for its classes.
    multi_latent_attention.HAVE_TE = False
    # From 0.19 on Megatron takes a linear layer of its own for one that it knows only where Transformer
    # Engine is there.
    multi_latent_attention.Linear = Linear


class MegatronProjectionNorm(ProjectionNorm):
    """ProjectionNorm whose weights Megatron knows to be split over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, num_channels: int, *, group: Any):
        super().__init__(config, num_channels, eps=config.layernorm_epsilon, group=group)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights of this rank as their part of `weight` [H*d]."""
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

    TransformerConfig.qk_layernorm has to be false: with it Megatron adds up the gradients of parameters
    called `q_layernorm` over tensor parallel ranks, which here are parts of a whole and no copies.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert not config.qk_layernorm
        head, group = config.kv_channels, self.pg_collection.tp
        self.q_layernorm = MegatronProjectionNorm(config, config.num_attention_heads * head, group=group)
        self.k_layernorm = MegatronProjectionNorm(config, config.num_query_groups * head, group=group)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """MLASelfAttention of the parts that its spec names."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Called by Megatron from 0.19 on, whose rules would put a norm of Transformer Engine before the
        projection of queries that are not compressed (DeepSeek-V2-Lite), and refuse these without Transformer
        Engine.
        """
        return vars(submodules)


def latent_attention_spec(config: TransformerConfig, *, norm: type) -> ModuleSpec:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) of Megatron's local parts and our
    attention core.

    Every tensor parallel rank has the down projections whole, as with Transformer Engine. Megatron's local
    spec splits them and gathers what they give; the gradient that comes back to the part of the keys with
    position embedding, which all heads share, is then that of this rank's heads alone, and with two ranks the
    gradients of all that is before it are wrong.

    Args:
        config: Megatron's.
        norm: of what queries, and keys and values, are projected up from.

    Raises:
        ValueError: several tensor parallel ranks without sequence parallelism, which is what adds up those
            gradients.
    """
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            "sequence_parallel=False: multi-latent attention adds up gradients over tensor parallel ranks by"
            " sequence parallelism. Fix: set sequence_parallel=True."
        )
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
