"""Worker processes of the package's pools are forks of the process that helpers/ranks.py starts."""

from __future__ import annotations

import pytest

from helpers.ranks import start_process


@pytest.fixture(scope="session")
def forked_workers() -> None:
    """To be used where a test has several workers: the pool has a server already then."""
    start_process(int).join()
