"""FP8 through Transformer Engine, which no CPU runs: a stand-in asks for padded rows; what cannot run is
refused.
"""

import importlib.util
import sys
import types

import pytest
import torch
from test_gemm_packages import GroupedLinear
from test_grouped_gemm import SPLITS, assert_relative, inputs, reference

from moe_exp.layers.experts import fp8, grouped_gemm
from moe_exp.layers.experts.fp8 import RECIPES, check_fp8, pad_rows, padded_splits, unpad_rows
from moe_exp.layers.experts.grouped_gemm import BACKENDS


@pytest.fixture
def autocast(monkeypatch):
    """Transformer Engine inside its FP8 autocast; call it with a recipe."""
    seen = []

    def enter(recipe: str) -> list[list[int]]:
        class Fp8GroupedLinear(GroupedLinear):
            def forward(self, inp, m_splits, is_first_microbatch=None):
                assert all(rows % RECIPES[recipe][1] == 0 for rows in m_splits), m_splits
                seen.append(m_splits)
                return super().forward(inp, m_splits)

        state = types.SimpleNamespace(
            is_fp8_enabled=lambda: True,
            get_fp8_recipe=lambda: types.SimpleNamespace(mxfp8=lambda: recipe == "mxfp8"),
        )
        for name, contents in {
            "transformer_engine": {},
            "transformer_engine.pytorch": {"GroupedLinear": Fp8GroupedLinear},
            "transformer_engine.pytorch.fp8": {"FP8GlobalStateManager": state},
        }.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        grouped_gemm._te_module.cache_clear()
        return seen

    yield enter
    grouped_gemm._te_module.cache_clear()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", SPLITS)
def test_rows_are_padded_and_nothing_else_changes(autocast, recipe, splits):
    seen = autocast(recipe)
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=5, dim_out=3, dtype=torch.float64)
    y_RF = BACKENDS["te"](x_RD, w_LDF, torch.tensor(splits), splits)
    y_RF.backward(dy_RF)
    found, expected = (y_RF.detach(), x_RD.grad, w_LDF.grad), reference(x_RD, w_LDF, splits, dy_RF)
    for one, other in zip(found, expected, strict=True):
        assert_relative(one, other, 1e-14)
    if sum(splits):
        assert seen == [padded_splits(splits, RECIPES[recipe][1])]


def test_padding_by_hand():
    x_RD = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    padded = pad_rows(x_RD, (3, 0, 4), 4)
    assert padded.flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    assert padded_splits((3, 0, 4), 4) == [4, 0, 4]
    assert torch.equal(unpad_rows(padded, (3, 0, 4), 4), x_RD)


def test_what_needs_no_padding_is_not_copied():
    x_RD = torch.ones(48, 2)
    assert pad_rows(x_RD, (16, 0, 32), 16) is x_RD
    assert unpad_rows(x_RD, (16, 0, 32), 16) is x_RD


def machine(monkeypatch, *, has_te=True, capability=(9, 0)):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if has_te else None) if name == "transformer_engine" else find_spec(name),
    )
    monkeypatch.setattr(fp8.torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(fp8.torch.cuda, "get_device_capability", lambda: capability)


def test_what_can_run(monkeypatch):
    check_fp8(None, "delayed", backend="loop")  # Megatron's default without FP8
    for recipe, (capability, _) in RECIPES.items():
        machine(monkeypatch, capability=capability)
        check_fp8("hybrid", recipe, backend="te")


@pytest.mark.parametrize(
    ("here", "recipe", "backend", "text"),
    [
        ({"has_te": False}, "tensorwise", "te", r"fp8=hybrid: .* is not installed\. Fix: pip install"),
        ({}, "tensorwise", "triton", r"fp8=hybrid: .* not with triton\. Fix: set EXPERT_BACKEND=te"),
        ({}, "delayed", "te", r"fp8_recipe=delayed: .* Fix: use one of tensorwise, blockwise, mxfp8\."),
        ({"capability": None}, "tensorwise", "te", r"fp8=hybrid: needs a CUDA device\. Fix: set FP8=none\."),
        ({"capability": (8, 0)}, "tensorwise", "te", r"fp8_recipe=tensorwise: .*8\.9 .*8\.0\. Fix: set FP8"),
        ({"capability": (9, 0)}, "mxfp8", "te", r"fp8_recipe=mxfp8: .* 10\.0 .* 9\.0\. Fix: use FP8_RECIPE="),
    ],
)
def test_what_cannot_run(monkeypatch, here, recipe, backend, text):
    machine(monkeypatch, **here)
    with pytest.raises(ValueError, match=f"^{text}"):
        check_fp8("hybrid", recipe, backend=backend)
