"""The launcher's checks of its ranks: what counts as a hang, and the stacks of real ranks in collectives."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_on_ranks
from moe_exp.config import Config, load_config
from moe_exp.host.exit_codes import HEARTBEATS
from moe_exp.layers.dispatcher.collectives import AllToAll, exchange_rows
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs import dump as hang_dump
from moe_exp.watch.hangs import heartbeat, stacks
from moe_exp.watch.hangs.files import Answer, read_answers, read_dumps, write_answer
from moe_exp.watch.hangs.heartbeat import read_beats
from moe_exp.watch.hangs.monitor import HangWatch
from moe_exp.watch.hangs.stacks import summarize

# Stands in for a rank where no collective is needed: it beats until the file `still` is there, then waits.
RANK = """
import os, sys, time
from pathlib import Path
from moe_exp.watch.hangs import heartbeat
still = Path(sys.argv[1])
heartbeat.start()
def stand_still():
    while still.exists():
        time.sleep(0.01)
for iteration in range(1, 100000):
    heartbeat.begin(iteration, 1)
    time.sleep(0.01)
    heartbeat.enter("forward_backward")
    if still.exists() and still.read_text() == "paused" and os.environ["RANK"] == "1":
        with heartbeat.during(heartbeat.PAUSED):
            stand_still()
    stand_still()
"""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr("moe_exp.watch.hangs.monitor._LOOK_SECONDS", 0.2)


class Ranks:
    """Two processes and the watch of their launcher; `still` is the file that lets them stand still."""

    def __init__(self, config: Config, run: RunFolder, folder: Path):
        run.path.mkdir(parents=True, exist_ok=True)
        run.config.touch()
        self.watch, self.run, self.still = HangWatch(config, run), run, folder / "still"
        self.start()

    def start(self) -> None:
        """Starts both ranks."""
        environ = os.environ | self.watch.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(self.still)],
                env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]

    def poll_until(self, is_so, seconds: float = 30.0) -> None:
        """Is the launcher's loop until something is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline
            self.watch.poll()
            time.sleep(0.05)

    def poll_until_ended(self) -> None:
        self.poll_until(lambda: all(process.poll() is not None for process in self.processes))

    def are_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def poll_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.poll_until(lambda: time.monotonic() > deadline, seconds + 10)

    def beats(self) -> list[heartbeat.Heartbeat]:
        return read_beats(Path(self.watch.environment[HEARTBEATS]))

    def begin(self) -> None:
        """Waits until both ranks train. Those of an earlier start leave heartbeats behind."""
        pids = [process.pid for process in self.processes]
        self.poll_until(lambda: [beat.pid for beat in self.beats() if beat.iteration > 3] == pids)

    def events(self) -> list[dict[str, object]]:
        return read_metrics(self.run.metrics) if self.run.metrics.exists() else []


@contextmanager
def two_ranks(tmp_path: Path, **settings: object) -> Iterator[Ranks]:
    flags = {"run_dir": str(tmp_path), "run_name": "run", "gpus_per_node": 2, "hang_timeout": 1, **settings}
    ranks = Ranks(load_config(flags, {}), RunFolder(tmp_path / "run"), tmp_path)
    try:
        with ranks.watch:
            ranks.begin()
            yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.wait()


def test_stopped_rank_is_found_named_and_all_are_ended(tmp_path, capfd):
    with two_ranks(tmp_path) as ranks:
        ranks.still.touch()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        ranks.poll_until_ended()
        assert [process.returncode for process in ranks.processes] == [-signal.SIGKILL] * 2
        ranks.watch.wait()
        (event,) = ranks.events()
        named = (event["event"], event["ranks"], event["hosts"])
        assert named == ("hang", [1], [os.uname().nodename])
        assert event["why"][0].startswith("is stopped (by a signal such as SIGSTOP)")
        where = rf"iteration {event['iteration'] + 1}, (data|forward_backward): no progress on any rank for "
        assert re.match(where, event["reason"])
        ranks.poll_for(1.6)  # processes that are gone do not hang again
    assert len(ranks.events()) == 1
    folder = ranks.run.path / event["folder"]
    printed = capfd.readouterr().err.splitlines()
    line = f"moe-exp: the run hangs: rank 1 on {os.uname().nodename} (is stopped); see {folder}"
    assert printed[0].startswith(line)
    end = "the ranks are killed and not restarted: failure 1 exceeds MAX_RESTARTS=0"
    assert f"moe-exp: {end}" in printed
    assert printed[-1] == printed[0]  # once more at the end, below what torchrun has to say
    assert summarize(folder).whole + "\n" == (folder / "summary.txt").read_text()
    assert "the run hangs: rank 1 on" in ranks.run.log.read_text()
    assert not Path(ranks.watch.environment[HEARTBEATS]).exists()


def test_ranks_that_hang_when_the_job_is_asked_to_stop_are_not_waited_for(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("moe_exp.watch.hangs.monitor._STOP_SECONDS", 1.0)
    with two_ranks(tmp_path, hang_timeout=1000) as ranks:

        def stop_for(seconds: float) -> bool:
            deadline, has_ended = time.monotonic() + seconds, False
            while time.monotonic() < deadline and not has_ended:
                has_ended = ranks.watch.poll(True)
                time.sleep(0.05)
            return has_ended

        assert not stop_for(2.5)  # they continue, and may take their time to save
        ranks.still.touch()
        ranks.poll_for(2.5)
        assert ranks.are_running()
        assert stop_for(8)
        assert [process.wait() for process in ranks.processes] == [-signal.SIGKILL] * 2
        assert "no rank has made progress since the stop request" in capfd.readouterr().err


def test_what_is_left_of_the_ranks_hangs_too(tmp_path):
    """One has come to its end, the other does not: the agent would wait for it for ever."""
    with two_ranks(tmp_path, hang_timeout_other=2) as ranks:
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        ranks.still.touch()
        ranks.poll_until(lambda: ranks.processes[0].poll() is not None)
        ranks.watch.wait()
        assert [event["event"] for event in ranks.events()] == ["hang"]


def test_hang_is_not_said_again_of_ranks_that_have_started_again(tmp_path, capfd):
    with two_ranks(tmp_path, max_restarts=3) as ranks:
        local = Path(ranks.watch.environment[HEARTBEATS])
        (local / heartbeat.FAILURES).write_text("1")
        ranks.still.touch()
        ranks.poll_until_ended()
        assert (local / heartbeat.HUNG).exists()
        ranks.still.unlink()
        ranks.start()
        ranks.begin()
        ranks.poll_for(1.5)
    printed = capfd.readouterr().err
    assert printed.count("moe-exp: the run hangs: ") == 1
    assert "the ranks are killed and restarted (failure 2 of at most 3)\n" in printed


@pytest.mark.parametrize(("how", "timeout"), [("paused", 1), ("debugger", 1), ("", "none"), ("", "auto")])
def test_no_hang_while_somebody_looks_at_a_rank_or_far_from_the_limit(how, timeout, tmp_path, monkeypatch):
    with two_ranks(tmp_path, hang_timeout=timeout) as ranks:
        if how == "debugger":
            traced = ranks.processes[1].pid
            monkeypatch.setattr("moe_exp.watch.hangs.monitor.is_traced", lambda pid: pid == traced)
        ranks.still.write_text(how)
        ranks.poll_for(2)
        ranks.still.unlink()
        ranks.poll_for(0.2)
        assert ranks.are_running()
    assert not (ranks.run.path / "hang").exists()


def test_pause_of_the_launcher_itself_is_not_the_ranks(tmp_path):
    with two_ranks(tmp_path, hang_timeout=4) as ranks:
        ranks.watch._looked -= 100  # its last look is long ago, as after a SIGSTOP of the whole job
        before = time.monotonic()
        ranks.watch.poll()
        assert ranks.watch._running_since >= before


def test_ranks_that_go_on_while_their_stacks_are_written_are_left_alone(tmp_path, capfd):
    with two_ranks(tmp_path) as ranks:
        ranks.still.touch()
        ranks.poll_until(lambda: any(ranks.run.path.glob("hang/*/node_*.json")))
        ranks.still.unlink()
        ranks.watch.wait(60)
        assert ranks.are_running()
    assert ranks.events() == []
    assert "suspected a hang, but rank " in capfd.readouterr().err


def test_another_nodes_rank_that_may_be_where_it_is_speaks_against_a_hang(tmp_path, capfd):
    with two_ranks(tmp_path, nnodes=2, ep=1) as ranks:
        ranks.still.touch()
        ranks.poll_until(lambda: any(ranks.run.path.glob("hang/*/node_00000.json")))
        (folder,) = ranks.run.path.glob("hang/*/")
        busy = "rank 2 has been in profile for 3.0 s (limit 1500 s)"
        write_answer(folder, Answer(1, 2, 4, "other", [2, 3], [busy], True))
        ranks.watch.wait(60)
        assert ranks.are_running()
        ranks.poll_for(1.6)
        assert len(list(ranks.run.path.glob("hang/*/"))) == 1  # not asked for again while nothing moves
    assert ranks.events() == []
    assert f"suspected a hang, but {busy}" in capfd.readouterr().err


def test_ranks_are_ended_where_their_stacks_cannot_be_written(tmp_path, capfd):
    with two_ranks(tmp_path) as ranks:
        (ranks.run.path / "hang").touch()  # no folder: as on a disk that is full
        ranks.still.touch()
        ranks.poll_until_ended()
    assert re.search("the run hangs: iteration .*its stacks could not be written", capfd.readouterr().err)


def test_stacks_on_demand(tmp_path):
    with two_ranks(tmp_path, hang_timeout="auto") as ranks:
        ranks.still.touch()
        found = []
        asking = threading.Thread(target=lambda: found.append(stacks.stacks_of(ranks.run.path)))
        asking.start()
        ranks.poll_until(lambda: not asking.is_alive())
        asking.join()
        ((summary, folder),) = found
        assert "requested by a user: the run continues" in summary.short
        # The ranks poll for a file: they sleep nearly always, and may run or read just then.
        states = [dump.facts["state"] for dump in read_dumps(folder)]
        assert len(states) == 2 and set(states) <= {"sleeping", "running", "disk-sleep"}
        assert all("stand_still" in str(dump.threads[0].frames[:1]) for dump in read_dumps(folder))
        assert [answer.ranks for answer in read_answers(folder)] == [[0, 1]]
        assert ranks.are_running()
        assert (folder / "summary.txt").read_text() == summary.whole + "\n"
    assert ranks.events() == []


def test_stacks_of_a_run_without_a_launcher(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"no launcher of this run answered in 0 s\. Fix: check"):
        stacks.stacks_of(tmp_path, first_seconds=0.3)
    assert [path.name for path in (tmp_path / "hang").iterdir()] == ["request.json"]


def hang_for_a_while(local: str, where: str) -> None:
    """On each of four ranks: rank 2 stays in the all-to-all or its data until the file `go_on` is there."""
    os.environ[HEARTBEATS] = local
    heartbeat.start()
    heartbeat.begin(7, 1)
    if dist.get_rank() == 2 and where == "data":
        _sleep_until_released(local)
    heartbeat.enter("forward_backward")
    if dist.get_rank() == 2 and where == "all_to_all":
        launch = AllToAll._launch

        def sleepy(self, x, group):
            _sleep_until_released(local)
            return launch(self, x, group)

        AllToAll._launch = sleepy
    exchange_rows(AllToAll(group=dist.group.WORLD, send=[1] * 4, receive=[1] * 4), torch.ones(4, 2))


def _sleep_until_released(local: str) -> None:
    while not os.access(f"{local}/go_on", os.F_OK):  # not pathlib, whose functions would be on the stack
        time.sleep(0.05)


@pytest.mark.parametrize("tool", ["py-spy", "faulthandler"])
@pytest.mark.parametrize(("where", "phase"), [("all_to_all", "forward_backward"), ("data", "data")])
def test_sleeping_rank_among_real_collectives(tool, where, phase, tmp_path, monkeypatch):
    if tool == "faulthandler":
        monkeypatch.setattr(hang_dump, "py_spy_program", lambda: "")
    elif not hang_dump.py_spy_program():
        pytest.skip("needs py-spy")
    local, folder = tmp_path / "local", tmp_path / "answer"
    local.mkdir()
    folder.mkdir()
    arguments = {"args": (4, hang_for_a_while, str(local), where), "kwargs": {"timeout": 300.0}}
    running = threading.Thread(target=run_on_ranks, **arguments)
    running.start()
    try:
        deadline = time.monotonic() + 240
        expected = ["forward_backward", "forward_backward", phase, "forward_backward"]
        while [beat.phase for beat in read_beats(local)] != expected:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        hang_dump.dump_node(local, folder, calls=tmp_path, is_hang=False)
    finally:
        (local / "go_on").touch()
        running.join()
    dumps = read_dumps(folder)
    assert [dump.facts["tool"] for dump in dumps] == [tool] * 4, [dump.facts for dump in dumps]
    summary = summarize(folder)
    assert list(summary.named) == [2]
    assert "_sleep_until_released (test_hang.py:" in summary.named[2]
    name = "_OneByOne.launch" if tool == "py-spy" and sys.version_info >= (3, 11) else "launch"
    inside = f"inside {name} (moe_exp/layers/dispatcher/collectives.py:"
    assert (inside if where == "all_to_all" else "outside any collective") in summary.named[2]
    # torch's own record: rank 2 has begun one collective less, where it sleeps before it.
    numbers = {dump.rank: sum(last["number"] for last in dump.collectives) for dump in dumps}
    assert numbers[0] == numbers[1] == numbers[3] > numbers[2]


def test_processes_of_the_node_are_found_by_the_launchers_folder(tmp_path):
    environ = os.environ | {HEARTBEATS: str(tmp_path), "RANK": "5", "LOCAL_RANK": "1"}
    child = "import time; print(1, flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    rank = subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE)
    try:
        rank.stdout.readline()
        assert hang_dump.ranks_of_node(tmp_path) == {5: rank.pid}  # not its child
        assert hang_dump.ranks_of_node(tmp_path / "other") == {}
    finally:
        for process in [*psutil.Process(rank.pid).children(), rank]:
            process.kill()
            process.wait()
        rank.stdout.close()
