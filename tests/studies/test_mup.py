"""Slopes, best learning rates and models of other sizes, by hand."""

import argparse
import math

import pytest

from moe_exp.commands.parsers import add_parser
from moe_exp.commands.studies import mup_models
from moe_exp.config import ConfigError, load_config
from moe_exp.studies.mup import Optimum, best_rate, draw_transfer, growths, moved, optimum, resized

BASE = {
    "gpus_per_node": 1, "optimizer": "adam", "parametrization": "mup", "hidden_size": 64,
    "ffn_hidden_size": 96, "num_heads": 4, "num_query_groups": 2, "num_experts": 8, "topk": 2,
    "moe_ffn_hidden_size": 48, "shared_expert_size": 32,
}  # fmt: skip


def test_a_wider_model_has_more_heads_of_the_same_size():
    base = load_config(BASE, {})
    wide = resized(base, width=256, num_experts=32)
    names = ("hidden_size", "ffn_hidden_size", "num_heads", "num_query_groups", "moe_ffn_hidden_size", "topk")
    assert [getattr(wide, name) for name in names] == [256, 384, 16, 8, 192, 2]
    assert (wide.num_experts, wide.kv_channels, wide.shared_expert_size) == (32, 16, 128)
    assert (wide.mup_base_hidden_size, wide.mup_base_moe_ffn_hidden_size, wide.mup_base_topk) == (64, 48, 2)
    # experts in parts
    fine = resized(load_config(BASE, {}), width=64, granularity=4)
    assert (fine.num_experts, fine.topk, fine.moe_ffn_hidden_size) == (32, 8, 12)
    assert (fine.mup_base_moe_ffn_hidden_size, fine.mup_base_topk) == (48, 2)


def test_a_width_that_gives_parts_of_heads_is_one_line():
    with pytest.raises(ConfigError, match=r"^NUM_HEADS=4: .* 9/2 at HIDDEN_SIZE=72"):
        resized(load_config(BASE, {}), width=72)


def test_a_settings_file_is_below_the_environment_and_above_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "own.env").write_text("NUM_LAYERS=3\nNUM_EXPERTS=16\nTRAIN_DATA=data/mine\n")
    monkeypatch.setenv("NUM_EXPERTS", "32")
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "mup")
    flags = ["--config", str(tmp_path / "own.env"), "--widths", "32,64"]
    models = mup_models(parser.parse_args(["mup", "check", *flags]), {"SEQ_LEN": "8"})
    assert models.keys() == {"width"}
    for width, model in models["width"].items():
        assert (model.hidden_size, model.num_layers, model.num_experts, model.seq_len) == (width, 3, 32, 8)


def test_slopes_by_hand():
    """Outputs of n^(1/2) at the start; changes of n, of n^0.05 in the mean over seeds."""

    def steps(width: int, factor: float) -> list[dict[str, tuple[float, float]]]:
        first = {"experts": (width**0.5, 0.0), "router": (3.0, 0.0), "output layer": (1 / width, 0.0)}
        last = {"experts": (9.0, 1.0 * width), "router": (9.0, factor * width**0.05)}
        last["output layer"] = (9.0, 2.0)
        return [first, dict.fromkeys(first, (0.0, 77.0)), last]

    found = growths({width: [steps(width, 0.5), steps(width, 1.5)] for width in (64, 128, 512)})
    assert [one.part for one in found] == ["experts", "router", "output layer"]
    assert [one.initial for one in found] == pytest.approx([0.5, 0.0, -1.0])
    assert [one.change for one in found] == pytest.approx([1.0, 0.05, 0.0])
    assert [one.is_flat for one in found] == [False, True, True]  # the output layer's may fall


def test_best_rate_is_the_lowest_point_of_a_parabola():
    rates = [2.0**k for k in range(-10, -3)]
    losses = [3 + 0.1 * (math.log2(rate) + 6.7) ** 2 for rate in rates]
    assert best_rate(rates, losses) == (pytest.approx(-6.7), False)
    assert best_rate(rates, [*losses[:-2], math.inf, math.inf]) == (pytest.approx(-6.7), False)
    assert best_rate(rates[:3], losses[:3]) == (-8.0, True)
    assert best_rate(rates[4:], losses[4:]) == (-6.0, True)
    assert best_rate(rates[2:5], [5, 4, math.inf]) == (-7.0, False)  # diverged beside the best
    assert best_rate([1.0, 4.0, 8.0], [1 + (x - 1.5) ** 2 for x in (0, 2, 3)])[0] == pytest.approx(1.5)


def test_optima_and_by_how_much_they_move():
    rates = [2.0**k for k in range(-10, -3)]
    by_seed = [[(math.log2(rate) + best) ** 2 for rate in rates] for best in (6.0, 7.0)]
    found = optimum("width 64", rates, by_seed)
    assert not found.at_edge
    assert found.rate == pytest.approx(2**-6.5) and found.factor == pytest.approx(2**0.5**0.5)
    assert moved([found, Optimum("width 128", 2**-5.5, 1.0, at_edge=False)]) == pytest.approx(2.0)


def test_the_plot_leaves_out_what_diverged(tmp_path):
    draw_transfer(tmp_path / "a.png", "title", [1e-3, 2e-3], {"width 64": [[3.0, math.inf], [3.1, 4.0]]})
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
