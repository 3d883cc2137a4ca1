"""Which checkpoint a run goes on from, and taking it up. Called by every rank."""

import logging
from pathlib import Path

from moe_exp.checkpoint import load as loading
from moe_exp.checkpoint.folders import iteration_of, set_latest
from moe_exp.checkpoint.integrity import Source, find_source
from moe_exp.checkpoint.restored import RestoreError
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config, ConfigError, problem
from moe_exp.engine.runtime import Runtime
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.upcycle import upcycle

logger = logging.getLogger(__name__)


def choose_source(config: Config, folder: RunFolder) -> Source | None:
    """The run's newest whole checkpoint, else that of LOAD_DIR; None: training starts at iteration 0.

    Raises:
        ConfigError: on every rank, where there are checkpoints and none can be used, or LOAD_DIR has none.
    """
    try:
        source = find_source(folder.checkpoints, checksums=config.verify_checkpoint)
        if source is None and config.load_dir:
            source = find_source(Path(config.load_dir).expanduser(), checksums=config.verify_checkpoint)
            if source is None:
                fix = "name a checkpoints folder, a run folder or the folder of one iteration"
                raise ConfigError([problem("load_dir", config.load_dir, "has no checkpoint", fix)])
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    return source


def resume(config: Config, runtime: Runtime, folder: RunFolder, source: Source | None, trained: Trained) -> Progress:
    """Loads the checkpoint of `choose_source`, else starts at iteration 0, from UPCYCLE_FROM if that is set.

    Raises:
        RestoreError: on every rank, where what is in memory is not what was saved. The checkpoint stays as it is, and the newest.
    """
    if source is None:
        if config.upcycle_from:
            logger.info("%s", upcycle(config, runtime, trained))
        return Progress()
    try:
        progress = loading.load(config, runtime, source.folder, trained)
    except RestoreError as error:
        if runtime.is_first:
            append_event(folder.metrics, "restore_failed", iteration_of(source.folder), checkpoint=str(source.folder), tensors=error.names)
        raise
    logger.info("resumed from iteration %d of %s", progress.iteration, source.folder.parent)
    if source.damages and runtime.is_first and own_source(source, folder) is not None:
        # The damaged ones stay for whoever wants to look at them; training will come to their iterations again.
        set_latest(folder.checkpoints, iteration_of(source.folder))
    return progress


def own_source(source: Source | None, folder: RunFolder) -> int | None:
    """Iteration of this run's checkpoint that training goes on from; not that of the progress in one of Megatron-LM."""
    return iteration_of(source.folder) if source is not None and source.folder.parent == folder.checkpoints else None
