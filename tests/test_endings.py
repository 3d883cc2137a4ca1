"""How a run ends when it is asked to, when a rank dies, and when it may not start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket

import pytest

from moe_exp.config import load_config
from moe_exp.hosts import device_label
from moe_exp.run_folder import open_run_folder
from whole_runs import Runs, ranks_of

# Found by every Python of the job; rank FAILING_RANK raises in its third iteration.
SITECUSTOMIZE = """
import os
if os.environ.get("RANK") == os.environ["FAILING_RANK"]:
    from moe_exp.data.dataset import SampleStream
    batch, calls = SampleStream.batch, []
    def fail(self, first, num_samples):
        calls.append(first)
        if first >= 16:
            raise RuntimeError("the disk is on fire")
        return batch(self, first, num_samples)
    SampleStream.batch = fail
"""


@pytest.mark.parametrize(
    ("number", "num_ranks"), [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_signal_saves_and_the_same_command_goes_on(number, num_ranks, runs):
    settings = {"GPUS_PER_NODE": num_ranks, "EP": num_ranks, "TRAIN_ITERS": 30}
    process = runs.start("stopped", **settings)
    runs.wait_for_iteration("stopped", process, 3)
    process.send_signal(number)
    stopped = runs.end("stopped", process, timeout=60)
    assert stopped.code == 0, stopped.text
    last = stopped.curve("iteration")[-1]
    assert 3 <= last < 30
    assert json.loads(stopped.folder.summary.read_text())["status"] == "stopped"
    assert stopped.records("event")[-1]["status"] == "stopped"
    assert [path.name for path in stopped.folder.checkpoints.glob("iter_*")] == [f"iter_{last:07d}"]
    assert stopped.stderr.splitlines()[-1] == "moe-exp: stopping: the run saves a checkpoint and ends; a second signal kills it"
    assert "Traceback" not in stopped.text
    again = runs.succeed("stopped", **settings)
    assert f"resumed from iteration {last} of" in again.stdout
    assert again.curve("iteration") == list(range(1, 31))


@pytest.mark.parametrize(
    ("failing", "settings"),
    [
        (1, {"GPUS_PER_NODE": 2, "EP": 2}),
        pytest.param(0, {"GPUS_PER_NODE": 2, "PP": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"GPUS_PER_NODE": 4, "TP": 2, "PP": 2}, marks=pytest.mark.slow),
    ],
    ids=["EP2", "PP2", "TP2-PP2"],
)
def test_error_of_the_rank_that_failed_comes_first(failing, settings, runs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    run = runs.run("failed", PYTHONPATH=tmp_path, FAILING_RANK=failing, **settings)
    assert run.code not in (0, 2)
    assert run.curve("iteration") == [1, 2]
    reports = [line for line in run.stderr.splitlines() if " failed: " in line and line.startswith("moe-exp: rank ")]
    assert reports[0] == f"moe-exp: rank {failing} on {socket.gethostname()} ({device_label()}) failed: RuntimeError: the disk is on fire"
    before = run.stderr.partition(reports[0])[0]
    assert "Error" not in before
    assert "Traceback" not in before
    assert json.loads(run.folder.summary.read_text())["status"] == "failed"
    assert not list(run.folder.checkpoints.iterdir())


def test_killed_rank_is_named(runs):
    process = runs.start("killed", GPUS_PER_NODE=2, TRAIN_ITERS=2000)
    runs.wait_for_iteration("killed", process, 2)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    run = runs.end("killed", process, timeout=60)
    assert run.code not in (0, 2)
    before, _, after = run.stderr.partition("Root Cause")
    assert "failed: " not in before.replace("failed (exitcode: -9)", "")
    assert "rank      : 1 (local_rank: 1)" in after
    assert "host      : " in after
    assert "Signal 9 (SIGKILL)" in after
    assert "Run failed" in run.stdout


def test_run_folder_of_another_model(runs: Runs):
    config = load_config({"run_dir": str(runs.run_dir), "run_name": "taken"}, runs.environ("taken", NUM_LAYERS=8))
    folder = open_run_folder(config, [])
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    run = runs.run("taken")
    assert run.code == 2
    assert run.stdout == ""
    fix = "give another RUN_NAME to start a new run, or set NUM_LAYERS=8 to go on with this one"
    assert run.stderr == f"moe-exp: NUM_LAYERS=4: {folder.path} holds a model with NUM_LAYERS=8. Fix: {fix}.\n"
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    assert list(folder.checkpoints.iterdir()) == []


def test_read_only_run_dir(runs: Runs):
    under = []
    if os.geteuid() == 0:  # who may write everywhere, unless that right is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, as root")
        under = ["setpriv", "--bounding-set=-dac_override"]
    runs.run_dir.mkdir()
    runs.run_dir.chmod(0o500)
    run = runs.end("refused", runs.start("refused", under=under))
    assert run.code == 2
    fix = "choose a RUN_DIR that you may write to, or change its permissions"
    assert run.stderr == f"moe-exp: RUN_DIR={runs.run_dir}: {runs.run_dir} is not writable. Fix: {fix}.\n"
    assert list(runs.run_dir.iterdir()) == []
