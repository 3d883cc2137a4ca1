"""Reacts to bad losses and corrupt computations. Consecutive bad steps end the run. A loss spike is logged,
and the run can roll back to a checkpoint before the spike. After silent corruption, the run rolls back.

After every iteration, every rank calls the guard with the same numbers, so no collective is needed to agree.
"""

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.format.folders import iteration_folder, iteration_of, set_latest
from moe_exp.checkpoint.integrity import find_source
from moe_exp.checkpoint.load import saved_progress
from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config
from moe_exp.data.samples.dataset import Range, Samples, SkippingSamples, merged, skipped_from, stream_ranges
from moe_exp.data.samples.megatron_dataset import MegatronSamples
from moe_exp.data.samples.order import is_same_order
from moe_exp.engine.runtime import Runtime, from_first_rank
from moe_exp.host.exit_codes import FAILED, START_AGAIN, TO_BE_CONTINUED
from moe_exp.host.files import write_json
from moe_exp.runs.records import iter_metrics
from moe_exp.runs.run_folder import RunFolder, iterations, read_rollbacks
from moe_exp.training.metrics import Metrics
from moe_exp.training.replica_checks import GradientCheck, ReplicaError
from moe_exp.training.spikes import LEVEL_WINDOW, Spike, SpikeDetector, SpikeEnd
from moe_exp.training.step import IterationEnd, Step
from moe_exp.watch.excluded_nodes import exclude_if_possible, exclude_list
from moe_exp.watch.hangs import heartbeat

logger = logging.getLogger(__name__)

# Skipped before the spike, because the loss of an iteration reflects the update by the previous batch.
MARGIN_ITERATIONS = 1
_LOWEST_LOSS_SCALE = 1.0  # Megatron's minimum; above it, an overflow is normal work of the loss scaler


class GuardEnd(RuntimeError):
    """Raised on all ranks to end the run; `line` is the error message, `code` the exit code."""

    def __init__(self, line: str, code: int):
        super().__init__(line)
        self.exit_code = code


class LossGuard:
    """Checks every iteration of a run and applies MAX_BAD_STEPS, SPIKE_ACTION and MAX_ROLLBACKS.

    Args:
        samples: training samples, used to report the documents of a spike.
        progress: progress at the start, with the loss history of the checkpoint.
        metrics: metrics of the run on rank 0; None on other ranks.
        finish_save: function that waits for a pending save.
    """

    def __init__(
        self, config: Config, runtime: Runtime, folder: RunFolder, trained: Trained, samples: Samples,
        progress: Progress, metrics: Metrics | None, finish_save: Callable[[], object],
    ):  # fmt: skip
        self.gradients = GradientCheck(config, runtime, trained, progress) if config.sdc_check_every else None
        self._config, self._runtime, self._folder, self._trained = config, runtime, folder, trained
        self._samples, self._metrics, self._finish_save = samples, metrics, finish_save
        self._skipped: Sequence[Range] = merged(progress.skipped_samples)
        self._detector = None if config.spike_action == "none" else SpikeDetector(progress.spike_windows)
        self._stage = samples.stage_at(max(0, progress.consumed_samples - 1)).number
        self._num_bad = 0
        self._recent: deque[Step] = deque(maxlen=LEVEL_WINDOW + MARGIN_ITERATIONS + 1)

    def check(self, progress: Progress, end: IterationEnd) -> None:
        """Checks an iteration; raises GuardEnd on every rank if the run must end or restart."""
        done = end.step
        self._recent.append(done)
        # A skipped step has a norm if the norm is not finite. Without a norm fp16 has overflowed, which
        # counts only if the loss scaler cannot lower its scale further.
        is_bad = not math.isfinite(end.lm_loss) or done.grad_norm is not None
        if not done.updated and (is_bad or self._trained.optimizer.get_loss_scale() <= _LOWEST_LOSS_SCALE):
            self._num_bad += 1
            self._bad_step(progress, end)
            return
        self._num_bad = 0
        if self._detector is None or not math.isfinite(end.lm_loss):
            return
        if (stage := self._samples.stage_at(done.first_sample).number) != self._stage:
            self._detector, self._stage = SpikeDetector(), stage  # other data have another loss level
        found = self._detector.add(done.iteration, end.lm_loss, done.grad_norm if done.updated else None)
        if isinstance(found, SpikeEnd):
            text = "the spike that started at iteration %d ended at iteration %d: %s"
            logger.info(text, found.first_iteration, found.iteration, found.outcome)
            self._event("spike_end", **asdict(found))
        elif found is not None:
            self._spike(found, progress, end)

    @contextmanager
    def corruption(self, progress: Progress) -> Iterator[None]:
        """If SDC_CHECK_EVERY is set and the block raises ReplicaError, rolls back and restarts the run."""
        try:
            yield
        except ReplicaError as error:
            if self.gradients is None:
                raise
            raise self._before_corruption(progress, error) from None

    @heartbeat.during("rollback")
    def _before_corruption(self, progress: Progress, error: ReplicaError) -> GuardEnd:
        """Rolls back to the newest checkpoint at or before the last passed check; may exclude a bad host."""
        config, folder, hosts = self._config, self._folder, sorted(set(error.hosts.values()))
        self._finish_save()
        names = (one.get("event") for one in iter_metrics(folder.metrics))
        number = from_first_rank(lambda: sum(name == "sdc" for name in names))
        begin = (progress.checked or 0) + 1
        done = go_back(config, folder, progress, iteration=begin, samples=None)
        has_none = from_first_rank(lambda: not iterations(folder.checkpoints))  # then from the start
        why = "" if has_none or not isinstance(done, str) else f"; {done}"
        if number >= config.max_rollbacks:
            why = f"; MAX_ROLLBACKS={config.max_rollbacks} reached"
        problem = str(error).partition("\n")[0]
        facts = {"back_to": None} if isinstance(done, str) else done
        facts |= {"problem": problem, "ranks": list(error.hosts), "hosts": hosts}
        self._event("sdc", iteration=progress.iteration, **facts)
        if self._metrics is not None and len(hosts) == 1:
            exclude_if_possible(exclude_list(config.run_dir), hosts[0], f"silent corruption: {problem}")
        line = f"silent corruption after iteration {progress.iteration}: {problem}"
        if why:
            fix = "check the nodes with PREFLIGHT=1, then repeat the command"
            return GuardEnd(f"{line}{why}. Fix: {fix}.", FAILED)
        # only another job has other nodes
        code = TO_BE_CONTINUED if len(hosts) == 1 and "SLURM_JOB_ID" in os.environ else START_AGAIN
        return GuardEnd(f"{line}; the same command resumes from an earlier state", code)

    def store_history(self, progress: Progress) -> None:
        """Copies the loss history into `progress`, so that the next save contains it."""
        if self._detector is not None:
            progress.spike_windows = self._detector.state()

    def _bad_step(self, progress: Progress, end: IterationEnd) -> None:
        config, done = self._config, end.step
        if self._num_bad == 1:
            values = {"loss": end.lm_loss, "grad_norm": done.grad_norm}
            # JSON has neither NaN nor infinity
            shown = {name: x if x is None or math.isfinite(x) else str(x) for name, x in values.items()}
            self._warn(
                "skipped the optimizer step of iteration %d: loss %s, gradient norm %s, samples %s",
                done.iteration, _text(end.lm_loss), _text(done.grad_norm), _ranges_text(self._stream([done])),
            )  # fmt: skip
            self._event("bad_step", iteration=done.iteration, **shown, **self._batches([done]))
        if not config.max_bad_steps or self._num_bad < config.max_bad_steps:
            return
        self._finish_save()
        where = self._save_apart(progress)
        self._event("too_many_bad_steps", iteration=done.iteration, in_a_row=self._num_bad, checkpoint=where)
        span = f"iterations {done.iteration - self._num_bad + 1} to {done.iteration}"
        rule = f"no optimizer step in {span}, because the loss or gradient was not finite; {where}"
        fix = "check the samples of the bad_step event in metrics.jsonl, lower LR, or set MAX_BAD_STEPS=0"
        raise GuardEnd(f"MAX_BAD_STEPS={config.max_bad_steps}: {rule}. Fix: {fix}.", FAILED)

    @heartbeat.during("checkpoint")
    def _save_apart(self, progress: Progress) -> str:
        """Saves a checkpoint that no run resumes from, in bad_steps/. Returns text for the error line."""
        place = free_place(self._folder.bad_steps, progress.iteration)
        # A writer for this checkpoint alone: retention must not touch the run's own checkpoints.
        config = self._config.model_copy(update={"keep_last": 0, "async_save": False})
        saver = CheckpointWriter(config, self._runtime, place.parent)
        self.store_history(progress)
        saver.begin(self._trained, progress)
        saved = saver.finish()
        assert saved is not None
        failed = f"saving the weights failed ({saved.error})"
        return failed if saved.error else f"saved the weights to {place}"

    def _spike(self, spike: Spike, progress: Progress, end: IterationEnd) -> None:
        offending = [done for done in self._recent if done.iteration >= spike.first_iteration]
        details = {name: value for name, value in asdict(spike).items() if value is not None}
        self._warn(
            "spike at iteration %d: loss %.4f (%.1f spreads above %.4f), gradient norm %s (%.1f spreads)",
            spike.iteration, spike.loss, spike.loss_z, spike.loss_level or 0.0, _text(spike.grad_norm),
            spike.grad_norm_z,
        )  # fmt: skip
        self._event("spike", **details, **self._batches(offending))
        if self._config.spike_action == "rollback":
            self._finish_save()
            self._roll_back(spike, progress, end)

    @heartbeat.during("rollback")
    def _roll_back(self, spike: Spike, progress: Progress, end: IterationEnd) -> None:
        config, begin = self._config, spike.first_iteration - MARGIN_ITERATIONS
        skipped = [done for done in self._recent if done.iteration >= begin]
        ranges, first = self._stream(skipped), skipped[0].iteration
        if config.rampup and config.data_stages:  # skip whole batches, so that later ones start as before
            start, stop = ranges[-1]
            ranges = (*ranges[:-1], (start, stop + -sum(b - a for a, b in ranges) % config.gbsz))
        num_before = from_first_rank(lambda: len(read_rollbacks(self._folder)))
        is_over = num_before >= config.max_rollbacks
        samples = None if is_over else ranges
        # Prefer a checkpoint from before `begin`. If that predates this start and none is usable, go back as
        # far as the iterations of this start allow.
        for undone in dict.fromkeys((begin, first)):
            done = go_back(config, self._folder, progress, iteration=undone, samples=samples)
            if not isinstance(done, str):
                break
        if isinstance(done, str):
            self._warn("no rollback, training continues: %s", done)
            self._event("no_rollback", iteration=progress.iteration, reason=done)
            return
        if is_over:
            reason = f"MAX_ROLLBACKS={config.max_rollbacks} reached"
            self._event("no_rollback", iteration=progress.iteration, reason=reason, **done)
            rule = f"another spike at iteration {spike.iteration} after {num_before} rollbacks"
            where = f"the same command resumes from iteration {done['back_to']}"
            fix = "lower LR, check the spike events in metrics.jsonl, or set SPIKE_ACTION=log to continue"
            line = f"MAX_ROLLBACKS={config.max_rollbacks}: {rule}; {where}. Fix: {fix}."
            raise GuardEnd(line, FAILED)
        facts = {"first_iteration": first, "samples": [list(pair) for pair in ranges]}
        self._event("rollback", iteration=progress.iteration, **facts, number=num_before + 1, **done)
        # Do not restart a run that was asked to stop in the meantime.
        code = TO_BE_CONTINUED if end.stop else START_AGAIN
        text = f"skipping samples {_ranges_text(ranges)} of iterations {first} to {progress.iteration}"
        line = f"rolled back to iteration {done['back_to']}, before the spike, {text}"
        raise GuardEnd(f"{line}; the same command resumes from that iteration", code)

    def _stream(self, iterations: Sequence[Step]) -> tuple[Range, ...]:
        """Sample ranges of these iterations, given as stream numbers, which also count skipped samples."""
        ends = [(done.first_sample, done.first_sample + done.batch_size) for done in iterations]
        return merged(pair for first, end in ends for pair in stream_ranges(first, end, self._skipped))

    @heartbeat.during("rollback")
    def _batches(self, iterations: Sequence[Step]) -> dict[str, Any]:
        """For an event: the samples of these iterations, and up to 1000 document numbers per file."""
        # Only rank 0 writes events, and looking up documents may build the order of a whole epoch.
        if self._metrics is None:
            return {}
        documents: dict[str, set[int]] = {}
        for done in iterations:
            for number in range(done.first_sample, done.first_sample + done.batch_size):
                origin = self._samples.origin(number)
                documents.setdefault(origin.prefix, set()).update(origin.documents)
        shown = {prefix: sorted(numbers)[:1000] for prefix, numbers in documents.items()}
        left_out = sum(map(len, documents.values())) - sum(map(len, shown.values()))
        samples = [list(pair) for pair in self._stream(iterations)]
        return {"samples": samples, "documents": shown, "documents_left_out": left_out}

    def _warn(self, text: str, *values: object) -> None:
        if self._metrics is not None:  # once, not from every rank
            logger.warning(text, *values)

    def _event(self, name: str, *, iteration: int, **details: Any) -> None:
        if self.gradients is not None and name in ("bad_step", "spike"):
            self.gradients.is_requested = True
        if self._metrics is not None:
            self._metrics.event(name, iteration, **details)


def _text(value: float | None) -> str:
    """Rounds `value` for a log line; metrics.jsonl keeps all digits."""
    return "none" if value is None else f"{value:.5g}"


def _ranges_text(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges)


# Rollback to before a spike. RUN/skipped_samples.json lists all rollbacks of a run, oldest first:
#
#     {"rollbacks": [{"time": ..., "iteration": of the alarm, "first_iteration": first skipped iteration,
#                     "back_to": iteration of the checkpoint, "sample_order": `SampleOrder.facts`,
#                     "samples": [[first, end], ...] as stream numbers}]}
#
# Later checkpoints also store the samples skipped so far (`Progress.skipped_samples`). On resume,
# `skipped_from` (data/samples/dataset.py) decides which of the two applies.


def samples_without_skips(
    folder: RunFolder, samples: Samples, sample_order: dict[str, Any], source: Path | None
) -> SkippingSamples:
    """Removes samples that earlier rollbacks decided to skip. All ranks must call this function.

    `sample_order`: order of `samples` (`SampleOrder.facts`); `source`: checkpoint to resume from. Raises
    ConfigError if the rollbacks cannot be read.
    """

    def skipped() -> tuple[Range, ...]:
        # A rollback names samples by number, so it is valid only for its own sample order.
        saved = (saved_progress(source) if source else None) or Progress()
        found = (one for one in read_rollbacks(folder) if is_same_order(sample_order, one["sample_order"]))
        pairs = [pair for one in found for pair in one["samples"]]
        return skipped_from(saved.skipped_samples, pairs, saved.consumed_samples)

    # Megatron's sample order ends with the run, ours does not.
    end = len(samples) if isinstance(samples, MegatronSamples) else None
    return SkippingSamples(samples, from_first_rank(skipped), end)


def go_back(
    config: Config, folder: RunFolder, progress: Progress, *, iteration: int, samples: Sequence[Range] | None
) -> dict[str, Any] | str:
    """Makes the next start resume from a checkpoint before `iteration` and skip `samples`. All ranks must
    call this function, and no save may be pending.

    Args:
        progress: current progress.
        iteration: first iteration to undo.
        samples: samples to skip, as ranges of sample numbers in the stream; None: skip nothing.

    Returns:
        On success, fields for an event, the same on every rank: `back_to` (iteration of the checkpoint from
        which the next start resumes) and `set_aside` (newer checkpoints, which were moved to RUN/set_aside).
        On failure, the reason as text: no usable earlier checkpoint, or a full disk.
    """
    try:
        source = find_source(folder.checkpoints, checksums=config.verify_checkpoint, newest=iteration - 1)
    except ValueError:  # all earlier checkpoints are damaged
        source = None
    if source is None:
        return f"no usable checkpoint of this run from before iteration {iteration}"
    back_to = iteration_of(source.folder)

    def move() -> dict[str, Any] | str:
        # Order matters: the skip, then `latest`, then the checkpoints. If the job is killed at any point, the
        # next start still finds a complete checkpoint and uses each sample once or skips it.
        set_aside = []
        try:
            if samples is not None:
                entry = {
                    "time": datetime.now().astimezone().isoformat(timespec="seconds"),
                    "iteration": progress.iteration, "first_iteration": iteration, "back_to": back_to,
                    "samples": [list(pair) for pair in samples], "sample_order": progress.sample_order,
                }  # fmt: skip
                write_json(folder.skipped_samples, {"rollbacks": [*read_rollbacks(folder), entry]})
            set_latest(folder.checkpoints, back_to)
            for newer in iterations(folder.checkpoints):
                if newer > back_to:  # training will write this iteration again
                    place = free_place(folder.set_aside, newer)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    iteration_folder(folder.checkpoints, newer).rename(place)
                    set_aside.append(str(place.relative_to(folder.set_aside)))
        except OSError as error:
            return f"{error.filename or folder.path}: {error.strerror or error}"
        return {"back_to": back_to, "set_aside": set_aside}

    return from_first_rank(move)


def free_place(parent: Path, iteration: int) -> Path:
    """First unused checkpoint path among `parent`/1/iter_N, `parent`/2/iter_N, ..."""
    places = (iteration_folder(parent / str(number), iteration) for number in itertools.count(1))
    return next(place for place in places if not place.exists())
