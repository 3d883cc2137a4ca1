"""README.md: its length, first screen and table of commands, and the examples of docs/library.md."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.answered import answer
from helpers.docs.commands import commands, commands_of_line, inline_commands, moe_exp_arguments, problem_of

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
TABLE = TEXT.split("| I want to | command | page |")[1].split("\n## ")[0]
# Commands that answer in seconds and start nothing.
QUICK = [
    command
    for command in [*commands(README), *inline_commands(README)]
    if "--dry-run" in command.words or command.words[:2] == ("moe-exp", "plan")
]

START = """
import moe_exp, os, torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
"""
STEP = """
tokens = torch.arange(128).view(2, 64)
loss = model(tokens, tokens % 64, None, labels=tokens).mean()
loss.backward()
assert abs(loss.item() - 6.24) < 0.5, loss
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
assert output.shape == (256, 64) and auxiliary_loss > 0
"""


def _python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_python_examples_run():
    library = _python_blocks((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    assert len(library) == 2 and _python_blocks(TEXT) == library[1:]
    program = START + "\n".join(library) + STEP
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_first_screen_has_the_two_commands():
    top = TEXT.splitlines()[:15]
    assert "bash moe_exp/scripts/run_moe_from_scratch.sh" in "\n".join(top)
    assert "bash tests/run.sh" in "\n".join(top)


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_the_table_has_whole_commands():
    """Each can be typed as it stands: no placeholder for flags, nothing that the command still asks for."""
    rows = [line.split("|")[1:-1] for line in TABLE.splitlines() if re.match(r"\| [^-]", line)]
    assert len(rows) > 10 and all(len(row) == 3 and "](" in row[2] for row in rows)
    for _, cell, _ in rows:
        if cell.strip():
            (command,) = commands_of_line(cell.strip(" `"), "README.md")
            assert problem_of(moe_exp_arguments(command)) == "", cell


@pytest.mark.parametrize("command", QUICK, ids=lambda command: " ".join(command.words)[:60])
def test_quick_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISK_CHECK", "none")
    for assignment in command.variables:
        monkeypatch.setenv(*assignment.split("=", 1))
    answered = answer(moe_exp_arguments(command), codes=(0,))
    assert not answered.failure
    assert answered.out and not list(tmp_path.iterdir())
