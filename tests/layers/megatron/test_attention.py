import functools
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.megatron import attention_backends
from moe_exp.layers.megatron.attention import CausalAttention
from moe_exp.layers.megatron.attention_backends import AttentionRule, choose_attention, largest_logits
from moe_exp.layers.megatron.documents import Documents, document_positions
from moe_exp.layers.microbatch import context_ranges, sequence_blocks

ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def attention(head_size: int, *, cp=ONE_RANK, dropout: float = 0.0, **kwargs) -> CausalAttention:
    config = SimpleNamespace(kv_channels=head_size, attention_dropout=dropout, params_dtype=torch.float64)
    return CausalAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=cp, tp=None), **kwargs)


def inputs(seq_len: int, batch: int, heads: int, groups: int, head_size: int):
    """Query, key, value [S, B, H or G, d] and the gradient of the result [S, B, H*d]."""
    query, key, value = (
        random(seq_len, batch, n, head_size, seed=seed).requires_grad_()
        for seed, n in enumerate((heads, groups, groups))
    )
    return query, key, value, random(seq_len, batch, heads * head_size, seed=3)


def explicit(query, key, value, scale):
    """One softmax at a time."""
    seq_len, batch, heads, _ = query.shape
    per_group = heads // key.size(2)
    outs = []
    for s in range(seq_len):
        for b in range(batch):
            for h in range(heads):
                past = key[: s + 1, b, h // per_group]
                weights = torch.exp(past @ query[s, b, h] * scale)
                outs.append((weights / weights.sum()) @ value[: s + 1, b, h // per_group])
    return torch.stack(outs).view(seq_len, batch, -1)


SHAPES = [(7, 2, 4, 4, 6), (5, 1, 4, 2, 8), (6, 3, 6, 1, 3), (1, 2, 2, 1, 4)]


@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_flash_attention_gets_the_scale_and_the_dropout(softmax_scale, monkeypatch):
    """[B, S, H, d] for it; what it returns has the layout of the rest."""
    given = []

    def flash_attn_func(q, k, v, **options):
        given.append(options)
        out = explicit(*(x.transpose(0, 1) for x in (q, k, v)), options["softmax_scale"])
        return out.view(out.size(0), *q.shape[:1], *q.shape[2:]).transpose(0, 1)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    query, key, value, _ = inputs(5, 1, 4, 2, 8)
    plain = attention(8, softmax_scale=softmax_scale, dropout=0.25)
    flash = attention(8, softmax_scale=softmax_scale, dropout=0.25)
    flash.backend = "flash-attn"
    for module in (plain, flash):
        module.eval()
    expected, found = (module(query, key, value, None) for module in (plain, flash))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    flash.train()(query, key, value, None)
    assert [options["dropout_p"] for options in given] == [0.0, 0.25]
    assert all(options["causal"] for options in given)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
@pytest.mark.parametrize("takes_groups", [True, False])
def test_against_an_explicit_softmax(shape, softmax_scale, takes_groups, monkeypatch):
    monkeypatch.setattr(attention_backends, "takes_groups", lambda query: takes_groups)
    query, key, value, grad = inputs(*shape)
    scale = 1 / math.sqrt(shape[-1]) if softmax_scale is None else softmax_scale
    expected = explicit(query, key, value, scale)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    actual = attention(shape[-1], softmax_scale=softmax_scale)(query, key, value, None)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(actual, (query, key, value), grad)
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def attend_on_rank(shape):
    group = dist.group.WORLD
    ranges = context_ranges(shape[0], cp_rank=group.rank(), cp_size=group.size())
    leaves = [torch.cat([x.detach()[first:end] for first, end in ranges]) for x in inputs(*shape)]
    query, key, value = (x.requires_grad_() for x in leaves[:3])
    out = attention(shape[-1], cp=group)(query, key, value, None)
    out.backward(leaves[3])
    return out.detach(), query.grad, key.grad, value.grad


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("shape", [(24, 2, 4, 2, 6), (8, 1, 3, 3, 5)])
def test_context_parallel_equals_one_rank(num_ranks, shape):
    query, key, value, grad = inputs(*shape)
    out = attention(shape[-1])(query, key, value, None)
    out.backward(grad)
    ranks = run_on_ranks(num_ranks, attend_on_rank, shape)
    for index, expected in enumerate((out.detach(), query.grad, key.grad, value.grad)):
        found = in_sequence([rank[index] for rank in ranks], 1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Documents

LENGTHS = ((7, 1, 4, 12), (24,), (12, 12), (1, 23))


def explicit_documents(query, key, value, scale):
    outs = []
    for sample, lengths in enumerate(LENGTHS):
        cuts = (x[:, sample : sample + 1].split(lengths) for x in (query, key, value))
        outs.append(torch.cat([explicit(*parts, scale) for parts in zip(*cuts, strict=True)]))
    return torch.cat(outs, dim=1)


def documents_of_rank(rank: int = 0, size: int = 1, stripes: int = 1) -> Documents:
    positions = document_positions(LENGTHS)
    ranges = context_ranges(24, cp_rank=rank, cp_size=size, num_stripes=stripes)
    return Documents(LENGTHS, torch.cat([positions[:, first:end] for first, end in ranges], dim=1), ranges)


def attend_to_documents(shape, use_flash=False, stripes=1):
    group = dist.group.WORLD if dist.is_initialized() else ONE_RANK
    documents = documents_of_rank(group.rank(), group.size(), stripes)
    query, key, value, grad = (
        torch.cat([x.detach()[first:end] for first, end in documents.ranges]) for x in inputs(*shape)
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    module = attention(shape[-1], cp=group)
    with pytest.MonkeyPatch.context() as patched:
        if use_flash:
            module.backend = "flash-attn"
            patched.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
        out = module(*leaves, None, packed_seq_params=documents)
        out.backward(grad)
    return out.detach(), *(x.grad for x in leaves)


JOBS = list(itertools.product([False, True], [1, 3]))  # with flash-attn, number of stripes


def attend_to_all(shape):
    return [attend_to_documents(shape, *job) for job in JOBS]


@functools.cache
def attended_on(num_ranks, shape):
    return run_on_ranks(num_ranks, attend_to_all, shape)


def in_sequence(parts, stripes: int) -> torch.Tensor:
    """Parts of the ranks, as one sequence."""
    order = sequence_blocks(len(parts), stripes)
    blocks = torch.cat(parts).chunk(len(order))
    return torch.cat([blocks[order.index(place)] for place in range(len(order))])


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, **options):
    """flash-attn's interface by our own attention: rows of all segments after one another."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    assert (len(q), len(k)) == (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1]))
    plain, outs = attention(q.size(-1), softmax_scale=options["softmax_scale"]), []
    for queries, keys in zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True):
        parts = (q[slice(*queries)], k[slice(*keys)], v[slice(*keys)])
        outs.append(plain._attend(*(part[:, None] for part in parts))[:, 0])
    return torch.cat(outs)


@pytest.mark.parametrize("use_flash", [False, True])
@pytest.mark.parametrize(("num_ranks", "stripes"), [(1, 1), (2, 1), (2, 3), (4, 1), (4, 3)])
def test_attention_stays_inside_documents(num_ranks, stripes, use_flash):
    """Also where documents cross the parts of context parallel ranks."""
    shape = (24, len(LENGTHS), 4, 2, 6)
    query, key, value, grad = inputs(*shape)
    expected = explicit_documents(query, key, value, 1 / math.sqrt(6))
    expected = (expected.detach(), *torch.autograd.grad(expected, (query, key, value), grad))
    if num_ranks == 1:
        found = attend_to_documents(shape, use_flash)
    else:
        job = JOBS.index((use_flash, stripes))
        ranks = [of_rank[job] for of_rank in attended_on(num_ranks, shape)]
        found = [in_sequence(parts, stripes) for parts in zip(*ranks, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_samples_of_one_document_are_as_without_documents():
    query, key, value, _ = inputs(8, 2, 4, 2, 6)
    lengths = ((8,), (8,))
    whole = Documents(lengths, document_positions(lengths))
    found = attention(6)(query, key, value, None, packed_seq_params=whole)
    assert torch.equal(found, attention(6)(query, key, value, None))


def test_changing_a_document_changes_no_bit_of_another():
    query, key, value, _ = (x.detach() for x in inputs(24, len(LENGTHS), 4, 2, 6))
    documents, module = documents_of_rank(), attention(6)
    before = module(query, key, value, None, packed_seq_params=documents)
    for x in (query, key, value):
        x[8:12, 0] += 1  # the third document of the first sample
    changed = (module(query, key, value, None, packed_seq_params=documents) != before).any(dim=2)
    assert changed[8:12, 0].all()
    assert int(changed.sum()) == 4


def test_dropout_in_training_only():
    query, key, value, _ = inputs(16, 2, 2, 2, 4)
    module = attention(4, dropout=0.5)
    expected = explicit(query, key, value, 0.5)
    assert not torch.allclose(module(query, key, value, None), expected)
    torch.testing.assert_close(module.eval()(query, key, value, None), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [{"attention_mask": torch.ones(1, 1, 2, 2)}, {"attention_mask": None, "packed_seq_params": object()}],
)
def test_masks_are_refused(arguments):
    query, key, value, _ = inputs(2, 1, 1, 1, 4)
    with pytest.raises(ValueError, match=r"attention_mask: .* Fix: pass attention_mask=None"):
        attention(4)(query, key, value, **arguments)


PLAIN, WINDOW, SINKS, CAP = (
    AttentionRule(1.0, **rest) for rest in ({}, {"window": 4}, {"has_sinks": True}, {"softcap": 20.0})
)


@pytest.mark.parametrize(
    ("device", "dtype", "rule", "options", "expected"),
    [
        ("cpu", torch.bfloat16, PLAIN, {}, ("sdpa", "flash-attn and FlexAttention require a GPU")),
        ("cpu", torch.bfloat16, SINKS, {}, ("blocks", "flash-attn and FlexAttention require a GPU")),
        ("cuda", torch.float32, PLAIN, {}, ("sdpa", "flash-attn does not support float32")),
        ("cuda", torch.float32, WINDOW, {}, ("flex", "flash-attn does not support float32")),
        ("cuda", torch.bfloat16, PLAIN, {"installed": False}, ("sdpa", "flash-attn is not installed")),
        ("cuda", torch.bfloat16, PLAIN, {"installed": False, "by_document": True}, ("flex", "flash-attn is")),
        (
            "cuda", torch.bfloat16, PLAIN, {"installed": False, "by_document": True, "dropout": 0.1},
            ("sdpa", "flash-attn is not installed"),
        ),
        ("cuda", torch.float16, PLAIN, {}, ("flash-attn", "installed")),
        ("cuda", torch.float16, WINDOW, {"by_document": True}, ("flash-attn", "installed")),
        ("cuda", torch.float16, CAP, {}, ("flex", "flash-attn supports neither sinks nor a soft cap")),
        (
            "cuda", torch.float16, PLAIN, {"other_value_size": True},
            ("sdpa", "flash-attn requires the same head size"),
        ),
        ("cuda", torch.float16, SINKS, {"requested": "blocks"}, ("blocks", "ATTENTION_BACKEND=blocks")),
    ],
)  # fmt: skip
def test_choose_attention(monkeypatch, device, dtype, rule, options, expected):
    installed = options.pop("installed", True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    name, reason = choose_attention(device, dtype, rule, **options)
    assert name == expected[0] and reason.startswith(expected[1])


@pytest.mark.parametrize(
    ("device", "rule", "requested", "error"),
    [
        ("cpu", PLAIN, "flex", "attention_backend=flex: flash-attn and FlexAttention require a GPU. Fix: "),
        ("cpu", PLAIN, "flash-attn", "attention_backend=flash-attn: .* require a GPU. Fix: "),
        ("cuda", SINKS, "flash-attn", "flash-attn supports neither sinks nor a soft cap here. Fix: "),
    ],
)
def test_requested_attention_that_cannot_compute_a_layer(device, rule, requested, error):
    with pytest.raises(ValueError, match=error):
        choose_attention(device, torch.bfloat16, rule, requested=requested)


@pytest.mark.parametrize("max_values", [1, 50, 1 << 24])
@pytest.mark.parametrize(("num_queries", "num_keys", "heads", "groups"), [(7, 7, 4, 2), (3, 8, 3, 3)])
def test_largest_logits_are_those_that_the_mask_leaves(num_queries, num_keys, heads, groups, max_values):
    query, key = random(num_queries, 2, heads, 5, seed=0), random(num_keys, 2, groups, 5, seed=1)
    key[-1] *= 9  # only the last query sees it
    expected = [
        max(
            (query[i, b, h] @ key[j, b, h // (heads // groups)]).item()
            for b in range(2)
            for i in range(num_queries)
            for j in range(num_keys - num_queries + i + 1)
        )
        for h in range(heads)
    ]
    found = largest_logits(query, key, 0.3, max_values=max_values)
    assert found.tolist() == pytest.approx([0.3 * value for value in expected], rel=1e-6)


def test_largest_logits_in_fp16_hold_products_that_fp16_does_not():
    query = key = torch.full((3, 1, 2, 128), 30.0, dtype=torch.float16)
    assert (query[0, 0] @ key[0, 0].t()).isinf().all()  # 128 * 900
    found = largest_logits(query, key, 128**-0.5)
    assert found.tolist() == pytest.approx([900 * 128**0.5] * 2, rel=2e-3)
