"""The benchmark of a training step: moe_exp and megatron-core's own parts compute the same model, and what it prints can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_megatrons_own_parts_have_the_same_first_loss(tmp_path):
    # A process of its own: it starts Megatron's parallel state.
    command = [sys.executable, str(ROOT / "bench/bench_gpu_step.py"), "--model", "moe", "dmoe", "--contenders", "ours", "megatron"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command += ["--steps", "1", "--profile", "--json", str(tmp_path / "step.json")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["model"], row["contender"]) for row in rows] == [
        (model, contender) for model in ("moe", "dmoe") for contender in ("ours", "megatron")
    ]
    for ours, megatron in zip(rows[::2], rows[1::2], strict=True):
        assert ours["first_loss"] == pytest.approx(megatron["first_loss"], rel=1e-5)
        assert min(row["tflops"] for row in (ours, megatron)) > 0
    assert done.stdout.count("aten::mm") == 4  # a table of operators for each
