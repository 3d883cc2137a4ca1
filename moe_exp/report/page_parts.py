"""Renders the static parts of the page: tables, sentences, timeline. All text from runs is escaped."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_exp.config import TRAITS, Config, module_arguments
from moe_exp.config.presets import PRESETS, preset_values
from moe_exp.host import quantities
from moe_exp.host.quantities import count_text, digits_text, duration, flops_text, loss_text, percent
from moe_exp.report import comparison, headline
from moe_exp.report.comparison import COSTS, NATS, VALIDATION, Overview, Parity, in_words
from moe_exp.report.headline import Axis, Ranking
from moe_exp.report.run_data import LAYER_KEYS, SPIKE_FACTOR, SPIKE_WINDOW, RunRecords, spikes
from moe_exp.runs.records import time_of

FAULTS = (
    "checkpoint_failed", "upload_failed", "damaged_checkpoint", "other_data", "hang", "too_many_bad_steps",
    "bad_step", "replicas_differ", "spike", "slow_rank", "sdc",
)  # fmt: skip
_KEY = (
    (' class="start"', "start, resume"), ("", "checkpoint"),
    (' class="changed"', "resume with changed settings"), (' class="stage"', "data stage"),
    (' class="fault"', "fault"), (' class="end"', "end"),
)  # fmt: skip
_MARKS = {name: name for name in ("start", "resume", "checkpoint", "end")}
_MARKS |= {"changed_settings": "changed", "data_stage": "stage"}
_MOST_ROWS, _MOST_MARKS = 300, 150
_MOST_SAMPLES, _MOST_CHARACTERS = 8, 2000


@cache
def asset_text(name: str) -> str:
    """Content of a file in assets/."""
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def filled(name: str, fields: Mapping[str, str]) -> str:
    """Content of a file in assets/, with each {{field}} replaced by its value in `fields`."""
    # in one pass, so that a run named like a placeholder is not replaced
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], asset_text(name))


def charts_html(names: Sequence[str], wide: str = "") -> str:
    """Empty elements for charts and for the note about hidden charts; the page's script fills them."""
    css = {name: "chart wide" if name == wide else "chart" for name in names}
    boxes = "".join(f'<div class="{css[name]}" data-chart="{name}"></div>' for name in names)
    return f'<p class="note hidden-charts" hidden></p><div class="charts">{boxes}</div>'


def table(head: Sequence[str], rows: Sequence[str], label: str, *, css: str = "scroll") -> str:
    """Table that scrolls independently of the page. `head` and `rows` are HTML."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="{css}" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def row_html(name: str, values: Sequence[str], css: str = "") -> str:
    """Table row with a heading; `name` and `values` are text, `css` is the class attribute of each value."""
    cells = "".join(f"<td{css}>{escape(value)}</td>" for value in values)
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def run_name(run: RunRecords, index: int) -> str:
    """A run's name with its color. Long names are cut to six lines; the full name appears on hover."""
    # page.css has eight colors
    name, swatch = escape(run.name), f'<i class="swatch" style="--c:var(--run-{index % 8})"></i>'
    return f'<span class="run" title="{name}">{swatch}{name}</span>'


def how(rule: str) -> str:
    """Collapsible explanation. `rule` is plain text."""
    return f'<details class="how"><summary>how?</summary><p>{escape(rule)}</p></details>'


def result_html(runs: Sequence[RunRecords], warnings: Iterable[str]) -> str:
    """Headline, warnings, losses (at equal tokens, FLOPs or time), and costs of reaching the same loss."""
    text, about_seeds = headline.headline(runs)
    parts = [f'<p class="headline">{escape(text)}</p>', f"<p>{escape(about_seeds)}</p>" * bool(about_seeds)]
    lines = "".join(f"<p>{escape(text)}</p>" for text in warnings)
    box = f'<div class="warning" role="note">{lines}</div>' if lines else ""
    if len(runs) == 1:
        return "".join([*parts, box])
    parts += [f"<p>{escape(text)}</p>" for text in headline.other_winners(runs)]
    found = {axis: one for axis in headline.AXES if (one := headline.ranking(runs, axis))}
    parts += [how(headline.RANKING_RULE), box]
    names, rows = list[str](), []
    for one in found.values():
        losses = {standing.group.name: standing.loss for standing in one.standings}
        # columns keep the order of the first row, the ranking by tokens
        names = names or list(losses)
        css = {name: "less" if loss == min(losses.values()) else "" for name, loss in losses.items()}
        cells = "".join(f'<td class="{css[name]}">{loss_text(losses[name])}</td>' for name in names)
        where = f"equal {headline.AXES[one.axis]}: {one.what} after {headline.amount_text(one.axis, one.at)}"
        rows.append(f'<tr><th scope="row">{escape(where)}</th>{cells}</tr>')
    head = [f'<span class="run" title="{escape(name)}">{escape(name)}</span>' for name in names]
    if rows:
        parts.append(table(["", *head], rows, "Losses at equal tokens, FLOPs and time"))
    return "".join(parts) + parity_html(headline.pairs(runs), found)


_PARITY_RULE = (
    "Both models are compared where they first reach the lowest loss that both reach (the higher of their two"
    " minima, rounded up to four places), with linear interpolation. The loss is the validation loss. If the"
    " models were validated on different data, or a model has no validation above that loss, the loss is the"
    " smoothed training loss: the mean over the last w tokens, in whole records, where w is 5% of the tokens"
    " of the shortest run and at least 1% of the longest. Runs whose settings differ only in SEED count as"
    " one run: the mean of their losses over their common range. FLOPs are model FLOPs, forward and backward;"
    " time excludes evaluation and saves. A run that starts at or below this loss is not compared."
    " A share is green if the ranking at equal tokens, FLOPs or time agrees."
)


def parity_html(found: Sequence[Parity], rankings: Mapping[Axis, Ranking]) -> str:
    """Comparisons at equal loss (cards, or a table if there are many), and how the models are compared."""
    if not found:
        return ""
    title = "Cost of the same loss"
    # five or more fit better in a table
    if len(found) <= 4:
        cards = ""
        for one in found:
            figures = ""
            for axis in headline.AXES if one.shares else ():
                # green only if the ranking at equal amounts does not contradict it
                is_less = one.shares[axis] < 1 and not headline.difference(one, rankings.get(axis)) >= 0
                share = f'<b class="{"less" if is_less else ""}">{percent(one.shares[axis], 0)}</b>'
                figures += f"<div>{share}<span>of {COSTS[axis]}</span></div>"
            figures = figures and f'<div class="figures">{figures}</div>'
            text = escape(headline.pair_text(one, rankings.get("consumed_tokens")))
            cards += f'<div class="card">{figures}<p>{text}</p></div>'
        return f'<h3>{title}</h3><div class="cards">{cards}</div>{how(_PARITY_RULE)}'
    rows, opposite = [], ""
    for one in found:
        pair = f"{escape(one.run.name)} against {escape(one.other.name)}"
        if text := headline.opposite_text(one, rankings.get("consumed_tokens")):
            opposite += f"<p>{pair}:{escape(text)}</p>"
        if one.reason:
            cells = f'<td class="text" colspan="4">{escape(one.reason)}</td>'
        else:
            loss = f"{loss_text(one.loss)}{'' if one.what == VALIDATION else ' (training)'}"
            texts = (loss, *(percent(one.shares[axis], 0) for axis in headline.AXES))
            cells = "".join(f"<td>{text}</td>" for text in texts)
        rows.append(f'<tr><th scope="row">{pair}</th>{cells}</tr>')
    head = ["run", "loss reached by both", "of the tokens", "of the FLOPs", "of the time"]
    return f"<h3>{title}</h3>{table(head, rows, title, css='scroll tall')}{opposite}{how(_PARITY_RULE)}"


def overview_html(views: Sequence[Overview]) -> str:
    """Overview table with one column per run."""
    head = ["", *(run_name(view.run, index) for index, view in enumerate(views))]
    body = [row_html(name, values) for name, values in overview_rows(views)]
    return table(head, body, "The runs in numbers") + how(_STATE_RULE)


_STATE_RULE = (
    "The state comes from the last end event. If a run died without an end event, it comes from summary.json,"
    " unless summary.json is older than the metrics. Otherwise, a run counts as running if it wrote something"
    " within the last ten minutes. Throughput is the median over the records."
)


def overview_rows(views: Sequence[Overview]) -> list[tuple[str, list[str]]]:
    """Rows of the overview as plain text; rows with no values are omitted."""
    rows: list[tuple[str, list[str]]] = [
        ("model", [view.run.kind for view in views]),
        ("state", [view.run.status for view in views]),
        ("parameters", [count_text(view.total_parameters) for view in views]),
        ("active per token", [count_text(view.active_parameters) for view in views]),
        ("iterations", [f"{view.iteration:.0f}" if math.isfinite(view.iteration) else "–" for view in views]),
        ("tokens", [count_text(view.tokens) for view in views]),
        ("FLOPs", [flops_text(view.flops) for view in views]),
        ("training time", [duration(view.seconds) for view in views]),
        ("training loss at the end (mean of the last 5%)", [loss_text(view.final_loss) for view in views]),
        ("validation loss", [loss_text(view.valid_loss) for view in views]),
        ("validation perplexity", [digits_text(view.valid_ppl) for view in views]),
        ("bits per byte", [loss_text(view.bits_per_byte) for view in views]),
        ("tokens per second", [quantities.rate_text(view.tokens_per_second) for view in views]),
        ("TFLOP/s per rank", [digits_text(view.tflops_per_gpu, 3) for view in views]),
        ("peak memory per rank", [quantities.bytes_text(view.peak_memory_bytes) for view in views]),
    ]
    # a dash is a missing measurement
    return [(name, values) for name, values in rows if any(value != "–" for value in values)]


def cost_html(
    views: Sequence[Overview], loss: float, unit: str | None, window_tokens: float, *, is_common: bool
) -> str:
    """Table of each run's cost to reach `loss`. The page's script can change this loss. If `is_common`,
    `loss` is the lowest loss that all runs reach.
    """
    if unit is None:
        note = "The tokenizers differ and bits per byte are not known, so losses cannot be compared."
        return f'<p class="note">{note}</p>'
    why = {view.run.name: comparison.why_not_compared(view.run, window_tokens) for view in views}
    reasons = [f"{name} {reason}" for name, reason in why.items() if reason]
    left_out = escape(f" Left out: {'; '.join(reasons)}.") if reasons else ""
    if not math.isfinite(loss):
        has_any = any(comparison.has_loss(view.run) for view in views)
        note = f"No loss can be compared.{left_out}" if has_any else "No loss has been recorded yet."
        return f'<p class="note">{note}</p>'
    rows = []
    for index, view in enumerate(views):
        # the script finds the cells to update by these attributes
        cells = zip([*headline.AXES, "iteration"], cost_texts(view.cost), strict=True)
        values = "".join(f'<td data-axis="{axis}">{text}</td>' for axis, text in cells)
        rows.append(f'<tr data-run="{index}"><th scope="row">{run_name(view.run, index)}</th>{values}</tr>')
    head = ["run", "tokens", "FLOPs", "training time", "iteration"]
    step = 0.01 if unit == NATS else 0.001
    shown = quantities.target_text(loss)
    field = f'<input id="target-loss" type="number" step="{step}" value="{shown}">'
    choose = f'<p id="target" hidden><label>loss to reach, {unit} {field}</label></p>'
    rule = (
        "Resources used until the smoothed loss of a run was first at or below this loss. The table starts"
        f" with {shown} {unit}{', the lowest that all runs reach' if is_common else ''}. The smoothed loss is"
        f" the mean over the last {count_text(window_tokens)} tokens, in whole records.{left_out}"
    )
    return choose + table(head, rows, "Cost of a loss") + how(rule)


def cost_texts(cost: Mapping[str, float] | None) -> list[str]:
    """Tokens, FLOPs, time and iteration as text."""
    if cost is None:
        return ["not reached"] * 4
    texts = {"consumed_tokens": count_text, "consumed_flops": flops_text, "training_seconds": duration}
    return [*(text(cost[axis]) for axis, text in texts.items()), f"{cost['iteration']:.0f}"]


def settings_html(runs: Sequence[RunRecords], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Table of the settings that differ, with one column per run."""
    if not rows:
        note = "There is only one run." if len(runs) == 1 else "No known setting differs."
        return f'<p class="note">{note}</p>'
    head = ["setting", *(run_name(run, index) for index, run in enumerate(runs))]
    return table(head, [row_html(name, values) for name, values in rows], "Settings that differ")


_EXPERT_CHARTS = (
    "layer-entropy", "layer-dropped", "layer-worst", "layer-top1", "balance", "z_loss", "worst", "dropped",
    "entropy", "dead",
)  # fmt: skip


def experts_html(runs: Sequence[RunRecords]) -> str:
    """Frame for the heatmaps and expert curves; also one table per run, with one row per layer."""
    with_experts = [run for run in runs if run.load.layers]
    if not with_experts:
        return '<p class="note">No run has records of expert load.</p>'
    head = [
        "layer", "busiest / mean", "MaxVio per batch", "dead experts", "dropped slots", "router entropy",
        "of the maximum", "weight of the first choice",
    ]  # fmt: skip
    tables = ""
    for run in with_experts:
        bounds, _, means = run.load.columns()
        first, last = bounds[-1].astype(int)
        when = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        # the entropy is largest for equal probabilities
        largest = math.log(run.load.num_experts) or float("nan")
        rows = []
        for index, layer in enumerate(run.load.layers):
            of_layer = {key: float(means[key][-1, index]) for key in LAYER_KEYS}
            entropy = of_layer["router_entropy"]
            cells = [
                digits_text(of_layer["max_over_mean"]), digits_text(of_layer["max_vio"]),
                percent(of_layer["dead_fraction"]), percent(of_layer["dropped_fraction"]),
                digits_text(entropy), percent(entropy / largest), digits_text(of_layer["top1_weight"]),
            ]  # fmt: skip
            rows.append(row_html(str(layer), cells))
        title = f"{escape(run.name)}: layers at {when}"
        tables += f"<details><summary>{title}</summary>{table(head, rows, f'Layers of {run.name}')}</details>"
    charts = f"<summary>Expert curves</summary>{charts_html(_EXPERT_CHARTS)}"
    view = asset_text("experts.html").rstrip()
    return f'{view}{how(_DEAD_RULE)}{tables}<details class="group">{charts}</details>'


_DEAD_RULE = (
    "The load of an expert is its number of tokens relative to the mean of its layer: 1 is the fair share. An"
    " expert below 0.01 counts as dead."
)


def spikes_html(runs: Sequence[RunRecords]) -> str:
    """Number and iterations of each run's gradient norm spikes."""
    items = []
    for run in runs:
        found = run.train["iteration"][spikes(run.train["grad_norm"])].astype(int).tolist()
        shown = ", ".join(map(str, found[:20])) + (", ..." if len(found) > 20 else "")
        items.append(f"{escape(run.name)}: {f'{len(found)} (iterations {shown})' if found else 'none'}")
    rule = f"A spike is more than {SPIKE_FACTOR:g} times the median of the previous {SPIKE_WINDOW} records."
    return f'<p class="note">Gradient norm spikes: {"; ".join(items)}.</p>{how(rule)}'


def events_html(runs: Sequence[RunRecords]) -> str:
    """Timelines of all runs on the same time scale, each starting at 0, and a table of events."""
    timed = [[(when, event) for event in run.events if (when := time_of(event)) is not None] for run in runs]
    if not any(timed):
        return '<p class="note">No events recorded.</p>'
    # The timeline of a running run extends to its last record.
    spans = []
    for run, events in zip(runs, timed, strict=True):
        times = [when for when, _ in events] or [0.0]
        last = run.written.timestamp() if events and run.written and run.status == "running" else 0.0
        spans.append((min(times), max(last, *times)))
    longest = max(end - start for start, end in spans)
    tracks, rows, left_out = "", list[str](), list[str]()
    for index, (run, events) in enumerate(zip(runs, timed, strict=True)):
        track = _track(index, events, spans[index], longest)
        tracks += f'<div><div class="name">{run_name(run, index)}</div>{track}</div>'
        kept = most_informative(run.events, _MOST_ROWS)
        for event in kept:
            more = ", ".join(
                f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
                for key, value in event.items()
                if key not in ("kind", "iteration", "event", "time")
            )
            stamp = str(event.get("time", "")).replace("T", " ")
            texts = (event.get("event"), event.get("iteration"), stamp, more[:500])
            cells = "".join(f'<td class="text">{escape(str(text))}</td>' for text in texts)
            css = ' class="fault"' if is_fault(event) else ""
            rows.append(f'<tr{css}><th scope="row">{run_name(run, index)}</th>{cells}</tr>')
        checkpoints = sum(map(is_checkpoint, run.events)) - sum(map(is_checkpoint, kept))
        parts = [(checkpoints, "checkpoints"), (len(run.events) - len(kept) - checkpoints, "others")]
        if text := in_words([f"{number:,} {what}" for number, what in parts if number]):
            left_out.append(f"{text} of {run.name}")
    kinds = "".join(f"<span><i{css}></i>{what}</span>" for css, what in _KEY)
    key = f'<p class="note key">{kinds}<span>whole width: {duration(longest)}</span></p>'
    shown = table(["run", "event", "iteration", "time", "details"], rows, "Events", css="scroll tall")
    title = f"All events ({len(rows)})"
    if left_out:
        title = f"Events: {len(rows)}; not shown: {escape(in_words(left_out))}"
    return f'<div class="timeline">{tracks}</div>{key}<details><summary>{title}</summary>{shown}</details>'


def ranks_html(runs: Sequence[RunRecords]) -> str:
    """Tables of each rank's latest time in each phase (ms per iteration); empty if there are no times."""
    tables = ""
    for run in (run for run in runs if run.ranks):
        rows = []
        for one in run.ranks[:_MOST_ROWS]:
            name, *cells = (digits_text(v, 3) if isinstance(v, float) else str(v) for v in one.values())
            rows.append(row_html(name, cells))
        tables += table(list(map(escape, run.ranks[0])), rows, f"Ranks of {run.name}", css="scroll tall")
    return tables and tables + how("Milliseconds, excluding waits for other ranks: a slow rank waits least.")


def most_informative(events: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` events, in order. Drops checkpoints first, faults last; each kind, oldest first."""

    def rank(index: int) -> tuple[bool, bool, int]:
        # False comes before True
        return not is_fault(events[index]), is_checkpoint(events[index]), -index

    return [events[index] for index in sorted(sorted(range(len(events)), key=rank)[:most])]


def is_checkpoint(event: dict[str, Any]) -> bool:
    return event.get("event") == "checkpoint"


def _track(
    index: int, events: Sequence[tuple[float, dict[str, Any]]], span: tuple[float, float], longest: float
) -> str:
    def place(when: float) -> str:
        return f"{100 * (when - span[0]) / max(longest, 1e-9):.3f}%"

    parts = []
    starts = [at for at, (_, event) in enumerate(events) if event.get("event") in ("start", "resume")]
    for start, following in pairwise([*starts, len(events)]):  # until the last event before the next start
        begin = events[start][0]
        end = max(span[1] if following == len(events) else events[following - 1][0], begin)
        style = f"--c:var(--run-{index % 8});left:{place(begin)};width:{place(span[0] + end - begin)}"
        parts.append(f'<i class="active" style="{style}"></i>')
    # Checkpoints are thinned out evenly; of other events, the least informative are dropped.
    times = {id(event): when for when, event in events}
    checkpoints = [event for _, event in events if is_checkpoint(event)]
    others = most_informative([event for _, event in events if not is_checkpoint(event)], _MOST_MARKS)
    for event in checkpoints[:: len(checkpoints) // _MOST_MARKS + 1] + others:
        when = times[id(event)]
        name = str(event.get("event"))
        css = "fault" if is_fault(event) else _MARKS.get(name, "")
        text = f"{name} at iteration {event.get('iteration')}, {event.get('time')}"
        parts.append(f'<i class="mark {css}" style="left:{place(when)}" title="{escape(text)}"></i>')
    label = "timeline; the table below lists the events"
    return f'<div class="track" role="img" aria-label="{label}">{"".join(parts)}</div>'


def is_fault(event: dict[str, Any]) -> bool:
    name = str(event.get("event"))
    is_named = name in FAULTS or "fault" in name or "fail" in name
    return is_named or "failed" in (event.get("status"), event.get("grade"))


def about_html(runs: Sequence[RunRecords]) -> str:
    """Start time, machine, versions and commands of each run, and the notes in its folder."""
    about: list[dict[str, Any]] = []
    for run in runs:
        first, last = (run.starts[at] if run.starts else {} for at in (0, -1))
        versions, command, config = last.get("versions") or {}, last.get("command"), run.config
        again = ""
        # not for a damaged run or one from another version
        if config and config.preset in PRESETS:
            base = Config(**(preset_values(config.preset) | {"preset": config.preset}))
            chosen = {
                name: value
                for name, value in config.model_dump().items()
                if TRAITS[name].part != "place" and name != "preset" and value != getattr(base, name)
            }
            again = shlex.join(["moe-exp", "train", *module_arguments({"preset": config.preset, **chosen})])
        row = {
            "started": str(first.get("time") or "").replace("T", " "),
            "starts": len(run.starts),
            "latest start": str(last.get("time") or "").replace("T", " "),
            "host": last.get("host"),
            "device": last.get("device"),
            "nodes x ranks per node": f"{config.nnodes} x {config.gpus_per_node}" if config else "",
            "platform": last.get("platform"),
            "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
            "commit": last.get("commit"),
            "command of a rank": shlex.join(map(str, command)) if isinstance(command, list) else "",
            "command with the same settings": again,
            "run folder": run.path,
        }
        about.append({name: str(value or "–") for name, value in row.items()})
    names = [name for name in about[0] if {one[name] for one in about} != {"–"}]
    rows = [row_html(name, [one[name] for one in about], css=' class="text"') for name in names]
    head = ["", *(run_name(run, index) for index, run in enumerate(runs))]
    texts = {escape(run.name): escape(run.text) for run in runs if run.text}
    notes = "".join(f'<h3>Notes of {name}</h3><p class="own">{text}</p>' for name, text in texts.items())
    return notes + table(head, rows, "Machine and command")


def samples_html(runs: Sequence[RunRecords]) -> str:
    """Generated texts from `generated.jsonl` in the run folders, as written by `moe-exp generate --json`."""
    parts = []
    for index, run in enumerate(runs):
        for prompt, text in run.samples[:_MOST_SAMPLES]:
            said = f"<b>{escape(prompt[:_MOST_CHARACTERS])}</b>{escape(text[:_MOST_CHARACTERS])}"
            caption = f"<figcaption>{run_name(run, index)}</figcaption>"
            parts.append(f'<figure class="sample">{caption}<p>{said}</p></figure>')
        if len(run.samples) > _MOST_SAMPLES:
            parts.append(f'<p class="note">{len(run.samples) - _MOST_SAMPLES} more of {escape(run.name)}</p>')
    return "".join(parts)
