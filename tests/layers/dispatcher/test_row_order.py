import pytest
import torch

from helpers.layers.tiny_moe import random
from moe_exp.layers.dispatcher.row_order import RowOrder, pad_by_expert, regroup_chunks, sort_by_expert

# Ten tokens, two slots each: slot 2t and 2t+1 are those of token t. Expert 2 of 4 gets nothing.
HAND_TK = torch.tensor([[3, 0], [0, 1], [1, 3], [0, 3], [3, 1], [1, 0], [3, 0], [0, 1], [0, 3], [1, 0]])
SLOTS = {0: [1, 2, 6, 11, 13, 14, 16, 19], 1: [3, 4, 9, 10, 15, 18], 3: [0, 5, 7, 8, 12, 17]}
DROPPED = [6, 10, 16, 0]
KEPT_TK = torch.tensor([slot not in DROPPED for slot in range(20)]).view(10, 2)


def test_sort_by_expert_by_hand():
    slots = sort_by_expert(HAND_TK, num_experts=4)
    order = slots.order()
    assert slots.rows_per_expert_E.tolist() == [8, 6, 0, 6]
    assert order.slot_R.tolist() == SLOTS[0] + SLOTS[1] + SLOTS[3]
    assert [order.slot_R[row] for row in order.row_N] == list(range(20))
    assert (order.topk, order.has_padding, order.has_drops) == (2, False, False)


@pytest.mark.parametrize("num_rows", [None, 16])
def test_sort_by_expert_leaves_dropped_slots_out(num_rows):
    slots = sort_by_expert(HAND_TK, KEPT_TK, num_experts=4)
    order = slots.order(num_rows)
    assert slots.rows_per_expert_E.tolist() == [6, 5, 0, 5]
    assert order.slot_R.tolist() == [1, 2, 11, 13, 14, 19, 3, 4, 9, 15, 18, 5, 7, 8, 12, 17]
    assert [order.row_N[slot] for slot in DROPPED] == [16] * 4
    assert (order.has_padding, order.has_drops) == (False, True)


def test_the_expert_of_a_dropped_slot_does_not_matter():
    strange_TK = HAND_TK.masked_fill(~KEPT_TK, -7)
    for expert_TK in (HAND_TK, strange_TK):
        assert sort_by_expert(expert_TK, KEPT_TK, num_experts=4).order().slot_R.tolist()[:3] == [1, 2, 11]
        padded = pad_by_expert(expert_TK, KEPT_TK, num_experts=4, rows_per_expert=7)
        assert padded.slot_R.tolist()[5:8] == [19, 20, 3]


def test_pad_by_expert_by_hand():
    order = pad_by_expert(HAND_TK, KEPT_TK, num_experts=4, rows_per_expert=7)
    rows = [[1, 2, 11, 13, 14, 19], [3, 4, 9, 15, 18], [], [5, 7, 8, 12, 17]]
    assert order.slot_R.tolist() == [slot for row in rows for slot in row + [20] * (7 - len(row))]
    assert [order.row_N[slot] for slot in DROPPED] == [28] * 4
    assert [order.row_N[slot] for slot in (1, 3, 5)] == [0, 7, 21]


def test_rows_and_tokens_by_hand():
    expert_TK, kept_TK = torch.tensor([[1], [0], [1], [1]]), torch.tensor([[True], [True], [False], [True]])
    order = pad_by_expert(expert_TK, kept_TK, num_experts=2, rows_per_expert=2)
    x_TD = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert order.rows(x_TD).flatten().tolist() == [2, 0, 1, 4]
    assert order.weights(x_TD).tolist() == [2, 0, 1, 4]
    assert order.tokens(torch.tensor([[10.0], [20.0], [30.0], [40.0]])).flatten().tolist() == [30, 10, 0, 40]


def orders() -> dict[str, RowOrder]:
    none_TK = torch.zeros_like(KEPT_TK)
    given = {
        "all": (None, HAND_TK),
        "one slot per token": (None, HAND_TK[:, :1]),
        "drops": (None, HAND_TK, KEPT_TK),
        "one slot per token, drops": (None, HAND_TK[:, :1], KEPT_TK[:, :1]),
        "nothing kept": (None, HAND_TK, none_TK),
        "no tokens": (None, HAND_TK[:0]),
        "padding": (9, HAND_TK),
        "drops and padding": (7, HAND_TK, KEPT_TK),
        "nothing kept, padding": (1, HAND_TK, none_TK),
        "no tokens, padding": (0, HAND_TK[:0]),
    }
    return {
        name: sort_by_expert(*slots, num_experts=4).order()
        if rows is None
        else pad_by_expert(*slots, num_experts=4, rows_per_expert=rows)
        for name, (rows, *slots) in given.items()
    }


@pytest.mark.parametrize("name", orders())
def test_gradcheck(name):
    order = orders()[name]
    num_tokens = order.row_N.numel() // order.topk
    for function, rows in ((order.rows, num_tokens), (order.tokens, order.slot_R.numel())):
        assert torch.autograd.gradcheck(function, random(rows, 2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(order.weights, random(num_tokens, order.topk, seed=1).requires_grad_())


@pytest.mark.parametrize("name", orders())
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)],
)
def test_tokens_against_a_loop(name, dtype, tolerance):
    order = orders()[name]
    y_RD = random(order.slot_R.numel(), 33, seed=2).to(dtype)
    expected_TD = torch.zeros(order.row_N.numel() // order.topk, 33, dtype=torch.float64)
    for row, slot in enumerate(order.slot_R.tolist()):
        if slot < order.row_N.numel():
            expected_TD[slot // order.topk] += y_RD[row].double()
    y_TD = order.tokens(y_RD)
    assert y_TD.dtype == dtype and y_TD.shape == expected_TD.shape
    # Sums are rounded once: the tolerance is half a unit in the last place of the dtype.
    assert (y_TD.double() - expected_TD).norm() <= tolerance * expected_TD.norm()


def test_sums_have_the_same_bits_every_time_and_in_every_form():
    weights = torch.randn(20, 33, generator=torch.Generator().manual_seed(1))
    unpadded, padded = orders()["drops"], orders()["drops and padding"]
    rows = torch.zeros(28, 33)
    rows[[row for row, slot in enumerate(padded.slot_R.tolist()) if slot < 20]] = weights[:16]
    assert torch.equal(unpadded.tokens(weights[:16]), padded.tokens(rows))
    assert torch.equal(unpadded.tokens(weights[:16]), unpadded.tokens(weights[:16]))


def test_regroup_chunks_by_hand():
    # Two sources, three experts; letters are (source, expert): aabccc and ABBB with an empty chunk.
    order = regroup_chunks(torch.tensor([[2, 1, 3], [1, 3, 0]]), num_rows=10)
    assert order.slot_R.tolist() == [0, 1, 6, 2, 7, 8, 9, 3, 4, 5]
    assert order.row_N.tolist() == [0, 1, 3, 7, 8, 9, 2, 4, 5, 6]
    assert regroup_chunks(torch.zeros(2, 3, dtype=torch.int64), num_rows=0).slot_R.tolist() == []
