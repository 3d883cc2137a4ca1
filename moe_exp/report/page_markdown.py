"""The report as Markdown for a pull request: one table, and a sentence for each comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from moe_exp.report.comparison import NATS, Overview, Parity, parity_text
from moe_exp.report.page_parts import cost_texts, overview_rows
from moe_exp.report.quantities import target_text

MARKER = "<!-- moe-exp report -->"


def markdown(
    views: Sequence[Overview],
    title: str,
    found: Sequence[Parity],
    warnings: Sequence[str],
    settings: Sequence[tuple[str, Sequence[str]]],
    loss: float,
    unit: str | None,
) -> str:
    """The text, with a newline at its end; the first line tells that the file is a report."""
    rows = [("model", [view.run.kind for view in views]), ("state", [view.run.status for view in views]), *overview_rows(views)]
    if unit and math.isfinite(loss):
        costs = [cost_texts(view.cost) for view in views]
        for place, name in ((1, "FLOPs"), (2, "time")):
            rows.append((f"{name} to a loss of {target_text(loss)}{'' if unit == NATS else f' {unit}'}", [texts[place] for texts in costs]))
    lines = [MARKER, f"### {plain(title)}", ""]
    lines += [f"> **Note:** {plain(text)}" for text in warnings] + [""] * bool(warnings)
    lines += [f"**{plain(parity_text(one))}**\n" for one in found]
    lines += table(["", *(view.run.name for view in views)], rows)
    if settings and len(views) > 1:
        lines += ["", "Settings that differ:", "", *table(["setting", *(view.run.name for view in views)], settings)]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A Markdown table; the first column is left-aligned, the others are numbers."""
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    return lines + [_row([name, *values]) for name, values in rows]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(plain(cell) for cell in cells)} |"


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no table cell and no line ends in it."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)
