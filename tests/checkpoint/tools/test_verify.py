"""`moe-exp ckpt verify`: every kind of damage is one line and exit code 1."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoint.ckpt_files import common_state, drawn_state, flip_bit, write_checkpoint
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, Chunk, StoredTensor
from moe_exp.checkpoint.tools.soundness import Verification, layout_problem
from moe_exp.cli import main

ROUTER = "decoder.layers.mlp.router.weight"


def middle_of_a_chunk(folder: Path) -> tuple[Path, int]:
    """A place among the values of the router of layer 1."""
    chunk = CheckpointReader(folder).tensors[ROUTER].chunks[1]
    content = (folder / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.num_bytes]
    values = drawn_state()[ROUTER][1].contiguous().view(torch.uint8).numpy().tobytes()
    return folder / chunk.file, chunk.start + content.index(values) + 20


def test_a_sound_checkpoint(tmp_path, capsys):
    folder = write_checkpoint(tmp_path)
    assert main(["ckpt", "verify", str(tmp_path), "--finite"]) == 0
    assert capsys.readouterr().out == f"{folder}: ok, 4 files, 41 tensors in 70 chunks\n"


def test_without_checksums_it_says_so_and_looks_at_the_rest(tmp_path, capsys):
    folder = write_checkpoint(tmp_path, manifest=False)
    assert main(["ckpt", "verify", str(folder)]) == 0
    no_manifest, ok = capsys.readouterr().out.splitlines()
    assert no_manifest == f"{folder}: has no manifest.json, so there are no checksums of its files to compare"
    assert ok == f"{folder}: ok, 41 tensors in 70 chunks"


def test_a_checkpoint_of_ours_without_its_manifest_is_damaged_as_a_run_says(tmp_path, capsys):
    common = common_state(5) | {"versions": {"moe_exp": "0"}}
    folder = write_checkpoint(tmp_path, manifest=False, common=common)
    assert main(["ckpt", "verify", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{folder / 'manifest.json'}: is missing"


def _truncated(folder: Path) -> str:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 5000)
    return r"^\S+__0_0\.distcp: has \d+ bytes instead of \d+\n\S+__0_0\.distcp: \d+ more problems; .*\n$"


def _flipped(folder: Path) -> str:
    flip_bit(*middle_of_a_chunk(folder))
    changed = r"^\S+__0_0\.distcp: has changed since it was written \(xxh3 \w{8} instead of \w{8}\)\n"
    return changed + r"\S+__0_0\.distcp: 1 more problem; --json lists it\n$"


def _flipped_without_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    flip_bit(*middle_of_a_chunk(folder))
    # The place in the chunk of its own, the bit in a value: no other line.
    place = re.escape(f"{ROUTER} at [1, 0, 0]: {folder / '__0_0.distcp'}: cannot be used (the checksum of ")
    return place + r"\S+ is wrong\)\. Fix: .*\n"


def _missing(folder: Path) -> str:
    (folder / "__0_0.distcp").unlink()
    return r"^\S+__0_0\.distcp: is missing\n\S+__0_0\.distcp: 81 more problems; .*\n$"


def _cut_metadata_with_manifest(folder: Path) -> str:
    os.truncate(folder / ".metadata", 1000)
    return r"^\S+/\.metadata: has 1000 bytes instead of \d+\n\S+/\.metadata: 1 more problem; .*\n$"


def _cut_metadata(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    os.truncate(folder / ".metadata", 1000)
    return r"\n\S+\.metadata: cannot be used \(.*\)\. Fix: .*\n$"


def _places_outside(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../x.distcp\n"))
    return r"says that \S+ lies outside, in \.\./x\.distcp"


def _newer_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    return r"has format version 99, .* Fix: update moe_exp\.\n$"


DAMAGES = [
    _truncated, _flipped, _flipped_without_manifest, _missing, _cut_metadata,
    _cut_metadata_with_manifest, _places_outside, _newer_manifest,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage(damage: Callable[[Path], str], tmp_path, capfd):
    folder = write_checkpoint(tmp_path)
    expected = damage(folder)
    assert main(["ckpt", "verify", str(folder)]) == 1
    out = capfd.readouterr().out
    assert re.search(expected, out), out


def findings(tmp_path: Path, tensors: dict[str, torch.Tensor], *, finite: bool = False) -> list[str]:
    found = Verification(write_checkpoint(tmp_path, tensors=tensors), finite=finite).findings()
    return [text for _, text in found]


def test_values_that_are_not_finite(tmp_path):
    tensors = drawn_state()
    tensors["optimizer.state.exp_avg.output_layer.weight"][3, 2] = float("nan")
    assert findings(tmp_path, tensors) == []
    (line,) = findings(tmp_path / "again", tensors, finite=True)
    key = "optimizer.state.exp_avg.output_layer.weight"
    assert line.endswith(f"__0_0.distcp: {key} at [0, 0] has values that are not finite")


def test_main_weights_of_another_checkpoint(tmp_path):
    """Only bytes of bf16 weights: each main weight rounds to its weight, and a half of one does not."""
    tensors = drawn_state()
    tensors[ROUTER][1, 2, 3:5] *= 2
    (line,) = findings(tmp_path, tensors)
    rule = "2 of 32 values of decoder.layers.1.mlp.router.weight are not the optimizer's main weights"
    assert f"iter_0000005: {rule}" in line


def test_optimizer_of_another_model(tmp_path):
    tensors = drawn_state()
    tensors["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(17, 8)
    tensors["optimizer.state.exp_avg.more.weight"] = torch.zeros(3)
    lines = findings(tmp_path, tensors)
    assert [line.partition(": ")[2] for line in lines] == [
        "the optimizer's exp_avg of more.weight belongs to no weight",
        "output_layer.weight has the shape [16, 8], the optimizer's exp_avg [17, 8]",
    ]


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (4, 6))], ""),
        ([((0, 0), (2, 6)), ((2, 0), (2, 2)), ((2, 2), (2, 4))], ""),
        # Ranges of values in memory order, as data parallel ranks own them.
        ([((0, 0), (1, 4)), ((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 5)), ((3, 5), (1, 1))], ""),
        ([((0, 0), (2, 6)), ((1, 0), (3, 6))], "has chunks that overlap, at [0, 0]"),
        ([((0, 0), (4, 6)), ((3, 5), (1, 1))], "has chunks that overlap, at [0, 0]"),
        ([((0, 0), (2, 6)), ((2, 1), (2, 5))], "is not filled by its chunks"),
        ([((0, 0), (2, 6))], "is not filled by its chunks"),
        # As many values as there are, one of them twice.
        ([((0, 0), (3, 6)), ((3, 0), (1, 5)), ((0, 0), (1, 1))], "has chunks that overlap, at [0, 0]"),
        ([((0, 0), (4, 7))], "has a chunk at [0, 0] of [4, 7], outside of its shape [4, 6]"),
    ],
)
def test_chunks_have_to_fill_a_tensor(boxes, problem):
    chunks = tuple(Chunk(offsets, sizes, "file", 0, 1) for offsets, sizes in boxes)
    assert layout_problem(StoredTensor("key", (4, 6), torch.float32, chunks)) == problem


def test_as_json(tmp_path, capsys):
    folder = write_checkpoint(tmp_path)
    flip_bit(*middle_of_a_chunk(folder))
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
