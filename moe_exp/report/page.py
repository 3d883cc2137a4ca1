"""`moe-exp report`: run folders -> one HTML file that needs no network, or Markdown for a pull request."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from html import escape
from pathlib import Path

from moe_exp.config import ConfigError, problem
from moe_exp.host.files import write_atomically
from moe_exp.host.quantities import target_text
from moe_exp.report import page_parts as parts
from moe_exp.report.comparison import NATS, common_loss, differing_settings, in_words, warnings_of, window_of
from moe_exp.report.headline import headline, other_winners, pair_text, pairs, ranking
from moe_exp.report.history import about_html, events_html, samples_html
from moe_exp.report.overview import Overview, overview
from moe_exp.report.page_data import embedded, page_data
from moe_exp.report.page_parts import cost_texts, overview_rows
from moe_exp.report.run_data import Run, read_runs, run_problems

_GENERATOR = '<meta name="generator" content="moe-exp report">'
MOST_BYTES = 5_000_000
_SCRIPTS = ("format", "series", "chart", "tools", "heatmap", "page")
_LOSS_CHARTS = ("loss", "valid", "ema", "minus", "valid-minus", "ppl", "bits")
_TRAINING_CHARTS = ("grad_norm", "learning_rate", "tokens_per_second", "tflops_per_gpu", "memory_bytes")
_DETAILS = (1.0, 0.5, 0.2, 0.05)


def write_report(
    paths: Sequence[Path],
    out: Path | None,
    *,
    kind: str = "html",
    title: str = "",
    loss: float | None = None,
    notes: str = "",
) -> list[str]:
    """Writes the report of these run folders to `out`, or prints it if that is None.

    Args:
        paths: run folders, in the order of the report; runs may be unfinished or empty.
        out: an earlier report is replaced, any other file is not.
        kind: `html` or `md`.
        title: heading; by default the names of the runs.
        loss: at which costs are given; by default the lowest that all runs reach.
        notes: a text under the heading.

    Returns:
        Warnings to read before comparing, a sentence each.

    Raises:
        ConfigError: not a run folder, or `out` cannot be written; lists all problems, before any work.
    """
    if problems := check_out(out) + run_problems(paths):
        raise ConfigError(problems)
    runs = read_runs(paths)
    written = report_html if kind == "html" else report_markdown
    text = _valid(written(runs, title=title, loss=loss, notes=notes))
    if out is None:
        print(text, end="")
    else:
        write_atomically(out.resolve(), text)  # keeps a symlink
    return [_valid(line) for line in warnings_of(runs)]


def _valid(text: str) -> str:
    """Replaces what is not valid UTF-8 by `?`, in folder names or events."""
    return text.encode(errors="replace").decode()


def check_out(out: Path | None) -> list[str]:
    """Why no report can be written there: no folder, not a regular file, or not a report; a line each."""
    if out is None:
        return []
    if not (folder := out.resolve().parent).is_dir():
        rule = f"{folder if out.is_symlink() else out.parent} is no directory"
        return [problem("out", out, rule, "make it, or name a file elsewhere")]
    if not out.exists():
        return []
    if not out.is_file():  # a directory, or a device such as /dev/stdout that a file would replace
        return [problem("out", out, "is there and is no regular file", "name a file")]
    with out.open("rb") as file:
        head = file.read(2000)
    if head.strip() and _GENERATOR.encode() not in head and MARKER.encode() not in head:
        return [problem("out", out, "is there and is no report", "name another file, or remove this one")]
    return []


def _views(runs: Sequence[Run], loss: float | None) -> tuple[list[Overview], float, str | None]:
    found, unit = common_loss(runs)
    chosen = found if loss is None else loss
    window = window_of(runs)
    return [overview(run, chosen, unit, window) for run in runs], chosen, unit


def title_of(runs: Sequence[Run]) -> str:
    """A heading for these runs."""
    return f"{len(runs)} runs" if len(runs) > 3 else in_words([run.name for run in runs])


def report_html(runs: Sequence[Run], *, title: str = "", loss: float | None = None, notes: str = "") -> str:
    """The report as one HTML file of less than MOST_BYTES; ValueError if its tables alone are larger."""
    views, chosen, unit = _views(runs, loss)
    sections = [section for section in _sections(runs, views, chosen, unit, loss) if section.content]
    number = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    fields = {
        "title": escape(title or title_of(runs)),
        "subtitle": f"{number}, written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "notes": f'<p class="own">{escape(notes)}</p>' if notes else "",
        "contents": parts.contents_html(sections),
        "result": parts.result_html(runs, warnings_of(runs)),
        "sections": "".join(map(parts.section_html, sections)),
        **_assets(),
    }
    for detail in _DETAILS:
        text = _filled(fields | {"data": embedded(page_data(runs, loss, detail))})
        if len(text.encode(errors="replace")) < MOST_BYTES:
            return text
    rule = f"their page would be larger than {MOST_BYTES:,} bytes"
    raise ValueError(problem("run", f"{len(runs)} folders", rule, "report fewer at a time"))


def _sections(
    runs: Sequence[Run], views: Sequence[Overview], chosen: float, unit: str | None, loss: float | None
) -> list[parts.Section]:
    """The foldable parts of the page below the result."""
    differing = differing_settings(runs)
    cost = parts.cost_html(views, chosen, unit, window_of(runs), is_common=loss is None)
    speed = parts.charts_html(_TRAINING_CHARTS) + parts.spikes_html(runs)
    return [
        parts.Section("loss", "Loss", parts.charts_html(_LOSS_CHARTS, wide="loss")),
        parts.Section("numbers", "The runs in numbers", parts.overview_html(views)),
        parts.Section("cost", "Time to a loss", cost),
        parts.Section("settings", "Settings that differ", parts.settings_html(runs, differing)),
        parts.Section("experts", "Experts", parts.experts_html(runs)),
        parts.Section("training", "Training and speed", speed, is_open=False),
        parts.Section("samples", "Generated text", samples_html(runs), is_open=False),
        parts.Section("about", "Machine and command", about_html(runs), is_open=False),
        parts.Section("events", "Events", events_html(runs), is_open=False),
    ]


@cache
def _assets() -> dict[str, str]:
    def read(name: str) -> str:
        return (parts.ASSETS / name).read_text(encoding="utf-8")

    scripts = ("uplot/uPlot.iife.min.js", *(f"{name}.js" for name in _SCRIPTS))
    return {
        "css": read("uplot/uPlot.min.css") + read("page.css"),
        "scripts": "".join(f"<script>{read(name)}</script>\n" for name in scripts),
    }


def _filled(fields: dict[str, str]) -> str:
    """Fills the template in one pass, so that a run named like a placeholder stays text."""
    page = (parts.ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], page)


# Markdown: one table, and a sentence for each comparison.


MARKER = "<!-- moe-exp report -->"


def report_markdown(
    runs: Sequence[Run], *, title: str = "", loss: float | None = None, notes: str = ""
) -> str:
    """The report as short Markdown with a final newline; its first line marks the file as a report."""
    views, chosen, unit = _views(runs, loss)
    names, warnings = [run.name for run in runs], warnings_of(runs)
    rows = overview_rows(views)
    if unit and math.isfinite(chosen):
        costs = [cost_texts(view.cost) for view in views]
        of_loss = f"to a loss of {target_text(chosen)}{'' if unit == NATS else f' {unit}'}"
        for place, name in ((1, "FLOPs"), (2, "time")):
            rows.append((f"{name} {of_loss}", [texts[place] for texts in costs]))
    results = [*headline(runs), *other_winners(runs)]
    results += [pair_text(one, ranking(runs)) for one in (pairs(runs) if len(runs) > 1 else [])]
    lines = [MARKER, f"### {plain(title or title_of(runs))}", ""]
    lines += [plain(notes), ""] * bool(notes)
    lines += [f"> **Note:** {plain(text)}" for text in warnings] + [""] * bool(warnings)
    lines += [f"**{plain(results[0])}**\n", *(f"{plain(text)}\n" for text in results[1:] if text)]
    lines += table(["", *names], rows)
    if len(runs) > 1 and (settings := differing_settings(runs)):
        lines += ["", "Settings that differ:", "", *table(["setting", *names], settings)]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A Markdown table: first column left-aligned, numbers right."""
    cells = [head, *([name, *values] for name, values in rows)]
    lines = [f"| {' | '.join(map(plain, one))} |" for one in cells]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]


def plain(text: str) -> str:
    """Escapes text for a Markdown table cell."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)
