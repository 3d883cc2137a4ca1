"""Which data set of a blend gives which sample. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def blend_position(index: int, cumulative_weights: Sequence[int]) -> tuple[int, int]:
    """Which data set sample `index` comes from, and how many samples it gave before.

    The data sets are split in halves again and again. Of the n samples that reach a node, round(n * p) go to
    its left half, where p is the share of that half. This has a closed form, so random access needs no
    history. Rounding adds at most 1/2 per level: after any number of samples, each of K data sets is within
    ceil(log2 K) / 2 samples of its share.

    Args:
        index: sample number in the blend.
        cumulative_weights: 0 and the running sums of the weights, integers, so that the result is exact.
    """
    low, high = 0, len(cumulative_weights) - 1
    while high - low > 1:
        middle = (low + high) // 2
        left = cumulative_weights[middle] - cumulative_weights[low]
        total = cumulative_weights[high] - cumulative_weights[low]
        before, after = ((2 * n * left + total) // (2 * total) for n in (index, index + 1))
        if after > before:
            high, index = middle, before
        else:
            low, index = middle, index - before
    return low, index


def blend_counts(count: int, cumulative_weights: Sequence[int]) -> list[int]:
    """How many of the first `count` samples of a blend come from each data set, see `blend_position`."""
    if len(cumulative_weights) == 2:
        return [count]
    middle = (len(cumulative_weights) - 1) // 2
    left = cumulative_weights[middle] - cumulative_weights[0]
    total = cumulative_weights[-1] - cumulative_weights[0]
    of_left = (2 * count * left + total) // (2 * total)
    return blend_counts(of_left, cumulative_weights[: middle + 1]) + blend_counts(
        count - of_left, cumulative_weights[middle:]
    )


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The same ratios in whole numbers; ValueError unless all are positive and finite."""
    if bad := [weight for weight in weights if not 0 < weight < float("inf")]:
        fix = "give another weight or leave the prefix out"
        raise ValueError(f"weight {bad[0]}: must be greater than 0 and finite. Fix: {fix}.")
    # By way of the text, so that 0.3 is 3/10 and not the binary fraction next to it.
    fractions = [Fraction(str(float(weight))) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]
