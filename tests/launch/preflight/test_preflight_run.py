"""The preflight before training and as a command; faults come from a sitecustomize.py of every Python."""

import json
import socket
import subprocess
import sys

import pytest

from helpers.ranks import free_port
from helpers.whole_runs import ROOT, clean_environ
from moe_exp.watch.excluded_nodes import read_excluded

# Rank 0 of the preflight multiplies wrongly, as a broken GPU does.
WRONG_PRODUCTS = """
import os, sys
if os.environ.get("RANK") == "0" and "MOE_EXP_PREFLIGHT_RESULTS" in os.environ:
    import torch
    multiply = torch.Tensor.__matmul__
    def broken(left, right):
        product = multiply(left, right)
        product[3, 4] += 1
        return product
    torch.Tensor.__matmul__ = broken
"""
# Rank 1 is killed when it begins to fill memory, as by the kernel when memory is short.
KILLED = """
import os
if os.environ.get("RANK") == "1" and "MOE_EXP_PREFLIGHT_RESULTS" in os.environ:
    import signal, torch
    torch.Tensor.fill_ = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def sabotage(tmp_path):
    """Makes a PYTHONPATH with a sitecustomize.py of some code."""

    def make(code: str) -> str:
        (tmp_path / "sabotage").mkdir()
        (tmp_path / "sabotage" / "sitecustomize.py").write_text(code)
        return f"{tmp_path}/sabotage:{ROOT}"

    return make


def preflight(tmp_path, num_ranks: int, **environ) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_exp", "watch", "preflight", "--json"]
    command += [f"--gpus-per-node={num_ranks}", f"--run-dir={tmp_path}"]
    settings = {"PRESET": "cpu", "MASTER_PORT": free_port(), "PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(command, env=clean_environ(**settings), capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_training_with_a_preflight(script_runs):
    ended = script_runs.succeed("checked", PREFLIGHT=1, TRAIN_ITERS=3)
    assert "Preflight: 1 nodes, 1 ranks" in ended.stdout
    before, start, *_ = ended.records("event")
    found = [before[name] for name in ("event", "grade", "iteration", "exclude")]
    assert (found, start["event"]) == (["preflight", "ok", 0, []], "start")
    assert len(ended.curve("lm_loss")) == 3


def test_training_does_not_start_on_a_host_that_multiplies_wrongly(script_runs, sabotage):
    ended = script_runs.run("wrong", PREFLIGHT=1, PYTHONPATH=sabotage(WRONG_PRODUCTS))
    host, finding = socket.gethostname(), "rank 0 (cpu): 4 wrong elements in matrix products"
    assert ended.code == 1, ended.text
    assert f"moe-exp: preflight failed: {host} (node 0): {finding}" in ended.stderr
    assert "moe-exp: not training: a node failed the preflight." in ended.stderr
    (event,) = ended.records("event")
    assert (event["event"], event["grade"]) == ("preflight", "failed")
    assert not ended.folder.config.exists()
    listed = script_runs.run_dir / "exclude_nodes.txt"
    assert list(read_excluded(listed)) == event["exclude"] == [host.partition(".")[0]]
    assert f"preflight: {finding}" in read_excluded(listed)[host.partition(".")[0]]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_nobody_waits_for_it(tmp_path, sabotage):
    ended = preflight(tmp_path, 3, PYTHONPATH=sabotage(KILLED))
    (node,) = json.loads(ended.stdout)["nodes"]
    assert (ended.returncode, node["grade"]) == (1, "failed"), ended.stderr
    # Others may say that it was slow before, on a busy host.
    texts = [finding["text"] for finding in node["findings"]]
    assert sum(text.startswith("rank 1 (cpu): step memory: process ended") for text in texts) == 1, texts


@pytest.mark.slow
def test_one_host_with_several_ranks(tmp_path):
    ended = preflight(tmp_path, 3, PREFLIGHT_SLOW=0.05)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["grade"], report["exclude"]) == ("ok", [])
    names = ("matmul", "memory", "point-to-point", "all-reduce", "all-to-all")
    assert all(report["nodes"][0]["numbers"][name] > 0 for name in names)
    assert set(report["all_ranks"]) == {"latency_us", "all_reduce", "all_to_all"}
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ended = preflight(tmp_path, 1, MASTER_PORT=port)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"moe-exp watch: MASTER_PORT={port}: node 0 cannot listen on it" in ended.stderr
