"""Two nodes between which the network goes away in mid-run, without a word: hosts in network namespaces."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import wait_for
from helpers.net_hosts import Host, hosts, missing
from helpers.ranks import free_port
from helpers.whole_runs import TINY, Runs
from moe_exp.runs.records import read_metrics

HANG_TIMEOUT = 15


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    if reason := missing():
        pytest.skip(reason)
    with hosts(2) as both:
        yield both


def train(host: Host, runs: Runs, node: int, **settings: object) -> subprocess.Popen[str]:
    """The launcher of one of two nodes."""
    shared = {"RUN_DIR": runs.run_dir, "RUN_NAME": "run", "DATA_DIR": runs.data_dir, "NNODES": 2}
    shared |= {"TRAIN_ITERS": 100_000, "MASTER_ADDR": host.master, "NODE_RANK": node}
    return host.start((sys.executable, "-m", "moe_exp", "train"), **{**TINY, **shared, **settings})


def has_trained(metrics: Path, iteration: int) -> bool:
    return metrics.exists() and any(one.get("iteration", 0) >= iteration for one in read_metrics(metrics))


def ends(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Waits until they have ended, all in so many seconds; what they have written to stderr."""
    wait_for(lambda: None not in [process.poll() for process in processes], timeout=seconds)
    return [process.communicate()[1] for process in processes]


def parted_in_mid_run(two_hosts: list[Host], runs: Runs, hang_timeout: int) -> list[subprocess.Popen[str]]:
    """The launchers of a run on both hosts, which lose each other in its fifth iteration or so."""
    port = free_port()
    processes = [
        train(host, runs, node, MASTER_PORT=port, HANG_TIMEOUT=hang_timeout, MAX_RESTARTS=3)
        for node, host in enumerate(two_hosts)
    ]
    wait_for(lambda: has_trained(runs.folder("run").metrics, 4))
    two_hosts[1].part()
    return processes


@pytest.mark.slow
def test_parted_nodes_end_soon_after_their_hang(two_hosts, runs):
    processes = parted_in_mid_run(two_hosts, runs, HANG_TIMEOUT)
    errors = ends(processes, HANG_TIMEOUT + 90)
    assert [process.returncode for process in processes] == [1, 1], errors
    assert "not all 2 nodes joined within 45 s" in errors[0], errors[0]
    assert "lost node 0" in errors[1], errors[1]
    assert "hang" in [one.get("event") for one in read_metrics(runs.folder("run").metrics)]


@pytest.mark.slow
@pytest.mark.parametrize("hang_timeout", [1000, 5])
def test_parted_nodes_obey_sigterm(hang_timeout, two_hosts, runs):
    processes = parted_in_mid_run(two_hosts, runs, hang_timeout)
    time.sleep(20)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    errors = ends(processes, 60)
    if hang_timeout == 1000:
        assert all("no rank has made progress since the stop request" in text for text in errors), errors


@pytest.mark.slow
def test_ranks_go_on_where_only_the_network_of_the_stores_is_away(two_hosts, tmp_path):
    """Plain scripts as ranks, which need no network, end when the agents have met again."""
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, time\n"
        f"go = pathlib.Path({str(tmp_path)!r}, 'go')\n"
        "pathlib.Path(go.parent, 'started' + os.environ['RANK']).touch()\n"
        "while not go.exists(): time.sleep(0.1)\n"
        "pathlib.Path(os.environ['MOE_EXP_EXIT_CODE_FILE']).write_text('0')\n"
    )
    shared = ["--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(free_port()), "--master-addr"]
    agents = []
    for node, host in enumerate(two_hosts):
        command = [sys.executable, "-m", "moe_exp.launch.agent", *shared, host.master]
        command += ["--node-rank", str(node), str(tmp_path / "rank.py")]
        agents.append(host.start(command, MOE_EXP_EXIT_CODE_FILE=tmp_path / f"code{node}"))
    wait_for(lambda: all((tmp_path / f"started{rank}").exists() for rank in range(2)))
    two_hosts[1].part()
    time.sleep(45)
    assert [agent.poll() for agent in agents] == [None, None]
    two_hosts[1].join()
    time.sleep(15)
    (tmp_path / "go").touch()
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert "node 0 does not respond" in errors[1] and "node 0 responds again" in errors[1]


@pytest.mark.slow
def test_nodes_without_a_shared_run_folder_are_told_so(two_hosts, runs, tmp_path):
    port = free_port()
    processes = [
        train(host, runs, node, MASTER_PORT=port, RUN_DIR=tmp_path / str(node))
        for node, host in enumerate(two_hosts)
    ]
    errors = processes[1].communicate(timeout=60)[1]
    assert processes[1].returncode == 1 and "or the nodes do not share RUN_DIR" in errors
    processes[0].send_signal(signal.SIGTERM)
    processes[0].communicate(timeout=60)
