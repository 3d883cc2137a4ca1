"""Batch ramp-up (RAMPUP_BATCH_SIZE): batch size by samples consumed, and iterations at each size. No torch.

The rule of Megatron-LM's --rampup-batch-size: the n = (GBSZ - START) / INCREMENT steps are spread evenly over
SAMPLES, so that after c samples the batch has START + floor(c / (SAMPLES / n)) * INCREMENT. Implemented here
because Megatron-Core has no such calculator from 0.18 on. Used by training (`next_batch`) and the planner.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from moe_exp.config.settings import Config


class RampStep(NamedTuple):
    """`num_iterations` in a row with `batch_size` samples each, `samples` in total."""

    batch_size: int
    num_iterations: int
    samples: int


def batch_size_at(config: Config, consumed_samples: int) -> int:
    """Samples of the next iteration, after `consumed_samples`."""
    if config.rampup is None:
        return config.gbsz
    start, increment, samples = config.rampup
    num_steps = (config.gbsz - start) // increment
    if not num_steps or consumed_samples > samples:
        return config.gbsz
    return start + int(consumed_samples / (samples / num_steps)) * increment


def ramp_sizes(config: Config) -> list[int]:
    """Batch sizes of a ramp in order, GBSZ last; one is skipped if a batch exceeds a step's samples."""
    if config.rampup is None:
        return [config.gbsz]
    start, increment, _ = config.rampup
    return [*range(start, config.gbsz, increment), config.gbsz]


def ramp_steps(config: Config, num_samples: int | None = None, consumed: int = 0) -> list[RampStep]:
    """Iterations at each batch size after `consumed` samples, in order; sizes without any are left out.

    Ends with the iteration that reaches `num_samples`; None: after TRAIN_ITERS iterations.
    """
    return list(_steps(config, num_samples, consumed))


def samples_left(config: Config, consumed_samples: int, iterations: int) -> int:
    """Samples of the next `iterations`, after `consumed_samples`."""
    return sum(step.samples for step in _steps(config, None, consumed_samples, max(iterations, 0)))


def _steps(
    config: Config, num_samples: int | None, consumed: int = 0, iterations_left: int | None = None
) -> Iterator[RampStep]:
    iterations_left = config.train_iters if iterations_left is None else iterations_left
    while (num_samples is None and iterations_left) or (num_samples is not None and consumed < num_samples):
        size = batch_size_at(config, consumed)
        left = iterations_left if num_samples is None else -(-(num_samples - consumed) // size)
        # The size never falls, so bisect for the first iteration with another one.
        begin = consumed
        is_other = lambda i, b=begin, s=size: batch_size_at(config, b + i * s) != s  # noqa: E731
        count = bisect.bisect_left(range(left), True, key=is_other)
        yield RampStep(size, count, count * size)
        consumed, iterations_left = consumed + count * size, iterations_left - count
