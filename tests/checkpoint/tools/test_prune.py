"""`moe-exp ckpt prune`: removes what no rule keeps, never what `latest` names, nothing while a run writes."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from helpers.checkpoint.ckpt_files import write_checkpoint
from moe_exp.cli import main
from moe_exp.runs.run_folder import LATEST, iterations

LOSSES = {10: 3.0, 20: 1.5, 30: 2.0, 40: 1.0, 50: 2.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with five checkpoints, of few bytes each."""
    for iteration, loss in LOSSES.items():
        write_checkpoint(tmp_path / "checkpoints", iteration, tensors={}, facts={"valid_loss": loss})
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--keep-last", "2"], [40, 50]),
        (["--keep-last", "1", "--keep-every", "20"], [20, 40, 50]),
        (["--keep-last", "1", "--keep-best", "2"], [20, 40, 50]),
        (["--keep-last", "9"], [10, 20, 30, 40, 50]),
    ],
)
def test_what_is_kept(flags, kept, run, capsys):
    checkpoints = run / "checkpoints"
    assert main(["ckpt", "prune", str(run), *flags, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert iterations(checkpoints) == [10, 20, 30, 40, 50]
    folders = {i: checkpoints / f"iter_{i:07d}" for i in LOSSES}
    sizes = {i: sum(path.stat().st_size for path in folder.iterdir()) for i, folder in folders.items()}
    gone = [iteration for iteration in LOSSES if iteration not in kept]
    assert planned["removed"] == [{"iteration": i, "num_bytes": sizes[i]} for i in gone]
    assert planned["num_bytes"] == sum(sizes[i] for i in gone)

    assert main(["ckpt", "prune", str(checkpoints), *flags]) == 0
    assert iterations(checkpoints) == kept
    *removed, total = capsys.readouterr().out.splitlines()
    assert removed == [f"removed {folders[i]}: {sizes[i]:,} bytes" for i in gone]
    assert f"{planned['num_bytes']:,} bytes" in total
    assert sorted(path.name for path in checkpoints.iterdir()) == [*(f"iter_{i:07d}" for i in kept), LATEST]


@pytest.mark.parametrize(("latest", "last", "kept"), [("20", "1", [20, 50]), ("40", "2", [30, 40, 50])])
def test_latest_stays_and_newer_ones_take_no_place(latest, last, kept, run):
    """Whoever goes back to an older checkpoint, or passes a damaged one over, sets `latest` back."""
    (run / "checkpoints" / LATEST).write_text(latest)
    assert main(["ckpt", "prune", str(run), "--keep-last", last]) == 0
    assert iterations(run / "checkpoints") == kept


def test_not_while_a_run_writes(run, capsys):
    with FileLock(run / ".lock"):
        assert main(["ckpt", "prune", str(run), "--keep-last", "1"]) == 1
        assert "a run is writing to this folder. Fix: wait until the run ends" in capsys.readouterr().err
        assert iterations(run / "checkpoints") == list(LOSSES)
    assert main(["ckpt", "prune", str(run), "--keep-last", "1"]) == 0
    assert iterations(run / "checkpoints") == [50]


def test_rules_that_make_no_sense(run, capsys):
    for flags, text in (("--keep-last=0", "keep-last=0: must"), ("--keep-every=-1", "every=-1: must")):
        assert main(["ckpt", "prune", str(run), "--keep-last", "1", flags]) == 1
        assert text in capsys.readouterr().err
    assert iterations(run / "checkpoints") == list(LOSSES)


def test_the_best_of_unknown_losses(tmp_path, capsys):
    write_checkpoint(tmp_path, tensors={}, manifest=False)
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--keep-best", "1"]) == 1
    assert "keep-best=1: no checkpoint in" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(tmp_path / "iter_0000005"), "--keep-last", "1"]) == 1
    assert "has no checkpoints. Fix: specify a checkpoints folder" in capsys.readouterr().err
