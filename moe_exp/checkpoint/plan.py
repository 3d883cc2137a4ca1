"""The plan of a save: which rank writes which piece. All collectives that Megatron does are here."""

import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from moe_exp.checkpoint.state import CONTENT

from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

Item = tuple[MetadataIndex, Tensor | io.BytesIO]


@dataclass(frozen=True)
class Plan:
    """Tensors and files that this rank writes.

    Over all ranks every value of every tensor is in one item.
    """

    items: list[Item]  # pieces of tensors, and objects as bytes, with their names in `.metadata`
    common: dict[str, Any]  # what is not sharded, the same on every rank; rank 0 writes it
    metadata: Metadata | None  # of the whole checkpoint but for where the pieces lie; rank 0 alone has it

    @property
    def pieces(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Key, values and offsets of the tensors among the items."""
        tensors = ((index, data) for index, data in self.items if isinstance(data, Tensor))
        return ((index.fqn, data, tuple(index.offset or ())) for index, data in tensors)

    def staged(self) -> "Plan":
        """The same in host memory, where no later step of training changes it."""
        items = [(index, _copied(data)) for index, data in self.items]
        return replace(self, items=items, common=copy.deepcopy(self.common))


def _copied(data: Tensor | io.BytesIO) -> Tensor | io.BytesIO:
    return data.to("cpu", copy=True) if isinstance(data, Tensor) else data


class _PlannedItems(FileSystemWriterAsync):  # type: ignore[misc]  # Megatron has no types
    """Stands where Megatron's planning hands over to its writer, and keeps what would have been written."""

    items: list[Item]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # Megatron's makes the folder, and where that fails on one rank the others wait for it

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.items = [(item.index, planner.resolve_data(item)) for item in plan.items]


def plan_save(state: dict[str, Any], group: ProcessGroup) -> Plan:
    """Divides a state (`whole_state`, used up) over all ranks. Called by every rank; touches no disk. The
    ranks of `group` (data and context parallel) hold the same pieces and write a part of them each.
    """
    # By this description Megatron-LM asks a checkpoint for the keys that it has.
    state["content_metadata"] = CONTENT
    # Whether every piece has one owner is checked by the wrapper, once the pieces are divided.
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    strategy.apply_saving_parallelization(sharded)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = _PlannedItems("")
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    state = mcore_to_pyt_state_dict(by_key)
    (_, metadata, _), *_ = save_state_dict_async_plan(state, writer, None, 0, planner=planner)
    if metadata is not None:
        del metadata.all_local_plans  # of all ranks, in the file, for a reuse that we do not make
    return Plan(writer.items, common, metadata)
