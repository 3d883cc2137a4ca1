"""`moe-exp ckpt info`: what a checkpoint holds, without its tensors."""

import argparse
import enum
import json
import os
import pickle
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from helpers.checkpoint import ckpt_files
from helpers.checkpoint.ckpt_files import EXPERT_HIDDEN, EXPERTS, HIDDEN, LAYERS, VOCAB, write_checkpoint
from moe_exp.checkpoint.format.folders import MANIFEST
from moe_exp.checkpoint.format.torch_dist import read_common, read_metadata
from moe_exp.cli import main
from moe_exp.runs.run_folder import LATEST

PARAMETERS = {
    "experts": LAYERS * EXPERTS * 3 * EXPERT_HIDDEN * HIDDEN, "attention": LAYERS * 4 * HIDDEN * HIDDEN,
    "embedding": VOCAB * HIDDEN, "output": VOCAB * HIDDEN, "router": LAYERS * EXPERTS * HIDDEN,
    "norms": (2 * LAYERS + 1) * HIDDEN,
}  # fmt: skip


def run_json(capsys, *arguments):
    code = main(["ckpt", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_everything_it_says(tmp_path, capsys):
    folder = write_checkpoint(tmp_path, facts={"valid_loss": 2.5, "versions": {"torch": "2.13.0"}})
    for part in folder.glob("*.distcp"):
        part.write_bytes(b"")  # no tensor is read
    code, report = run_json(capsys, "info", folder)
    expected = {
        "iteration": 5, "samples": 40, "tokens": 40 * 32, "written_by": "moe_exp", "format": "torch_dist",
        "checksums": True, "parameters": {**PARAMETERS, "total": sum(PARAMETERS.values())},
        "optimizer": ["exp_avg", "exp_avg_sq", "param"],
        "styles": {"layers": "stacked", "experts": "stacked"},
        "layout": {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "cp": 1, "device": "cpu"}, "valid_loss": 2.5,
        "versions": {"torch": "2.13.0"}, "data": {"seed": 1234},
        "schedule": {"max_lr": 0.001, "num_steps": 40}, "num_files": 5,
    }  # fmt: skip
    assert (code, {name: report[name] for name in expected}) == (0, expected)
    assert report["model"].startswith("2 layers, hidden size 8, vocabulary 16, 2 heads, 4 experts top-2 in 2")
    assert set(report["dtypes"]) == {"bfloat16", "float32"}  # the expert bias is fp32
    assert report["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert main(["ckpt", "info", str(folder)]) == 0
    assert f"{sum(PARAMETERS.values()):,} (" in capsys.readouterr().out


def test_tensors_that_fit_a_pattern(tmp_path, capsys):
    folder = write_checkpoint(tmp_path)
    _, report = run_json(capsys, "info", folder, "--tensors", "decoder.*router.weight")
    router = {"name": "decoder.layers.mlp.router.weight", "shape": [2, 4, 8], "dtype": "bfloat16"}
    assert report["tensors"] == [router | {"num_chunks": 2, "num_bytes": 128}]
    assert main(["ckpt", "info", str(folder), "--tensors", "*.gate"]) == 1
    assert "tensors=*.gate: matches none of" in capsys.readouterr().err


def test_all_checkpoints_of_a_run(tmp_path, capsys):
    checkpoints = tmp_path / "checkpoints"
    for iteration in (2, 4, 6):
        write_checkpoint(checkpoints, iteration, manifest=iteration != 2)
    damaged = checkpoints / "iter_0000004" / "__0_0.distcp"
    size = damaged.stat().st_size
    os.truncate(damaged, size - 1)
    _, report = run_json(capsys, "info", tmp_path)
    assert report["iteration"] == 6
    assert [(one["iteration"], one["state"], one["latest"]) for one in report["checkpoints"]] == [
        (2, "without checksums", False),
        (4, f"damaged: {damaged}: has {size - 1} bytes instead of {size}", False),
        (6, "whole", True),
    ]
    _, older = run_json(capsys, "info", tmp_path, "--iteration", 2)
    assert (older["iteration"], "checkpoints" in older) == (2, False)
    assert main(["ckpt", "info", str(tmp_path), "--iteration", "3"]) == 1
    assert "Fix: choose one of 2, 4, 6." in capsys.readouterr().err
    # Where the newest cannot be read, those beside it are what matters.
    (checkpoints / "iter_0000006" / ".metadata").unlink()
    assert main(["ckpt", "info", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert re.search(r"iteration 2 .* without checksums\n", printed.out)
    assert re.search(r"iteration 6 .* damaged: \S+metadata: is missing +latest\n", printed.out)
    assert "iter_0000006/.metadata: cannot be used (it is missing)" in printed.err


def test_megatron_lms_checkpoints(tmp_path, capsys, monkeypatch):
    """common.pt as its script writes it: arguments with enumerations of modules that are not installed."""
    drawn = ckpt_files.drawn_state()
    tensors = {key: value for key, value in drawn.items() if not key.startswith("optimizer.")}
    folder = write_checkpoint(tmp_path, 7, tensors=tensors, manifest=False)
    module = types.ModuleType("megatron.training.kinds")
    module.Kind = enum.Enum("Kind", ["one", "two"], module=module.__name__)
    with monkeypatch.context() as patch:
        for name in ("megatron", "megatron.training"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        arguments = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16, kind=module.Kind.two)
        torch.save({"args": arguments, "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    read = read_common(folder)["args"]
    assert (read.num_layers, read.params_dtype, read.kind.arguments) == (2, torch.bfloat16, (2,))

    code, report = run_json(capsys, "info", folder)
    found = [report[name] for name in ("iteration", "samples", "optimizer", "layout")]
    assert (code, found) == (0, [7, None, [], None])
    assert report["written_by"].startswith("Megatron-LM")
    assert report["parameters"]["total"] == sum(PARAMETERS.values())


@pytest.mark.parametrize(
    ("latest", "text"), [("x", "must contain an iteration number"), ("9", "iter_0000009: does not")]
)
def test_what_is_no_checkpoint(latest, text, tmp_path, capsys):
    assert main(["ckpt", "info", str(tmp_path)]) == 1
    assert "is not a distributed checkpoint (metadata.json not found)" in capsys.readouterr().err
    (tmp_path / LATEST).write_text(latest)
    assert main(["ckpt", "info", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize("damage", ["rows", "chunk", "empty rows", "nested"])
@pytest.mark.parametrize("command", ["info", "verify", "reshape"])
def test_a_checkpoint_that_is_impossible_is_refused(command, damage, tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "a", manifest=damage == "nested")
    if damage == "nested":
        (folder / MANIFEST).write_text("[" * 100_000)
        expected = f"{MANIFEST}: cannot be read (maximum recursion depth exceeded"
    else:
        metadata = read_metadata(folder)
        key = "decoder.layers.self_attention.linear_proj.weight"
        tensor = metadata.state_dict_metadata[key]
        others = tensor.size[1:]
        tensor.size = torch.Size([2**40, *(others if damage != "empty rows" else [0])])
        if damage == "chunk":
            tensor.chunks[0] = replace(tensor.chunks[0], sizes=torch.Size([2**40, *others]))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        expected = f"shape of {key} is {2**40}x"
    target = [str(tmp_path / "b")] if command == "reshape" else []
    assert main(["ckpt", command, str(folder), *target]) in (1, 2)
    printed = capsys.readouterr()
    assert expected in printed.out + printed.err
    assert not (tmp_path / "b").exists()
