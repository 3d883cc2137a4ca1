"""Ends of a run that nobody planned: a signal, an error on one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from moe_exp.hosts import CAUSED_BY_ANOTHER, EXIT_CODE_FILE, rank_place

_WAIT_FOR_CAUSE_SECONDS = 5.0


# Why a run ends before TRAIN_ITERS. Where the ranks have several reasons, the first of this list is given.
STOP_REASONS = ("signal",)


class StopSignal:
    """Whether SIGINT or SIGTERM asked this rank to save and end; `exchange.end_of_iteration` tells the others."""

    def __init__(self) -> None:
        self.is_set = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.is_set = True

    @property
    def reason(self) -> str:
        """Of STOP_REASONS, empty for none."""
        return "signal" if self.is_set else ""


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Receives SIGINT and SIGTERM; a process that imports this package for other ends keeps its handlers."""
    stop = StopSignal()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def end_job(lines: Sequence[str], code: int) -> NoReturn:
    """Ends this rank for a reason that is no error of ours; every rank comes here. Rank 0 prints `lines`.

    torchrun answers an exit code with a page about it, which would bury the lines. Under our launcher the ranks tell the code to the
    launcher, and end with 0.
    """
    if os.environ.get("RANK", "0") == "0":
        print(*(f"moe-exp: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    told = os.environ.get(EXIT_CODE_FILE)
    if told and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(told).write_text(str(code))
    # Without the clean-up of process groups, which would wait for the other ranks.
    os._exit(0 if told else code)


@contextlib.contextmanager
def named_by_rank(stop: StopSignal) -> Iterator[None]:
    """Prints an error with rank, host name and device, and the error that caused the others first.

    When a rank dies, the others fail too, in the collective that waits for it. They hold their own error back for a while, in
    which torchrun ends them (SIGTERM, seen in `stop`): so the message on the screen is that of the rank which failed.
    """
    try:
        yield
    except Exception as error:
        if any(text in str(error) for text in CAUSED_BY_ANOTHER):
            _wait_for_cause(stop)
        print(f"moe-exp: {rank_place()} failed: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        # Without the clean-up of process groups, which would wait for the other ranks.
        os._exit(1)


def _wait_for_cause(stop: StopSignal) -> None:
    deadline = time.monotonic() + _WAIT_FOR_CAUSE_SECONDS
    while time.monotonic() < deadline:
        if stop.is_set:
            os._exit(1)
        time.sleep(0.1)
