"""DOCUMENT_PACKING=best_fit: the plan against best-fit decreasing one piece at a time, and its samples."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.token_files import write_distinct
from moe_exp.config import load_config
from moe_exp.data.inspection import inspect_path
from moe_exp.data.samples import corpus as packing
from moe_exp.data.samples.corpus import attended_share, best_fit, cut_documents, piece_counts
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.data.tokens.tokens import EOD_ID, TokenFiles
from moe_exp.host.exit_codes import BAD_INPUT

LENGTHS = [5, 2, 17, 9, 1, 3, 40, 12, 8, 26, 3, 35] * 10


@pytest.fixture
def prefix(tmp_path):
    return write_distinct(tmp_path / "part", LENGTHS)


def stream_of(prefix, seq_len=16, seed=1, **options):
    return SampleStream([(1.0, prefix)], seq_len=seq_len, seed=seed, packing="best_fit", **options)


def one_by_one(lengths, room):
    """The lengths in each sample, by best-fit decreasing as the paper has it."""
    samples = []
    for length in sorted(lengths, reverse=True):
        fitting = [sample for sample in samples if sum(sample) + length <= room]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            samples.append([length])
    return Counter(tuple(sample) for sample in samples)


@given(lengths=st.lists(st.integers(2, 24), max_size=120), room=st.integers(24, 40))
@settings(max_examples=300, deadline=None)
def test_plan_is_best_fit_decreasing(lengths, room):
    groups = best_fit(np.bincount(lengths or [0], minlength=room + 1) * (np.arange(room + 1) > 0), room)
    planned, used = Counter(), Counter()
    for group in groups:
        planned[tuple(item.length for item in group.items for _ in range(item.each))] += group.count
        for item in group.items:
            for number in range(item.first, item.first + group.count * item.each):
                used[item.length, number] += 1
    # Samples with equal room are exchangeable, so the order of choice among them shows in no room.
    expected = one_by_one(lengths, room)
    assert sorted(sum(sample) for sample in planned.elements()) == sorted(map(sum, expected.elements()))
    assert used == {(length, n): 1 for length, count in Counter(lengths).items() for n in range(count)}


def test_plan_of_a_billion_documents_takes_no_longer_than_its_lengths():
    counts = np.full(4098, 250_000, dtype=np.int64)
    counts[:2] = 0
    groups = best_fit(counts, 4097)
    assert sum(group.count * item.each for group in groups for item in group.items) == counts.sum()
    assert all(sum(item.length * item.each for item in group.items) <= 4097 for group in groups)


@pytest.mark.parametrize("seq_len", [7, 16, 64])
def test_every_token_is_predicted_once_an_epoch(prefix, seq_len):
    stream = stream_of(prefix, seq_len)
    num_windows = stream._stages[0].files[0][1].num_windows
    expected = Counter()
    for begin, end in pairwise(TokenFiles(prefix).document_bounds.tolist()):
        text = TokenFiles(prefix).read(begin, end).tolist()
        expected.update((token, after) for token, after in pairwise(text) if after != EOD_ID)
    for epoch in range(2):
        found = Counter()
        for index in range(epoch * num_windows, (epoch + 1) * num_windows):
            sample = stream.sample(index).tolist()
            assert len(sample) == seq_len + 1
            found.update((a, b) for a, b in pairwise(sample) if a != EOD_ID and b != EOD_ID)
        assert found == expected


def test_only_longer_documents_are_cut(prefix):
    stream, seen = stream_of(prefix, 16), Counter()
    for index in range(stream._stages[0].files[0][1].num_windows):
        seen.update(stream.origin(index).documents)
    pieces = {document: -(-(length - 1) // 16) for document, length in enumerate(LENGTHS)}
    assert seen == Counter(pieces)


def test_epochs_deal_other_documents(prefix):
    stream = stream_of(prefix)
    num_windows = stream._stages[0].files[0][1].num_windows
    samples = [frozenset(stream.origin(index).documents) for index in range(2 * num_windows)]
    assert {*samples[:num_windows]} != {*samples[num_windows:]}


def test_samples_depend_on_files_seed_and_number_alone(prefix):
    forward, backward = stream_of(prefix), stream_of(prefix)
    last = 2 * forward._stages[0].files[0][1].num_windows
    first = [forward.sample(index) for index in range(last)]
    for index in reversed(range(last)):
        assert np.array_equal(backward.sample(index), first[index])
    other = stream_of(prefix, seed=2)
    assert not np.array_equal(first, [other.sample(index) for index in range(last)])


def test_share_of_the_documents(prefix):
    stream = stream_of(prefix, share=(0.0, 0.5))
    origins = map(stream.origin, range(stream._stages[0].files[0][1].num_windows))
    assert max(max(origin.documents) for origin in origins) < len(LENGTHS) // 2


def test_inspect_counts_cut_documents(prefix):
    report = inspect_path(Path(prefix), seq_len=16)
    longer = sum(length > 17 for length in LENGTHS) / len(LENGTHS)
    assert report["cut_documents"]["best_fit"] == pytest.approx(longer)
    # Counted over the places that concatenation gives documents with many seeds.
    cut = []
    for seed in range(200):
        order = np.random.default_rng(seed).permutation(len(LENGTHS))
        ends = np.cumsum(np.array(LENGTHS)[order])
        begins = ends - np.array(LENGTHS)[order]
        cut.append(np.mean(begins // 16 != (ends - 1) // 16))
    assert report["cut_documents"]["concatenated"] == pytest.approx(np.mean(cut), abs=0.01)


def test_filler_and_attended_share_are_those_of_the_samples(prefix):
    stream = stream_of(prefix, 16)
    num_windows = stream._stages[0].files[0][1].num_windows
    pieces = [list(stream._stages[0].files[0][1]._place(index)) for index in range(num_windows)]
    stream_epoch_order = sorted(end - begin for sample in pieces for _, begin, end in sample)
    lengths = np.diff(TokenFiles(prefix).document_bounds)
    counts = piece_counts(lengths, 16)
    assert stream_epoch_order == [length for length, count in enumerate(counts) for _ in range(count)]
    filled = sum(stream_epoch_order)
    assert cut_documents(lengths, 16)["filler"] == pytest.approx(1 - filled / (17 * num_windows))
    squares = sum(min(length, 16) ** 2 for length in stream_epoch_order)
    assert attended_share(TokenFiles(prefix), 16, "best_fit") == pytest.approx(squares / (num_windows * 256))


@pytest.mark.parametrize("how", ["concatenate", "best_fit"])
def test_attended_share_of_a_part_is_about_that_of_all(how, monkeypatch):
    random = np.random.default_rng(1)
    lengths = np.concatenate([random.integers(2, longest, 20_000) for longest in (40, 200, 90)])
    files = SimpleNamespace(document_bounds=np.concatenate([[0], np.cumsum(lengths)]))
    whole = attended_share(files, 64, how)
    monkeypatch.setattr(packing, "_BLOCK", 500)
    monkeypatch.setattr(packing, "_BLOCKS", 30)
    assert attended_share(files, 64, how) == pytest.approx(whole, rel=0.02)
    assert attended_share(files, 64, how) != whole


def test_refused_with_the_fix():
    megatron = {"eod_mask_loss": "true", "data_order": "megatron"}
    for others, fix in (({}, "EOD_MASK_LOSS=true"), (megatron, "DATA_ORDER=stream")):
        config = load_config({"document_packing": "best_fit", **others}, {"PRESET": "cpu"})
        (line,) = config.problems()
        assert line.startswith("DOCUMENT_PACKING=best_fit: ") and line.endswith(f"Fix: set {fix}.")


@pytest.mark.slow
@pytest.mark.parametrize("order", [{"DOCUMENT_PACKING": "best_fit"}, {"DATA_ORDER": "megatron"}])
def test_a_run_and_its_parts(order, runs):
    """Documents apart in both orders of samples: resumed with workers, and on context parallel ranks."""
    settings = {"DOCUMENT_MASK": True, "EOD_MASK_LOSS": True, "TRAIN_ITERS": 6, **order}
    whole = runs.succeed("whole", **settings)
    runs.stopped("parts", EXIT_INTERVAL=3, **settings)
    parts = runs.succeed("parts", NUM_WORKERS=1, **settings)
    for name in ("lm_loss", "grad_norm", "consumed_flops"):
        assert parts.curve(name) == whole.curve(name), name
    two = runs.succeed("two", GPUS_PER_NODE=2, CP=2, **settings)
    assert two.curve("lm_loss") == pytest.approx(whole.curve("lm_loss"), rel=1e-5)
    if "DOCUMENT_PACKING" in order:
        other = runs.run("parts", **settings | {"DOCUMENT_PACKING": "concatenate", "TRAIN_ITERS": 8})
        assert other.code == BAD_INPUT and "has DOCUMENT_PACKING=best_fit" in other.stderr
