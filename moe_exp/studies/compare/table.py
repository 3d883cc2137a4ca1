"""Markdown tables of a comparison, before it starts and at its end. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import combinations

from moe_exp.host.quantities import count_text, flops_text
from moe_exp.planner.costs.params import count_parameters
from moe_exp.report.comparison import Parity, in_words, parity_text
from moe_exp.studies.compare.comparison import Comparison
from moe_exp.studies.compare.matching import active_parameters, apart, flops_per_token
from moe_exp.studies.compare.results import AXES, Axis, Ended, compared, losses_at_shared_end
from moe_exp.studies.compare.variants import Variant, differences

_MATCHED_BY = {"flops": "FLOPs per token", "active-params": "active parameters", "time": "FLOPs per token"}


def plan_text(comparison: Comparison, seconds: Mapping[str, float | None], *, measured: bool) -> str:
    """The variants, their sizes, how well these match, and expected duration.

    Args:
        seconds: per iteration by name; None if unknown.
        measured: whether `seconds` were measured or come from the planner.
    """
    variants, options = comparison.variants, comparison.options
    config = comparison.reference.config
    head = f"{comparison.folder}: {', '.join(comparison.names)}, matched by {options.match}"
    head += f", {options.repeats} runs of each with seeds from {config.seed}" if options.repeats > 1 else ""
    rows = {**_size_rows(comparison), "iterations": [f"{one.config.train_iters:,}" for one in variants]}
    rows["tokens"] = [
        count_text(one.config.train_iters * one.config.gbsz * one.config.seq_len) for one in variants
    ]
    times = [(pace := seconds.get(one.name)) and pace * one.config.train_iters for one in variants]
    rows[f"training time, {'measured pace' if measured else 'predicted roughly'}"] = [
        _duration(time) for time in times
    ]
    lines = [head, "", *_table(comparison.names, rows), "", *_difference_lines(variants)]
    known = [time for time in times if time]
    if len(known) == len(times):
        lines.append(
            f"all {options.repeats * len(variants)} runs: {_duration(options.repeats * sum(known))}, and"
            " their starts and evaluations"
        )
        lines += [f"times are {_percent(max(known) / min(known) - 1)} apart"] if measured else []
    return "\n".join(lines)


def _size_rows(comparison: Comparison) -> dict[str, list[str]]:
    variants, reference, match = comparison.variants, comparison.reference, comparison.options.match
    aparts = [apart(one.config, reference.config, match) for one in variants]
    return {
        "parameters": [count_text(count_parameters(one.config).total) for one in variants],
        "active per token": [count_text(active_parameters(one.config)) for one in variants],
        "FLOPs per token": [flops_text(flops_per_token(one.config)) for one in variants],
        "MLP width": [_width_words(one) for one in variants],
        f"{_MATCHED_BY[match]} against {reference.name}": [
            "-" if one is reference else f"{share:+.2%}" for one, share in zip(variants, aparts, strict=True)
        ],
    }


def _width_words(variant: Variant) -> str:
    config = variant.config
    if not config.use_moe:
        return str(config.ffn_hidden_size)
    shared = f" + {config.shared_expert_size} shared" if config.shared_expert_size else ""
    return f"{config.expert_ffn_size}, {config.topk} of {config.num_experts}{shared}"


def _difference_lines(variants: Sequence[Variant]) -> Iterator[str]:
    yield "the same for all: data and their order, seed, batch, and every setting but"
    for name, values in differences(variants).items():
        yield f"  {name.upper()}: " + ", ".join(
            f"{one.name} {_shown(value)}" for one, value in zip(variants, values, strict=True)
        )


def _shown(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def result_text(comparison: Comparison, ended: Sequence[Ended]) -> str:
    """The Markdown report: sizes, losses at equal tokens, FLOPs and time, failures, comparisons of pairs."""
    by_name = {name: [one for one in ended if one.run.variant.name == name] for name in comparison.names}
    rows = {"status": [_statuses(runs) for runs in by_name.values()], **_size_rows(comparison)}
    for label, value, text in _RESULTS:
        rows[label] = [_spread([value(one) for one in runs], text) for runs in by_name.values()]
    for axis in AXES:
        if found := losses_at_shared_end(ended, axis):
            losses = {one.run.name: loss for one, loss in zip(ended, found[1], strict=True)}
            row = [_spread([losses[one.run.name] for one in runs], _loss) for runs in by_name.values()]
            rows[f"loss at {_AXIS_WORDS[axis](found[0])}"] = row
    lines = [
        f"# {comparison.folder.name}: matched by {comparison.options.match}",
        "",
        *_table(list(by_name), rows),
        "",
    ]
    times = [one.numbers.seconds for one in ended if one.status == "finished" and one.numbers.seconds > 0]
    if comparison.options.match == "time" and len(times) > 1:
        lines.append(f"- training times came out {_percent(max(times) / min(times) - 1)} apart")
    lines += [f"- {line}" for line in _parity_lines(by_name)]
    lines += [f"- {one.run.name} {one.status}: {one.reason}" for one in ended if one.reason]
    note = (
        "Losses are of training, nats per token: means over the last 5% of a run's tokens, where runs are"
        " compared of the shortest run's; times are without evaluation and saves."
    )
    return "\n".join(
        [
            *lines,
            "",
            note + (" ± is the standard deviation over seeds." if comparison.options.repeats > 1 else ""),
            "",
        ]
    )


def _parity_lines(by_name: Mapping[str, Sequence[Ended]]) -> Iterator[str]:
    """Compares pairs of variants per seed: MoE against dense, else the later against the earlier."""
    for (_, earlier), (_, later) in combinations(by_name.items(), 2):
        swapped = earlier[0].run.config.use_moe and not later[0].run.config.use_moe
        pairs = zip(earlier, later, strict=True) if swapped else zip(later, earlier, strict=True)
        found = [
            compared(one, two) for one, two in pairs if one.recorded.num_records and two.recorded.num_records
        ]
        known = [one for one in found if not one.reason]
        if len(known) > 1:
            yield _parity_of_seeds(known)
        else:
            yield from map(parity_text, known or found)


def _parity_of_seeds(found: Sequence[Parity]) -> str:
    """Summarizes comparisons of the same two variants over seeds."""
    shares = {what: [getattr(one, axis) for one in found] for axis, what in _SHARES.items()}
    cost = in_words(
        [f"{text} of {what}" for what, values in shares.items() if (text := _spread(values, _whole_percent))]
    )
    loss = _spread([one.loss for one in found], _loss)
    return (
        f"{found[0].run.name} against {found[0].other.name}, means of {len(found)} seeds: to the lowest loss"
        f" that both reach, {loss}, it needed {cost}"
    )


_SHARES: dict[Axis, str] = {"flops": "the FLOPs", "seconds": "the time", "tokens": "the tokens"}


def _statuses(runs: Sequence[Ended]) -> str:
    words = dict.fromkeys(one.status for one in runs)
    return ", ".join(
        word if len(words) == 1 else f"{sum(one.status == word for one in runs)} {word}" for word in words
    )


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Mean and standard deviation, or the single value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    return text(statistics.fmean(known)) + (
        f" ± {text(statistics.stdev(known))}" if len(set(known)) > 1 else ""
    )


def _table(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Aligned columns, readable in a terminal, too."""
    cells = [["", *names], *([label, *values] for label, values in rows.items() if any(values))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in cells
    ]
    ruler = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [lines[0], ruler, *lines[1:]]


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else str(timedelta(seconds=round(seconds)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _loss(loss: float) -> str:
    return f"{loss:.4f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _whole_percent(share: float) -> str:
    return f"{share:.0%}"


_AXIS_WORDS: dict[Axis, Callable[[float], str]] = {
    "tokens": lambda end: f"{count_text(end)} tokens",
    "flops": lambda end: f"{flops_text(end)} FLOPs",
    "seconds": lambda end: f"{_seconds(end)} of training",
}

# (label, value of a run, formatter)
_RESULTS: list[tuple[str, Callable[[Ended], float | None], Callable[[float], str]]] = [
    ("tokens", lambda one: one.numbers.tokens, count_text),
    ("FLOPs", lambda one: one.numbers.flops, flops_text),
    ("training time", lambda one: one.numbers.seconds, _seconds),
    ("tokens/s", lambda one: one.numbers.tokens_per_second, lambda rate: f"{rate:,.0f}"),
    ("memory of a rank", lambda one: one.numbers.peak_memory_bytes, lambda size: f"{size / 2**30:.2f} GiB"),
    ("final loss", lambda one: one.final_loss, _loss),
    ("last validation loss", lambda one: one.numbers.valid_loss, _loss),
    ("last validation perplexity", lambda one: one.numbers.valid_ppl, lambda ppl: f"{ppl:.2f}"),
]
