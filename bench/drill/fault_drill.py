"""Faults at random moments in one run of several processes, whose curve has to be that of the run that nobody
disturbed, bit for bit.

    python bench/drill/fault_drill.py                          # 20 faults, seed 1
    python bench/drill/fault_drill.py --seeds 1,2,3            # three drills
    python bench/drill/fault_drill.py --faults 5 --ranks 2     # a short one

The undisturbed run logs every iteration, so that it reads the results of each one at once; the disturbed
run logs every fifth, and reads the results of the others an iteration late.

The run is one chain of `moe-exp train`, as SLURM or cron would start it: the same command again until it ends
with 0. Nothing of it knows of the drill: processes are killed and stopped, files are changed, a disk (a small
tmpfs, which needs root; else a limit on file sizes) is filled, and some samples have a NaN, in the
undisturbed run, too. For each fault the table has when it was caused, after how many seconds an event of
metrics.jsonl named it, and after how many the run was further than it had come before. Exit code 1: the
curves differ, a sample was lost or repeated, a fault has no event, or the run did not end.
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
from pathlib import Path
from typing import Any

from drill_faults import KINDS, BadBatch, Fault, wait_for_event
from drill_run import BAD_SAMPLES, GBSZ, ITERATIONS, Run, disk, train_records

# What has to be the same to the bit; times are not. The second are sums or means over a log interval, and an
# interval that a stop cuts short differs.
CURVE = ("consumed_samples", "grad_norm", "params_norm", "learning_rate")
MEANS = ("lm_loss", "load_balancing_loss", "skipped_iterations")


@dataclass(frozen=True)
class Outcome:
    """One fault.

    Args:
        kind: of KINDS.
        iteration: at which it was caused.
        what: was done.
        detected: seconds until an event named it; NaN: none did.
        recovered: seconds until the run was further than it had come before.
        event: that named it, in a few words.
    """

    kind: str
    iteration: int
    what: str
    detected: float
    recovered: float
    event: str


def planned(seed: int, num_faults: int) -> list[Fault]:
    """So many faults of all kinds, in random order, at random iterations."""
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(kind.share)]
    chosen = (
        [KINDS[index % len(KINDS)] for index in range(num_faults)]
        if num_faults < len(kinds)
        else kinds[:num_faults]
    )
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
    seed: int, num_faults: int, num_ranks: int, folder: Path, reference: Path, log_interval: int
) -> tuple[list[Outcome], list[str]]:
    """The outcome of every fault, and what is wrong with the run in lines."""
    faults, outcomes = planned(seed, num_faults), []
    log = folder.with_suffix(".log")
    with disk(folder), Run(folder, "drill", num_ranks, log, log_interval=log_interval) as run:
        for number, fault in enumerate(faults, start=1):
            run.wait_until(
                lambda fault=fault: run.iteration() >= fault.iteration, f"iteration {fault.iteration}"
            )
            outcomes.append(_caused(fault, run))
            print(f"[{number}/{num_faults}] {_line(outcomes[-1])}", flush=True)
        run.wait_until(lambda: run.exit_code == 0, "its end")
        problems = [
            f"{outcome.kind} at iteration {outcome.iteration}: no event names it"
            for outcome in outcomes
            if not outcome.event
        ]
        records = train_records(run.metrics), train_records(reference)
        return outcomes, problems + compared(*records, log_interval)


def _caused(fault: Fault, run: Run) -> Outcome:
    num_events = 0 if fault.comes_by_itself else len(run.events())
    iteration, start = run.iteration(), time.monotonic()
    what = fault.cause(run)
    event = wait_for_event(run, num_events, fault.is_named)
    detected = time.monotonic() - start if event else math.nan
    fault.mend(run)
    reached = max(iteration, run.iteration())
    run.wait_until(lambda: run.iteration() > reached or run.exit_code == 0, f"an iteration after {reached}")
    words = ", ".join(
        str(event[key]) for key in ("event", "cause", "reason", "rank") if event and key in event
    )
    return Outcome(fault.name, iteration, what, detected, time.monotonic() - start, words[:100])


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
        f"{value:.1f}" if math.isfinite(value) else "never" for value in (outcome.detected, outcome.recovered)
    ]
    return (
        f"| {outcome.kind} | {outcome.iteration} | {outcome.what} | {seconds[0]} | {seconds[1]} |"
        f" {outcome.event} |"
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1", help="of the drills, with commas (default: 1)")
    parser.add_argument("--faults", type=int, default=20, help="per drill (default: 20)")
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
    results: dict[str, Any] = {}
    with _place(options.keep) as folder:
        with Run(folder, "undisturbed", options.ranks, folder / "undisturbed.log") as undisturbed:
            undisturbed.wait_until(lambda: undisturbed.exit_code == 0, "the undisturbed run's end")
        for seed in options.seeds.split(","):
            print(
                f"\nseed {seed}\n| fault | iteration | what was done | detected, s | recovered, s | named by"
                " |\n|---|---|---|---|---|---|",
                flush=True,
            )
            outcomes, problems = drill(
                int(seed), options.faults, options.ranks, folder / f"seed_{seed}", undisturbed.metrics,
                options.log_interval,
            )  # fmt: skip
            results[seed] = {"outcomes": [vars(outcome) for outcome in outcomes], "problems": problems}
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
