"""Saving: a checkpoint is written beside the others and becomes one of them by a rename, or leaves no trace.
Called by every rank.

1. `CheckpointWriter.begin`: a folder of another name, and the plan of who writes what, with all collectives.
2. A thread writes this rank's files. With ASYNC_SAVE training continues meanwhile, from a copy of the state
   in host memory.
3. `CheckpointWriter.finish`: all ranks report to rank 0 what they have written. It writes what makes the
   folder a checkpoint, syncs and renames.

Between 1 and 3 no rank waits for another: if one runs out of disk space, the others learn of it in step 3.
"""

import copy
import functools
import io
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from moe_exp.checkpoint.format import fingerprints, folders
from moe_exp.checkpoint.format.fingerprints import Fingerprints
from moe_exp.checkpoint.format.torch_dist import COMMON, METADATA
from moe_exp.checkpoint.format.torch_dist_writer import write_metadata
from moe_exp.checkpoint.state import CONTENT, Progress, Trained, parameters_in_sync, whole_state
from moe_exp.config import Config
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.devices import rank_place
from moe_exp.host.files import HashedFile
from moe_exp.runs.run_folder import package_versions

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

logger = logging.getLogger(__name__)

Item = tuple[MetadataIndex, Tensor | io.BytesIO]


class SaveError(RuntimeError):
    """A checkpoint that had to be written was not."""


@dataclass(frozen=True)
class Saved:
    """How a save ended, the same on every rank."""

    iteration: int  # of the checkpoint
    seconds: float  # from the call of `begin` until it was published
    num_bytes: int  # of all its files; 0 where it failed
    error: str  # why there is no new checkpoint; empty: there is


@dataclass(frozen=True)
class CheckpointPlan:
    """Tensors and files that this rank writes. Over all ranks every value of every tensor is in one item."""

    items: list[Item]  # pieces of tensors, and objects as bytes, with their names in `.metadata`
    common: dict[str, Any]  # what is not sharded, the same on every rank; rank 0 writes it
    metadata: Metadata | None  # of the whole checkpoint but for where the pieces lie; rank 0 alone has it

    def staged(self) -> "CheckpointPlan":
        """A copy in host memory, which later steps of training do not change."""
        items: list[Item] = []
        # of tensors that are on the CPU, too; objects are bytes already
        for index, data in self.items:
            items.append((index, data.to("cpu", copy=True) if isinstance(data, Tensor) else data))
        return replace(self, items=items, common=copy.deepcopy(self.common))


class _PlannedItems(FileSystemWriterAsync):  # type: ignore[misc]  # Megatron has no types
    """Stands where Megatron's planning hands over to its writer, and keeps what would have been written."""

    items: list[Item]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Megatron's makes the folder, and where that fails on one rank the others wait for it.
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.items = [(item.index, planner.resolve_data(item)) for item in plan.items]


def plan_save(state: dict[str, Any], group: ProcessGroup) -> CheckpointPlan:
    """Divides a state (`whole_state`, used up) over all ranks. The ranks of `group` (data and context
    parallel) hold the same pieces and write a part of them each.
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
        # of all ranks, in the file, for a reuse that we do not make
        del metadata.all_local_plans
    return CheckpointPlan(writer.items, common, metadata)


@dataclass(frozen=True)
class Written:
    """Report of a rank to rank 0 about its files."""

    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)  # where each of its pieces lies
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its files, for the manifest
    fingerprints: Fingerprints = field(default_factory=dict)  # its shares of those of the tensors
    error: str = ""  # why it failed, in a line; empty: it did not


@dataclass(frozen=True)
class _Pending:
    """A save between `begin` and `finish`."""

    iteration: int
    start: float
    partial: Path
    metadata: Metadata | None
    facts: dict[str, Any]
    written: Future[Written]
    shares: Fingerprints  # of this rank


class CheckpointWriter:
    """The saves of a run, one at a time. Retention keeps `loaded`, the iteration that training resumed from,
    and those that `held` names on rank 0.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        checkpoints: Path,
        loaded: int | None = None,
        held: Callable[[], Collection[int]] = tuple,
    ):
        self._config, self._runtime, self._checkpoints, self._loaded = config, runtime, checkpoints, loaded
        self._held = held
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._published: set[int] = set()  # by this start; on rank 0

    @property
    def is_pending(self) -> bool:
        """Whether a save was begun and not finished; equal on every rank."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes files of it."""
        return self._pending is not None and not self._pending.written.done()

    def begin(self, trained: Trained, progress: Progress, valid_loss: float | None = None) -> None:
        """Begins to write a checkpoint; the one before has to be finished. Without ASYNC_SAVE `trained` must
        not change before `finish`. `valid_loss`: nats per token, if measured now.
        """
        assert self._pending is None, "finish the save before"
        start, iteration = time.monotonic(), progress.iteration
        partial = folders.iteration_folder(self._checkpoints, iteration)
        partial = partial.with_name(partial.name + folders.PARTIAL)

        def make() -> str:
            """Makes an empty folder to write into; returns why that failed, or nothing."""
            try:
                folders.recover(partial.parent)
                partial.mkdir(parents=True)
            except OSError as error:
                return _line(error, 0)
            return ""

        # All learn of it at once: without a folder no rank has to plan. Later errors wait for `finish`.
        if error := from_first_rank(make):
            failed = self._thread.submit(Written, error=error)
            self._pending = _Pending(iteration, start, partial, None, {}, failed, {})
            return
        with parameters_in_sync(trained.model):
            state = whole_state(self._config, self._runtime, trained, progress)
            plan = plan_save(state, self._runtime.groups.dp_cp)
        plan.common["versions"] = package_versions()
        written = self._write(partial, plan)
        # Of the tensors themselves, not of a copy of them, and while the thread writes.
        tensors = ((index, data) for index, data in plan.items if isinstance(data, Tensor))
        pieces = ((index.fqn, data, tuple(index.offset or ())) for index, data in tensors)
        shares = fingerprints.fingerprints_of(pieces) if self._config.fingerprints else {}
        # JSON has no NaN
        loss = valid_loss if valid_loss is not None and math.isfinite(valid_loss) else None
        layout = {name: getattr(self._config, name) for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
        facts = {"versions": plan.common["versions"], "valid_loss": loss}
        facts |= {"world_size": self._runtime.world_size, "layout": layout}
        self._pending = _Pending(iteration, start, partial, plan.metadata, facts, written, shares)

    def _write(self, partial: Path, plan: CheckpointPlan) -> Future[Written]:
        """Has the thread write this rank's files; an error stays on its rank until all are asked."""
        try:
            if self._config.async_save:
                plan = plan.staged()
        # torch says "not enough memory" with the second
        except (MemoryError, RuntimeError) as error:
            return self._thread.submit(Written, error=_line(error, self._runtime.rank))
        if self._runtime.device.type == "cuda":
            # the thread has a stream of its own
            torch.cuda.synchronize()
        return self._thread.submit(write_rank_files, partial, self._runtime.rank, plan.items, plan.common)

    def finish(self) -> Saved | None:
        """Waits for the files of all ranks and publishes the checkpoint; None if no save was begun. A save
        that fails raises nothing, and leaves nothing but all older checkpoints.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        all_written: list[Any] = [None] * self._runtime.world_size
        written = replace(pending.written.result(), fingerprints=pending.shares)
        torch.distributed.gather_object(written, all_written if self._runtime.is_first else None)
        return from_first_rank(lambda: self._conclude(pending, all_written))

    def _conclude(self, pending: _Pending, all_written: list[Written]) -> Saved:
        """On rank 0: publishes the checkpoint and prunes, or removes what there is of the new one."""
        num_bytes = 0
        try:
            if not (error := "; ".join(dict.fromkeys(one.error for one in all_written if one.error))):
                # What makes a checkpoint of the files of all ranks. The manifest is the last.
                metadata, partial = pending.metadata, pending.partial
                assert metadata is not None
                places = (one.places.items() for one in all_written)
                metadata.storage_data = dict(chain.from_iterable(places))
                metadata.storage_meta, metadata.version = StorageMeta(), "1.0.0"
                write_metadata(partial, metadata)
                names = [METADATA, "metadata.json"]
                if found := fingerprints.added(one.fingerprints for one in all_written):
                    fingerprints.write(partial, found)
                    names.append(fingerprints.FILE)
                entries = {name: entry for one in all_written for name, entry in one.entries.items()}
                entries |= {name: folders.entry_of(partial / name) for name in names}
                manifest = folders.Manifest(pending.iteration, dict(sorted(entries.items())), pending.facts)
                manifest.write(partial)
                num_bytes = manifest.num_bytes
                folders.publish(pending.partial, pending.iteration)
                self._published.add(pending.iteration)
        # A full disk, or whatever else: the run continues without this checkpoint.
        except Exception as caught:
            error = _line(caught, 0)
        if error:
            shutil.rmtree(pending.partial, ignore_errors=True)
        else:
            self._remove_others(pending.iteration)
        return Saved(pending.iteration, time.monotonic() - pending.start, 0 if error else num_bytes, error)

    def _remove_others(self, newest: int) -> None:
        config, checkpoints = self._config, self._checkpoints
        if not config.keep_last:
            return
        # The new one is published: an error is no reason to end the run.
        try:
            # Those newer than it are of an attempt that was given up; training will come to them again.
            found = [iteration for iteration in folders.iterations(checkpoints) if iteration <= newest]
            losses = folders.valid_losses(checkpoints)
        except OSError as error:
            logger.warning("cannot list %s, no checkpoint is removed: %s", checkpoints, error)
            return
        # Those after `loaded` that this start has not published are damaged, or of an attempt that was
        # given up.
        newer = [] if self._loaded is None else [i for i in found if i > self._loaded]
        passed = [iteration for iteration in newer if iteration not in self._published]
        sound = [iteration for iteration in found if iteration not in passed]
        kept = {"last": config.keep_last, "every": config.keep_every, "best": config.keep_best}
        gone = folders.which_to_remove(sound, losses, **kept)
        left = {self._loaded, *self._held()}
        for iteration in [*passed, *(one for one in gone if one not in left)]:
            try:
                removed = folders.take_name(folders.iteration_folder(checkpoints, iteration))
                delete = functools.partial(shutil.rmtree, removed, ignore_errors=True)
                # All ranks wait here, and a network file system takes long for many files.
                self._thread.submit(delete) if config.async_save else delete()
            except OSError as error:
                logger.warning("cannot remove the checkpoint at iteration %d: %s", iteration, error)


def write_rank_files(folder: Path, rank: int, items: list[Item], common: dict[str, Any]) -> Written:
    """Writes `items` and, on rank 0, `common`, synced; an error is in what it returns."""
    try:
        places, entries = {}, {}
        if items:
            name = f"__{rank}_0.distcp"
            # hashed while it is written, as reading it again would take as long
            with HashedFile(folder / name) as file:
                for index, data in items:
                    start = file.tell()
                    if isinstance(data, io.BytesIO):
                        file.write(data.getbuffer())
                    else:
                        values = data.detach().cpu()
                        # torch.save writes the whole storage of a view
                        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
                            values = values.clone()
                        torch.save(values, cast("IO[bytes]", file))
                        del values  # before the next is copied, so that the host holds only one
                    places[index] = _StorageInfo(name, start, file.tell() - start)
            entries[name] = file.entry()
        if rank == 0:
            with HashedFile(folder / COMMON) as file:
                torch.save(common, cast("IO[bytes]", file))
            entries[COMMON] = file.entry()
    except Exception as error:
        return Written(error=_line(error, rank))
    return Written(places, entries)


def _line(error: Exception, rank: int) -> str:
    """An error in a line, with the rank that had it."""
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{rank_place(rank)}: {' '.join(reason.split())}"
