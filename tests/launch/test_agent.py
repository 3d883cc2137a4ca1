"""The agent that starts ranks again, with scripts as ranks: nodes agree, failures count, signals wait."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from helpers import wait_for
from helpers.ranks import free_port, start_process
from helpers.warm_runs import become_program
from helpers.whole_runs import ROOT, clean_environ
from moe_exp.host.exit_codes import EXCLUDE_FILE, HEARTBEATS, WOULD_REPEAT
from moe_exp.launch import agent as launch_agent
from moe_exp.launch.agent import Agent, StandBys
from moe_exp.launch.rendezvous import RestartRendezvous
from moe_exp.runs.records import append_event, read_metrics
from moe_exp.watch.blame import recognised_lines
from moe_exp.watch.excluded_nodes import read_excluded, slurm_name
from moe_exp.watch.hangs.dump import ranks_of_node
from moe_exp.watch.hangs.heartbeat import FAILURES, HeartbeatWriter
from moe_exp.watch.known_errors import CAUSES

sys.path.insert(0, str(Path(ROOT) / "bench"))
from bench_diagnosis import read_failures


def test_the_agents_handlers_stay_where_torch_sets_its_own(monkeypatch):
    """torch 2.8 and older replace them when ranks start: SIGTERM would end these before they can save."""

    def start_workers(self, worker_group):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, frame: None)
        return {0: "rank"}

    monkeypatch.setattr(
        "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._start_workers",
        start_workers,
    )
    monkeypatch.delenv(HEARTBEATS, raising=False)
    agent = Agent.__new__(Agent)
    agent._spec = SimpleNamespace(max_restarts=1)
    agent._rounds = SimpleNamespace(round=0)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        assert agent._start_workers(None) == {0: "rank"}
        assert [signal.getsignal(number) for number in numbers[:-1]] == [*before.values()][:-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_hangup_reaches_the_ranks_as_a_request_to_save_and_end(monkeypatch):
    """Ranks answer SIGTERM; each rank gets each signal once, also those of a later start."""
    sent = []
    monkeypatch.setattr("moe_exp.launch.agent.send_signal", lambda pid, number: sent.append((pid, number)))
    agent = Agent.__new__(Agent)
    agent._received, agent._signalled, agent._parent = [signal.SIGHUP, signal.SIGUSR1], set(), os.getppid()
    agent._pcontext = SimpleNamespace(pids=lambda: {0: 11, 1: 12})
    for _ in range(2):
        agent._pass_signals_on()
    expected = [(pid, number) for number in (signal.SIGTERM, signal.SIGUSR1) for pid in (11, 12)]
    assert sent == expected
    agent._pcontext = SimpleNamespace(pids=lambda: {0: 13})
    agent._pass_signals_on()
    assert sent == [*expected, (13, signal.SIGTERM), (13, signal.SIGUSR1)]


# Stands for a rank. It does what its round and rank are told to do in plan.json, else it waits for SIGTERM.
RANK = """
import json, os, pathlib, resource, signal, sys, time
here = pathlib.Path(__file__).parent
rank, number = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
words = (os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
(here / f"round{number}_rank{rank}").write_text(" ".join(words))
plan = json.loads((here / "plan.json").read_text())
act = plan.get(f"{number}.{rank}", plan.get(number, "wait"))
if "late" in act:  # as a rank that imports for a while
    time.sleep(1.5)
def stop(received, frame):
    (here / f"stopped{rank}").write_text(signal.Signals(received).name)
    if os.environ["LOCAL_RANK"] == "0":
        pathlib.Path(os.environ["MOE_EXP_EXIT_CODE_FILE"]).write_text("75")
    sys.exit(0)
if act == "late":
    signal.signal(signal.SIGUSR1, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
if act == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
if act == "hung":
    from moe_exp.watch.hangs.heartbeat import HUNG
    pathlib.Path(os.environ["MOE_EXP_HEARTBEATS"], HUNG).touch()
if act in ("die", "hung"):
    os.kill(os.getpid(), signal.SIGKILL)
if act == "second":  # tells 76 when node 0 has: an agent whose peer goes first ends its rank before it tells
    while not (here / "code0").exists():
        time.sleep(0.05)
    act = "76"
if act.isdigit():
    if os.environ["LOCAL_RANK"] == "0":
        pathlib.Path(os.environ["MOE_EXP_EXIT_CODE_FILE"]).write_text(act)
    sys.exit(0)
if act == "last":  # tells 76 and ends when node 1 has told its code
    pathlib.Path(os.environ["MOE_EXP_EXIT_CODE_FILE"]).write_text("76")
    while not (here / "code1").exists():
        time.sleep(0.05)
    sys.exit(0)
if act.startswith("error"):
    from moe_exp.engine import faults
    from moe_exp.engine.faults import StopSignal, named_by_rank
    if "full" in act:  # no file takes another byte
        leave_error = faults._leave_error
        def on_full_disk(error):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            leave_error(error)
        faults._leave_error = on_full_disk
    with named_by_rank(StopSignal()):
        raise ValueError(act) if "Fix" in act or "code" in act else RuntimeError(act)
time.sleep(60)
"""


def run_agent(arguments: list[str], environ: dict[str, str], errors: Path, first_delay: float) -> None:
    """In a process of its own, as `python -m moe_exp.launch.agent` does."""
    become_program(environ, errors)
    launch_agent._FIRST_DELAY_SECONDS = launch_agent._STORAGE_DELAY_SECONDS = first_delay
    code = launch_agent.main(arguments)
    with suppress(OSError):  # as at the end of a program, but not of a fork: the disk may be full
        sys.stderr.flush()
    os._exit(code)


class Nodes:
    """Agents of some nodes, on this host. Before they start ranks without progress again they wait
    `first_delay` seconds, then twice as long.
    """

    def __init__(
        self, folder: Path, plan: dict[str, str] | list[str], *, num_nodes: int = 1, num_ranks: int = 2,
        max_restarts: int = 0, is_full: bool = False, first_delay: float = 0.5, script: str = RANK,
    ):  # fmt: skip
        self.folder, self.metrics, self._is_full = folder, folder / "metrics.jsonl", is_full
        self._first_delay = first_delay
        (folder / "rank.py").write_text(script)
        (folder / "plan.json").write_text(json.dumps(plan))
        self._options = ["--nnodes", num_nodes, "--nproc-per-node", num_ranks, "--max-restarts", max_restarts]
        self._options += ["--master-addr", "localhost", "--master-port", free_port()]
        self.agents = [self.start(node) for node in range(num_nodes)]

    def start(self, node: int) -> Any:
        arguments = [*map(str, self._options), "--node-rank", str(node), str(self.folder / "rank.py")]
        places = {"MOE_EXP_EXIT_CODE_FILE": self.folder / f"code{node}", "MOE_EXP_METRICS_FILE": self.metrics}
        environ = clean_environ(PYTHONPATH=ROOT, OMP_NUM_THREADS=1, **places)
        errors = Path("/dev/full") if self._is_full else self.folder / f"err{node}"
        return start_process(run_agent, arguments, environ, errors, self._first_delay)

    def wait_for(self, *names: str) -> None:
        wait_for(lambda: all((self.folder / name).exists() for name in names), said=self.errors)

    def end(self) -> list[int]:
        for process in self.agents:
            process.join(90)
        codes = [process.exitcode for process in self.agents]
        for process in self.agents:
            process.kill()
        assert None not in codes, f"did not end:\n{self.errors()}"
        return codes

    def errors(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("err*")))

    def events(self, name: str) -> list[dict[str, object]]:
        """Events of a name, without their time."""
        records = [record for record in read_metrics(self.metrics) if record.get("event") == name]
        left_out = ("kind", "time", "event")
        return [{key: one for key, one in record.items() if key not in left_out} for record in records]

    def told(self, node: int = 0) -> str:
        return (self.folder / f"code{node}").read_text()


def train_until(folder: Path, iteration: int) -> None:
    append_event(folder / "metrics.jsonl", "start", 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "iteration": iteration}) + "\n")


RANK_THAT_STANDS_BY = """
import os, sys
from moe_exp.host.exit_codes import STANDS_BY
from moe_exp.engine.runtime import stand_by
sys.modules.update({"torch._dynamo": sys, "torch.utils.tensorboard": sys})  # seconds in each of six processes
stand_by()
with open(f"{sys.argv[1]}/round{os.environ['ROUND']}", "w") as file:
    print(os.getpid(), STANDS_BY in os.environ, file=file)
"""


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_restarted_rank_is_the_process_that_stood_by(is_whole, tmp_path):
    """With the environment of its round; a process that has died is replaced, others end with the agent."""
    command = [sys.executable, "-c", RANK_THAT_STANDS_BY, str(tmp_path)]
    environ = clean_environ(PYTHONPATH=ROOT, OMP_NUM_THREADS=1, LOCAL_RANK=0)
    environ |= {"RANK": "0", HEARTBEATS: str(tmp_path)}
    standbys = StandBys()

    def start(number: int) -> int:
        process = standbys.start_rank(command, environ | {"ROUND": str(number), "TEXT": "\udcff"})
        assert process.wait(90) == 0
        assert (tmp_path / f"round{number}").read_text() == f"{process.pid} False\n"
        return process.pid

    start(0)
    standbys.start(tmp_path)
    ((waiting, _),) = standbys.waiting.values()
    assert not ranks_of_node(tmp_path)  # a launcher that ends a hang takes none for the rank
    assert start(1) == waiting.pid and not standbys.waiting and not [*tmp_path.glob("standby_*")]
    if not is_whole:
        return
    standbys.start(tmp_path)
    ((killed, _),) = standbys.waiting.values()
    killed.kill()
    killed.wait()
    assert start(2) != killed.pid
    standbys.start(tmp_path)
    ((left, pipe),) = standbys.waiting.values()
    os.close(pipe)  # as the end of the agent does
    assert left.wait(90) == 0
    standbys.waiting.clear()
    standbys.start(tmp_path)
    ((left, pipe),) = standbys.waiting.values()
    standbys.end()
    assert left.wait(90) == -signal.SIGKILL
    os.close(pipe)


def test_a_node_without_room_for_standby_processes_goes_on(tmp_path, monkeypatch, capsys):
    """It says so once."""
    monkeypatch.setenv(HEARTBEATS, str(tmp_path))
    agent = Agent.__new__(Agent)
    agent._stands_by, agent._pcontext = True, SimpleNamespace(pids=lambda: {0: os.getpid()})
    agent.standbys = SimpleNamespace(waiting={}, start=Mock(side_effect=OSError(11, "no more processes")))
    agent._stand_by()
    agent.standbys.start.assert_not_called()  # no rank has trained
    writer = HeartbeatWriter(tmp_path, 0)
    writer.begin(2, 1)
    for _ in range(2):
        agent._stand_by()
    agent.standbys.start.assert_called_once_with(tmp_path)
    assert capsys.readouterr().err.count("cannot start standby processes (no more processes)") == 1


def test_two_nodes_start_again_together(tmp_path):
    train_until(tmp_path, 7)
    nodes = Nodes(tmp_path, {"0.3": "die", "1": "76", "2": "75"}, num_nodes=2, max_restarts=1)
    assert nodes.end() == [0, 0], nodes.errors()
    assert [nodes.told(node) for node in (0, 1)] == ["75", "75"]
    for number in range(3):
        started = [(tmp_path / f"round{number}_rank{rank}").read_text().split() for rank in range(4)]
        assert [start[:2] for start in started] == [["0", "4"], ["1", "4"], ["0", "4"], ["1", "4"]]
        assert len({start[2] for start in started}) == 1
    host = socket.gethostname()
    failure = {"iteration": 7, "rank": 3, "host": host, "device": "cpu", "cause": "SIGKILL"}
    assert nodes.events("rank_failed") == [failure]
    restarts = [(event["number"], event["reason"], event["failures"]) for event in nodes.events("restart")]
    # the second one is no failure, of which there may be one
    assert restarts == [(1, "failure", 1), (2, "asked", 1)]


def test_what_a_user_can_fix_ends_all_nodes_with_one_line(tmp_path):
    plan = {"0.2": "error=1: is odd. Fix: 2."}  # rank 3, on the same node, is slower
    nodes = Nodes(tmp_path, plan, num_nodes=2, max_restarts=2)
    assert nodes.end() == [1, 1], nodes.errors()
    assert nodes.told(1) == "2"
    assert (tmp_path / "err1").read_text() == "moe-exp: error=1: is odd. Fix: 2.\n"
    assert "Traceback" not in nodes.errors() and "exitcode" not in nodes.errors()
    assert not (tmp_path / "round1_rank0").exists()


@pytest.mark.slow
def test_failures_without_progress_are_slowed_down_and_counted(tmp_path):
    nodes = Nodes(tmp_path, {"0.1": "error in the data", "1": "die"}, max_restarts=1, first_delay=5.0)
    assert nodes.end() == [1]
    failed = [(event["rank"], event["cause"]) for event in nodes.events("rank_failed")]
    assert failed[0] == (1, "ValueError: error in the data")
    assert {cause for _, cause in failed[1:]} == {"SIGKILL"}
    assert [event["delay_seconds"] for event in nodes.events("restart")] == [5.0]
    for said in ("failure 1 of at most 1), in 5 s", "failure 2 exceeds MAX_RESTARTS=1", "Root Cause"):
        assert said in nodes.errors()
    assert 'Traceback (most recent call last):\n  File "<frozen runpy>' not in nodes.errors()


def test_signal_to_every_process_waits_until_a_rank_answers_it(tmp_path):
    nodes = Nodes(tmp_path, {"0": "late"}, max_restarts=3)
    nodes.wait_for("round0_rank0", "round0_rank1")
    agent = psutil.Process(nodes.agents[0].pid)
    for process in [agent, *agent.children()]:
        process.send_signal(signal.SIGUSR1)
    assert nodes.end() == [0], nodes.errors()
    assert nodes.told() == "75"
    assert [(tmp_path / f"stopped{rank}").read_text() for rank in range(2)] == ["SIGUSR1"] * 2
    assert not (tmp_path / "round1_rank0").exists()


@pytest.mark.slow
def test_agent_of_a_node_comes_back(tmp_path):
    nodes = Nodes(tmp_path, {"1": "0"}, num_nodes=2, num_ranks=1, max_restarts=0)
    nodes.wait_for("round0_rank0", "round0_rank1")
    (rank,) = psutil.Process(nodes.agents[1].pid).children()
    nodes.agents[1].kill()
    nodes.agents[1].join()
    rank.kill()
    nodes.agents[1] = nodes.start(1)
    assert nodes.end() == [0, 0], nodes.errors()
    assert [event["reason"] for event in nodes.events("restart")] == ["asked"]


@pytest.mark.slow
def test_failure_while_the_job_stops_is_not_started_again(tmp_path):
    nodes = Nodes(tmp_path, {}, max_restarts=5)
    nodes.wait_for("round0_rank0", "round0_rank1")
    os.kill(nodes.agents[0].pid, signal.SIGTERM)  # these ranks die of it
    assert nodes.end() == [1]
    assert nodes.events("restart") == []
    assert not (tmp_path / "code0").exists()


@pytest.mark.slow
def test_node_0_is_gone(tmp_path):
    nodes = Nodes(tmp_path, {}, num_nodes=2, num_ranks=1, max_restarts=5)
    nodes.wait_for("round0_rank0", "round0_rank1")
    (rank,) = psutil.Process(nodes.agents[0].pid).children()
    nodes.agents[0].kill()
    rank.kill()
    assert nodes.end() == [-9, 1]
    assert "lost node 0" in nodes.errors()


@pytest.mark.parametrize("what", ["metrics", "errors of the agent", "errors of a rank"])
def test_full_disk_is_no_reason_not_to_start_again(what, tmp_path):
    if what == "metrics":
        (tmp_path / "metrics.jsonl").mkdir()  # can neither be read nor written
    else:
        train_until(tmp_path, 7)
    plan = {"0.1": "error, full" if what == "errors of a rank" else "die", "1": "0"}
    nodes = Nodes(tmp_path, plan, max_restarts=1, is_full=what == "errors of the agent")
    assert nodes.end() == [0], nodes.errors()
    assert nodes.told() == "0"
    if what != "metrics":
        assert [event["rank"] for event in nodes.events("rank_failed")] == [1]
        assert [event["number"] for event in nodes.events("restart")] == [1]


def test_event_that_could_not_be_written_comes_with_the_next(tmp_path, capsys):
    agent = Agent.__new__(Agent)
    agent._metrics, agent._unwritten = tmp_path / "metrics.jsonl", []
    agent._metrics.mkdir()
    agent._event("rank_failed", 7, rank=1)
    agent._metrics.rmdir()
    agent._event("restart", 7, number=1)
    assert [record["event"] for record in read_metrics(agent._metrics)] == ["rank_failed", "restart"]
    assert f"event rank_failed to {agent._metrics} (Is a directory)" in capsys.readouterr().err


def test_ranks_that_lost_a_peer_are_not_blamed(tmp_path):
    # Rank 3 is the cause. Its neighbour does not hear SIGTERM, as in a collective; rank 0 ends before that
    # one is killed.
    plan = {"0.0": "error: Connection closed by peer", "0.2": "deaf", "0.3": "error, late, of its own"}
    plan["1"] = "0"
    train_until(tmp_path, 7)
    nodes = Nodes(tmp_path, plan, num_nodes=2, max_restarts=1)
    assert nodes.end() == [0, 0], nodes.errors()
    failed = [(event["rank"], event["cause"]) for event in nodes.events("rank_failed")]
    assert failed == [(3, "RuntimeError: error, late, of its own")]


def test_an_error_of_the_code_ends_all_nodes_although_they_may_restart(tmp_path):
    train_until(tmp_path, 7)
    nodes = Nodes(tmp_path, {"0.3": "error in the code"}, num_nodes=2, max_restarts=5)
    assert nodes.end() == [1, 1], nodes.errors()
    assert nodes.told() == str(WOULD_REPEAT)
    assert not (tmp_path / "round1_rank0").exists() and not nodes.events("restart")
    (found,) = nodes.events("diagnosis")
    host = socket.gethostname()
    assert (found["action"], found["category"], found["host"]) == ("stop", "code", host)
    assert "diagnosis: stop: exception" in nodes.errors() and "lost node 0" not in nodes.errors()


@pytest.mark.parametrize("in_slurm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_broken_node_is_excluded(in_slurm, tmp_path, monkeypatch):
    """Only a job of SLURM ends, whose successor has other nodes."""
    monkeypatch.setenv(EXCLUDE_FILE, str(tmp_path / "exclude_nodes.txt"))
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    train_until(tmp_path, 7)
    plan = {"0.1": "error: CUDA error: uncorrectable ECC error encountered", "1": "0"}
    nodes = Nodes(tmp_path, plan, num_nodes=2, num_ranks=1, max_restarts=1)
    assert nodes.end() == ([1, 1] if in_slurm else [0, 0]), nodes.errors()
    assert list(read_excluded(tmp_path / "exclude_nodes.txt")) == [slurm_name(socket.gethostname())]
    assert [event["action"] for event in nodes.events("diagnosis")] == ["exclude"]


def test_full_disk_delays_the_restart(tmp_path):
    plan = {"0.1": "error: OSError: [Errno 28] No space left on device", "1": "0"}
    nodes = Nodes(tmp_path, plan, max_restarts=1)
    assert nodes.end() == [0], nodes.errors()
    assert "for the storage to recover" in nodes.errors()


def test_ranks_that_hang_are_ended_by_the_launcher_and_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setenv(HEARTBEATS, str(tmp_path))
    nodes = Nodes(tmp_path, {"0": "hung", "1.1": "die", "2": "0"}, max_restarts=2)
    assert nodes.end() == [0], nodes.errors()
    assert (tmp_path / FAILURES).read_text() == "2"
    assert [(event["rank"], event["cause"]) for event in nodes.events("rank_failed")] == [(1, "SIGKILL")]
    assert [event["failures"] for event in nodes.events("restart")] == [1, 2]
    folder = tmp_path / "last"
    folder.mkdir()
    monkeypatch.setenv(HEARTBEATS, str(folder))
    nodes = Nodes(folder, {"0": "hung"}, max_restarts=0)  # a hang that ends the run is no failed rank
    assert nodes.end() == [1]
    assert not re.search("Root Cause|exitcode|has failed", nodes.errors()), nodes.errors()


def test_signal_before_the_ranks_start_again_as_they_have_asked(tmp_path):
    """Node 1 waits for node 0, which does not hurry, as none has trained."""
    plan = {"0.0": "last", "0.1": "second", "1": "0"}
    nodes = Nodes(tmp_path, plan, num_nodes=2, num_ranks=1, first_delay=100.0)
    # The files with their codes do not stay: agents remove them before ranks start again.
    node_1 = psutil.Process(nodes.agents[1].pid)
    wait_for(lambda: "requested by a rank" in nodes.errors() and not node_1.children())
    time.sleep(0.5)  # node 1 says nothing when it begins to wait
    os.kill(nodes.agents[1].pid, signal.SIGTERM)
    start = time.monotonic()
    assert nodes.end() == [1, 1], nodes.errors()
    assert time.monotonic() - start < 30  # and not after the time in which nodes have to come
    assert [nodes.told(node) for node in (0, 1)] == ["75", "75"]


def rendezvous(port: int, **given: Any) -> RestartRendezvous:
    return RestartRendezvous("localhost", port, **{"node_rank": 0, "num_nodes": 1, "max_restarts": 0} | given)


def test_one_node_takes_a_free_port_of_the_loopback_interface():
    jobs = [rendezvous(0) for _ in range(2)]
    for rounds in jobs:
        rounds.next_rendezvous()
    own = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert len(own) >= 4 and {one.laddr.ip for one in own} == {"127.0.0.1"}
    jobs[0].set_closed()
    assert [rounds.is_over for rounds in jobs] == [True, False]


@pytest.mark.parametrize(("num_nodes", "fix"), [(1, "or omit MASTER_PORT: a"), (2, "on all nodes")])
def test_a_port_that_was_lost_after_the_checks_is_one_line(num_nodes, fix):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        rounds = rendezvous(port, num_nodes=num_nodes, join_seconds=5.0)
        line = rf"^MASTER_PORT={port}: node 0 cannot listen on it \(.*\)\. Fix: set MASTER_PORT to .*{fix}"
        with pytest.raises(RendezvousConnectionError, match=line) as error:
            rounds.next_rendezvous()
    assert len(str(error.value).splitlines()) == 1


def test_a_stranger_without_the_key_of_the_job_neither_ends_it_nor_speaks_in_it():
    port = free_port()
    rounds = rendezvous(port, key="a key")
    rounds.next_rendezvous()
    stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    stranger.set("over", "1")
    stranger.set("said/0/0", json.dumps([{"rank": 1, "host": "a", "device": "cpu", "cause": "x"}]))
    assert not rounds.is_over and rounds.said(0) == []
    other = rendezvous(port, node_rank=1, num_nodes=2, key="another")
    pair = socket.socketpair()  # a process has other sockets, too, some without an address
    with pair[0], pair[1], pytest.raises(RendezvousConnectionError, match="has a different key"):
        other.next_rendezvous()


def test_what_no_agent_says_of_failures_is_left_out():
    rounds = rendezvous(free_port())
    rounds.next_rendezvous()
    failure = {"rank": 1, "host": "a", "device": "cpu", "cause": "x" * 9000}
    rounds.say([failure])
    assert rounds.said(0) == [failure | {"cause": "x" * 2000}]
    wrong = [{**failure, "cause": "y", "note": "text"}, failure, {"rank": "1"}, "text", None]
    for said in (json.dumps(wrong), "no JSON", "5", json.dumps({"rank": 1})):
        rounds._store.set("said/0/0", said)
        assert rounds.said(0) == []


# Stands for a rank that fails in each round with the next of the given errors, and ends the job after them.
FAILING = """
import json, os, pathlib
from moe_exp.engine.faults import StopSignal, named_by_rank
here = pathlib.Path(__file__).parent
errors = json.loads((here / "plan.json").read_text())
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if number == len(errors):
    pathlib.Path(os.environ["MOE_EXP_EXIT_CODE_FILE"]).write_text("75")
else:
    with named_by_rank(StopSignal()):
        raise RuntimeError(errors[number])
"""


@pytest.mark.slow
def test_two_hundred_failures_end_as_the_table_says(tmp_path, monkeypatch):
    """Of every cause and action: errors of the corpus go through ranks, agent, events and exit codes."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(EXCLUDE_FILE, str(tmp_path / "exclude_nodes.txt"))
    lines: dict[str, str] = {}
    for one in read_failures("rules") + read_failures("held_out"):
        seen = recognised_lines(line for file in one["files"] for line in file["lines"])
        lines |= {
            line.strip()[:300]: fault.cause for fault, _, line in seen if fault and ". Fix: " not in line
        }
    by_cause: dict[str, list[str]] = {}
    for line, cause in lines.items():
        by_cause.setdefault(cause, []).append(line)
    # in turn, so that there are as many of each cause as possible
    turns = zip_longest(*by_cause.values())
    errors = [line for turn in turns for line in turn if line is not None][:200]
    assert len(errors) == 200 and set(by_cause) == set(CAUSES)
    actions: Counter[str] = Counter()
    while errors:
        folder = tmp_path / str(len(errors))
        folder.mkdir()
        train_until(folder, 1500)
        nodes = Nodes(folder, errors, num_ranks=1, max_restarts=1000, first_delay=0.0, script=FAILING)
        codes, said = nodes.end(), nodes.events("diagnosis")
        causes = [event["cause"] for event in nodes.events("rank_failed")]
        assert causes == [f"RuntimeError: {error}".splitlines()[0] for error in errors[: len(causes)]]
        assert len(said) == len(causes) >= 1
        excluded = read_excluded(tmp_path / "exclude_nodes.txt")
        for event in said:
            actions[str(event["action"])] += 1
            assert event["action"] != "exclude" or slurm_name(str(event["host"])) in excluded
        # all but the last were followed by a restart
        assert [event["action"] for event in said[:-1]].count("stop") == 0
        has_stopped = said[-1]["action"] == "stop"
        assert len(nodes.events("restart")) == len(said) - has_stopped
        assert (codes, nodes.told()) == (([1], str(WOULD_REPEAT)) if has_stopped else ([0], "75"))
        errors = errors[len(said) :]
    assert min(actions[action] for action in ("restart", "stop", "exclude", "wait")) >= 5, actions
