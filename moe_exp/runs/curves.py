"""Draws loss curves with marks for stages and resumes: one run as a PNG, several runs as a Figure."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moe_exp.config import TRAITS, Config
from moe_exp.config.setting_types import as_given

Floats = npt.NDArray[np.float64]
Records = Sequence[Mapping[str, Any]]
Points = tuple[list[float], list[float]]
_RAW, _SMOOTH, _VALID, _RATE, _TEXT = "#9dc3e6", "#1f5f9e", "#d9541e", "#c4c4c4", "#333333"
_MARK = "#6a3d9a"
_LONGEST_MARK, _MOST_MARKS = 40, 20
_FOLLOW = ("decay_iters", "warmup_iters")  # usually derived from TRAIN_ITERS: redundant beside it
_LONGEST_NAME = 48


@dataclass(frozen=True)
class Mark:
    """A mark between two iterations: a new stage of DATA_STAGES, a resume, or a resume with new settings."""

    kind: Literal["stage", "settings", "resume"]
    after: int  # the last iteration before it
    label: str = ""  # short; empty for a resume without changes
    details: str = ""

    @property
    def text(self) -> str:
        """Description of the mark, including the iteration."""
        if self.kind == "stage":
            return f"data {self.label} from iteration {self.after + 1}: {self.details}"
        return f"resume after iteration {self.after}" + (f": {self.label}" if self.label else "")


def marks_of(records: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """Marks from the events in a run's records, sorted by iteration."""
    found: dict[tuple[str, int], Mark] = {}
    is_first = True
    for event in records:
        name, iteration = event.get("event"), event.get("iteration")
        if not isinstance(iteration, int):
            continue
        if name == "data_stage":
            details = f"{event.get('train_data')}, SEQ_LEN {event.get('seq_len')}"
            found["stage", iteration] = Mark("stage", iteration - 1, f"stage {event.get('stage')}", details)
        elif name == "changed_settings":
            changes = event.get("changes")
            label = ", ".join(map(str, changes)) if isinstance(changes, list) else str(changes)
            found["resume", iteration] = Mark("settings", iteration, label)
        elif name in ("start", "resume"):
            # Iterations after the checkpoint are repeated. The first start, even from LOAD_DIR, has no mark.
            found = {key: mark for key, mark in found.items() if mark.after <= iteration}
            if name == "resume" and not is_first:
                found.setdefault(("resume", iteration), Mark("resume", iteration))
            is_first = False
    return sorted(found.values(), key=lambda mark: mark.after)


def draw_loss_curve(records: Records, path: Path, title: str) -> None:
    """Saves a PNG of losses, learning rate and marks over iterations. ValueError if there are no losses."""
    train = [record for record in records if record["kind"] == "train"]
    if not any(record["lm_loss"] is not None for record in train):
        rule = "no train record has a loss"
        raise ValueError(f"records={len(records)}: {rule}. Fix: train for at least LOG_INTERVAL iterations.")
    # not pyplot, which has global state and may choose a backend that needs a display
    from matplotlib.figure import Figure

    title = wrapped(title)
    # Fixed margins: computing the layout takes as long as drawing.
    figure = Figure(figsize=(8, 4.8), dpi=150)
    figure.subplots_adjust(left=0.09, right=0.92, bottom=0.11, top=0.88 - 0.029 * title.count("\n"))
    axes: Any = figure.add_subplot()
    rate_axes: Any = axes.twinx()
    handles = _draw_losses(axes, train, [record for record in records if record["kind"] == "valid"])
    iterations, rates = [record["iteration"] for record in train], _numbers(train, "learning_rate")
    handles += rate_axes.plot(iterations, rates, color=_RATE, linewidth=1.2, label="learning rate")
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_ylabel("learning rate", color="#9a9a9a")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate_axes.tick_params(colors="#9a9a9a", labelsize=9)
    rate_axes.yaxis.get_offset_text().set_color("#9a9a9a")
    rate_axes.spines[:].set_visible(False)
    _draw_marks(axes, [(mark, float(mark.after)) for mark in marks_of(records)], _MARK)
    # Draws the loss over the learning rate; twinx puts the second axes on top.
    axes.set_zorder(rate_axes.get_zorder() + 1)
    axes.patch.set_visible(False)
    # Above the axes, clear of the curves.
    box = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0, "borderaxespad": 0.6}
    style = {"frameon": False, "fontsize": 9, "labelcolor": _TEXT, "handlelength": 1.5}
    axes.legend(handles=handles, ncols=len(handles), **style, **box)
    axes.set_title(title, fontsize=8.5, color=_TEXT, loc="left", pad=26, parse_math=False)
    figure.savefig(path, format="png", pil_kwargs={"compress_level": 1})


def wrapped(title: str) -> str:
    """Wraps long titles; breaks run names after underscores, but not between a setting and its value."""
    return "\n".join(line.strip() for line in re.findall(r".{1,101}(?:_(?=[A-Za-z])|\s|$)|.{1,101}", title))


def _draw_losses(axes: Any, train: Records, valid: Records) -> list[Any]:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    iterations = [record["iteration"] for record in train]
    losses = _numbers(train, "lm_loss")
    marker = "o" if len(losses) == 1 else None
    handles = axes.plot(iterations, losses, color=_RAW, linewidth=0.9, marker=marker, label="train")
    # shorter curves are readable without smoothing
    if len(losses) >= 100:
        means = smoothed(losses, len(losses) // 50)
        handles += axes.plot(iterations, means, color=_SMOOTH, linewidth=1.8, label="train, smoothed")
    else:
        handles[0].set(color=_SMOOTH, linewidth=1.8)
    if valid:
        points = [record["iteration"] for record in valid], _numbers(valid, "lm_loss")
        dots = {"linestyle": "none", "marker": "o", "markersize": 5, "markeredgecolor": "white"}
        handles += axes.plot(*points, color=_VALID, label="validation", **dots)
    axes.set_xlim(0, iterations[-1] * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("iteration", color=_TEXT)
    axes.set_ylabel("lm loss (nats per token)", color=_TEXT)
    axes.grid(axis="y", color="#ececec", linewidth=0.8)
    axes.tick_params(colors=_TEXT, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return list(handles)


def _draw_marks(axes: Any, marks: Iterable[tuple[Mark, float]], color: str) -> None:
    """Draws a vertical line per mark: dotted for a resume with unchanged settings, dashed for other marks."""
    low, high = axes.get_xlim()
    known = {(mark, round(x, 6)): None for mark, x in marks if low <= x <= high}  # seeds may share marks
    for mark, x in list(known)[-_MOST_MARKS:]:
        style = {"color": color, "linewidth": 1, "linestyle": "--" if mark.label else ":", "zorder": 1}
        axes.vlines(x, 0, 1, transform=axes.get_xaxis_transform(), **style)
        label = mark.label if len(mark.label) <= _LONGEST_MARK else f"{mark.label[:_LONGEST_MARK]}..."
        axes.annotate(
            label or "resume", (x, 0.98), xycoords=axes.get_xaxis_transform(), xytext=(-3, 0),
            textcoords="offset points", rotation=90, ha="right", va="top", fontsize=7, color=color,
            parse_math=False,
        )  # fmt: skip


def _numbers(records: Records, key: str) -> list[float]:
    return [math.nan if record[key] is None else float(record[key]) for record in records]


def smoothed(values: Sequence[float], half_width: int) -> list[float]:
    """Centered moving mean over `half_width` values per side, or fewer near both ends of a curve."""
    # NaN stays NaN, to show gaps, and is excluded from the means around it
    known, places = np.isfinite(values), np.arange(len(values))
    sums = np.cumsum([0.0, *np.where(known, values, 0.0)])
    counts = np.cumsum([0, *known])
    reach = np.minimum(half_width, np.minimum(places // 8, places[::-1]))
    begins, ends = places - reach, places + reach + 1
    means = (sums[ends] - sums[begins]) / np.maximum(counts[ends] - counts[begins], 1)
    smooth: list[float] = np.where(known, means, np.nan).tolist()
    return smooth


def _imbalance(record: Mapping[str, Any]) -> float | None:
    found = [layer["max_over_mean"] for layer in record.get("experts") or [] if layer["max_over_mean"]]
    return sum(found) / len(found) if found else None


# Panels of `draw_runs`: title, record kind, function that returns a record's value (None: not measured).
_PANELS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("train loss (nats per token)", "train", lambda record: record.get("lm_loss")),
    ("validation loss (nats per token)", "valid", lambda record: record.get("lm_loss")),
    ("tokens per second", "train", lambda record: record.get("tokens_per_second")),
    ("busiest expert over the mean, mean over layers", "train", _imbalance),
)


def draw_runs(runs: Mapping[str, Sequence[Records]], x: str = "iteration") -> Any:
    """Draws panels for losses, throughput and expert balance, with one line per run.

    For several seeds, the line is their mean, and a band shows the lowest and highest values. Mean and band
    end at the last point that all seeds have reached. Loss panels mark the events that `marks_of` finds.

    Args:
        runs: maps a run's name to a list with one item per seed: the records of this seed.
        x: record key for the horizontal axis.

    Returns:
        A matplotlib Figure, which notebooks display. Omits empty panels; ValueError if all panels are empty.
    """
    curves = {
        title: {name: [_curve(one, kind, x, value) for one in seeds] for name, seeds in runs.items()}
        for title, kind, value in _PANELS
    }
    shown = {title: of for title, of in curves.items() if any(xs for seeds in of.values() for xs, _ in seeds)}
    if not shown:
        fix = "train for at least LOG_INTERVAL iterations, or choose another x"
        raise ValueError(f"x={x}: no record has both this key and a value to plot. Fix: {fix}.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = -(-len(shown) // 2)
    figure: Any = Figure(figsize=(10, 3.4 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, lines) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(num_rows, min(2, len(shown)), place)
        for number, (name, seeds) in enumerate(lines.items()):
            _draw_line(axes, f"C{number}", name, [points for points in seeds if points[0]])
        for number, of_run in enumerate(runs.values() if "loss" in title else ()):
            marks: list[tuple[Mark, float]] = []
            for records in of_run:
                points = _curve(records, "train", "iteration", lambda record: record.get(x))
                found = marks_of(records) if points[0] else []
                marks += [(mark, float(np.interp(mark.after, *points))) for mark in found]
            _draw_marks(axes, marks, f"C{number}")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(x.replace("_", " "))
        axes.grid(axis="y", color="#ececec")
        if len(runs) > 1:
            axes.legend(frameon=False, fontsize=8)

    def png() -> bytes:  # notebooks call it; only pyplot figures have it by themselves
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()

    figure._repr_png_ = png
    return figure


def _draw_line(axes: Any, color: str, name: str, seeds: Sequence[Points]) -> None:
    if not seeds:
        return
    x, y = map(np.array, seeds[0])
    if len(seeds) > 1:
        name, x = f"{name} ({len(seeds)} seeds)", shared_points([np.array(points[0]) for points in seeds])
        for points in seeds:  # dotted beyond the point that all seeds have reached
            single_x, single_y = map(np.array, points)
            beyond = single_x >= x[-1] if len(x) else np.ones(len(single_x), bool)
            axes.plot(single_x[beyond], single_y[beyond], color=color, linestyle=":", linewidth=1)
        values = np.array([np.interp(x, *points) for points in seeds])
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
        y = values.mean(axis=0)
    axes.plot(x, y, color=color, label=name, marker="o" if len(x) < 10 else None)


def _curve(records: Records, kind: str, x: str, value: Callable[[Mapping[str, Any]], float | None]) -> Points:
    measured = [
        (record[x], number)
        for record in records
        if record.get("kind") == kind and record.get(x) is not None and (number := value(record)) is not None
    ]
    return [point[0] for point in measured], [point[1] for point in measured]


def grouped_by_seed(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Groups of run indices. In a group, only SEED and settings that do not affect training may differ."""
    found: dict[object, list[int]] = {}
    for index, values in enumerate(settings):
        names = (name for name in values if name not in TRAITS or TRAITS[name].compared)
        compared = sorted((name, str(values[name])) for name in names if name != "seed")
        found.setdefault(tuple(compared) or index, []).append(index)  # without settings, a run is alone
    return list(found.values())


def names_by_difference(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Names each run by what differs, such as `dmoe, TOPK=2`; returns `names` if these names are unclear."""

    def value(of: Mapping[str, Any], name: str) -> str:
        return as_given(of.get(name, Config.model_fields[name].default))

    def kind(of: Mapping[str, Any]) -> str:
        return value(of, "moe_type") if of.get("use_moe") else "dense"

    found = []
    for one in settings:
        parts = [kind(one)] if len({kind(other) for other in settings}) > 1 else []
        for name, traits in TRAITS.items():
            follows = name in _FOLLOW and any("TRAIN_ITERS=" in part for part in parts)
            if follows or not traits.compared or name in ("seed", "use_moe", "moe_type"):
                continue
            # compare only runs to which the setting applies: a dense run has no experts
            others = [other for other in settings if other.get("use_moe") or traits.part != "experts"]
            if one in others and len({value(other, name) for other in others}) > 1:
                parts.append(f"{name.upper()}={value(one, name)}")
        found.append(", ".join(parts))
    is_clear = len(set(found)) == len(found) and all(0 < len(name) <= _LONGEST_NAME for name in found)
    return found if is_clear and all(settings) else list(names)


def shared_points(xs: Sequence[Floats]) -> Floats:
    """Points of all curves, sorted and limited to the range that every curve covers."""
    points = np.unique(np.concatenate(xs))
    return points[(max(x[0] for x in xs) <= points) & (points <= min(x[-1] for x in xs))]
