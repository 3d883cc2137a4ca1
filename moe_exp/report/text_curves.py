"""Curves as text: a sparkline or a small plot; None stays empty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_BRAILLE = 0x2800
# Bit of each dot of a Braille character, by row and column: Unicode added the last row later.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def buckets(values: Sequence[float | None], num_buckets: int) -> list[float | None]:
    """At most `num_buckets` means of neighbors, ignoring None; None for an empty bucket."""
    count = min(num_buckets, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    groups = ([value for value in values[a:b] if value is not None] for a, b in pairwise(edges))
    return [sum(group) / len(group) if group else None for group in groups]


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """One line of at most `width` characters, scaled from the lowest value to the highest."""
    means, ramp = buckets(values, width), _ASCII if ascii_only else _BLOCKS
    low, high = _range(means)
    return "".join(
        " " if mean is None else ramp[round((mean - low) / (high - low) * (len(ramp) - 1))] for mean in means
    )


def plot(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """Braille plot: `height` lines of `width` characters of two by four dots, the highest value on top."""
    means, num_rows = buckets(values, 2 * width), 4 * height
    low, high = _range(means)
    cells, before = [[0] * width for _ in range(height)], None
    for column, mean in enumerate(means):
        if mean is None:
            before = None
            continue
        row = round((high - mean) / (high - low) * (num_rows - 1))
        # Fill from the previous row, so that a steep curve stays connected.
        for at in (
            range(row, row + 1) if before is None else range(min(row, before + 1), max(row, before - 1) + 1)
        ):
            cells[at // 4][column // 2] |= _DOTS[at % 4][column % 2]
        before = row
    return ["".join(chr(_BRAILLE + dots) for dots in line) for line in cells]


def _range(means: Sequence[float | None]) -> tuple[float, float]:
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return (low, high) if high > low else (low - 1.0, low + 1.0)
