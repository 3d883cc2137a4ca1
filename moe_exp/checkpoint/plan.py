"""The plan of a save: which rank writes which piece. All collectives of a save that Megatron does are
here.
"""

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
    """What this rank writes.

    Args:
        items: pieces of tensors, and objects as bytes, with their names in `.metadata`.
        common: what is not sharded, the same on every rank; rank 0 writes it.
        metadata: of the whole checkpoint but for where the pieces lie; rank 0 alone has it.

    Over all ranks every value of every tensor is in one item.
    """

    items: list[Item]
    common: dict[str, Any]
    metadata: Metadata | None

    @property
    def pieces(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Key, values and offsets of the tensors among the items."""
        return (
            (index.fqn, data, tuple(index.offset or ()))
            for index, data in self.items
            if isinstance(data, Tensor)
        )

    def staged(self) -> "Plan":
        """The same in host memory, where no later step of training changes it."""
        return replace(
            self,
            items=[(index, _copied(data)) for index, data in self.items],
            common=copy.deepcopy(self.common),
        )


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
    """Divides a sharded state over all ranks. Called by every rank; touches no disk.

    Args:
        state: as of `whole_state`; it is used up.
        group: the ranks that hold the same pieces, which each write a part of them (data and context parallel
            ones).
    """
    # By this description Megatron-LM asks a checkpoint for the keys that it has.
    state["content_metadata"] = CONTENT
    # Whether every piece has one owner is checked by the wrapper, once the pieces are divided.
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), group
    ).apply_saving_parallelization(sharded)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    writer = _PlannedItems("")
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, metadata, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(by_key), writer, None, 0, planner=planner
    )
    if metadata is not None:
        # for a reuse of plans that we do not make: the plans of all ranks, in the file
        del metadata.all_local_plans
    return Plan(writer.items, common, metadata)
