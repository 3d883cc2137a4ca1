"""The plot of a sweep: time by layout, and measured against predicted values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_exp.studies.sweep.table import Row

_MEASURED, _PREDICTED, _TEXT = "#1f5f9e", "#d9541e", "#333333"


def draw_sweep(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Draws measured seconds per iteration by layout, and predicted against measured time and memory, as PNG.

    Rows without a time are left out. Returns whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = sorted(
        (row for row in rows if row.seconds is not None),
        key=lambda row: (row.case.config.world_size, row.seconds),
    )
    if not measured:
        return False
    is_predicted = any(row.prediction for row in measured)
    figure = Figure(
        figsize=(13 if is_predicted else 8, 1.6 + 0.3 * max(len(measured), 8)), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)
    if is_predicted:
        grid = figure.add_gridspec(2, 2, width_ratios=[2.2, 1])
        _draw_times(figure.add_subplot(grid[:, 0]), measured)
        pairs = [(row.predicted_seconds, row.seconds) for row in measured]
        _draw_pairs(figure.add_subplot(grid[0, 1]), pairs, "seconds per iteration")
        _draw_pairs(
            figure.add_subplot(grid[1, 1]),
            [(row.predicted_gib, row.memory_gib) for row in measured],
            "memory (GiB)",
        )
    else:
        _draw_times(figure.add_subplot(), measured)
    figure.suptitle(title, fontsize=10, color=_TEXT, x=0.01, ha="left", parse_math=False)
    figure.savefig(path, format="png")
    return True


def _draw_times(axes: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    axes.barh(places, [row.seconds for row in rows], color=_MEASURED, height=0.65, label="measured")
    known = [
        (row.predicted_seconds, place)
        for place, row in zip(places, rows, strict=True)
        if row.predicted_seconds is not None
    ]
    if known:
        style = {"linestyle": "none", "marker": "D", "markersize": 5, "label": "predicted"}
        axes.plot(*zip(*known, strict=True), color=_PREDICTED, **style)
    for place, row in zip(places, rows, strict=True):
        axes.text(row.seconds, place, f" {row.seconds:.3g} s", va="center", fontsize=8, color=_TEXT)
    axes.set_yticks(places, [row.case.name.replace("_", " ") for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    _finish(axes, "seconds per iteration")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)


def _draw_pairs(axes: Any, pairs: Sequence[tuple[float | None, float | None]], what: str) -> None:
    known = [
        (predicted, measured)
        for predicted, measured in pairs
        if predicted is not None and measured is not None
    ]
    if known:
        largest = 1.08 * max(map(max, known))
        axes.plot([0, largest], [0, largest], color="#c4c4c4", linewidth=1)
        axes.plot(*zip(*known, strict=True), color=_MEASURED, linestyle="none", marker="o", markersize=4)
        axes.set_xlim(0, largest)
        axes.set_ylim(0, largest)
    _finish(axes, f"predicted {what}")
    axes.set_ylabel("measured", fontsize=9, color=_TEXT)


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel(label, fontsize=9, color=_TEXT)
    axes.tick_params(colors=_TEXT, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
