"""Renders run folders as a self-contained HTML file, or as Markdown for a pull request."""

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.config import problem, raise_for
from moe_exp.host.files import write_atomically
from moe_exp.host.quantities import target_text
from moe_exp.report import comparison, run_data
from moe_exp.report import page_parts as parts
from moe_exp.report.comparison import BITS, NATS, Overview, differing_settings, warnings_of, window_of
from moe_exp.report.headline import baseline_of, headline, other_winners, pair_text, pairs, ranking
from moe_exp.report.run_data import AXES, VALID_CURVES, Floats, RunRecords, read_runs, run_problems, spikes
from moe_exp.runs.curves import grouped_by_seed, marks_of

# These mark a file as a report, which a new report may replace: in HTML and in Markdown.
_GENERATOR, _MARKER = '<meta name="generator" content="moe-exp report">', "<!-- moe-exp report -->"
MOST_BYTES = 5_000_000
_SCRIPTS = (
    "uplot/uPlot.iife.min.js", "format.js", "series.js", "chart.js", "tools.js", "heatmap.js", "page.js",
)  # fmt: skip
_LOSS_CHARTS = ("loss", "mtp_loss", "valid", "ema", "minus", "valid-minus", "ppl", "bits")
_TRAINING_CHARTS = ("grad_norm", "learning_rate", "tokens_per_second", "tflops_per_gpu", "memory_bytes")
_DRAWN = (
    "lm_loss", "mtp_loss", "load_balancing_loss", "z_loss", "learning_rate", "grad_norm",
    "tokens_per_second", "tflops_per_gpu", "experts/max_over_mean", "experts/dead_fraction",
    "experts/dropped_fraction", "experts/router_entropy",
)  # fmt: skip
LOAD_SCALE = 256  # steps per fair share, so uint16 covers up to 255 fair shares
_MOST_SPIKES, _MOST_CHANGES = 200, 20


def write_report(
    paths: Sequence[Path], out: Path | None, *, kind: str = "html", title: str = "",
    loss: float | None = None, notes: str = "",
) -> list[str]:  # fmt: skip
    """Writes a report on run folders, which may be unfinished or empty.

    Args:
        out: file to write; None to print. An existing file is replaced only if it is a report.
        kind: `html` or `md`.
        title: heading (default: the names of the runs).
        loss: loss for the cost comparison (default: the lowest loss that all runs reach).
        notes: text below the heading.

    Returns:
        Warnings about the comparison, one sentence each.

    Raises:
        ConfigError: if a path is not a run folder, or `out` cannot be written. Raised before any work.
    """
    raise_for([*(check_out(out) if out else ()), *run_problems(paths)])
    runs = read_runs(paths)
    text = (report_html if kind == "html" else report_markdown)(runs, title=title, loss=loss, notes=notes)
    # folder names and events may not be valid UTF-8
    text, *warnings = (one.encode(errors="replace").decode() for one in (text, *warnings_of(runs)))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out.resolve(), text)  # keeps a symlink
    return warnings


def check_out(out: Path) -> Iterator[str]:
    """Reasons why `out` cannot be written: its folder is missing, or `out` exists and is not a report."""
    if not (folder := out.resolve().parent).is_dir():
        # a link's target is written, so its folder must exist
        rule = f"folder {folder if out.is_symlink() else out.parent} not found"
        yield problem("out", out, rule, "create the folder, or choose another file")
    elif out.is_file():
        with out.open("rb") as file:
            head = file.read(2000)
        # an empty file may be replaced, for example one created by mktemp
        if head.strip() and _GENERATOR.encode() not in head and _MARKER.encode() not in head:
            yield problem("out", out, "exists and is not a report", "choose another file, or remove this one")
    elif out.exists():  # a folder, or a device such as /dev/stdout that a rename would replace
        yield problem("out", out, "must be a regular file", "choose another file")


def _views(runs: Sequence[RunRecords], loss: float | None) -> tuple[list[Overview], float, str | None]:
    """Returns the overview of each run, the loss for the cost comparison, and its unit."""
    found, unit = comparison.common_loss(runs)
    chosen = found if loss is None else loss
    window = window_of(runs)
    return [Overview(run, chosen, unit, window) for run in runs], chosen, unit


def title_of(runs: Sequence[RunRecords]) -> str:
    """Default heading for a report on these runs."""
    return f"{len(runs)} runs" if len(runs) > 3 else comparison.in_words([run.name for run in runs])


def report_html(
    runs: Sequence[RunRecords], *, title: str = "", loss: float | None = None, notes: str = ""
) -> str:
    """Renders the report as HTML below MOST_BYTES bytes. Raises ValueError if the tables alone are larger."""
    views, chosen, unit = _views(runs, loss)
    cost = parts.cost_html(views, chosen, unit, window_of(runs), is_common=loss is None)
    speed = parts.charts_html(_TRAINING_CHARTS) + parts.spikes_html(runs)
    # anchor, heading, content, whether it is unfolded
    sections = [
        ("loss", "Loss", parts.charts_html(_LOSS_CHARTS, wide="loss"), True),
        ("numbers", "The runs in numbers", parts.overview_html(views), True),
        ("cost", "Time to a loss", cost, True),
        ("settings", "Settings that differ", parts.settings_html(runs, differing_settings(runs)), True),
        ("experts", "Experts", parts.experts_html(runs), True),
        ("training", "Training and speed", speed, False),
        ("ranks", "Ranks", parts.ranks_html(runs), False),
        ("samples", "Generated text", parts.samples_html(runs), False),
        ("about", "Machine and command", parts.about_html(runs), False),
        ("events", "Events", parts.events_html(runs), False),
    ]
    links, shown = '<li><a href="#result">Result</a></li>', ""
    for name, heading, content, is_open in sections:
        if content:
            links += f'<li><a href="#{name}">{heading}</a></li>'
            # clicking the heading folds the section
            summary = f'<summary><h2 id="h-{name}">{heading}</h2></summary>'
            details = f'<details class="group"{" open" * is_open}>{summary}{content}</details>'
            shown += f'<section id="{name}" aria-labelledby="h-{name}">{details}</section>\n'
    number = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    fields = {
        "title": escape(title or title_of(runs)),
        "subtitle": f"{number}, written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "notes": f'<p class="own">{escape(notes)}</p>' if notes else "",
        "contents": f"<ul>{links}</ul>",
        "result": parts.result_html(runs, warnings_of(runs)),
        "sections": shown,
        "css": parts.asset_text("uplot/uPlot.min.css") + parts.asset_text("page.css"),
        "scripts": "".join(f"<script>{parts.asset_text(name)}</script>\n" for name in _SCRIPTS),
    }
    # With many runs, reduce the points of the curves until the page is small enough.
    for detail in (1.0, 0.5, 0.2, 0.05):
        fields["data"] = embedded(page_data(runs, detail))
        text = parts.filled("page.html", fields)
        if len(text.encode(errors="replace")) < MOST_BYTES:
            return text
    rule = f"the page would exceed {MOST_BYTES:,} bytes"
    raise ValueError(problem("run", f"{len(runs)} folders", rule, "specify fewer runs"))


def page_data(runs: Sequence[RunRecords], detail: float = 1.0) -> dict[str, Any]:
    """JSON data for the page's script; a smaller `detail` means fewer points."""
    # limits that keep the page far below 5 MB
    points = round(detail * min(1000, max(40, 8000 // max(len(runs), 1))))
    window, unit = window_of(runs), comparison.loss_unit(runs) or NATS
    budget = detail * 600_000 / max(sum(bool(run.load.layers) for run in runs), 1)
    return {
        "unit": unit,
        "groups": grouped_by_seed([run.settings for run in runs]),
        "baseline": baseline_of(runs),
        "runs": [_run(run, points, unit, window) | {"experts": _experts(run, budget)} for run in runs],
    }


def embedded(value: Any) -> str:
    """Encodes `value` as JSON that can be embedded safely in a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # the last two are line ends in JavaScript, but not in JSON
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def _run(run: RunRecords, points: int, unit: str, window: float) -> dict[str, Any]:
    starts = bucket_starts(run.num_records, points)
    ends = np.append(starts, run.num_records)[1:].astype(int) - 1
    train = run.train
    curves = {key: _curve(train[key], starts, with_range=key in ("lm_loss", "grad_norm")) for key in _DRAWN}
    memory = np.fmax(train["peak_memory_bytes"], train["memory_allocated_bytes"])
    curves["memory_bytes"] = _curve(memory, starts)
    best = comparison.smoothed(run, unit, window)
    spiked = spikes(train["grad_norm"])[:_MOST_SPIKES]
    step = max(1, (num_valid := len(run.valid["iteration"])) // points)
    every = slice((num_valid - 1) % step, None, step)  # the offset keeps the latest validation
    axes = {key: train[key] for key in AXES}
    lows = [(max(0, index - 1), index) for index in new_minima(best, max(20, points // 3))]
    marks = marks_of(run.events)[-_MOST_CHANGES:] if run.num_records else []
    after = np.searchsorted(train["iteration"], [mark.after for mark in marks], side="right")
    changed = np.maximum(after - 1, 0).astype(int)
    return {
        "name": run.name,
        "seed": run.settings.get("seed"),
        "bits_per_nat": _rounded(comparison.bits_per_nat(run)) if unit == BITS else None,
        "x": {key: _list(values[ends]) for key, values in axes.items()},
        "curves": {key: curve for key, curve in curves.items() if curve},
        "valid": {
            **{key: _list(run.valid[key][every]) for key in AXES},
            **{key: [_rounded(value, 9) for value in run.valid[key][every]] for key in VALID_CURVES},
        },
        # each new minimum of the loss and the previous record: the page interpolates between them
        "reach": {
            "loss": [[_rounded(best[at], digits=9) for at in pair] for pair in lows],
            **{key: [_list(values[at] for at in pair) for pair in lows] for key, values in axes.items()},
        },
        # the latest data stages and resumes, each at the previous record, or at the first record
        "changes": {
            "text": [mark.text for mark in marks],
            "kind": [mark.kind for mark in marks],
            **{key: _list(values[changed]) for key, values in axes.items()},
        },
        "spikes": {
            "value": _list(train["grad_norm"][spiked]),
            **{key: _list(values[spiked]) for key, values in axes.items()},
        },
    }


def new_minima(values: Floats, most: int = 400) -> list[int]:
    """Indices at which `values` reach a new minimum. If there are more than `most`, thins them evenly."""
    lowest = np.fmin.accumulate(np.where(np.isfinite(values), values, np.inf)) if len(values) else values
    indices = np.flatnonzero(lowest < np.concatenate([[np.inf], lowest[:-1]]))
    if len(indices) > most:
        indices = indices[np.linspace(0, len(indices) - 1, most).round().astype(int)]
    return [int(index) for index in indices]


def bucket_starts(num_records: int, most: int) -> Floats:
    """Start indices of at most `most` buckets of nearly equal size."""
    num = min(num_records, most)
    return np.floor(np.arange(num) * num_records / max(num, 1))


def bucketed(values: Floats, starts: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Mean, minimum and maximum of each bucket's finite values (NaN if none); number of non-finite values."""
    index, finite = starts.astype(int), np.isfinite(values)
    num = np.add.reduceat(finite.astype(float), index)
    sizes = np.diff(np.append(index, len(values)))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(num > 0, np.add.reduceat(np.where(finite, values, 0.0), index) / num, np.nan)
    return mean, np.fmin.reduceat(values, index), np.fmax.reduceat(values, index), sizes - num


def _curve(values: Floats, starts: Floats, *, with_range: bool = False) -> dict[str, Any] | None:
    """Each bucket's mean, and the buckets with non-finite values. `with_range` adds minima and maxima."""
    if not np.isfinite(values).any():
        return None
    mean, low, high, num_missing = bucketed(values, starts)
    curve: dict[str, Any] = {"mean": _list(mean), "gaps": np.flatnonzero(num_missing).tolist()}
    if len(starts) < len(values):  # otherwise the page contains every record
        curve["last"] = _rounded(values[np.isfinite(values)][-1])
        # a spike in one record must remain visible
        curve |= {"low": _list(low), "high": _list(high)} if with_range else {}
    return curve


def _experts(run: RunRecords, budget: float) -> dict[str, Any] | None:
    """Curves per layer; load per expert, uint16 [columns, layers, experts] (fair share: LOAD_SCALE)."""
    if not run.load.layers:
        return None
    num_columns = int(min(run_data.NUM_COLUMNS, budget // (len(run.load.layers) * run.load.num_experts)))
    if not num_columns:
        return None  # the tables still show the latest state
    bounds, shares_CLE, means = run.load.columns(num_columns)
    steps = np.clip(np.round(shares_CLE * LOAD_SCALE), 0, 65535).astype("<u2")
    at = np.clip(np.searchsorted(run.train["iteration"], bounds[:, 1]), 0, run.num_records - 1)
    return {
        "layers": run.load.layers,
        "num_experts": run.load.num_experts,
        "scale": LOAD_SCALE,
        "bounds": bounds.astype(int).tolist(),
        "x": {key: _list(run.train[key][at]) for key in AXES},
        "load": base64.b64encode(steps.tobytes()).decode(),
        **{key: [_list(layer) for layer in values.T] for key, values in means.items()},
    }


def _list(values: Iterable[float]) -> list[float | int | None]:
    return [_rounded(value) for value in values]


def _rounded(value: float, digits: int = 6) -> float | int | None:
    """Rounds to `digits` significant digits; whole numbers become int, non-finite values None."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}") if abs(value) < 1e6 or value != int(value) else float(f"{value:.9g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def report_markdown(
    runs: Sequence[RunRecords], *, title: str = "", loss: float | None = None, notes: str = ""
) -> str:
    """Renders a short report as Markdown. Its first line marks the file as a report."""
    views, chosen, unit = _views(runs, loss)
    names, warnings = [run.name for run in runs], list(warnings_of(runs))
    rows = parts.overview_rows(views)
    if unit and math.isfinite(chosen):
        costs = [parts.cost_texts(view.cost) for view in views]
        of_loss = f"to a loss of {target_text(chosen)}{'' if unit == NATS else f' {unit}'}"
        for place, name in ((1, "FLOPs"), (2, "time")):
            rows.append((f"{name} {of_loss}", [texts[place] for texts in costs]))
    results = [*headline(runs), *other_winners(runs)]
    results += [pair_text(one, ranking(runs)) for one in (pairs(runs) if len(runs) > 1 else [])]
    lines = [_MARKER, f"### {plain(title or title_of(runs))}", ""]
    lines += [plain(notes), ""] * bool(notes)
    lines += [f"> **Note:** {plain(text)}" for text in warnings] + [""] * bool(warnings)
    lines += [f"**{plain(results[0])}**\n", *(f"{plain(text)}\n" for text in results[1:] if text)]
    lines += table(["", *names], rows)
    if len(runs) > 1 and (settings := differing_settings(runs)):
        lines += ["", "Settings that differ:", "", *table(["setting", *names], settings)]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines of a Markdown table; the first column is left-aligned, all other columns are right-aligned."""
    cells = [head, *([name, *values] for name, values in rows)]
    lines = [f"| {' | '.join(map(plain, one))} |" for one in cells]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]


def plain(text: str) -> str:
    """Escapes text for a Markdown table cell."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)
