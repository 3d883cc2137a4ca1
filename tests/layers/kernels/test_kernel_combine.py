import pytest
import torch

from helpers.layers.kernel_device import DEVICE, at_real_size, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.layers.kernels.combine import combine, combine_torch

pytestmark = [needs_kernels, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)  # the interpreter rounds down
@pytest.mark.parametrize(
    ("num_tokens", "topk", "width", "num_rows"),
    [(9, 3, 45, 20), (4, 1, 64, 4), (1, 2, 1, 1), (3, 2, 8, 0), at_real_size(32768, 8, 2048, 200000)],
)
def test_kernel_and_twin_sum_as_float64(num_tokens, topk, width, num_rows, dtype, limit):
    y_RD = torch.randn(num_rows, width, dtype=dtype, device=DEVICE)
    row_TK = torch.randint(num_rows + 3, (num_tokens, topk), dtype=torch.int32, device=DEVICE)
    padded = torch.cat([y_RD.double(), y_RD.new_zeros(3, width).double()])
    expected = padded[row_TK.long()].sum(dim=1)
    for function in (combine, combine_torch):
        out_TD = function(y_RD, row_TK)
        assert out_TD.dtype == dtype
        assert relative_error(out_TD, expected) < limit


def test_adds_in_slot_order_in_fp32():
    # 2^24 + 1 is 2^24 in fp32: only from left to right do the ones vanish one by one.
    y_RD = torch.tensor([[2.0**24], [1.0], [1.0]], device=DEVICE)
    rows = torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32, device=DEVICE)
    for function in (combine, combine_torch):
        assert function(y_RD, rows).flatten().tolist() == [2.0**24, 2.0**24 + 2]


def test_poison_behind_a_dropped_slot_is_not_read():
    y_RD, row_TK = torch.ones(2, 5, device=DEVICE), torch.tensor([[0, 2], [7, 1]], device=DEVICE)
    for function in (combine, combine_torch):
        assert function(y_RD, row_TK).tolist() == [[1.0] * 5, [1.0] * 5]


def test_rows_of_a_wider_buffer():
    wide = torch.randn(6, 40, device=DEVICE)
    row_TK = torch.tensor([[5, 0], [2, 2]], device=DEVICE)
    assert torch.equal(combine(wide[:, 4:20], row_TK), combine(wide[:, 4:20].contiguous(), row_TK))
