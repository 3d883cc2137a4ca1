"""Runs one case on this node, in processes that end with it. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import run_environment, run_to_end, wait_until_free
from moe_exp.studies.sweep.cases import Case
from moe_exp.studies.sweep.settings import SweepSettings


def case_environment() -> dict[str, str]:
    """This environment without settings: the lists of a sweep would look like misspelt settings."""
    return run_environment(also_without=SweepSettings.model_fields)


def clear(folder: RunFolder, log: Path) -> None:
    """Removes what an earlier attempt has left, once its processes are gone.

    Raises:
        ValueError: they are still there.
    """
    wait_until_free(folder)
    if folder.path.exists():
        shutil.rmtree(folder.path)
    log.unlink(missing_ok=True)


def run_case(case: Case, log: Path, timeout: int) -> int | None:
    """Runs a case to its end, or for `timeout` seconds; returns the launcher's exit code, None after a time-out."""
    return run_to_end(case.flags, log, timeout=timeout, environ=case_environment())
