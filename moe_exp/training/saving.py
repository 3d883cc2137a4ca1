"""Saves and resumes a run, and reports this in log lines and events. Every rank calls these functions."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from moe_exp.checkpoint import load as loading
from moe_exp.checkpoint.format.folders import iteration_of, set_latest
from moe_exp.checkpoint.integrity import Source, find_source
from moe_exp.checkpoint.remote import Uploads, fetch_load_dir, fetch_run
from moe_exp.checkpoint.save import CheckpointWriter, SaveError
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.checkpoint.upcycle import upcycle
from moe_exp.config import Config, ConfigError, problem
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.exit_codes import FAILED, TO_BE_CONTINUED
from moe_exp.host.files import is_url
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.metrics import Metrics
from moe_exp.training.step import IterationEnd
from moe_exp.watch.hangs import heartbeat

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckpointManager:
    """Starts, finishes and reports a run's saves; `source` is the checkpoint that the run resumed from.

    The attribute `writer` writes the files. Only rank 0 has `metrics`, and only rank 0 uploads to REMOTE_DIR.
    """

    def __init__(
        self, config: Config, runtime: Runtime, folder: RunFolder, source: Source | None, trained: Trained,
        metrics: Metrics | None,
    ):  # fmt: skip
        self._config, self._trained, self._metrics = config, trained, metrics
        self._uploads = Uploads(config) if config.remote_dir and runtime.is_first else None
        # KEEP_LAST must keep checkpoints until they are uploaded
        held = self._uploads.held if self._uploads else tuple
        loaded = iteration_in_this_run(source, folder)
        self.writer = CheckpointWriter(config, runtime, folder.checkpoints, loaded, held)
        self.last_iteration: int | None = None  # of this start's newest checkpoint; the same on every rank

    @heartbeat.during("checkpoint")
    def save(self, progress: Progress, valid_loss: float | None = None, *, is_last: bool = False) -> float:
        """Saves a checkpoint; with ASYNC_SAVE only starts the save. Returns the seconds that training waited.

        Raises SaveError on every rank if the run's last checkpoint (`is_last`) cannot be written.
        """
        start = time.monotonic()
        self.finish()
        self.writer.begin(self._trained, progress, valid_loss)
        if is_last or not self._config.async_save:
            self.finish(is_last=is_last)
        return time.monotonic() - start

    @heartbeat.during("checkpoint")
    def finish(self, *, is_last: bool = False) -> float:
        """Waits for a pending save and reports it. Returns the seconds waited. SaveError: see `save`."""
        start = time.monotonic()
        # Errors are returned in `saved`, on every rank: training continues, as the next save may succeed.
        saved = self.writer.finish()
        if saved is not None and not saved.error:
            self.last_iteration = saved.iteration
            if self._uploads is not None:
                self._uploads.add(saved.iteration)
        if saved is not None and self._metrics is not None:
            if saved.error:
                logger.warning("no checkpoint at iteration %d: %s", saved.iteration, saved.error)
                self._metrics.event("checkpoint_failed", saved.iteration, reason=saved.error)
            else:
                logger.info("saved checkpoint at iteration %d in %.1f s", saved.iteration, saved.seconds)
                facts = {"seconds": round(saved.seconds, 3), "bytes": saved.num_bytes}
                self._metrics.event("checkpoint", saved.iteration, **facts)
        self._report_uploads()
        if saved is not None and saved.error and is_last:
            what = f"could not save the last checkpoint, at iteration {saved.iteration} ({saved.error})"
            fix = "free disk space and repeat the command to resume from the previous checkpoint"
            raise SaveError(f"{what}. Fix: {fix}.")
        return time.monotonic() - start

    def finish_written(self, ends: Sequence[IterationEnd]) -> float:
        """Finishes a pending save (ASYNC_SAVE) if all ranks have written it; returns the seconds waited.

        `ends`: the iteration results that training has just read. Every rank must call this function with
        the same `ends`.
        """
        return self.finish() if self.writer.is_pending and ends and not ends[-1].is_writing else 0.0

    @heartbeat.during(heartbeat.PAUSED)
    def finish_uploads(self, stop: str = "") -> None:
        """Waits for running uploads to REMOTE_DIR at the end of the run."""
        if self._uploads is not None:
            # After a signal or EXIT_DURATION the job may be killed soon: 30 s is SLURM's default KillWait.
            self._uploads.wait(None if stop in ("", "EXIT", "EXIT_INTERVAL") else 30.0)
            self._report_uploads()

    def _report_uploads(self) -> None:
        if self._uploads is not None and self._metrics is not None:
            for kind, iteration, facts in self._uploads.events():
                self._metrics.event(kind, iteration, **facts)

    def stopped_code(self, progress: Progress) -> int:
        """Exit code of a stopped run: TO_BE_CONTINUED if this start has saved a checkpoint, else FAILED."""
        if self.last_iteration is not None:
            return TO_BE_CONTINUED
        # Otherwise a chain of jobs would restart at the same iteration forever.
        if self._metrics is not None:  # once, not from every rank
            line = "no checkpoint has been saved since this start (SAVE_AT_END=false)"
            logger.warning("%s: iterations up to %d are lost", line, progress.iteration)
        return FAILED


def choose_source(config: Config, folder: RunFolder) -> Source | None:
    """Newest checkpoint of the run, from REMOTE_DIR if no checkpoint is local.

    If the run has no checkpoint, returns the newest one in LOAD_DIR, or None if LOAD_DIR is not set. Raises
    ConfigError if LOAD_DIR has no checkpoint.
    """
    try:
        if config.remote_dir:  # only has work to do under bare torchrun: our launcher has fetched the run
            _from_store(lambda: fetch_run(config))
        source = find_source(folder.checkpoints, checksums=config.verify_checkpoint)
        if source is None and config.load_dir:
            place = Path(config.load_dir).expanduser()
            if is_url(config.load_dir):
                place = _from_store(lambda: fetch_load_dir(config))
            source = find_source(place, checksums=config.verify_checkpoint)
            if source is None:
                fix = "specify a checkpoints folder, a run folder or the folder of one iteration"
                raise ConfigError([problem("load_dir", config.load_dir, "has no checkpoint", fix)])
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    return source


@heartbeat.during(heartbeat.PAUSED)
def _from_store(fetch: Callable[[], T]) -> T:
    """Calls `fetch` on rank 0. Every rank returns its result, or raises ValueError if `fetch` fails."""

    def fetched() -> T:
        try:
            return fetch()
        except OSError as error:
            raise ValueError(str(error)) from error

    return from_first_rank(fetched)


def resume(
    config: Config, runtime: Runtime, folder: RunFolder, source: Source | None, trained: Trained
) -> Progress:
    """Loads `source`. Without `source`, training starts at iteration 0; weights come from UPCYCLE_FROM if it
    is set. Raises RestoreError on every rank if loaded tensors differ from the saved tensors.
    """
    if source is None:
        if config.upcycle_from:
            logger.info("%s", upcycle(config, runtime, trained))
        return Progress()
    try:
        progress = loading.load(config, runtime, source.folder, trained)
    except loading.RestoreError as error:
        if runtime.is_first:
            facts = {"checkpoint": str(source.folder), "tensors": error.names}
            append_event(folder.metrics, "restore_failed", iteration_of(source.folder), **facts)
        raise
    logger.info("resumed from iteration %d of %s", progress.iteration, source.folder.parent)
    if source.damages and runtime.is_first and iteration_in_this_run(source, folder) is not None:
        # Newer damaged checkpoints are kept for inspection until training overwrites their iterations.
        set_latest(folder.checkpoints, iteration_of(source.folder))
    return progress


def iteration_in_this_run(source: Source | None, folder: RunFolder) -> int | None:
    """Iteration of `source` if it is a checkpoint of this run, else None."""
    if source is None or source.folder.parent != folder.checkpoints:
        return None
    return iteration_of(source.folder)
