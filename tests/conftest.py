"""Fixtures for tests that start whole runs, see whole_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from whole_runs import Runs


@pytest.fixture(scope="session")
def session_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that all tests share. One DATA_DIR for the session: the embedded corpus is built once."""
    return Runs(tmp_path_factory.mktemp("session") / "runs", tmp_path_factory.mktemp("data"))


@pytest.fixture
def runs(tmp_path: Path, session_runs: Runs) -> Runs:
    """Runs of one test."""
    return Runs(tmp_path / "runs", session_runs.data_dir)
