"""`moe-exp ckpt verify`: every kind of damage is one line and exit code 1."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoint.ckpt_files import ROUTER, common_state, drawn_state, flip_a_value, write_checkpoint
from moe_exp.checkpoint.format.torch_dist import Chunk, StoredTensor
from moe_exp.checkpoint.integrity import Verification, layout_problem
from moe_exp.cli import main


def test_a_sound_checkpoint(tmp_path, capsys):
    folder = write_checkpoint(tmp_path)
    assert main(["ckpt", "verify", str(tmp_path), "--finite"]) == 0
    assert capsys.readouterr().out == f"{folder}: ok, 4 files, 41 tensors in 70 chunks\n"


def test_without_checksums_it_looks_at_the_rest_unless_the_checkpoint_is_ours(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "a", manifest=False)
    assert main(["ckpt", "verify", str(folder)]) == 0
    no_manifest, ok = capsys.readouterr().out.splitlines()
    assert "no manifest.json found" in no_manifest and ok == f"{folder}: ok, 41 tensors in 70 chunks"
    ours = write_checkpoint(tmp_path / "b", manifest=False, common=common_state(5) | {"versions": {}})
    assert main(["ckpt", "verify", str(ours)]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{ours / 'manifest.json'}: is missing"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5000 if path.suffix else 1000)


def lead_outside(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../x.distcp\n"))


def make_newer(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))


DATA, MORE = "__0_0.distcp", r"more problems?; .*\n$"
# Of the router, in a chunk of its own and in a value: no other line.
WRONG = rf"\n.*{re.escape(ROUTER)} at \[1, 0, 0\]: \S+{DATA}: .*the checksum of \S+ is wrong\)\. Fix: .*\n$"
# What is done to which file, with a manifest or without, and what is said.
DAMAGES: dict[str, tuple[Callable[[Path], None], str, bool, str]] = {
    "cut": (cut, DATA, True, rf"^\S+{DATA}: has \d+ bytes instead of \d+\n\S+{DATA}: \d+ {MORE}"),
    "flip": (flip_a_value, ".", True, rf"^\S+{DATA}: has changed .*\(xxh3 \w{{8}} .*\n\S+{DATA}: 1 {MORE}"),
    "flip, no manifest": (flip_a_value, ".", False, WRONG),
    "missing": (Path.unlink, DATA, True, rf"^\S+{DATA}: is missing\n\S+{DATA}: 81 {MORE}"),
    "cut metadata": (cut, ".metadata", True, rf"^\S+/\.metadata: has 1000 bytes instead .*\n\S+: 1 {MORE}"),
    "cut metadata, no manifest": (cut, ".metadata", False, r"\n\S+\.metadata: cannot be used .*Fix: .*\n$"),
    "outside": (lead_outside, ".metadata", False, r"places \S+ outside the folder, in \.\./x\.distcp"),
    "newer": (make_newer, "manifest.json", True, r"has format version 99, .* Fix: update moe_exp\.\n$"),
}


@pytest.mark.parametrize(("damage", "name", "manifest", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_damage(damage, name, manifest, expected, tmp_path, capfd):
    folder = write_checkpoint(tmp_path, manifest=manifest)
    damage(folder / name)
    assert main(["ckpt", "verify", str(folder)]) == 1
    out = capfd.readouterr().out
    assert re.search(expected, out), out


def findings(folder: Path, tensors: dict[str, torch.Tensor], *, finite: bool = False) -> list[str]:
    written = write_checkpoint(folder, tensors=tensors)
    return [text for _, text in Verification(written, finite=finite).findings()]


def test_values_that_are_not_finite(tmp_path):
    tensors, key = drawn_state(), "optimizer.state.exp_avg.output_layer.weight"
    tensors[key][3, 2] = float("nan")
    assert findings(tmp_path, tensors) == []
    (line,) = findings(tmp_path / "again", tensors, finite=True)
    assert line.endswith(f"__0_0.distcp: {key} at [0, 0] has values that are not finite")


def test_main_weights_of_another_checkpoint(tmp_path):
    """Only bytes of bf16 weights: each main weight rounds to its weight, and a half of one does not."""
    tensors = drawn_state()
    tensors[ROUTER][1, 2, 3:5] *= 2
    (line,) = findings(tmp_path, tensors)
    assert (
        "2 of 32 values of decoder.layers.1.mlp.router.weight differ from the optimizer's rounded main"
        in line
    )


def test_optimizer_of_another_model(tmp_path):
    tensors = drawn_state()
    tensors["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(17, 8)
    tensors["optimizer.state.exp_avg.more.weight"] = torch.zeros(3)
    lines = findings(tmp_path, tensors)
    assert [line.partition(": ")[2] for line in lines] == [
        "the optimizer's exp_avg of more.weight has no matching weight",
        "output_layer.weight has the shape [16, 8], but the optimizer's exp_avg has [17, 8]",
    ]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (4, 6))], ""),
        ([((0, 0), (2, 6)), ((2, 0), (2, 2)), ((2, 2), (2, 4))], ""),
        # Ranges of values in memory order, as data parallel ranks own them.
        ([((0, 0), (1, 4)), ((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 5)), ((3, 5), (1, 1))], ""),
        ([((0, 0), (2, 6)), ((1, 0), (3, 6))], "has overlapping chunks at [0, 0]"),
        ([((0, 0), (4, 6)), ((3, 5), (1, 1))], "has overlapping chunks at [0, 0]"),
        ([((0, 0), (2, 6)), ((2, 1), (2, 5))], "is not filled by its chunks"),
        ([((0, 0), (2, 6))], "is not filled by its chunks"),
        # As many values as there are, one of them twice.
        ([((0, 0), (3, 6)), ((3, 0), (1, 5)), ((0, 0), (1, 1))], "has overlapping chunks at [0, 0]"),
        ([((0, 0), (4, 7))], "has a chunk at [0, 0] with sizes [4, 7], outside its shape [4, 6]"),
    ],
)
def test_chunks_have_to_fill_a_tensor(boxes, problem):
    chunks = tuple(Chunk(offsets, sizes, "file", 0, 1) for offsets, sizes in boxes)
    assert layout_problem(StoredTensor("key", (4, 6), torch.float32, chunks)) == problem


def test_as_json(tmp_path, capsys):
    folder = write_checkpoint(tmp_path)
    flip_a_value(folder)
    assert main(["ckpt", "verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["checksums"], len(report["findings"])) == (False, True, 2)


def test_many_problems_of_one_kind_are_one_line_and_a_count(tmp_path, capsys):
    nans = {key: value.fill_(torch.nan) for key, value in drawn_state().items() if value.is_floating_point()}
    folder = write_checkpoint(tmp_path, tensors=drawn_state() | nans)
    assert main(["ckpt", "verify", str(folder), "--finite"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("has values that are not finite")
    assert re.search(r"^values that are not finite: \d+ more problems", second)
