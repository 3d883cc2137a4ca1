"""Parts of the page without script: tables, sentences, timeline. Text that runs contain is escaped here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

from moe_exp.report.comparison import (
    NATS,
    Cost,
    Overview,
    Parity,
    has_loss,
    in_words,
    parity_text,
    why_not_compared,
)
from moe_exp.report.load_history import LAYER_KEYS
from moe_exp.report.quantities import bytes_text, duration, loss_text, percent, short, target_text
from moe_exp.report.run_data import Run
from moe_exp.report.series import SPIKE_FACTOR, SPIKE_WINDOW, spikes

FAULTS = ("checkpoint_failed", "damaged_checkpoint", "other_data")
_MOST_ROWS = 300
_MOST_MARKS = 150


def warnings_html(warnings: Sequence[str]) -> str:
    """A box with a paragraph per warning; empty without any."""
    lines = "".join(f"<p>{escape(text)}</p>" for text in warnings)
    return f'<div class="warning" role="note">{lines}</div>' if lines else ""


def table(head: Sequence[str], rows: Sequence[str], label: str, *, css: str = "scroll") -> str:
    """A table that scrolls on its own, so that the page need not. `head` and `rows` are HTML."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="{css}" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def run_name(run: Run, index: int) -> str:
    """A run's name in its color; at most six lines, the full name on hover."""
    name = escape(run.name)
    return (
        f'<span class="run" title="{name}"><i class="swatch"'
        f' style="--c:var(--run-{index % 8})"></i>{name}</span>'
    )


def parity_html(found: Sequence[Parity]) -> str:
    """A card for each comparison with a dense run, and the definition."""
    if not found:
        return (
            '<p class="note">With a dense run and one with experts, this says what share of the FLOPs and the'
            " time a loss costs.</p>"
        )
    return (
        f'<div class="cards">{"".join(map(_card, found))}</div><p class="note">Both are taken where their'
        " smoothed loss first comes to the lowest that both reach, on the straight line between two records:"
        " the higher of their two lowest ones, rounded up to four places. The smoothed loss at a record is"
        " the mean training loss of the last w tokens, in whole records: w is 5% of the tokens of the"
        " shorter run, and at least 1% of those of the longer. FLOPs are the model's, forward and backward;"
        " time is that of training, without evaluation and saving.</p>"
    )


def _card(found: Parity) -> str:
    if found.reason:
        return f'<div class="card"><p>{escape(parity_text(found))}</p></div>'
    shares = [(found.flops, "of the FLOPs"), (found.seconds, "of the time"), (found.tokens, "of the tokens")]
    figures = "".join(
        f'<div><b class="{"less" if share < 1 else ""}">{percent(share, 0)}</b><span>{what}</span></div>'
        for share, what in shares
    )
    return f'<div class="card"><div class="figures">{figures}</div><p>{escape(parity_text(found))}</p></div>'


def overview_html(views: Sequence[Overview]) -> str:
    """The runs in numbers, a column each."""
    rows = [
        ("model", [escape(view.run.kind) for view in views]),
        ("state", [escape(view.run.status) for view in views]),
        *((name, list(values)) for name, values in overview_rows(views)),
    ]
    body = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'
        for name, values in rows
    ]
    return table(
        ["", *(run_name(view.run, index) for index, view in enumerate(views))], body, "The runs in numbers"
    )


def overview_rows(views: Sequence[Overview]) -> list[tuple[str, list[str]]]:
    """Rows of the overview as plain text, without rows that no run has a value for."""
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [short(view.total_parameters) for view in views]),
        ("active per token", [short(view.active_parameters) for view in views]),
        ("iterations", [f"{view.iteration:.0f}" if math.isfinite(view.iteration) else "–" for view in views]),
        ("tokens", [short(view.tokens) for view in views]),
        ("FLOPs", [short(view.flops) for view in views]),
        ("training time", [duration(view.seconds) for view in views]),
        ("training loss at the end (mean of the last 5%)", [loss_text(view.final_loss) for view in views]),
        ("validation loss", [loss_text(view.valid_loss) for view in views]),
        ("validation perplexity", [short(view.valid_ppl) for view in views]),
        ("bits per byte", [loss_text(view.bits_per_byte) for view in views]),
        ("tokens per second", [short(view.tokens_per_second) for view in views]),
        ("TFLOP/s per rank", [short(view.tflops_per_gpu) for view in views]),
        ("peak memory of a rank", [bytes_text(view.peak_memory_bytes) for view in views]),
    ]
    return [(name, values) for name, values in rows if any(value != "–" for value in values)]


def cost_html(
    views: Sequence[Overview], loss: float, unit: str | None, window_tokens: float, *, is_common: bool
) -> str:
    """Cost of each run at `loss` (`is_common`: the default loss); the script updates it for other losses."""
    if unit is None:
        return (
            '<p class="note">The tokenizers differ and bits per byte are not known, so there is no loss to'
            " compare at.</p>"
        )
    reasons = [
        f"{view.run.name} {reason}" for view in views if (reason := why_not_compared(view.run, window_tokens))
    ]
    left_out = escape(f" Left out: {'; '.join(reasons)}.") if reasons else ""
    if not math.isfinite(loss):
        has_any = any(has_loss(view.run) for view in views)
        note = f"No loss can be compared.{left_out}" if has_any else "No loss has been recorded yet."
        return f'<p class="note">{note}</p>'
    rows = [_cost_row(view, index) for index, view in enumerate(views)]
    head = ["run", "tokens", "FLOPs", "training time", "iteration"]
    step = 0.01 if unit == NATS else 0.001
    shown = target_text(loss)
    choose = (
        f'<p id="target" hidden><label>loss to reach, {unit} <input id="target-loss" type="number"'
        f' step="{step}" value="{shown}"></label></p>'
    )
    note = (
        "What each run had used when its smoothed loss first was at or below that loss; the table starts"
        f" with {shown} {unit}{', the lowest that all runs reach' if is_common else ''}. Smoothed: the mean"
        f" over the last {short(window_tokens)} tokens, in whole records.{left_out}"
    )
    return f'{choose}{table(head, rows, "Cost of a loss")}<p class="note">{note}</p>'


def _cost_row(view: Overview, index: int) -> str:
    axes = ("consumed_tokens", "consumed_flops", "training_seconds", "iteration")
    cells = "".join(
        f'<td data-axis="{axis}">{text}</td>' for axis, text in zip(axes, cost_texts(view.cost), strict=True)
    )
    return f'<tr data-run="{index}"><th scope="row">{run_name(view.run, index)}</th>{cells}</tr>'


def cost_texts(cost: Cost | None) -> list[str]:
    """Tokens, FLOPs, time and iteration as text."""
    if cost is None:
        return ["not reached"] * 4
    return [short(cost.tokens), short(cost.flops), duration(cost.seconds), f"{cost.iteration:.0f}"]


def settings_html(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The settings that differ, a column per run."""
    if not rows:
        note = "There is one run." if len(runs) == 1 else "No setting differs, as far as they are known."
        return f'<p class="note">{note}</p>'
    body = [
        "<tr><th"
        f' scope="row">{escape(name)}</th>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for name, values in rows
    ]
    return table(
        ["setting", *(run_name(run, index) for index, run in enumerate(runs))], body, "Settings that differ"
    )


_EXPERT_VIEW = """<div id="expert-view" hidden>
<div class="experts-controls">
<label>run <select id="expert-run"></select></label>
<label>time <input id="expert-time" type="range" min="0" max="0" step="1">\
<output id="expert-when"></output></label>
<label>layer <select id="expert-layer"></select></label>
</div>
<div class="heats"><div class="heat" id="heat-now"></div><div class="heat" id="heat-over"></div></div>
<div class="scale"><span>load of an expert: <i class="dead"></i> dead (under 1%)</span>
<span>0 <i></i> 4 times its fair share; the middle is the fair share</span></div>
<details id="expert-table-box"><summary>The heatmap as a table</summary>
<div class="scroll tall" role="region" tabindex="0" aria-label="Load of the experts">\
<table id="expert-table"></table></div></details>
</div>"""
_EXPERT_CHARTS = (
    "layer-entropy",
    "layer-dropped",
    "layer-worst",
    "layer-top1",
    "balance",
    "z_loss",
    "worst",
    "dropped",
    "entropy",
    "dead",
)


def experts_html(runs: Sequence[Run]) -> str:
    """The frame of the heatmaps and expert curves, and a table of each run's layers."""
    with_experts = [run for run in runs if run.load]
    if not with_experts:
        return '<p class="note">None of the runs has recorded experts.</p>'
    charts = "".join(f'<div class="chart" data-chart="{name}"></div>' for name in _EXPERT_CHARTS)
    tables = "".join(_layer_table(run) for run in with_experts)
    return f'{_EXPERT_VIEW}<div class="charts">{charts}</div>{tables}'


def _layer_table(run: Run) -> str:
    bounds, _, means = run.load.columns()
    when = _period(bounds[-1])
    head = [
        "layer",
        "busiest / mean",
        "dead experts",
        "dropped tokens",
        "router entropy",
        "of the largest",
        "weight of the first choice",
    ]
    rows = []
    for index, layer in enumerate(run.load.layers):
        of_layer = {key: float(means[key][-1, index]) for key in LAYER_KEYS}
        entropy, num_experts = of_layer["router_entropy"], run.load.num_experts
        cells = [
            short(of_layer["max_over_mean"]), percent(of_layer["dead_fraction"]),
            percent(of_layer["dropped_fraction"]), short(entropy),
            percent(entropy / math.log(num_experts) if num_experts > 1 else float("nan")),
            short(of_layer["top1_weight"]),
        ]  # fmt: skip
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    return (
        f"<details><summary>{escape(run.name)}: layers at"
        f" {when}</summary>{table(head, rows, f'Layers of {run.name}')}</details>"
    )


def _period(bounds: Sequence[float]) -> str:
    first, last = int(bounds[0]), int(bounds[1])
    return f"iteration {last}" if first == last else f"iterations {first} to {last}"


def spikes_html(runs: Sequence[Run]) -> str:
    """Number and iterations of each run's gradient norm spikes."""
    items = []
    for run in runs:
        found = run.train["iteration"][spikes(run.train["grad_norm"])].astype(int).tolist()
        shown = ", ".join(map(str, found[:20])) + (", ..." if len(found) > 20 else "")
        items.append(f"{escape(run.name)}: {f'{len(found)} (iterations {shown})' if found else 'none'}")
    rule = f"more than {SPIKE_FACTOR:g} times the median of the {SPIKE_WINDOW} records before it"
    return f'<p class="note">Spikes of the gradient norm, {rule}: {"; ".join(items)}.</p>'


def events_html(runs: Sequence[Run]) -> str:
    """A timeline per run since its own start, all on one scale, and the events as a table."""
    timed = [[(when, event) for event in run.events if (when := _time(event)) is not None] for run in runs]
    spans = [_span(run, events) for run, events in zip(runs, timed, strict=True)]
    longest = max((end - start for start, end in spans), default=0.0)
    if not any(timed):
        return '<p class="note">No events are recorded.</p>'
    tracks = "".join(
        "<div><div"
        f' class="name">{run_name(run, index)}</div>{_track(index, events, spans[index], longest)}</div>'
        for index, (run, events) in enumerate(zip(runs, timed, strict=True))
    )
    key = (
        '<p class="note key"><span><i class="start"></i>start,'
        ' resume</span><span><i></i>checkpoint</span><span><i class="changed"></i>resume with changed'
        ' settings</span><span><i class="fault"></i>fault</span><span><i'
        f' class="end"></i>end</span><span>whole width: {duration(longest)}</span></p>'
    )
    kept = [most_informative(run.events, _MOST_ROWS) for run in runs]
    rows = [row for index, run in enumerate(runs) for row in _event_rows(run, index, kept[index])]
    left_out = [
        f"{text} of {run.name}"
        for run, one in zip(runs, kept, strict=True)
        if (text := _left_out(run.events, one))
    ]
    head = ["run", "event", "iteration", "time", "details"]
    shown = table(head, rows, "Events", css="scroll tall")
    title = (
        f"Events: {len(rows)}; left out are {escape(in_words(left_out))}"
        if left_out
        else f"All events ({len(rows)})"
    )
    return f'<div class="timeline">{tracks}</div>{key}<details><summary>{title}</summary>{shown}</details>'


def most_informative(events: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` events in order: faults first, checkpoints last, and the newest of each."""
    order = sorted(
        range(len(events)),
        key=lambda index: (not is_fault(events[index]), is_checkpoint(events[index]), -index),
    )
    return [events[index] for index in sorted(order[:most])]


def _left_out(events: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> str:
    """As in `399 checkpoints and 2 others`; empty if all are kept."""
    checkpoints = sum(map(is_checkpoint, events)) - sum(map(is_checkpoint, kept))
    parts = [(checkpoints, "checkpoints"), (len(events) - len(kept) - checkpoints, "others")]
    return in_words([f"{number:,} {what}" for number, what in parts if number])


def is_checkpoint(event: dict[str, Any]) -> bool:
    """Whether the event is a saved checkpoint."""
    return event.get("event") == "checkpoint"


def _time(event: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None


def _span(run: Run, events: Sequence[tuple[float, dict[str, Any]]]) -> tuple[float, float]:
    if not events:
        return 0.0, 0.0
    times = [when for when, _ in events]
    last = run.written.timestamp() if run.written and run.status == "running" else max(times)
    return min(times), max(last, *times)


def _track(
    index: int, events: Sequence[tuple[float, dict[str, Any]]], span: tuple[float, float], longest: float
) -> str:
    def place(when: float) -> str:
        return f"{100 * (when - span[0]) / max(longest, 1e-9):.3f}%"

    parts = [
        '<i class="active"'
        f' style="--c:var(--run-{index % 8});left:{place(begin)};width:{place(span[0] + end - begin)}"></i>'
        for begin, end in _active(events, span[1])
    ]
    times = {id(event): when for when, event in events}
    checkpoints = [event for _, event in events if is_checkpoint(event)]
    others = most_informative([event for _, event in events if not is_checkpoint(event)], _MOST_MARKS)
    for event in checkpoints[:: len(checkpoints) // _MOST_MARKS + 1] + others:
        when = times[id(event)]
        name = str(event.get("event"))
        css = "fault" if is_fault(event) else name if name in ("start", "resume", "checkpoint", "end") else ""
        if name == "changed_settings":
            css = "changed"
        text = f"{name} at iteration {event.get('iteration')}, {event.get('time')}"
        parts.append(f'<i class="mark {css}" style="left:{place(when)}" title="{escape(text)}"></i>')
    return (
        '<div class="track" role="img" aria-label="timeline; the table below has the'
        f' events">{"".join(parts)}</div>'
    )


def _active(events: Sequence[tuple[float, dict[str, Any]]], last: float) -> list[tuple[float, float]]:
    """Intervals from each start to the last event before the next start."""
    starts = [
        position for position, (_, event) in enumerate(events) if event.get("event") in ("start", "resume")
    ]
    ends = [*starts[1:], len(events)] if starts else []
    spans = []
    for position, following in zip(starts, ends, strict=True):
        end = last if following == len(events) else events[following - 1][0]
        spans.append((events[position][0], max(end, events[position][0])))
    return spans


def is_fault(event: dict[str, Any]) -> bool:
    """Whether the event needs attention."""
    name = str(event.get("event"))
    return (
        name in FAULTS
        or "fault" in name
        or "fail" in name
        or "spike" in name
        or event.get("status") == "failed"
    )


def _event_rows(run: Run, index: int, events: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for event in events:
        details = ", ".join(
            f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in event.items()
            if key not in ("kind", "iteration", "event", "time")
        )
        css = ' class="fault"' if is_fault(event) else ""
        texts = [
            event.get("event"),
            event.get("iteration"),
            str(event.get("time", "")).replace("T", " "),
            details[:500],
        ]
        cells = "".join(f'<td class="text">{escape(str(text))}</td>' for text in texts)
        rows.append(f'<tr{css}><th scope="row">{run_name(run, index)}</th>{cells}</tr>')
    return rows
