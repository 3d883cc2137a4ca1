"""Runs a ladder locally or as SLURM jobs; predicts the last rung's losses before running it. No torch."""

import math
import re
import time
from collections.abc import Iterator, Sequence

from moe_exp.config import Config, ConfigError, problem
from moe_exp.host.exit_codes import FINISHED, TO_BE_CONTINUED
from moe_exp.host.files import write_atomically, write_json
from moe_exp.host.quantities import duration
from moe_exp.studies.child_runs import Case, JobOptions, at_work, run_jobs, wait_until_free
from moe_exp.studies.compare import back_to_back
from moe_exp.studies.compare.comparison import Comparison, Ended, is_finished, read_ended
from moe_exp.studies.ladder import results
from moe_exp.studies.ladder.ladder import Ladder, compute_of
from moe_exp.studies.sweep.table import TIME_LIMIT

EXECUTORS = ("local", "slurm")
_ENDED_BY_SLURM = re.compile(r"CANCELLED AT[^\n*]*")


def check(ladder: Ladder) -> None:
    """Raises ConfigError if settings are invalid, or if earlier runs in the folder had other settings."""
    back_to_back.need_packages("ladder", "scipy", "matplotlib")
    for comparison in ladder.rungs:
        back_to_back.check_runs(comparison.runs(), Config.problems)
        comparison.compare_with_before()
    for name in ("config.yaml", "compare.json"):
        if (ladder.folder / name).exists():
            rule = f"{ladder.folder} belongs to a run or comparison, not a ladder"
            raise ConfigError([problem("run_name", ladder.folder.name, rule, "use another RUN_NAME")])


def dry_run(ladder: Ladder) -> str:
    """Describes a ladder without touching files. Raises ConfigError if the ladder cannot run."""
    check(ladder)
    for comparison in ladder.rungs:
        back_to_back.check_planned_files(comparison)
    return results.plan_text(ladder)


def run_ladder(ladder: Ladder, executor: str = "local", sbatch: Sequence[str] = ()) -> int:
    """Performs the remaining runs of a ladder and updates the reports after each run. Raises the
    same errors as `run_comparison`. Returns the exit code: 1 if a run failed, timed out or diverged;
    otherwise TO_BE_CONTINUED if runs remain, or FINISHED if all runs are done.

    Args:
        executor: one of EXECUTORS.
        sbatch: options passed to sbatch.
    """
    check(ladder)
    left = [run for comparison in ladder.rungs for run in comparison.runs() if not is_finished(run)]
    if executor == "local":
        for run in left:
            wait_until_free(run.folder)
        back_to_back.check_runs(left)
    with at_work(ladder.folder, f"RUN_NAME={ladder.folder.name}", "ladder", executor=executor):
        print(results.plan_text(ladder), end="\n\n", flush=True)
        reasons = _climb(ladder, executor, sbatch, left)
        found, text = write_reports(ladder, reasons)
    print(f"\n{text}\n{ladder.folder}/report.md, report.html, ladder.json", flush=True)
    return 1 if found.left_out else TO_BE_CONTINUED if found.num_left else FINISHED


def _climb(ladder: Ladder, executor: str, sbatch: Sequence[str], left: Sequence[Case]) -> dict[str, str]:
    """Performs the runs in `left`; returns the reason of each failed run, by run name."""
    reasons: dict[str, str] = {}
    done, flops_done, started = 0, 0.0, time.monotonic()
    flops_of_all = sum(compute_of(run.config) for run in left)
    last = ladder.rungs[-1]
    stopped: list[str] = []
    # The last rung waits for all others, as its prediction uses their losses.
    for rungs in (ladder.rungs[:-1], (last,)):
        pairs = ((comparison, run) for comparison in rungs for run in comparison.runs())
        waiting = [pair for pair in pairs if not is_finished(pair[1])]
        if rungs == (last,) and stopped:
            print(f"The last rung waits for unfinished runs: {', '.join(stopped)}.", flush=True)
            break
        if rungs == (last,) and waiting and (why := results.predict(ladder)):
            print(why, flush=True)
        for comparison in {id(one): one for one, _ in waiting}.values():
            comparison.folder.mkdir(exist_ok=True)
            comparison.keep({})
        for ended in _ended(ladder, executor, sbatch, waiting):
            name = results.run_name(ended.run)
            if ended.reason:
                reasons[name] = f"{ended.status}: {ended.reason}"
            # Waiting for failed runs would be pointless, but a repeated command resumes stopped ones.
            if ended.status not in ("finished", "failed", "oom"):
                stopped.append(name)
            done, flops_done, when = done + 1, flops_done + compute_of(ended.run.config), ""
            # Local runs are sequential, so their time is roughly proportional to FLOPs.
            if done < len(left) and executor == "local":
                seconds = (flops_of_all / flops_done - 1) * (time.monotonic() - started)
                when = f"; about {duration(seconds)} left"
            print(f"{done}/{len(left)} {back_to_back.ended_line(ended, name)}{when}", flush=True)
            write_reports(ladder, reasons)
    return reasons


def _ended(
    ladder: Ladder, executor: str, sbatch: Sequence[str], waiting: Sequence[tuple[Comparison, Case]]
) -> Iterator[Ended]:
    """Runs the `waiting` runs on this node or as SLURM jobs, and yields their results as they end."""
    if executor == "local":
        for comparison, run in waiting:
            yield back_to_back.run_one(comparison, run, f"{comparison.folder.name}/{run.name}")
        return
    first = ladder.rungs[0]
    # Jobs always get a limit, so that a run that hangs does not occupy its nodes forever.
    seconds = math.ceil(first.options.timeout) or 86_400  # a day
    options = JobOptions(sbatch, seconds, on_gpus=first.reference.config.preset != "cpu")
    by_name = {results.run_name(run).replace("/", "_"): run for _, run in waiting}
    for run, code in run_jobs(by_name, ladder.folder / "jobs", options):
        yield ended_job(run, code)


def ended_job(run: Case, code: int | None) -> Ended:
    """Returns a run's state after its SLURM job has ended. `code`: the launcher's exit code, if known."""
    text = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
    if is_finished(run):
        return read_ended(run)
    # Without an exit code, the batch script itself was terminated by the time limit, scancel or preemption.
    if code is None and (ended := _ENDED_BY_SLURM.search(text)):
        cut = "timeout" if TIME_LIMIT.search(text) else "stopped"
        return read_ended(run, status=cut, reason=f"SLURM ended the job: {ended[0].strip()}")
    return back_to_back.ended_with(run, code, text)


def write_reports(ladder: Ladder, reasons: dict[str, str]) -> tuple[results.Results, str]:
    """Writes report.md, report.html and ladder.json atomically; returns the results and the Markdown."""
    found = results.results_of(ladder, reasons)
    text = results.result_text(ladder, found)
    write_atomically(ladder.folder / "report.md", text)
    write_atomically(ladder.folder / "report.html", results.page(ladder, found))
    write_json(ladder.folder / "ladder.json", results.as_json(ladder, found))
    return found, text
