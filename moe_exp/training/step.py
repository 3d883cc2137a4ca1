"""One iteration of training: micro-batches, optimizer and schedule.

`train_step` launches an iteration. If the step is fused (engine/fused_step.py), `train_step` returns before
the host knows whether the optimizer has updated the weights. `settle` waits for the gradient
norm; it is called at the latest in the next iteration.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe_exp.checkpoint.integrity import Source
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config
from moe_exp.data.samples.dataset import Samples
from moe_exp.data.samples.order import Change
from moe_exp.data.samples.prefetch import ReadAhead
from moe_exp.engine.averaged_weights import update_average
from moe_exp.engine.faults import STOP_REASONS
from moe_exp.engine.fused_step import count_step
from moe_exp.engine.graphs import MicrobatchGraphs
from moe_exp.engine.optimizer_setup import next_batch
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.groups import start_copy
from moe_exp.layers.kernels.launch import KernelFailure
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.interval import Interval, PhaseTimers, timed
from moe_exp.training.microbatch import read_microbatch, run_schedule, weigh_microbatches
from moe_exp.training.replica_checks import GradientCheck
from moe_exp.watch.hangs import heartbeat


@dataclass(frozen=True)
class Job:
    """Objects that are built at each start of a run and do not change afterwards."""

    config: Config
    runtime: Runtime
    folder: RunFolder
    trained: Trained
    train_stream: Samples
    valid_stream: Samples | None
    source: Source | None = None  # checkpoint that training resumes from
    changes: Sequence[Change] = ()  # in the sample order since that checkpoint
    bytes_per_token: float | None = None  # in the validation data; on rank 0, if the tokenizer is known
    kernel_failures: Sequence[KernelFailure] = ()  # from the self-test; these kernels are not used
    eod_id: int | None = None  # the token that ends a document, if DOCUMENT_MASK or EOD_MASK_LOSS needs it
    graphs: MicrobatchGraphs | None = None  # for micro-batches, if CUDA_GRAPH uses them
    graph_failure: str = ""  # reason why the check of the graphs failed


@dataclass
class Step:
    """One iteration on this rank. `complete` sets `updated` and `grad_norm`, which are equal on all ranks."""

    iteration: int
    first_sample: int
    batch_size: int  # samples of all ranks
    losses: Sequence[Tensor]  # per micro-batch as logged by `run_schedule`; empty except on the last stage
    num_zeros: float | None  # zeros in the gradient, if counted
    late_norm: Callable[[], list[float]] | None  # waits for the gradient norm, which decides on the step
    updated: bool = field(init=False)  # whether the weights have changed
    grad_norm: float | None = field(init=False)  # before clipping


class IterationEnd(NamedTuple):
    """Results of an iteration, the same on every rank."""

    step: Step
    stop: str  # key of STOP_REASONS if any rank was asked to end the run, else empty
    is_writing: bool  # whether any rank is still writing checkpoint files
    lm_loss: float  # cross entropy, nats, mean over the counted tokens; NaN without any


def train_step(
    job: Job, progress: Progress, interval: Interval, *, count_zeros: bool, last: Step | None = None,
    check: GradientCheck | None = None,
) -> Step:  # fmt: skip
    """One iteration: forward and backward over all micro-batches, optimizer, schedule.

    `last`: the previous iteration, which `settle` completes before the optimizer reads the learning rate.
    `check`: if it is due, this iteration's gradients are computed twice and compared.
    """
    model, optimizer, first_sample = job.trained.model, job.trained.optimizer, progress.consumed_samples
    # The batch ramp-up and the data stage determine the number and size of micro-batches.
    seq_len = job.train_stream.stage_at(first_sample).seq_len
    num_microbatches, _, batch_size = next_batch(job.config, first_sample, seq_len)
    heartbeat.begin(progress.iteration + 1, num_microbatches)
    check = check if check and check.is_due(progress.iteration + 1) else None
    if check is not None:
        # read again, without the workers, whose order is that of training
        stream = job.train_stream.samples if isinstance(job.train_stream, ReadAhead) else job.train_stream
        PhaseTimers.is_on = False
        interval.pause(check.expect(partial(forward_backward, job, stream, first_sample, num_microbatches)))
        PhaseTimers.is_on = True
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    with check.compared() if check else nullcontext():
        losses = forward_backward(job, job.train_stream, first_sample, num_microbatches, interval=interval)
    heartbeat.enter("optimizer")
    if last is not None:
        settle(job, progress, interval, last)

    # On an fp16 overflow or a non-finite gradient norm nothing is updated. The samples count as consumed, but
    # learning rate schedule and weight average do not advance.
    optimizer.config.log_num_zeros_in_grad = count_zeros  # costs a pass over all gradients
    with timed(interval.timers, "optimizer"), timed(interval.own_timers, "optimizer"):
        updated, grad_norm, num_zeros = optimizer.step()
    flops = flops_per_iteration(job.config, batch_size, seq_len)
    progress.add(job.config, batch_size, flops=flops)
    interval.add(losses, num_microbatches=num_microbatches, batch_size=batch_size, flops=flops)
    zeros = None if num_zeros is None else float(num_zeros)
    late_norm = start_copy(grad_norm.view(1)) if updated is None else None
    step = Step(progress.iteration, first_sample, batch_size, losses, zeros, late_norm)
    if late_norm is None:
        norm = None if grad_norm is None else float(grad_norm)
        complete(job, progress, interval, step, updated=bool(updated), norm=norm)
    return step


def settle(job: Job, progress: Progress, interval: Interval, step: Step) -> None:
    """Waits for the gradient norm of `step` and calls `complete`, unless `step` is already complete."""
    if step.late_norm is not None:
        (norm,), step.late_norm = step.late_norm(), None
        complete(job, progress, interval, step, updated=count_step(job.trained.optimizer, norm), norm=norm)


def complete(
    job: Job, progress: Progress, interval: Interval, step: Step, *, updated: bool, norm: float | None
) -> None:
    """If the weights were `updated`, advances schedule and weight average; else counts a skipped step."""
    step.updated, step.grad_norm = updated, norm
    progress.skipped_iterations += not updated
    interval.num_skipped += not updated
    if updated:
        job.trained.scheduler.step(increment=step.batch_size)  # in samples, because of batch ramp-ups
        average_weights(job, progress, interval)


def end_iteration(job: Job, step: Step, stop: str, *, is_writing: bool) -> Callable[[], IterationEnd]:
    """Starts one all-reduce over all ranks, of the stop reason, `is_writing` and the mean loss.

    The returned function waits for the all-reduce; call it after settling `step`.
    """
    # A sum over ranks cannot carry text: one slot for each reason, then writing, loss and tokens. If ranks
    # have different reasons, the first one is used.
    flags = [*(reason == stop for reason in STOP_REASONS), is_writing]
    table = torch.tensor([*flags, 0, 0], dtype=torch.float64).to(job.runtime.device)
    if step.losses and job.runtime.groups.tp.rank() == 0:  # tensor parallel ranks have the same losses
        table[-2:] = torch.stack(list(step.losses))[:, :2].double().sum(dim=0)
    torch.distributed.all_reduce(table)
    values = start_copy(table)

    def read() -> IterationEnd:
        *counts, writing, loss, num_counted = values()
        given = next((reason for reason, count in zip(STOP_REASONS, counts, strict=True) if count), "")
        lm_loss = loss / num_counted if num_counted else math.nan
        return IterationEnd(step, given, bool(writing), lm_loss)

    return read


def forward_backward(
    job: Job, stream: Samples, first_sample: int, num_microbatches: int, *, forward_only: bool = False,
    interval: Interval | None = None, dp_rank: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Reads and runs the micro-batches of `dp_rank` (default: this rank). Returns `run_schedule`'s losses."""
    config, model, seq_len = job.config, job.trained.model, stream.stage_at(first_sample).seq_len
    timers, own_timers = (interval.timers, interval.own_timers) if interval else (None, None)
    heartbeat.enter("data")
    with timed(timers, "data"), timed(own_timers, "data"):
        read = partial(
            read_microbatch, config, job.runtime, stream, first_sample, eod_id=job.eod_id,
            forward_only=forward_only, dp_rank=dp_rank,
        )  # fmt: skip
        microbatches = [read(index) for index in range(num_microbatches)]
    heartbeat.enter("forward_backward")
    if config.eod_mask_loss and not forward_only:
        weigh_microbatches(microbatches, job.runtime.groups.dp)
    with timed(timers, "forward_backward"):
        return run_schedule(
            config, model, microbatches, seq_len=seq_len, forward_only=forward_only, graphs=job.graphs
        )


def average_weights(job: Job, progress: Progress, interval: Interval) -> None:
    """Updates the moving average of the weights after every AVERAGE_EVERY-th step if EMA_DECAY is set."""
    config = job.config
    if config.ema_decay and progress.num_steps % config.average_every == 0:
        progress.num_averaged += 1
        with timed(interval.timers, "optimizer"):
            update_average(job.trained.optimizer, decay=config.ema_decay, number=progress.num_averaged)
