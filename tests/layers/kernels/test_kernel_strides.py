"""Inputs that a kernel could take for others: gaps in the last dimension, unknown experts, fp64."""

from __future__ import annotations

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.layers.kernels.activation_grad import activation_grad, activation_grad_torch
from moe_exp.layers.kernels.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_gradient_torch,
    cross_entropy_statistics,
    cross_entropy_statistics_torch,
)
from moe_exp.layers.kernels.grouped_matmul import grouped_matmul, grouped_matmul_torch
from moe_exp.layers.kernels.slot_sort import slot_sort, slot_sort_torch
from moe_exp.layers.kernels.up_projection import up_projection, up_projection_torch
from moe_exp.layers.kernels.weight_grad import weight_grad, weight_grad_torch

pytestmark = needs_kernels
OFFSETS = torch.tensor([0, 9, 9, 24], dtype=torch.int32, device=DEVICE)  # 3 experts, one without rows
ROWS, DIM, FFN = 24, 40, 24


def gaps(*sizes: int) -> torch.Tensor:
    """Random values with a stride of 2 in the last dimension."""
    return torch.randn(*sizes[:-1], 2 * sizes[-1], device=DEVICE)[..., ::2]


def test_strided_rows_and_matrices_give_the_twins_numbers():
    x, w, dy = gaps(ROWS, DIM), gaps(3, DIM, FFN), gaps(ROWS, FFN)
    assert relative_error(grouped_matmul(x, w, OFFSETS), grouped_matmul_torch(x, w, OFFSETS)) < 1e-6
    assert relative_error(weight_grad(x, dy, OFFSETS), weight_grad_torch(x, dy, OFFSETS)) < 1e-6
    weight1 = gaps(3, 2 * FFN, DIM)
    ours = up_projection(x, weight1, OFFSETS, activation="swiglu")
    twin = up_projection_torch(x, weight1, OFFSETS, activation="swiglu")
    assert [relative_error(a, b) < 1e-6 for a, b in zip(ours, twin, strict=True)] == [True, True]
    arguments = (gaps(ROWS, DIM), gaps(3, DIM, FFN), gaps(ROWS, 2 * FFN), OFFSETS)
    ours = activation_grad(*arguments, activation="swiglu")
    twin = activation_grad_torch(*arguments, activation="swiglu")
    pairs = [(a, b) for a, b in zip(ours, twin, strict=True) if a is not None]
    assert [relative_error(a, b) < 1e-6 for a, b in pairs] == [True] * len(pairs)


def test_a_gradient_buffer_with_gaps_is_refused():
    out = gaps(3, DIM, FFN)
    with pytest.raises(
        ValueError, match=r"^out=\(1920, 48, 2\) strides: its last dimension has to be contiguous"
    ):
        weight_grad(gaps(ROWS, DIM), gaps(ROWS, FFN), OFFSETS, out=out)


@pytest.mark.parametrize("wrong", [-1, -(2**31), 3, 4, 2**31 - 1])
def test_a_slot_of_an_expert_that_is_not_there_counts_as_dropped(wrong):
    expert_TK = torch.tensor([[0, 2], [wrong, 1], [2, wrong]], device=DEVICE)
    kept_TK = (expert_TK >= 0) & (expert_TK < 3)
    wanted = slot_sort_torch(expert_TK.clamp(0, 2), 3, kept_TK)
    for found in (slot_sort(expert_TK, 3), slot_sort_torch(expert_TK, 3)):
        assert [a.tolist() for a in found] == [b.tolist() for b in wanted]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_in_the_precision_of_its_logits(dtype):
    logits = gaps(5, 70).to(dtype) * 20
    logits = torch.stack([logits, logits], dim=-1)[..., 0]  # the stride of 2 again
    target, grad = torch.randint(70, (5,), device=DEVICE), torch.rand(5, device=DEVICE)
    ours, twin = (
        cross_entropy_statistics(logits, target, 0),
        cross_entropy_statistics_torch(logits, target, 0),
    )
    limit = 1e-15 if dtype == torch.float64 else 1e-6
    assert [relative_error(a, b) < limit for a, b in zip(ours, twin, strict=True)] == [True, True]
    arguments = (logits, target, twin[0], grad.to(twin[0].dtype), 0)
    assert (
        relative_error(cross_entropy_gradient(*arguments), cross_entropy_gradient_torch(*arguments))
        < limit * 4
    )
