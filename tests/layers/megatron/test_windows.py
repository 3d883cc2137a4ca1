"""Attention with windows, documents, sinks and a soft cap against one masked softmax over all pairs, in fp64:
results and gradients, on one rank and with context and tensor parallelism.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from helpers.layers.naive_attention import naive
from helpers.layers.tiny_moe import random
from helpers.ranks import run_on_ranks
from moe_exp.layers.megatron.attention import CausalAttention
from moe_exp.layers.megatron.attention_backends import AttentionRule, attend_by_blocks, attend_by_flex
from moe_exp.layers.megatron.documents import Documents, document_positions
from moe_exp.layers.microbatch import context_ranges

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
SEQ_LEN, BATCH, HEADS, SIZE = 288, 2, 4, 6  # longer than two blocks of queries
# ends inside blocks, documents of one token, and one as long as the sample
DOCUMENTS = (((50, 1, 130, 107), (288,)), None)
# a single key; up to the neighbor of a rank's block; beyond several blocks; longer than the sequence
WINDOWS = (0, 1, 7, 60, 200, 500)
CASES = list(itertools.product(WINDOWS, DOCUMENTS, (False, True), (0.0, 1.5), (1, 2, 4)))


def error(found, expected):
    """Largest relative error; gradients that vanish (one key has weight 1) count as 1e-3."""
    errors = [
        float((one - other).norm() / max(other.norm(), 1e-3 * math.sqrt(other.numel())))
        for one, other in zip(found, expected, strict=True)
    ]
    return max(errors)


def drawn(groups, heads=HEADS):
    shapes = [(SEQ_LEN, BATCH, n, SIZE) for n in (heads, groups, groups, heads)]
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)] + [random(heads, seed=9)]


def errors_on_rank(cp_size, step):
    """Errors of every `step`-th case on this rank: the ranks of a group of `cp_size` share sequences, others
    heads.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cp, tp_size = ALONE, size // cp_size
    for first in range(0, size, cp_size) if cp_size > 1 else ():
        group = dist.new_group(range(first, first + cp_size))
        cp = group if first <= rank < first + cp_size else cp
    part = rank // cp_size
    tp = SimpleNamespace(size=lambda: tp_size, rank=lambda: part)
    return [error_of(case, cp, tp) for case in CASES[::step] if case[-1] % tp_size == 0]


def error_of(case, cp, tp):
    window, lengths, has_sinks, softcap, groups = case
    *leaves, sinks = drawn(groups)
    query, key, value = (x.clone().requires_grad_() for x in leaves[:3])
    sinks = sinks.clone().requires_grad_() if has_sinks else None
    rule = AttentionRule(SIZE**-0.5, window, softcap, has_sinks)
    out = naive(query, key, value, rule, sinks, lengths)
    inputs = [x for x in (query, key, value, sinks) if x is not None]
    expected = [out.detach(), *torch.autograd.grad(out, inputs, leaves[3])]
    config = SimpleNamespace(
        kv_channels=SIZE, attention_dropout=0.0, params_dtype=torch.float64, num_attention_heads=HEADS,
        window_size=(window - 1, 0) if window else None, window_attn_skip_freq=None,
        softmax_type="learnable" if has_sinks else "vanilla",
    )  # fmt: skip
    module = CausalAttention(
        config, 1, None, "self", pg_collection=SimpleNamespace(cp=cp, tp=tp), softcap=softcap
    )
    stripes = 1 if lengths is None else 3
    ranges = context_ranges(SEQ_LEN, cp_rank=cp.rank(), cp_size=cp.size(), num_stripes=stripes)

    def own(x):
        """This rank's positions and heads."""
        part = torch.cat([x[first:end] for first, end in ranges])
        return part.chunk(tp.size(), 2)[tp.rank()]

    if module.softmax_offset is not None:
        module.softmax_offset.data.copy_(sinks.detach().chunk(tp.size())[tp.rank()])
    *mine, grad = (own(x.detach()).clone().requires_grad_() for x in leaves)
    options = {}
    if lengths is not None:
        positions = document_positions(lengths)
        here = torch.cat([positions[:, first:end] for first, end in ranges], 1)
        options["packed_seq_params"] = Documents(lengths, here, ranges if cp.size() > 1 else ())
    found = module(*mine, None, **options)
    found.backward(grad.flatten(2))
    pairs = [(found.detach().unflatten(2, (-1, SIZE)), own(expected[0]))]
    pairs += [(x.grad, own(whole)) for x, whole in zip(mine, expected[1:4], strict=True)]
    if has_sinks:
        of_sinks = module.softmax_offset.grad
        if cp.size() > 1:
            dist.all_reduce(of_sinks, group=cp)
        pairs.append((of_sinks, expected[4].chunk(tp.size())[tp.rank()]))
    return error(*zip(*pairs, strict=True))


ON_RANKS = [(2, 2), (2, 1), (4, 4), (4, 2)]


@pytest.mark.parametrize(
    ("num_ranks", "cp_size", "step"),
    [
        (1, 1, 5), (2, 2, 7), (4, 2, 7),
        *(pytest.param(*ranks, 1, marks=pytest.mark.slow) for ranks in [(1, 1), *ON_RANKS]),
    ],
)  # fmt: skip
def test_equals_a_naive_mask(num_ranks, cp_size, step):
    """Without context parallelism, ranks share the heads."""
    if num_ranks == 1:
        of_ranks = [errors_on_rank(1, step)]
    else:
        of_ranks = run_on_ranks(num_ranks, errors_on_rank, cp_size, step)
    assert all(len(errors) >= len(CASES) / step / 2 for errors in of_ranks)
    assert max(map(max, of_ranks)) < 1e-10


@pytest.mark.parametrize("window", WINDOWS[::2])
@pytest.mark.parametrize(("num_queries", "num_keys", "value_size"), [(1, 9, 6), (129, 301, 6), (40, 77, 3)])
def test_backends_for_fewer_queries_than_keys(window, num_queries, num_keys, value_size):
    """As in generation. FlexAttention only computes forward on a CPU."""
    query, key = random(num_queries, 2, 4, 6, seed=0), random(num_keys, 2, 2, 6, seed=1)
    value, sinks = random(num_keys, 2, 2, value_size, seed=2), random(4, seed=3)
    for softcap, has_sinks in itertools.product((0.0, 2.0), (False, True)):
        rule, given = AttentionRule(0.4, window, softcap, has_sinks), sinks if has_sinks else None
        expected = naive(query, key, value, rule, given, None)
        for attend in (attend_by_blocks, attend_by_flex):
            torch.testing.assert_close(
                attend(query, key, value, rule, given), expected, rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize("cp_rank", [None, 0, 1])
def test_flex_attention_sees_documents(cp_rank):
    """Also for the queries of a context parallel rank, in stripes."""
    lengths, size = DOCUMENTS[0], 1 if cp_rank is None else 2
    query, key, value, _, sinks = drawn(2)
    ranges = context_ranges(SEQ_LEN, cp_rank=cp_rank or 0, cp_size=size, num_stripes=3)
    documents = Documents(lengths, document_positions(lengths), ranges if size > 1 else ())
    rule = AttentionRule(0.4, 60, 0.0, True)
    expected = naive(query, key, value, rule, sinks, lengths)
    own, expected = (torch.cat([x[first:end] for first, end in ranges]) for x in (query, expected))
    found = attend_by_flex(own, key, value, rule, sinks, documents)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["blocks", "flex"])
def test_a_token_outside_the_window_changes_no_bit(backend):
    attend = {"blocks": attend_by_blocks, "flex": attend_by_flex}[backend]
    query, key, value, _, sinks = drawn(2)
    rule, place = AttentionRule(0.4, 60, 0.0, True), 100
    before = attend(query, key, value, rule, sinks)
    for x in (key, value):
        x[place] += 1
    changed = (attend(query, key, value, rule, sinks) != before).any(-1).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == list(range(place, place + 60))
