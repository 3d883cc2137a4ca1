"""Plan of a comparison, and its results as Markdown and JSON. No torch."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

from moe_exp.host.quantities import count_text, flops_text
from moe_exp.planner.costs.params import count_parameters
from moe_exp.report.comparison import COSTS, VALIDATION, Group, Parity, in_words, parity
from moe_exp.report.headline import AXES, amount_text, opposite_text, pair_text, ranking
from moe_exp.runs.records import json_value
from moe_exp.studies.compare.comparison import Comparison, Ended, losses_at_shared_end
from moe_exp.studies.compare.variants import MATCHED_BY, apart, differences, flops_per_token

_MOST_PAIRED = 4  # up to this number of variants, all pairs are compared
_MOST_COLUMNS = 6  # up to this number, variants are columns, else rows


def plan_text(comparison: Comparison, seconds: Mapping[str, float | None], *, measured: bool) -> str:
    """Describes the variants, their sizes, the size mismatch and the expected duration. `seconds`: time per
    iteration of each variant, None if unknown. `measured`: True if times were measured, False if predicted.
    """
    variants, options = comparison.variants, comparison.options
    config = comparison.reference.config
    head = f"{comparison.folder}: {', '.join(comparison.names)}, matched by {options.match}"
    head += f", {options.repeats} runs per variant, seeds from {config.seed}" if options.repeats > 1 else ""
    rows = {**_size_rows(comparison), "iterations": [f"{one.config.train_iters:,}" for one in variants]}
    tokens = [one.config.train_iters * one.config.gbsz * one.config.seq_len for one in variants]
    rows["tokens"] = [*map(count_text, tokens)]
    times = [(pace := seconds.get(one.name)) and pace * one.config.train_iters for one in variants]
    how = "measured speed" if measured else "rough prediction"
    rows[f"training time ({how})"] = [*map(_duration, times)]
    lines = [head, "", *_table(comparison.names, rows), ""]
    lines.append("data, data order, seed, batch and all settings are equal, except")
    for name, values in differences(variants).items():
        # As in the shell: `true`, not `True`. A dash marks a setting that does not apply to the variant.
        texts = ["-" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values]
        pairs = zip(comparison.names, texts, strict=True)
        lines.append(f"  {name.upper()}: " + ", ".join(map(" ".join, pairs)))
    known = [time for time in times if time]
    if len(known) == len(times):
        total = _duration(options.repeats * sum(known))
        lines.append(f"all {options.repeats * len(variants)} runs: {total}, plus startup and evaluation")
        lines += [f"training times differ by {max(known) / min(known) - 1:.1%}"] if measured else []
    return "\n".join(lines)


def _size_rows(comparison: Comparison) -> dict[str, list[str]]:
    variants, reference, match = comparison.variants, comparison.reference, comparison.options.match
    widths = []
    for config in (one.config for one in variants):
        width = f"{config.ffn_hidden_size}"
        if config.use_moe:
            latent = f" in {config.moe_latent_size} channels" if config.moe_latent_size else ""
            shared = f" + {config.shared_expert_size} shared" if config.shared_expert_size else ""
            width = f"{config.expert_ffn_size}{latent}, {config.topk} of {config.num_experts}{shared}"
        widths.append(width)
    counts = [count_parameters(one.config) for one in variants]
    return {
        "parameters": [count_text(count.total) for count in counts],
        "active per token": [count_text(count.active_per_token) for count in counts],
        "FLOPs per token": [flops_text(flops_per_token(one.config)) for one in variants],
        "MLP width": widths,
        f"{MATCHED_BY[match]} against {reference.name}": [
            "-" if one is reference else f"{apart(one.config, reference.config, match):+.2%}"
            for one in variants
        ],
    }


def result_text(comparison: Comparison, ended: Sequence[Ended]) -> str:
    """Returns the Markdown report: sizes; losses at equal tokens, FLOPs or time; compared pairs; failures."""
    by_name = {name: [one for one in ended if one.run.variant == name] for name in comparison.names}
    counts = [Counter(one.status for one in runs) for runs in by_name.values()]
    statuses = [
        ", ".join(f"{count} {word}" if len(of) > 1 else word for word, count in of.items()) for of in counts
    ]
    rows = {"status": statuses, **_size_rows(comparison)}
    # Means are over finished seeds only, as the loss of a shorter run is not comparable.
    counted = [[one for one in of if len(of) == 1 or one.status == "finished"] for of in by_name.values()]
    for label, value, text in _RESULTS:
        rows[label] = [_mean_text([value(one) for one in runs], text) for runs in counted]
    base, against = by_name[comparison.reference.name], []
    for runs in by_name.values() if comparison.options.repeats > 1 else ():
        # Pairs have the same seed and therefore the same data order.
        gaps = [
            one.numbers.valid_loss - other.numbers.valid_loss
            for one, other in zip(runs, base, strict=True)
            if runs is not base and one.status == other.status == "finished"
        ]
        against.append(_mean_text(gaps, "{:+.4f}".format, interval=True))
    rows[f"validation loss against {comparison.reference.name}"] = against
    for axis in AXES:
        if found := losses_at_shared_end(ended, axis):
            losses = {one.run.name: loss for one, loss in zip(ended, found[1], strict=True)}
            row = [_mean_text([losses[one.run.name] for one in runs], _loss) for runs in by_name.values()]
            end = f"{_seconds(found[0])} of training"
            rows[f"loss at {end if axis == 'training_seconds' else amount_text(axis, found[0])}"] = row
    head = f"# {comparison.folder.name}: matched by {comparison.options.match}"
    lines = [head, "", *_table(list(by_name), rows), ""]
    times = [one.numbers.seconds for one in ended if one.status == "finished" and one.numbers.seconds > 0]
    if comparison.options.match == "time" and len(times) > 1:
        lines.append(f"- actual training times differ by {max(times) / min(times) - 1:.1%}")
    lines += [f"- {line}" for line in _parity_lines(by_name, comparison.reference.name)]
    lines += [f"- {one.run.name} {one.status}: {one.reason}" for one in ended if one.reason]
    note = (
        "Losses are training losses in nats per token, averaged over the last 5% of a run's tokens (of the"
        " shortest run's tokens when runs are compared). Times exclude evaluation and checkpoints."
    )
    if comparison.options.repeats > 1:
        note += " ± is the standard deviation over seeds; brackets are 90% intervals of means (Student's t)."
    return "\n".join([*lines, "", note, ""])


def as_json(comparison: Comparison, ended: Sequence[Ended]) -> dict[str, Any]:
    """Returns, for each variant, the results of its runs and the settings in which the variants differ."""
    different, found = differences(comparison.variants), {}
    reported = ("final_loss", "valid_loss", "tokens", "flops", "seconds", "tokens_per_second")
    for index, variant in enumerate(comparison.variants):
        runs = []
        for one in (one for one in ended if one.run.variant == variant.name):
            numbers = {name: json_value(getattr(one.numbers, name)) for name in reported}
            runs.append({"seed": one.run.config.seed, "status": one.status, **numbers})
        settings = {name: values[index] for name, values in different.items()}
        found[variant.name] = {"settings": settings, "runs": runs}
    return found


def _parity_lines(by_name: Mapping[str, Sequence[Ended]], reference: str) -> Iterator[str]:
    """Compares variant pairs per seed; with many variants, only pairs with the reference or a dense model."""
    for (name, earlier), (other, later) in combinations(by_name.items(), 2):
        both_moe = earlier[0].run.config.use_moe and later[0].run.config.use_moe
        if len(by_name) > _MOST_PAIRED and both_moe and reference not in (name, other):
            continue
        # MoE against dense regardless of their order.
        swapped = earlier[0].run.config.use_moe and not later[0].run.config.use_moe
        pairs = zip(earlier, later, strict=True) if swapped else zip(later, earlier, strict=True)
        measured = [pair for pair in pairs if all(one.recorded.num_records for one in pair)]
        # Prefer finished seeds, as the lowest loss of a shorter run is not comparable.
        finished = [pair for pair in measured if all(one.status == "finished" for one in pair)]
        groups = ([Group((one.recorded,)) for one in pair] for pair in finished or measured)
        found = [parity(*pair) for pair in groups]
        known = [one for one in found if not one.reason]
        # Validation losses are preferred, since they use the same data for all runs.
        if validated := [one for one in known if one.what == VALIDATION]:
            known = validated
        if len(known) < 2:
            yield from (pair_text(one, ranking([*one.run.runs, *one.other.runs])) for one in known or found)
            continue
        # One sentence about the means over the seeds.
        shares = {axis: [one.shares[axis] for one in known] for axis in COSTS}
        texts = {COSTS[axis]: _mean_text(of, "{:.0%}".format, interval=True) for axis, of in shares.items()}
        cost = in_words([f"{text} of {what}" for what, text in texts.items() if text])
        loss = _mean_text([one.loss for one in known], _loss)
        what = VALIDATION if known[0].what == VALIDATION else "loss"
        run = Group(tuple(run for one in known for run in one.run.runs))
        against = Group(tuple(run for one in known for run in one.other.runs))
        mean = Parity(run, against, shares={axis: statistics.fmean(of) for axis, of in shares.items()})
        opposite = opposite_text(mean, ranking([*run.runs, *against.runs]))
        yield (
            f"{known[0].run.name} against {known[0].other.name}, means of {len(known)} seeds: reached the"
            f" lowest common {what}, {loss}, with {cost}{'.' if opposite else ''}{opposite}"
        )


def _mean_text(
    values: Sequence[float | None], text: Callable[[float], str], *, interval: bool = False
) -> str:
    """Formats the mean and standard deviation; if `interval`, the mean and Student's 90% interval."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    mean = statistics.fmean(known)
    if interval and len(known) > 1:
        half = half_interval(statistics.stdev(known), len(known), len(known) - 1)
        return f"{text(mean)} [{text(mean - half)}, {text(mean + half)}]"
    has_spread = not interval and len(set(known)) > 1
    return text(mean) + (f" ± {text(statistics.stdev(known))}" if has_spread else "")


def half_interval(deviation: float, count: int, degrees: int) -> float:
    """Half-width of Student's 90% interval for a mean of `count` values; `degrees`: degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.95, degrees)) * deviation / math.sqrt(count)


def _table(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    table = [["", *names], *([label, *values] for label, values in rows.items() if any(values))]
    return aligned(table if len(names) <= _MOST_COLUMNS else [list(row) for row in zip(*table, strict=True)])


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Returns the lines of a Markdown table that is also readable in a terminal. The first row is the header;
    the first `num_left` columns are aligned left, other columns right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = [str.ljust] * num_left + [str.rjust] * (len(widths) - num_left)
    lines = []
    for row in rows:
        cells = [align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    ends = ["-"] * num_left + [":"] * (len(widths) - num_left)
    ruler = "|" + "|".join("-" * (width + 1) + end for width, end in zip(widths, ends, strict=True)) + "|"
    return [lines[0], ruler, *lines[1:]]


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else str(timedelta(seconds=round(seconds)))


_seconds, _loss = "{:.1f} s".format, "{:.4f}".format

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
