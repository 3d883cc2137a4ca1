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
        for layer in layers:
            if layer.max_over_mean is not None:
                self._columns[-1][layer.layer] = max(
                    layer.max_over_mean, self._columns[-1].get(layer.layer, 0.0)
                )
        if len(self._columns) == 2 * _MOST_SQUARES and self._records_in_last == self._records_per_column:
            self._halve()

    def _halve(self) -> None:
        pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
        self._columns = [
            {layer: max(a.get(layer, 0.0), b.get(layer, 0.0)) for layer in a | b} for a, b in pairs
        ]
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
        lines = [
            "busiest expert over the mean: "
            + ", ".join(f"{square} {_limit(index)}" for index, (_, square) in enumerate(_SQUARES))
        ]
        for layer in layers:
            squares = "".join(
                _square([column[layer] for column in group if layer in column]) for group in groups
            )
            lines.append(f"layer {layer:3d} {squares}")
        return "\n".join(
            [
                *lines,
                f"until iteration {self._ends[-1]:,}, {self._records_per_column * step} records a square",
            ]
        )


def _square(values: list[float]) -> str:
    return next(square for limit, square in _SQUARES if max(values) < limit) if values else _MISSING


def _limit(index: int) -> str:
    return (
        f"under {_SQUARES[index][0]:g}"
        if index + 1 < len(_SQUARES)
        else f"{_SQUARES[index - 1][0]:g} and more"
    )
