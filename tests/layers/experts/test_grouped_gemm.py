from __future__ import annotations

import importlib.util

import pytest
import torch

from moe_exp.layers.experts.grouped_gemm import BACKENDS, choose_backend, loop_backend
from moe_exp.layers.kernels import launch

# Rows per expert; empty experts first, in the middle, last, and nothing at all.
SPLITS = [(3, 1, 7, 5), (0, 4, 0, 9), (5, 0, 0, 0), (0, 0, 0, 2), (0, 0, 0, 0), (1, 1, 1, 1)]


def inputs(splits, *, dim_in: int, dim_out: int, dtype: torch.dtype, transposed: bool = True):
    generator = torch.Generator().manual_seed(1)
    x_RD = (
        torch.randn(sum(splits), dim_in, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    w_LFD = torch.randn(len(splits), dim_out, dim_in, generator=generator, dtype=torch.float64).to(dtype)
    w_LDF = w_LFD.transpose(1, 2) if transposed else w_LFD.transpose(1, 2).contiguous()
    dy_RF = torch.randn(sum(splits), dim_out, generator=generator, dtype=torch.float64).to(dtype)
    return x_RD, w_LDF.requires_grad_(), dy_RF


def reference(x_RD, w_LDF, splits, dy_RF):
    """Result and gradients in float64, row by row."""
    x, w = x_RD.detach().double(), w_LDF.detach().double()
    expert_R = [expert for expert, rows in enumerate(splits) for _ in range(rows)]
    y = torch.zeros(dy_RF.shape, dtype=torch.float64)
    dx, dw = torch.zeros_like(x), torch.zeros_like(w)
    for row, expert in enumerate(expert_R):
        dy = dy_RF[row].double()
        y[row] = (x[row].unsqueeze(1) * w[expert]).sum(dim=0)
        dx[row] = (w[expert] * dy).sum(dim=1)
        dw[expert] += x[row].unsqueeze(1) * dy
    return y, dx, dw


def assert_relative(actual, expected, tolerance: float) -> None:
    assert actual.shape == expected.shape
    if expected.numel():
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("known_splits", [True, False])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "dims"),
    [
        ("loop", torch.float64, 1e-14, (5, 3)),
        ("loop", torch.float32, 1e-6, (7, 13)),
        ("loop", torch.bfloat16, 6e-3, (7, 13)),
        ("torch", torch.float32, 1e-6, (12, 4)),
        ("torch", torch.bfloat16, 6e-3, (24, 8)),
    ],
)
def test_backend_against_plain_torch(backend, dtype, tolerance, dims, splits, known_splits):
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=dims[0], dim_out=dims[1], dtype=dtype)
    y_RF = BACKENDS[backend](x_RD, w_LDF, torch.tensor(splits), splits if known_splits else None)
    assert y_RF.dtype == dtype
    y_RF.backward(dy_RF)
    y, dx, dw = reference(x_RD, w_LDF, splits, dy_RF)
    assert_relative(y_RF.detach(), y, tolerance)
    assert_relative(x_RD.grad, dx, tolerance)
    assert_relative(w_LDF.grad, dw, tolerance)
    # An expert without rows has a gradient, and it is zero.
    assert not w_LDF.grad[[rows == 0 for rows in splits]].any()


@pytest.mark.parametrize("transposed", [True, False])
def test_loop_takes_weights_in_either_memory_order(transposed):
    splits = (2, 0, 3)
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=5, dim_out=3, dtype=torch.float64, transposed=transposed)
    y_RF = loop_backend(x_RD, w_LDF, torch.tensor(splits), None)
    y_RF.backward(dy_RF)
    for actual, expected in zip(
        (y_RF.detach(), x_RD.grad, w_LDF.grad), reference(x_RD, w_LDF, splits, dy_RF), strict=True
    ):
        assert_relative(actual, expected, 1e-14)


def test_loop_gradcheck():
    x_RD, w_LDF, _ = inputs((2, 0, 3), dim_in=3, dim_out=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: loop_backend(x, w, torch.tensor([2, 0, 3]), (2, 0, 3)), (x_RD, w_LDF)
    )


def test_loop_takes_a_gradient_that_is_not_contiguous():
    x_RD, w_LDF, _ = inputs((2, 3), dim_in=3, dim_out=2, dtype=torch.float64)
    y_RF = loop_backend(x_RD, w_LDF, torch.tensor([2, 3]), None)
    y_RF.sum().backward()
    _, dx, dw = reference(x_RD, w_LDF, (2, 3), torch.ones(5, 2, dtype=torch.float64))
    assert_relative(x_RD.grad, dx, 1e-14)
    assert_relative(w_LDF.grad, dw, 1e-14)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_loop_with_one_input_that_needs_no_gradient(needs):
    x_RD, w_LDF, dy_RF = inputs((2, 3), dim_in=3, dim_out=2, dtype=torch.float64)
    x_RD, w_LDF = x_RD.detach().requires_grad_(needs[0]), w_LDF.detach().requires_grad_(needs[1])
    loop_backend(x_RD, w_LDF, torch.tensor([2, 3]), None).backward(dy_RF)
    for tensor, expected in zip((x_RD, w_LDF), reference(x_RD, w_LDF, (2, 3), dy_RF)[1:], strict=True):
        if tensor.requires_grad:
            assert_relative(tensor.grad, expected, 1e-14)
        else:
            assert tensor.grad is None


# choose_backend


@pytest.mark.parametrize("name", ["triton", "loop", "torch"])
def test_a_named_backend_is_taken(name):
    chosen, reason = choose_backend(name, device_type="cpu", dtype=torch.float32)
    assert chosen == name
    assert reason == "asked for by EXPERT_BACKEND" + (
        "; on a CPU the same in plain torch" if name == "triton" else ""
    )


BLACKWELL = (
    "grouped_mm is reported to give wrong gradients for experts without tokens on Blackwell (pytorch issue"
    " 172439)"
)


def test_auto_on_a_cpu():
    assert choose_backend("auto", device_type="cpu", dtype=torch.bfloat16) == (
        "loop",
        "grouped_mm is the same loop on a CPU",
    )


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (
            torch.bfloat16,
            (9, 0),
            ("torch", "not triton: it is missing; grouped_mm runs as one kernel on Hopper"),
        ),
        (torch.bfloat16, (10, 0), ("loop", f"not triton: it is missing; {BLACKWELL}")),
        (
            torch.bfloat16,
            (8, 0),
            ("loop", "not triton: it is missing; grouped_mm is slow on GPUs before Hopper"),
        ),
        (
            torch.float16,
            (9, 0),
            ("loop", "not triton: it is missing; the other grouped GEMMs are one kernel in bf16 only"),
        ),
        (
            torch.float32,
            (9, 0),
            ("loop", "grouped GEMMs are one kernel in bf16 and fp16 only, not in float32"),
        ),
    ],
)
def test_auto_on_a_gpu_without_triton(monkeypatch, dtype, capability, expected):
    monkeypatch.setattr(launch, "missing", lambda: "it is missing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert choose_backend("auto", device_type="cuda", dtype=dtype) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_on_a_gpu_with_triton(monkeypatch, dtype):
    monkeypatch.setattr(launch, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    name, reason = choose_backend("auto", device_type="cuda", dtype=dtype)
    assert (name, reason) == (
        "triton",
        "one function of Triton kernels, which gather the rows and keep the least for backward",
    )


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"dtype": torch.float64, "device_type": "cpu"}, r"its kernels have no float64\. Fix: use auto\."),
        (
            {"dtype": torch.bfloat16, "device_type": "cuda"},
            r"triton is not installed\. Fix: pip install triton, or use auto\.",
        ),
    ],
)
def test_triton_that_cannot_run(monkeypatch, options, rule):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    monkeypatch.setattr(launch, "triton", None)
    with pytest.raises(ValueError, match=rf"^expert_backend=triton: {rule}$"):
        choose_backend("triton", **options)


def test_torch_without_grouped_mm(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "it is missing")
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    name, reason = choose_backend("auto", device_type="cuda", dtype=torch.bfloat16)
    assert (name, reason) == (
        "loop",
        f"not triton: it is missing; torch {torch.__version__} has no grouped_mm",
    )
    with pytest.raises(
        ValueError,
        match=r"expert_backend=torch: torch .* has no grouped_mm\. Fix: use loop, or install torch>=2\.10\.",
    ):
        choose_backend("torch", device_type="cuda", dtype=torch.bfloat16)


def test_torch_in_float64():
    with pytest.raises(
        ValueError, match=r"expert_backend=torch: grouped_mm has no float64\. Fix: use loop\."
    ):
        choose_backend("torch", device_type="cpu", dtype=torch.float64)


def test_unknown_backend():
    with pytest.raises(
        ValueError,
        match=(
            r"expert_backend=cutlass: is not a backend\. Fix: use auto or one of triton, loop, torch,"
            r" grouped_gemm, te, megablocks\."
        ),
    ):
        choose_backend("cutlass", device_type="cpu", dtype=torch.float32)
