"""How a run ends when it is asked to, when a rank dies, and when it may not start."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from helpers import wait_for
from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import ranks_of, wait_until_gone
from moe_exp.engine import faults
from moe_exp.host.devices import device_label
from moe_exp.host.exit_codes import BAD_INPUT, FAILED, LAUNCH_TIME, TO_BE_CONTINUED
from moe_exp.host.processes import STOP_SIGNALS

# Found by every Python of the job: iterations that last until a signal has come.
SLOW = """
import os
import time
if "RANK" in os.environ:
    from moe_exp.data.samples.dataset import SampleStream
    batch = SampleStream.batch
    def slowly(self, first, num_samples):
        time.sleep(0.1)
        return batch(self, first, num_samples)
    SampleStream.batch = slowly
"""
# Rank FAILING_RANK raises in its third iteration.
FAILING = """
import os
if os.environ.get("RANK") == os.environ["FAILING_RANK"]:
    from moe_exp.data.samples.dataset import SampleStream
    batch, calls = SampleStream.batch, []
    def fail(self, first, num_samples):
        calls.append(first)
        if first >= 16:
            raise RuntimeError("the disk is on fire")
        return batch(self, first, num_samples)
    SampleStream.batch = fail
"""


@pytest.mark.parametrize(
    ("number", "to_all", "settings"),
    [
        (signal.SIGTERM, True, {"GPUS_PER_NODE": 2, "EP": 2, "NUM_WORKERS": 1}),
        (signal.SIGUSR1, False, {"GPUS_PER_NODE": 1}),
        (signal.SIGINT, False, {"GPUS_PER_NODE": 1}),
        (signal.SIGUSR1, True, {"GPUS_PER_NODE": 2, "ASYNC_SAVE": True}),
    ],
)
@pytest.mark.slow  # below a run ends by a signal too
def test_signal_saves_and_the_same_command_goes_on(number, to_all, settings, runs, tmp_path):
    """`to_all`: as a scheduler does that signals every process of a job, also those that read ahead."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    settings = {"TRAIN_ITERS": 18, "MAX_RESTARTS": 2, **settings}
    process = runs.start("stopped", PYTHONPATH=tmp_path, **settings)
    runs.wait_for_iteration("stopped", process, 3)
    children = psutil.Process(process.pid).children(recursive=True) if to_all else []
    pids = [process.pid, *(child.pid for child in children)]
    assert len(pids) == (1 + 1 + 2 + 2 * settings.get("NUM_WORKERS", 0) if to_all else 1)
    for pid in pids:
        os.kill(pid, number)
    stopped = runs.end("stopped", process, timeout=60)
    assert stopped.code == TO_BE_CONTINUED, stopped.text
    last = stopped.curve("iteration")[-1]
    assert 3 <= last < 18
    assert json.loads(stopped.folder.summary.read_text())["status"] == "stopped"
    events = stopped.events("stop", "end", "restart", "rank_failed")
    assert [(event["event"], event["iteration"]) for event in events] == [("stop", last), ("end", last)]
    assert (events[0]["reason"], events[1]["status"]) == (number.name, "stopped")
    assert f"stopping after iteration {last}: a rank received {number.name}" in stopped.stdout
    assert [path.name for path in stopped.folder.checkpoints.glob("iter_*")] == [f"iter_{last:07d}"]
    # Triton may have its say after it
    ours = [line for line in stopped.stderr.splitlines() if line.startswith("moe-exp: ")]
    assert ours[-1] == "moe-exp: stopping: the run saves a checkpoint and ends; a second Ctrl-C kills it"
    assert "Traceback" not in stopped.text
    again = runs.succeed("stopped", **settings)
    assert f"resumed from iteration {last} of" in again.stdout
    assert again.curve("iteration") == list(range(1, 19))


@pytest.mark.slow
def test_signal_before_the_agent_can_answer_it(runs):
    """It waits until there are ranks to pass it on to; by itself it would end the agent."""
    process, commands = runs.start("early", GPUS_PER_NODE=1), []
    while "moe_exp.launch.agent" not in commands:
        assert process.poll() is None, runs.printed("early")
        time.sleep(0.02)
        with contextlib.suppress(psutil.Error):  # a process has ended meanwhile
            children = psutil.Process(process.pid).children(recursive=True)
            commands = [word for child in children for word in child.cmdline()]
    process.send_signal(signal.SIGUSR1)
    early = runs.end("early", process)
    assert early.code == TO_BE_CONTINUED, early.text
    assert [event["reason"] for event in early.events("stop")] == ["SIGUSR1"]


@pytest.mark.slow
def test_exit_file_and_exit_duration(runs):
    settings = {"GPUS_PER_NODE": 1, "TRAIN_ITERS": 3000}
    process = runs.start("asked", **settings)
    runs.wait_for_iteration("asked", process, 2)
    folder = runs.folder("asked")
    folder.exit_file.touch()
    asked = runs.end("asked", process, timeout=60)
    assert asked.code == TO_BE_CONTINUED, asked.text
    assert not folder.exit_file.exists()
    assert "found the file EXIT in the run folder" in asked.stdout
    timed = runs.stopped("asked", EXIT_DURATION=1e-6, **settings)  # over by the time of the first iteration
    assert "reached EXIT_DURATION minutes since the launch" in timed.stdout
    first, second = timed.events("stop")
    assert (first["reason"], second["reason"]) == ("EXIT", "EXIT_DURATION")
    assert second["iteration"] == first["iteration"] + 1


def test_stop_rules(tmp_path, monkeypatch):
    clock, stop, file = SimpleNamespace(now=1000.0), faults.StopSignal(), tmp_path / "EXIT"
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setenv(LAUNCH_TIME, "700.0")  # of the launcher, before the last restart
    rules = faults.StopRules(stop, file, exit_minutes=6.0, exit_interval=10)
    other = faults.StopRules(stop, None, exit_minutes=6.0, exit_interval=10)
    assert rules.reason(9) == ""
    assert rules.reason(10) == other.reason(20) == "EXIT_INTERVAL"
    file.touch()
    clock.now += 0.9
    assert rules.reason(11) == ""  # looked for once a second
    clock.now += 0.2
    assert (rules.reason(12), other.reason(12)) == ("EXIT", "")
    rules.acknowledge("SIGTERM")
    assert file.exists()
    rules.acknowledge("EXIT")
    assert not file.exists()
    unreachable = Mock(exists=Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    assert faults.StopRules(stop, unreachable, exit_minutes=0, exit_interval=0).reason(13) == ""
    clock.now = 1059.0
    assert rules.reason(13) == ""
    clock.now = 1060.0
    assert (rules.reason(14), other.reason(14)) == ("EXIT_DURATION", "")
    stop.receive(signal.SIGUSR1, None)
    stop.receive(signal.SIGTERM, None)
    assert rules.reason(15) == other.reason(15) == "SIGUSR1"
    rules = {"EXIT", "EXIT_DURATION", "EXIT_INTERVAL"}
    assert set(faults.STOP_REASONS) >= rules | {number.name for number in STOP_SIGNALS}


@pytest.mark.slow
def test_a_stop_between_two_log_lines_is_logged(session_runs):
    settings = {"TRAIN_ITERS": 6, "WARMUP_ITERS": 0, "LOG_INTERVAL": 4, "EVAL_INTERVAL": 0}
    stopped = session_runs.stopped("between", EXIT_INTERVAL=3, **settings)
    assert stopped.curve("iteration") == [3]
    ended = session_runs.succeed("between", EXIT_INTERVAL=0, **settings)
    assert ended.curve("iteration") == [3, 4, 6]


# Every curve but the times.
CURVES = (
    "iteration", "consumed_samples", "lm_loss", "grad_norm", "params_norm", "learning_rate", "num_zeros",
    "experts",
)  # fmt: skip
FOUR_RANKS = {"TP": 2, "EP": 2, "ASYNC_SAVE": True, "SAVE_INTERVAL": 3}


@pytest.mark.parametrize(
    ("num_ranks", "num_kills", "settings"),
    [
        pytest.param(1, 1, {}, id="1", marks=pytest.mark.slow),
        pytest.param(2, 1, {"EP": 2}, id="2", marks=pytest.mark.slow),
        pytest.param(4, 2, FOUR_RANKS, id="4", marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_start_again_and_nothing_is_lost(num_ranks, num_kills, settings, runs, tmp_path):
    """At random moments; nor by the signal that ends the job after that: the same command goes on."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    seed = time.time_ns()
    chance = random.Random(seed)
    settings = {"GPUS_PER_NODE": num_ranks, "SAVE_INTERVAL": 4, "MBSZ": 4, **settings}
    settings |= {"TRAIN_ITERS": 14 * num_kills + 6, "DECAY_ITERS": 0}
    whole = runs.succeed("whole", **settings)
    process = runs.start("killed", MAX_RESTARTS=2, PYTHONPATH=tmp_path, **settings)
    killed = []
    for number in range(num_kills):
        runs.wait_for_start("killed", process, number + 1)
        at = 14 * number + chance.randint(2, 10)
        runs.wait_for_iteration("killed", process, at)
        time.sleep(chance.random() * 0.3)
        rank = chance.randrange(num_ranks)
        os.kill(ranks_of(process)[rank], signal.SIGKILL)
        killed.append((rank, at))
    runs.wait_for_start("killed", process, num_kills + 1)
    process.send_signal(signal.SIGUSR1)
    stopped = runs.end("killed", process, timeout=400)
    assert stopped.code == TO_BE_CONTINUED, f"seed {seed}: {stopped.text}"
    last = stopped.curve("iteration")[-1]
    assert f"stopping after iteration {last}: a rank received SIGUSR1" in stopped.stdout
    assert json.loads(stopped.folder.summary.read_text())["status"] == "stopped"
    run = runs.succeed("killed", **settings)
    assert f"resumed from iteration {last} of" in run.stdout
    for name in CURVES:
        assert run.curve(name) == whole.curve(name), f"seed {seed}: {name}"
    for event, (rank, at) in zip(run.events("rank_failed"), killed, strict=True):
        named = {"rank": rank, "cause": "SIGKILL", "host": socket.gethostname(), "device": "cpu"}
        assert {name: event[name] for name in named} == named
        assert at <= event["iteration"] <= at + 8, f"seed {seed}"
    assert [event["number"] for event in run.events("restart")] == list(range(1, num_kills + 1))


@pytest.mark.slow
def test_processes_that_stand_by_become_the_ranks_of_the_next_round(runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    settings = {"GPUS_PER_NODE": 2, "TRAIN_ITERS": 1000, "DECAY_ITERS": 0, "SAVE_INTERVAL": 4}
    process = runs.start("standby", MAX_RESTARTS=2, PYTHONPATH=tmp_path, **settings)
    runs.wait_for_start("standby", process, 1)
    first = ranks_of(process)

    def others() -> list[int]:
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found += [child.pid] if "RANK" in child.environ() else []
        return sorted({*found} - {*first.values()})

    wait_for(lambda: len(others()) == 2)
    waiting = others()
    os.kill(first[1], signal.SIGKILL)
    runs.wait_for_start("standby", process, 2)
    assert sorted(ranks_of(process).values()) == waiting
    wait_for(lambda: len(others()) == 4)  # new ones
    left = others()
    process.send_signal(signal.SIGTERM)
    assert runs.end("standby", process, timeout=400).code == TO_BE_CONTINUED
    wait_until_gone(left)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "settings"),
    [(1, {"GPUS_PER_NODE": 2, "EP": 2}), (2, {"GPUS_PER_NODE": 4, "TP": 2, "PP": 2})],
    ids=["EP2", "TP2-PP2"],
)
def test_error_of_the_rank_that_failed_comes_first(failing, settings, script_runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    run = script_runs.run("failed", PYTHONPATH=tmp_path, FAILING_RANK=failing, **settings)
    assert run.code == FAILED
    assert run.curve("iteration") == [1, 2]
    (named,), cause = run.events("rank_failed"), "RuntimeError: the disk is on fire"
    assert (named["rank"], named["iteration"], named["cause"]) == (failing, 2, cause)
    place = f"rank {failing} on {socket.gethostname()} ({device_label()})"
    before, report, _ = run.stderr.partition(f"moe-exp: {place} failed: {cause}")
    assert report and " failed: " not in before and "Error" not in before and "Traceback" not in before
    assert json.loads(run.folder.summary.read_text())["status"] == "failed"
    assert not list(run.folder.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("num_ranks", "by_script"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_what_a_user_can_fix_is_one_line_of_all_ranks(num_ranks, by_script, runs, tmp_path):
    """An error that each rank finds by itself, in a sample of its own: a token beyond the vocabulary."""
    with BinIdxWriter(tmp_path / "tokens", vocab_size=600) as writer:
        for _ in range(20):
            writer.add_document([599] * 100)
    settings = {"TRAIN_DATA": tmp_path / "tokens", "VOCAB_SIZE": 512, "MAX_RESTARTS": 2}
    run = dataclasses.replace(runs, by_script=by_script).run("tokens", GPUS_PER_NODE=num_ranks, **settings)
    (line,) = (one for one in run.stderr.splitlines() if ": warning: " not in one)
    assert line.startswith(f"moe-exp: {tmp_path / 'tokens'}: sample ")
    assert "has the token 599, but VOCAB_SIZE is 512. Fix: " in line
    assert run.code == BAD_INPUT
    assert not run.events("rank_failed", "restart")


def kill_agent(ranks: dict[int, int]) -> None:
    """kill -9 of torchrun's agent, between the launcher and the ranks."""
    (agent,) = {psutil.Process(pid).ppid() for pid in ranks.values()}
    os.kill(agent, signal.SIGKILL)


@pytest.mark.slow
def test_killed_agent(runs):
    """The ranks save, and their code counts."""
    process = runs.start("orphans", GPUS_PER_NODE=2, TRAIN_ITERS=2000)
    runs.wait_for_iteration("orphans", process, 2)
    ranks = ranks_of(process)
    kill_agent(ranks)
    run = runs.end("orphans", process, timeout=60)
    assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    assert run.code == TO_BE_CONTINUED, run.text
    assert "Traceback" not in run.text and "FileNotFoundError" not in run.text
    assert run.text.index("saved checkpoint") < run.text.index("Run stopped")
    assert json.loads(run.folder.summary.read_text())["status"] == "stopped"


@pytest.mark.slow
def test_killed_agent_of_ranks_that_are_deaf(runs):
    """A second Ctrl-C ends them: nobody else would."""
    process = runs.start("deaf", GPUS_PER_NODE=2, TRAIN_ITERS=2000, SAVE_AT_END=False)
    runs.wait_for_iteration("deaf", process, 2)
    ranks = ranks_of(process)
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    kill_agent(ranks)
    time.sleep(1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    run = runs.end("deaf", process, timeout=30)
    wait_until_gone(ranks.values())
    assert run.code == 128 + signal.SIGINT, run.text
