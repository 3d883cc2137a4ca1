"""A run, a queue and a watchdog for the tests of this folder."""

import pytest

from helpers.watch.watched_run import Queue, Run
from moe_exp.watch.watchdog.alerts import AlertFile
from moe_exp.watch.watchdog.watchdog import Watchdog


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "big_run")
    run.event("start", 0, 0.0)
    run.train(20, 2000, 4200.0)
    run.event("checkpoint", 2000, 4230.0, seconds=30.0, bytes=10**6)  # all of them fit on any disk
    run.train(2020, 2020, 4300.0)
    return run


@pytest.fixture
def queue(tmp_path, monkeypatch):
    queue = Queue(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return queue


@pytest.fixture
def dog(run, tmp_path, queue):
    alerts = [AlertFile(tmp_path / "alerts.log")]
    return Watchdog([(run.path, "big_run")], alerts, folder=tmp_path / "state")
