"""What the GPU benchmarks try one after another: what fails is left out by name, and the rest continues."""

import gc
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class LeftOut(Exception):
    """Something is not measured, for a reason that needs no traceback."""


class DeviceLost(Exception):
    """The device answers no more: whatever would follow fails as well."""


class Attempts:
    """The reasons why something was left out, by name (`left_out`), and the names among them that should have
    been measured (`failed`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.left_out: dict[str, str] = {}
        self.failed: list[str] = []

    def leave_out(self, name: str, reason: str, *, may_fail: bool) -> None:
        self.left_out[name] = reason
        if not may_fail:
            self.failed.append(name)

    def run(self, name: str, work: Callable[[], T], *, may_fail: bool) -> T | None:
        """What `work` gives; None where it failed, with any exception: Triton's own errors, for one, derive
        from Exception alone.

        Args:
            name: under which it is left out.
            may_fail: another package may, in its own way. What may not is in `failed`, with its traceback on
                stderr.

        Raises:
            DeviceLost: where nothing on the device works any more.
        """
        try:
            return work()
        except DeviceLost:
            raise
        except Exception as error:
            if not may_fail and not isinstance(error, (LeftOut, torch.OutOfMemoryError)):
                traceback.print_exc()
            self.leave_out(name, reason_of(error), may_fail=may_fail)
        # Only here, and not above, the error has let go of the tensors in its frames.
        if reason := lost(self.device):
            raise DeviceLost(f"{name}: {reason}")
        free(self.device)
        return None

    def end(self, error: DeviceLost) -> None:
        """Notes that the device was lost."""
        self.leave_out("all that would follow", f"the device answers no more since {error}", may_fail=False)

    def report(self) -> list[str]:
        return [f"Left out: {name}: {reason}" for name, reason in self.left_out.items()]

    def exit(self, *others: str) -> None:
        """Ends the process: with 1 where something failed that may not, or `others` says what else is
        wrong.
        """
        problems = [*(f"not measured: {', '.join(self.failed)}" for _ in self.failed[:1]), *others]
        sys.exit("; ".join(problems) or 0)


def reason_of(error: Exception) -> str:
    """The first line of an error, with its kind where it is not one of ours."""
    text = str(error) if isinstance(error, LeftOut) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


def lost(device: torch.device) -> str:
    """Why the device answers no more; empty: it does. After some errors of a kernel every later call to CUDA
    fails, in this process.
    """
    reason = ""
    for _ in range(2 if device.type == "cuda" else 0):  # the first may tell of an error that is over with it
        try:
            torch.cuda.synchronize(device)
            return ""
        except RuntimeError as error:
            reason = reason_of(error)
    return reason


def free(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
