"""The order of the tests; the versions that were compared; fixtures for whole runs, see whole_runs.py."""

import dataclasses
import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest
import torch

from helpers.forked_workers import fork_workers
from helpers.ranks import have_fork_server, share_fork_server
from helpers.servers.s3 import BUCKET, S3Server, s3_server
from helpers.whole_runs import Runs

# Before anything imports Triton: its kernels run on CPU tensors then.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

NUM_THREADS = torch.get_num_threads()
COMPARED = ("torch", "megatron-core", "transformers")


# Seconds of each file of tests that takes more than two, by the expression of -m.
DURATIONS = Path(__file__).with_name("durations.json")
# Mostly waits, and comes later: the other long files that wait are the first.
WAITS = "tests/watch/hangs/test_hang.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "write durations.json, by which files are ordered"
    parser.addoption("--write-durations", action="store_true", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, so that at the end no worker is left alone with one of them."""
    seconds: Counter[str] = Counter()
    for marked, of_files in json.loads(DURATIONS.read_text()).items():
        if config.option.markexpr in ("", marked):
            seconds.update(of_files)
    seconds[WAITS] //= 2
    items.sort(key=lambda item: -seconds[_file(item.nodeid)])


def pytest_collection() -> None:
    gc.disable()  # what is collected stays


def pytest_collection_finish() -> None:
    if "moe_exp.layers.kernels.launch" in sys.modules:
        from helpers.layers import interpreter

        interpreter.speed_up()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The code under test may change this number, which is one for the whole process."""
    torch.set_num_threads(NUM_THREADS)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """A shell has what it starts with `&` ignore Ctrl-C, which tests press. And hypothesis may be slow."""
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        have_fork_server()  # before a pool of the package starts one
    elif config.getoption("numprocesses", 0):
        share_fork_server()
        fork_workers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests in tests/proof compare with. Not in the header, which pytest leaves out with -q."""
    if terminalreporter.config.option.write_durations:
        _write_durations(terminalreporter)
    if any(report.nodeid.startswith("tests/proof") for report in terminalreporter.getreports("passed")):
        terminalreporter.write_line("compared: " + ", ".join(f"{name} {_version(name)}" for name in COMPARED))


def _write_durations(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for outcome in ("", "passed", "failed", "skipped"):  # "": of setups and teardowns
        for report in terminalreporter.getreports(outcome):
            seconds[_file(report.nodeid)] += report.duration
    longest = {name: round(value) for name, value in seconds.most_common() if value > 2}
    written = json.loads(DURATIONS.read_text()) | {terminalreporter.config.option.markexpr: longest}
    DURATIONS.write_text(json.dumps(written, indent=2) + "\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


@pytest.fixture(scope="session")
def session_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that all tests share. One DATA_DIR for all workers, with an embedded corpus of every tenth of its
    documents: tokenizing them all takes longer than any test, see tests/data/test_embedded.py.
    """
    folder = tmp_path_factory.getbasetemp()
    data_dir = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "data"
    from moe_exp.data import embedded

    documents = embedded.embedded_documents
    with patch.object(embedded, "embedded_documents", lambda: documents()[::10]):
        embedded.ensure_embedded_corpus(data_dir)
    return Runs(tmp_path_factory.mktemp("session") / "runs", data_dir)


@pytest.fixture
def runs(tmp_path: Path, session_runs: Runs) -> Runs:
    """Runs of one test."""
    return Runs(tmp_path / "runs", session_runs.data_dir)


@pytest.fixture
def script_runs(runs: Runs) -> Runs:
    """Runs of one test, for tests of the script, of torchrun's agent, or of what a run prints."""
    return dataclasses.replace(runs, by_script=True)


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """moto's S3 server, for all tests of this worker."""
    with s3_server() as server:
        yield server


@pytest.fixture
def server(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The same, as the store of this process and those that it starts; no request fails."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    s3_process.fail(0)
    yield s3_process
    s3_process.fail(0)


@pytest.fixture
def url(server: S3Server, tmp_path: Path) -> str:
    """A folder at the store that no other test has."""
    return f"s3://{BUCKET}/{tmp_path.name}"
