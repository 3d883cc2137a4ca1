"""Saves checkpoints atomically: ranks write into a temporary folder, which is renamed on success and removed
on failure. All ranks must call `begin` and `finish`.

1. `CheckpointWriter.begin` creates the temporary folder and uses collectives to plan what each rank writes.
2. A thread writes this rank's files. With ASYNC_SAVE, the thread writes from a host-memory copy of the state
   while training continues.
3. In `CheckpointWriter.finish`, all ranks report their files to rank 0. Rank 0 writes metadata and manifest,
   then syncs and renames the folder.

In step 2, no rank waits for other ranks. If a rank runs out of disk space, all ranks learn of it in step 3.
"""

import copy
import functools
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from moe_exp.checkpoint.format import fingerprints, folders
from moe_exp.checkpoint.format.fingerprints import Fingerprints
from moe_exp.checkpoint.format.torch_dist import TensorChunk
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter, WrittenFiles, write_metadata
from moe_exp.checkpoint.state import CONTENT, Progress, Trained, parameters_in_sync, whole_state
from moe_exp.config import Config
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.devices import rank_place
from moe_exp.runs.run_folder import iterations, package_versions

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

logger = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A required checkpoint could not be written."""


@dataclass(frozen=True)
class Saved:
    """Result of a save, the same on every rank."""

    iteration: int
    seconds: float  # from the call of `begin` to the rename
    num_bytes: int  # total size; 0 if the save failed
    error: str  # reason why the save failed; empty on success


@dataclass(frozen=True)
class CheckpointPlan:
    """Data that this rank writes. Across all ranks, each value of each tensor is in exactly one chunk."""

    chunks: list[TensorChunk]
    objects: dict[str, Any]  # by full key
    common: dict[str, Any]  # unsharded state, the same on every rank; written by rank 0

    def staged(self) -> "CheckpointPlan":
        """Copy of the plan and its data in host memory, unaffected by further training."""
        # Tensors that are already on the CPU are copied as well, since training changes them in place.
        chunks = [(key, x.to("cpu", copy=True), shape, offsets) for key, x, shape, offsets in self.chunks]
        return CheckpointPlan(chunks, copy.deepcopy(self.objects), copy.deepcopy(self.common))


def plan_save(state: dict[str, Any], group: ProcessGroup) -> CheckpointPlan:
    """Divides the training state `state` among all ranks; modifies `state` in place. The ranks of `group`
    (data and context parallel) hold the same shards, and each rank writes some of them.
    """
    # Megatron-LM reads this description to choose the keys that it requests.
    state["content_metadata"] = CONTENT
    # The wrapper checks that every piece has one owner, after the pieces are divided.
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    strategy.apply_saving_parallelization(sharded)
    plan = CheckpointPlan([], {}, common)
    for piece in nested_values(sharded):
        if not is_main_replica(piece.replica_id):
            continue
        if isinstance(piece, ShardedObject):
            plan.objects[piece.unique_key] = piece.data
        else:
            values = piece.data.detach().view((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
            plan.chunks.append((piece.key, values, tuple(piece.global_shape), tuple(piece.global_offset)))
    return plan


@dataclass(frozen=True)
class Written:
    """A rank's report to rank 0 about the files that it has written."""

    files: WrittenFiles = field(default_factory=WrittenFiles)
    fingerprints: Fingerprints = field(default_factory=dict)  # its shares of the tensors' fingerprints
    error: str = ""  # one-line reason for a failure; empty on success


@dataclass(frozen=True)
class _Pending:
    """A save between `begin` and `finish`."""

    iteration: int
    start: float
    partial: Path
    facts: dict[str, Any]
    written: Future[Written]
    shares: Fingerprints  # this rank's


class CheckpointWriter:
    """Saves one checkpoint at a time. Keeps iteration `loaded` and all iterations from rank 0's `held()`."""

    def __init__(
        self, config: Config, runtime: Runtime, checkpoints: Path, loaded: int | None = None,
        held: Callable[[], Collection[int]] = tuple,
    ):  # fmt: skip
        self._config, self._runtime, self._checkpoints, self._loaded = config, runtime, checkpoints, loaded
        self._held = held
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._published: set[int] = set()  # since this start; only on rank 0

    @property
    def is_pending(self) -> bool:
        """Whether a save has started but not finished; the same on every rank."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing files of the pending save."""
        return self._pending is not None and not self._pending.written.done()

    def begin(self, trained: Trained, progress: Progress, valid_loss: float | None = None) -> None:
        """Starts a save. Without ASYNC_SAVE, `trained` must not change until `finish`.

        `valid_loss`: validation loss at this iteration (nats per token), or None.
        """
        assert self._pending is None, "finish the previous save first"
        start, iteration = time.monotonic(), progress.iteration
        partial = folders.iteration_folder(self._checkpoints, iteration)
        partial = partial.with_name(partial.name + folders.PARTIAL)

        def make() -> str:
            """Creates an empty folder to write into; returns an error message, or "" on success."""
            try:
                folders.recover(partial.parent)
                partial.mkdir(parents=True)
            except OSError as error:
                return _line(error, 0)
            return ""

        # All ranks learn of this error now, and none of them plans. Later errors are reported in `finish`.
        if error := from_first_rank(make):
            failed = self._thread.submit(Written, error=error)
            self._pending = _Pending(iteration, start, partial, {}, failed, {})
            return
        with parameters_in_sync(trained.model):
            state = whole_state(self._config, self._runtime, trained, progress)
            plan = plan_save(state, self._runtime.groups.dp_cp)
        plan.common["versions"] = package_versions()
        written = self._write(partial, plan)
        # Computed from the tensors themselves rather than the staged copy, while the thread is writing.
        pieces = ((key, values, offsets) for key, values, _, offsets in plan.chunks)
        shares = fingerprints.fingerprints_of(pieces) if self._config.fingerprints else {}
        # JSON has no NaN
        loss = valid_loss if valid_loss is not None and math.isfinite(valid_loss) else None
        layout = {name: getattr(self._config, name) for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
        facts = {"versions": plan.common["versions"], "valid_loss": loss}
        facts |= {"world_size": self._runtime.world_size, "layout": layout}
        self._pending = _Pending(iteration, start, partial, facts, written, shares)

    def _write(self, partial: Path, plan: CheckpointPlan) -> Future[Written]:
        """Starts the thread that writes this rank's files. `finish` reports errors of the thread."""
        try:
            if self._config.async_save:
                plan = plan.staged()
        # PyTorch raises RuntimeError when memory runs out.
        except (MemoryError, RuntimeError) as error:
            return self._thread.submit(Written, error=_line(error, self._runtime.rank))
        if self._runtime.device.type == "cuda":
            # The thread uses its own stream, which does not wait for pending kernels or copies.
            torch.cuda.synchronize()
        return self._thread.submit(write_rank_files, partial, self._runtime.rank, plan)

    def finish(self) -> Saved | None:
        """Waits for all ranks, then publishes the checkpoint. If the save fails, raises no exception; the
        reason is in `Saved.error`. Returns None if no save was started.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        all_written: list[Any] = [None] * self._runtime.world_size
        written = replace(pending.written.result(), fingerprints=pending.shares)
        torch.distributed.gather_object(written, all_written if self._runtime.is_first else None)
        return from_first_rank(lambda: self._conclude(pending, all_written))

    def _conclude(self, pending: _Pending, all_written: list[Written]) -> Saved:
        """On rank 0, publishes a checkpoint and removes old ones. If the save failed, removes its files."""
        num_bytes, errors = 0, [one.error for one in all_written if one.error]
        error = "; ".join(dict.fromkeys(errors))  # ranks of one node often report the same error
        try:
            if not error:
                entries = write_metadata(pending.partial, [one.files for one in all_written])
                if found := fingerprints.added(one.fingerprints for one in all_written):
                    fingerprints.write(pending.partial, found)
                    entries[fingerprints.FILE] = folders.entry_of(pending.partial / fingerprints.FILE)
                # The manifest is written last: its presence marks the other files as complete.
                manifest = folders.Manifest(pending.iteration, entries, pending.facts)
                manifest.write(pending.partial)
                num_bytes = manifest.num_bytes
                folders.publish(pending.partial, pending.iteration)
                self._published.add(pending.iteration)
        # The run continues without this checkpoint, for example if the disk is full.
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
        # The new checkpoint is already published, so an error here must not end the run.
        try:
            # Newer ones are from an abandoned attempt; training will reach these iterations again.
            found = [iteration for iteration in iterations(checkpoints) if iteration <= newest]
            losses = folders.valid_losses(checkpoints)
        except OSError as error:
            logger.warning("cannot list %s, so no checkpoint is removed: %s", checkpoints, error)
            return
        # Checkpoints after `loaded` that this start has not published are damaged or abandoned.
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
                # All ranks are waiting here, and a network file system is slow at removing many files.
                self._thread.submit(delete) if config.async_save else delete()
            except OSError as error:
                logger.warning("cannot remove the checkpoint at iteration %d: %s", iteration, error)


def write_rank_files(folder: Path, rank: int, plan: CheckpointPlan) -> Written:
    """Writes and syncs this rank's part of `plan`. An error is returned in `Written.error`, not raised."""
    try:
        with TorchDistWriter(folder, rank=rank) as writer:
            for key, values, shape, offsets in plan.chunks:
                writer.add_chunk(key, values, shape=shape, offsets=offsets)
            for key, value in plan.objects.items():
                writer.add_object(key, value)
            writer.next_file()
            if rank == 0:
                writer.add_common(plan.common)
    except Exception as error:
        return Written(error=_line(error, rank))
    return Written(writer.written)


def _line(error: Exception, rank: int) -> str:
    """Formats an error of rank `rank` as one line."""
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{rank_place(rank)}: {' '.join(reason.split())}"
