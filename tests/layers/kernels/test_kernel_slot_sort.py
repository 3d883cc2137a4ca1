import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
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
    share = {"none": 0.0, "some": 0.3, "all": 1.0}[drops]
    kept_TK = torch.rand(expert_TK.shape, device=DEVICE) > share if share else None
    found, expected = (function(expert_TK, num_experts, kept_TK) for function in (slot_sort, slot_sort_torch))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other)


def test_index_types_and_experts_of_dropped_slots_do_not_matter():
    expert_TK, kept_TK = routing(40, 4, 6, "even", dtype=torch.int32), torch.rand(40, 4, device=DEVICE) > 0.3
    expected = slot_sort_torch(expert_TK, 6, kept_TK)
    strange_TK = expert_TK.masked_fill(~kept_TK, -7)
    for mine, reference in zip(slot_sort(strange_TK, 6, kept_TK), expected, strict=True):
        assert torch.equal(mine, reference)
