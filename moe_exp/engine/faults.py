"""Ends a run before TRAIN_ITERS, after a stop request or after an error on one rank or on all ranks."""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from moe_exp.host import exit_codes
from moe_exp.host.devices import rank_place
from moe_exp.host.exit_codes import BAD_INPUT, CAUSED_BY_ANOTHER, LAUNCH_TIME, complain, leave_reasons
from moe_exp.host.processes import STOP_SIGNALS, end_with_parent, signals_handled

logger = logging.getLogger(__name__)

# Reasons to stop before TRAIN_ITERS. If ranks have different reasons, the first in this order is reported.
STOP_REASONS = {name: f"a rank received {name}" for name in ("SIGTERM", "SIGINT", "SIGUSR1")} | {
    "EXIT": "found the file EXIT in the run folder",
    "EXIT_DURATION": "reached EXIT_DURATION minutes since the launch",
    "EXIT_INTERVAL": "reached a multiple of EXIT_INTERVAL",
}


class StopSignal:
    """Stop signal that this rank has received; `step.end_iteration` informs the other ranks."""

    reason = ""  # key of STOP_REASONS, or empty

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.reason = self.reason or signal.Signals(number).name


@contextlib.contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Handles STOP_SIGNALS inside the block."""
    stop = StopSignal()
    with signals_handled(stop.receive, signals=STOP_SIGNALS):
        # The agent starts ranks with these signals blocked; this delivers those sent during the imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank must not survive its agent
            end_with_parent(signal.SIGTERM)
        yield stop


class StopRules:
    """Rules for stopping the run. Each rank applies the rules after each iteration.

    Args:
        stop: stop signal of this rank.
        exit_file: file that requests a stop. Rank 0 checks at most once a second whether this file exists;
            on other ranks, `exit_file` is None.
        exit_minutes: minutes from the launch to the stop; 0: no limit. Restarts do not reset this time. Only
            rank 0 checks the time.
        exit_interval: stop at every iteration that is a multiple of this number; 0: never.
    """

    def __init__(self, stop: StopSignal, exit_file: Path | None, *, exit_minutes: float, exit_interval: int):
        self._stop, self._file, self._interval = stop, exit_file, exit_interval
        launched = float(os.environ.get(LAUNCH_TIME) or time.monotonic())
        self._end = launched + 60 * exit_minutes if exit_minutes else math.inf
        self._next_check = 0.0

    def reason(self, iteration: int) -> str:
        """Reason to stop (a key of STOP_REASONS); empty to continue."""
        if self._stop.reason:
            return self._stop.reason
        now = time.monotonic()
        if self._file is not None and now >= self._next_check:
            self._next_check = now + 1.0
            with contextlib.suppress(OSError):  # a network file system may be unavailable for a moment
                if self._file.exists():
                    return "EXIT"
        if self._file is not None and now >= self._end:
            return "EXIT_DURATION"
        return "EXIT_INTERVAL" if self._interval and iteration % self._interval == 0 else ""

    def acknowledge(self, reason: str) -> None:
        """If the EXIT file ended the run, removes the file so that it does not stop the next start."""
        if reason == "EXIT" and self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                line = "cannot remove %s (%s): this file will also stop the next start"
                logger.warning(line, self._file, error.strerror)


def end_job(lines: Sequence[str], code: int) -> NoReturn:
    """Ends this rank without a traceback; rank 0 prints `lines`. Called by every rank."""
    if os.environ.get("RANK", "0") == "0":
        complain(*lines)
        leave_reasons(*lines)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # Other ranks may still need messages that are queued on this GPU.
        torch.cuda.synchronize()
        time.sleep(1.0)  # lets NCCL finish sending over the network
    # On a nonzero exit code torchrun prints a page of text that would bury the lines, so our launcher gets
    # the code from a file. os._exit skips the cleanup of process groups, which would wait for other ranks.
    has_launcher = exit_codes.report_exit_code(code)
    os._exit(0 if has_launcher else code)


@contextlib.contextmanager
def named_by_rank(stop: StopSignal, memory_text: Callable[[Exception], str] = str) -> Iterator[None]:
    """Prints an error raised in the block, with the rank, host name and device.

    For a user error, prints only the message. If GPU memory runs out, prints only one line, which contains
    `memory_text(error)`.
    """
    try:
        yield
    except Exception as error:
        # When a rank dies, the others fail in the collective that waits for it. They hold back their own
        # error until torchrun terminates them (SIGTERM sets `stop`): only the first rank prints its error.
        deadline = time.monotonic() + 5.0
        while any(text in str(error) for text in CAUSED_BY_ANOTHER) and time.monotonic() < deadline:
            # another rank prints the user error
            if stop.reason or exit_codes.reported_exit_code() == BAD_INPUT:
                os._exit(1)
            time.sleep(0.1)
        _leave_error(error)
        if isinstance(error, ValueError) and ". Fix: " in str(error):
            # A user error, which a restart would not fix. The first rank of the node to get here prints it.
            if exit_codes.report_first(BAD_INPUT):
                complain(*str(error).splitlines())
                leave_reasons(*str(error).splitlines())
            os._exit(BAD_INPUT)
        is_full = type(error).__name__ == "OutOfMemoryError"
        text = memory_text(error) if is_full else str(error)
        line = f"{rank_place()} failed: {type(error).__name__}: {text}"
        leave_reasons(line)
        with contextlib.suppress(OSError):  # stderr may be a log on a full disk
            print(f"moe-exp: {line}", file=sys.stderr)
            if not is_full:
                traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)  # without cleanup, as in `end_job`


def _leave_error(error: Exception) -> None:
    """Writes the error's first line to the file that torchrun's agent reads, in the agent's format."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        data = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        whole = Path(f"{file}.whole")
        with contextlib.suppress(OSError):
            whole.write_text(json.dumps({"message": data}))
            whole.replace(file)  # the agent would crash on a partial file
