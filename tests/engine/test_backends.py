"""What a run says of the code that its parts run, and that it runs it."""

from __future__ import annotations

import pytest

from helpers.ranks import run_on_ranks
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_model
from moe_exp.layers.kernels import choice

TINY = {
    "preset": "cpu", "gpus_per_node": 1, "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48,
    "num_heads": 2, "num_query_groups": 2, "seq_len": 12, "vocab_size": 500, "num_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "router_in_torch"),
    [
        ({}, ""),
        ({"use_moe": False}, ""),
        (
            {"aux_loss_type": "aux_loss,seq_aux_loss", "aux_loss_coeff": "0.01,0.01"},
            "seq_aux_loss needs the scores of all experts",
        ),
        ({"force_routing": "balanced"}, "it has top-k alone, not balanced"),
        ({"router_dtype": "fp64"}, "it computes in fp32, not in fp64"),
    ],
)
def test_the_row_on_routing_is_that_of_the_settings(monkeypatch, settings, router_in_torch):
    monkeypatch.setattr(choice, "missing", lambda: "")
    # which asks the driver of a GPU
    monkeypatch.setattr("moe_exp.engine.backends.choose_backend", lambda *args, **options: ("", ""))
    name, reason = backends_of(load_config(TINY | settings, {}), "cuda")["routing"]
    assert name == "triton"
    assert reason.partition("the router itself in torch: ")[2] == router_in_torch
    assert (
        backends_of(load_config(TINY | settings | {"routing_kernels": "off"}, {}), "cuda")["routing"][0]
        == "torch"
    )


def built_models(values):
    """Whether kernels are switched off in this process after a model of each value of ROUTING_KERNELS was
    built.
    """
    found = []
    for value in values:
        config = load_config(TINY | {"routing_kernels": value}, {})
        rank = runtime.start_alone(config)
        build_model(config, rank)
        found.append(choice._switched_off)
        runtime.stop()
    return found


def test_a_model_switches_the_kernels_of_its_process():
    assert run_on_ranks(1, built_models, ["off", "auto"], join=False) == [[True, False]]


def test_a_dense_model_has_no_experts_with_biases():
    config = load_config(TINY | {"use_moe": False, "add_bias_linear": True, "expert_backend": "triton"}, {})
    assert backends_of(config, "cpu")["grouped GEMM"] == (
        "triton",
        "asked for by EXPERT_BACKEND; on a CPU the same in plain torch",
    )
