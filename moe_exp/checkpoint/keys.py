"""The keys of a Megatron checkpoint (`torch_dist`), and the weights of a model under the keys that a checkpoint has.

Megatron writes one model in several ways, which are all read here, by what is in the checkpoint:

- Layers. `decoder.layers.X` with a layer axis before those of the tensor where all layers are alike; `decoder.layers.<layer>.X`
  where some are dense and some MoE, and always with `singleton_local_shards`, which Megatron-LM's script sets.
- Experts and gated projections: see `moe_exp.layers.sharding`.
- The norm before an MoE. `pre_mlp_layernorm.weight` by the Transformer Engine spec and by us, `mlp.linear_fc1.layer_norm_weight`
  by Megatron's local spec. That of a dense MLP is `mlp.linear_fc1.layer_norm_weight` everywhere.
"""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt import GPTModel

from moe_exp.checkpoint.torch_dist import CheckpointReader

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_SINGLE = re.compile(r"\.experts\.\d+\.|\.linear_fc1\.(weight|bias)_w$")


@dataclass(frozen=True)
class CheckpointKeys:
    """What a checkpoint holds: keys of `tensors`, those of the optimizer left out, and unique keys of `objects`."""

    tensors: frozenset[str]
    objects: frozenset[str]

    @classmethod
    def read(cls, folder: Path) -> "CheckpointKeys":
        """The keys of the checkpoint in `folder`, which is one iteration's."""
        found = CheckpointReader(folder)
        return cls(frozenset(key for key in found.tensors if not _OPTIMIZER.match(key)), frozenset(found.objects))

    @property
    def layers_are_stacked(self) -> bool:
        """One key for a tensor of all layers."""
        return not any(_LAYER.match(key) for key in self.tensors)

    @property
    def has_singleton_shards(self) -> bool:
        """A key of its own for every expert, and for either half of a gated projection."""
        return any(_SINGLE.search(key) for key in self.tensors)


def model_state(model: GPTModel, metadata: Mapping[str, Any], keys: CheckpointKeys | None = None) -> dict[str, Any]:
    """The model's sharded state: as Megatron would write it, or under the keys of a checkpoint that is to be read.

    Args:
        model: of this rank and stage, without wrappers.
        metadata: Megatron's, with `dp_cp_group`.
        keys: of the checkpoint; None to write one.
    """
    if keys is None:
        return model.sharded_state_dict(metadata=dict(metadata))
    metadata = {**metadata, "singleton_local_shards": keys.has_singleton_shards}
    state = model.sharded_state_dict(metadata=dict(metadata))
    state = {name: value for name, value in state.items() if not name.startswith("decoder.layers.")}
    state |= _layer_state(model, metadata, stacked=keys.layers_are_stacked)
    for value in state.values():
        value.key = _present(value.key, keys)
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject) or value.unique_key in keys.objects}


def _layer_state(model: GPTModel, metadata: Mapping[str, Any], *, stacked: bool) -> dict[str, Any]:
    # Layer by layer: of a whole block Megatron decides by moe_layer_freq which of the two ways it is.
    state: dict[str, Any] = {}
    for index, layer in enumerate(model.decoder.layers):
        in_model, prefix = layer.layer_number - 1, f"decoder.layers.{index}."
        offsets = ((0, in_model, model.config.num_layers),) if stacked else ()
        layer_state = layer.sharded_state_dict(prefix, offsets, dict(metadata))
        replace_prefix_for_sharding(layer_state, prefix, "decoder.layers." if stacked else f"decoder.layers.{in_model}.")
        state |= layer_state
    return state


def _present(key: str, keys: CheckpointKeys) -> str:
    of_local_spec = key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return of_local_spec if key not in keys.tensors and of_local_spec in keys.tensors else key


def check_tensors(state: Mapping[str, Any], keys: CheckpointKeys, folder: Path) -> None:
    """Nothing that the model needs is missing in a checkpoint, and all that it has is used. Called by every rank.

    Raises:
        ValueError: with the first keys that are on one side only.
    """
    needed: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(needed, set(_tensor_keys(state)))
    in_model = set().union(*needed)
    for what, names in (("has no", in_model - keys.tensors), ("has, unlike the model,", keys.tensors - in_model)):
        if names:
            first = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"checkpoint={folder}: {what} {first}. Fix: give the model the settings of the one in the checkpoint.")


def _tensor_keys(state: Any) -> Iterator[str]:
    if isinstance(state, ShardedTensorFactory):
        yield from _tensor_keys(state.build())
    elif isinstance(state, ShardedTensor):
        yield state.key
    elif isinstance(state, Mapping):
        yield from (key for value in state.values() for key in _tensor_keys(value))
    elif isinstance(state, list):
        yield from (key for value in state for key in _tensor_keys(value))
