"""Rollback to before a spike: which checkpoint, which samples are skipped, and what happens to newer
checkpoints.

RUN/skipped_samples.json lists all rollbacks of a run, oldest first:

    {"rollbacks": [{"time": ..., "iteration": that of the alarm, "first_iteration": the first that is skipped,
                    "back_to": the checkpoint's,
                    "samples": [[first, end], ...] by their numbers in the stream,
                    "sample_order": `SampleOrder.facts`}]}

Later checkpoints hold what was skipped until then (`Progress.skipped_samples`); `data.skipping.skipped_from`
decides which of the two counts on resume.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.format.folders import iteration_folder, iteration_of, iterations, set_latest
from moe_exp.checkpoint.integrity import find_source
from moe_exp.checkpoint.load import saved_progress
from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config
from moe_exp.data.samples.dataset import Range, Samples, SkippingSamples, skipped_from
from moe_exp.data.samples.megatron_dataset import MegatronSamples
from moe_exp.data.samples.order import is_same_order
from moe_exp.engine.runtime import from_first_rank
from moe_exp.host.files import write_json
from moe_exp.runs.run_folder import RunFolder, read_rollbacks


def samples_without_skips(
    folder: RunFolder, samples: Samples, sample_order: dict[str, Any], source: Path | None
) -> SkippingSamples:
    """`samples` without those that training skips when it resumes from `source`. Called by every rank.

    The skips of the run in `folder` apply only to the sample order in which they were found: `sample_order`
    has the `SampleOrder.facts` of this start. ConfigError on every rank if they cannot be read.
    """

    def skipped() -> tuple[Range, ...]:
        saved = (saved_progress(source) if source else None) or Progress()
        found = (one for one in read_rollbacks(folder) if is_same_order(sample_order, one["sample_order"]))
        pairs = [pair for one in found for pair in one["samples"]]
        return skipped_from(saved.skipped_samples, pairs, saved.consumed_samples)

    # Megatron's order ends with the run, ours does not.
    end = len(samples) if isinstance(samples, MegatronSamples) else None
    return SkippingSamples(samples, from_first_rank(skipped), end)


def go_back(
    config: Config,
    folder: RunFolder,
    progress: Progress,
    *,
    iteration: int,
    samples: Sequence[Range] | None,
) -> dict[str, Any] | str:
    """Makes the next start resume before `iteration`, without `samples`.

    Called by every rank, with no save pending. If killed at any point, a start still finds a complete
    checkpoint, and each sample is used once or skipped.

    Args:
        progress: where training is.
        iteration: the first to undo.
        samples: of the iterations from there on, by their numbers in the stream; None: none is skipped.

    Returns:
        For an event, the same on every rank: `back_to`, iteration of the checkpoint that the next start
        resumes from, and `set_aside`, names of the newer ones below RUN/set_aside. Or a line why nothing was
        done: no complete earlier checkpoint of this run, or a full disk.
    """
    try:
        source = find_source(folder.checkpoints, checksums=config.verify_checkpoint, newest=iteration - 1)
    except ValueError:  # all earlier ones are damaged
        source = None
    if source is None:
        return f"there is no whole checkpoint of this run from before iteration {iteration}"
    back_to = iteration_of(source.folder)

    def move() -> dict[str, Any] | str:
        """In an order that is safe to interrupt: the skip, then `latest`, then the checkpoints."""
        set_aside = []
        try:
            if samples is not None:
                entry = {
                    "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                    "iteration": progress.iteration,
                    "first_iteration": iteration,
                    "back_to": back_to,
                    "samples": [list(pair) for pair in samples],
                    "sample_order": progress.sample_order,
                }
                write_json(folder.skipped_samples, {"rollbacks": [*read_rollbacks(folder), entry]})
            set_latest(folder.checkpoints, back_to)
            for newer in iterations(folder.checkpoints):
                if newer > back_to:  # training will need its place
                    place = free_place(folder.set_aside, newer)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    iteration_folder(folder.checkpoints, newer).rename(place)
                    set_aside.append(str(place.relative_to(folder.set_aside)))
        except OSError as error:
            return f"{error.filename or folder.path}: {error.strerror or error}"
        return {"back_to": back_to, "set_aside": set_aside}

    return from_first_rank(move)


def free_place(parent: Path, iteration: int) -> Path:
    """A free path for a checkpoint of `iteration`: `parent`/1/iter_N, `parent`/2/iter_N, ..."""
    number = 1
    while (place := iteration_folder(parent / str(number), iteration)).exists():
        number += 1
    return place
