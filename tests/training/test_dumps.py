"""Dumps of live ranks, and `moe-exp watch diff` of dumps and of checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoint.small_job import run_to_end, small_settings, write_tokens
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.cli import main
from moe_exp.training.recordings import dump_file

ROUTER = "decoder.layers.1.mlp.router.weight"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two iterations on two data parallel ranks: `a`, and `b` with another learning rate."""
    folder = tmp_path_factory.mktemp("dumps")
    write_tokens(folder)
    dumping_run(folder, "a")
    dumping_run(folder, "b", lr=0.002)
    return folder


def dumping_run(folder: Path, name: str, **changes: Any) -> None:
    values = {"gpus_per_node": 2, "train_iters": 2, "dump_iters": "1,2", "distributed_optimizer": False}
    code, printed = run_to_end(small_settings(folder, name, **values | changes))
    assert code == 0, printed


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    code = main(["watch", "diff", str(a), str(b), *flags])
    return code, capsys.readouterr().out.splitlines()


def test_what_a_dump_holds(runs):
    found = load_file(dump_file(runs / "a", 2, 1))
    reader = CheckpointReader(runs / "a" / "checkpoints" / "iter_0000002")
    assert torch.equal(found[ROUTER], reader.read("decoder.layers.mlp.router.weight")[1])
    exp_avg = reader.read("optimizer.state.exp_avg.decoder.layers.mlp.router.weight")[1]
    assert torch.equal(found[f"exp_avg of {ROUTER}"], exp_avg)
    before = load_file(dump_file(runs / "a", 1, 1))
    moment = 0.9 * before[f"exp_avg of {ROUTER}"] + 0.1 * found[f"gradient of {ROUTER}"]
    torch.testing.assert_close(found[f"exp_avg of {ROUTER}"], moment, rtol=1e-5, atol=1e-9)
    assert not any(name.startswith("main weights") for name in found)  # fp32: they are the parameters
    kinds = [
        {name for name in found if (" of " in name) == bool(kind) and name.startswith(kind)}
        for kind in ("", "gradient", "exp_avg_sq")
    ]
    assert len(set(map(len, kinds))) == 1
    assert not list(runs.rglob("*.partial"))


def test_two_ranks_and_two_runs(runs, capsys):
    ranks = [dump_file(runs / "a", 2, rank) for rank in (0, 1)]
    code, lines = diff(*ranks, capsys)
    assert (code, lines[-1]) == (0, "THE SAME, in every value of every tensor")
    code, lines = diff(ranks[0].parent, dump_file(runs / "b", 2, 0).parent, capsys, "--top", "3")
    assert code == 1 and lines[-1].startswith("DIFFERENT: most in rank ")
    differing = [line for line in lines if line.startswith("differs: ")]
    shown = [float(line.partition("relative ")[2].split()[0]) for line in differing]
    assert len(shown) == 3 and shown == sorted(shown, reverse=True)


def test_one_value_by_hand(runs, capsys, tmp_path):
    ours = dump_file(runs / "a", 2, 0)
    tensors = load_file(ours)
    value = tensors[ROUTER].view(-1)[5]
    norm = float(tensors[ROUTER].double().norm())
    value += 0.5
    save_file(tensors, tmp_path / "other.safetensors")
    code, lines = diff(tmp_path / "other.safetensors", ours, capsys, "--json")
    found = json.loads(lines[0])
    (one,) = found["tensors"]
    assert (code, found["ok"], one["name"]) == (1, False, ROUTER)
    assert one["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert one["relative"] == pytest.approx(0.5 / norm, rel=1e-6)
    code, lines = diff(tmp_path / "other.safetensors", ours, capsys, "--rtol", "3")
    assert (code, lines[-1]) == (0, "THE SAME, up to relative errors of 3")


@pytest.mark.slow
def test_distributed_ranks_hold_ranges(runs, capsys):
    dumping_run(runs, "c", distributed_optimizer=True)
    dumps = [load_file(dump_file(runs / "c", 1, rank)) for rank in (0, 1)]
    states = [{name for name in dump if " of " in name} for dump in dumps]
    assert all(states) and not states[0] & states[1]
    code, lines = diff(dump_file(runs / "c", 1, 0), dump_file(runs / "a", 1, 0), capsys)
    assert code == 1 and lines[-1].startswith("DIFFERENT: ")
    assert any(line.startswith("only in B: ") for line in lines)
    code, lines = diff(runs / "a", runs / "c", capsys)
    assert (code, lines[-1]) == (0, "THE SAME, in every value of every tensor")


def test_checkpoints_with_their_optimizer(runs, capsys):
    assert diff(runs / "a", runs / "a", capsys)[1][-1] == "THE SAME, in every value of every tensor"
    code, lines = diff(runs / "a", runs / "b", capsys)
    assert code == 1
    settings = [line for line in lines if line.startswith(("setting: ", "progress: "))]
    assert settings == ["setting: lr 0.001 and 0.002"]
    assert any(" of decoder.layers." in line for line in lines if line.startswith("differs: "))
    code, lines = diff(runs / "a", runs / "b", capsys, "--weights-only")
    assert not any(" of decoder.layers." in line for line in lines if line.startswith("differs: "))


def test_what_cannot_be_compared_is_a_line(runs, capsys, tmp_path):
    ours, broken, other = dump_file(runs / "a", 1, 0), tmp_path / "broken.safetensors", tmp_path / "folder"
    broken.write_bytes(b"no dump")
    other.mkdir()
    for a, b, text in (
        (ours, tmp_path / "gone", "is not there. Fix: "),
        (ours, broken, "cannot be read"),
        (ours.parent, ours, "is a folder, and B="),
        (ours.parent, other, "have no rank in common"),
        (ours.parent.parent, other, f"Fix: name one of them, as {dump_file(runs / 'a', 2, 0).parent}."),
    ):
        assert main(["watch", "diff", str(a), str(b)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("moe-exp watch: ") and text in line


def test_a_full_disk_does_not_end_the_run(tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "full", train_iters=2, dump_iters="1", dump_ranks="0")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "dumps").write_text("a file in the place of the folder")
    code, printed = run_to_end(settings)
    assert code == 0 and "no dump of rank 0 at iteration 1: " in printed
