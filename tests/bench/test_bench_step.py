"""The benchmark compares like with like: plain torch and moe_exp have the same losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers import ROOT
from helpers.ranks import program, run_script_on_ranks
from moe_exp.data.tokens.tokens import BinIdxWriter


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Tokens whose frequencies fall off as in text, so that the experts get unequal shares."""
    ranks = np.random.default_rng(0).zipf(1.2, size=60_000) - 1
    with BinIdxWriter(tmp_path / "text", vocab_size=4096) as writer:
        writer.add_document(ranks % 4096)
    return tmp_path / "text"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["MoE", "dense"])
def test_plain_torch_has_the_same_losses(model: str, prefix: Path) -> None:
    command = str(ROOT / "bench/bench_step.py"), "--check", "--data", str(prefix), "--models", model
    codes, printed = run_script_on_ranks(1, program, *command)
    assert codes == [0], printed
    assert printed.count("relative difference") == 3
