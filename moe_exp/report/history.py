"""Parts of the page about how runs went: events, machine and command, notes and generated text."""

import shlex
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from moe_exp.config import TRAITS, Config, module_arguments
from moe_exp.config.presets import PRESETS, preset_values
from moe_exp.host.quantities import duration
from moe_exp.report.comparison import in_words
from moe_exp.report.page_parts import row_html, run_name, table
from moe_exp.report.run_data import Run
from moe_exp.runs.records import time_of

FAULTS = (
    "checkpoint_failed", "upload_failed", "damaged_checkpoint", "other_data", "hang", "too_many_bad_steps",
    "bad_step", "replicas_differ", "spike",
)  # fmt: skip
_KEY = (
    (' class="start"', "start, resume"), ("", "checkpoint"),
    (' class="changed"', "resume with changed settings"), (' class="stage"', "data stage"),
    (' class="fault"', "fault"), (' class="end"', "end"),
)  # fmt: skip
_MOST_ROWS = 300
_MARKS = {name: name for name in ("start", "resume", "checkpoint", "end")}
_MARKS |= {"changed_settings": "changed", "data_stage": "stage"}
_MOST_MARKS = 150
_MOST_SAMPLES, _MOST_CHARACTERS = 8, 2000


def events_html(runs: Sequence[Run]) -> str:
    """A timeline per run since its own start, all on one scale, and the events as a table."""
    timed = [[(when, event) for event in run.events if (when := time_of(event)) is not None] for run in runs]
    spans = [_span(run, events) for run, events in zip(runs, timed, strict=True)]
    longest = max((end - start for start, end in spans), default=0.0)
    if not any(timed):
        return '<p class="note">No events are recorded.</p>'
    tracks, rows, left_out = "", list[str](), list[str]()
    for index, (run, events) in enumerate(zip(runs, timed, strict=True)):
        track = _track(index, events, spans[index], longest)
        tracks += f'<div><div class="name">{run_name(run, index)}</div>{track}</div>'
        kept = most_informative(run.events, _MOST_ROWS)
        rows += _event_rows(run, index, kept)
        if text := _left_out(run.events, kept):
            left_out.append(f"{text} of {run.name}")
    kinds = "".join(f"<span><i{css}></i>{what}</span>" for css, what in _KEY)
    key = f'<p class="note key">{kinds}<span>whole width: {duration(longest)}</span></p>'
    head = ["run", "event", "iteration", "time", "details"]
    shown = table(head, rows, "Events", css="scroll tall")
    title = f"All events ({len(rows)})"
    if left_out:
        title = f"Events: {len(rows)}; left out are {escape(in_words(left_out))}"
    return f'<div class="timeline">{tracks}</div>{key}<details><summary>{title}</summary>{shown}</details>'


def most_informative(events: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` events in order: faults first, checkpoints last, and the newest of each."""

    def rank(index: int) -> tuple[bool, bool, int]:
        return not is_fault(events[index]), is_checkpoint(events[index]), -index

    return [events[index] for index in sorted(sorted(range(len(events)), key=rank)[:most])]


def _left_out(events: Sequence[dict[str, Any]], kept: Sequence[dict[str, Any]]) -> str:
    """As in `399 checkpoints and 2 others`; empty if all are kept."""
    checkpoints = sum(map(is_checkpoint, events)) - sum(map(is_checkpoint, kept))
    parts = [(checkpoints, "checkpoints"), (len(events) - len(kept) - checkpoints, "others")]
    return in_words([f"{number:,} {what}" for number, what in parts if number])


def is_checkpoint(event: dict[str, Any]) -> bool:
    return event.get("event") == "checkpoint"


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

    parts = []
    starts = [at for at, (_, event) in enumerate(events) if event.get("event") in ("start", "resume")]
    for start, following in pairwise([*starts, len(events)]):  # each to the last event before the next
        begin = events[start][0]
        end = max(span[1] if following == len(events) else events[following - 1][0], begin)
        style = f"--c:var(--run-{index % 8});left:{place(begin)};width:{place(span[0] + end - begin)}"
        parts.append(f'<i class="active" style="{style}"></i>')
    times = {id(event): when for when, event in events}
    checkpoints = [event for _, event in events if is_checkpoint(event)]
    others = most_informative([event for _, event in events if not is_checkpoint(event)], _MOST_MARKS)
    for event in checkpoints[:: len(checkpoints) // _MOST_MARKS + 1] + others:
        when = times[id(event)]
        name = str(event.get("event"))
        css = "fault" if is_fault(event) else _MARKS.get(name, "")
        text = f"{name} at iteration {event.get('iteration')}, {event.get('time')}"
        parts.append(f'<i class="mark {css}" style="left:{place(when)}" title="{escape(text)}"></i>')
    label = "timeline; the table below has the events"
    return f'<div class="track" role="img" aria-label="{label}">{"".join(parts)}</div>'


def is_fault(event: dict[str, Any]) -> bool:
    name = str(event.get("event"))
    is_named = name in FAULTS or "fault" in name or "fail" in name
    return is_named or "failed" in (event.get("status"), event.get("grade"))


def _event_rows(run: Run, index: int, events: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for event in events:
        more = []
        for key, value in event.items():
            if key not in ("kind", "iteration", "event", "time"):
                more.append(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
        details = ", ".join(more)[:500]
        css = ' class="fault"' if is_fault(event) else ""
        when = str(event.get("time", "")).replace("T", " ")
        texts = (event.get("event"), event.get("iteration"), when, details)
        cells = "".join(f'<td class="text">{escape(str(text))}</td>' for text in texts)
        rows.append(f'<tr{css}><th scope="row">{run_name(run, index)}</th>{cells}</tr>')
    return rows


def about_html(runs: Sequence[Run]) -> str:
    """Start time, machine, versions and commands of each run, and the notes of its folder."""
    about = _about_rows(runs)
    rows = [row_html(name, values, css=' class="text"') for name, values in about if set(values) != {"–"}]
    head = ["", *(run_name(run, index) for index, run in enumerate(runs))]
    texts = {escape(run.name): escape(run.text) for run in runs if run.text}
    notes = "".join(f'<h3>Notes of {name}</h3><p class="own">{text}</p>' for name, text in texts.items())
    return notes + table(head, rows, "Machine and command")


def _about_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    firsts, lasts = ([run.starts[at] if run.starts else {} for run in runs] for at in (0, -1))

    def of(key: str, starts: Sequence[dict[str, Any]] = lasts) -> list[str]:
        return [str(start.get(key) or "–") for start in starts]

    def versions(known: dict[str, str] | None) -> str:
        return ", ".join(f"{name} {value}" for name, value in (known or {}).items()) or "–"

    def command(given: Any) -> str:
        return shlex.join(map(str, given)) if isinstance(given, list) else "–"

    ranks = [f"{run.config.nnodes} x {run.config.gpus_per_node}" if run.config else "–" for run in runs]
    return [
        ("started", [text.replace("T", " ") for text in of("time", firsts)]),
        ("starts", [str(len(run.starts) or "–") for run in runs]),
        ("latest start", [text.replace("T", " ") for text in of("time")]),
        ("host", of("host")),
        ("device", of("device")),
        ("nodes x ranks per node", ranks),
        ("platform", of("platform")),
        ("versions", [versions(start.get("versions")) for start in lasts]),
        ("commit", of("commit")),
        ("command of a rank", [command(start.get("command")) for start in lasts]),
        ("command with the same settings", [_same_settings(run) for run in runs]),
        ("run folder", [str(run.path) for run in runs]),
    ]


def _same_settings(run: Run) -> str:
    """A command that trains with the settings of this run, those of its preset left out."""
    if not run.config or run.config.preset not in PRESETS:  # of another version, or damaged
        return "–"
    base = Config(**(preset_values(run.config.preset) | {"preset": run.config.preset}))
    chosen = {
        name: value
        for name, value in run.config.model_dump().items()
        if TRAITS[name].part != "place" and name != "preset" and value != getattr(base, name)
    }
    return shlex.join(["moe-exp", "train", *module_arguments({"preset": run.config.preset, **chosen})])


def samples_html(runs: Sequence[Run]) -> str:
    """Texts of `generated.jsonl` in the run folders, as `moe-exp generate --json` writes them."""
    parts = []
    for index, run in enumerate(runs):
        for prompt, text in run.samples[:_MOST_SAMPLES]:
            said = f"<b>{escape(prompt[:_MOST_CHARACTERS])}</b>{escape(text[:_MOST_CHARACTERS])}"
            caption = f"<figcaption>{run_name(run, index)}</figcaption>"
            parts.append(f'<figure class="sample">{caption}<p>{said}</p></figure>')
        if len(run.samples) > _MOST_SAMPLES:
            parts.append(f'<p class="note">{len(run.samples) - _MOST_SAMPLES} more of {escape(run.name)}</p>')
    return "".join(parts)
