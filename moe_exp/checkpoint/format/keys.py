"""The keys of a Megatron checkpoint (`torch_dist`), and the weights of a model under the keys that a
checkpoint has.

Megatron writes one model in several ways, which are all read here, by what is in the checkpoint:

- Layers. `decoder.layers.X` with a layer axis before those of the tensor if all layers are alike;
  `decoder.layers.<layer>.X` if some are dense and some MoE, and always with `singleton_local_shards`,
  which Megatron-LM's script sets.
- Experts and gated projections: see `moe_exp.layers.megatron.sharding`.
- The norm before an MoE. `pre_mlp_layernorm.weight` by the Transformer Engine spec and by us,
  `mlp.linear_fc1.layer_norm_weight` by Megatron's local spec. That of a dense MLP is
  `mlp.linear_fc1.layer_norm_weight` everywhere.
- Biases of routers (ADD_BIAS_LINEAR). Versions of ours and of Megatron whose routers had no bias wrote
  none: it is zero.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import first_few, unusable
from moe_exp.checkpoint.format.naming import is_optimizer, single_styles
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.config.choices import LOSS_STATE

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

logger = logging.getLogger(__name__)

ROUTER_BIAS = ".mlp.router.bias"  # end of its key


@dataclass(frozen=True)
class CheckpointKeys:
    """Tensors of the model and of the optimizer by key, with their shapes, and unique keys of objects."""

    tensors: Mapping[str, tuple[int, ...]]
    optimizer: Mapping[str, tuple[int, ...]]
    objects: frozenset[str]

    @classmethod
    def read(cls, folder: Path) -> "CheckpointKeys":
        """The keys of the checkpoint in `folder`, which is one iteration's."""
        found = CheckpointReader(folder)
        shapes = {key: tensor.shape for key, tensor in found.tensors.items()}
        optimizer = {key: shape for key, shape in shapes.items() if is_optimizer(key)}
        weights = {key: shape for key, shape in shapes.items() if key not in optimizer}
        return cls(weights, optimizer, frozenset(found.objects))

    @property
    def layers_are_stacked(self) -> bool:
        return not single_styles(self.tensors)[0]

    @property
    def has_router_biases(self) -> bool:
        return any(key.endswith(ROUTER_BIAS) for key in self.tensors)


def model_state(
    model: GPTModel, metadata: Mapping[str, Any], keys: CheckpointKeys | None = None
) -> dict[str, Any]:
    """The sharded state of a model without wrappers: as Megatron would write it (`metadata` has
    `dp_cp_group`), or under the keys of a checkpoint that is to be read.
    """
    if keys is None:
        return model.sharded_state_dict(metadata=dict(metadata))
    single_layers, single_experts = single_styles(keys.tensors)
    metadata = {**metadata, "singleton_local_shards": single_experts}
    whole = model.sharded_state_dict(metadata=dict(metadata))
    state = {name: value for name, value in whole.items() if not name.startswith("decoder.layers.")}
    # Layer by layer: of a whole block Megatron decides by moe_layer_freq which of the two ways it is.
    for index, layer in enumerate(model.decoder.layers):
        in_model, prefix = layer.layer_number - 1, f"decoder.layers.{index}."
        offsets = () if single_layers else ((0, in_model, model.config.num_layers),)
        layer_state = layer.sharded_state_dict(prefix, offsets, dict(metadata))
        new_prefix = f"decoder.layers.{in_model}." if single_layers else "decoder.layers."
        replace_prefix_for_sharding(layer_state, prefix, new_prefix)
        state |= layer_state
    for value in state.values():
        of_local_spec = value.key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        if value.key not in keys.tensors and of_local_spec in keys.tensors:
            value.key = of_local_spec
    # Where another loss takes the place of theirs, they are left out or begin at zero.
    optional = LOSS_STATE if keys.has_router_biases else (ROUTER_BIAS, *LOSS_STATE)

    def is_there(value: Any) -> bool:
        if isinstance(value, ShardedObject):
            return value.unique_key in keys.objects
        return value.key in keys.tensors or not value.key.endswith(optional)

    return {name: value for name, value in state.items() if is_there(value)}


@torch.no_grad()
def zero_missing_biases(model: GPTModel, keys: CheckpointKeys) -> None:
    """Zeros the biases of `model`'s routers if the checkpoint was written by a version without them."""
    if keys.has_router_biases:
        return
    missing = [p for name, p in model.named_parameters() if name.endswith(ROUTER_BIAS)]
    for bias in missing:
        bias.zero_()
    if missing:
        logger.warning("the checkpoint has no biases of routers: they are zero, which is the same model")


def check_tensors(state: Mapping[str, Any], keys: CheckpointKeys, folder: Path) -> None:
    """Compares the tensors of all ranks' states with a checkpoint's: none is missing, of another shape, or
    without a use. Called by every rank; raises a ValueError on each, with the first keys that differ.
    """
    gathered: list[set[tuple[str, tuple[int, ...], bool]]] = [set()] * torch.distributed.get_world_size()
    shards = sharded_tensors(state)
    mine = {(shard.key, tuple(shard.global_shape), shard.allow_shape_mismatch) for shard in shards}
    torch.distributed.all_gather_object(gathered, mine)
    needed = {key: (shape, may_be_padded) for key, shape, may_be_padded in set().union(*gathered)}
    found = {**keys.tensors, **keys.optimizer}
    unused = {key for key in set(keys.tensors) - set(needed) if not key.endswith(LOSS_STATE)}
    differing = {"has no": set(needed) - set(found), "has, unlike the model,": unused}
    rules = [f"{what} {first_few(sorted(names), 3)}" for what, names in differing.items() if names]
    for key, (shape, may_be_padded) in sorted(needed.items()):
        other = found.get(key, shape)
        if other != shape and not (may_be_padded and differ_by_padding(other, shape)):
            rules.append(f"has {key} of shape {list(other)}, the model of shape {list(shape)}")
    if rules:
        fix = "give the model the settings of the one in the checkpoint"
        raise unusable(f"checkpoint={folder}", rules[0], fix)


def differ_by_padding(shape: tuple[int, ...], in_model: tuple[int, ...]) -> bool:
    """Whether two embeddings [V, D] are of one vocabulary."""
    # Megatron-LM pads V to a multiple of 128 * TP, of at most 64, we to one of 128.
    more = shape[0] - in_model[0]
    return shape[1:] == in_model[1:] and -128 < more < 128 * 64


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    """All tensors of a sharded state, a dictionary or a list, those of factories one by one."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors([value.build()])
        elif isinstance(value, ShardedTensor):
            yield value
