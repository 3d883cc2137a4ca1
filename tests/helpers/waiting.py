"""Waits until something is so."""

import time
from collections.abc import Callable


def wait_for(is_so: Callable[[], object], *, timeout: float = 120.0, said: Callable[[], str] = str) -> None:
    """Returns once `is_so` is true; fails after `timeout` seconds, with what `said` returns then."""
    deadline = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < deadline, f"it has not come to that in {timeout} s: {said()}"
        time.sleep(0.05)
