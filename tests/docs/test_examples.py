"""The scripts and the notebook of examples/ run, with fewer steps."""

import json
import os
import re
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.ranks import program, run_script_on_ranks
from helpers.whole_runs import SETTINGS

EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "dense_and_moe.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize(
    ("num_ranks", "name", "arguments"),
    [
        (1, "own_loop.py", ("--steps", "40")),
        (2, "fsdp_ep.py", ("--steps", "20")),
        # fast below
        pytest.param(2, "megatron_gpt.py", ("--steps", "20", "--ep", "2"), marks=pytest.mark.slow),
    ],
)
def test_a_script_learns(num_ranks, name, arguments):
    codes, printed = run_script_on_ranks(num_ranks, program, str(EXAMPLES / name), *arguments)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert codes == [0] * num_ranks and len(losses) >= 2 and losses[-1] < losses[0]


def with_adam_of_apex(path: str, *arguments: str) -> int:
    """Runs the script with an Adam of Apex's contract, as on a machine that has Apex."""
    import moe_exp.layers.spec  # noqa: F401  prepares Megatron for the CPU
    from moe_exp.engine.optimizer_classes import Adam

    import megatron.core.optimizer
    from megatron.core.optimizer import distrib_optimizer as distributed

    megatron.core.optimizer.Adam = distributed.Adam = Adam
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    return program(path, *arguments)


@pytest.mark.parametrize("ep", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("run", "flags"),
    [
        (program, ()),
        pytest.param(with_adam_of_apex, ("--distributed-optimizer",), marks=pytest.mark.slow),
    ],
)
def test_a_megatron_program_continues_from_a_strict_load(ep, run, flags, tmp_path):
    def losses(steps: int, *more: str) -> dict[str, str]:
        arguments = (*flags, "--ep", str(ep), "--steps", str(steps), *more)
        codes, printed = run_script_on_ranks(2, run, str(EXAMPLES / "megatron_gpt.py"), *arguments)
        assert codes == [0, 0], printed
        return dict(re.findall(r"step +(\d+)  lm loss (\S+)", printed))

    whole, folder = losses(20), ("--folder", str(tmp_path / "ckpt"))
    assert losses(10, *folder) == {"10": whole["10"]}
    assert losses(20, *folder) == {"20": whole["20"]}


def run_cells(folder: Path, settings: dict[str, object]) -> int:
    for name in SETTINGS - {"MASTER_ADDR", "MASTER_PORT"}:  # of whoever runs the tests
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in settings.items()})
    os.chdir(folder)
    return program("cells.py")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, session_runs):
    """Its cells in order, without Jupyter, on a rank, which trains without a launcher."""
    (tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in CELLS))
    settings = {"TRAIN_ITERS": 4, "EVAL_ITERS": 1, "DATA_DIR": session_runs.data_dir}
    codes, printed = run_script_on_ranks(1, run_cells, tmp_path, settings, MPLBACKEND="agg")
    assert codes == [0], printed
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["notebook_dense", "notebook_moe"]
