"""The watchdog over run folders and a squeue that prints what a test says: problems, and their end."""

import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest
import yaml

from helpers.watch.watched_run import DAY, HOUR, PENDING, SETTINGS, WAITING, Run, found, running
from helpers.whole_runs import ROOT
from moe_exp.cli import main
from moe_exp.host.slurm_queue import parse_queue
from moe_exp.watch.watchdog import rules
from moe_exp.watch.watchdog.alerts import AlertFile
from moe_exp.watch.watchdog.rules import Memory
from moe_exp.watch.watchdog.run import Disk, disk_of, num_switches, read_tail, view_run, with_sample


def test_a_job_that_ended_at_night_with_nothing_behind_it(dog, run, queue, tmp_path):
    queue.set(running(run) + WAITING)
    assert found(dog, run, 4400.0) == (set(), set(), set())
    assert "--name=big_run --format=%i|%T|%S|%l|%L|%r" in (tmp_path / "bin" / "called").read_text()
    queue.set("")
    missing = {"not_scheduled"}
    assert found(dog, run, 5000.0) == (missing, missing, set())
    assert found(dog, run, 6000.0) == (missing, set(), set())  # told once
    assert found(dog, run, 5000.0 + 6 * HOUR) == (missing, missing, set())  # and again after six hours
    queue.set(running(run, since=5100.0 + 6 * HOUR) + WAITING)
    assert found(dog, run, 5200.0 + 6 * HOUR) == (set(), set(), missing)  # the end of it, once
    assert found(dog, run, 5300.0 + 6 * HOUR) == (set(), set(), set())
    queue.set("")
    # back within half an hour of the last report: not told yet
    assert found(dog, run, 5400.0 + 6 * HOUR) == (missing, set(), set())
    assert found(dog, run, 6900.0 + 6 * HOUR) == (missing, missing, set())
    assert found(dog, run, 9000.0 + 6 * HOUR) == (missing, set(), set())  # it is still the same
    text = (tmp_path / "alerts.log").read_text()
    assert text.count("PROBLEM: no job named big_run is running or queued, at iteration 2,020 of 40,000") == 3
    assert text.count("over: no job named big_run is running") == 1
    assert "moe-exp: 1 problem in big_run\n" in text


@pytest.mark.parametrize(
    ("jobs", "looks"),
    [
        # 3 log intervals of 40 s, 20 s of evaluation, twice 30 s of a save, and ten minutes: 800 s
        (lambda run: running(run, since=-60.0), {5090.0: set(), 5110.0: {"stuck"}}),
        (lambda run: running(run, since=20000.0), {22000.0: set(), 22700.0: {"stuck"}}),  # has just started
        (lambda run: PENDING, {4400.0: set(), 4400 + 0.9 * DAY: set(), 4400 + 1.1 * DAY: {"waiting"}}),
        (lambda run: PENDING.replace("Priority", "DependencyNeverSatisfied"), {4400.0: {"never_starts"}}),
    ],
    ids=["running", "just started", "waiting", "never starts"],
)
def test_problems_of_time(jobs, looks, dog, run, queue):
    queue.set(jobs(run) + WAITING)
    for at, expected in looks.items():
        assert found(dog, run, at)[0] == expected


def test_events_alone_are_no_progress(dog, run, queue):
    queue.set(running(run, since=-60.0) + WAITING)
    found(dog, run, 4400.0)
    run.event("rank_failed", 2020, 5100.0, rank=3)
    run.event("restart", 2020, 5100.0, number=1)
    assert found(dog, run, 5150.0)[0] == {"stuck", "event rank_failed"}
    run.train(2040, 2040, 5200.0)
    assert found(dog, run, 5300.0)[2] == {"stuck"}


def test_a_chain_that_ends_before_the_run(dog, run, queue):
    queue.set(running(run, left="1:00:00", name="101_1"))
    (look,) = dog.check(now=run.begin + 4400)
    # 37,980 iterations of 2 s, an evaluation of 10 forward passes and a save of 30 s every 1000
    assert look.found == {"chain_short": "its jobs end in 1 h, but the run needs 21 h 29 min: submit 1 more"}
    queue.set(running(run, left="1:00:00") + WAITING)
    assert found(dog, run, 4500.0)[0] == set()


def test_a_chain_that_lasts_a_day_is_not_too_short_yet(dog, run, queue):
    """A run that needs a week more: its jobs end in 25 hours, then in 23."""
    run.train(2040, 12000, 3950.0, ms=22000.0)
    for left, expected in (("1-01:00:00", set()), ("23:00:00", {"chain_short"})):
        queue.set(running(run, left=left))
        assert found(dog, run, 4000.0)[0] == expected


def test_a_finished_run_needs_no_job(dog, run, queue):
    run.train(2040, 40000, 90000.0)
    run.event("end", 40000, 90000.0, status="finished")
    assert found(dog, run, 20 * DAY) == (set(), set(), set())
    settings = yaml.safe_load((run.path / "config.yaml").read_text())
    (run.path / "config.yaml").write_text(yaml.safe_dump(settings | {"train_iters": 50000}))
    assert found(dog, run, 20 * DAY + 60)[0] == {"not_scheduled"}


def test_slurm_that_does_not_answer_is_told_when_it_lasts(dog, run, queue):
    queue.lines.unlink()
    assert found(dog, run, 4400.0)[0] == set()
    assert "SLURM does not respond" in dog.check(now=run.begin + 4401)[0].report()
    assert found(dog, run, 4400.0 + 600)[0] == set()
    assert found(dog, run, 4400.0 + 960)[0] == {"slurm_silent"}


def test_starts_that_get_nowhere(dog, run, queue):
    queue.set(running(run, since=7000.0) + WAITING)
    for at in (5000.0, 6000.0, 7000.0):
        run.event("resume", 2000, at)
    run.train(2020, 2020, 7100.0)
    assert found(dog, run, 7200.0)[0] == {"circles"}
    run.event("checkpoint", 2020, 7300.0, seconds=5.0)
    assert found(dog, run, 7400.0) == (set(), set(), {"circles"})


def test_events_are_told_once_and_counted(dog, run, queue, tmp_path):
    queue.set(running(run) + WAITING)
    found(dog, run, 4350.0)
    run.event("spike", 2020, 4360.0, lm_loss=7.34, samples=[1, 2])
    run.event("checkpoint_failed", 2020, 4361.0, reason="No space left on device")
    new = {"event spike", "event checkpoint_failed"}
    assert found(dog, run, 4400.0) == (new, new, set())
    assert found(dog, run, 4500.0) == (set(), set(), set())
    run.event("spike", 2020, 4560.0, lm_loss=8.0)
    run.event("spike", 2020, 4561.0, lm_loss=8.720012345, recent_losses=[0.68841234567])
    assert found(dog, run, 4600.0) == ({"event spike"}, set(), set())
    run.train(2040, 2040, 4400.0 + 6 * HOUR)
    assert found(dog, run, 4400.0 + 6 * HOUR)[1] == {"event spike"}
    text = (tmp_path / "alerts.log").read_text()
    assert "spike at iteration 2,020" in text
    assert "(2 times): lm_loss: 8.72, recent_losses: 0.68841\n" in text
    assert "reason: No space left on device" in text
    assert "over:" not in text


def test_a_channel_that_fails_is_named_by_the_others(dog, run, queue, tmp_path, capsys):
    (tmp_path / "no").mkdir()
    dog.channels = [AlertFile(tmp_path / "no"), AlertFile(tmp_path / "alerts.log")]
    assert found(dog, run, 4400.0)[1] == {"not_scheduled"}
    reason = f"via file {tmp_path / 'no'} failed: IsADirectoryError"
    assert reason in capsys.readouterr().err
    key = f"channel file {tmp_path / 'no'}"
    assert found(dog, run, 4500.0) == ({"not_scheduled", key}, {key}, set())
    dog.channels = [AlertFile(tmp_path / "no")]
    assert found(dog, run, 4500.0 + 7 * HOUR)[1] == {"not_scheduled", key}
    # nobody was reached: again at the next look
    assert found(dog, run, 4600.0 + 7 * HOUR)[1] == {"not_scheduled", key}


def test_one_message_for_several_runs(dog, run, queue, tmp_path):
    other = Run(tmp_path / "other")
    other.event("start", 0, 0.0)
    dog.runs = [(run.path, "big_run"), (other.path, "other")]
    dog.check(now=run.begin + 4400)
    heads = [line for line in (tmp_path / "alerts.log").read_text().splitlines() if not line.startswith(" ")]
    assert [line.partition(" ")[2] for line in heads] == ["moe-exp: 2 problems in big_run, other"]


def test_ranks_that_a_hang_has_ended_did_nothing(dog, run, queue):
    queue.set(running(run) + WAITING)
    found(dog, run, 4350.0)
    run.event("hang", 2020, 4360.0, ranks=[5], hosts=["node-b"])
    run.event("rank_failed", 2020, 4361.0, rank=0, host="node-a", cause="SIGKILL")
    run.event("restart", 2020, 4361.0, number=1)
    assert found(dog, run, 4400.0)[1] == {"event hang"}
    run.event("rank_failed", 2020, 9000.0, rank=1, host="node-a", cause="SIGKILL")
    assert found(dog, run, 9100.0)[1] >= {"failed"}


def test_a_failed_preflight_is_told(dog, run, queue):
    queue.set(running(run) + WAITING)
    found(dog, run, 4350.0)
    run.event("preflight", 2000, 4360.0, grade="warning", findings=[])
    assert found(dog, run, 4400.0)[1] == set()
    run.event("preflight", 2000, 4410.0, grade="failed", findings=["failed: node-b (node 1): matmul"])
    assert found(dog, run, 4450.0)[1] == {"failed"}  # and nothing has begun since


def test_a_job_that_goes_back_into_the_queue_is_no_missing_job(dog, run, queue):
    queue.set(running(run))
    found(dog, run, 4400.0)
    queue.set(running(run).replace("RUNNING", "COMPLETING"))
    assert "not_scheduled" not in found(dog, run, 4500.0)[0]
    # it was the last one, and a node does not come clear
    assert "not_scheduled" in found(dog, run, 4400.0 + 1900)[0]


def test_without_slurm(dog, run, queue):
    dog.runs = [(run.path, "")]
    assert found(dog, run, 4400.0)[0] == set()
    assert found(dog, run, 9000.0)[0] == {"stuck"}
    run.event("end", 2020, 9100.0, status="stopped")
    assert found(dog, run, 9200.0)[0] == {"stopped"}


def sight(run, *, text="", free=10**12, rate=None, measured=True, at=4400.0):
    view = view_run(run.path, now=run.begin + at)
    return rules.Sight(view, Disk(free, rate, measured), parse_queue(text))


def test_the_disk_is_full_before_the_run_ends(run):
    day = sight(run, rate=10**12 / DAY)  # the run needs 21 h 29 min
    assert "disk_filling" not in rules.problems_of(day, Memory(), rules.Limits(), "x")
    half = sight(run, rate=2 * 10**12 / DAY)
    said = "the disk will be full in 12 h at the rate of the last hours (1 TB free); "
    said += "the run needs another 21 h 29 min"
    assert rules.problems_of(half, Memory(), rules.Limits(), "x")["disk_filling"] == said
    small = rules.problems_of(sight(run, free=9 * 10**5), Memory(), rules.Limits(), "x")
    assert small["checkpoint_does_not_fit"] == "the disk has 900 kB free, a checkpoint needs 1 MB"


def test_fill_rate_measured_and_planned(run):
    view = view_run(run.path, now=run.begin + 4400)
    samples = []
    for minute in range(0, 24 * 60, 5):
        samples = with_sample(samples, minute * 60.0, 10**12 - minute * 10**8)
    assert len(samples) <= 151
    disk = disk_of(view, samples)
    assert disk.measured
    assert disk.bytes_per_second == pytest.approx(10**8 / 60)
    assert disk.full_in_seconds == pytest.approx((10**12 - 1435 * 10**8) * 60 / 10**8)
    early = disk_of(view, samples[:1])
    # a checkpoint of 1 MB every 1000 iterations of 2 s, with 10 forward passes and a save of 30 s
    assert (early.measured, early.bytes_per_second) == (False, pytest.approx(10**6 / (2000 + 20 / 3 + 30)))


def test_the_first_checkpoints_are_no_rate_where_old_ones_are_removed(run):
    (run.path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | {"keep_last": 3}))
    for number in range(1, 4):
        run.event("checkpoint", 2000 + number, 4400.0 + 7200 * number, seconds=30.0, bytes=10**12)
    hours = [(run.begin + hour * HOUR, 10**13 - (hour // 2) * 10**12) for hour in range(1, 9)]
    # the fourth was 7.2 hours after the start
    assert disk_of(view_run(run.path), hours).full_in_seconds is None
    later = [(at + 8 * HOUR, 6 * 10**12) for at, _ in hours]
    disk = disk_of(view_run(run.path), hours + later)
    assert (disk.measured, disk.full_in_seconds) == (True, None)
    disk = disk_of(view_run(run.path), hours + [(at, free - 10**12) for at, free in later])  # others write
    assert disk.bytes_per_second == pytest.approx(10**12 / (8 * HOUR))


def test_end_with_the_gaps_between_jobs(run):
    run.event("end", 2020, 4400.0, status="stopped")
    run.event("resume", 2020, 4400.0 + 1800.0)
    run.train(2040, 2040, 6300.0)
    # 37,960 iterations, of which 10 h fit into this job; one more after a gap of half an hour
    text, training = running(run, since=6100.0, left="10:00:00") + WAITING, 37960 * (2 + 0.02 / 3 + 0.03)
    seconds = rules.wall_seconds_left(sight(run, text=text, at=6400.0))
    assert seconds == pytest.approx(training + 1800)
    # none runs: the wait as SLURM expects it takes the place of the first gap
    start = datetime.fromtimestamp(run.begin + 6400 + 7200)
    text = f"9|PENDING|{start:%Y-%m-%dT%H:%M:%S}|12:00:00|INVALID|Priority"
    seconds = rules.wall_seconds_left(sight(run, text=text, at=6400.0))
    assert seconds == pytest.approx(training + 7200 + 1800, abs=2.0)


def test_number_of_jobs_that_follow():
    cases = [(10, 20, 5), (21, 20, 5), (31, 20, 5), (31, 20, None)]
    assert [num_switches(*case) for case in cases] == [0, 1, 3, 1]


def test_cut_off_lines_are_left_out(run):
    with run.metrics.open("a") as file:
        file.write('{"kind": "train", "iteration": 20')
    events, train = read_tail(run.metrics)
    assert [event["event"] for event in events] == ["start", "checkpoint"]
    assert train[-1]["iteration"] == 2020


def test_time_spans_for_people():
    spans = [rules.span(seconds) for seconds in (40, 300, 3 * 3600 + 600, 7200, 51 * 3600, -5)]
    assert spans == ["40 s", "5 min", "3 h 10 min", "2 h", "2 d 3 h", "0 s"]


def test_command_from_cron(run, queue, tmp_path, capsys):
    run.begin = time.time() - 4400
    run.metrics.unlink()
    run.event("start", 0, 0.0)
    run.train(20, 2020, 4300.0)
    queue.set(running(run, since=-60.0) + WAITING)
    command = ["watch", "run", str(run.path), "--slurm-name", "big_run", "--state", str(tmp_path / "state")]
    command += ["--alert-file", str(tmp_path / "alerts.log")]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(command) == 0
    state = "2 s each; last record 2 min ago; job 101_1 is running, 29 queued; ends at about"
    assert f"big_run: well; iteration 2,020 of 40,000; {state}" in capsys.readouterr().out
    queue.set("")
    assert main([*command, "--quiet"]) == 1
    assert "no job named big_run is running or queued" in capsys.readouterr().out
    assert main([*command, "--test-alert"]) == 0
    assert capsys.readouterr().out == f"file {tmp_path / 'alerts.log'}: sent\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--again", "soon"], "--again=soon: must be a time."),
        (["--slurm-name", "a", "--slurm-name", "b"], "--slurm-name=a b: 2 names for 1 runs."),
        (["--slurm-name", "a,b"], "--slurm-name=a,b: must not contain commas or spaces."),
        (["--every", "-1"], "--every=-1: must be more than 0 seconds."),
        (["/no/such"], "RUN_DIR=/no/such: is not a run folder (config.yaml not found)."),
        (["--test-alert"], "--test-alert: requires a channel."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_command(flags, line, run, capsys, monkeypatch):
    monkeypatch.delenv("WATCH_WEBHOOK", raising=False)
    assert main(["watch", "run", str(run.path), *flags]) == 2
    assert f"moe-exp watch: {line}" in capsys.readouterr().err


def test_daemon_looks_again_and_again(run, queue, tmp_path):
    alerts = tmp_path / "alerts.log"
    command = [sys.executable, "-m", "moe_exp", "watch", "run", run.path, "--slurm-name", "x", "--every", "1"]
    command += ["--state", tmp_path / "state", "--alert-file", alerts]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        assert "no job named x is running or queued" in "".join(process.stdout.readline() for _ in range(4))
        run.begin = time.time()
        queue.set(PENDING + running(run, left="4-00:00:00"))
        while "over: no job named x" not in alerts.read_text():
            assert process.stdout.readline()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
