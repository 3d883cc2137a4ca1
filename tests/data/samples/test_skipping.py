"""Samples without those that are skipped: no other is lost or repeated, whenever the skip was decided."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ranks import run_on_ranks
from helpers.token_files import samples_of, write_distinct
from moe_exp.data.samples.dataset import (
    SampleStream,
    SkippingSamples,
    merged,
    skipped_from,
    stream_number,
    stream_ranges,
)
from moe_exp.data.samples.prefetch import ReadAhead

RANGE = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
RANGES = st.lists(RANGE, max_size=6)


def left(skipped, count):
    """The first numbers of the stream that are not skipped."""
    numbers = range(count + 200)
    return [one for one in numbers if not any(first <= one < end for first, end in skipped)][:count]


@settings(deadline=None)
@given(RANGES)
def test_merged_are_the_same_numbers(ranges):
    found = merged(ranges)
    assert left(found, 100) == left(ranges, 100)
    assert all(first < end for first, end in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@settings(deadline=None)
@given(RANGES)
def test_every_other_sample_comes_once_and_in_order(ranges):
    skipped = merged(ranges)
    assert [stream_number(consumed, skipped) for consumed in range(100)] == left(ranges, 100)


@settings(deadline=None)
@given(RANGES, st.integers(0, 60), st.integers(0, 40))
def test_ranges_of_a_batch(ranges, first, count):
    found = stream_ranges(first, first + count, merged(ranges))
    numbers = [number for begin, end in found for number in range(begin, end)]
    assert numbers == left(ranges, first + count)[first:]


@settings(deadline=None)
@given(RANGES, RANGES, st.integers(0, 60))
def test_going_on_from_a_checkpoint(saved, wanted, consumed):
    """Whatever is skipped meanwhile, what the checkpoint has trained stays, and then comes the rest."""
    skipped = skipped_from(saved, wanted, consumed)
    trained = left(saved, consumed)
    place = trained[-1] + 1 if trained else 0
    rest = [number for number in left([*saved, *wanted], 200) if number >= place][:50]
    assert [stream_number(number, skipped) for number in range(consumed + 50)] == trained + rest


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 6)), min_size=1, max_size=4))
def test_rollback_after_rollback(spikes):
    """A run saves every 5 iterations of 4 samples and goes back: in the end it has trained all the others."""
    batch, skipped, trained, consumed, all_skips = 4, (), [], 0, []
    for iteration, length in spikes:
        end = (iteration + length) * batch
        while consumed < end:
            trained += [stream_number(consumed + place, skipped) for place in range(batch)]
            consumed += batch
        all_skips += stream_ranges(iteration * batch, end, skipped)
        consumed = iteration // 5 * 5 * batch
        trained = trained[:consumed]
        skipped = skipped_from(skipped, all_skips, consumed)
    trained += [stream_number(number, skipped) for number in range(consumed, consumed + 40)]
    assert trained == left(all_skips, len(trained))


@pytest.fixture
def prefix(tmp_path):
    return write_distinct(tmp_path / "part", [20] * 50)


def test_batches_over_a_skip(prefix):
    stream = SampleStream([(1.0, prefix)], seq_len=10, seed=1)
    samples = SkippingSamples(stream, [(3, 5), (9, 10)])
    numbers = (0, 1, 2, 5, 6, 7, 8, 10, 11)
    expected = torch.stack([torch.from_numpy(stream.sample(number)) for number in numbers])
    assert torch.equal(samples.batch(0, 9), expected)
    assert torch.equal(samples.batch(3, 2), expected[3:5])
    assert samples.origin(3) == stream.origin(5)


def test_inside_read_ahead(prefix):
    samples = SkippingSamples(SampleStream([(1.0, prefix)], seq_len=10, seed=1), [(3, 5)])
    starts = lambda first: ((start, 2) for start in range(first, 100, 2))  # noqa: E731
    ahead = ReadAhead(samples, starts=starts, num_workers=1)
    assert torch.equal(torch.cat([ahead.batch(first, 2) for first in (0, 2, 4)]), samples.batch(0, 6))
    assert ahead.origin(4) == samples.origin(4)
    ahead.close()


def test_the_end_of_megatrons_order(prefix, tmp_path):
    stream = samples_of("megatron", prefix, 10, 60, tmp_path)
    length, skipped = len(stream), [(0, 1), (3, 5)]
    samples = SkippingSamples(stream, skipped, length)
    expected = [*left(skipped, length - 3), 1, 2, 5]
    assert samples.batch(0, length).tolist() == [stream.sample(number).tolist() for number in expected]
    assert samples.batch(length - 4, 4).equal(samples.batch(0, length)[-4:])


@pytest.mark.parametrize("kind", ["stream", "megatron"])
def test_origin_has_the_tokens(kind, prefix, tmp_path):
    samples = samples_of(kind, prefix, 25, 60, tmp_path)
    for number in range(60):
        origin, tokens = samples.origin(number), samples.sample(number)
        # Document n has 19 tokens from 19 n + 1 on; 0 ends each.
        found = list(dict.fromkeys(((tokens[tokens > 0] - 1) // 19).tolist()))
        assert origin.prefix == prefix
        assert found == [document for document in origin.documents if document in found]
        assert 2 <= len(origin.documents) <= 3


@pytest.mark.parametrize("kind", ["stream", "megatron"])
def test_origin_in_a_blend(kind, prefix, tmp_path):
    other = write_distinct(tmp_path / "other", [20] * 50, first_id=30000)
    blend = f"0.7 {prefix} 0.3 {other}"
    for tokens, origin in run_on_ranks(1, tokens_and_origins, kind, blend, tmp_path)[0]:
        first = 30000 if tokens[0] >= 30000 else 1
        assert origin.prefix == (prefix if first == 1 else other)
        assert {(token - first) // 19 for token in tokens} <= set(origin.documents)


def tokens_and_origins(kind, blend, folder):
    samples = samples_of(kind, blend, 10, 40, folder)
    tokens = [[token for token in samples.sample(number).tolist() if token > 0] for number in range(40)]
    return list(zip(tokens, map(samples.origin, range(40)), strict=True))
