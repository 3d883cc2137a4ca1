"""`moe-exp watch stacks`: stacks on demand, and the summary of those that are there."""

from __future__ import annotations

import shutil
from pathlib import Path

from moe_exp.host.files import write_atomically
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hang_requests import ask, wait_for_answers
from moe_exp.watch.stacks import Summary, summarize

FIRST_SECONDS = 15.0  # for a sign of a launcher; a network file system may be that late
_ALL_SECONDS = 120.0


def stacks_of(place: Path, *, first_seconds: float = FIRST_SECONDS) -> tuple[Summary, Path]:
    """Stacks of a run that goes on, or those of a folder in RUN/hang.

    Args:
        place: run folder, or RUN/hang/TIME.
        first_seconds: how long to wait for the first launcher.

    Returns:
        Their summary, and the folder with the stacks.

    Raises:
        ValueError: no launcher answers, or the folder has no stacks.
    """
    run = RunFolder(place)
    if not run.config.exists():
        return summarize(place), place
    folder = run.path / "hang" / ask(run.path / "hang", "stacks", "stacks on demand").folder
    answers = wait_for_answers(folder, first_seconds=first_seconds, all_seconds=_ALL_SECONDS)
    if not answers:
        shutil.rmtree(folder)
        fix = "look whether the job runs; ranks under a bare torchrun have no launcher, use py-spy there"
        raise ValueError(f"stacks={place}: no launcher of this run has answered in {first_seconds:.0f} s. Fix: {fix}.")
    summary = summarize(folder)
    write_atomically(folder / "summary.txt", summary.whole + "\n")
    return summary, folder
