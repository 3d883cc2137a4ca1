"""The `triton` backend in FP8 as a whole: forward, all gradients, and whole runs, against bf16 and float64.

Most run the plain-torch twins, as a CPU does; tests/layers/kernels/fp8 compares the kernels with these.
"""

import itertools
from collections import Counter

import pytest
import torch
from test_fused_experts import (
    assert_same_bits,
    chosen,
    doubles,
    errors,
    leaves_of,
    loop_over_tokens,
    rows_function,
    rows_leaves,
    tokens_function,
    with_gradients,
)

from helpers.layers.kernel_device import needs_kernels
from helpers.layers.tiny_moe import random
from moe_exp.layers.experts import Experts, grouped_gemm
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels.fp8 import products
from moe_exp.layers.kernels.self_test import Sizes, check_kernels

BF16 = torch.bfloat16


def in_fp8(expert_TK, activation, kept_TK=None, *, fp8=True):
    return tokens_function(expert_TK, kept_TK, activation, fp8=fp8)


# Largest relative errors of output and gradients, by norm; measured: docs/moe_layer.md.
LIMITS = {"fp8": 0.08, "bf16": 0.012}


@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", False), ("squared_relu", False), ("clamped_swiglu", True)]
)
def test_output_and_gradients_against_float64(activation, bias, twins):
    """In bf16 with and without FP8; with it the error is that of e4m3."""
    sizes = {"num_tokens": 300, "hidden": 192, "ffn": 160}
    leaves, expert_TK = leaves_of(activation=activation, dtype=BF16, bias=bias, **sizes), chosen(300, 2, 5)
    kept_TK, dy_TD = random(300, 2, seed=6) > -1, random(300, 192, seed=7).to(BF16)

    expected = with_gradients(loop_over_tokens(expert_TK, kept_TK, activation), doubles(leaves), dy_TD)
    found = {
        name: with_gradients(in_fp8(expert_TK, activation, kept_TK, fp8=name == "fp8"), leaves, dy_TD)
        for name in LIMITS
    }
    assert [x.dtype for x in found["fp8"]] == [x.dtype for x in found["bf16"]]
    assert not any(gradient[4].any() for gradient in found["fp8"][3:])  # the expert without tokens
    of = {name: errors(actual, expected) for name, actual in found.items()}
    # Rows near the limit of the clamp are on its other side, where their gradient is zero.
    factor = 6 if activation == "clamped_swiglu" else 1
    assert all(max(of[name]) < factor * limit for name, limit in LIMITS.items()), of
    products_only = [*of["fp8"][:2], *of["fp8"][3:5]]  # gradients of biases are sums
    assert min(products_only) > 0.02, of


def test_every_product_is_in_fp8(twins, monkeypatch):
    """Two forward and four backward, by the functions that compute them."""
    calls = []
    for name in ("quantize_rows", "quantize_blocks", "quantize_columns", "block_matmul", "block_weight_grad"):
        function = getattr(products, name)

        def record(*args, name=name, function=function):
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(products, name, record)
    leaves = leaves_of(dtype=BF16)
    with_gradients(in_fp8(chosen(13, 2, 5), "swiglu"), leaves, random(13, 24, seed=7))
    assert Counter(calls) == dict.fromkeys(calls, 4) | {"block_weight_grad": 2}


@pytest.mark.slow  # not in FP8 it is fast, in test_fused_experts.py
def test_compiled_in_one_graph(twins):
    leaves, dy_TD = leaves_of(), random(13, 24, seed=7)
    function = in_fp8(chosen(13, 2, 5), "swiglu")
    actual = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), leaves, dy_TD)
    assert_same_bits(actual, with_gradients(function, leaves, dy_TD))


# Rows past the last one are undefined, and numpy warns if they happen to be infinite.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@needs_kernels
@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("clamped_swiglu", True)])
def test_kernels_give_what_the_twins_give(activation, bias, monkeypatch):
    """In fp32, where a sum in another order moves few values to another rounding."""
    leaves, expert_TK = leaves_of(activation=activation, bias=bias), chosen(13, 2, 5)
    function, dy_TD = in_fp8(expert_TK, activation, random(13, 2, seed=6) > -0.3), random(13, 24, seed=7)
    kernels = with_gradients(function, leaves, dy_TD)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert max(errors(kernels, with_gradients(function, leaves, dy_TD))) < 2e-3


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 7), (0, 131, 0), (128, 1, 2)])
def test_numbers_of_rows(counts, twins):
    """None, single rows, primes and whole blocks; a row does not depend on those beside it."""
    leaves = rows_leaves(counts, hidden=7, ffn=5)
    dy_RD = random(sum(counts), 7, seed=7).float()

    y, dx, _, *dmatrices = with_gradients(rows_function(counts, fp8=True), leaves, dy_RD)
    ends = [0, *itertools.accumulate(counts)]
    for expert, (first, end) in enumerate(itertools.pairwise(ends)):
        assert counts[expert] or not any(gradient[expert].any() for gradient in dmatrices)
        if first < end:
            alone = [leaves[0][first : first + 1], leaves[1][first : first + 1], *leaves[2:]]
            alone = [leaf.detach().requires_grad_() for leaf in alone]
            one = rows_function([int(other == expert) for other in range(3)], fp8=True)
            y_one, dx_one, *_ = with_gradients(one, alone, dy_RD[first : first + 1])
            assert max(errors([y[first : first + 1], dx[first : first + 1]], [y_one, dx_one])) < 1e-3


# What cannot run


def test_other_backends_have_no_fp8():
    options = {"num_local_experts": 1, "hidden_size": 8, "ffn_size": 8, "activation": "swiglu", "fp8": True}
    with pytest.raises(ValueError, match=r"^fp8=e4m3: .* not loop\. Fix: set EXPERT_BACKEND=triton"):
        Experts(backend="loop", **options)


def test_older_gpus_have_no_e4m3(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"^fp8=e4m3: .* 8\.9 or newer, not 8\.0\. Fix: set FP8=none\.$"):
        grouped_gemm.check_fp8_kernels("triton", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    grouped_gemm.check_fp8_kernels("triton", "cuda")


# The self-test at the start of a run


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("gathers", [True, False])
def test_the_self_test_compares_what_runs(gathers, monkeypatch):
    sizes = Sizes(BF16, 40, 24, 3, gathers=gathers, adds=not gathers, fp8=True)
    checks = list(check_kernels("experts", sizes, torch.device("cpu")))
    assert [check.problem for check in checks] == [""] * len(checks)
    assert sum("FP8" in check.shape for check in checks) == 7

    def zeros(*args):
        return [0 * x for x in products.quantize_columns_torch(*args)]

    monkeypatch.setattr(products, "quantize_columns", zeros)
    checks = check_kernels("experts", sizes, torch.device("cpu"))
    assert [check.kernel for check in checks if check.problem] == ["weight_grad"] * 2


# Whole runs


@pytest.mark.slow
def test_a_training_falls_like_one_in_bf16(script_runs):
    """Settings, model, optimizer and the layer at once."""
    common = {"EXPERT_BACKEND": "triton", "DTYPE": "bf16", "TRAIN_ITERS": 60, "DECAY_ITERS": 60, "LR": 0.003}
    curves = {
        name: script_runs.succeed(name, **common, **settings).curve("lm_loss")
        for name, settings in (("bf16", {}), ("fp8", {"FP8": "e4m3", "FP8_RECIPE": "blockwise"}))
    }
    last = {name: sum(curve[-10:]) / 10 for name, curve in curves.items()}
    assert last["bf16"] < curves["bf16"][0] - 1
    assert curves["fp8"] != curves["bf16"]
    assert last["fp8"] == pytest.approx(last["bf16"], rel=0.01)
