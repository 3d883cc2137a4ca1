import pytest
import torch

from moe_exp.layers.experts.grouped_gemm import BACKENDS, loop_backend

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


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_loop_takes_a_gradient_that_is_not_contiguous_for_what_needs_one(needs):
    x_RD, w_LDF, _ = inputs((2, 3), dim_in=3, dim_out=2, dtype=torch.float64)
    x_RD, w_LDF = x_RD.detach().requires_grad_(needs[0]), w_LDF.detach().requires_grad_(needs[1])
    loop_backend(x_RD, w_LDF, torch.tensor([2, 3]), None).sum().backward()
    _, *expected = reference(x_RD, w_LDF, (2, 3), torch.ones(5, 2))
    for tensor, gradient in zip((x_RD, w_LDF), expected, strict=True):
        if tensor.requires_grad:
            assert_relative(tensor.grad, gradient, 1e-14)
        else:
            assert tensor.grad is None
