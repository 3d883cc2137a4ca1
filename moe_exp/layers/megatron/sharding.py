"""Expert tensors as shards of Megatron's checkpoint tensors. Shape suffixes: see `moe_exp.layers`.

Megatron's SequentialMLP and TEGroupedMLP write the same tensors in one of two formats. `X` stands for
`linear_fc1.weight` [W, D], `linear_fc2.weight` [D, F], `linear_fc1.bias` [W] or `linear_fc2.bias` [D]:

- `experts.X`, with an expert axis before the axes of X. If W has a gate half, it comes first.
- `experts.<expert index>.X` for each expert, if `singleton_local_shards` is set (as in Megatron-LM's training
  script); a gated linear_fc1 is split into `X_w` (gate half) and `X_v` (up half).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

# Our name to (Megatron's name, axis split by expert tensor parallelism, whether a gate doubles that axis).
TENSORS = {
    "weight1": ("linear_fc1.weight", 1, True),
    "weight2": ("linear_fc2.weight", 2, False),
    "bias1": ("linear_fc1.bias", 1, True),
    "bias2": ("linear_fc2.bias", 1, False),
}


@dataclass(frozen=True)
class ExpertPlace:
    """A rank's expert block (`ep_rank` of `ep_size`) and part of each expert (`etp_rank` of `etp_size`)."""

    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    edp_rank: int  # among ranks that hold the same part; the first rank writes the part


def shard_experts(
    tensors: Mapping[str, Tensor], prefix: str, place: ExpertPlace, *, gated: bool,
    sharded_offsets: tuple[tuple[int, int, int], ...] = (), singleton_local_shards: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Sharded state of this rank's expert tensors for dist_checkpointing.

    Args:
        tensors: `weight1` [L, W, D], `weight2` [L, D, F], optionally `bias1` [L, W] and `bias2` [L, D]. With
            expert tensor parallelism, W, F and the D of `bias2` are this rank's sizes.
        prefix: prefix of the module, with a dot: `decoder.layers.0.mlp.experts.`.
        gated: whether W consists of a gate half and an up half.
        sharded_offsets: (axis, index, size) per prepended axis. Layers that share a key need a layer axis.
        singleton_local_shards: use the format `experts.<expert index>.X`.

    Returns:
        Dict of ShardedTensors with keys `prefix` + name in `tensors`. For a tensor that is saved in several
        parts, the value is a ShardedTensorFactory. The dict includes Megatron's empty `_extra_state` objects.
    """
    state: dict[str, Any] = {}
    num_local_experts, singleton = tensors["weight1"].size(0), singleton_local_shards
    num_experts, replica_id = num_local_experts * place.ep_size, (0, place.etp_rank, place.edp_rank)
    for expert in range(place.ep_rank * num_local_experts, (place.ep_rank + 1) * num_local_experts):
        offsets, key = sharded_offsets, f"{prefix}experts.{expert}"
        if not singleton:
            offsets, key = (*offsets, (len(offsets), expert, num_experts)), f"{prefix}experts"
        shape = tuple(size for _, _, size in offsets) or (1,)
        offset = tuple(index for _, index, _ in offsets) or (0,)
        # Megatron writes and requires these objects, empty except for Transformer Engine's FP8 scales.
        for linear in ("linear_fc1", "linear_fc2"):
            extra = ShardedObject(f"{key}.{linear}._extra_state", None, shape, offset, replica_id)
            state[f"{prefix}{expert}.{linear}._extra_state"] = extra
    for name, tensor in tensors.items():
        key, split_axis, has_gate = TENSORS[name]
        part = _Part(key, split_axis, gated and has_gate, place, sharded_offsets)
        state[f"{prefix}{name}"] = part.shard(f"{prefix}experts.{key}", tensor, singleton=singleton)
    return state


@dataclass(frozen=True)
class _Part:
    """Key and sharding of one expert tensor of this rank."""

    key: str
    split_axis: int
    gated: bool
    place: ExpertPlace
    sharded_offsets: tuple[tuple[int, int, int], ...]

    def shard(self, key: str, tensor: Tensor, *, singleton: bool) -> ShardedTensor | ShardedTensorFactory:
        replica_id = (0, 0, self.place.edp_rank)
        if singleton:
            return ShardedTensorFactory(key, tensor, self._single_experts, self._merge_experts, replica_id)
        if self.gated and self.place.etp_size > 1:
            # This rank's parts of the gate half and the up half are not adjacent in the whole tensor.
            merge = partial(torch.cat, dim=self.split_axis)
            return ShardedTensorFactory(key, tensor, self._halves, merge, replica_id)
        return self._stacked(key, tensor, (self.place.etp_rank, self.place.etp_size), replica_id)

    def _stacked(self, key: str, tensor: Tensor, fragment: tuple[int, int], replica_id: Any) -> ShardedTensor:
        """Shards a tensor with an expert axis. `fragment`: (index, number of parts) along the split axis."""
        first, of_rank = len(self.sharded_offsets), (self.place.ep_rank, self.place.ep_size)
        offsets = (*self.sharded_offsets, (first, *of_rank), (first + self.split_axis, *fragment))
        return ShardedTensor.from_rank_offsets(
            key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=first
        )

    def _halves(self, key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        rank, size = self.place.etp_rank, self.place.etp_size
        fragments = ((rank, 2 * size), (size + rank, 2 * size))
        return [
            self._stacked(key, half, fragment, replica_id)
            for half, fragment in zip(tensor.chunk(2, dim=self.split_axis), fragments, strict=True)
        ]

    def _single_experts(
        self, key: str, tensor: Tensor, replica_id: Any, flattened_range: Any
    ) -> list[ShardedTensor]:
        # From `key`, not `self`: the optimizer passes its moments with a prefix before our key.
        prefix, place = key.removesuffix(self.key), self.place
        first, before = place.ep_rank * tensor.size(0), len(self.sharded_offsets)
        offsets = (*self.sharded_offsets, (before + self.split_axis - 1, place.etp_rank, place.etp_size))
        shards = []
        for index, expert in enumerate(tensor):
            expert_key = f"{prefix}{first + index}.{self.key}"
            halves = expert.chunk(2, dim=self.split_axis - 1) if self.gated else (expert,)
            keys = (f"{expert_key}_w", f"{expert_key}_v") if self.gated else (expert_key,)
            for half_key, half in zip(keys, halves, strict=True):
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        half_key, half, *offsets, replica_id=replica_id, prepend_axis_num=before
                    )
                )
        return shards

    def _merge_experts(self, pieces: list[Tensor]) -> Tensor:
        if self.gated:
            pieces = [
                torch.cat(pair, dim=self.split_axis - 1)
                for pair in zip(pieces[0::2], pieces[1::2], strict=True)
            ]
        return torch.stack(pieces)
