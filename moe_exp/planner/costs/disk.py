"""Bytes of disk that a run needs until its end: the checkpoints kept, and records. No torch, no disk."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.costs.params import checkpoint_bytes

# A checkpoint's files over its tensors, at most: a factor and bytes (tests/checkpoint/test_save.py).
_FILES_OVER_TENSORS, _FILES_BYTES = 1.02, 200_000
# Bytes of a train record (metrics.jsonl, log, TensorBoard), of an MoE layer in it, and of an expert; measured
_RECORD_BYTES, _LAYER_BYTES, _EXPERT_BYTES = 3100, 850, 8


@dataclass(frozen=True)
class DiskUse:
    """Disk that a run still needs beside what it has written already."""

    one_bytes: int  # of one checkpoint
    num_checkpoints: int  # at once at most, with those that are there and the one that is being written
    num_new: int  # of them, those that need room
    records_bytes: int  # of metrics.jsonl, train.log and TensorBoard

    @property
    def needed_bytes(self) -> int:
        return self.num_new * self.one_bytes + self.records_bytes


def disk_use(
    config: Config, *, iteration: int = 0, there: Sequence[int] = (), one_bytes: int | None = None
) -> DiskUse:
    """Disk that the run needs from an iteration to TRAIN_ITERS; an upper bound if checkpoints are kept
    for two reasons.

    A checkpoint is removed when the next one is complete (`which_to_remove`), so all that are kept are
    there while one is written. The one that this start resumes from stays as well.

    Args:
        iteration: that the run resumes from, 0 for none.
        there: iterations of the checkpoints in its folder.
        one_bytes: of one checkpoint, if that was measured.
    """
    one_bytes = one_bytes or math.ceil(checkpoint_bytes(config) * _FILES_OVER_TENSORS) + _FILES_BYTES
    num_saves = _num_saves(config, iteration)
    largest = len(there) + num_saves
    if config.keep_last and num_saves:
        always = _num_kept_always(config, iteration, there)
        largest = min(largest, config.keep_last + config.keep_best + bool(iteration) + always + 1)
    num_new = max(largest - len(there), min(1, num_saves))
    num_records = max(0, config.train_iters - iteration) // config.log_interval
    per_layer = _LAYER_BYTES + _EXPERT_BYTES * config.num_experts
    # 10 kB: the settings in TensorBoard, of each start
    records = 10_000 + num_records * (_RECORD_BYTES + sum(config.moe_layers) * per_layer)
    return DiskUse(one_bytes, max(largest, len(there)), num_new, records)


def _num_saves(config: Config, iteration: int) -> int:
    interval, end = config.save_interval, config.train_iters
    at_interval = max(0, end // interval - iteration // interval) if interval else 0
    at_end = config.save_at_end and end > iteration and not (interval and end % interval == 0)
    return at_interval + int(at_end)


def _num_kept_always(config: Config, iteration: int, there: Sequence[int]) -> int:
    """By KEEP_EVERY: those that are there and those to come."""
    every = config.keep_every
    if not every:
        return 0
    step = math.lcm(every, config.save_interval) if config.save_interval else config.train_iters + 1
    to_come = max(0, config.train_iters // step - iteration // step)
    at_end = config.save_at_end and config.train_iters % every == 0 and config.train_iters % step != 0
    return to_come + int(at_end) + sum(one % every == 0 for one in there)


def keep_last_that_fits(
    config: Config, free_bytes: int, *, iteration: int = 0, there: Sequence[int] = ()
) -> int:
    """The largest KEEP_LAST with which the run has room, 0 if there is none."""

    def needed_bytes(number: int) -> int:
        tried = config.model_copy(update={"keep_last": number, "keep_every": 0, "keep_best": 0})
        return disk_use(tried, iteration=iteration, there=there).needed_bytes

    highest = min(_num_saves(config, iteration) + len(there), 1000)
    return bisect_right(range(1, highest + 1), free_bytes, key=needed_bytes)
