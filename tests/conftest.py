"""The versions that were compared; fixtures for tests that start whole runs, see whole_runs.py."""

from __future__ import annotations

import dataclasses
import os
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hypothesis
import pytest
import torch

from helpers.whole_runs import Runs

# Before anything imports Triton: its kernels run on CPU tensors then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

COMPARED = ("torch", "megatron-core", "transformers")


def pytest_configure() -> None:
    """Tests press Ctrl-C. A shell has what it starts with `&` ignore it, and so would all that the tests
    start. And examples that hypothesis draws may take their time: other tests run beside them.
    """
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests in tests/proof compare with. Not in the header, which pytest leaves out with -q."""
    if any(report.nodeid.startswith("tests/proof") for report in terminalreporter.getreports("passed")):
        terminalreporter.write_line("compared: " + ", ".join(f"{name} {_version(name)}" for name in COMPARED))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


@pytest.fixture(scope="session")
def session_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that all tests share. One DATA_DIR for the session: the embedded corpus is built once."""
    return Runs(tmp_path_factory.mktemp("session") / "runs", tmp_path_factory.mktemp("data"))


@pytest.fixture
def runs(tmp_path: Path, session_runs: Runs) -> Runs:
    """Runs of one test."""
    return Runs(tmp_path / "runs", session_runs.data_dir)


@pytest.fixture
def script_runs(runs: Runs) -> Runs:
    """Runs of one test, for tests of the script, of torchrun's agent, or of what a run prints."""
    return dataclasses.replace(runs, by_script=True)
