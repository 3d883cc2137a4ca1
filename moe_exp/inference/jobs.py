"""The ranks that use a model: this process alone, or those of a job that torchrun started."""

import logging
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from moe_exp.config import Config
from moe_exp.engine import faults, runtime
from moe_exp.engine.runtime import Runtime

T = TypeVar("T")


def run_alone(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` in this process, as the only rank."""
    rank = runtime.start_alone(config)
    try:
        work(rank)
    finally:
        runtime.stop()


def run_rank(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` as a rank of torchrun's; what a user can mend is one line and exit code 1."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.INFO if os.environ.get("RANK") == "0" else logging.WARNING)
    with faults.stop_signal() as stop, faults.named_by_rank(stop):
        try:
            work(runtime.start(config))
        except ValueError as error:
            print(f"moe-exp: {error}", file=sys.stderr, flush=True)
            # Without the clean-up of process groups, which would wait for the other ranks.
            os._exit(1)
        runtime.stop()


def planned_quietly(plan: Callable[[], T]) -> T:
    """What `plan` returns; what it has to say was said by the launcher, which planned the same."""
    logging.getLogger("moe_exp").setLevel(logging.ERROR)
    return plan()
