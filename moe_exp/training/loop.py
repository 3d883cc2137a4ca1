"""Entry point of each training rank: builds the job and runs the training loop.

`torchrun --nproc-per-node 2 -m moe_exp.train --num-experts 16` trains with settings from the environment and
from flags. `moe-exp train` and `run_moe_from_scratch.sh` check the settings first and start the ranks
themselves.
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint import load as loading
from moe_exp.checkpoint.format.folders import recover
from moe_exp.checkpoint.save import SaveError
from moe_exp.checkpoint.state import Progress, Trained, parameters_in_sync
from moe_exp.config import Config, ConfigError, add_arguments, load_config
from moe_exp.config.loading import given_values, settings_from_launcher
from moe_exp.config.parameter_groups import group_lines
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.data.own_text import prepared_by_launcher
from moe_exp.data.samples.prefetch import ReadAhead
from moe_exp.data.tokens.manifests import with_vocab_size
from moe_exp.engine import faults, optimizer_setup, runtime
from moe_exp.engine.averaged_weights import averaged_weights
from moe_exp.engine.backends import backends_of, check_run, tune_run
from moe_exp.engine.model import build_model
from moe_exp.engine.runtime import Runtime, from_first_rank, on_first_rank
from moe_exp.host.exit_codes import BAD_INPUT, FAILED, FINISHED, report_exit_code
from moe_exp.planner.costs.params import startup_report
from moe_exp.runs.run_folder import RunFolder, hold_run_folder, open_run_folder, release_run_folders
from moe_exp.runs.summary import finish_run
from moe_exp.training import samples as data
from moe_exp.training.console import end_logging, setup_logging
from moe_exp.training.interval import Interval, out_of_memory_text
from moe_exp.training.loss_guard import GuardEnd, LossGuard, samples_without_skips
from moe_exp.training.metrics import Metrics
from moe_exp.training.microbatch import start_graphs
from moe_exp.training.recordings import Recorder, dump, is_dumped
from moe_exp.training.replica_checks import ReplicaError, check_replicas
from moe_exp.training.saving import CheckpointManager, choose_source, iteration_in_this_run, resume
from moe_exp.training.step import IterationEnd, Job, Step, end_iteration, forward_backward, settle, train_step
from moe_exp.watch.excluded_nodes import exclude_list
from moe_exp.watch.hangs import heartbeat
from moe_exp.watch.hangs.call_trace import trace_calls
from moe_exp.watch.slow_ranks import report

logger = logging.getLogger(__name__)

ENDS = (ConfigError, SaveError, ReplicaError, GuardEnd)  # raised on every rank, so none waits for another

# Reading order: `main` reads the settings, `run` is one start of the run, `build` creates or restores model
# and optimizer, `train` is the loop, and `train_step` (training/step.py) one iteration. Losses and gradients
# come from `run_schedule` (training/microbatch.py) and the model (layers/moe_layer.py).
#
# `Job` is constant once built. `Progress` counts iterations and samples and is saved in every checkpoint.
# `Interval` sums the statistics of the next log line on the device. Every rank runs all of this. Only rank 0
# has `metrics` and writes for all ranks, so no collective may be behind `if metrics is not None`.


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with the settings from `argv` and the environment; returns the exit code."""
    runtime.stand_by()
    parser = argparse.ArgumentParser(prog="python -m moe_exp.train", description=__doc__)
    add_arguments(parser)
    try:
        arguments = parser.parse_args(argv)
        # Our own launcher passes on settings that it has already resolved and checked.
        config = settings_from_launcher() or checked_config(vars(arguments))
    except ConfigError as error:
        print(*(f"moe-exp: {line}" for line in error.problems), sep="\n", file=sys.stderr)
        return BAD_INPUT
    with faults.stop_signal() as stop, faults.named_by_rank(stop, partial(out_of_memory_text, config)):
        try:
            exit_code = run(config, stop)
        except ENDS as error:
            faults.end_job(str(error).splitlines(), getattr(error, "exit_code", FAILED))
    return exit_code


def checked_config(flags: Mapping[str, Any]) -> Config:
    """Settings from `flags` and the environment; raises ConfigError if a run cannot use them."""
    given = given_values(flags, os.environ)
    config = load_config(given, {})
    config, _ = with_vocab_size(config, given, RunFolder.of(config).config)
    if problems := list(config.problems()):
        raise ConfigError(problems)
    return config


def run(config: Config, stop: faults.StopSignal) -> int:
    """Builds the job, resumes or starts training, and records how it ends; returns the exit code."""
    heartbeat.start()
    job, progress = build(config, runtime.start(config))
    # If rank 0 cannot open the metrics, every rank exits; otherwise the others would hang in a collective.
    with on_first_rank(lambda: Metrics(config, job.folder, progress.iteration)) or nullcontext() as metrics:
        start = time.monotonic()
        if metrics is not None:
            log_start(job, progress, metrics)
        status, code = train(job, progress, metrics, stop)
        if metrics is not None:
            seconds = round(time.monotonic() - start, 3)
            metrics.event("end", progress.iteration, status=status, wall_seconds=seconds)
    if isinstance(job.train_stream, ReadAhead):
        job.train_stream.close()
    for chunk in job.trained.model:
        vars(chunk).clear()  # breaks the cycle through autograd's C++ hooks, which gc does not see
    has_launcher = report_exit_code(code)  # before the ranks disconnect, which may fail
    runtime.stop()
    # torchrun treats every code except 0 as a failure, so without our launcher a stopped run exits with 0.
    return code if code == FAILED and not has_launcher else 0


def log_start(job: Job, progress: Progress, metrics: Metrics) -> None:
    """Logs the run folder, data, model and backends, and writes events for problems found at startup."""
    config = job.config
    embedded = "embedded corpus, the source code of Python (PSF-2.0) and PyTorch (BSD-3-Clause)"
    backends = backends_of(config, job.runtime.device.type, job.kernel_failures, job.graph_failure)
    for line in (
        f"run folder: {job.folder.path}",
        f"training data: {config.train_data or embedded}",
        startup_report(config),
        *group_lines(config),
        *(f"{part}: {name} ({reason})" for part, (name, reason) in backends.items()),
    ):
        logger.info("%s", line)
    for damage in job.source.damages if job.source else ():
        metrics.event("damaged_checkpoint", progress.iteration, reason=damage)
    for failure in job.kernel_failures:
        metrics.event("kernels_failed", progress.iteration, **vars(failure))
    if job.graph_failure:
        metrics.event("graph_failed", progress.iteration, reason=job.graph_failure)
    if job.changes:
        metrics.event("other_data", progress.iteration, changes=[str(change) for change in job.changes])


def build(config: Config, rank: Runtime) -> tuple[Job, Progress]:
    """Builds data, model, optimizer and schedule; restores them from the newest checkpoint, if one exists."""
    # Rank 0 locks the run folder for this job and repairs it; then the checkpoint to resume from is chosen.
    folder = RunFolder.of(config)
    from_first_rank(lambda: hold_run_folder(config))
    from_first_rank(lambda: recover(folder.checkpoints))
    setup_logging(folder, rank.rank)
    source = choose_source(config, folder)
    checkpoint = source.folder if source else None
    if checkpoint is not None:
        loading.compare_model(config, checkpoint)  # before settings of another model overwrite config.yaml
    resumed_from = iteration_in_this_run(source, folder)
    from_first_rank(lambda: open_run_folder(config, sys.argv, resumed_from=resumed_from))

    # Training and validation data: token files instead of text, without the samples that rollbacks skip.
    files = data.with_placed_stages(prepared_by_launcher(config), folder, checkpoint)
    data.check_tokenizers(files)
    eod_id, document_tokens = data.describe_documents(files)
    config = config.model_copy(update={"document_tokens": document_tokens})  # for the FLOPs of attention
    all_samples, valid_stream = data.build_data(files)
    sample_order, changes = data.compare_data(files, checkpoint)
    samples = samples_without_skips(folder, all_samples, sample_order, checkpoint)
    data.compare_stages(files, samples.skipped, checkpoint)
    bytes_per_token = (
        data.bytes_per_token(files, valid_stream) if valid_stream is not None and rank.is_first else None
    )

    # Model and optimizer. Our MoELayer becomes the mlp of Megatron's GPTModel: engine/model.py ->
    # layers/spec.py -> layers/megatron/moe_parts.py -> layers/moe_layer.py.
    kernel_failures = check_run(config, rank)
    graph, reason = backends_of(config, rank.device.type, kernel_failures)["graph"]
    if config.cuda_graph == "on" and graph == "off":
        raise ConfigError([config.problem("cuda_graph", reason, "set CUDA_GRAPH=auto")])
    tune_run(config, rank, kernel_failures)
    has_graph = graph == "on"
    model = build_model(config, rank, kernel_failures, has_graph=has_graph)
    optimizer = optimizer_setup.build_optimizer(config, model, kernel_failures)
    trained = Trained(model, optimizer, optimizer_setup.LearningRateScheduler(config, optimizer))
    optimizer_setup.set_megatron_hooks(model, optimizer)
    # After set_megatron_hooks, whose finalize_model_grads it wraps. From here on optimizer.step() changes
    # nothing if the gradient norm is not finite.
    optimizer_setup.skip_steps_not_finite(optimizer, model)
    job = Job(
        config, rank, folder, trained,
        data.read_ahead(config, rank, samples) if config.num_workers else samples,
        valid_stream, source, changes, bytes_per_token, kernel_failures, eod_id,
    )  # fmt: skip

    heartbeat.enter("load")
    progress = resume(config, rank, folder, source, trained)
    progress.sample_order, progress.skipped_samples = sample_order, [list(pair) for pair in samples.skipped]
    if changes or resumed_from is None:
        progress.spike_windows = None  # the loss differs on other data
    if not config.sdc_check_every:
        progress.checked = None  # else a later start would go back to here
    if has_graph:
        graphs, failure = start_graphs(config, rank, model, samples, progress, eod_id)
        job = replace(job, graphs=graphs, graph_failure=failure)
    runtime.freeze_garbage()
    return job, progress


def train(job: Job, progress: Progress, metrics: Metrics | None, stop: faults.StopSignal) -> tuple[str, int]:
    """Trains until TRAIN_ITERS or a stop request; returns (`finished` or `stopped`, exit code)."""
    config, rank, folder, trained = job.config, job.runtime, job.folder, job.trained
    interval, recorder = Interval(config, rank, trained.model), Recorder(config, rank, folder)
    saves = CheckpointManager(config, rank, folder, job.source, trained, metrics)
    # Training itself would never notice a rank with other weights, because only gradients are reduced.
    interval.pause(check_replicas(config, rank, trained, progress, metrics))
    guard = LossGuard(config, rank, folder, trained, job.train_stream, progress, metrics, saves.finish)
    limits: dict[str, Any] = {"exit_minutes": config.exit_duration, "exit_interval": config.exit_interval}
    rules = faults.StopRules(stop, folder.exit_file if rank.is_first else None, **limits)
    step: Step | None = None
    late: Callable[[], IterationEnd] | None = None  # results that are not read yet

    while progress.iteration < config.train_iters:
        iteration = progress.iteration + 1  # `train_step` advances `progress`
        is_logged = _is_multiple(iteration, config.log_interval) or iteration == config.train_iters
        trace_calls(config, folder, rank.rank, iteration)
        recorder.begin(iteration)
        with guard.corruption(progress):
            step = train_step(
                job, progress, interval, count_zeros=is_logged, last=step, check=guard.gradients
            )
            # Read during the next iteration what is not needed at once: the GPU idles while the host waits.
            ends = [late()] if late else []
            at_once = is_due(config, iteration) or any(end.stop or not end.step.updated for end in ends)
            if at_once:
                settle(job, progress, interval, step)
            valid_loss = measure(job, progress, interval, metrics, recorder, step, is_logged=is_logged)

        # The only collective of the loop itself: all ranks agree whether to stop.
        late = end_iteration(job, step, rules.reason(iteration), is_writing=saves.writer.is_writing)
        if at_once:
            ends.append(late())
            late = None
        reason = next((end.stop for end in ends if end.stop), "")
        is_last = bool(reason) or iteration == config.train_iters
        heartbeat.enter("end" if is_last else "end_of_iteration")
        if reason and iteration < config.train_iters:
            log_stop(job, progress, interval, metrics, step, reason, is_logged=is_logged)
        interval.pause(saves.finish_written(ends), phase="checkpoint")

        # Before this iteration is saved, because a spike may restart the run from an older checkpoint.
        try:
            for end in ends:
                guard.check(progress, end)
        except GuardEnd:
            rules.acknowledge(reason)
            raise

        if (is_last and config.save_at_end) or _is_multiple(iteration, config.save_interval):
            guard.store_history(progress)
            interval.pause(saves.save(progress, valid_loss, is_last=is_last), phase="checkpoint")
        elif is_last:
            saves.finish()
        if is_last:
            rules.acknowledge(reason)  # not earlier: if killed during its last save, the run stops again
        if reason and iteration < config.train_iters:
            saves.finish_uploads(reason)
            return "stopped", saves.stopped_code(progress)
    saves.finish_uploads()
    return "finished", FINISHED


def is_due(config: Config, iteration: int) -> bool:
    """Whether the host needs this iteration's results at once, to log, save, validate, check or exit."""
    intervals = (
        config.log_interval, config.eval_interval, config.check_interval, config.save_interval,
        config.exit_interval,
    )  # fmt: skip
    is_multiple = any(_is_multiple(iteration, interval) for interval in intervals)
    return is_multiple or iteration == config.train_iters or is_dumped(config, iteration)


def measure(
    job: Job, progress: Progress, interval: Interval, metrics: Metrics | None, recorder: Recorder, step: Step,
    *, is_logged: bool,
) -> float | None:  # fmt: skip
    """Logs, validates, dumps tensors and compares ranks when due; returns the validation loss or None."""
    config, iteration, valid_loss = job.config, progress.iteration, None
    if metrics is not None and (first_sample := step.first_sample):
        number, seq_len, _ = job.train_stream.stage_at(first_sample)
        if number != job.train_stream.stage_at(first_sample - 1).number:
            files = config.stages[number].train_data
            text = "data stage %d starts at sample %d: %s, %d tokens per sample"
            logger.info(text, number, first_sample, files, seq_len)
            metrics.event("data_stage", iteration, stage=number, train_data=files, seq_len=seq_len)

    rows = interval.rank_times.end(iteration) if interval.rank_times else None
    if interval.rank_times and rows and metrics is not None:
        for name, found in interval.rank_times.slow.add(rows):
            metrics.event(name, iteration, **found)
            report(name, found, exclude_list(config.run_dir) if config.exclude_slow else None)
    heartbeat.enter("end_of_iteration")
    with heartbeat.during("profile"):
        recorder.end(iteration)
    if is_logged:
        log(job, progress, interval, metrics, step)
    if job.valid_stream is not None and _is_multiple(iteration, config.eval_interval):
        valid_loss, seconds = validate(job, progress, metrics)
        interval.pause(seconds)
    if is_dumped(config, iteration):
        dump(config, job.runtime, job.folder.path, job.trained, progress)
    checks_saves = config.sdc_check_every and _is_multiple(iteration, config.save_interval)
    if checks_saves or _is_multiple(iteration, config.check_interval):
        interval.pause(check_replicas(config, job.runtime, job.trained, progress, metrics))
    return valid_loss


@heartbeat.during("evaluation")
@torch.no_grad()
def validate(job: Job, progress: Progress, metrics: Metrics | None) -> tuple[float, float]:
    """Records losses of raw and averaged weights; returns raw weights' loss (nats per token) and time (s)."""
    start, model, ema_loss = time.monotonic(), job.trained.model, None
    for chunk in model:
        chunk.eval()
    # With an overlapped gather, part of the parameters arrives only in the next training forward pass.
    with parameters_in_sync(model):
        loss = mean_valid_loss(job)
        if progress.num_averaged:
            with averaged_weights(job.trained.optimizer, model):
                ema_loss = mean_valid_loss(job)
    for chunk in model:
        chunk.train()
    if metrics is not None:
        metrics.valid(progress, loss, ema_lm_loss=ema_loss, bytes_per_token=job.bytes_per_token)
    return loss, time.monotonic() - start


def mean_valid_loss(job: Job) -> float:
    """Mean loss over the first EVAL_ITERS global batches of validation data; NaN if all tokens are masked."""
    assert job.valid_stream is not None
    config, total = job.config, torch.zeros(2, dtype=torch.float64, device=job.runtime.device)
    for index in range(config.eval_iters):
        first, number = index * config.gbsz, config.num_microbatches
        losses = forward_backward(job, job.valid_stream, first, number, forward_only=True)
        if losses and job.runtime.groups.tp.rank() == 0:  # other tensor parallel ranks have the same losses
            total += torch.stack(losses).double().sum(dim=0)
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item()


def log(job: Job, progress: Progress, interval: Interval, metrics: Metrics | None, step: Step) -> None:
    """Logs the interval that ends with `step`. Called by every rank."""
    record = interval.record(
        progress, learning_rate=job.trained.scheduler.get_lr({}), grad_norm=step.grad_norm,
        num_zeros=step.num_zeros, loss_scale=float(job.trained.optimizer.get_loss_scale()),
    )  # fmt: skip
    if metrics is not None:
        metrics.train(record)


def log_stop(
    job: Job, progress: Progress, interval: Interval, metrics: Metrics | None, step: Step, reason: str, *,
    is_logged: bool,
) -> None:  # fmt: skip
    """Logs that the run stops early. Called by every rank."""
    if not is_logged:  # otherwise no record would contain these iterations
        log(job, progress, interval, metrics, step)
    if metrics is not None:
        logger.info("stopping after iteration %d: %s", progress.iteration, faults.STOP_REASONS[reason])
        metrics.event("stop", progress.iteration, reason=reason)


def _is_multiple(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


# Training from another program.


def train_here(flags: Mapping[str, Any]) -> RunFolder:
    """Trains as one rank of a job that another program started. `moe_exp.train` calls this on every rank.

    Raises:
        ConfigError, SaveError, ReplicaError, GuardEnd: on every rank, if the run cannot start or fails.
    """
    config = checked_config({**flags, **runtime.world_settings()})
    if not config.train_data:
        ensure_embedded_corpus(Path(config.data_dir))
    runtime.join_job(config)
    started, start, folder = datetime.now().astimezone(), time.monotonic(), RunFolder.of(config)
    try:
        with faults.stop_signal() as stop:
            code = run(config, stop)
    except ENDS:
        runtime.stop()
        raise
    finally:
        is_first = bool(release_run_folders())
        end_logging()
        gc.unfreeze()
        gc.collect()  # model and process groups are in reference cycles
    seconds = time.monotonic() - start
    if is_first and (ended := finish_run(config, folder, since=started, wall_seconds=seconds, code=code)):
        print(f"\n{ended[1]}", flush=True)
    return folder
