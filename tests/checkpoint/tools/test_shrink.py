"""`moe-exp ckpt shrink`: files of views become as small as what they show, and share the same."""

import json
import os
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoint.ckpt_files import write_checkpoint
from moe_exp.checkpoint.tools.shrink import difference, shrink
from moe_exp.cli import main

HIDDEN = 256


def save(path: Path, value: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, **options)
    return path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def shrunk(path: Path, value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read again from a file that is smaller, with the same values."""
    assert shrink(save(path, value)).gain_bytes > 0
    loaded = load(path)
    assert all(torch.equal(loaded[name], value[name]) for name in value)
    return loaded


def storage_bytes(value: torch.Tensor) -> int:
    return value.untyped_storage().nbytes()


def test_rows_of_a_large_matrix(tmp_path):
    whole = torch.randn(10 * HIDDEN, HIDDEN)
    path = save(tmp_path / "rank.pt", {"model": {"weight": whole[HIDDEN : 2 * HIDDEN]}, "step": 7})
    path.chmod(0o640)
    os.utime(path, (1_000_000, 2_000_000))
    result = shrink(path)
    assert result.before_bytes > whole.nbytes
    assert result.after_bytes == path.stat().st_size < 1.02 * whole.nbytes / 10
    loaded = load(path)
    assert torch.equal(loaded["model"]["weight"], whole[HIDDEN : 2 * HIDDEN])
    assert (loaded["step"], storage_bytes(loaded["model"]["weight"])) == (7, whole.nbytes // 10)
    assert (path.stat().st_mode & 0o777, path.stat().st_mtime) == (0o640, 2_000_000)
    assert [one.name for one in tmp_path.iterdir()] == ["rank.pt"]
    again = shrink(path)
    assert (again.gain_bytes, again.problem) == (0, "")


def test_every_container_and_kind_of_view(tmp_path):
    flat = torch.randn(4 * HIDDEN * HIDDEN)
    matrix = flat[: HIDDEN * HIDDEN].view(HIDDEN, HIDDEN)
    value = OrderedDict(
        columns=torch.randn(HIDDEN, HIDDEN)[:, :3],
        transposed=matrix[:8].t(),
        nested=[(matrix[5], {"deep": [matrix[7:9], None, "text", 2.5, float("nan")]}), ()],
        scalar=flat[9],
        empty=flat[:0],
        expanded=torch.randn(HIDDEN)[11].expand(64, 64),
        parameter=nn.Parameter(flat[HIDDEN : 2 * HIDDEN].view(2, -1)),
        half=flat[-HIDDEN:].bfloat16(),
        odd=torch.arange(10_000, dtype=torch.uint8)[1001:1008],
        whole_numbers=torch.arange(10)[3:5],
    )
    value._metadata = {"": {"version": 2}}
    before, path = save(tmp_path / "before.pt", value), save(tmp_path / "x" / "a.pt", value)
    assert shrink(path).problem == ""
    assert path.stat().st_size < 0.3 * before.stat().st_size
    loaded = load(path)
    assert difference(load(before), loaded) == ""
    assert loaded._metadata == {"": {"version": 2}}
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert storage_bytes(loaded["expanded"]) == 4


def test_tied_weights_stay_tied(tmp_path):
    table = torch.randn(8 * HIDDEN, 4)[:HIDDEN]
    value = {"embedding": table, "output": table, "view": table[:], "other": table.clone()}
    loaded = shrunk(tmp_path / "tied.pt", value)
    pointers = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    assert pointers["embedding"] == pointers["output"] == pointers["view"] != pointers["other"]


def test_views_that_overlap_keep_a_storage(tmp_path):
    """The second begins inside the first; the third lies apart."""
    flat = torch.arange(4096, dtype=torch.float32)
    value = {"a": flat[1001:1011], "b": flat[1005:1021], "c": flat[3000:3002], "d": flat[1003:1010:3]}
    loaded = shrunk(tmp_path / "overlapping.pt", value)
    loaded["a"][6] = -1
    assert loaded["b"][2] == -1
    assert storage_bytes(loaded["a"]) == storage_bytes(loaded["d"]) == 4 * (1021 - 1001)
    assert storage_bytes(loaded["c"]) == 8


def test_columns_that_share_no_element_are_parted(tmp_path):
    matrix = torch.randn(64, 1000)
    value = {"a": matrix[:, :3], "b": matrix[:, 500:502], "again": matrix[:, :3], "row": matrix[3, 600:610]}
    value |= {"apart": matrix[:1, 5:6]}
    loaded = shrunk(tmp_path / "columns.pt", value)
    sizes = {name: storage_bytes(tensor) for name, tensor in loaded.items()}
    assert sizes == {"a": 768, "b": 512, "again": 768, "row": 40, "apart": 4}
    assert loaded["a"].data_ptr() == loaded["again"].data_ptr()


def test_values_are_compared_bit_by_bit():
    x, y = torch.tensor([1.0, float("nan")]), torch.tensor([0.0])
    for b, found in (
        ({"x": x.clone(), "y": [y.clone()]}, ""),
        ({"x": x.clone(), "y": [torch.tensor([-0.0])]}, "['y'][0]: tensors"),
        ({"x": x.clone(), "y": (y.clone(),)}, "['y']: list and tuple"),
        ({"x": x.clone()}, "['y'] and nothing: keys"),
    ):
        assert difference({"x": x, "y": [y]}, b) == found
    shared = torch.ones(2)
    found = difference({"x": shared, "y": shared[:]}, {"x": shared, "y": shared.clone()})
    assert found == "tensor 1 is shared in only one of the files"


def test_a_file_that_came_out_wrong_is_not_put_in_place(tmp_path, monkeypatch):
    path = save(tmp_path / "a.pt", {"x": torch.randn(4096)[:16]})
    before, right = contents(tmp_path), torch.save
    monkeypatch.setattr(torch, "save", lambda value, file: right({"x": value["x"] + 1}, file))
    assert shrink(path).problem == "the written file differs from the original (['x']: tensors)"
    assert contents(tmp_path) == before


LEFT_ALONE = {
    "class.pt": "skipped, it contains more than tensors and plain containers (fractions.Fraction",
    "tokens.bin": "skipped, it is not a file of torch.save, or is damaged",
}


def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    save(folder / "a.pt", torch.randn(100_000)[:10])
    save(folder / "deep" / "b.bin", [torch.randn(50_000)[:10]])
    save(folder / "tight.pth", torch.randn(100))
    save(folder / "name.txt", torch.randn(100_000)[:10])
    save(folder / "class.pt", {"share": Fraction(1, 2), "y": torch.randn(100_000)[:10]})
    (folder / "tokens.bin").write_bytes(bytes(range(256)) * 10)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder(tmp_path, capsys):
    folder = tree(tmp_path)
    before = contents(folder)
    assert main(["ckpt", "shrink", str(folder), "--dry-run", "--json"]) == 0
    dry = capsys.readouterr()
    assert contents(folder) == before
    assert all(f"{folder}/{name}: {why}" in dry.err for name, why in LEFT_ALONE.items())
    report = json.loads(dry.out)
    names = [Path(one["path"]).name for one in report["files"]]
    assert names == ["a.pt", "class.pt", "b.bin", "tight.pth", "tokens.bin"]

    assert main(["ckpt", "shrink", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    changed = [path for path in before if path.read_bytes() != before[path]]
    assert sorted(path.name for path in changed) == ["a.pt", "b.bin"]
    gain = sum(len(before[path]) - path.stat().st_size for path in changed)
    assert gain == pytest.approx(report["gain_bytes"], rel=0.01)
    assert lines[-1] == f"2 of 5 files are smaller, by {gain:,} bytes"
    assert f"{folder}/tight.pth: already minimal" in lines


def test_into_another_folder_and_by_pattern(tmp_path, capsys):
    folder, out = tree(tmp_path), tmp_path / "out"
    before = contents(folder)
    command = ["ckpt", "shrink", str(folder), "--out", str(out)]
    assert main([*command, "--pattern", "*.bin", "--pattern", "*.txt"]) == 0
    assert contents(out).keys() == {out / "deep/b.bin", out / "name.txt"}
    assert contents(folder) == before
    assert torch.equal(load(out / "name.txt"), load(folder / "name.txt"))
    capsys.readouterr()
    assert main([*command, "--pattern", "*.txt", "--no-recursive"]) == 1
    assert f"{folder}/name.txt: skipped, it {out}/name.txt already exists" in capsys.readouterr().err


def test_when_nothing_can_be_done(tmp_path, capsys):
    folder = tree(tmp_path)
    assert main(["ckpt", "shrink", str(folder / "tokens.bin")]) == 1
    assert main(["ckpt", "shrink", str(folder), "--pattern", "*.npz"]) == 1
    assert f"PATH={folder}: has no files that match *.npz. Fix: " in capsys.readouterr().err
    assert main(["ckpt", "shrink", str(tmp_path / "no")]) == 1


def test_a_file_of_the_old_format_behind_a_link_which_stays(tmp_path):
    path = save(tmp_path / "old.pt", {"x": torch.arange(10_000)[:7]}, _use_new_zipfile_serialization=False)
    (tmp_path / "link.pt").symlink_to(path)
    assert shrink(tmp_path / "link.pt").gain_bytes > 70_000
    assert torch.equal(load(path)["x"], torch.arange(7))
    assert (tmp_path / "link.pt").is_symlink()


def test_files_of_a_checkpoint_stay_as_its_manifest_says(tmp_path):
    path = write_checkpoint(tmp_path, tensors={}, common={"x": torch.arange(10_000)[:7]}) / "common.pt"
    before = path.read_bytes()
    assert shrink(path).problem.startswith("belongs to a checkpoint whose manifest.json has its checksum: ")
    assert shrink(path, target=tmp_path / "elsewhere.pt").gain_bytes > 70_000
    assert path.read_bytes() == before


@pytest.mark.parametrize("pattern", ["/abs", "../*.pt", ""])
def test_a_pattern_that_leads_out_of_the_folder(pattern, tmp_path, capsys):
    assert main(["ckpt", "shrink", str(tmp_path), f"--pattern={pattern}"]) == 1
    assert f"PATTERN={pattern}: must match files in the folder PATH" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/iter_0000005"])
def test_a_run_is_referred_to_reshape_and_prune(place, tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoints", tensors={}, common={"x": torch.arange(10_000)[:7]})
    path = tmp_path / place
    assert main(["ckpt", "shrink", str(path), "--dry-run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"PATH={path}: contains distributed checkpoints" in line
    assert f"ckpt reshape {path} TARGET --weights-only" in line and f"ckpt prune {path} --keep-last" in line


def test_a_folder_of_other_files_beside_checkpoints_is_searched(tmp_path, capsys):
    """Also Megatron-LM's checkpoints of the format `torch`, which are files of torch.save."""
    save(tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt", {"x": torch.arange(10_000)[:7]})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert main(["ckpt", "shrink", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 1 files are smaller")
