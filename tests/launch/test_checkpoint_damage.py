"""Checkpoints that are damaged, or that UPCYCLE_FROM cannot use, are refused before any rank starts."""

import shutil
from pathlib import Path

import pytest

from helpers.studies.study_runs import write_tokens
from helpers.whole_runs import SETTINGS, TINY
from moe_exp.cli import main
from moe_exp.config import load_config
from moe_exp.launch.machine_checks import check_files

ITERATION = "iter_0000002"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def trained(tokens, session_runs):
    """Folders of a stopped MoE run and of a dense one."""
    given = {"TRAIN_DATA": tokens, "TRAIN_ITERS": 4, "EXIT_INTERVAL": 2, "WARMUP_ITERS": 0}
    moe = session_runs.stopped("start_moe", **given)
    dense = session_runs.stopped("start_dense", USE_MOE=False, **given)
    return {"moe": moe.folder.path, "dense": dense.folder.path}


@pytest.fixture
def refusals(tokens, trained, tmp_path):
    """Problems of a start in copies of the folders."""
    shutil.copytree(trained["moe"], tmp_path / "moe")
    shutil.copytree(trained["dense"], tmp_path / "dense")

    def refused(**changes: object) -> list[str]:
        given = TINY | {"TRAIN_DATA": tokens, "TRAIN_ITERS": 4, "WARMUP_ITERS": 0, "RUN_DIR": tmp_path}
        given = given | {"RUN_NAME": "new"} | changes
        return check_files(load_config({name.lower(): str(value) for name, value in given.items()}, {}))

    return refused


def test_what_fits_is_not_refused(refusals, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert refusals() == refusals(RUN_NAME="moe") == refusals(LOAD_DIR=tmp_path / "moe") == []
    assert refusals(UPCYCLE_FROM=tmp_path / "dense/checkpoints", MOE_FFN_HIDDEN_SIZE=96) == []
    assert refusals(LOAD_DIR=tmp_path / "moe", ALLOW_OTHER_DATA=True, SEED=7) == []
    # what a killed run has left, the ranks tidy up
    (tmp_path / f"moe/checkpoints/{ITERATION}").rename(tmp_path / f"moe/checkpoints/{ITERATION}.replaced")
    assert refusals(RUN_NAME="moe") == []
    (tmp_path / f"moe/checkpoints/{ITERATION}.replaced").rename(tmp_path / f"moe/checkpoints/{ITERATION}")
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("place", "changes", "line"),
    [
        ("moe/checkpoints", {}, "is the checkpoint of an MoE run"),
        ("dense/checkpoints", {"HIDDEN_SIZE": 128}, "HIDDEN_SIZE=128: the dense run UPCYCLE_FROM="),
        ("none", {}, "does not exist"),
    ],
)
def test_dense_runs_that_do_not_fit(place, changes, line, refusals, tmp_path):
    (tmp_path / "dense/config.yaml").unlink()  # the checkpoint itself is compared
    assert line in refusals(UPCYCLE_FROM=tmp_path / place, **changes)[0]


@pytest.mark.parametrize("setting", ["RUN_NAME", "LOAD_DIR", "UPCYCLE_FROM"])
@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("common.pt", Path.unlink, "cannot be used (it is missing)"),
        ("manifest.json", lambda path: path.write_text("{"), "cannot be read"),
        ("__0_0.distcp", lambda path: path.write_bytes(b"short"), "has 5 bytes instead of"),
        ("__0_0.distcp", Path.unlink, "is missing"),
    ],
    ids=["no common.pt", "no manifest", "short", "missing"],
)
def test_damage(name, damage, reason, setting, refusals, tmp_path):
    run = "dense" if setting == "UPCYCLE_FROM" else "moe"
    damage(tmp_path / run / "checkpoints" / ITERATION / name)
    value = {"RUN_NAME": "moe", "LOAD_DIR": tmp_path / "moe"}.get(setting, tmp_path / "dense/checkpoints")
    (line,) = refusals(**{setting: value})
    assert "no checkpoint can be used" in line and f"{name}: {reason}" in line


@pytest.mark.parametrize("command", ["train", "slurm", "sweep"])
def test_dry_runs_refuse_it(command, refusals, tmp_path, monkeypatch, capsys):
    """Of a sweep, whose cases load no checkpoint, missing data."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "moe/checkpoints" / ITERATION / "__0_0.distcp").unlink()
    given = TINY | {"LOAD_DIR": tmp_path / "moe", "RUN_DIR": tmp_path / "runs", "CPU_NODES": True}
    given |= {"TRAIN_DATA": tmp_path / "gone"} if command == "sweep" else {}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert main([command, "--dry-run"]) == (1 if command == "sweep" else 2)
    out, err = capsys.readouterr()
    assert ("not found" if command == "sweep" else "__0_0.distcp: is missing") in err
    assert command != "train" or "Parameters: " in out  # the plan all the same
