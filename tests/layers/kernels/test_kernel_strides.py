"""What all kernels have in common: gaps between the values of an operand and a second launch change no bit,
and under torch.compile each is one operator. And inputs that a kernel could take for others.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, needs_kernels
from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_statistics
from moe_exp.layers.kernels.drops import keep_within, padded_order
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul
from moe_exp.layers.kernels.rows import chunk_order, gather_rows
from moe_exp.layers.kernels.slot_sort import slot_sort, slot_sort_torch
from moe_exp.layers.kernels.topk import router_topk
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

pytestmark = needs_kernels
ROWS, DIM, FFN, TOKENS = 24, 40, 24, 11


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE)


def integers(high: int, *sizes: int) -> torch.Tensor:
    return torch.randint(high, sizes, device=DEVICE)


def spread(x: Any) -> Any:
    """The same values with a stride of 2 in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0] if torch.is_tensor(x) else x


def adding(*args: Any, **options: Any) -> torch.Tensor:
    return weight_grad(*args, **options, out=torch.ones(3, DIM, FFN, device=DEVICE))


def launches() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Every kernel with its operands."""
    offsets_L1 = torch.tensor([0, 9, 9, ROWS], dtype=torch.int32, device=DEVICE)  # an expert without rows
    x_TD, x_RD, hidden_RW = drawn(TOKENS, DIM), drawn(ROWS, DIM), drawn(ROWS, 2 * FFN)
    row_R, weights_R = integers(TOKENS, ROWS).int(), drawn(ROWS)
    gathering = {"token_R": row_R, "weights_R": weights_R, "activation": "swiglu"}
    expert_TK, kept_TK, weights_TK = integers(5, TOKENS, 2), drawn(TOKENS, 2) > -0.5, drawn(TOKENS, 2)
    logits_TE, target_T = drawn(TOKENS, 12).requires_grad_(), integers(12, TOKENS)
    matmul = x_RD, drawn(3, DIM, FFN), offsets_L1, drawn(3, FFN), weights_R
    up = {"bias1_LW": drawn(3, 2 * FFN), **gathering}
    both = {"a_index_R": row_R, "b_index_R": row_R}
    return {
        "up_projection": (up_projection, (x_TD, drawn(3, 2 * FFN, DIM), offsets_L1), up),
        "grouped_matmul": (grouped_matmul, matmul, {}),
        "activation_grad": (activation_grad, (x_TD, drawn(3, DIM, FFN), hidden_RW, offsets_L1), gathering),
        "weight_grad": (weight_grad, (x_TD, drawn(TOKENS, FFN), offsets_L1), both),
        "weight_grad, adding": (adding, (x_TD, drawn(TOKENS, FFN), offsets_L1), both),
        "combine": (combine, (x_RD, integers(ROWS + 1, TOKENS, 2).int()), {}),
        "gather_rows": (gather_rows, (x_TD, row_R), {}),
        "chunk_order": (chunk_order, (torch.tensor([[2, 1, 3], [1, 3, 0]], device=DEVICE), 10), {}),
        "slot_sort": (slot_sort, (expert_TK, 5, kept_TK), {}),
        "keep_within": (keep_within, (expert_TK, weights_TK, integers(5, 5).int()), {}),
        "padded_order": (padded_order, (expert_TK, 5, TOKENS, kept_TK), {}),
        "router_topk": (router_topk, (logits_TE, 2), {"bias_E": drawn(12), "normalize": True}),
        "statistics": (cross_entropy_statistics, (logits_TE.detach(), target_T, 0), {}),
        "gradient": (
            cross_entropy_gradient, (logits_TE.detach(), target_T, drawn(TOKENS), drawn(TOKENS), 0), {}
        ),
    }  # fmt: skip


def results_of(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """All results, and the gradient of the first operand if it wants one."""
    found = function(*args, **options)
    found = [found] if torch.is_tensor(found) else list(found)
    if args[0].requires_grad:
        losses = [x for x in found if x.requires_grad]
        found += torch.autograd.grad(losses, args[0], [torch.ones_like(x) for x in losses])
    return found


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", launches())
def test_gaps_and_another_launch_change_no_bit(name):
    function, args, options = launches()[name]
    expected = results_of(function, args, options)
    assert all(x.isfinite().all() for x in expected)
    assert_same_bits(results_of(function, args, options), expected)
    gaps = tuple(map(spread, args)), {key: spread(value) for key, value in options.items()}
    assert_same_bits(results_of(function, *gaps), expected)


@pytest.mark.parametrize("name", launches())
def test_is_one_operator_under_compile(name, request):
    request.addfinalizer(torch._dynamo.reset)
    function, args, options = launches()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(results_of(compiled, args, options), results_of(function, args, options))


def test_a_gradient_buffer_with_gaps_is_refused():
    function, args, options = launches()["weight_grad"]
    out = spread(torch.zeros(3, DIM, FFN, device=DEVICE))
    with pytest.raises(ValueError, match=r"^out=\(1920, 48, 2\) strides: the last dimension "):
        function(*args, **options, out=out)


@pytest.mark.parametrize("wrong", [-1, -(2**31), 3, 4, 2**31 - 1])
def test_a_slot_of_an_expert_that_is_not_there_counts_as_dropped(wrong):
    expert_TK = torch.tensor([[0, 2], [wrong, 1], [2, wrong]], device=DEVICE)
    kept_TK = (expert_TK >= 0) & (expert_TK < 3)
    wanted = slot_sort_torch(expert_TK.clamp(0, 2), 3, kept_TK)
    for found in (slot_sort(expert_TK, 3), slot_sort_torch(expert_TK, 3)):
        assert [a.tolist() for a in found] == [b.tolist() for b in wanted]
