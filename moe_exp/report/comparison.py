"""Compares runs: differing settings, and the cost of reaching a loss."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_exp.config import TRAITS, Config
from moe_exp.config.setting_types import as_given
from moe_exp.host.quantities import rate_text
from moe_exp.planner.costs.params import count_parameters
from moe_exp.report.run_data import AXES, Floats, RunRecords, latest
from moe_exp.runs.curves import grouped_by_seed, shared_points

SMOOTHED_SHARE = 0.05  # smoothing window relative to the tokens of the shortest run
_FEWEST_SHARE = 0.01  # relative to the longest run; shorter runs are not compared
_FEWEST_RATES, _STEADY = 5, 0.2  # records with a throughput; largest relative range without a warning
_ALWAYS = ("num_experts", "topk", "moe_type")
_UNKNOWN, _NOT_SET, _NO_EXPERTS = "(unknown)", "(not set)", "–"
NATS, BITS = "nats per token", "bits per byte"
VALIDATION, TRAINING = "validation loss", "training loss"
# axes on which costs are compared, in the order of a sentence
COSTS = {"consumed_flops": "the FLOPs", "training_seconds": "the time", "consumed_tokens": "the tokens"}


@dataclass(frozen=True)
class Group:
    """Runs, in report order, that differ only in SEED."""

    runs: tuple[RunRecords, ...]

    @property
    def name(self) -> str:
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} ({len(self.runs)} seeds)"


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run, or mean losses of several runs in their common range; `at`: x values per x-axis."""

    at: Mapping[str, Floats]
    loss: Floats


@dataclass(frozen=True)
class Parity:
    """Cost of `run` (MoE) relative to `other` (dense) at the lowest loss that both mean curves reach."""

    run: Group
    other: Group
    what: str = TRAINING  # smoothed; or VALIDATION
    loss: float = float("nan")
    unit: str = NATS  # or BITS
    # fraction of the cost of `other` on each of COSTS, NaN if unknown; empty if the two cannot be compared
    shares: Mapping[str, float] = field(default_factory=dict)
    is_reached: bool = True  # whether `run` reaches the lowest loss of `other`, else `loss` is its own
    other_lowest: float = float("nan")
    reason: str = ""  # why the two cannot be compared


def tokenizer_of(run: RunRecords) -> str | None:
    """Identity of the tokenizer: TOKENIZER if set, else the vocabulary size. None if settings are unknown."""
    if not run.settings:
        return None
    return str(run.settings.get("tokenizer") or f"vocabulary of {run.settings.get('vocab_size')}")


def bits_per_nat(run: RunRecords) -> float:
    """Loss in bits per byte divided by loss in nats per token, at the latest validation with both, or NaN."""
    bits, nats = run.valid["lm_loss_bits_per_byte"], run.valid["lm_loss"]
    # the ratio depends only on tokens per byte of the text, not on the model
    both = np.isfinite(bits) & (nats > 0)
    return float(bits[both][-1] / nats[both][-1]) if both.any() else float("nan")


def has_loss(run: RunRecords) -> bool:
    """Whether any record has a finite loss."""
    return bool(np.isfinite(run.train["lm_loss"]).any())


def is_mixed(runs: Sequence[RunRecords]) -> bool:
    """Whether the runs with a loss use different tokenizers, so that losses per token are not comparable."""
    return len({tokenizer_of(run) for run in runs if has_loss(run)} - {None}) > 1


def loss_unit(runs: Sequence[RunRecords]) -> str | None:
    """Unit for comparing losses: NATS if tokenizers agree, else BITS if every run has BITS, else None."""
    if not is_mixed(runs):
        return NATS
    return BITS if all(np.isfinite(bits_per_nat(run)) for run in runs if has_loss(run)) else None


def trailing_mean(x: Floats, values: Floats, window: float) -> Floats:
    """Mean of the finite `values` in (x - window, x]; the weights are record lengths in x. `x` must increase.

    A window consists of one or more whole records. The mean is NaN until the records cover a whole `window`,
    and for each window without a finite value.
    """
    finite = np.isfinite(values)
    # differences of running sums compute the windows of all records in one pass
    lengths = np.where(finite, np.diff(x, prepend=begin_of(x)), 0.0)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0) * lengths)])
    counts = np.concatenate([[0.0], np.cumsum(lengths)])
    ends = np.arange(1, len(x) + 1)
    starts = np.minimum(np.searchsorted(x, x - window, side="right"), ends - 1)
    covered = counts[ends] - counts[starts]
    means = np.where(covered > 0, (sums[ends] - sums[starts]) / np.where(covered > 0, covered, 1), np.nan)
    # by rounding, token counts as floats may be slightly less than a whole window
    return np.where(x - begin_of(x) >= window * (1 - 1e-9), means, np.nan)


def begin_of(x: Floats) -> float:
    """Start of the first record, assumed to be as long as the second. 0 for one record, NaN for no record."""
    # not always 0: a run started with LOAD_DIR continues the counts of the checkpoint
    known = x[np.isfinite(x)]
    if len(known) < 2:
        return 0.0 if len(known) else float("nan")
    return max(0.0, float(2 * known[0] - known[1]))


def smoothed(run: RunRecords, unit: str, window_tokens: float) -> Floats:
    """For each record, mean training loss over the last `window_tokens` tokens, rounded to nine decimals."""
    losses = run.train["lm_loss"] * (bits_per_nat(run) if unit == BITS else 1.0)
    return np.round(trailing_mean(run.train["consumed_tokens"], losses, window_tokens), 9)


def window_of(runs: Sequence[RunRecords]) -> float:
    """Smoothing window in tokens: 5% of the shortest run, but at least 1% of the longest.

    Runs shorter than 1% of the longest run are ignored, so that a new run does not change the other curves.
    Tokens consumed before the LOAD_DIR checkpoint do not count.
    """
    counts = (
        run.last("consumed_tokens") - begin_of(run.train["consumed_tokens"]) for run in runs if has_loss(run)
    )
    tokens = [count for count in counts if np.isfinite(count)]
    fewest = _FEWEST_SHARE * max(tokens, default=0.0)
    return max(SMOOTHED_SHARE * min((count for count in tokens if count >= fewest), default=0.0), fewest)


def why_not_compared(run: RunRecords, window_tokens: float) -> str:
    """Reason why a run has no smoothed loss, as the end of a sentence; empty if it has a smoothed loss."""
    if not has_loss(run):
        return "has no finite loss" if run.num_records else "has no loss yet"
    if not np.isfinite(run.train["consumed_tokens"]).any():
        return "has losses but no token counts (consumed_tokens), which the comparison requires"
    if not np.isfinite(smoothed(run, NATS, window_tokens)).any():
        return "is too short to smooth its loss: it has less than 1% of the tokens of the longest run"
    return ""


def lowest(values: Floats) -> float:
    # fmin ignores NaN
    return float(np.fmin.reduce(values)) if len(values) else float("nan")


def cost_of(at: Mapping[str, Floats], values: Floats, loss: float) -> dict[str, float] | None:
    """Cost on each axis when `values` first reach `loss`, interpolated linearly. A cost is NaN if unknown;
    the result is None if `loss` is not reached. `at`: for each axis, the cost at each value.
    """
    reached = np.flatnonzero(values <= loss)  # NaN compares false
    if not len(reached):
        return None
    index = int(reached[0])
    before, value = float(values[index - 1]) if index else float("nan"), float(values[index])
    # position on the line from the previous value; 1 without one
    share = (before - loss) / (before - value) if before > loss else 1.0
    costs = {}
    for axis in AXES:
        x = at[axis]
        start = x[index - 1] if index and share < 1.0 and np.isfinite(x[index - 1]) else x[index]
        costs[axis] = float(start + share * (x[index] - start))
    return costs


def common_loss(runs: Sequence[RunRecords]) -> tuple[float, str | None]:
    """Lowest smoothed loss that all comparable runs reach (rounded up, or NaN if unknown), and its unit."""
    unit, window = loss_unit(runs), window_of(runs)
    if unit is None:
        return float("nan"), None
    lowest_ones = [lowest(smoothed(run, unit, window)) for run in runs if not why_not_compared(run, window)]
    return rounded_up(max(lowest_ones, default=float("nan"))), unit


def rounded_up(loss: float) -> float:
    """Rounds `loss` up to four decimal places, so that a run that reached `loss` also reached the result."""
    if not np.isfinite(loss):
        return loss
    # 4.1 + 0.2 is slightly more than 4.3, and would be rounded up to 4.3001
    return math.ceil(round(loss * 1e4, 5)) / 1e4


class Overview:
    """Summary of a run at its end; NaN for missing measurements. Throughput is the median over the records.

    `cost`: cost of reaching `loss`, in `unit`; None without `unit`, or if the run did not reach `loss`.
    """

    def __init__(self, run: RunRecords, loss: float, unit: str | None, window_tokens: float):
        count, train, nan = count_parameters(run.config) if run.config else None, run.train, float("nan")
        own_end = smoothed(run, NATS, window_of([run]))
        # files of older versions have no peak
        memory = np.fmax(train["peak_memory_bytes"], train["memory_allocated_bytes"])
        self.run = run
        self.total_parameters = count.total if count else nan
        self.active_parameters = count.active_per_token if count else nan
        self.final_loss = float(own_end[-1]) if len(own_end) else nan  # training, last 5% of its tokens
        self.valid_loss, self.valid_ppl, self.bits_per_byte = (
            latest(run.valid[key]) for key in ("lm_loss", "lm_loss_ppl", "lm_loss_bits_per_byte")
        )
        self.peak_memory_bytes = float(np.fmax.reduce(memory)) if len(memory) else nan  # maximum over ranks
        self.tokens_per_second, self.tflops_per_gpu = (
            float(np.nanmedian(train[key])) if np.isfinite(train[key]).any() else nan
            for key in ("tokens_per_second", "tflops_per_gpu")
        )
        self.iteration, self.tokens, self.flops, self.seconds = (run.last(axis) for axis in AXES)
        self.cost = cost_of(train, smoothed(run, unit, window_tokens), loss) if unit else None


def seed_groups(runs: Sequence[RunRecords]) -> list[Group]:
    """Groups runs whose settings differ only in SEED, paths or monitoring."""
    grouped = grouped_by_seed([run.settings for run in runs])
    return [Group(tuple(runs[index] for index in group)) for group in grouped]


def mean_curve(group: Group, what: str, unit: str, window_tokens: float) -> LossCurve | None:
    """Mean of the runs' curves where their token ranges overlap; None without a curve or an overlap."""
    curves = [found for run in group.runs if (found := run_curve(run, what, unit, window_tokens))]
    if len(curves) < 2:
        return curves[0] if curves else None
    tokens = [curve.at["consumed_tokens"] for curve in curves]
    # interpolated over tokens, because runs with other batch sizes have records at other points
    points = shared_points(tokens)

    def mean(values: Sequence[Floats]) -> Floats:
        return np.mean([np.interp(points, x, y) for x, y in zip(tokens, values, strict=True)], axis=0)

    at = {axis: mean([curve.at[axis] for curve in curves]) for axis in AXES}
    return LossCurve(at, mean([curve.loss for curve in curves])) if len(points) else None


def run_curve(run: RunRecords, what: str, unit: str, window_tokens: float) -> LossCurve | None:
    """Validation curve or smoothed training curve of a run, depending on `what`; None if it has no points."""
    if what == VALIDATION:
        table, loss = run.valid, run.valid["lm_loss_bits_per_byte" if unit == BITS else "lm_loss"]
    else:
        table, loss = run.train, smoothed(run, unit, window_tokens)
    # without gaps: between two points the curve is a straight line
    known = np.isfinite(table["consumed_tokens"]) & np.isfinite(loss)
    return LossCurve({axis: table[axis][known] for axis in AXES}, loss[known]) if known.any() else None


def parity(one: Group, other: Group) -> Parity:
    """Compares two groups at the lowest loss that both reach (see `page_parts._PARITY_RULE`)."""
    runs = (*one.runs, *other.runs)
    unit, window = loss_unit(runs), window_of(runs)
    reasons = {run.name: why_not_compared(run, window) for run in runs}
    if missing := [group for group in (one, other) if all(reasons[run.name] for run in group.runs)]:
        first = [group.runs[0].name for group in missing]
        return Parity(one, other, reason="; ".join(f"{name} {reasons[name]}" for name in first))
    if unit is None:
        return Parity(one, other, reason="tokenizers differ, and bits per byte are not known for both runs")
    pair = [Group(tuple(run for run in group.runs if not reasons[run.name])) for group in (one, other)]
    found = Parity(one, other, reason="their seeds have no range of tokens in common")
    for what in (VALIDATION, TRAINING) if is_validated_alike(runs) else (TRAINING,):
        curves = [curve for group in pair if (curve := mean_curve(group, what, unit, window))]
        if len(curves) < 2:
            continue
        found = Parity(pair[0], pair[1], what, unit=unit)
        own_lowest, other_lowest = (lowest(curve.loss) for curve in curves)
        loss = rounded_up(max(own_lowest, other_lowest))
        # The cost before a run's first record is unknown.
        begins = [group.name for group, curve in zip(pair, curves, strict=True) if curve.loss[0] <= loss]
        if begins:
            found = replace(found, reason=f"the first loss of {begins[0]} is {loss:.4f} {unit} or below")
            continue
        ours, theirs = (cost_of(curve.at, curve.loss, loss) for curve in curves)
        assert ours and theirs
        shares = {axis: ours[axis] / theirs[axis] if theirs[axis] > 0 else float("nan") for axis in COSTS}
        is_reached = own_lowest <= other_lowest
        return replace(found, loss=loss, shares=shares, is_reached=is_reached, other_lowest=other_lowest)
    return found


def parity_text(found: Parity) -> str:
    """Describes the comparison in one or two sentences."""
    name, other = found.run.name, found.other.name
    if found.reason:
        return f"{name} and {other} are not compared: {found.reason}."
    shares = [f"{share:.0%} of {COSTS[axis]}" for axis, share in found.shares.items() if np.isfinite(share)]
    cost = in_words(shares) or "an unknown share of the FLOPs"
    loss = found.what if found.what == VALIDATION else "loss"
    if found.is_reached:
        lowest_text = f"{found.loss:.4f} {found.unit}, the lowest that both reach"
        return f"{name} reaches the {loss} of {other} ({lowest_text}) in {cost}."
    missed = f"{name} does not reach the {loss} of {other} ({found.other_lowest:.4f} {found.unit})"
    return f"{missed}. It needed {cost} of {other} to reach its own lowest loss, {found.loss:.4f}."


def in_words(parts: Sequence[str]) -> str:
    """Joins parts in the form `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def is_validated_alike(runs: Sequence[RunRecords]) -> bool:
    """Whether all runs are validated on the same samples and tokens, as far as their settings are known."""

    def data_of(run: RunRecords) -> tuple[str, ...]:
        # without VALID_DATA, validation uses a split of the training data
        data = ("valid_data",) if run.settings.get("valid_data") else ("train_data", "split")
        names = (*data, "data_order", "seq_len", "eod_mask_loss", "document_mask")
        samples = run.config.eval_iters * run.config.gbsz if run.config else ""
        return (str(samples), *(str(run.settings.get(name) or "") for name in names))

    return len({data_of(run) for run in runs if run.settings}) < 2


def differing_settings(runs: Sequence[RunRecords]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ: the name of each, and its value in every run as text.

    `(unknown)` stands for a setting that the run does not have, and `–` for an MoE setting of a dense run.
    If runs of both kinds are compared, the list includes each MoE setting that an MoE run changes from its
    default, and always NUM_EXPERTS, TOPK and MOE_TYPE.
    """
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        part = TRAITS[name].part if name in TRAITS else ""  # unknown setting of an older version
        if part == "place":
            continue
        # dense runs also record the MoE settings, but they have no effect there
        values = [
            _UNKNOWN if name not in run.settings
            else _NO_EXPERTS if part == "experts" and run.kind == "dense"
            else as_given(run.settings[name]) or _NOT_SET
            for run in runs
        ]  # fmt: skip
        known = set(values) - {_UNKNOWN, _NO_EXPERTS}
        is_chosen = False
        if known and _NO_EXPERTS in values:
            default = as_given(Config.model_fields[name].default) or _NOT_SET
            is_chosen = name in _ALWAYS or known != {default}
        if len(known) > 1 or is_chosen:
            rows.append((name.upper(), values))
    return rows


def warnings_of(runs: Sequence[RunRecords]) -> Iterator[str]:
    """Caveats of a comparison, such as mixed tokenizers, gaps and unreadable data."""
    if is_mixed(runs):
        which = "; ".join(f"{run.name}: {tokenizer_of(run) or 'unknown'}" for run in runs if has_loss(run))
        use = "losses per token are not comparable, and bits per byte are not known"
        if loss_unit(runs) == BITS:
            use = "losses are compared in bits per byte"
        yield f"The runs have different tokenizers ({which}): {use}."
    if not is_validated_alike(runs):
        yield "The runs were validated on different data, so they are ranked by training loss."
    # other programs on the machine disturb times, but not losses
    uneven = []
    for run in runs:
        # the first record includes compilation and filling caches
        rates = run.train["tokens_per_second"][1:]
        rates = rates[np.isfinite(rates)]
        if len(rates) < _FEWEST_RATES:
            continue
        low, median, high = np.percentile(rates, [5, 50, 95])
        if median and high - low > _STEADY * median:
            by = f"by {(high - low) / median:.0%} of its median"
            uneven.append(f"{run.name} {by}, from {rate_text(low)} to {rate_text(high)} tokens/s")
    if uneven:
        rule = "Throughput varied by more than 20% (5th to 95th percentile) within a run"
        yield f"{rule}, so run times are not reliable: {'; '.join(uneven)}."
    window = window_of(runs)
    for run in runs:
        if num := int((~np.isfinite(run.train["lm_loss"])).sum()):
            gaps = f"{num} of {run.num_records} records have a loss that is not a number"
            yield f"{run.name}: {gaps} (gaps in the curve)."
        if not run.num_records:
            yield f"{run.name}: no train records yet."
        elif has_loss(run) and (reason := why_not_compared(run, window)):
            yield f"{run.name} {reason}; comparisons of the cost to reach a loss exclude this run."
        yield from (f"{run.name}: {note}." for note in run.notes)
