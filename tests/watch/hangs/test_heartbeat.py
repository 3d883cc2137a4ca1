"""What a rank notes of itself, and when that is too long ago."""

import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from moe_exp.host.exit_codes import HEARTBEATS
from moe_exp.watch.hangs import heartbeat
from moe_exp.watch.hangs.heartbeat import PAUSED, PHASES, Heartbeat, HeartbeatWriter, read_beats
from moe_exp.watch.hangs.monitor import LEAST_SECONDS, elapsed_seconds, limit_seconds

BEAT = Heartbeat(
    rank=3, pid=1, phase="data", iteration=7, num_microbatches=4, since=100.0, spent=5.0,
    durations=(1.0, 2.0, 90.0),
)  # fmt: skip


def test_reader_finds_what_was_noted(tmp_path):
    HeartbeatWriter(tmp_path, 12).begin(9, 1)
    heart = HeartbeatWriter(tmp_path, 12)  # a new process begins anew
    (start,) = read_beats(tmp_path)
    found = (start.rank, start.pid, start.durations, start.phase, start.iteration)
    assert found == (12, os.getpid(), (), "start_up", 0)
    before = time.monotonic()
    heart.begin(41, 8)
    heart.enter("optimizer")
    (beat,) = read_beats(tmp_path)
    assert (beat.phase, beat.iteration, beat.num_microbatches, beat.durations) == ("optimizer", 41, 8, ())
    assert before <= beat.since <= time.monotonic()
    assert 0 <= beat.spent <= beat.since - before
    for phase in PHASES:  # each fits into the file
        heart.enter(phase)
        assert read_beats(tmp_path)[0].phase == phase


def test_iterations_are_kept_per_microbatch_and_without_evaluations(tmp_path):
    heart = HeartbeatWriter(tmp_path, 0)
    start = time.monotonic()
    for iteration in range(1, 4):
        heart.begin(iteration, 2)
        time.sleep(0.02)
        heart.enter("evaluation")
        time.sleep(0.1)
    heart.begin(4, 2)
    durations = read_beats(tmp_path)[0].durations
    assert len(durations) == 3
    assert all(seconds >= 0.01 for seconds in durations)
    assert 2 * sum(durations) < time.monotonic() - start - 0.3
    for iteration in range(5, 100):
        heart.begin(iteration, 2)
    assert len(read_beats(tmp_path)[0].durations) == 32


def test_without_a_launcher_nothing_is_done(monkeypatch):
    monkeypatch.delenv(HEARTBEATS, raising=False)
    heartbeat.start()
    heartbeat.begin(1, 1)
    heartbeat.enter("data")
    with heartbeat.during(heartbeat.PAUSED):
        pass
    assert heartbeat._heart is None


NESTED = """
import os, sys
from pathlib import Path
from moe_exp.watch.hangs import heartbeat
heartbeat.start()
read = lambda: heartbeat.read_beats(Path(os.environ["MOE_EXP_HEARTBEATS"]))[0].phase
heartbeat.begin(1, 1)
seen = [read()]
@heartbeat.during("evaluation")
def evaluate():
    heartbeat.enter("data")
    seen.append(read())
    with heartbeat.during(heartbeat.PAUSED):
        seen.append(read())
    seen.append(read())
evaluate()
seen.append(read())
try:
    with heartbeat.during("checkpoint"):
        raise OSError
except OSError:
    seen.append(read())
print(*seen)
"""


def test_what_runs_inside_a_phase_is_part_of_it(tmp_path):
    environ = os.environ | {HEARTBEATS: str(tmp_path), "RANK": "2"}
    printed = subprocess.check_output([sys.executable, "-c", NESTED], env=environ, text=True)
    assert printed.split() == ["data", "evaluation", PAUSED, "evaluation", "data", "data"]
    assert (tmp_path / "rank_00002.pipe").is_fifo()


@pytest.mark.parametrize(
    ("changes", "timeout", "other", "expected"),
    [
        ({"num_microbatches": 16}, "auto", 1500, 10 * 2.0 * 16),  # the median, by micro-batch
        ({"durations": (0.1, 0.1, 0.1)}, "auto", 1500, LEAST_SECONDS),  # a small model's hiccup is no hang
        ({"durations": (1.0, 2.0)}, "auto", 1500, 1500.0),  # the first iterations compile and allocate
        ({"num_microbatches": 64}, "auto", 1500, 10 * 2.0 * 64),  # the batch has grown
        ({}, "5", 1500, 5.0),
        ({"durations": ()}, "5", 1500, 1500.0),
        ({"phase": "evaluation"}, "5", 1500, 1500.0),
        ({"phase": "checkpoint"}, "auto", 1500, 1500.0),
        ({"phase": "checkpoint"}, "auto", None, math.inf),
        ({"phase": PAUSED}, "5", 1500, math.inf),
        ({}, "none", 1500, math.inf),
    ],
)
def test_limits(changes, timeout, other, expected):
    assert limit_seconds(replace(BEAT, **changes), timeout, other) == expected


def test_elapsed_time():
    assert elapsed_seconds(BEAT, 130.0, 0.0) == 35.0  # of the iteration, over its phases
    assert elapsed_seconds(replace(BEAT, phase="checkpoint"), 130.0, 0.0) == 30.0
    assert elapsed_seconds(BEAT, 130.0, 128.0) == 7.0  # the launcher itself has not run before 128
