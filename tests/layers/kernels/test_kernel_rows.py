from typing import Any

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.layers.dispatcher.row_order import RowOrder, pad_by_expert, regroup_chunks, sort_by_expert
from moe_exp.layers.kernels.rows import chunk_order, chunk_order_torch, gather_rows, gather_rows_torch

pytestmark = [needs_kernels, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(
    ("num_sources", "width", "num_rows", "divisor"),
    [
        (9, 45, 20, 3),
        (4, 256, 6, 1),
        (1, 1100, 3, 2),
        (5, 2, 300, 1),
        (0, 8, 3, 2),
        (3, 8, 0, 1),
        at_real_size(32768, 2048, 262144, 8),
    ],
)
def test_rows_are_gathered_to_the_bit(num_sources, width, num_rows, divisor, dtype):
    x = (100 * torch.randn(num_sources, width, device=DEVICE)).to(dtype)
    index_R = torch.randint(num_sources * divisor + 1, (num_rows,), dtype=torch.int32, device=DEVICE)
    expected = torch.cat([x, x.new_zeros(1, width)])[index_R.long() // divisor]
    for function in (gather_rows, gather_rows_torch):
        assert torch.equal(function(x, index_R, divisor), expected)
        assert torch.equal(function(x[:, -1], index_R.long(), divisor), expected[:, -1])
        # A stride of 0, as the gradient of a sum has, and one of 2.
        spread = x[:, :1].expand(-1, width)
        assert torch.equal(function(spread, index_R, divisor), expected[:, :1].expand(-1, width))
        assert torch.equal(function(x[:, ::2], index_R, divisor), expected[:, ::2])


@pytest.mark.parametrize(
    ("sources", "experts", "most"),
    [(1, 1, 3), (3, 4, 60), (4, 5, 2), (2, 3, 1), at_real_size(64, 4, 3000)]
    + [(sources, experts, most) for experts in (64, 256, 512, 1024) for sources, most in ((1, 3), (3, 2))],
)
def test_chunks_are_sorted_as_by_the_twin(sources, experts, most):
    rows_SL = torch.randint(0, most, (sources, experts), device=DEVICE)
    arguments = rows_SL, int(rows_SL.sum())
    for one, other in zip(chunk_order(*arguments), chunk_order_torch(*arguments), strict=True):
        assert one.dtype == other.dtype == torch.int32 and torch.equal(one, other)


def orders(expert_TK: torch.Tensor, kept_TK: torch.Tensor, *, use_kernels: bool) -> dict[str, RowOrder]:
    most = int(torch.bincount(expert_TK.flatten(), minlength=4).max())
    rows_SL = torch.bincount(expert_TK.flatten(), minlength=12).view(3, 4)
    sizes: dict[str, Any] = {"num_experts": 4, "use_kernels": use_kernels}
    return {
        "sorted": sort_by_expert(expert_TK, **sizes).order(),
        "dropped": sort_by_expert(expert_TK, kept_TK, **sizes).order(int(kept_TK.sum())),
        "padded": pad_by_expert(expert_TK, kept_TK, rows_per_expert=most + 1, **sizes),
        "chunks": regroup_chunks(rows_SL, num_rows=expert_TK.numel(), use_kernels=use_kernels),
    }


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_orders_of_the_layer_with_kernels_and_without(topk, dtype):
    expert_TK, kept_TK = torch.randint(4, (17, topk)), torch.rand(17, topk) > 0.3
    plain = orders(expert_TK, kept_TK, use_kernels=False)
    ours = orders(expert_TK.to(DEVICE), kept_TK.to(DEVICE), use_kernels=True)
    for name, order in plain.items():
        num_sources = order.row_N.numel() // order.topk
        x_TD, weights_TK = torch.randn(num_sources, 24, dtype=dtype), torch.rand(num_sources, order.topk)
        y_RD, seed_R = torch.randn(order.slot_R.numel(), 24, dtype=dtype), torch.rand(order.slot_R.numel())
        expected = moved(order, x_TD, weights_TK, y_RD, seed_R)
        actual = moved(ours[name], *(x.to(DEVICE) for x in (x_TD, weights_TK, y_RD, seed_R)))
        assert ours[name].slot_R.tolist() == order.slot_R.tolist(), name
        assert ours[name].row_N.tolist() == order.row_N.tolist(), name
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert relative_error(one, other) < (1e-6 if dtype == torch.float32 else 5e-3), name


def moved(order: RowOrder, x_TD, weights_TK, y_RD, seed_R) -> list[torch.Tensor]:
    """Rows, tokens and weights by `order`, and their gradients."""
    x_TD, weights_TK, y_RD = (x.detach().clone().requires_grad_() for x in (x_TD, weights_TK, y_RD))
    outs = order.rows(x_TD), order.tokens(y_RD), order.weights(weights_TK)
    seeds = y_RD.detach(), x_TD.detach(), seed_R
    return [out.detach() for out in outs] + list(torch.autograd.grad(outs, (x_TD, y_RD, weights_TK), seeds))
