"""`moe-exp ckpt diff`: differences by hand, and checkpoints of other layouts and styles that are equal."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import ROUTER, common_state, drawn_state, write_checkpoint
from moe_exp.checkpoint.tools import diff
from moe_exp.checkpoint.tools.diff import Comparison, compare
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.cli import main

NUM_WEIGHTS, NUM_TRAINED = 31, 29


def compare_written(folder: Path, *sides: dict[str, Any]) -> Comparison:
    """Of checkpoints with these tensors."""
    tensors = [{key: torch.as_tensor(value) for key, value in side.items()} for side in sides]
    return compare(*(write_checkpoint(folder / name, tensors=tensors[i]) for i, name in enumerate("ab")))


def test_the_same_model_in_another_style(tmp_path):
    source = write_checkpoint(tmp_path / "a")
    for index, changes in enumerate([Reshaping(layers="single"), Reshaping(experts="single")]):
        other = reshape(source, tmp_path / f"b{index}", changes).folder
        found = compare(other, source, optimizer=True)
        assert len(found.tensors) == found.num_equal == NUM_WEIGHTS + 3 * NUM_TRAINED
        assert found.is_within(0.0)
        assert (found.only_in_a, found.only_in_b, found.shapes, found.progress) == ([], [], {}, {})


def test_numbers_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(diff, "_BLOCK_BYTES", 40)  # several blocks
    output = [[3.0, 4.0], [0.0, 0.5], [0.0, 10.8]]
    a = {"output_layer.weight": output, "v.weight": [1.0] * 3, "s.weight": [1.0] * 4}
    output = [[3.0, 4.0], [0.0, 0.0], [0.0, 12.0]]
    b = {"output_layer.weight": output, "w.weight": [1.0] * 3, "s.weight": [1.0] * 3}
    found = compare_written(tmp_path, a, b)
    (one,) = found.tensors
    assert (one.name, one.num_equal, one.is_equal) == ("output_layer.weight", 4, False)
    assert one.max_abs == pytest.approx(1.2)
    assert one.relative == pytest.approx(1.3 / 13.0)  # sqrt(0.5^2 + 1.2^2) of sqrt(3^2 + 4^2 + 12^2)
    assert (found.only_in_a, found.only_in_b) == (["v.weight"], ["w.weight"])
    assert found.shapes == {"s.weight": ((4,), (3,))}
    assert not found.is_within(1.0)


def test_a_tensor_of_one_side_alone_is_a_difference(tmp_path):
    one, more = {"x.weight": [1.0]}, {"x.weight": [1.0], "y.weight": [1.0]}
    assert not compare_written(tmp_path / "a", one, more).is_within(1.0)
    assert not compare_written(tmp_path / "b", more, one).is_within(1.0)


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
    found = compare_written(tmp_path, {"x.weight": a}, {"x.weight": b})
    (one,) = found.tensors
    assert (one.relative, one.num_equal) == (relative, num_equal)
    assert found.is_within(1.0) == (num_equal == 2)


def test_types_may_differ(tmp_path):
    exact, half = (torch.tensor([1.0, 1.5], dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    (one,) = compare_written(tmp_path, {"x.weight": exact}, {"x.weight": half}).tensors
    assert (one.dtypes, one.is_equal) == (("float32", "bfloat16"), True)


def changed(tmp_path: Path) -> tuple[str, str]:
    """Two checkpoints that differ in a row of a router, an expert's moment, a setting and the iteration."""
    tensors = drawn_state()
    tensors[ROUTER][1, 2] *= 2
    tensors["optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc2.weight"][0, 3, 0, 0] += 1
    common = common_state(6)
    common["config"] = common["config"] | {"topk": 1}
    a, b = tmp_path / "a", write_checkpoint(tmp_path / "b", 6, tensors=tensors, common=common)
    return str(write_checkpoint(a)), str(b)


def test_what_it_prints_and_returns(tmp_path, capsys):
    a, b = changed(tmp_path)
    assert main(["ckpt", "diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"setting: topk 2 and 1", "progress: iteration 5 and 6"} <= set(lines)
    assert "decoder.layers.1.mlp.router.weight" in lines[3] and "24 of 32 values" in lines[3]
    assert "30 of 31 tensors" in lines[4]
    assert main(["ckpt", "diff", a, b, "--rtol", "1"]) == 0
    assert main(["ckpt", "diff", a, a]) == 0


def test_the_optimizer_and_the_worst_first(tmp_path, capsys):
    a, b = changed(tmp_path)
    assert main(["ckpt", "diff", a, b, "--optimizer", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    num_tensors = NUM_WEIGHTS + 3 * NUM_TRAINED
    assert (report["num_tensors"], report["num_equal"]) == (num_tensors, num_tensors - 2)
    names = [one["name"] for one in report["tensors"]]
    moment = "exp_avg of decoder.layers.0.mlp.experts.3.linear_fc2.weight"
    assert names == ["decoder.layers.1.mlp.router.weight", moment]
    assert report["tensors"][0]["relative"] > report["tensors"][1]["relative"]
    assert main(["ckpt", "diff", a, b, "--optimizer", "--top", "1", "--json"]) == 1
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["tensors"]] == names[:1]
