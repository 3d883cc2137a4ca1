"""Calls that may fail for a while: of a server that is busy, or a connection that breaks."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_WAIT_SECONDS = 60.0


def patiently(
    action: Callable[[], T],
    max_failures: int,
    *,
    passes: Callable[[Exception], bool],
    num_left: Callable[[], int] = lambda: 0,
    limit_of: Callable[[Exception], int | None] = lambda _: None,
    wait_of: Callable[[Exception], float] = lambda _: 0.0,
) -> T:
    """Result of `action`, which is tried again after failures that may pass.

    Args:
        action: what to do.
        max_failures: in a row since `num_left` went down; the last one is raised.
        passes: whether trying again may help.
        num_left: how much there is to do.
        limit_of: another `max_failures` for some errors.
        wait_of: seconds that the error itself asks to wait.
    """
    failures, best = 0, num_left()
    while True:
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            left = num_left()
            failures = 1 if left < best else failures + 1
            best = min(best, left)
            if failures >= (limit_of(error) or max_failures):
                raise
            # Jitter: workers of one cluster that were refused together do not come back together.
            seconds = max(min(_LONGEST_WAIT_SECONDS, 2.0 ** (failures - 1)), wait_of(error))
            seconds *= random.uniform(1.0, 1.5)
            what = "%s. Failure %d of %d, trying again in %.0f s"
            logger.warning(what, first_line(error), failures, max_failures, seconds)
            time.sleep(seconds)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
