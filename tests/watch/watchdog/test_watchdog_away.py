"""The watchdog without a readable run folder: away, hanging, not created yet; and strange records."""

import time

import pytest
import yaml

from helpers.watch.watched_run import DAY, PENDING, SETTINGS, Run, found, running
from moe_exp.cli import main
from moe_exp.watch.watchdog import watchdog
from moe_exp.watch.watchdog.watchdog import Watchdog


def test_what_was_wrong_is_not_over_because_nobody_can_look(dog, run, queue):
    assert found(dog, run, 4400.0)[1] == {"not_scheduled"}
    (run.path / "config.yaml").rename(run.path / "away")
    assert found(dog, run, 4500.0) == ({"not_scheduled", "unreadable"}, {"unreadable"}, set())
    (run.path / "away").rename(run.path / "config.yaml")
    assert found(dog, run, 4600.0) == ({"not_scheduled"}, set(), {"unreadable"})


def test_a_file_system_that_does_not_answer_is_told(dog, run, queue, monkeypatch):
    monkeypatch.setattr(watchdog, "_READ_SECONDS", 0.2)
    found(dog, run, 4400.0)
    monkeypatch.setattr("moe_exp.watch.watchdog.run.regular", lambda path: time.sleep(5) or path)
    (look,) = dog.check(now=run.begin + 4500)
    assert look.news["unreadable"] == "cannot be read: the file system did not respond in 0 s"


def test_records_that_nobody_has_thought_of_are_told(dog, run, queue):
    (run.path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | {"save_interval": [1]}))
    assert "cannot be read: TypeError: " in dog.check(now=run.begin + 4400)[0].found["unreadable"]


def test_from_cron_a_run_that_is_away_is_told_and_is_no_bad_command(run, queue, tmp_path, capsys):
    state, alerts = f"--state={tmp_path / 'state'}", tmp_path / "alerts.log"
    command = ["watch", "run", str(run.path), state, f"--alert-file={alerts}"]
    main(command)
    run.path.rename(tmp_path / "unmounted")
    assert main(command) == 1
    assert "PROBLEM: cannot be read: RUN_DIR=" in alerts.read_text()
    assert main(["watch", "run", str(tmp_path / "typo"), state]) == 2


@pytest.mark.parametrize("submitted", [False, True], ids=["by name", "by the ids that moe-exp slurm wrote"])
def test_a_queued_run_without_a_folder_is_well(submitted, queue, tmp_path, capsys):
    path, alerts = tmp_path / "later", tmp_path / "alerts.log"
    command = ["watch", "run", str(path), "--state", str(tmp_path / "state"), "--alert-file", str(alerts)]
    if submitted:
        (path / "slurm").mkdir(parents=True)
        (path / "slurm" / "submitted").write_text("102\n103\n")
    else:
        command += ["--slurm-name", "big_run"]
    queue.set(PENDING)
    assert main([*command, "--test-alert"]) == 0
    assert capsys.readouterr().err == ""
    assert alerts.read_text().count("moe-exp") == 1
    assert main(command) == 0
    assert capsys.readouterr().out == "later: well; queued: job 102 pending (Priority), no run folder yet\n"
    assert ("--jobs=102,103" if submitted else "--name=big_run") in (tmp_path / "bin" / "called").read_text()
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert alerts.read_text().count("moe-exp") == 1  # the test, and nothing else
    run = Run(tmp_path / "later")
    run.event("start", 0, 10 * DAY)
    queue.set(running(run, since=10 * DAY))
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("later: well; iteration 0 of 40,000")


def test_a_name_that_is_neither_a_folder_nor_a_queued_job(queue, run, tmp_path, capsys):
    """A typo ends with 2 and is alerted, also from cron; the other runs are checked all the same."""
    alerts = tmp_path / "alerts.log"
    command = ["watch", "run", str(run.path), str(tmp_path / "typo"), "--state", str(tmp_path / "state")]
    command += ["--slurm-name", "big_run", "--slurm-name", "other", "--alert-file", str(alerts)]
    line = f"RUN_DIR={tmp_path / 'typo'}: is not a run folder (config.yaml not found), and no job named other"
    for _ in range(2):
        assert main(command) == 2
        printed = capsys.readouterr()
        (error,) = printed.err.splitlines()
        assert error.startswith(f"moe-exp watch: {line} is queued. Fix: ")
        assert printed.out.startswith("big_run: PROBLEMS; iteration 2,020")
    assert alerts.read_text().count(f"PROBLEM: {line}") == 1
    assert main([*command, "--test-alert"]) == 0
    assert f"moe-exp watch: warning: {line}" in capsys.readouterr().err


def test_a_queued_run_whose_folder_never_comes(queue, tmp_path):
    queue.begin = int(time.time()) - 10 * DAY

    def look(text, at):
        queue.set(text)
        dog = Watchdog([(tmp_path / "later", "big_run")], [], folder=tmp_path / "state")
        (check,) = dog.check(now=queue.begin + at)
        return check.found

    assert look(PENDING, 0.0) == {}
    assert look(PENDING, 0.9 * DAY) == {}
    text = "no job has run for 26 h 24 min: job 102 pending (Priority)"
    assert look(PENDING, 1.1 * DAY) == {"waiting": text}
    assert set(look(PENDING.replace("Priority", "JobHeldUser"), 1.1 * DAY)) == {"never_starts"}
    started = running(queue, since=1.2 * DAY)
    assert look(started, 1.2 * DAY + 1700) == {}
    text = f"job 101_1 has been running for 32 min, but RUN_DIR={tmp_path / 'later'}: is not a run folder"
    assert look(started, 1.2 * DAY + 1900)["no_folder"].startswith(text)
    text = "no job named big_run is running or queued, and the run folder was never created"
    assert look("", 1.3 * DAY) == {"not_scheduled": text}
    queue.lines.unlink()
    silent = Watchdog([(tmp_path / "later", "big_run")], [], folder=tmp_path / "state")
    (check,) = silent.check(now=queue.begin + 1.4 * DAY)
    assert check.found == {}
    assert check.report() == "later: well; no run folder yet; SLURM does not respond"
    (check,) = silent.check(now=queue.begin + 1.4 * DAY + 1000)
    assert set(check.found) == {"slurm_silent"}


def test_without_squeue_a_missing_folder_is_unknown_unless_seen_queued(queue, tmp_path, monkeypatch):
    """As under cron, whose PATH lacks it."""

    def look(name):
        (check,) = Watchdog([(tmp_path / name, "big_run")], [], folder=tmp_path / "state").check()
        return check

    queue.set(PENDING)
    assert not look("seen").is_unknown
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(look("seen").found) == {"no_squeue"}
    texts = look("later").found
    assert "is not a run folder" in texts["unknown"] and "--slurm-name" not in texts["unknown"]
    assert "squeue: is not on PATH" in texts["no_squeue"]
