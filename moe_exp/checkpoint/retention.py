"""Which checkpoints of a run are kept. No torch, no disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def which_to_remove(
    iterations: Sequence[int], losses: Mapping[int, float], *, last: int, every: int, best: int
) -> list[int]:
    """The checkpoints that no rule keeps, in order; the newest always stays. Raises a ValueError for a
    negative number.

    Args:
        iterations: of the checkpoints that are there.
        losses: iteration to validation loss, nats per token; without one, or not finite, it is never the
            best.
        last: number of newest checkpoints to keep; 0: all.
        every: keep those whose iteration is a multiple of it; 0: none for that reason.
        best: number of checkpoints with the lowest loss to keep, of equal ones the newer; 0: none.
    """
    for name, value in (("last", last), ("every", every), ("best", best)):
        if value < 0:
            raise ValueError(f"{name}={value}: must be 0 or more. Fix: give 0 to leave this rule out.")
    ordered = sorted(set(iterations))
    if not last:
        return []
    known = [iteration for iteration in ordered if math.isfinite(losses.get(iteration, math.nan))]
    kept = set(ordered[-last:])
    kept |= {iteration for iteration in ordered if every and iteration % every == 0}
    kept |= set(sorted(known, key=lambda iteration: (losses[iteration], -iteration))[:best])
    return [iteration for iteration in ordered if iteration not in kept]
