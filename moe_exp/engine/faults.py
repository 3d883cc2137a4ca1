"""Unplanned ends of a run: a signal, or an error on one rank."""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from moe_exp.host.devices import rank_place
from moe_exp.host.exit_codes import (
    BAD_INPUT,
    CAUSED_BY_ANOTHER,
    LAUNCH_TIME,
    complain,
    leave_reasons,
    report_exit_code,
    report_first,
    reported_exit_code,
)
from moe_exp.host.processes import STOP_SIGNALS, end_with_parent, signals_handled

logger = logging.getLogger(__name__)

# Why a run ends before TRAIN_ITERS, and in words. If ranks have different reasons, the first is reported.
STOP_REASONS = {name: f"a rank got {name}" for name in ("SIGTERM", "SIGINT", "SIGUSR1")} | {
    "EXIT": "the file EXIT is in the run folder",
    "EXIT_DURATION": "EXIT_DURATION minutes have passed since the launch",
    "EXIT_INTERVAL": "the iteration is a multiple of EXIT_INTERVAL",
}


class StopSignal:
    """Whether a signal asked this rank to save and exit; `interval.end_of_iteration` informs the others."""

    def __init__(self) -> None:
        self.reason = ""  # of STOP_REASONS

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.reason = self.reason or signal.Signals(number).name


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Handles STOP_SIGNALS; processes that import this package for other purposes keep their handlers."""
    stop = StopSignal()
    with signals_handled(stop.receive, signals=STOP_SIGNALS):
        # The agent starts ranks with these blocked: delivers what was sent during the imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank, which nothing else would end after its agent
            end_with_parent(signal.SIGTERM)
        yield stop


class StopRules:
    """Why a run should end after an iteration; called once per iteration on every rank, and cheap.

    Args:
        stop: signals that this rank got.
        exit_file: checked at most once a second; None except on rank 0.
        exit_minutes: since the launch, over all restarts, or 0; checked with `exit_file`.
        exit_interval: iterations, or 0.
    """

    def __init__(self, stop: StopSignal, exit_file: Path | None, *, exit_minutes: float, exit_interval: int):
        self._stop, self._file, self._interval = stop, exit_file, exit_interval
        launched = float(os.environ.get(LAUNCH_TIME) or time.monotonic())
        self._end = launched + 60 * exit_minutes if exit_minutes else math.inf
        self._next_check = 0.0

    def reason(self, iteration: int) -> str:
        """One of STOP_REASONS, or empty."""
        if self._stop.reason:
            return self._stop.reason
        now = time.monotonic()
        if self._file is not None and now >= self._next_check:
            self._next_check = now + 1.0
            with contextlib.suppress(OSError):  # a network file system may be gone for a moment
                if self._file.exists():
                    return "EXIT"
        if self._file is not None and now >= self._end:
            return "EXIT_DURATION"
        return "EXIT_INTERVAL" if self._interval and iteration % self._interval == 0 else ""

    def acknowledge(self, reason: str) -> None:
        """Called when the run has ended because of `reason`: removes the EXIT file for the next start."""
        if reason == "EXIT" and self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                line = "%s cannot be removed (%s): the next start will end by it again"
                logger.warning(line, self._file, error.strerror)


def end_job(lines: Sequence[str], code: int) -> NoReturn:
    """Ends this rank for a reason that is not our error; called by every rank. Rank 0 prints `lines`.

    torchrun follows an exit code with a page of text, which would bury the lines. Under our launcher the
    ranks report the code to the launcher and exit with 0.
    """
    if os.environ.get("RANK", "0") == "0":
        complain(*lines)
        leave_reasons(*lines)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # Messages to other ranks that are still on the GPU would be lost with the process.
        torch.cuda.synchronize()
        time.sleep(1.0)  # for what NCCL has handed to the network
    has_launcher = report_exit_code(code)
    # Skips the clean-up of process groups, which would wait for the other ranks.
    os._exit(0 if has_launcher else code)


@contextlib.contextmanager
def named_by_rank(stop: StopSignal) -> Iterator[None]:
    """Prints the causing error first, with rank, host name and device; for user errors only their line.

    When a rank dies, the others fail in the collective that waits for it. They hold back their own error
    until torchrun ends them (SIGTERM, seen in `stop`), so the message shown is that of the rank that failed.
    """
    try:
        yield
    except Exception as error:
        deadline = time.monotonic() + 5.0
        while any(text in str(error) for text in CAUSED_BY_ANOTHER) and time.monotonic() < deadline:
            if stop.reason or reported_exit_code() == BAD_INPUT:  # which prints its own line
                os._exit(1)
            time.sleep(0.1)
        _leave_error(error)
        if isinstance(error, ValueError) and ". Fix: " in str(error):
            # A user error, which a restart would not fix; the node's first rank prints it.
            if report_first(BAD_INPUT):
                complain(*str(error).splitlines())
                leave_reasons(*str(error).splitlines())
            os._exit(BAD_INPUT)
        line = f"{rank_place()} failed: {type(error).__name__}: {error}"
        leave_reasons(line)
        with contextlib.suppress(OSError):  # a log on a full disk
            print(f"moe-exp: {line}", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
        # Skips the clean-up of process groups, which would wait for the other ranks.
        os._exit(1)


def _leave_error(error: Exception) -> None:
    """Writes the error in one line, where and as torchrun's agent reads it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        data = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        whole = Path(f"{file}.whole")
        with contextlib.suppress(OSError):
            whole.write_text(json.dumps({"message": data}))
            whole.replace(file)  # the agent would crash on a partial file
