"""Faults at random moments in one run of several processes, whose curve has to be that of the run that nobody
disturbed, bit for bit.

    python bench/drill/fault_drill.py                          # 25 faults, seed 1
    python bench/drill/fault_drill.py --seeds 1,2,3            # three drills
    python bench/drill/fault_drill.py --faults 5 --ranks 2     # a short one
    python bench/drill/fault_drill.py --faults 3 --kinds Slow,FlippedWeight,FlippedGradient
    DRILL_ITERATIONS=3000 python bench/drill/fault_drill.py --faults 14 --ranks 2    # effective training time

In 400 iterations the faults follow each other within seconds, before the processes that stand by for the
ranks have imported everything; 3,000 iterations leave them time, as between two faults of a real run.

The undisturbed run logs every iteration, so that it reads the results of each one at once; the disturbed
run logs every fifth, and reads the results of the others an iteration late.

The run is one chain of `moe-exp train`, as SLURM or cron would start it: the same command again until it ends
with 0. Nothing of it knows of the drill: processes are killed and stopped, files are changed, a disk (a small
tmpfs, which needs root; else a limit on file sizes) is filled, code that sitecustomize loads slows a rank or
flips bits of its tensors, and some samples have a NaN, in the undisturbed run, too. For each fault the table
has when it was caused, after how many seconds an event of metrics.jsonl named it, after how many the run was
further than it had come before, and how many of these the undisturbed run would not have needed. Exit code 1:
the curves differ, a sample was lost or repeated, a fault has no event, or the run did not end.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from drill_faults import FLIPS, KINDS, BadBatch, Fault, Killed, Stopped, Terminated, wait_for_event
from drill_run import GBSZ, ITERATIONS, Run, disk, train_records
from injected import BAD_SAMPLES

# What has to be the same to the bit; times are not. The second are sums or means over a log interval, and an
# interval that a stop cuts short differs.
CURVE = ("consumed_samples", "grad_norm", "params_norm", "learning_rate")
MEANS = ("lm_loss", "load_balancing_loss", "skipped_iterations")
# Interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv:2407.21783, table 5), by the faults that are
# like them: 47 planned, 7 hangs, 6 silent corruptions; all others end a process or host.
LLAMA_SECONDS = 54 * 86400
LLAMA: dict[tuple[type[Any], ...], int] = {
    (Terminated,): 47,
    (Stopped,): 7,
    FLIPS: 6,
    (Killed,): 406,
}


@dataclass(frozen=True)
class Outcome:
    """One fault.

    Args:
        kind: of KINDS.
        iteration: at which it was caused.
        what: was done.
        detected: seconds until an event named it; NaN: none did.
        recovered: seconds until the run was further than it had come before.
        lost: seconds of these in which the run did not do the work of the undisturbed one.
        event: that named it, in a few words.
    """

    kind: str
    iteration: int
    what: str
    detected: float
    recovered: float
    lost: float
    event: str


def planned(seed: int, num_faults: int, allowed: Sequence[type[Any]]) -> list[Fault]:
    """So many faults of all allowed kinds, in random order, at random iterations."""
    draw = random.Random(seed)
    kinds = [kind for kind in allowed for _ in range(kind.share)]
    if num_faults < len(kinds):
        kinds = list(allowed)
    others = [kind for kind in kinds if kind is not BadBatch]  # the bad samples come once
    chosen = [*kinds[:num_faults], *islice(cycle(others), max(0, num_faults - len(kinds)))]
    draw.shuffle(chosen)
    stretch = (ITERATIONS - 20) / num_faults
    faults = [kind(draw, round(10 + stretch * (index + draw.random()))) for index, kind in enumerate(chosen)]
    # A bad sample is bad once.
    bad = sorted(
        (fault for fault in faults if isinstance(fault, BadBatch)), key=lambda fault: fault.iteration
    )
    for fault, sample in zip(bad, BAD_SAMPLES, strict=False):
        fault.at(sample)
    return sorted(faults, key=lambda fault: fault.iteration)


def drill(
    faults: Sequence[Fault], num_ranks: int, folder: Path, reference: Path, pace: float, log_interval: int
) -> tuple[list[Outcome], list[str], float]:
    """The outcome of every fault, what is wrong with the run in lines, and its share of useful time. `pace`:
    seconds per iteration of the undisturbed run, with its saves and checks.
    """
    outcomes: list[Outcome] = []
    problems: list[str] = []
    log = folder.with_suffix(".log")
    with disk(folder), Run(folder, "drill", num_ranks, log, log_interval=log_interval) as run:
        first, begun = first_record(run)
        for number, fault in enumerate(faults, start=1):
            try:
                run.wait_until(
                    lambda at=fault.iteration: run.iteration() >= at, f"iteration {fault.iteration}"
                )
                outcomes.append(_caused(fault, run, pace))
            except RuntimeError as error:  # earlier faults took too many iterations
                problems.append(f"only {number - 1} of {len(faults)} faults: {error}")
                break
            print(f"[{number}/{len(faults)}] {_line(outcomes[-1])}", flush=True)
        run.wait_until(lambda: run.iteration() >= ITERATIONS, "its last iteration")
        wall = time.monotonic() - begun
        run.wait_until(lambda: run.exit_code == 0, "its end")
        problems += [
            f"{outcome.kind} at iteration {outcome.iteration}: no event names it"
            for outcome in outcomes
            if not outcome.event
        ]
        records = train_records(run.metrics), train_records(reference)
        usual = median(record["elapsed_time_per_iteration_ms"] for record in records[1]) / 1e3
        return outcomes, problems + compared(*records, log_interval), (ITERATIONS - first) * usual / wall


def first_record(run: Run) -> tuple[int, float]:
    """Waits for a run's first train record; returns its iteration and the time."""
    run.wait_until(lambda: run.iteration() > 0, "its first record")
    return run.iteration(), time.monotonic()


def _caused(fault: Fault, run: Run, pace: float) -> Outcome:
    num_events = 0 if fault.comes_by_itself else len(run.events())
    iteration, start = run.iteration(), time.monotonic()
    what = fault.cause(run)
    event = wait_for_event(run, num_events, fault)
    detected = time.monotonic() - start if event else math.nan
    fault.mend(run)
    reached = max(iteration, run.iteration())
    run.wait_until(lambda: run.iteration() > reached or run.exit_code == 0, f"an iteration after {reached}")
    words = ", ".join(
        str(event[key])
        for key in ("event", "cause", "reason", "rank", "ranks", "phase", "factor")
        if event and key in event
    )
    recovered = time.monotonic() - start
    lost = max(0.0, recovered - (run.iteration() - iteration) * pace)
    return Outcome(fault.name, iteration, what, detected, recovered, lost, words[:100])


def compared(
    found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], log_interval: int
) -> list[str]:
    """How the records of a run differ from those of the undisturbed one, which has one per iteration."""
    problems = []
    iterations = [record["iteration"] for record in found]
    if iterations != sorted(set(iterations)) or not set(iterations) >= set(
        range(log_interval, ITERATIONS + 1, log_interval)
    ):
        problems.append(f"iterations are not 1 to {ITERATIONS}, once each")
    if lost := [
        record["iteration"] for record in found if record["consumed_samples"] != record["iteration"] * GBSZ
    ]:
        problems.append(f"samples were lost or repeated before iteration {lost[0]}")
    for one, other in ((record, expected[record["iteration"] - 1]) for record in found):
        keys = CURVE if log_interval > 1 else CURVE + MEANS
        differing = [key for key in keys if one[key] != other[key]]
        experts = [[layer["tokens_per_expert"] for layer in record["experts"]] for record in (one, other)]
        if log_interval == 1 and experts[0] != experts[1]:
            differing.append("tokens_per_expert")
        if differing:
            return [
                *problems,
                f"iteration {one['iteration']}: {', '.join(differing)} are not those of the undisturbed run",
            ]
    return problems


def _line(outcome: Outcome) -> str:
    seconds = [
        f"{value:.1f}" if math.isfinite(value) else "never"
        for value in (outcome.detected, outcome.recovered, outcome.lost)
    ]
    return (
        f"| {outcome.kind} | {outcome.iteration} | {outcome.what} | {' | '.join(seconds)} | {outcome.event} |"
    )


@contextmanager
def _place(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fault_drill_"))
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def report_times(outcomes: Sequence[Outcome], useful: float) -> dict[str, Any]:
    """Prints what the faults cost; returns it for --json."""
    print(f"useful time, iterations x median of the undisturbed run / wall time: {useful:.1%}")
    lost: dict[str, float] = {}
    for name in dict.fromkeys(outcome.kind for outcome in outcomes):
        lost[name] = fmean(outcome.lost for outcome in outcomes if outcome.kind == name)
    print("lost per fault, s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in lost.items()))
    times = {"useful": useful, "lost_seconds": lost}
    found = [[lost[kind.name] for kind in kinds if kind.name in lost] for kinds in LLAMA]
    if not all(found):
        print("effective training time at Llama 3's rate: unknown, a kind of fault is missing")
        return times
    for name, planned_too in (("unexpected", False), ("all", True)):
        numbers = [n if planned_too or Terminated not in kinds else 0 for kinds, n in LLAMA.items()]
        mean = sum(n * fmean(one) for n, one in zip(numbers, found, strict=True)) / sum(numbers)
        for factor in (1, 100):
            between = LLAMA_SECONDS / sum(numbers) / factor
            effective = 1 - mean / between
            times[f"effective_at_{factor}_times_{name}_of_llama_3"] = effective
            rule = f"1 - {mean:.2f} s lost per interruption / {between:,.1f} s between two = {effective:.2%}"
            print(f"effective training time at {factor} times Llama 3's rate, {name} interruptions: {rule}")
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1", help="of the drills, with commas (default: 1)")
    parser.add_argument("--faults", type=int, default=25, help="per drill (default: 25)")
    names = {kind.__name__: kind for kind in KINDS}
    parser.add_argument(
        "--kinds", default=",".join(names), metavar="NAME,...", help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument(
        "--log-interval", type=int, default=5, metavar="N",
        help="of the disturbed runs; iterations between log lines are read late (default: 5)",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave the run folders behind")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    if options.faults < 1 or options.ranks not in (2, 4):
        parser.error("--faults has to be 1 or more, --ranks 2 or 4")
    if unknown := {*options.kinds.split(",")} - {*names}:
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    kinds = [names[name] for name in options.kinds.split(",")]
    results: dict[str, Any] = {}
    with _place(options.keep) as folder:
        with Run(folder, "undisturbed", options.ranks, folder / "undisturbed.log") as undisturbed:
            first, begun = first_record(undisturbed)
            undisturbed.wait_until(lambda: undisturbed.iteration() >= ITERATIONS, "its last iteration")
            pace = (time.monotonic() - begun) / (ITERATIONS - first)
            undisturbed.wait_until(lambda: undisturbed.exit_code == 0, "the undisturbed run's end")
        for seed in options.seeds.split(","):
            print(
                f"\nseed {seed}\n| fault | iteration | what was done | detected, s | recovered, s | lost, s"
                " | named by |\n|---|---|---|---|---|---|---|",
                flush=True,
            )
            outcomes, problems, useful = drill(
                planned(int(seed), options.faults, kinds), options.ranks, folder / f"seed_{seed}",
                undisturbed.metrics, pace, options.log_interval,
            )  # fmt: skip
            results[seed] = {
                "outcomes": [vars(outcome) for outcome in outcomes],
                "problems": problems,
                "times": report_times(outcomes, useful),
            }
            print(
                f"seed {seed}: "
                + (
                    "; ".join(problems)
                    or f"{len(outcomes)} faults, {ITERATIONS} iterations, the curve of the undisturbed run"
                )
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(any(result["problems"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
