"""Expert load as colored squares, for pages that take only text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_exp.report.follower import layers_by_load

_MOST_SQUARES = 48
# (upper limit, square); white was not measured.
_SQUARES = ((1.25, "🟦"), (1.5, "🟩"), (2.0, "🟨"), (3.0, "🟧"), (float("inf"), "🟥"))
_MISSING = "⬜"


class LoadSquares:
    """Largest max over mean of each MoE layer over a run: a row per layer, a column per stretch of records.

    Takes records one by one; when it has twice its columns, neighbors are merged.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._columns: list[dict[int, float]] = []  # layer -> largest max over mean
        self._ends: list[int] = []  # last iteration of each column
        self._records_per_column, self._records_in_last = 1, 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Adds the next record of metrics.jsonl; ignores all but train records of MoE models."""
        layers = layers_by_load(record) if record.get("kind") == "train" else []
        if not layers:
            return
        if self._ends and record["iteration"] <= self._ends[-1]:
            self._clear()  # the file was rewritten
        if not self._columns or self._records_in_last == self._records_per_column:
            self._columns.append({})
            self._ends.append(0)
            self._records_in_last = 0
        self._ends[-1] = record["iteration"]
        self._records_in_last += 1
        peaks = {layer.layer: layer.max_over_mean for layer in layers if layer.max_over_mean is not None}
        self._columns[-1] = _larger(self._columns[-1], peaks)
        if len(self._columns) == 2 * _MOST_SQUARES and self._records_in_last == self._records_per_column:
            self._columns = list(map(_larger, self._columns[::2], self._columns[1::2]))
            self._ends = self._ends[1::2]
            self._records_per_column *= 2
            self._records_in_last = self._records_per_column

    def text(self) -> str:
        """The rows under a line that explains them; empty without MoE layers."""
        layers = sorted({layer for column in self._columns for layer in column})
        if not layers:
            return ""
        step = -(-len(self._columns) // _MOST_SQUARES)
        groups = [self._columns[at : at + step] for at in range(0, len(self._columns), step)]
        *below, (_, largest) = _SQUARES
        limits = [f"{square} under {limit:g}" for limit, square in below]
        key = ", ".join([*limits, f"{largest} {below[-1][0]:g} and more"])
        lines = [f"busiest expert over the mean: {key}"]
        for layer in layers:
            peaks = [max(column.get(layer, 0.0) for column in group) for group in groups]
            squares = "".join(_square(peak) if peak else _MISSING for peak in peaks)
            lines.append(f"layer {layer:3d} {squares}")
        foot = f"until iteration {self._ends[-1]:,}, {self._records_per_column * step} records a square"
        return "\n".join([*lines, foot])


def _square(peak: float) -> str:
    return next(square for limit, square in _SQUARES if peak < limit)


def _larger(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """The larger value of each layer of the two."""
    return {layer: max(a.get(layer, 0.0), b.get(layer, 0.0)) for layer in {**a, **b}}
