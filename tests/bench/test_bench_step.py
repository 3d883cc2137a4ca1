"""The benchmark compares like with like: plain torch and moe_exp have the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import ROOT
from moe_exp.data.tokens.tokens import BinIdxWriter


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Tokens whose frequencies fall off as in text, so that the experts get unequal shares."""
    ranks = np.random.default_rng(0).zipf(1.2, size=60_000) - 1
    with BinIdxWriter(tmp_path / "text", vocab_size=4096) as writer:
        writer.add_document(ranks % 4096)
    return tmp_path / "text"


def test_plain_torch_has_the_same_losses(prefix: Path) -> None:
    # A process of its own: it joins a process group. One for both models: most of its time are the imports.
    command = [sys.executable, str(ROOT / "bench/bench_step.py"), "--check", "--data", str(prefix)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, env=environ, cwd=prefix.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("relative difference") == 2 * 3  # dense and MoE
