import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from moe_exp.layers.kernels import drops
from moe_exp.layers.kernels.drops import keep_within, keep_within_torch, padded_order, padded_order_torch
from moe_exp.layers.microbatch import keep_full_tiles, keep_within_capacity

pytestmark = [needs_kernels, pytest.mark.usefixtures("poisoned")]

# On a CPU blocks are smaller, so that the last but one has several.
SHAPES = [(0, 2, 3), (1, 1, 1), (21, 2, 4), (60, 3, 9), (1300, 1, 1), at_real_size(32768, 8, 64)]


@pytest.fixture(autouse=DEVICE == "cpu")
def small_blocks(monkeypatch):
    monkeypatch.setattr(drops, "_BLOCK", 256)
    monkeypatch.setattr(drops, "_BLOCK_ROWS", 512)


def drawn(kind: str, *shape: int) -> torch.Tensor:
    x = torch.rand(shape, device=DEVICE)
    if kind == "ties":
        return (x * 3).round() / 3
    if kind == "all equal":
        return torch.ones_like(x)
    return torch.where(x > 0.9, float("nan"), (x - 0.5) * 1e30) if kind == "strange" else x


@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "strange"])
@pytest.mark.parametrize(("num_tokens", "topk", "num_experts"), SHAPES)
def test_the_same_slots_stay_as_in_capacity(num_tokens, topk, num_experts, kind):
    # Expert E is none: padding.
    expert_TK = (torch.rand(num_tokens, topk, device=DEVICE) ** 2 * (num_experts + 1)).long()
    weights_TK = drawn(kind, num_tokens, topk)
    for capacity in (0, max(1, num_tokens * topk // (2 * num_experts)), num_tokens * topk + 5):
        for weights in (weights_TK, None):
            plain_TK, kept_TK = (
                keep_within_capacity(
                    expert_TK, weights, num_experts=num_experts, capacity=capacity, use_kernels=use_kernels
                )
                for use_kernels in (False, True)
            )
            assert kept_TK.dtype == torch.bool and torch.equal(kept_TK, plain_TK)


def test_every_expert_has_its_own_limit():
    expert_TK, weights_TK = torch.randint(8, (60, 2), device=DEVICE), torch.rand(60, 2, device=DEVICE)
    limits_E = torch.arange(0, 24, 3, dtype=torch.int32, device=DEVICE)
    kept_TK = keep_within(expert_TK, weights_TK, limits_E)
    assert torch.equal(kept_TK, keep_within_torch(expert_TK, weights_TK, limits_E))
    counts_E = torch.bincount(expert_TK.flatten(), minlength=8)
    assert torch.bincount(expert_TK[kept_TK], minlength=8).tolist() == counts_E.minimum(limits_E).tolist()
    for expert in range(1, 8):
        stays, goes = (weights_TK[(expert_TK == expert) & mask] for mask in (kept_TK, ~kept_TK))
        assert goes.numel() == 0 or stays.min() >= goes.max()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("num_tokens", "topk", "num_experts"), SHAPES)
def test_padded_rows_are_those_of_the_twin(num_tokens, topk, num_experts, drops):
    expert_TK = torch.randint(num_experts, (num_tokens, topk), device=DEVICE)
    kept_TK = torch.rand(num_tokens, topk, device=DEVICE) > 0.3 if drops else None
    most = int(torch.bincount(expert_TK.flatten(), minlength=num_experts).max()) + 1
    arguments = expert_TK, num_experts, most, kept_TK
    for one, other in zip(padded_order(*arguments), padded_order_torch(*arguments), strict=True):
        assert one.dtype == other.dtype == torch.int32 and torch.equal(one, other)


def test_slots_past_the_rows_of_an_expert_are_dropped():
    expert_TK = torch.tensor([[0], [1], [0], [0], [1], [0]], device=DEVICE)
    for function in (padded_order, padded_order_torch):
        slot_R, row_N = function(expert_TK, 3, 2)
        assert slot_R.tolist() == [0, 2, 1, 4, 6, 6]
        assert row_N.tolist() == [0, 2, 1, 6, 3, 6]


@pytest.mark.parametrize("tile", [1, 8, 16])
def test_full_tiles_stay(tile):
    expert_TK = (torch.rand(70, 2, device=DEVICE) ** 2 * 6).long()  # 5 is none
    weights_TK = drawn("ties", 70, 2)
    plain_TK, kept_TK = (
        keep_full_tiles(expert_TK, weights_TK, num_experts=5, tile=tile, use_kernels=use_kernels)
        for use_kernels in (False, True)
    )
    assert torch.equal(kept_TK, plain_TK)
