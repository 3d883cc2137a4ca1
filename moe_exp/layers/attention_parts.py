"""Megatron's self-attention with what published models have and it lacks. With `spec`, the Megatron side of `layers/`."""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from moe_exp.layers.norm import ProjectionNorm


class MegatronProjectionNorm(ProjectionNorm):
    """ProjectionNorm whose weights Megatron knows to be split over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, num_channels: int, *, group: Any):
        super().__init__(config, num_channels, eps=config.layernorm_epsilon, group=group)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights of this rank as their part of `weight` [H*d]."""
        groups = {"tp_group": self.group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        state = self.state_dict(prefix="", keep_vars=True)
        return dict(make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups))


class ProjectionNormAttention(SelfAttention):  # type: ignore[misc]
    """SelfAttention that normalizes queries, and keys, over all heads together.

    TransformerConfig.qk_layernorm has to be false: with it Megatron adds up the gradients of parameters called `q_layernorm`
    over tensor parallel ranks, which here are parts of a whole and no copies.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert not config.qk_layernorm
        head, group = config.kv_channels, self.pg_collection.tp
        self.q_layernorm = MegatronProjectionNorm(config, config.num_attention_heads * head, group=group)
        self.k_layernorm = MegatronProjectionNorm(config, config.num_query_groups * head, group=group)
