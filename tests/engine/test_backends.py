"""What a run says of the code that its parts run, and that it runs it."""

from unittest.mock import Mock

import pytest
import torch

from helpers.whole_runs import SMALL
from moe_exp.config import load_config
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import _ddp_config, moe_options, overlaps
from moe_exp.layers.kernels import launch as choice
from moe_exp.layers.kernels.launch import KernelFailure

TINY = {
    **SMALL, "gpus_per_node": 1, "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48,
    "num_heads": 2, "num_query_groups": 2, "seq_len": 12, "vocab_size": 500, "num_experts": 4,
}  # fmt: skip
SEQ_AUX_LOSS = {"aux_loss_type": "aux_loss,seq_aux_loss", "aux_loss_coeff": "0.01,0.01"}


@pytest.mark.parametrize(
    ("settings", "router_in_torch"),
    [
        ({}, ""),
        ({"use_moe": False}, ""),
        (SEQ_AUX_LOSS, "seq_aux_loss or l1 or entropy needs the scores of all experts"),
        ({"force_routing": "balanced"}, "the router kernel supports only top-k, not balanced"),
        ({"router_dtype": "fp64"}, "the router kernel computes in fp32, not in fp64"),
    ],
)
def test_the_row_on_routing_is_that_of_the_settings(monkeypatch, settings, router_in_torch):
    monkeypatch.setattr(choice, "missing", lambda: "")
    # which asks the driver of a GPU
    monkeypatch.setattr("moe_exp.engine.backends.choose_backend", lambda *args, **options: ("", ""))
    name, reason = backends_of(load_config(TINY | settings, {}), "cuda")["routing"]
    assert name == "triton"
    assert reason.partition("the router in torch: ")[2] == router_in_torch
    without = load_config(TINY | settings | {"routing_kernels": "off"}, {})
    assert backends_of(without, "cuda")["routing"][0] == "torch"


@pytest.mark.parametrize(
    ("value", "has_gpu", "failures", "expected"),
    [
        ("auto", True, [], True),
        ("auto", True, [KernelFailure("experts", ["grouped_matmul is wrong"], "loop")], True),
        ("auto", True, [KernelFailure("routing", ["slot_sort is wrong"], "torch")], False),
        ("off", True, [], False),
        ("auto", False, [], False),
    ],
)
def test_the_router_of_a_model_has_the_choice_of_kernels(monkeypatch, value, has_gpu, failures, expected):
    monkeypatch.setattr(choice, "missing", lambda: "")
    monkeypatch.setattr("moe_exp.engine.model._device_type", lambda: "cuda" if has_gpu else "cpu")
    options = moe_options(load_config(TINY | {"routing_kernels": value}, {}), failures)
    assert options["router"]["use_kernels"] == expected


def test_backend_of_experts_whose_kernels_are_wrong_and_of_biases():
    failures = [KernelFailure("experts", ["grouped_matmul is wrong"], "loop")]
    assert moe_options(load_config(TINY, {}))["backend"] == "auto"
    assert moe_options(load_config(TINY, {}), failures)["backend"] == "loop"
    config = load_config(TINY | {"add_bias_linear": True, "expert_backend": "triton"}, {})
    assert backends_of(config, "cpu")["grouped GEMM"][0] == "triton"


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch):
    monkeypatch.setattr(runtime, "count_gpus", lambda: 8)
    monkeypatch.setattr(runtime, "driver_version", lambda: "12.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    too_old = RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nMore of it")
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=too_old))
    with pytest.raises(ValueError, match=r"^CUDA: torch .* 8 GPUs.* too old .*\. Fix: .*\(CUDA 12\.4\)"):
        runtime._device(load_config(TINY, {}), 0)


@pytest.mark.parametrize(
    ("settings", "has_gpu", "expected"),
    [
        ({"gpus_per_node": 2}, True, True),
        ({"gpus_per_node": 2}, False, False),
        ({"gpus_per_node": 1}, True, False),
        ({"gpus_per_node": 2, "pp": 2}, True, False),
        ({"gpus_per_node": 1, "overlap": "true"}, False, True),
        ({"gpus_per_node": 2, "overlap": "false"}, True, False),
    ],
)
def test_nothing_overlaps_where_a_rank_has_nobody_to_exchange_with(monkeypatch, settings, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = load_config(SMALL | settings, {})
    found = _ddp_config(config, overlap=overlaps(config))
    assert found.overlap_grad_reduce == found.overlap_param_gather == expected
