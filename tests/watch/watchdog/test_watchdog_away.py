"""The watchdog where it cannot look: a file system that is away or hangs, records that nobody has thought
of.
"""

from __future__ import annotations

import time

import yaml

from helpers.watch.watched_run import SETTINGS, WAITING, found, running
from moe_exp.cli import main
from moe_exp.watch.watchdog import watchdog


def test_what_was_wrong_is_not_over_because_nobody_can_look(dog, run, queue):
    assert found(dog, run, 4400.0)[1] == {"not_scheduled"}
    (run.path / "config.yaml").rename(run.path / "away")
    assert found(dog, run, 4500.0) == ({"not_scheduled", "unreadable"}, {"unreadable"}, set())


def test_a_file_system_that_does_not_answer_is_told(dog, run, queue, monkeypatch):
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 0.2)
    found(dog, run, 4400.0)
    monkeypatch.setattr("moe_exp.watch.watchdog.run.regular", lambda path: time.sleep(5) or path)
    (look,) = dog.check(now=run.begin + 4500)
    assert look.news["unreadable"] == "cannot be read: its file system has not answered in 0 s"


def test_records_that_nobody_has_thought_of_are_told(dog, run, queue):
    (run.path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | {"save_interval": [1]}))
    assert "cannot be read: TypeError: " in dog.check(now=run.begin + 4400)[0].found["unreadable"]


def test_from_cron_a_run_that_is_away_is_told_and_is_no_bad_command(run, queue, tmp_path, capsys):
    command = [
        "watch",
        "run",
        str(run.path),
        "--state",
        str(tmp_path / "state"),
        "--alert-file",
        str(tmp_path / "alerts.log"),
    ]
    main(command)
    run.path.rename(tmp_path / "unmounted")
    assert main(command) == 1
    assert "PROBLEM: cannot be read: RUN_DIR=" in (tmp_path / "alerts.log").read_text()
    assert main(["watch", "run", str(tmp_path / "typo"), "--state", str(tmp_path / "state")]) == 2


def test_a_run_folder_that_is_away_is_a_problem(dog, run, queue):
    queue.set(running(run) + WAITING)
    found(dog, run, 4400.0)
    (run.path / "config.yaml").rename(run.path / "away")
    assert found(dog, run, 4500.0)[1] == {"unreadable"}
    (run.path / "away").rename(run.path / "config.yaml")
    assert found(dog, run, 4600.0)[2] == {"unreadable"}
