from __future__ import annotations

import re
import subprocess
import sys

from helpers import ROOT

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


def test_python_examples_run():
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert len(blocks) == 2
    program = START + "\n".join(blocks) + STEP
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_first_screen_has_the_two_commands():
    top = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:15]
    assert "bash moe_exp/scripts/run_moe_from_scratch.sh" in "\n".join(top)
    assert "bash tests/run.sh" in "\n".join(top)
