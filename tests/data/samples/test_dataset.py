"""The sample stream: every token once per epoch; samples depend on (files, seq_len, seed, index) alone."""

from itertools import accumulate, pairwise
from math import ceil, log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.token_files import write_distinct
from moe_exp.data.samples import dataset
from moe_exp.data.samples.corpus import permuted, shuffled
from moe_exp.data.samples.dataset import (
    SampleStream,
    blend_position,
    content_of,
    context_part,
    fingerprint_of,
    split_batch,
)
from moe_exp.layers.megatron.documents import document_lengths, document_positions
from moe_exp.layers.microbatch import context_ranges, sequence_blocks

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def epoch_text(stream, number=0):
    """The tokens of one epoch in the order in which its windows were cut, and the order of the windows."""
    corpus = stream._stages[0].files[0][1]
    bounds = corpus._bounds
    documents = corpus._epoch(number).documents
    text = np.concatenate([corpus._tokens[bounds[one] : bounds[one + 1]] for one in documents])
    size, first = stream.seq_len, number * corpus.num_windows
    places = {tuple(text[at : at + size + 1]): at // size for at in range(0, len(text), size)}
    return text, [places[tuple(stream.sample(first + i))] for i in range(corpus.num_windows)]


@pytest.fixture
def prefix(tmp_path):
    return write_distinct(tmp_path / "part", [5, 2, 17, 9, 3, 40, 12, 8, 26, 3] * 10)


def test_file_order_by_hand(tmp_path):
    prefix = write_distinct(tmp_path / "part", [4, 1, 3, 4])
    stream = SampleStream([(1.0, prefix)], seq_len=5, seed=0, shuffle=False)
    # 1 2 3 0 | 0 | 4 5 0 | 6 7 8 0: 12 tokens are two windows of 5 and a remainder; the label of 4 is the
    # first of the next.
    assert stream.sample(0).tolist() == [1, 2, 3, 0, 0, 4]
    assert stream.sample(1).tolist() == [4, 5, 0, 6, 7, 8]
    assert stream.sample(2).tolist() == stream.sample(0).tolist()
    assert stream.sample(0).dtype == np.int64


def test_smallest_data_set_is_one_window(tmp_path):
    prefix = write_distinct(tmp_path / "part", [3, 3])
    stream = SampleStream([(1.0, prefix)], seq_len=5, seed=0, shuffle=False)
    assert stream.sample(7).tolist() == [1, 2, 0, 3, 4, 0]
    with pytest.raises(ValueError, match=r"part: has 6 tokens, but one sample requires SEQ_LEN \+ 1 = 7"):
        SampleStream([(1.0, prefix)], seq_len=6, seed=0)


def test_documents_of_several_and_of_empty_sequences(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "part.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3, 4, 100000]), [3, 0, 2])
    builder.add_document(torch.tensor([], dtype=torch.int32), [0])
    builder.add_document(torch.tensor([5, 6]), [1, 1])
    builder.finalize(str(tmp_path / "part.idx"))
    blend = [(1.0, str(tmp_path / "part"))]
    in_order = SampleStream(blend, seq_len=6, seed=0, shuffle=False).sample(0)
    assert in_order.tolist() == [1, 2, 3, 4, 100000, 5, 6]
    texts = {tuple(SampleStream(blend, seq_len=6, seed=seed).sample(0).tolist()) for seed in range(20)}
    assert texts == {(1, 2, 3, 4, 100000, 5, 6), (5, 6, 1, 2, 3, 4, 100000)}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 20), st.integers(0, 2**40))
def test_every_token_once_per_epoch(tmp_path_factory, lengths, seq_len, seed):
    if sum(lengths) <= seq_len:
        return
    prefix, epoch = write_distinct(tmp_path_factory.mktemp("data") / "part", lengths), seed % 4
    stream = SampleStream([(1.0, prefix)], seq_len=seq_len, seed=seed)
    num_windows = (sum(lengths) - 1) // seq_len
    samples = [stream.sample(epoch * num_windows + i) for i in range(num_windows)]
    inputs = np.concatenate([sample[:-1] for sample in samples])
    ids = inputs[inputs != 0]
    assert len(set(ids.tolist())) == len(ids)
    assert len(inputs) == num_windows * seq_len > sum(lengths) - 1 - seq_len
    # Ids count up inside a document, so a label that is neither id + 1 nor EOD would be a wrong cut.
    for sample in samples:
        assert all(label in (0, token + 1) for token, label in pairwise(sample) if token != 0)


def test_epochs_and_seeds_differ_in_both_shuffles(prefix):
    in_order, _ = epoch_text(SampleStream([(1.0, prefix)], seq_len=16, seed=7, shuffle=False))
    texts, orders = {tuple(in_order)}, set()

    def documents(text):
        return sorted(tuple(part) for part in np.split(text, np.flatnonzero(text == 0) + 1))

    for seed in (1, 2):
        stream = SampleStream([(1.0, prefix)], seq_len=16, seed=seed)
        for number in range(2):
            text, windows = epoch_text(stream, number)
            assert documents(text) == documents(in_order)
            assert sorted(windows) == list(range(len(windows)))
            texts.add(tuple(text))
            orders.add(tuple(windows))
    assert len(texts) == 5 and len(orders | {tuple(range(len(windows)))}) == 5


def test_same_prefix_twice_in_a_blend_is_shuffled_apart(prefix):
    stream = SampleStream([(1.0, prefix), (1.0, prefix)], seq_len=16, seed=1)
    samples = [stream.sample(i).tolist() for i in range(100)]
    assert samples[0::2] != samples[1::2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30))
def test_sample_does_not_depend_on_what_was_read_before(tmp_path_factory, indices):
    folder = tmp_path_factory.mktemp("data")
    a, b = write_distinct(folder / "a", [7, 3, 20] * 9), write_distinct(folder / "b", [11, 5] * 9, 1000)
    blend = [(0.7, a), (0.3, b)]
    stream = SampleStream(blend, seq_len=8, seed=3)
    for index in indices:
        fresh = SampleStream(blend, seq_len=8, seed=3)
        assert np.array_equal(stream.sample(index), fresh.sample(index))


def test_order_is_the_same_on_every_host_and_numpy(tmp_path):
    """Pinned: a change of it would feed a resumed run other data."""
    stream = SampleStream([(1.0, write_distinct(tmp_path / "part", [3] * 6))], seq_len=4, seed=1234)
    # 17 // 4 = 4 windows are an epoch; the fifth sample is the first of the next one.
    pinned = [[0, 11, 12, 0, 7], [7, 8, 0, 3, 4], [6, 0, 1, 2, 0], [9, 10, 0, 5, 6], [1, 2, 0, 5, 6]]
    assert [stream.sample(i).tolist() for i in range(5)] == pinned


def test_only_two_epochs_are_kept(prefix):
    stream = SampleStream([(1.0, prefix)], seq_len=16, seed=1)
    corpus = stream._stages[0].files[0][1]
    for epoch in range(5):
        stream.sample(epoch * corpus.num_windows)
    assert list(corpus._epochs) == [3, 4]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_permutations(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))
    assert sorted(shuffled(size, key)) == list(range(size))


def test_permutations_are_near_uniform():
    """Where each of 8 elements lands: chi-squared with 49 degrees of freedom is over 100 once in 10^5."""
    for permute in (lambda key: [permuted(i, 8, key) for i in range(8)], lambda key: shuffled(8, key)):
        counts = np.zeros((8, 8))
        for key in range(4000):
            counts[np.arange(8), permute(key * 0x9E3779B97F4A7C15 % 2**64)] += 1
        assert ((counts - 500) ** 2 / 500).sum() < 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12))
def test_every_data_set_is_read_in_order_and_stays_close_to_its_share(weights):
    shares, counts = np.array(weights) / sum(weights), np.zeros(len(weights), dtype=np.int64)
    for index in range(400):
        position, local = blend_position(index, [0, *accumulate(weights)])
        assert local == counts[position]
        counts[position] += 1
        assert np.abs(counts - shares * (index + 1)).max() <= ceil(log2(len(weights))) / 2 + 1e-9


def test_shares_hold_far_into_a_run():
    cumulative = [0, 3, 10]
    index = 10**15
    seen = [blend_position(i, cumulative) for i in range(index, index + 10)]
    assert sum(position == 0 for position, _ in seen) == 3
    assert abs(dict(seen)[0] - index * 3 / 10) <= 3


def test_batch_is_the_samples_in_order(prefix):
    stream = SampleStream([(1.0, prefix)], seq_len=8, seed=1)
    batch = stream.batch(150, 20)
    assert batch.dtype == torch.int64
    assert batch.tolist() == [stream.sample(i).tolist() for i in range(150, 170)]


def test_context_parallel_ranks_have_a_piece_and_the_one_as_far_from_the_end():
    batch = {"tokens": torch.arange(24).view(2, 12)}
    ranges = [context_ranges(12, cp_rank=rank, cp_size=3) for rank in range(3)]
    parts = [context_part(batch, of_rank)["tokens"].tolist() for of_rank in ranges]
    assert [rows[0] for rows in parts] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert parts[1][1] == [14, 15, 20, 21]
    assert torch.equal(context_part(batch, ((0, 12),))["tokens"], batch["tokens"])


def test_split_batch_by_hand():
    batch = split_batch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert batch["tokens"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch["loss_mask"].tolist() == [[1.0] * 3] * 2
    assert batch["loss_mask"].dtype == torch.float32
    assert all(value.is_contiguous() for value in batch.values())


def test_documents_by_hand():
    """0 ends a document and is its last token; one at the end of a sample begins none after it."""
    tokens = torch.tensor([[5, 0, 0, 6, 7, 0, 8], [1, 2, 3, 4, 5, 0, 9]])
    lengths = document_lengths(tokens[:, :-1], 0)
    assert lengths == ((2, 1, 3), (6,))
    batch = split_batch(tokens, document_positions(lengths), masked_id=0)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch["loss_mask"].tolist() == [[1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0]]
    assert document_lengths(tokens[:, :1], 5) == ((1,), (1,))
    parts = [context_part(batch, context_ranges(6, cp_rank=rank, cp_size=3)) for rank in range(3)]
    ids_of_ranks = [[[0, 2], [0, 5]], [[1, 1], [1, 4]], [[0, 0], [2, 3]]]
    assert [part["position_ids"].tolist() for part in parts] == ids_of_ranks


def test_pieces_of_a_context_parallel_rank():
    assert context_ranges(6, cp_rank=2, cp_size=3) == ((2, 3), (3, 4))
    striped = [context_ranges(16, cp_rank=rank, cp_size=2, num_stripes=2) for rank in range(2)]
    assert striped == [((0, 2), (6, 8), (8, 10), (14, 16)), ((2, 4), (4, 6), (10, 12), (12, 14))]
    for size, stripes in ((2, 1), (2, 4), (4, 2)):
        place = {"cp_size": size, "num_stripes": stripes}
        ranks = [context_ranges(2 * size * stripes, cp_rank=rank, **place) for rank in range(size)]
        assert [first for of_rank in ranks for first, _ in of_rank] == sequence_blocks(size, stripes)


@pytest.mark.parametrize("num_blocks", [2**12, 8])
def test_content_notices_other_tokens_where_the_fingerprint_does_not(tmp_path, monkeypatch, num_blocks):
    monkeypatch.setattr(dataset, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(dataset, "_NUM_BLOCKS", num_blocks)  # with 8 of them, 1 byte in 40 is read
    prefix = write_distinct(tmp_path / "a", [8192] * 2)
    before = fingerprint_of([prefix]), content_of([prefix])
    assert before[1] != content_of([prefix, prefix])
    path = tmp_path / "a.bin"
    data = bytearray(path.read_bytes())
    begin, end = len(data) // 4, 3 * len(data) // 4
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    assert fingerprint_of([prefix]) == before[0]
    assert content_of([prefix]) != before[1]


def test_fingerprint_tells_files_apart(tmp_path):
    def fingerprint(*lengths, first_id=1, name="part"):
        (tmp_path / name).mkdir(exist_ok=True)
        files = enumerate(lengths)
        return fingerprint_of([write_distinct(tmp_path / name / str(i), part, first_id) for i, part in files])

    same = fingerprint([5, 6, 7])
    assert same == fingerprint([5, 6, 7]) == fingerprint([5, 6, 7], name="elsewhere")
    assert len(same) == 16
    others = [[[6, 5, 7]], [[5, 6, 7], [5, 6, 7]], [[5, 6], [7, 8]], [[7, 8], [5, 6]]]
    prints = [fingerprint(*lengths) for lengths in others]
    assert len({same, *prints, fingerprint([5, 6, 7], first_id=2)}) == 6
