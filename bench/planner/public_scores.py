"""Scores of the planner on published runs: every cluster (source and kind of device) is predicted with
constants that were fitted to the others. `bench_planner.py --public` prints them.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from public_fit import PublicRun, fit_public, read_public_runs

from moe_exp.host.files import read_json, write_atomically
from moe_exp.host.progress import progress
from moe_exp.planner.calibration import log_memory_ratio, log_time_ratio
from moe_exp.planner.costs.constants import RECENT
from moe_exp.planner.prediction import CONSTANTS, load_constants

_FAR = 0.2  # rows with larger errors are listed
_APART = 0.05  # pairs of runs count whose times differ by this share or more


@dataclass(frozen=True)
class Scored:
    """A run and the errors of its prediction, predicted / measured - 1."""

    run: PublicRun
    time: float  # with constants of other clusters
    memory: float | None
    # time with these constants fitted to the dense runs of its cluster, where it is MoE and has such runs
    calibrated: float | None


def write_constants(found: Sequence[Scored]) -> None:
    """Writes constants of recent devices, fitted to all runs, and the errors of `found` to the package's."""
    content, constants = read_json(CONSTANTS), fit_public(read_public_runs()).constants
    for name in RECENT:
        content["constants"]["time"][name] = float(f"{getattr(constants, name):.5g}")
    errors: dict[str, list[float]] = {}
    for one in found:
        if one.run.is_stated:
            errors.setdefault(one.run.kind, []).append(abs(one.time))
    content["fit"]["published"] = {
        kind: {"rows": len(of), "mean_error": round(statistics.fmean(of), 4)}
        for kind, of in sorted(errors.items())
    }
    write_atomically(CONSTANTS, json.dumps(content, indent=2) + "\n")


def scored_runs() -> list[Scored]:
    """All published runs that have a time, with errors."""
    runs = [run for run in read_public_runs() if run.seconds]
    memory, found = load_constants().memory, []
    clusters = sorted({run.cluster for run in runs})
    with progress("clusters left out", len(clusters), unit="clusters") as advance:
        for cluster in clusters:
            inside = [run for run in runs if run.cluster == cluster]
            others = [run for run in runs if run.cluster != cluster]
            constants = fit_public(others).constants
            dense = [run for run in inside if not run.job.config.use_moe]
            own = fit_public(dense, prior=constants).constants
            for run in inside:
                found.append(
                    Scored(
                        run,
                        math.expm1(log_time_ratio(run, constants)),
                        math.expm1(log_memory_ratio(run, memory)) if run.memory_gib else None,
                        math.expm1(log_time_ratio(run, own)) if dense and run.job.config.use_moe else None,
                    )
                )
            advance(1)
    return found


def report(found: Sequence[Scored]) -> Iterable[str]:
    """Markdown: tables of mean errors, of the runs that are far off, and of those that state too little."""
    stated = [one for one in found if one.run.is_stated]
    yield from _table("rows that state layout, recompute and dispatcher", stated)
    yield from _table("the others", [one for one in found if not one.run.is_stated])
    yield from _repeated(stated)
    yield f"\nOff by more than {_FAR:.0%}:\n"
    yield "| run | source | model | devices | measured s | error |\n|---|---|---|---|---|---|"
    for one in sorted(stated, key=lambda one: -abs(one.time)):
        if abs(one.time) > _FAR:
            run = one.run
            config, device = run.job.config, run.hardware.name
            layout = f"TP={config.tp} PP={config.pp} EP={config.ep} MBSZ={config.mbsz}"
            yield (
                f"| {run.row_id} | {run.source} | {run.model} {run.precision} {run.dispatcher} {layout} "
                f"| {config.world_size} {device} | {run.seconds:.2f} | {one.time:+.0%} |"
            )


def _table(title: str, found: Sequence[Scored]) -> Iterable[str]:
    yield f"\n{len(found)} {title}:\n"
    yield (
        "| runs | rows | time mean | median | calibrated | rows | memory mean | order | pairs |\n"
        + "|---" * 9
        + "|"
    )
    moe = [one for one in found if one.run.job.config.use_moe]
    for name in ("MoE within NVLink", "MoE across nodes", "dense", ""):
        yield _row(name or "all", [one for one in found if one.run.kind.startswith(name)])
    kinds: dict[str, Callable[[Scored], str]] = {
        "kind": lambda one: one.run.kind,
        "device": lambda one: one.run.hardware.name,
        "precision": lambda one: one.run.precision,
        "dispatcher": lambda one: one.run.dispatcher,
        "cluster": lambda one: one.run.cluster,
    }
    for kind, of in kinds.items():
        for value in sorted({of(one) for one in moe}):
            yield _row(f"MoE, {kind} {value}", [one for one in moe if of(one) == value])


def _repeated(found: Sequence[Scored]) -> Iterable[str]:
    """Table of runs that were published more than once with the same settings, mostly by one program release
    after another: how much they differ, and the least mean error of any function of the settings.
    """
    yield "\nPublished more than once with the same settings:\n"
    yield (
        "| runs | rows | settings | pairs differ | least error of these rows | of all |\n" + "|---" * 6 + "|"
    )
    for name in ("MoE within NVLink", "MoE across nodes", "dense", ""):
        groups: dict[tuple[str, ...], list[float]] = {}
        for one in found:
            if one.run.kind.startswith(name):
                groups.setdefault(one.run.settings, []).append(one.run.seconds)
        repeated = [times for times in groups.values() if len(times) > 1]
        pairs = [max(pair) / min(pair) - 1 for times in repeated for pair in combinations(times, 2)]
        least, rows = sum(map(_least_error, repeated)), sum(map(len, repeated))
        cells = (
            f"{statistics.fmean(pairs):.1%}",
            f"{least / rows:.1%}",
            f"{least / sum(map(len, groups.values())):.1%}",
        )
        yield f"| {name or 'all'} | {rows} | {len(repeated)} | {' | '.join(cells)} |"


def _least_error(times: Sequence[float]) -> float:
    """Least sum of |t / time - 1| of any t: it is a weighted median, so one of the times."""
    return min(sum(abs(t / time - 1) for time in times) for t in times)


def _row(name: str, found: Sequence[Scored]) -> str:
    def mean(errors: Sequence[float]) -> str:
        return f"{statistics.fmean(map(abs, errors)):.1%}" if errors else "-"

    times = [one.time for one in found]
    calibrated = [one.calibrated for one in found if one.calibrated is not None]
    memory = [one.memory for one in found if one.memory is not None]
    median = f"{statistics.median(map(abs, times)):.1%}" if times else "-"
    right, pairs = _order(found)
    order = f"{right / pairs:.1%}" if pairs else "-"
    cells = (
        name,
        len(times),
        mean(times),
        median,
        mean(calibrated),
        len(calibrated),
        mean(memory),
        order,
        pairs,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _order(found: Sequence[Scored]) -> tuple[int, int]:
    """Pairs of runs of a model in one cluster that are in the right order, and all such pairs.

    Compared are seconds per token, because batches differ.
    """
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for one in found:
        run, config = one.run, one.run.job.config
        measured = run.seconds / (config.gbsz * config.seq_len) * config.world_size
        key = (run.cluster, run.model, config.seq_len)
        groups.setdefault(key, []).append((measured, measured * (1 + one.time)))
    return pairs_in_order(groups.values())


def pairs_in_order(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[int, int]:
    """Pairs of a group's (measured, predicted) times that the prediction has in the right order, and all that
    differ by `_APART` or more.
    """
    right = pairs = 0
    for times in groups:
        for (a, predicted_a), (b, predicted_b) in combinations(times, 2):
            if abs(a - b) >= _APART * min(a, b):
                pairs += 1
                right += (predicted_a > predicted_b) == (a > b)
    return right, pairs
