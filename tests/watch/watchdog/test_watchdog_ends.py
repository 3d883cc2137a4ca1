"""The watchdog on a run whose last start has failed, and where there is no squeue to ask."""

import json
import os

import pytest
import yaml

from helpers.watch.watched_run import DAY, SETTINGS, WAITING, found, running
from moe_exp.watch.watchdog.alerts import AlertFile
from moe_exp.watch.watchdog.watchdog import Watchdog


@pytest.mark.parametrize("jobs", ["", WAITING, None], ids=["no job left", "a job waits", "without SLURM"])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_killed_rank_is_one_problem(max_restarts, jobs, run, queue, tmp_path):
    """Also where it has taken a second rank and the job with it."""
    (run.path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | {"max_restarts": max_restarts}))
    queue.set(running(run) + WAITING)
    watched = (run.path, "" if jobs is None else "big_run")
    dog = Watchdog([watched], [AlertFile(tmp_path / "alerts.log")], folder=tmp_path / "state")
    assert found(dog, run, 4350.0) == (set(), set(), set())
    for rank in (3, 5):
        run.event("rank_failed", 2020, 4360.0, rank=rank, host="node-a", cause="SIGKILL")
    queue.set(jobs or "")
    assert found(dog, run, 4400.0) == ({"failed"}, {"failed"}, set())
    (problem,) = (line for line in (tmp_path / "alerts.log").read_text().splitlines() if "PROBLEM" in line)
    event = f"rank_failed at iteration 2,020, {run.time(4360.0)} (2 times)"
    event += ": rank: 3, host: node-a, cause: SIGKILL"
    since = "no job named big_run is running or queued" if jobs == "" else "no other job has started since"
    hint = "" if max_restarts else "; MAX_RESTARTS=3 restarts the ranks without a new job"
    assert problem.strip() == f"PROBLEM: its last start failed 40 s ago ({event}), and {since}{hint}"
    assert found(dog, run, 4500.0) == ({"failed"}, set(), set())
    run.event("resume", 2000, 4600.0)
    queue.set(running(run, since=4590.0))
    assert found(dog, run, 4700.0) == (set(), set(), {"failed"})


def test_a_start_that_has_failed_is_not_well_until_another(dog, run, queue):
    dog.runs = [(run.path, "")]
    run.event("bad_step", 2030, 4350.0, samples=[[1, 8]])
    run.event("too_many_bad_steps", 2039, 4360.0, in_a_row=10)
    found(dog, run, 4400.0)
    (look,) = dog.check(now=run.begin + 4360 + 1680)
    event = f"too_many_bad_steps at iteration 2,039, {run.time(4360.0)}: in_a_row: 10"
    told = f"its last start failed 28 min ago ({event}), and no other job has started since"
    assert look.found == {"failed": told}
    assert not look.is_well
    run.event("resume", 2000, 6100.0)
    assert found(dog, run, 6200.0) == (set(), set(), {"failed"})


def test_a_launcher_that_starts_the_ranks_again_has_not_failed(dog, run, queue):
    dog.runs = [(run.path, "")]
    run.event("rank_failed", 2020, 4350.0, rank=1, cause="SIGKILL")
    run.event("restart", 2020, 4350.0, number=1)
    run.event("hang", 2020, 4390.0, ranks=[1])
    assert "failed" not in found(dog, run, 4400.0)[0]
    assert "failed" in found(dog, run, 4390.0 + 400)[0]  # and nobody has ended its ranks


def test_a_failure_that_only_the_launcher_has_noted(dog, run, queue):
    dog.runs = [(run.path, "")]
    summary = run.path / "summary.json"
    summary.write_text(json.dumps({"status": "failed"}))
    os.utime(summary, (run.begin + 4200, run.begin + 4200))  # of the start before
    assert found(dog, run, 4400.0)[0] == set()
    os.utime(summary, (run.begin + 4350, run.begin + 4350))
    (look,) = dog.check(now=run.begin + 4400)
    assert list(look.found) == ["failed"] and "ends about" not in look.report()
    (run.path / "provenance.json").write_text(json.dumps({"starts": [{"time": run.time(4380)}]}))
    # another start is on its way to its first record
    assert found(dog, run, 4400.0) == (set(), set(), {"failed"})


def test_in_a_chain_the_next_job_is_the_new_start(dog, run, queue):
    run.event("stop", 2020, 4350.0, reason="SIGUSR1")
    run.event("end", 2020, 4350.0, status="stopped")
    queue.set(WAITING)
    assert found(dog, run, 4400.0)[0] == set()  # a stop is fine where a job is queued
    run.event("resume", 2020, 5000.0)
    run.event("rank_failed", 2020, 5010.0, rank=1, cause="ValueError: no")
    queue.set(running(run, since=4900.0) + WAITING)
    assert "failed" in found(dog, run, 5100.0)[0]
    queue.set(running(run, since=5200.0) + WAITING)
    assert "failed" not in found(dog, run, 5300.0)[0]


def test_without_a_squeue_a_run_is_judged_by_its_files(dog, run, queue, monkeypatch):
    monkeypatch.setenv("PATH", str(run.path))
    (look,) = dog.check(now=run.begin + 4400)
    assert look.found["no_squeue"].startswith("squeue: is not on PATH. Fix: ")
    assert set(look.news) == {"no_squeue"} and not look.is_well
    assert found(dog, run, DAY)[0] == {"no_squeue", "stuck"}
