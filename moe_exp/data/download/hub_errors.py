"""Errors of the hub: those that are retried, and messages for the others."""

from __future__ import annotations

import email.utils
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moe_exp.host import retries
from moe_exp.host.retries import first_line

T = TypeVar("T")

_UNREACHABLE_FAILURES = 2
_LONGEST_RETRY_AFTER_SECONDS = 900.0
# The library's HTTP package differs from version to version, and so do the types of its errors.
_HTTP_PACKAGES = frozenset({"httpx", "httpx2", "httpcore", "requests", "urllib3"})


def endpoint() -> str:
    """Address of the hub; the library reads HF_ENDPOINT once, when it is imported."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def check_online(why: str) -> None:
    """Whether requests may be made.

    Raises:
        ValueError: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set.
    """
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            fix = "unset it, or bring the whole folder with its manifest.json"
            raise ValueError(f"{name}={os.environ[name]}: {why}. Fix: {fix}.")


def patiently(action: Callable[[], T], max_failures: int, num_left: Callable[[], int] = lambda: 0) -> T:
    """Runs it until it succeeds, or has failed `max_failures` times since `num_left()` went down."""
    return retries.patiently(
        action,
        max_failures,
        passes=passes,
        num_left=num_left,
        limit_of=lambda error: _UNREACHABLE_FAILURES if _is_unreachable(error) else None,
        wait_of=retry_after,
    )


def passes(error: BaseException) -> bool:
    """Whether trying again may help: the server is busy or broken, or the connection is."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    for cause in _causes(error):
        of_network = isinstance(cause, (ConnectionError, TimeoutError))
        if isinstance(cause, OSError) and cause.errno is not None and not of_network:
            return False  # of this machine: disk full, no permission
    # hf_xet raises RuntimeError.
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (OSError, RuntimeError)) or package in _HTTP_PACKAGES


def _is_unreachable(error: BaseException) -> bool:
    """Whether there is no way to the server at all, which the library has tried for half a minute."""
    kinds = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    return _status(error) is None and bool(
        kinds & {"ConnectError", "NewConnectionError", "ConnectionRefusedError", "gaierror"}
    )


def retry_after(error: BaseException) -> float:
    """Seconds that the server asks to wait, 0 if it says nothing."""
    for cause in _causes(error):
        value = getattr(getattr(cause, "response", None), "headers", {}).get("Retry-After")
        if value is None:
            continue
        try:
            seconds = (
                float(value)
                if value.isdigit()
                else email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            )
        except ValueError:
            continue
        return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_SECONDS)
    return 0.0


@contextmanager
def explained(repository: str, revision: str) -> Iterator[None]:
    """Turns what the library raises into one line that says what to do.

    Raises:
        ValueError: no access, no such dataset or revision.
        ConnectionError: the server keeps failing.
    """
    try:
        yield
    except Exception as error:
        explained = _explanation(error, repository, revision)
        if explained is None:
            raise
        raise explained from error


def _explanation(error: Exception, repository: str, revision: str) -> Exception | None:
    kinds = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    status, page = _status(error), f"{endpoint()}/datasets/{repository}"
    if "RevisionNotFoundError" in kinds:
        fix = f"--revision main, or one of {page}"
        return ValueError(f"revision={revision}: {repository} has none of that name. Fix: {fix}.")
    if "GatedRepoError" in kinds or status == 403:
        fix = f"accept its licence on {page}, and set HF_TOKEN to a token of that account"
        return ValueError(f"source={repository}: its owner gives access on request. Fix: {fix}.")
    if status in (401, 404):
        rule = f"{endpoint()} has no such dataset, or none that is open to everyone"
        fix = "check the name (a local folder has to exist); for a private one set HF_TOKEN to a token"
        fix += " that may read it"
        return ValueError(f"source={repository}: {rule}. Fix: {fix}.")
    if passes(error):
        fix = "check the network and HF_ENDPOINT, and call it again: complete files are kept"
        rule = f"keeps failing ({first_line(error)})"
        return ConnectionError(f"{repository}: {endpoint()} {rule}. Fix: {fix}.")
    if status is not None:
        rule = f"answers {status} ({first_line(error)})"
        return ValueError(f"source={repository}: {endpoint()} {rule}. Fix: check HF_ENDPOINT.")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; the library wraps what the server said."""
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    """HTTP status that the server answered with."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None
