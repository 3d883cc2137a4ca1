"""`moe-exp ckpt diff`: differences by hand, and checkpoints of other layouts and styles that are equal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from helpers.checkpoint.ckpt_files import common_state, drawn_state, write_checkpoint
from moe_exp.checkpoint.tools import diff
from moe_exp.checkpoint.tools.diff import compare
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.cli import main

ROUTER = "decoder.layers.mlp.router.weight"
NUM_WEIGHTS, NUM_TRAINED = 31, 29


def test_the_same_model_in_another_style(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    for index, changes in enumerate([Reshaping(layers="single"), Reshaping(experts="single")]):
        other = reshape(source, tmp_path / f"b{index}", changes).folder
        found = compare(other, source, optimizer=True)
        assert (len(found.tensors), found.num_equal) == (
            NUM_WEIGHTS + 3 * NUM_TRAINED,
            NUM_WEIGHTS + 3 * NUM_TRAINED,
        )
        assert found.is_within(0.0)
        assert (found.only_in_a, found.only_in_b, found.shapes, found.progress) == ([], [], {}, {})


def test_numbers_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(diff, "_BLOCK_BYTES", 40)  # several blocks
    b = {
        "output_layer.weight": torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 12.0]]),
        "w.weight": torch.ones(3),
        "s.weight": torch.ones(3),
    }
    a = {
        "output_layer.weight": torch.tensor([[3.0, 4.0], [0.0, 0.5], [0.0, 10.8]]),
        "v.weight": torch.ones(3),
        "s.weight": torch.ones(4),
    }
    found = compare(write_checkpoint(tmp_path / "a", tensors=a), write_checkpoint(tmp_path / "b", tensors=b))
    (one,) = found.tensors
    assert (one.name, one.num_equal, one.is_equal) == ("output_layer.weight", 4, False)
    assert one.max_abs == pytest.approx(1.2)
    assert one.relative == pytest.approx(1.3 / 13.0)  # sqrt(0.5^2 + 1.2^2) of sqrt(3^2 + 4^2 + 12^2)
    assert (found.only_in_a, found.only_in_b, found.shapes) == (
        ["v.weight"],
        ["w.weight"],
        {"s.weight": ((4,), (3,))},
    )
    assert not found.is_within(1.0)


@pytest.mark.parametrize("more_in", ["a", "b"])
def test_a_tensor_of_one_side_alone_is_a_difference(more_in, tmp_path):
    one, more = {"x.weight": torch.ones(2)}, {"x.weight": torch.ones(2), "y.weight": torch.ones(2)}
    folders = [
        write_checkpoint(tmp_path / name, tensors=more if name == more_in else one) for name in ("a", "b")
    ]
    assert not compare(*folders).is_within(1.0)


@pytest.mark.parametrize(
    ("a", "b", "relative", "num_equal"),
    [
        ([0.0, 1.0], [0.0, 0.0], math.inf, 1),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0, 2),
        ([math.nan, 1.0], [1.0, 1.0], math.inf, 1),
        ([1.0, math.inf], [1.0, math.inf], 0.0, 2),
        ([1.0, math.inf], [1.0, 2.0], math.inf, 1),
    ],
)
def test_zeros_and_what_is_not_finite(a, b, relative, num_equal, tmp_path):
    folders = [
        write_checkpoint(tmp_path / str(i), tensors={"x.weight": torch.tensor(values)})
        for i, values in enumerate((a, b))
    ]
    (one,) = compare(*folders).tensors
    assert (one.relative, one.num_equal) == (relative, num_equal)
    assert compare(*folders).is_within(1.0) == (num_equal == 2)


def test_types_may_differ(tmp_path):
    exact = {"x.weight": torch.tensor([1.0, 1.5])}
    half = {"x.weight": torch.tensor([1.0, 1.5], dtype=torch.bfloat16)}
    (one,) = compare(
        write_checkpoint(tmp_path / "a", tensors=exact), write_checkpoint(tmp_path / "b", tensors=half)
    ).tensors
    assert (one.dtypes, one.is_equal) == (("float32", "bfloat16"), True)


def changed(tmp_path: Path) -> tuple[str, str]:
    """Two checkpoints that differ in a row of a router, in an expert's moment, in a setting and in the
    iteration.
    """
    tensors = drawn_state()
    tensors[ROUTER][1, 2] *= 2
    tensors["optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc2.weight"][0, 3, 0, 0] += 1
    common = common_state(6)
    common["config"] = common["config"] | {"topk": 1}
    return str(write_checkpoint(tmp_path / "a")), str(
        write_checkpoint(tmp_path / "b", 6, tensors=tensors, common=common)
    )


def test_what_it_prints_and_returns(tmp_path, capsys):
    a, b = changed(tmp_path)
    assert main(["ckpt", "diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "setting: topk 2 and 1",
        "progress: consumed_samples 40 and 48",
        "progress: iteration 5 and 6",
    ]
    assert lines[3].startswith("differs: decoder.layers.1.mlp.router.weight  relative 0.")
    assert lines[3].endswith("24 of 32 values equal  bfloat16")
    assert lines[4:] == [
        "30 of 31 tensors are equal, 1 differ, 0 have other shapes, 0 are only in A, 0 only in B"
    ]
    assert main(["ckpt", "diff", a, b, "--rtol", "1"]) == 0
    assert main(["ckpt", "diff", a, a]) == 0


def test_the_optimizer_and_the_worst_first(tmp_path, capsys):
    a, b = changed(tmp_path)
    assert main(["ckpt", "diff", a, b, "--optimizer", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["num_tensors"], report["num_equal"]) == (
        NUM_WEIGHTS + 3 * NUM_TRAINED,
        NUM_WEIGHTS + 3 * NUM_TRAINED - 2,
    )
    names = [one["name"] for one in report["tensors"]]
    assert names == [
        "decoder.layers.1.mlp.router.weight",
        "exp_avg of decoder.layers.0.mlp.experts.3.linear_fc2.weight",
    ]
    assert report["tensors"][0]["relative"] > report["tensors"][1]["relative"]
    assert main(["ckpt", "diff", a, b, "--optimizer", "--top", "1", "--json"]) == 1
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["tensors"]] == names[:1]


def test_damage_is_one_line(tmp_path, capsys):
    a, b = changed(tmp_path)
    (Path(b) / "__0_0.distcp").unlink()
    assert main(["ckpt", "diff", a, b]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("moe-exp ckpt: ")
    assert "__0_0.distcp: cannot be used (it is missing). Fix: " in line
