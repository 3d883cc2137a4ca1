"""Results of a ladder (losses, laws, speedups, prediction), as Markdown, HTML and JSON. No torch."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.config.loading import main_settings
from moe_exp.host.files import read_json, write_json
from moe_exp.host.quantities import count_text, flops_text
from moe_exp.report.page_parts import filled
from moe_exp.runs.records import json_value
from moe_exp.studies.child_runs import Case
from moe_exp.studies.compare.comparison import read_ended
from moe_exp.studies.compare.table import aligned
from moe_exp.studies.ladder.ladder import RULE, Ladder, compute_of
from moe_exp.studies.ladder.laws import Estimate, Fit, Noise, Points, Speedup, fit_laws, fit_problem, speedups

_COLORS = ("#1f5f9e", "#d9541e", "#3b8f4f", "#8a4fa3", "#b08900", "#555555")


@dataclass(frozen=True)
class Predicted:
    """Each variant's loss on the last rung, predicted before that rung ran."""

    when: str
    losses: dict[str, Estimate]
    is_validated: bool

    def errors(self, points: dict[str, Points]) -> dict[str, float]:
        """Returns the relative error of the prediction for each variant with a measured loss."""
        measured = {name: float(points[name].means[-1]) for name in self.losses if name in points}
        return {
            name: self.losses[name].value / loss - 1 for name, loss in measured.items() if math.isfinite(loss)
        }


@dataclass(frozen=True)
class Results:
    """Results of a ladder so far."""

    points: dict[str, Points]  # losses by variant
    left_out: list[str]  # runs that failed or diverged, with the reason
    training_seconds: float  # of all runs together
    num_left: int  # unfinished runs
    is_validated: bool  # whether losses are final validation losses, else means over the last 5% of training
    fit: Fit | None  # None if there are too few rungs, see `missing`
    missing: list[str]  # what is missing for a fit, intervals or the prediction
    speedups: dict[str, Speedup]
    predicted: Predicted | None


def results_of(ladder: Ladder, reasons: Mapping[str, str] | None = None) -> Results:
    """Reads all runs. `reasons` maps a failed run's `run_name` to the reason (default: its status)."""
    reasons = reasons or {}
    ended = [[read_ended(run) for run in comparison.runs()] for comparison in ladder.rungs]
    everything = [one for rung in ended for one in rung]
    # One kind of loss for all runs: validation and training losses must not be mixed in a law.
    is_validated = all(one.validated_loss is not None for one in everything if one.status == "finished")

    losses, left_out = dict[str, float](), list[str]()
    for one in everything:
        name, loss = run_name(one.run), one.validated_loss if is_validated else one.final_loss
        loss = math.nan if loss is None else loss
        # ln(VOCAB_SIZE) is the loss of guessing, near which training starts. `not <=` includes NaN.
        has_diverged = one.status == "finished" and not loss <= 1.1 * math.log(one.run.config.vocab_size)
        losses[name] = math.nan if has_diverged or one.status != "finished" else loss
        if has_diverged:
            left_out.append(f"{name} diverged: its loss is {loss:.4g}")
        elif name in reasons:
            left_out.append(f"{name}: {reasons[name]}")
        elif one.status in ("failed", "oom", "timeout"):
            left_out.append(f"{name} {one.status}")

    points = {}
    for name in ladder.names:
        own = [[losses[run_name(one.run)] for one in rung if one.run.variant == name] for rung in ended]
        flops = [ladder.flops(rung)[name] for rung in range(len(ladder.rungs))]
        points[name] = Points(np.array(flops), np.array(own))
    problem = fit_problem(points, ladder.definition.asymptote)
    fit = None if problem else fit_laws(points, asymptote=ladder.definition.asymptote, is_shared=ladder.grows)
    missing = [problem] if problem else []
    if fit and not fit.draws:
        missing.append("no intervals: the noise is unknown with a single seed; add --repeats 3")
    others = [name for name in ladder.names if name != ladder.baseline]
    found = {name: speedups(fit, points, name, ladder.baseline) for name in others} if fit else {}
    num_left = sum(one.status not in ("finished", "failed", "oom", "timeout") for one in everything)
    predicted = read_prediction(ladder)
    if predicted and predicted.is_validated != is_validated:
        missing.append("prediction omitted: it was made for a different kind of loss (training, validation)")
        predicted = None
    seconds = float(np.nansum([one.numbers.seconds for one in everything]))
    return Results(points, left_out, seconds, num_left, is_validated, fit, missing, found, predicted)


def run_name(run: Case) -> str:
    return f"{run.folder.path.parent.name}/{run.name}"


# Prediction


def prediction_file(ladder: Ladder) -> Path:
    return ladder.folder / f"prediction_{len(ladder.rungs)}.json"


def predict(ladder: Ladder) -> str:
    """Unless the last rung has started, predicts its losses. Returns "", or why no prediction exists."""
    # After a rung has started, its losses could no longer be called predicted.
    if any(run.folder.metrics.exists() for run in ladder.rungs[-1].runs()):
        if read_prediction(ladder):
            return ""
        return "The last rung was not predicted: this rung started before other rungs had ended."
    results = results_of(ladder)
    below = {name: Points(of.compute[:-1], of.losses[:-1]) for name, of in results.points.items()}
    if problem := fit_problem(below, ladder.definition.asymptote):
        return f"The last rung is not predicted: {problem}."
    fit = fit_laws(below, asymptote=ladder.definition.asymptote, is_shared=ladder.grows)
    noise, flops = Noise.of(below), ladder.flops(-1)
    repeats = ladder.definition.repeats
    losses = {name: fit.prediction(name, flops[name], noise, repeats) for name in ladder.names}
    kept = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "flops": flops,
        "is_validated": results.is_validated,
        "losses": {name: asdict(one) for name, one in losses.items()},
        "laws": {name: asdict(law) for name, law in fit.laws.items()},
    }
    write_json(prediction_file(ladder), json_value(kept))
    return ""


def read_prediction(ladder: Ladder) -> Predicted | None:
    """Reads the prediction of the last rung; None if it is missing or belongs to other models."""
    path = prediction_file(ladder)
    if not path.exists():
        return None
    kept = read_json(path, fix="delete this file; the last rung then counts as not predicted")
    # Another definition of the last rung may use the same file name.
    if kept.get("flops") != ladder.flops(-1):
        return None
    losses = {
        name: Estimate(**{key: math.nan if value is None else value for key, value in one.items()})
        for name, one in kept["losses"].items()
    }
    return Predicted(kept["time"], losses, kept["is_validated"])


def as_json(ladder: Ladder, results: Results) -> dict[str, Any]:
    """Returns the definition and results as JSON types, with None instead of NaN."""
    fit, predicted, laws = results.fit, results.predicted, None
    if fit:
        laws = {name: {k: asdict(v) for k, v in fit.parameters(name).items()} for name in ladder.names}
    content = {
        "definition": asdict(ladder.definition),
        "baseline": ladder.baseline,
        "losses_are": "validation" if results.is_validated else "training",
        "rungs": {name: {"flops": of.compute, "losses": of.losses} for name, of in results.points.items()},
        "laws": laws,
        "speedups": {name: asdict(one) for name, one in results.speedups.items()},
        "prediction": predicted and asdict(predicted) | {"errors": predicted.errors(results.points)},
        "left_out": results.left_out,
        "training_seconds": results.training_seconds,
        "missing": results.missing,
    }
    return json_value(content)


# Report


def plan_text(ladder: Ladder) -> str:
    """Describes the rungs, their sizes and budgets, and the scaling rule."""
    head = f"{ladder.folder}: {', '.join(ladder.names)}, {len(ladder.rungs)} rungs,"
    head += f" {ladder.definition.repeats} seeds, baseline {ladder.baseline}"
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
        losses = []
        for name in ladder.names:
            row = results.points[name].losses[number]
            known = row[np.isfinite(row)]
            spread = f" ± {known.std(ddof=1):.4f}" if len(known) > 1 else ""
            losses.append(f"{known.mean():.4f}{spread}" if len(known) else "-")
        ratios = [interval_text(results.speedups[name].rungs[number], "×") for name in others]
        rows.append([str(number + 1), flops_text(flops), *losses, *ratios])
    return rows


def _lines(ladder: Ladder, results: Results) -> Iterator[str]:
    """Yields the report's paragraphs on speedup trends, laws, predictions, and missing or excluded runs."""
    if results.fit:
        trends = []
        for name, one in results.speedups.items():
            trend, words = one.trend, "shows no significant change with compute"
            if trend.has_interval and (trend.low > 0 or trend.high < 0):
                words = "grows with compute" if trend.low > 0 else "shrinks with compute"
            rung = max((number for number, x in enumerate(one.rungs) if not math.isnan(x.value)), default=0)
            last = f"{interval_text(one.rungs[rung], '×')} at rung {rung + 1}"
            slope = interval_text(trend, digits=3)
            trends.append(f"- {name} over {ladder.baseline}: {last}; the gain {words} (exponent {slope})")
        yield "\n".join(trends)
        laws, is_given = [], ladder.definition.asymptote is not None
        for name in ladder.names:
            floor, factor, exponent = results.fit.parameters(name).values()
            shown = f"{floor.value:g} (given)" if is_given else interval_text(floor, digits=3)
            rest = f"A {interval_text(factor)}, α {interval_text(exponent, digits=4)}"
            laws.append(f"- L({name}) = E + A C^-α: E {shown}, {rest}")
        yield "\n".join(laws)
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
        yield f"{results.num_left} runs remain. Repeat the command to continue."
    kind = "final validation losses" if results.is_validated else "means over the last 5% of training"
    yield (
        f"Losses are {kind} in nats per token; ± is the standard deviation over seeds. An effective speedup"
        f" of 2 means that {ladder.baseline} needs twice the compute for the same loss, by its fitted law."
        " Brackets are 90% intervals (95% for parameters) from a bootstrap over seeds, excluding the error"
        " from the law's functional form."
    )


def interval_text(one: Estimate, unit: str = "", digits: int = 2) -> str:
    """Formats an estimate like `1.43× [1.31, 1.56]`, without brackets if the interval is unknown."""

    def shown(value: float) -> str:
        return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"

    if math.isnan(one.value):
        return "-"
    bounds = f" [{shown(one.low)}, {shown(one.high)}]" if not math.isnan(one.low) else ""
    return f"{shown(one.value)}{unit}{bounds}"


def page(ladder: Ladder, results: Results) -> str:
    """Returns the report as a single HTML page with plot, table and text."""
    names, *rows = _result_rows(ladder, results)

    def cells(row: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) + "</tr>"

    title = escape(ladder.folder.name)
    body = f"<h1>{title}</h1><p>{escape(ladder.definition.about)}</p>{draw(ladder, results)}"
    body += "<table>" + cells(names, "th") + "".join(cells(row, "td") for row in rows) + "</table>"
    for part in _lines(ladder, results):
        body += "".join(f"<p>{escape(line.removeprefix('- '))}</p>" for line in part.splitlines())
    return filled("ladder.html", {"title": title, "body": body})


def draw(ladder: Ladder, results: Results) -> str:
    """Returns an SVG with two log-log plots against compute: loss minus asymptote, and effective speedup."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    losses, ratios = figure.subplots(1, 2)
    colors = dict(zip(ladder.names, _COLORS * len(ladder.names), strict=False))
    floor = min(law.asymptote for law in results.fit.laws.values()) if results.fit else 0.0
    for name, points in results.points.items():
        _draw_losses(losses, name, points, results.fit, floor, colors[name])
    for name, speedup in results.speedups.items():
        pairs = zip(results.points[name].compute, speedup.rungs, strict=True)
        known = [(flops, one) for flops, one in pairs if 0 < one.value < math.inf]
        bars = dict[str, Any]()
        if all(one.has_interval for _, one in known):
            below = [one.value - one.low for _, one in known]
            bars = {"yerr": np.clip([below, [one.high - one.value for _, one in known]], 0, None)}
        if known:
            x, y = [flops for flops, _ in known], [one.value for _, one in known]
            ratios.errorbar(x, y, **bars, color=colors[name], marker="o", capsize=3, label=name)
    ratios.axhline(1.0, color="#888888", linewidth=0.8)
    losses.set(xlabel="FLOPs", ylabel=f"loss − {floor:.2f} (nats per token)")
    ratios.set(xlabel="FLOPs", ylabel=f"effective speedup over {ladder.baseline}")
    for axes in (losses, ratios):
        if axes.get_legend_handles_labels()[1]:  # a logarithmic axis requires data
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
