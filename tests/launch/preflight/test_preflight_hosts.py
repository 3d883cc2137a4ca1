"""Several hosts, in network namespaces: one refused, one unplugged, one slowed, one with another clock."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.net_hosts import Host, hosts, missing
from helpers.ranks import free_port
from moe_exp.runs.records import read_metrics
from moe_exp.watch.excluded_nodes import read_excluded

PREFLIGHT = (sys.executable, "-m", "moe_exp", "watch", "preflight", "--json")
TRAIN = (sys.executable, "-m", "moe_exp", "train")


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    if reason := missing():
        pytest.skip(reason)


def on_all(these: list[Host], command: tuple[str, ...], **settings) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command on each host with its NODE_RANK, to the end."""
    common = {"NNODES": len(these), "MASTER_PORT": free_port(), "GPUS_PER_NODE": 1, "PRESET": "cpu"}
    started = [host.start(command, NODE_RANK=rank, **common | settings) for rank, host in enumerate(these)]
    ended = []
    for process in started:
        printed = process.communicate(timeout=240)
        ended.append(subprocess.CompletedProcess(command, process.returncode, *printed))
    return ended


def test_a_host_whose_packets_are_refused_is_named(tmp_path):
    with hosts(4) as (a, b, c, d):
        for other in (c, d):
            b.refuse(other)
            other.refuse(b)
        ended = on_all([a, b, c, d], PREFLIGHT, RUN_DIR=tmp_path, PREFLIGHT_TIMEOUT=60)
    assert [one.returncode for one in ended] == [1, 1, 1, 1], ended
    report = json.loads(ended[0].stdout)
    grades = {node["host"]: node["grade"] for node in report["nodes"]}
    assert grades == {"node-a": "ok", "node-b": "failed", "node-c": "ok", "node-d": "ok"}
    assert report["exclude"] == ["node-b"] == list(read_excluded(tmp_path / "exclude_nodes.txt"))
    assert "failed: node-b (node 1): has no connection with node-c, node-d (no route" in ended[2].stderr


@pytest.mark.slow
def test_training_does_not_start_where_a_host_does_not_come(tmp_path):
    with hosts(3) as (a, b, c):
        b.run("ip", "link", "set", "eth0", "down")
        settings = {
            "RUN_DIR": tmp_path, "RUN_NAME": "one", "PREFLIGHT": 1, "PREFLIGHT_TIMEOUT": 8, "GBSZ": 9,
            "MBSZ": 1, "DATA_DIR": tmp_path / "data", "SLURM_JOB_NODELIST": "node-a,node-b,node-c",
        }  # fmt: skip
        ended = on_all([a, b, c], TRAIN, TRAIN_DATA="", **settings)
    assert [one.returncode for one in ended] == [1, 1, 1], ended
    line = "moe-exp: preflight failed: node-b (node 1): did not join within PREFLIGHT_TIMEOUT=8 s"
    assert line in ended[0].stderr.splitlines() and line in ended[2].stderr.splitlines()
    assert "node-b (node 1) cannot reach port" in ended[1].stderr
    (event,) = read_metrics(tmp_path / "one" / "metrics.jsonl")
    assert (event["event"], event["grade"], event["exclude"]) == ("preflight", "failed", ["node-b"])
    assert list(read_excluded(tmp_path / "exclude_nodes.txt")) == ["node-b"]


# Found by every Python of all hosts.
OTHER_CLOCK = """
import socket, time
true_time = time.time
if socket.gethostname() == "node-c":
    time.time = lambda: true_time() + 90.0
"""


@pytest.mark.slow
def test_a_slowed_host_and_a_clock_that_is_ahead_are_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)
    with hosts(3) as (a, b, c):
        b.slow_down("20mbit")
        # A tenth: this machine's cores are shared, the link is a hundred times slower.
        settings = {"PREFLIGHT_SLOW": 0.1, "PREFLIGHT_TIMEOUT": 60, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        ended = on_all([a, b, c], PREFLIGHT, RUN_DIR=tmp_path, **settings)
    assert [one.returncode for one in ended] == [0, 0, 0], ended
    report = json.loads(ended[0].stdout)
    grades = {node["host"]: node["grade"] for node in report["nodes"]}
    assert grades == {"node-a": "ok", "node-b": "slow", "node-c": "warning"}, report
    text = report["nodes"][1]["findings"][0]["text"]
    assert text.startswith("rank 1 (cpu): point-to-point 0.00") and "all-reduce 0.00" in text
    text = report["nodes"][2]["findings"][0]["text"]
    assert text in ("clock is 90.0 s ahead of node 0's", "clock is 89.9 s ahead of node 0's")
    assert report["exclude"] == ["node-b"] == list(read_excluded(tmp_path / "exclude_nodes.txt"))
