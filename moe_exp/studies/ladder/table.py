"""Markdown, page and picture of a ladder. No torch; matplotlib only inside functions."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from moe_exp.config.loading import main_settings
from moe_exp.host.quantities import count_text, flops_text
from moe_exp.studies.compare.table import aligned
from moe_exp.studies.ladder.ladder import RULE, Ladder, compute_of
from moe_exp.studies.ladder.laws import Estimate, Fit, Points, Speedup
from moe_exp.studies.ladder.results import Results

_COLORS = ("#1f5f9e", "#d9541e", "#3b8f4f", "#8a4fa3", "#b08900", "#555555")
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }}
table {{ border-collapse: collapse }}
td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }}
svg {{ max-width: 100%; height: auto }}
</style>
{body}
</html>
"""


def plan_text(ladder: Ladder) -> str:
    """The rungs, their sizes and budgets, and the rule that made them."""
    head = f"{ladder.folder}: {', '.join(ladder.names)}, {len(ladder.rungs)} rungs,"
    head += f" {ladder.definition.repeats} runs of each, baseline {ladder.baseline}"
    head += f"\n{main_settings(ladder.rungs[0].reference.config)}"
    rows = []
    for number, comparison in enumerate(ladder.rungs, start=1):
        one = comparison.reference.config
        widths = [variant.config.expert_ffn_size if variant.config.use_moe else variant.config.ffn_hidden_size
                  for variant in comparison.variants]  # fmt: skip
        tokens = count_text(one.train_iters * one.gbsz * one.seq_len)
        sizes = [one.hidden_size, one.num_layers, " / ".join(map(str, widths)), f"{one.lr:g}"]
        rows.append([str(cell) for cell in (number, *sizes, tokens, flops_text(compute_of(one)))])
    names = ["rung", "width", "layers", f"MLP width ({' / '.join(ladder.names)})", "LR", "tokens", "FLOPs"]
    lines = [head, "", *aligned([names, *rows], num_left=0)]
    if ladder.definition.sizes:
        lines += ["", f"scaled: {RULE}"]
    total = sum(compute_of(one.config) for comparison in ladder.rungs for one in comparison.variants)
    return "\n".join([*lines, f"all runs: {flops_text(total * ladder.definition.repeats)} FLOPs"])


def result_text(ladder: Ladder, results: Results) -> str:
    parts = [f"# {ladder.folder.name}", ladder.definition.about, *_lines(ladder, results)]
    parts.insert(2, "\n".join(aligned(_result_rows(ladder, results), num_left=0)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _result_rows(ladder: Ladder, results: Results) -> list[list[str]]:
    others = list(results.speedups)
    rows = [["rung", "FLOPs", *ladder.names, *(f"effective speedup of {name}" for name in others)]]
    for number in range(len(ladder.rungs)):
        flops = float(results.points[ladder.baseline].compute[number])
        losses = [_loss_text(results.points[name], number) for name in ladder.names]
        ratios = [interval_text(results.speedups[name].rungs[number], "×") for name in others]
        rows.append([str(number + 1), flops_text(flops), *losses, *ratios])
    return rows


def _loss_text(points: Points, rung: int) -> str:
    known = points.losses[rung][np.isfinite(points.losses[rung])]
    if not len(known):
        return "-"
    return f"{known.mean():.4f}" + (f" ± {known.std(ddof=1):.4f}" if len(known) > 1 else "")


def _lines(ladder: Ladder, results: Results) -> Iterator[str]:
    """Sentences: trend of each speedup, laws, prediction, and what is missing or left out."""
    if results.fit:
        yield "\n".join(f"- {_trend_text(name, one, ladder)}" for name, one in results.speedups.items())
        yield "\n".join(f"- {_law_text(name, results.fit, ladder)}" for name in ladder.names)
    if results.predicted:
        errors, lines = results.predicted.errors(results.points), list[str]()
        for name, loss in results.predicted.losses.items():
            line = f"- {name} at the last rung: predicted {interval_text(loss, digits=4)}"
            line += f" on {results.predicted.when}"
            if name in errors:
                line += f", measured {results.points[name].means[-1]:.4f}: {errors[name]:+.2%}"
            lines.append(line)
        yield "\n".join(lines)
    yield "\n".join(f"- {line}" for line in results.missing)
    yield "\n".join(f"- left out: {line}" for line in results.left_out)
    if results.num_left:
        yield f"{results.num_left} runs are left; the same command continues with them."
    kind = "of the validation at the end" if results.is_validated else "of training, means over its last 5%"
    yield (
        f"Losses are {kind}, nats per token; ± is the standard deviation over seeds. An effective speedup of"
        f" 2 means that {ladder.baseline} needs twice the compute for the same loss, by its fitted law."
        " Intervals in brackets are of 90%, those of parameters of 95%, from a bootstrap over seeds; they do"
        " not contain the error of the law's form."
    )


def _trend_text(name: str, speedup: Speedup, ladder: Ladder) -> str:
    trend, words = speedup.trend, "is not shown to change with compute"
    if trend.has_interval and (trend.low > 0 or trend.high < 0):
        words = "grows with compute" if trend.low > 0 else "shrinks with compute"
    rung = max((number for number, one in enumerate(speedup.rungs) if not math.isnan(one.value)), default=0)
    last = interval_text(speedup.rungs[rung], "×")
    slope = interval_text(trend, digits=3)
    return f"{name} over {ladder.baseline}: {last} at rung {rung + 1}; the gain {words} (exponent {slope})"


def _law_text(name: str, fit: Fit, ladder: Ladder) -> str:
    found = fit.parameters(name)
    pinned = ladder.definition.asymptote is not None
    floor = f"{found['asymptote'].value:g} (given)" if pinned else interval_text(found["asymptote"], digits=3)
    coefficient, exponent = interval_text(found["coefficient"]), interval_text(found["exponent"], digits=4)
    return f"L({name}) = E + A C^-α: E {floor}, A {coefficient}, α {exponent}"


def interval_text(one: Estimate, unit: str = "", digits: int = 2) -> str:
    """`1.43× [1.31, 1.56]`; without brackets where there is no interval."""

    def shown(value: float) -> str:
        return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"

    if math.isnan(one.value):
        return "-"
    bounds = f" [{shown(one.low)}, {shown(one.high)}]" if not math.isnan(one.low) else ""
    return f"{shown(one.value)}{unit}{bounds}"


def page(ladder: Ladder, results: Results) -> str:
    """The report as one HTML file: plot, table, sentences."""
    names, *rows = _result_rows(ladder, results)

    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) + "</tr>"

    title = escape(ladder.folder.name)
    body = f"<h1>{title}</h1><p>{escape(ladder.definition.about)}</p>{draw(ladder, results)}"
    body += "<table>" + cells(names, "th") + "".join(cells(row, "td") for row in rows) + "</table>"
    for part in _lines(ladder, results):
        body += "".join(f"<p>{escape(line.removeprefix('- '))}</p>" for line in part.splitlines())
    return _PAGE.format(title=title, body=body)


def draw(ladder: Ladder, results: Results) -> str:
    """Loss above the asymptote over compute, and effective speedup over compute, log-log, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    losses, ratios = figure.subplots(1, 2)
    colors = dict(zip(ladder.names, _COLORS * len(ladder.names), strict=False))
    floor = min(law.asymptote for law in results.fit.laws.values()) if results.fit else 0.0
    for name, points in results.points.items():
        _draw_losses(losses, name, points, results.fit, floor, colors[name])
    for name, speedup in results.speedups.items():
        _draw_speedup(ratios, name, results.points[name], speedup, colors[name])
    ratios.axhline(1.0, color="#888888", linewidth=0.8)
    losses.set(xlabel="FLOPs", ylabel=f"loss − {floor:.2f} (nats per token)")
    ratios.set(xlabel="FLOPs", ylabel=f"effective speedup over {ladder.baseline}")
    for axes in (losses, ratios):
        if axes.get_legend_handles_labels()[1]:  # a logarithmic axis needs data
            axes.set(xscale="log", yscale="log")
            axes.grid(visible=True, which="both", alpha=0.2)
            axes.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_losses(axes: Any, name: str, points: Points, fit: Fit | None, floor: float, color: str) -> None:
    known = np.isfinite(points.losses)
    if not known.any():
        return
    compute = np.broadcast_to(points.compute[:, None], known.shape)[known]
    label = None if fit else name
    axes.plot(compute, points.losses[known] - floor, "o", color=color, markersize=4, label=label)
    if fit:
        grid = np.geomspace(points.compute[0], points.compute[-1], 50)
        found = [fit.loss(name, float(flops)) for flops in grid]
        axes.plot(grid, [one.value - floor for one in found], color=color, label=name)
        if fit.draws:
            bounds = [one.low - floor for one in found], [one.high - floor for one in found]
            axes.fill_between(grid, *bounds, color=color, alpha=0.2, linewidth=0)


def _draw_speedup(axes: Any, name: str, points: Points, speedup: Speedup, color: str) -> None:
    pairs = zip(points.compute, speedup.rungs, strict=True)
    known = [(flops, one) for flops, one in pairs if 0 < one.value < math.inf]
    if not known:
        return
    bars: Mapping[str, Any] = {}
    if all(one.has_interval for _, one in known):
        below, above = ([one.value - one.low for _, one in known], [one.high - one.value for _, one in known])
        bars = {"yerr": np.clip([below, above], 0, None)}
    x, y = [flops for flops, _ in known], [one.value for _, one in known]
    axes.errorbar(x, y, **bars, color=color, marker="o", capsize=3, label=name)
