"""Represents optimizer state as whole tensors cut into shards: each rank accesses only its own shards.

For each parameter with key K, a checkpoint stores the following fp32 tensors with the parameter's shape:
`optimizer.state.param.K` (main weights), the moments (Adam: `optimizer.state.exp_avg.K` and
`optimizer.state.exp_avg_sq.K`; SGD: `optimizer.state.momentum_buffer.K`), and, if EMA_DECAY is set,
`optimizer.state.ema.K` (moving average of the weights).

Megatron's distributed optimizer assigns each data-parallel rank a range of a parameter's values in memory
order. Megatron's format `fully_reshardable` has the same keys, but Megatron gathers the whole state on every
data-parallel rank. Here, a range is split into a few boxes (`boxes_of_range`), and each box is a shard with
its offsets:

    parameter on this rank    [W, D], for example the rows of tensor-parallel rank 2 in a whole [4W, D]
    range of this rank        values 100 to 250 of W * D
    shards                    up to 3 boxes of [W, D], at their offsets plus (2W, 0) in the whole [4W, D]

Shards of fp32 tensors are views of the optimizer's tensors: saving takes no memory, and loading fills them in
place. Main weights stored as remainders (MAIN_PARAMS=remainder, `engine/fused_step.py`) are first expanded to
fp32 and stay fp32 until the next iteration. Main weights kept in host memory stay there during saving and
loading. Saving converts bf16 and 8-bit moments to fp32 on the host, and loading converts them back
(`engine/optimizer_classes.py`).
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_exp.checkpoint.format.keys import sharded_tensors
from moe_exp.checkpoint.format.naming import states
from moe_exp.checkpoint.format.torch_dist import Box, CheckpointReader, boxes_of_range, intersection, slices
from moe_exp.engine.averaged_weights import restart_average, update_model_weights
from moe_exp.engine.optimizer_classes import AVERAGE, MOMENTS, moments, set_moments, stepped
from moe_exp.engine.runtime import from_all_ranks

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@dataclass(frozen=True)
class Owned:
    """Optimizer state that this rank keeps for values `start` to `stop` of a parameter, in memory order."""

    parameter: Tensor  # the model's
    start: int
    stop: int
    values: Mapping[str, Tensor]  # `param`, the moments and `ema` by name, fp32 [stop - start]
    # distributed optimizer instance, whose ranks share each parameter's values; None: every rank keeps all
    instance: int | None
    is_converted: bool  # the moments are fp32 copies of the optimizer's bf16 or 8-bit moments
    keep: Callable[[], None]  # writes such moments back to the optimizer once the copies are filled


def owned_state(optimizer: MegatronOptimizer) -> Iterator[Owned]:
    """Yields this rank's state of each parameter in all of `optimizer`'s chained optimizers."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for main in list(getattr(part.optimizer, "stored", ())):
            part.optimizer.join(main)
        for parameter, main in stepped(part):
            # Without the distributed optimizer, every data-parallel rank has the whole state.
            start, stop, instance = 0, parameter.numel(), None
            if isinstance(part, DistributedOptimizer):
                own = part._get_model_param_range_map(parameter)["param"]
                start, stop, instance = own.start, own.end, part.distributed_optimizer_instance_id
            found, state = moments(part.optimizer, main), part.optimizer.state[main]
            is_converted = any(state.get(name) is not value for name, value in found.items())
            if is_converted:  # the fp32 copies of all parameters may not fit on the device
                found = {name: value.cpu() for name, value in found.items()}
            average = {AVERAGE: state[AVERAGE]} if AVERAGE in state else {}
            tensors = {"param": main, **found, **average}
            values = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
            keep = partial(set_moments, part.optimizer, main, found)
            yield Owned(parameter, start, stop, values, instance, is_converted, keep)


# A box of a parameter and the shard of a checkpoint's tensor with the same values. Axes that only one of the
# two has are of size 1.
_Piece = tuple[Box, ShardedTensor]


def _pieces(parameter: Tensor, described: ShardedTensor | ShardedTensorFactory) -> list[_Piece]:
    shape, pieces = tuple(parameter.shape), []
    # Megatron describes a parameter that is stored in several pieces (the two halves of a gated projection,
    # one key per expert) by a factory. It returns views, whose strides and offsets identify the boxes.
    for shard in sharded_tensors([described]):
        view = shard.data
        num_dropped = len(shape) - view.dim()
        strides = zip(view.shape, view.stride(), parameter.stride()[num_dropped:], strict=True)
        is_box = all(size == 1 or a == b for size, a, b in strides)
        is_view = view.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        assert is_box and is_view, f"{shard.key}: must be a box of its parameter"
        first = np.unravel_index(view.storage_offset() - parameter.storage_offset(), shape)
        pieces.append((Box(tuple(map(int, first)), (1,) * num_dropped + tuple(view.shape)), shard))
    num_values = sum(box.num_values for box, _ in pieces)
    assert num_values == math.prod(shape), f"{described.key}: must be filled by its pieces"
    return pieces


def shards_of(state: Iterable[Owned], weights: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    """Yields `state` as shards of a checkpoint, with the keys that a save writes."""
    described = (one for one in nested_values(dict(weights)) if not isinstance(one, ShardedObject))
    by_parameter = {one.data: one for one in described}
    for owned in state:
        shape, pieces = owned.parameter.shape, _pieces(owned.parameter, by_parameter[owned.parameter])
        for box, (whole, shard) in itertools.product(boxes_of_range(shape, owned.start, owned.stop), pieces):
            if (part := intersection(box, whole)) is None:
                continue
            # Translates the offsets in the parameter to offsets in the checkpoint's tensor: the piece may
            # lack the parameter's leading axes, and the checkpoint may prepend axes (layers, experts).
            num_before, num_dropped = shard.prepend_axis_num, len(part.sizes) - len(shard.local_shape)
            inside = [a - o for a, o in zip(part.offsets, whole.offsets, strict=True)]
            offsets = zip(shard.global_offset, [0] * num_before + inside[num_dropped:], strict=True)
            place = tuple(map(sum, offsets))
            sizes, replica_id = (1,) * num_before + part.sizes[num_dropped:], shard.replica_id
            if owned.instance is not None:
                # The last of the three numbers would count data-parallel ranks as replicas, but each of them
                # owns different values.
                replica_id = (*replica_id[:2], owned.instance)
            begin = int(np.ravel_multi_index(box.offsets, shape)) - owned.start
            for name, values in owned.values.items():
                in_box = values[begin : begin + box.num_values].view(box.sizes)[slices(part, box.offsets)]
                yield ShardedTensor(
                    key=f"optimizer.state.{name}.{shard.key}", data=in_box.view(sizes), dtype=values.dtype,
                    local_shape=sizes, global_shape=shard.global_shape, global_offset=place,
                    axis_fragmentations=None,  # not a regular grid
                    replica_id=replica_id,
                )  # fmt: skip


def optimizer_groups(optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Gathers unsharded state (group settings, steps, loss scale) from all ranks, in Megatron's format."""
    mine: list[dict[str, Any]] = []
    for part in optimizer.chained_optimizers:
        groups = [] if part.is_stub_optimizer else part.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        sharding = {"param_state_sharding_type": "fully_reshardable"}
        mine.append({"optimizer": {"param_groups": settings}, **sharding})
        if (scaler := getattr(part, "grad_scaler", None)) is not None:
            # Moved to the host: other ranks would unpickle a GPU tensor onto this rank's GPU.
            scale = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in scaler.state_dict().items()}
            mine[-1]["grad_scaler"] = scale
    chains = from_all_ranks(mine)
    # Pipeline stages without experts have a shorter chain of optimizers.
    step, longest = max(_found(chains, "step", int), default=None), max(chains, key=len)
    for described in longest if step is not None else ():
        for group in described["optimizer"]["param_groups"]:
            group["step"] = step
    return longest[0] if len(longest) == 1 else dict(enumerate(longest))


def _found(saved: Any, name: str, kind: type = object) -> Iterator[Any]:
    """Yields every value of type `kind` named `name` in a checkpoint's nested optimizer state."""
    if isinstance(saved, Mapping):
        if name in saved and isinstance(saved[name], kind):
            yield saved[name]
        saved = list(saved.values())
    for value in saved if isinstance(saved, list) else ():
        yield from _found(value, name, kind)


class OptimizerRequest:
    """Requests the optimizer's state from a checkpoint. The load fills `shards` in place, then `finish`
    completes the state. `weights` is the model's state, with the checkpoint's keys. `with_moments` is false
    if the checkpoint has another optimizer: only main weights are then loaded, and moments and steps start at
    zero. If the checkpoint has no moving average (`has_average` is false), this run's average starts from the
    weights.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, weights: Mapping[str, Any], reader: CheckpointReader, *,
        with_moments: bool = True,
    ):  # fmt: skip
        self.optimizer, self._with_moments = optimizer, with_moments
        self._state, stored = list(owned_state(optimizer)), set(states(reader))
        self._has_main_weights, self.has_average = "param" in stored, AVERAGE in stored
        # fp32 moments, as read, that the optimizer keeps in another dtype
        converted = [owned for owned in self._state if with_moments and owned.is_converted]
        self.converted = [only(owned, MOMENTS) for owned in converted]
        names = stored & {"param", AVERAGE} | set(MOMENTS if with_moments else ())
        asked = (only(owned, names) for owned in self._state)
        # In fp32, main weights are read into the memory of the model's weights, after those.
        self.shards = list(shards_of(asked, weights))
        # Before 2026-12, runs without the distributed optimizer saved main weights under another name, and
        # fp32 runs saved none.
        for shard in self.shards:
            before = shard.key.replace("optimizer.state.param.", "optimizer.state.fp32_param.", 1)
            shard.key = before if before in reader.tensors else shard.key

    @torch.no_grad()
    def finish(self, saved: Any, model: list[DistributedDataParallel]) -> None:
        """Completes the load: sets main weights, weights of `model`, steps and loss scale. `saved` is built
        by `optimizer_groups` or Megatron. This run's learning rate, betas and weight decay do not change.
        """
        for owned in [] if self._has_main_weights else self._state:
            owned.values["param"].copy_(owned.parameter.view(-1)[owned.start : owned.stop])
        for owned in self.converted:
            owned.keep()
        if not self.has_average:
            restart_average(self.optimizer)
        # the model's weights follow from the main weights, as after an optimizer step
        update_model_weights(self.optimizer, model)
        step = max(_found(saved, "step", int), default=0) if self._with_moments else 0
        scaler = next(_found(saved, "grad_scaler"), None)
        for part in self.optimizer.chained_optimizers:
            if not part.is_stub_optimizer and step:
                for group in part.optimizer.param_groups:
                    group["step"] = step
            if scaler is not None and getattr(part, "grad_scaler", None):
                part.grad_scaler.load_state_dict(scaler)


def only(owned: Owned, names: Collection[str]) -> Owned:
    """Returns a copy of `owned` that has only the states named in `names`."""
    return replace(owned, values={name: value for name, value in owned.values.items() if name in names})
