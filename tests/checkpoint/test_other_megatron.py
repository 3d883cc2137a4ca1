"""Checkpoints move between versions of Megatron-Core, with the losses of a run that did not move.

Needs a second environment with another version beside this one, as `bash tests/run.sh --python 3.12` makes.
"""

import subprocess
import sys
from importlib.metadata import version

import pytest

from helpers import ROOT
from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import Runs

pytestmark = pytest.mark.slow

BIAS = {"GPUS_PER_NODE": 1, "ROUTER_BIAS_UPDATE_RATE": 0.01, "ROUTER_SCORE": "sigmoid"}
MUON = {"GPUS_PER_NODE": 2, "PP": 2, "OPTIMIZER": "muon", "DISTRIBUTED_OPTIMIZER": False}
_VERSION = "from importlib.metadata import version; print(version('megatron-core'))"


@pytest.fixture(scope="module")
def other_python() -> str:
    """A Python of this checkout's environments with another version of Megatron-Core."""
    for python in sorted(ROOT.glob(".venv*/bin/python")):
        found = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True).stdout.strip()
        if found and found != version("megatron-core"):
            return str(python)
    pytest.skip("no environment of another Python here with another Megatron-Core")


@pytest.mark.parametrize("from_other", [False, True], ids=["to_the_other", "from_the_other"])
@pytest.mark.parametrize("settings", [BIAS, MUON], ids=["bias", "PP2-muon"])
def test_losses_continue(settings, from_other, other_python, script_runs: Runs, tmp_path):
    with BinIdxWriter(tmp_path / "tokens", vocab_size=2048) as writer:
        for number in range(2000):
            writer.add_document(range(number + 1, number + 21))
    settings = settings | {"TRAIN_DATA": tmp_path / "tokens", "TRAIN_ITERS": 8, "EXIT_INTERVAL": 4}
    first, second = (other_python, sys.executable) if from_other else (sys.executable, other_python)
    whole = script_runs.succeed("whole", PYTHON=second, **settings | {"EXIT_INTERVAL": 0})
    script_runs.stopped("moved", PYTHON=first, **settings)
    moved = script_runs.succeed("moved", PYTHON=second, **settings)
    assert moved.curve("iteration") == list(range(1, 9))
    assert moved.curve("lm_loss") == pytest.approx(whole.curve("lm_loss"), rel=1e-6)
    assert moved.curve("grad_norm") == pytest.approx(whole.curve("grad_norm"), rel=1e-4)
