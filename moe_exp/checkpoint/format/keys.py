"""Keys of Megatron checkpoints (`torch_dist`): maps a model's weights to the keys of a given checkpoint.

Megatron has several key styles for the same model. This package reads all of them:

- Layers: if all layers are alike, the key is `decoder.layers.X`, where X is the name within the layer, and
  the tensor has a layer axis in front. If there are dense and MoE layers, or if `singleton_local_shards` is
  set (Megatron-LM's script sets it), the key is `decoder.layers.<layer>.X`.
- Experts and gated projections: see `moe_exp.layers.megatron.sharding`.
- The norm before an MoE layer: `pre_mlp_layernorm.weight` in the Transformer Engine spec and in this package,
  `mlp.linear_fc1.layer_norm_weight` in Megatron's local spec. Dense MLPs use the latter key in all specs.
- Router biases (ADD_BIAS_LINEAR): older versions of this package and of Megatron had routers without bias.
  For checkpoints of these versions, the biases are set to zero.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import first_few, unusable
from moe_exp.checkpoint.format.naming import single_styles, weight_keys
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.config.choices import LOSS_STATE
from moe_exp.engine.runtime import from_all_ranks, on_every_rank

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

logger = logging.getLogger(__name__)

_ROUTER_BIAS = ".mlp.router.bias"  # end of its key
# Tensors that may be missing and then become zero: router biases of older versions, and the state of a loss
# that the checkpoint's run did not use.
_OPTIONAL = (_ROUTER_BIAS, *LOSS_STATE)


def model_state(
    model: GPTModel, metadata: Mapping[str, Any], reader: CheckpointReader | None = None
) -> dict[str, Any]:
    """Sharded state of an unwrapped model, under Megatron's keys. If `reader` is given, the keys of its
    checkpoint are used instead. `metadata` must contain the process group `dp_cp_group`.
    """
    if reader is None:
        return model.sharded_state_dict(metadata=dict(metadata))
    single_layers, single_experts = single_styles(weight_keys(reader.tensors))
    metadata = {**metadata, "singleton_local_shards": single_experts}
    whole = model.sharded_state_dict(metadata=dict(metadata))
    state = {name: value for name, value in whole.items() if not name.startswith("decoder.layers.")}
    # Layer by layer, because for a whole block Megatron chooses the style by moe_layer_freq.
    for index, layer in enumerate(model.decoder.layers):
        in_model, prefix = layer.layer_number - 1, f"decoder.layers.{index}."
        offsets = () if single_layers else ((0, in_model, model.config.num_layers),)
        layer_state = layer.sharded_state_dict(prefix, offsets, dict(metadata))
        new_prefix = f"decoder.layers.{in_model}." if single_layers else "decoder.layers."
        replace_prefix_for_sharding(layer_state, prefix, new_prefix)
        state |= layer_state
    for value in state.values():
        of_local_spec = value.key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        if value.key not in reader.tensors and of_local_spec in reader.tensors:
            value.key = of_local_spec
    return {
        name: value
        for name, value in state.items()
        if not isinstance(value, ShardedObject) or value.unique_key in reader.objects
    }


def check_tensors(
    state: Mapping[str, Any], reader: CheckpointReader, *, unused: tuple[str, ...] = ()
) -> None:
    """Checks that a checkpoint contains exactly the tensors of all ranks' states, with the same shapes.
    Ignores the checkpoint's keys that start with one of `unused`. All ranks must call this function. Raises
    ValueError on every rank, with the first keys that differ.
    """
    shards = sharded_tensors(state)
    mine = {(shard.key, tuple(shard.global_shape), shard.allow_shape_mismatch) for shard in shards}
    needed = {key: (shape, may_be_padded) for key, shape, may_be_padded in set().union(*from_all_ranks(mine))}
    others = set(weight_keys(reader.tensors)) - set(needed)
    others = {key for key in others if not (key.endswith(LOSS_STATE) or key.startswith(unused))}
    has_biases = any(key.endswith(_ROUTER_BIAS) for key in reader.tensors)
    optional = LOSS_STATE if has_biases else _OPTIONAL
    missing = {key for key in set(needed) - set(reader.tensors) if not key.endswith(optional)}
    differing = {"has no": missing, "has, unlike the model,": others}
    rules = [f"{what} {first_few(sorted(names), 3)}" for what, names in differing.items() if names]
    for key, (shape, may_be_padded) in sorted(needed.items()):
        other = reader.tensors[key].shape if key in reader.tensors else shape
        if other != shape and not (may_be_padded and differ_by_padding(other, shape)):
            rules.append(f"has {key} with shape {list(other)}, but the model's shape is {list(shape)}")
    if rules:
        fix = "use the model settings that wrote the checkpoint"
        raise unusable(f"checkpoint={reader.folder}", rules[0], fix)


def differ_by_padding(shape: tuple[int, ...], in_model: tuple[int, ...]) -> bool:
    """Whether the shapes [V, D] of two embeddings differ only in vocabulary padding."""
    # Megatron-LM pads V to a multiple of 128 * TP (TP at most 64), this package to a multiple of 128.
    return shape[1:] == in_model[1:] and -128 < shape[0] - in_model[0] < 128 * 64


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """Yields all tensors of a sharded state (a dict or list), including tensors that factories build."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors([value.build()])
        elif isinstance(value, ShardedTensor):
            yield value


@torch.no_grad()
def read_tensors(state: Any, reader: CheckpointReader) -> None:
    """Copies a checkpoint into a sharded state; optional tensors that the checkpoint lacks become zero."""
    lacks_biases = False
    for shard in sharded_tensors(state):
        if shard.key not in reader.tensors and shard.key.endswith(_OPTIONAL):
            lacks_biases = lacks_biases or shard.key.endswith(_ROUTER_BIAS)
            shard.data.zero_()
            continue
        # `data` is a view of the parameter, also if the parameter has several shards
        target, sizes = shard.data, (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        if shard.allow_shape_mismatch:
            # an embedding: the checkpoint may have fewer padding rows, and rows that it lacks become zero
            num_rows = min(sizes[0], max(0, reader.tensors[shard.key].shape[0] - shard.global_offset[0]))
            target.zero_()
            target, sizes = target[:num_rows], (num_rows, *sizes[1:])
        target.copy_(reader.read(shard.key, shard.global_offset, sizes).view(target.shape))
    if lacks_biases:
        logger.warning("the checkpoint has no router biases; setting them to zero (the same model)")


def read_state(state: Any, reader: CheckpointReader) -> None:
    """Like `read_tensors`, but also replaces each sharded object with its stored value. All ranks must
    call this function. Raises ValueError on every rank if a file is damaged or contains code.
    """

    def value_of(part: Any) -> Any:
        return reader.read_object(part.unique_key)[0] if isinstance(part, ShardedObject) else part

    def read() -> None:
        read_tensors(state, reader)
        dict_list_map_inplace(value_of, state)

    on_every_rank(read)
