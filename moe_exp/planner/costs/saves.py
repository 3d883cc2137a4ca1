"""Disk space of checkpoints, and time lost to checkpoints, failures and evaluation. No torch.

Suppose that a random failure occurs every M seconds on average, that a save takes d seconds, and that t
seconds pass between saves. A run loses (t + d) / 2 seconds per failure and d seconds per save. The best t is:

    Young 1974 (A first order approximation to the optimum checkpoint interval, CACM 17(9)):
        t = sqrt(2 d M)
    Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
    equation 37):
        t = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d    for d < 2M, else t = M

In Daly's model (equation 20), saves and restarts can fail. A second of work takes the following wall time T
if the interval is t:

    T = M exp(R / M) (exp((t + d) / M) - 1) / t    seconds per second of work; R: seconds from a failure
                                                   to the next iteration
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.costs.params import checkpoint_bytes

DISK_BYTES_PER_SECOND = 1e9  # assumed per node if the seconds of a save are not given


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Returns a first-order estimate of the best interval between saves in seconds (Young 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Returns the best interval between saves in seconds (Daly 2006, equation 37)."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return young_interval(save_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def lost_share(
    interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float = 0.0
) -> float:
    """Returns the time lost to saves and failures, relative to the productive time (Daly, equation 20)."""
    exponents = restart_seconds / mtbf_seconds, (interval_seconds + save_seconds) / mtbf_seconds
    # exp would overflow; such a run practically never finishes
    if max(exponents) > 700:
        return math.inf
    return mtbf_seconds * math.exp(exponents[0]) * math.expm1(exponents[1]) / interval_seconds - 1


@dataclass(frozen=True)
class Goodput:
    """Expected share of the wall time in which a run makes progress, and the assumptions behind it."""

    mtbf_hours: float  # mean time between failures of the job
    save_seconds: float  # per save
    restart_seconds: float  # from a failure to the next iteration
    evaluation_share: float  # time of evaluations relative to that of iterations
    goodput: float  # with SAVE_INTERVAL; 0 if the run never finishes
    best_goodput: float  # with `best_iterations`
    best_iterations: int  # the best SAVE_INTERVAL according to Daly
    young_iterations: int  # the best SAVE_INTERVAL according to Young
    wall_seconds: float | None  # of the run with SAVE_INTERVAL; None if it never finishes


def goodput_of(
    config: Config, *, iteration_seconds: float, training_seconds: float, node_mtbf_hours: float,
    restart_minutes: float, save_seconds: float | None = None,
) -> Goodput:  # fmt: skip
    """Returns the expected goodput of a run whose nodes fail independently and at random.

    Args:
        config: provides NNODES, SAVE_INTERVAL (0: only at the end), EVAL_INTERVAL and EVAL_ITERS.
        iteration_seconds: iteration time at the full global batch.
        training_seconds: time of all iterations, see `estimate.cost_of`.
        node_mtbf_hours: mean time between failures of one node.
        restart_minutes: time from a failure to the next iteration.
        save_seconds: time per save; default: checkpoint size / (NNODES * DISK_BYTES_PER_SECOND).
    """
    mtbf, restart = node_mtbf_hours * 3600 / config.nnodes, restart_minutes * 60
    save = save_seconds or checkpoint_bytes(config) / (config.nnodes * DISK_BYTES_PER_SECOND)
    # An evaluation batch takes a third of an iteration, as it has no backward pass.
    evaluation = 1 / 3 * config.eval_iters / config.eval_interval if config.eval_interval else 0.0
    one, work = iteration_seconds * (1 + evaluation), training_seconds * (1 + evaluation)

    def share(interval: float) -> float:
        return 1 / ((1 + evaluation) * (1 + lost_share(interval, save, mtbf, restart)))

    best = max(1, round(daly_interval(save, mtbf) / one))
    goodput = share(config.save_interval * one if config.save_interval else work)
    goodput = goodput if goodput >= 1e-6 else 0.0
    return Goodput(
        mtbf_hours=mtbf / 3600, save_seconds=save, restart_seconds=restart, evaluation_share=evaluation,
        goodput=goodput, best_goodput=share(best * one), best_iterations=best,
        young_iterations=max(1, round(young_interval(save, mtbf) / one)),
        wall_seconds=training_seconds / goodput if goodput else None,
    )  # fmt: skip


# Upper bound of a checkpoint's files over its tensors: factor and bytes (tests/checkpoint/test_save.py).
_FILES_OVER_TENSORS, _FILES_BYTES = 1.02, 200_000
# Measured bytes of a train record (metrics.jsonl, log, TensorBoard), and per MoE layer and expert in it.
_RECORD_BYTES, _LAYER_BYTES, _EXPERT_BYTES = 3100, 850, 8


@dataclass(frozen=True)
class DiskUse:
    """Disk space that a run will still need."""

    one_bytes: int  # per checkpoint
    num_checkpoints: int  # maximum at the same time, including existing ones and the one being written
    num_new: int  # how many of these do not exist yet
    records_bytes: int  # of metrics.jsonl, train.log and TensorBoard

    @property
    def needed_bytes(self) -> int:
        return self.num_new * self.one_bytes + self.records_bytes


def disk_use(
    config: Config, *, iteration: int = 0, there: Sequence[int] = (), one_bytes: int | None = None
) -> DiskUse:
    """Returns the disk space that a run needs up to TRAIN_ITERS. This is an upper bound: a checkpoint
    that is kept for two reasons (for example, as last and as best) may count twice.

    A checkpoint is removed only when the next one is complete. The checkpoint from which the run resumed is
    also kept.

    Args:
        iteration: the iteration that the run resumes from; 0 if it starts from scratch.
        there: iterations whose checkpoints already exist.
        one_bytes: measured size of one checkpoint in bytes.
    """
    one_bytes = one_bytes or math.ceil(checkpoint_bytes(config) * _FILES_OVER_TENSORS) + _FILES_BYTES
    num_saves = _num_saves(config, iteration)
    largest = len(there) + num_saves
    if config.keep_last and num_saves:
        always, every = 0, config.keep_every
        if every:  # existing and future checkpoints
            step = math.lcm(every, config.save_interval) if config.save_interval else config.train_iters + 1
            to_come = max(0, config.train_iters // step - iteration // step)
            at_end = config.save_at_end and config.train_iters % every == 0 and config.train_iters % step != 0
            always = to_come + int(at_end) + sum(one % every == 0 for one in there)
        largest = min(largest, config.keep_last + config.keep_best + bool(iteration) + always + 1)
    num_new = max(largest - len(there), min(1, num_saves))
    num_records = max(0, config.train_iters - iteration) // config.log_interval
    per_layer = _LAYER_BYTES + _EXPERT_BYTES * config.num_experts
    # 10 kB: the settings in TensorBoard, written by each start
    records = 10_000 + num_records * (_RECORD_BYTES + sum(config.all_moe_layers) * per_layer)
    return DiskUse(one_bytes, max(largest, len(there)), num_new, records)


def _num_saves(config: Config, iteration: int) -> int:
    interval, end = config.save_interval, config.train_iters
    at_interval = max(0, end // interval - iteration // interval) if interval else 0
    at_end = config.save_at_end and end > iteration and not (interval and end % interval == 0)
    return at_interval + int(at_end)


def keep_last_that_fits(
    config: Config, free_bytes: int, *, iteration: int = 0, there: Sequence[int] = ()
) -> int:
    """Returns the largest KEEP_LAST whose checkpoints fit in `free_bytes`; 0 if even 1 does not fit."""

    def needed_bytes(number: int) -> int:
        tried = config.model_copy(update={"keep_last": number, "keep_every": 0, "keep_best": 0})
        return disk_use(tried, iteration=iteration, there=there).needed_bytes

    highest = min(_num_saves(config, iteration) + len(there), 1000)
    return bisect_right(range(1, highest + 1), free_bytes, key=needed_bytes)
