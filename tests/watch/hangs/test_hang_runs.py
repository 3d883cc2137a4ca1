"""Whole runs of ranks of which one sleeps in the all-to-all or is stopped; stacks on demand."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from helpers.ranks import free_port
from helpers.whole_runs import ROOT, EndedRun, Runs, clean_environ, ranks_of

pytestmark = pytest.mark.slow

LONG = 600.0  # a machine that others use, too
FOUR = {"GPUS_PER_NODE": 4, "EP": 4, "TRAIN_ITERS": 400, "HANG_TIMEOUT": 20}
# Found by every Python of the job: one rank falls asleep in the fifth iteration or so.
SLEEPS = """
import os
if os.environ.get("RANK") == "2":
    import time
    from moe_exp.layers.dispatcher.collectives import AllToAll
    before, calls = AllToAll._launch, []
    def sleepy(self, *arguments):
        calls.append(1)
        if len(calls) > 200:
            time.sleep(600)
        return before(self, *arguments)
    AllToAll._launch = sleepy
"""


def the_hang(run: EndedRun) -> dict[str, object]:
    """The one event `hang` of a run that failed by it, after comparing what was said."""
    assert run.code == 1
    (event,) = [record for record in run.records("event") if record["event"] == "hang"]
    last = run.stderr.splitlines()[-1]
    assert last.startswith("moe-exp: the run hangs: rank 2 on ")
    assert last.endswith(f"see {run.folder.path / event['folder']}")
    assert "the run hangs: rank 2 on " in run.folder.log.read_text()
    assert (run.folder.path / event["folder"] / "summary.txt").exists()
    assert (event["ranks"], event["hosts"]) == ([2], [socket.gethostname()])
    assert "failed: " not in run.stderr.replace("failed (exitcode: -9)", "")
    return event


def test_rank_that_sleeps_is_named(runs: Runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLEEPS)
    started = runs.start("asleep", PYTHONPATH=tmp_path, TRACE_CALLS_FROM=2, TRACE_CALLS_MB=1, **FOUR)
    run = runs.end("asleep", started, timeout=LONG)
    event = the_hang(run)
    assert "is in sleepy (sitecustomize.py:10)" in event["why"][0]
    assert "launch (moe_exp/layers/dispatcher/collectives.py:" in event["why"][0]
    folder = run.folder.path / event["folder"]
    assert len(list(folder.glob("rank_*.txt"))) == 4
    assert "latest calls of rank 2" in (folder / "summary.txt").read_text()


def test_ranks_start_again_after_a_hang_and_finish(runs: Runs):
    settings = {"GPUS_PER_NODE": 2, "EP": 2, "TRAIN_ITERS": 60, "SAVE_INTERVAL": 10, "HANG_TIMEOUT": 20}
    process = runs.start("again", MAX_RESTARTS=1, **settings)
    runs.wait_for_iteration("again", process, 12, timeout=LONG)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    run = runs.end("again", process, timeout=LONG)
    assert run.code == 0, run.text
    events = [(record["event"], record.get("ranks")) for record in run.records("event")]
    assert ("hang", [1]) in events
    # what a person should look at, then what the launcher does
    lines = [line for line in run.stderr.splitlines() if line.startswith("moe-exp: the ")]
    assert lines[0].startswith("moe-exp: the run hangs: rank 1 on ")
    assert lines[-1] == "moe-exp: the ranks are restarting (failure 1 of at most 1)"
    assert run.curve("iteration") == list(range(1, 61))
    alone = runs.succeed("alone", **settings)
    assert run.curve("lm_loss") == alone.curve("lm_loss")


def test_stacks_on_demand_leave_the_run_as_it_is(runs: Runs):
    settings = {"GPUS_PER_NODE": 2, "EP": 2, "TRAIN_ITERS": 200}  # seconds after the second request, too
    process = runs.start("asked", **settings)
    for iteration in (3, 20):
        runs.wait_for_iteration("asked", process, iteration, timeout=LONG)
        command = [sys.executable, "-m", "moe_exp", "watch", "stacks", str(runs.folder("asked").path)]
        printed = subprocess.check_output(command, text=True, env=clean_environ(), timeout=LONG)
        assert "requested by a user: the run continues" in printed and "location of all ranks:" in printed
    asked = runs.end("asked", process, timeout=LONG)
    assert asked.code == 0, asked.text
    assert len(list((asked.folder.path / "hang").glob("*/rank_*.txt"))) == 4
    alone = runs.succeed("alone", **settings)
    for name in ("lm_loss", "grad_norm", "params_norm"):
        assert asked.curve(name) == alone.curve(name)


def test_two_nodes_put_their_stacks_into_one_folder(runs: Runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLEEPS)
    port = free_port()
    settings = FOUR | {"NNODES": 2, "GPUS_PER_NODE": 2, "MASTER_ADDR": "localhost"}
    settings["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    first = runs.start("nodes", f"--master-port={port}", NODE_RANK=0, **settings)
    time.sleep(1.0)
    environ = runs.environ("nodes", NODE_RANK=1, **settings) | {"MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "moe_exp", "train"]
    with (tmp_path / "second.txt").open("w") as out:
        second = subprocess.Popen(command, env=environ, stdout=out, stderr=out)
    run = runs.end("nodes", first, timeout=LONG)
    assert second.wait(LONG) == 1
    event = the_hang(run)
    folders = [path for path in (run.folder.path / "hang").iterdir() if path.is_dir()]
    assert [path.name for path in folders] == [event["folder"].removeprefix("hang/")]
    assert len(list(folders[0].glob("rank_*.txt"))) == 4
    assert [json.loads(path.read_text())["done"] for path in folders[0].glob("node_*.json")] == [True, True]
