from __future__ import annotations

import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels, poisoned  # noqa: F401
from moe_exp.layers.dispatcher.row_order import sort_by_expert
from moe_exp.layers.kernels.slot_sort import slot_sort, slot_sort_torch

pytestmark = [needs_kernels, pytest.mark.usefixtures("poisoned")]


def routing(num_tokens: int, topk: int, num_experts: int, kind: str, *, dtype=torch.int64) -> torch.Tensor:
    shape = num_tokens, topk
    if kind == "one":  # expert takes all, the others are empty
        return torch.full(shape, num_experts - 1, dtype=dtype, device=DEVICE)
    if kind == "skewed":
        return (torch.rand(shape, device=DEVICE) ** 3 * num_experts).to(dtype)
    return torch.randint(num_experts, shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("drops", ["none", "some", "all"])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "kind"),
    [
        (0, 2, 3, "even"),
        (1, 1, 1, "one"),
        (77, 3, 5, "one"),
        (130, 2, 60, "skewed"),
        (43, 3, 257, "even"),
        at_real_size(32768, 8, 64, "skewed"),
    ],
)
def test_kernel_sorts_as_its_twin(num_tokens, topk, num_experts, kind, drops):
    expert_TK = routing(num_tokens, topk, num_experts, kind)
    kept_TK = {
        "none": None,
        "some": torch.rand(expert_TK.shape, device=DEVICE) > 0.3,
        "all": torch.zeros_like(expert_TK, dtype=torch.bool),
    }
    ours = slot_sort(expert_TK, num_experts, kept_TK[drops])
    for mine, again, reference in zip(
        ours,
        slot_sort(expert_TK, num_experts, kept_TK[drops]),
        slot_sort_torch(expert_TK, num_experts, kept_TK[drops]),
        strict=True,
    ):
        assert mine.dtype == torch.int32
        assert torch.equal(mine, reference) and torch.equal(mine, again)


def test_twin_sorts_as_the_row_order_of_the_layer():
    expert_TK, kept_TK = routing(50, 3, 7, "skewed"), torch.rand(50, 3, device=DEVICE) > 0.3
    slot_N, row_N, offsets_E1 = slot_sort_torch(expert_TK, 7, kept_TK)
    order = sort_by_expert(expert_TK, kept_TK, num_experts=7).order()
    num_rows = order.slot_R.numel()
    assert slot_N[:num_rows].tolist() == order.slot_R.tolist()
    assert row_N.clamp(max=num_rows).tolist() == order.row_N.tolist()
    assert offsets_E1.diff().tolist() == torch.bincount(expert_TK[kept_TK], minlength=7).tolist()
    assert row_N[~kept_TK.flatten()].tolist() == [150] * int((~kept_TK).sum())


def test_strides_index_types_and_experts_of_dropped_slots_do_not_matter():
    expert_TK, kept_TK = routing(40, 4, 6, "even", dtype=torch.int32), torch.rand(40, 4, device=DEVICE) > 0.3
    expected = slot_sort_torch(expert_TK, 6, kept_TK)
    strange_TK = expert_TK.masked_fill(~kept_TK, -7).t().contiguous().t()
    for mine, reference in zip(slot_sort(strange_TK, 6, kept_TK[:, :]), expected, strict=True):
        assert torch.equal(mine, reference)


def test_is_one_operator_under_compile():
    def by_expert(expert_TK: torch.Tensor) -> torch.Tensor:
        return slot_sort(expert_TK * 1, 5)[1] + 1

    expert_TK = routing(20, 2, 5, "even")
    compiled = torch.compile(by_expert, fullgraph=True, backend="eager")
    assert torch.equal(compiled(expert_TK), by_expert(expert_TK))
