"""Commands that prepare work for other machines take their defaults from these, whatever this one has."""

from __future__ import annotations

import json
import re

import pytest

from moe_exp.cli import main

GPU_RECIPE, CPU_RECIPE = "PRESET=reference DTYPE=bf16 OPTIMIZER=adam", "PRESET=cpu DTYPE=fp32 OPTIMIZER=muon"
SWEEP = {"EXECUTOR": "slurm", "TPS": "1", "PPS": "1", "EPS": "1", "MBSZS": "1"}
LADDER = ["ladder", "--dry-run", "--executor", "slurm", "--sizes", "128,256"]


@pytest.fixture(params=[0, 4], ids=["login node without GPUs", "login node with 4"])
def login_node(request, monkeypatch, tmp_path):
    for module in ("loading", "model_settings", "presets", "settings"):
        monkeypatch.setattr(f"moe_exp.config.{module}.count_gpus", lambda: request.param)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my7b.env").write_text("NUM_LAYERS=16\nHIDDEN_SIZE=512\nNUM_EXPERTS=8\nTOPK=2\n")


@pytest.mark.parametrize(
    ("command", "environ", "recipe", "ranks"),
    [
        (["sweep", "--config", "my7b.env", "--gpus", "8", "--nodes", "4", "--dry-run"],
         SWEEP | {"GPU": "H100-80GB"}, GPU_RECIPE, "gpus_8"),
        (["sweep", "--dry-run", "--executor", "slurm", "--gpu", "GB200-186GB"],
         SWEEP | {"EXECUTOR": ""}, GPU_RECIPE, "gpus_4"),
        (["sweep", "--dry-run"], SWEEP | {"GPUS_PER_NODE": "8"}, GPU_RECIPE, "gpus_8"),
        (["sweep", "--dry-run"], SWEEP | {"GPU": "CPU"}, CPU_RECIPE, "gpus_2"),
        (["sweep", "--dry-run"], SWEEP | {"GPU": "h100", "PRESET": "cpu"}, CPU_RECIPE, "gpus_2"),
        ([*LADDER, "--gpus-per-node", "8"], {}, GPU_RECIPE, ""),
        ([*LADDER, "--preset", "cpu"], {}, CPU_RECIPE, ""),
        (["slurm", "--dry-run"], {"GPUS_PER_NODE": "8", "DISK_CHECK": "none"}, GPU_RECIPE, "per-node=8"),
        (["slurm", "--dry-run"], {"CPU_NODES": "true"}, CPU_RECIPE, "GPUS_PER_NODE=2"),
        (["slurm", "--dry-run"], {"GPUS_PER_NODE": "8", "PRESET": "cpu", "GBSZ": "128"}, CPU_RECIPE, "=8"),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_nodes(command, environ, recipe, ranks, login_node, monkeypatch, capsys):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 0
    printed = capsys.readouterr()
    assert recipe in printed.out + printed.err
    assert ranks in printed.out


def test_a_sweep_for_gpus_predicts_bf16_and_adam(login_node, monkeypatch, capsys):
    """Equal to the predictions with the preset in view."""
    command = ["sweep", "--config", "my7b.env", "--gpus", "8", "--nodes", "4", "--dry-run", "--gpu", "h100"]
    found = []
    for preset in ("", "reference"):
        for name, value in (SWEEP | {"PRESET": preset}).items():
            monkeypatch.setenv(name, value)
        assert main(command) == 0
        found.append(re.findall(r"predicted ([\d.]+)", capsys.readouterr().out))
    assert len(found[0]) == 2 and found[0] == found[1]


@pytest.mark.parametrize(
    ("gpu", "ranks", "dtype"), [("h100", 8, "bf16"), ("gb200", 4, "bf16"), ("cpu", 2, "fp32")]
)
def test_a_plan_is_for_whole_nodes_of_its_device(gpu, ranks, dtype, login_node, capsys):
    assert main(["plan", "--gpu", gpu, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_gpus"], report["dtype"]) == (ranks, dtype)


def test_ranks_of_unknown_nodes_must_be_given(login_node, monkeypatch, capsys):
    for command in (["sweep", "--executor", "slurm", "--dry-run"], LADDER, ["slurm", "--dry-run"]):
        assert main(command) in (1, 2)
        assert "GPUS_PER_NODE=none: must be given" in capsys.readouterr().err
