import importlib.util

import pytest
import torch

from moe_exp.layers.experts.grouped_gemm import BACKENDS, choose_backend, loop_backend
from moe_exp.layers.kernels import launch

# Rows per expert; empty experts first, in the middle, last, and nothing at all.
SPLITS = [(3, 1, 7, 5), (0, 4, 0, 9), (5, 0, 0, 0), (0, 0, 0, 2), (0, 0, 0, 0), (1, 1, 1, 1)]


def inputs(splits, *, dim_in: int, dim_out: int, dtype: torch.dtype, transposed: bool = True):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(splits), dim_in), (len(splits), dim_out, dim_in), (sum(splits), dim_out)]
    x_RD, w_LFD, dy_RF = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    w_LDF = w_LFD.transpose(1, 2) if transposed else w_LFD.transpose(1, 2).contiguous()
    return x_RD.requires_grad_(), w_LDF.requires_grad_(), dy_RF


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
    ("backend", "dtype", "tolerance", "dims", "transposed"),
    [
        ("loop", torch.float64, 1e-14, (5, 3), True),
        ("loop", torch.float64, 1e-14, (5, 3), False),
        ("loop", torch.float32, 1e-6, (7, 13), True),
        ("loop", torch.bfloat16, 6e-3, (7, 13), True),
        ("torch", torch.float32, 1e-6, (12, 4), True),
        ("torch", torch.bfloat16, 6e-3, (24, 8), True),
    ],
)
def test_backend_against_plain_torch(backend, dtype, tolerance, dims, transposed, splits, known_splits):
    sizes = {"dim_in": dims[0], "dim_out": dims[1]}
    x_RD, w_LDF, dy_RF = inputs(splits, **sizes, dtype=dtype, transposed=transposed)
    y_RF = BACKENDS[backend](x_RD, w_LDF, torch.tensor(splits), splits if known_splits else None)
    assert y_RF.dtype == dtype
    y_RF.backward(dy_RF)
    y, dx, dw = reference(x_RD, w_LDF, splits, dy_RF)
    assert_relative(y_RF.detach(), y, tolerance)
    assert_relative(x_RD.grad, dx, tolerance)
    assert_relative(w_LDF.grad, dw, tolerance)
    # An expert without rows has a gradient, and it is zero.
    assert not w_LDF.grad[[rows == 0 for rows in splits]].any()


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton", ("triton", "asked for by EXPERT_BACKEND; on a CPU the same in plain torch")),
        ("loop", ("loop", "asked for by EXPERT_BACKEND")),
        ("torch", ("torch", "asked for by EXPERT_BACKEND")),
        ("auto", ("loop", "grouped_mm is the same loop on a CPU")),
    ],
)
def test_on_a_cpu(name, expected):
    assert choose_backend(name, device_type="cpu", dtype=torch.float32) == expected


@pytest.mark.parametrize(
    ("missing", "dtype", "name", "because"),
    [
        ("", torch.bfloat16, "triton", "one function of Triton kernels"),
        ("", torch.float16, "triton", "one function of Triton kernels"),
        ("old", torch.bfloat16, "torch", "not triton: old; grouped_mm runs as one kernel on Hopper"),
        ("old", torch.float16, "loop", "not triton: old; the other grouped GEMMs are one kernel in bf16"),
        ("old", torch.float32, "loop", "grouped GEMMs are one kernel in bf16 and fp16 only, not in float32"),
    ],
)
def test_auto_on_hopper(monkeypatch, missing, dtype, name, because):
    monkeypatch.setattr(launch, "missing", lambda: missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found, reason = choose_backend("auto", device_type="cuda", dtype=dtype)
    assert found == name and reason.startswith(because)


def test_torch_without_grouped_mm(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "it is missing")
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    name, reason = choose_backend("auto", device_type="cuda", dtype=torch.bfloat16)
    assert name == "loop" and reason.endswith(f"torch {torch.__version__} has no grouped_mm")
    with pytest.raises(ValueError, match=r"expert_backend=torch: torch .* has no grouped_mm\. Fix: use loop"):
        choose_backend("torch", device_type="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype", "device_type", "text"),
    [
        ("torch", torch.float64, "cpu", r"grouped_mm has no float64\. Fix: use loop"),
        ("triton", torch.float64, "cpu", r"its kernels have no float64\. Fix: use auto"),
        ("triton", torch.bfloat16, "cuda", r"triton is not installed\. Fix: pip install triton, or use auto"),
        ("cutlass", torch.float32, "cpu", r"is not a backend\. Fix: use auto or one of triton, loop, "),
    ],
)
def test_what_cannot_run(monkeypatch, name, dtype, device_type, text):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    monkeypatch.setattr(launch, "triton", None)
    with pytest.raises(ValueError, match=rf"^expert_backend={name}: {text}"):
        choose_backend(name, device_type=device_type, dtype=dtype)
