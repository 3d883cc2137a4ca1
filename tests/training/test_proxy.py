"""The model of `moe-exp mup`: trained as train.py trains it, and what is measured of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint.legs import MODEL, start_job, write_data
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.state import Progress
from moe_exp.cli import main
from moe_exp.config import Config
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval
from moe_exp.training.proxy import Proxy, coordinates

NUM_STEPS = 3
SETTINGS: dict[str, Any] = {
    **MODEL, "gpus_per_node": 1, "eval_interval": 0, "router_score": "sigmoid",
    "router_bias_update_rate": 0.01, "warmup_iters": 0,
    "parametrization": "mup", "mup_base_hidden_size": MODEL["hidden_size"] // 2,
}  # fmt: skip


def losses_of(settings: dict[str, Any], port: int) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """Losses of the training loop, of the proxy, and the proxy's coordinates."""
    job, progress = start_job(settings, port), Progress()
    interval, expected = Interval(job.config, job.runtime, job.trained.model), []
    for _ in range(NUM_STEPS):
        step = loop.train_step(job, progress, interval, count_zeros=False)
        total, num_counted = sum(step.losses)
        expected.append(float(total / num_counted))
    proxy = Proxy(job.config)
    found = [proxy.step() for _ in range(NUM_STEPS)]
    measured = coordinates(job.config, 2)
    runtime.stop()
    return expected, found, measured


def test_it_trains_as_the_training_loop_does(tmp_path):
    settings = SETTINGS | {"train_data": str(write_data(tmp_path))}
    ((expected, found, measured),) = run_on_ranks(1, losses_of, settings, free_port(), join=False)
    assert found == expected and len(set(found)) == NUM_STEPS
    parts = {"embedding", "attention", "router logits", "experts", "residual stream", "output layer"}
    assert [set(step) for step in measured] == [parts] * 3
    for part in parts:
        sizes, changes = zip(*(step[part] for step in measured), strict=True)
        assert changes[0] == 0 and 0 < changes[1] < changes[2] and min(sizes) > 0, part
    assert measured[0]["experts"] != measured[0]["residual stream"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in {name.upper() for name in Config.model_fields} & set(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return write_data(tmp_path)


def run_command(folder: Path, *flags: str) -> tuple[int, str]:
    """`moe-exp mup` in a process of its own, which has a process group: exit code and what it printed."""
    command = [sys.executable, "-m", "moe_exp", "mup", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=500)
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["check", "--widths", "64,x"], "WIDTHS=64,x: must be a comma-separated list"),
        (["check", "--widths", "64"], "WIDTHS=64: a comparison requires at least two models."),
        (["check", "--widths", "64,72"], "NUM_HEADS=4: must remain a whole number, but is 9/2"),
        (["check", "--repeats", "0"], "REPEATS=0: must be at least 1."),
        (["check", "--steps", "0"], "STEPS=0: must be at least 1."),
        (["check", "--gpus-per-node", "2"], "GPUS_PER_NODE=2: models are trained on one rank."),
        (["check", "--optimizer", "sgd"], "PARAMETRIZATION=mup: cannot be combined with OPTIMIZER=sgd"),
        (["transfer", "--lrs", "0.1,0.01"], "LRS=0.1,0.01: must be a comma-separated list"),
    ],
)
def test_bad_input_is_one_line(flags, line, alone, capsys):
    there = {path.name for path in alone.parent.iterdir()}
    assert main(["mup", *flags]) == 1
    out, err = capsys.readouterr()
    assert line in err and "Fix: " in err and "Traceback" not in err and not out
    assert {path.name for path in alone.parent.iterdir()} == there


@pytest.mark.slow
def test_coordinates_are_flat_under_mup_alone(alone, tmp_path):
    flags = ["check", "--widths", "64,128,256", "--repeats", "8", "--train-data", str(alone)]
    code, text = run_command(tmp_path, *flags)
    assert code == 0 and "NOT FLAT" not in text and text.count(" flat ") == 6
    code, text = run_command(tmp_path, *flags, "--parametrization", "standard", "--repeats", "2")
    assert code == 1 and text.count("NOT FLAT") >= 4


@pytest.mark.slow
def test_transfer_continues_with_what_is_left(alone, tmp_path):
    flags = ["transfer", "--widths=32,64", f"--train-data={alone}", "--train-iters=12", "--warmup-iters=2"]
    code, text = run_command(tmp_path, *flags, "--repeats", "1", "--lrs", "0.001,0.004,0.016")
    assert code in (0, 1) and "the best LR changes by a factor of" in text
    again, second = run_command(tmp_path, *flags, "--repeats", "1", "--lrs", "0.001,0.004,0.016")
    assert again == code and second.splitlines()[-3:] == text.splitlines()[-3:]
    code, text = run_command(tmp_path, *flags, "--lrs", "0.001,0.004", "--seq-len", "32")
    assert code == 1 and "OUT=mup_transfer: contains runs with another SEQ_LEN. Fix: " in text
