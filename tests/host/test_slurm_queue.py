"""squeue's output, as it is printed for chains, arrays and jobs that never start."""

from datetime import datetime

import pytest

from moe_exp.host.slurm_queue import QueueError, parse_queue, read_queue, slurm_seconds, still_there

ARRAY = """\
4711_[5-22%1]|PENDING|N/A|1-00:00:00|INVALID|JobArrayTaskLimit
4711_4|RUNNING|2026-11-22T02:10:00|1-00:00:00|18:03:12|None
"""
CHAIN = """\
4713|PENDING|2026-11-24T02:00:00|12:00:00|12:00:00|Dependency
4712|PENDING|2026-11-23T01:30:00|12:00:00|12:00:00|Priority
4711|COMPLETING|2026-11-22T02:10:00|12:00:00|0:00|None
"""


def test_array_of_which_one_runs():
    queue = parse_queue(ARRAY)
    assert [job.name for job in queue.running] == ["4711_4"]
    assert queue.running[0].start == datetime(2026, 11, 22, 2, 10).astimezone()
    assert [(job.num_tasks, job.start) for job in queue.coming] == [(18, None)]
    assert queue.scheduled_seconds == 18 * 86400 + 18 * 3600 + 3 * 60 + 12
    assert queue.next_start is None


def test_chain_between_two_jobs():
    queue = parse_queue(CHAIN)
    assert queue.running == []
    assert [job.name for job in queue.coming] == ["4713", "4712"]
    assert [job.name for job in queue.ending] == ["4711"]
    assert queue.next_start == datetime(2026, 11, 23, 1, 30).astimezone()
    assert queue.limit_seconds == 43200
    queue = parse_queue("1|PENDING|N/A|1:00|1:00|ReqNodeNotAvail, UnavailableNodes:node[1-2]|x")
    assert queue.coming[0].text == "job 1 pending (ReqNodeNotAvail, UnavailableNodes:node[1-2]|x)"


STUCK = (
    "DependencyNeverSatisfied", "launch failed requeued held", "job requeued in held state",
    "user env retrieval failed requeued held", "JobHeldUser", "JobHeldAdmin", "PartitionTimeLimit",
    "QOSMaxWallDurationPerJobLimit", "AssocGrpCPUMinutesLimit", "BadConstraints", "QOSMinGRES",
)  # fmt: skip
IN_TURN = (
    "Priority", "Resources", "Dependency", "BeginTime", "JobArrayTaskLimit", "QOSMaxJobsPerUserLimit",
    "AssocGrpGRES", "AssocGrpCPURunMinutesLimit", "QOSGrpCPURunMinutesLimit", "Reservation",
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "reason", "kind"),
    [
        *(("PENDING", reason, "stuck") for reason in STUCK),
        *(("PENDING", reason, "coming") for reason in IN_TURN),
        ("REQUEUE_HOLD", "None", "stuck"),
        ("SUSPENDED", "None", "stuck"),
    ],
)
def test_jobs_that_wait_for_their_turn_or_for_somebody(state, reason, kind):
    queue = parse_queue(f"1_[2-4%1]|{state}|N/A|UNLIMITED|INVALID|{reason}")
    assert queue.all_jobs == getattr(queue, kind) and len(queue.all_jobs) == 1


@pytest.mark.parametrize(
    ("name", "number"),
    [("1", 1), ("1_4", 1), ("1_[4-20%1]", 17), ("1_[4]", 1), ("1_[1,4-8:4%1]", 3), ("1_[2,5,7-9]", 5)],
)
def test_tasks_of_a_name(name, number):
    (job,) = parse_queue(f"{name}|PENDING|N/A|1:00:00|1:00:00|Priority").coming
    assert job.num_tasks == number


def test_time_spans():
    assert [slurm_seconds(text) for text in ("2-03:04:05", "3:04:05", "4:05")] == [183845, 11045, 245]
    assert [slurm_seconds(text) for text in ("UNLIMITED", "INVALID", "NOT_SET")] == [None] * 3


def test_what_somebody_likes_to_see_of_the_queue_is_not_all_that_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    program, unless = tmp_path / "squeue", '#!/bin/sh\n[ -n "$SQUEUE_STATES" ] ||'
    program.write_text(f"{unless} echo '1|PENDING|N/A|1:00:00|1:00:00|Priority'\n")
    program.chmod(0o755)
    assert len(read_queue("name").coming) == 1
    program.write_text(f"{unless} echo 7\n")
    assert still_there(["7", "8"]) == ["7"]


def test_slurm_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(QueueError, match=r"squeue: exit code 1: slurm_load_jobs error: Unable to contact"):
        read_queue("name")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QueueError, match=r"squeue: is not on PATH\. Fix: "):
        read_queue("name", "user")
