import itertools

import pytest
import torch

from helpers.layers.backward_cases import COUNTS, DTYPES, SPARE_ROWS, drawn, offsets_of, rows, tokens_of_rows
from helpers.layers.kernel_device import DEVICE, needs_descriptors, needs_kernels, use_descriptors
from helpers.relative_error import relative_error
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels import weight_grad as module
from moe_exp.layers.kernels.weight_grad import expert_order, weight_grad, weight_grad_torch

pytestmark = pytest.mark.usefixtures("poisoned")
SIDES = {"a": (True, False), "b": (False, True), "both": (True, True), "neither": (False, False)}


def inputs(counts, *, side="a", dtype=torch.float32, sizes=(40, 24), num_tokens=9):
    """Arguments of weight_grad; what comes after the experts' rows is not finite."""
    num_rows, operands, indices = sum(counts) + SPARE_ROWS, [], {}
    for seed, (name, size, gathers) in enumerate(zip("ab", sizes, SIDES[side], strict=True)):
        x = drawn(num_tokens if gathers else num_rows, size, dtype=dtype, seed=seed)
        if gathers:
            indices[f"{name}_index_R"] = tokens_of_rows(num_rows, num_tokens - 1, seed=seed)  # no padding
        else:
            x[sum(counts) :] = float("nan")
        operands.append(x)
    return (*operands, offsets_of(counts)), indices


def expert_by_expert(args, indices):
    """In float64, one outer product after the other."""
    a_RM, b_RN = (rows(x, indices.get(f"{name}_index_R")) for x, name in zip(args[:2], "ab", strict=True))
    ends = args[2].tolist()
    return torch.stack([torch.einsum("rm,rn->mn", a_RM[a:b], b_RN[a:b]) for a, b in itertools.pairwise(ends)])


FUNCTIONS = [(weight_grad, dtype, limit) for dtype, limit in DTYPES.items()]
FUNCTIONS += [(weight_grad_torch, torch.float64, 1e-13), (weight_grad_torch, torch.bfloat16, 1e-2)]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("function", "dtype", "limit"), FUNCTIONS)
def test_against_outer_products(function, dtype, limit, side):
    """New, and added to main_grad, in fp32 whatever the operands are."""
    args, indices = inputs((0, 5, 0, 33), side=side, dtype=dtype)
    dw_LMN, expected = function(*args, **indices), expert_by_expert(args, indices)
    assert dw_LMN.dtype == dtype
    assert not dw_LMN[[0, 2]].any()
    assert relative_error(dw_LMN, expected) < limit
    main_grad = torch.ones(4, 40, 24, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    assert relative_error(function(*args, **indices, out=main_grad), 1 + expected) < min(limit, 1e-6)
    assert torch.equal(main_grad[0], torch.ones_like(main_grad[0]))


@needs_descriptors
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_by_descriptors(dtype, side, monkeypatch):
    """Whole steps of rows and a rest, which ends where the rows of the next expert begin."""
    use_descriptors(monkeypatch, module)
    args, indices = inputs((0, 5, 64, 33), side=side, dtype=dtype)
    expected = expert_by_expert(args, indices)
    main_grad = torch.ones(4, 40, 24, device=DEVICE)
    assert relative_error(weight_grad(*args, **indices), expected) < DTYPES[dtype]
    assert relative_error(weight_grad(*args, **indices, out=main_grad), 1 + expected) < DTYPES[dtype]


@pytest.mark.parametrize(
    ("counts", "sizes"), list(zip(COUNTS, [(33, 65), (64, 32), (7, 3), (5, 33), (3, 1)], strict=True))
)
def test_sizes_and_routings(counts, sizes):
    args, indices = inputs(counts, side="b", sizes=sizes)
    expected = expert_by_expert(args, indices)
    dw_LMN = weight_grad(*args, **indices)
    assert relative_error(dw_LMN, expected) < 1e-6
    assert torch.equal(weight_grad(*args, **indices), dw_LMN)
    # Added to what is there; an expert without rows is left as it is.
    main_grad = drawn(*expected.shape, dtype=torch.float32, seed=7)
    before = main_grad.clone()
    assert weight_grad(*args, **indices, out=main_grad) is main_grad
    assert relative_error(main_grad, before + expected) < 1e-6
    assert all(torch.equal(main_grad[e], before[e]) for e, count in enumerate(counts) if count == 0)


@needs_kernels
@pytest.mark.parametrize("block", [2, 4, 8])
def test_experts_are_sorted_by_rows(block, monkeypatch):
    """Most first, ties by lower number; also of more experts than a program compares at a time."""
    offsets_L1 = offsets_of((3, 9, 0, 9, 1, 0, 40))
    monkeypatch.setattr(module, "_BLOCK_E", block)
    assert expert_order(offsets_L1).tolist() == [6, 1, 3, 0, 4, 2, 5]
    monkeypatch.setattr(launch, "runs_kernel", lambda x: False)
    assert expert_order(offsets_L1).tolist() == [6, 1, 3, 0, 4, 2, 5]
    monkeypatch.undo()
    order_L = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)
    module._order_kernel[(-(-7 // block),)](offsets_L1, order_L, 7, BLOCK=block)
    assert order_L.tolist() == [6, 1, 3, 0, 4, 2, 5, -1]


@pytest.mark.parametrize("block", [1, 2, 64])
def test_the_order_of_the_experts_changes_nothing(block, monkeypatch):
    args, indices = inputs((3, 9, 0, 9, 1), sizes=(16, 16))
    expected = weight_grad(*args, **indices)
    assert relative_error(expected, expert_by_expert(args, indices)) < 1e-6
    monkeypatch.setattr(module, "_BLOCK_E", block)
    assert torch.equal(weight_grad(*args, **indices), expected)
    order_L = expert_order(args[2])
    monkeypatch.setattr(module, "expert_order", lambda offsets_L1: pytest.fail("computed again"))
    for out in (None, torch.zeros_like(expected)):
        assert torch.equal(weight_grad(*args, **indices, order_L=order_L, out=out), expected)


def test_main_grad_in_a_buffer():
    """As Megatron's is: a view, whose neighbours must stay."""
    args, indices = inputs((20, 13))
    buffer = torch.zeros(4, 40, 24, device=DEVICE)
    weight_grad(*args, **indices, out=buffer[1:3])
    assert relative_error(buffer[1:3], expert_by_expert(args, indices)) < 1e-6
    assert not buffer[[0, 3]].any()


def test_no_rows_at_all():
    (a, b, offsets_L1), _ = inputs((0, 0, 0), side="neither")
    dw_LMN = weight_grad(a[:0], b[:0], offsets_L1)
    assert dw_LMN.shape == (3, 40, 24)
    assert not dw_LMN.any()
    main_grad = torch.ones(3, 40, 24, device=DEVICE)
    weight_grad(a[:0], b[:0], offsets_L1, out=main_grad)
    assert (main_grad == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_at_a_real_size(dtype, limit, side):
    counts = (0, 1000, 3001, *[511] * 13)
    args, indices = inputs(counts, side=side, dtype=dtype, sizes=(1536, 2048), num_tokens=2048)
    first, second = (weight_grad(*args, **indices) for _ in range(2))
    assert relative_error(first, expert_by_expert(args, indices)) < limit
    assert torch.equal(first, second)
