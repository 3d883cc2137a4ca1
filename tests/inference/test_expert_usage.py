"""How far experts tell sources apart, worked out by hand; and sequences that hold every token once."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.jsonl import BinIdxWriter
from moe_exp.inference.eval_report import LayerUsage, RouterCounts, short_names
from moe_exp.inference.evaluate import Cut, HeldOut


def usage(*counts: list[int]) -> LayerUsage:
    return LayerUsage(1, np.array(counts))


def test_experts_of_one_source_each():
    """Which expert it was says which of two sources it was, one bit."""
    layer = usage([30, 10, 0, 0], [0, 0, 2, 2])
    assert layer.shares_PE.tolist() == [[0.75, 0.25, 0, 0], [0, 0, 0.5, 0.5]]
    # s/2 * log2(s / (s/2)) = s/2: half the share in the only source that uses the expert.
    assert layer.bits_E == pytest.approx([0.375, 0.125, 0.25, 0.25])
    assert layer.order_E.tolist() == [0, 2, 3, 1]
    assert layer.bits_E.sum() == pytest.approx(1.0)


def test_sources_that_use_experts_alike():
    """Whatever their sizes, and whatever the balance of the experts. The most used comes first."""
    layer = usage([10, 30, 0, 60], [1, 3, 0, 6])
    assert layer.bits_E == pytest.approx([0, 0, 0, 0], abs=1e-12)
    assert layer.order_E.tolist() == [3, 1, 0, 2]
    assert usage([3, 9, 1]).order_E.tolist() == [1, 0, 2]  # a single source


def test_one_expert_by_hand():
    """Shares 0.6 and 0.2 of expert 0; one that hardly anybody uses stays behind."""
    layer = usage([600, 399, 1], [200, 800, 0])
    assert layer.bits_E[0] == pytest.approx((0.6 * math.log2(1.5) - 0.2) / 2)
    assert layer.order_E.tolist()[-1] == 2
    record = layer.to_json(["a", "b"])
    assert record["specialisation_bits"] == pytest.approx(sum(record["expert_bits"]))
    assert record["tokens_per_expert"] == {"a": [600, 399, 1], "b": [200, 800, 0]}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 7), st.booleans())
def test_every_token_but_the_first_is_predicted_once(tmp_path_factory, lengths, seq_len, by_document):
    prefix, numbers = tmp_path_factory.mktemp("tokens") / "t", iter(range(1, 1000))
    with BinIdxWriter(prefix, vocab_size=1000, eod_id=0) as writer:
        for length in lengths:
            writer.add_document([next(numbers) for _ in range(length)])
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist()
    ends = np.cumsum([length + 1 for length in lengths]).tolist()
    firsts = {0, *ends[:-1]} if by_document else {0}
    expected = [token for place, token in enumerate(tokens) if place not in firsts]
    if not expected:
        with pytest.raises(ValueError, match="at least two tokens"):
            HeldOut(str(prefix), Cut(seq_len, by_document))
        return
    held_out = HeldOut(str(prefix), Cut(seq_len, by_document))
    sequences = held_out.read(0, len(held_out))
    assert [token for ids in sequences for token in ids[1:].tolist()] == expected
    assert (held_out.ends - held_out.begins - 1).sum() == len(expected)
    assert all(2 <= len(ids) <= seq_len + 1 for ids in sequences)


def test_names_in_a_table():
    assert short_names(["/a/web", "/b/code"]) == ["web", "code"]
    assert short_names(["/a/web/valid", "/a/code/valid"]) == ["web/valid", "code/valid"]
    assert short_names(["/x/1/a/b/c", "/x/2/a/b/c"]) == ["/x/1/a/b/c", "/x/2/a/b/c"]


def test_slots_that_a_token_does_not_use_are_not_counted():
    """Of a router with a free number of experts; expert 3 is a null expert."""
    layer = nn.Module()
    layer.router = nn.Identity()
    counts = RouterCounts([(0, layer)], (1, 1, 3), torch.device("cpu"))
    expert_TK = torch.tensor([[0, 1], [2, 3], [1, 0], [2, 2]])
    kept_TK = torch.tensor([[True, False], [True, False], [True, True], [True, True]])
    decision = SimpleNamespace(expert_TK=expert_TK, kept_TK=kept_TK)
    for valid_T, expected in ((None, [2, 1, 3]), (torch.tensor([True, True, True, False]), [2, 1, 1])):
        counts.counts_PLE.zero_()
        counts.valid_T = valid_T
        layer.router(decision)
        assert counts.counts_PLE.flatten().tolist() == expected
