#!/usr/bin/env python3
"""How near the planner comes to runs that its constants were not fitted to.

    # 20 random halves, and each section of the measured runs left out; a minute
    python bench/planner/bench_planner.py
    python bench/planner/bench_planner.py --halves 100 --runs mine.csv
    # published runs, each cluster predicted with constants of the others; four minutes
    python bench/planner/bench_planner.py --public

Half of the runs are fitted, the other half predicted: relative errors, and the share of pairs of runs on the
same device whose times differ by 5% or more and which the prediction puts in the right order. Then every
section of the source is left out in turn.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from public_scores import pairs_in_order, report, scored_runs, write_constants

from moe_exp.host.progress import progress
from moe_exp.planner.calibration import calibrate, log_memory_ratio, log_time_ratio
from moe_exp.planner.measured import MEASURED_RUNS, MeasuredRun, read_runs
from moe_exp.planner.prediction import Constants


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions, and how often the order of two runs was right."""

    memory: list[float]
    time: list[float]
    num_pairs: int
    num_right: int


def errors_of(runs: Sequence[MeasuredRun], constants: Constants) -> Errors:
    """Predicts `runs` and compares with what was measured."""
    from math import expm1

    times = {run.row_id: expm1(log_time_ratio(run, constants.time)) for run in runs if run.seconds}
    memory = [expm1(log_memory_ratio(run, constants.memory)) for run in runs if run.memory_gib]
    by_device: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.seconds:
            both = (run.seconds, run.seconds * (1 + times[run.row_id]))
            by_device.setdefault(run.hardware.name, []).append(both)
    right, pairs = pairs_in_order(by_device.values())
    return Errors(memory, list(times.values()), pairs, right)


def row(name: str, found: Sequence[Errors]) -> str:
    """A line of the table: means over `found`, and the worst of them."""

    def column(lists: Sequence[list[float]]) -> str:
        filled = [[abs(error) for error in errors] for errors in lists if errors]
        if not filled:
            return "- | - | -"
        means = [statistics.fmean(errors) for errors in filled]
        return f"{statistics.fmean(means):.1%} | {max(means):.1%} | {max(map(max, filled)):.1%}"

    shares = [errors.num_right / errors.num_pairs for errors in found if errors.num_pairs]
    order = f"{statistics.fmean(shares):.1%} | {min(shares):.1%}" if shares else "- | -"
    return f"| {name} | {column([e.memory for e in found])} | {column([e.time for e in found])} | {order} |"


def random_halves(runs: Sequence[MeasuredRun], num_halves: int, seed: int) -> list[Errors]:
    """Errors on the other half, for random halves."""
    generator, found = random.Random(seed), []
    with progress("random halves", num_halves, unit="halves") as advance:
        for _ in range(num_halves):
            shuffled = generator.sample(list(runs), len(runs))
            fitted, others = shuffled[: len(runs) // 2], shuffled[len(runs) // 2 :]
            found.append(errors_of(others, calibrate(fitted).constants))
            advance(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--halves", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=MEASURED_RUNS)
    about = "score published runs; --write: also fit the package's constants of recent devices to them"
    parser.add_argument("--public", action="store_true", help=about)
    parser.add_argument("--write", action="store_true", help="with --public")
    arguments = parser.parse_args()
    if arguments.public:
        found = scored_runs()
        print("\n".join(report(found)))
        if arguments.write:
            write_constants(found)
        return
    runs = [run for run in read_runs(arguments.runs) if run.memory_gib or run.seconds]
    print(
        "| left out | memory mean | worst mean | max | time mean | worst mean | max | order | worst |\n"
        + "|---" * 9
        + "|"
    )
    print(
        row(f"{arguments.halves} random halves", random_halves(runs, arguments.halves, arguments.seed)),
        flush=True,
    )
    for section in sorted({run.section for run in runs}):
        inside, others = (
            [run for run in runs if run.section == section],
            [run for run in runs if run.section != section],
        )
        print(
            row(f"{section} ({len(inside)} rows)", [errors_of(inside, calibrate(others).constants)]),
            flush=True,
        )
    print(row("nothing", [errors_of(runs, calibrate(runs).constants)]))


if __name__ == "__main__":
    main()
