"""Batch ramp-up (RAMPUP_BATCH_SIZE): batch size by consumed samples, and iterations at each size. No torch.

Works like --rampup-batch-size in Megatron-LM: n = (GBSZ - START) / INCREMENT steps divide SAMPLES equally,
so after c samples the batch size is START + floor(c / (SAMPLES / n)) * INCREMENT. Implemented here because
Megatron-Core lacks this calculator from 0.18 on. Used by training (`next_batch`) and the planner.
"""

import bisect
from typing import NamedTuple


class RampStep(NamedTuple):
    """`num_iterations` consecutive iterations of `batch_size` samples each, `samples` in total."""

    batch_size: int
    num_iterations: int
    samples: int


class Batches(NamedTuple):
    """Batch sizes of a run (`config.batches`)."""

    gbsz: int
    rampup: tuple[int, int, int] | None  # START, INCREMENT, SAMPLES
    train_iters: int

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the ramp in order, GBSZ last. A run may skip a batch size whose part of the ramp is
        shorter than one batch.
        """
        if self.rampup is None:
            return [self.gbsz]
        start, increment, _ = self.rampup
        return [*range(start, self.gbsz, increment), self.gbsz]

    def size_at(self, consumed_samples: int) -> int:
        """Batch size of the next iteration after `consumed_samples`."""
        if self.rampup is None:
            return self.gbsz
        start, increment, samples = self.rampup
        num_steps = (self.gbsz - start) // increment
        if not num_steps or consumed_samples > samples:
            return self.gbsz
        return start + int(consumed_samples / (samples / num_steps)) * increment

    def steps(
        self, num_samples: int | None = None, consumed: int = 0, iterations: int | None = None
    ) -> list[RampStep]:
        """Iterations at each batch size after `consumed` samples, in order; empty sizes are omitted.

        If `num_samples` is given, the last iteration reaches it; else there are `iterations` (default:
        TRAIN_ITERS).
        """
        found, left = [], self.train_iters if iterations is None else iterations
        while consumed < num_samples if num_samples is not None else left:
            size = self.size_at(consumed)
            left = left if num_samples is None else -(-(num_samples - consumed) // size)
            # The size never decreases, so bisect for the first iteration with another size.
            is_other = lambda i, b=consumed, s=size: self.size_at(b + i * s) != s  # noqa: E731
            count = bisect.bisect_left(range(left), True, key=is_other)
            found.append(RampStep(size, count, count * size))
            consumed, left = consumed + count * size, left - count
        return found

    def samples_of(self, iterations: int, consumed_samples: int = 0) -> int:
        """Number of samples in the next `iterations` after `consumed_samples`."""
        return sum(step.samples for step in self.steps(None, consumed_samples, max(iterations, 0)))
