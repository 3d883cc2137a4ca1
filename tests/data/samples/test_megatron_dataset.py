"""Megatron's order: its token stream, blends by weight, and indices that do not outlive their tokens."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ranks import run_on_ranks
from helpers.token_files import write_distinct
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.data.samples.megatron_dataset import INDEX_FOLDER, MegatronOrder, _build, megatron_samples
from moe_exp.data.tokens.tokens import TokenFiles, parse_blend, parse_split, share_range

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

SEQ_LEN = 16
LENGTHS = [5, 2, 17, 9, 3, 40, 12, 8, 26, 3] * 10  # 1250 tokens, 78 samples


def order(train, **changes):
    values = {"valid": "", "split": "", "seq_len": SEQ_LEN, "seed": 1234}
    values |= {"num_train_samples": 300, "num_valid_samples": 0}
    return MegatronOrder(train=train, **(values | changes))


def blend_of_two(folder):
    a, b = write_distinct(folder / "a", LENGTHS), write_distinct(folder / "b", LENGTHS, first_id=5000)
    return f"0.7 {a} 0.3 {b}"


@pytest.fixture
def alone(tmp_path):
    """This process as the only rank of a job, as BlendedDataset asks for one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def token_stream(prefix, document_order):
    """The documents of `prefix`.bin, one after the other, by nothing but their lengths."""
    lengths = np.fromfile(f"{prefix}.idx", dtype="<i4", offset=34, count=len(LENGTHS))
    documents = np.split(np.fromfile(f"{prefix}.bin", dtype="<u2"), np.cumsum(lengths)[:-1])
    return np.concatenate([documents[number] for number in document_order])


@pytest.mark.parametrize("num_samples", [70, 300, 390])
def test_samples_are_the_token_stream(num_samples, tmp_path):
    """Less than an epoch, four epochs of which the last is shuffled apart, and five."""
    prefix = write_distinct(tmp_path / "part", LENGTHS)
    samples, _ = megatron_samples(order(prefix, num_train_samples=num_samples), tmp_path)
    (folder,) = (path for path in (tmp_path / INDEX_FOLDER).iterdir() if path.is_dir())
    (documents,) = map(np.load, folder.glob("*train-document_index.npy"))
    (places,) = map(np.load, folder.glob("*train-shuffle_index.npy"))
    num_epochs = len(documents) // len(LENGTHS)
    assert num_epochs == {70: 1, 300: 4, 390: 5}[num_samples]
    assert sorted(documents) == sorted(list(range(len(LENGTHS))) * num_epochs)
    text = token_stream(prefix, documents)
    for index in range(num_samples):
        start = int(places[index]) * SEQ_LEN
        assert np.array_equal(samples.sample(index), text[start : start + SEQ_LEN + 1])
    assert samples.sample(0).dtype == np.int64
    assert samples.batch(5, 3).tolist() == [samples.sample(index).tolist() for index in (5, 6, 7)]


class ByteTokenizer:
    """What GPTDataset asks of a tokenizer."""

    vocab_size, eod, pad, special_tokens_dict = 60000, 0, 59999, {"eos_token": 0}
    unique_identifiers = {"class": "ByteTokenizer"}  # noqa: RUF012


def test_same_samples_as_megatron_by_itself(alone, tmp_path):
    """GPTDatasetConfig as Megatron-LM fills it, through its builder: a blend in three parts, we have two."""
    blend = blend_of_two(tmp_path)
    ours = megatron_samples(order(blend, split="8,1,1", num_valid_samples=20), tmp_path)
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=SEQ_LEN, blend=get_blend_from_list(blend.split()), split="8,1,1",
        tokenizer=ByteTokenizer(), path_to_cache=str(tmp_path / "theirs"), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [300, 20, 20], lambda: True, config).build()
    assert ours[1] is not None
    for mine, megatrons, count in ((ours[0], theirs[0], 300), (ours[1], theirs[1], 20)):
        for index in range(count):
            assert mine.sample(index)[:-1].tolist() == megatrons[index]["tokens"].tolist()
            assert mine.sample(index)[1:].tolist() == megatrons[index]["labels"].tolist()


def test_blend_holds_its_weights(alone, tmp_path):
    """Both orders; 10,000 samples, 0.7 and 0.3, within 0.1 % of the whole."""
    blend = blend_of_two(tmp_path)
    megatrons, _ = megatron_samples(order(blend, num_train_samples=10_000), tmp_path)
    for samples in (megatrons, SampleStream(parse_blend(blend), seq_len=SEQ_LEN, seed=1)):
        from_b = sum(int(samples.sample(index).max()) >= 5000 for index in range(10_000))
        assert abs(from_b - 3000) <= 10


def test_prefixes_without_weights(alone, tmp_path):
    a, b = write_distinct(tmp_path / "a", LENGTHS), write_distinct(tmp_path / "b", LENGTHS * 3, first_id=5000)
    samples, _ = megatron_samples(order(f"{a} {b}", num_train_samples=300), tmp_path)
    assert sum(int(samples.sample(index).max()) >= 5000 for index in range(300)) == pytest.approx(225, abs=3)
    with pytest.raises(ValueError, match=rf"^TRAIN_DATA={a} {b}: has 312 samples.* requires 400"):
        megatron_samples(order(f"{a} {b}", num_train_samples=400), tmp_path)


def test_other_text_at_the_same_prefix(tmp_path):
    """Megatron alone takes the old index for the new tokens; here they have one of their own."""
    prefix, by_path = str(tmp_path / "part"), tmp_path / "by_path"
    write_distinct(prefix, LENGTHS)
    wanted = order(prefix)
    first = megatron_samples(wanted, tmp_path)[0].batch(0, 300)
    by_path.mkdir()
    _build(wanted, by_path)
    names = sorted(path.name for path in by_path.iterdir())
    other = list(reversed(LENGTHS)) * 2
    write_distinct(prefix, other, first_id=20000)
    second = megatron_samples(wanted, tmp_path)[0].batch(0, 300)
    before, after = second[:, :-1], second[:, 1:]
    assert int(second[second > 0].min()) >= 20000
    assert ((before == 0) | (after == 0) | (after == before + 1)).all(), "ids count up inside a document"
    # Megatron's own cache: no new file, and samples that end where the old documents did.
    stale, _ = _build(wanted, by_path)
    assert sorted(path.name for path in by_path.iterdir()) == names
    assert len(np.unique(stale.document_index)) == len(LENGTHS) < len(other)
    with pytest.raises(IndexError, match=r"does not match the shape of the indexed tensor \[16\]"):
        [stale[i] for i in range(300)]
    write_distinct(prefix, LENGTHS)
    assert megatron_samples(wanted, tmp_path)[0].batch(0, 300).equal(first)


def test_index_that_was_not_finished_is_built_again(tmp_path):
    prefix = write_distinct(tmp_path / "part", LENGTHS)
    expected = megatron_samples(order(prefix), tmp_path)[0].batch(0, 300)
    (folder,) = (path for path in (tmp_path / INDEX_FOLDER).iterdir() if path.is_dir())
    building = folder.with_name(folder.name + ".building")
    folder.rename(building)
    for path in building.glob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:200])
    assert megatron_samples(order(prefix), tmp_path)[0].batch(0, 300).equal(expected)
    assert folder.is_dir()
    assert not building.exists()
    modified = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    megatron_samples(order(prefix), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == modified


def samples_on_a_rank(text, folder):
    samples, valid = megatron_samples(order(text, split="9,1", num_valid_samples=20), Path(folder))
    return samples.batch(0, 300).numpy(), valid.batch(0, 20).numpy()


def test_ranks_build_it_once_and_see_the_same(alone, tmp_path):
    text = blend_of_two(tmp_path)
    expected = samples_on_a_rank(text, str(tmp_path / "one"))
    for train, valid in run_on_ranks(2, samples_on_a_rank, text, str(tmp_path / "two")):
        assert np.array_equal(train, expected[0])
        assert np.array_equal(valid, expected[1])
    assert len([path for path in (tmp_path / "two" / INDEX_FOLDER).iterdir() if path.is_dir()]) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=3), st.integers(1, 10**6))
def test_parts_are_those_of_megatron(parts, count):
    text = ",".join(f"{part:f}" for part in parts)
    if not float(text.split(",")[0]):
        return
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    shares = parse_split(text)
    ranges = [None if share is None else share_range(count, share) for share in shares]
    rounded = lambda bound: int(round(bound * float(count)))  # noqa: E731, RUF046  # as Megatron
    assert ranges == [None if part is None else (rounded(part[0]), rounded(part[1])) for part in matrix]


def test_parts_share_no_document(tmp_path):
    prefix = write_distinct(tmp_path / "part", LENGTHS)
    bounds = TokenFiles(prefix).document_bounds
    assert bounds.tolist() == [0, *np.cumsum(LENGTHS).tolist()]
    megatrons = megatron_samples(order(prefix, split="70,20,10", num_valid_samples=100), tmp_path)
    shares = parse_split("70,20,10")
    streams = [SampleStream([(1.0, prefix)], seq_len=SEQ_LEN, seed=1, share=share) for share in shares[:2]]
    ids = np.fromfile(f"{prefix}.bin", dtype="<u2")
    for train, valid in (megatrons, streams):
        for samples, begin, end in ((train, 0, 70), (valid, 70, 90)):
            seen = {int(token) for index in range(100) for token in samples.sample(index)}
            assert seen <= set(ids[bounds[begin] : bounds[end]].tolist())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"split": "96,4", "seq_len": 64}, r"part: has 49 tokens for validation, .* SEQ_LEN \+ 1 = 65"),
        ({"split": "1,50"}, r"part: has 7 tokens for training, but one sample requires SEQ_LEN \+ 1 = 17"),
        ({"split": "1"}, r"^SPLIT=1: leaves no documents for validation\. Fix: set EVAL_INTERVAL=0"),
    ],
)
def test_parts_without_a_sample(changes, rule, tmp_path):
    prefix = write_distinct(tmp_path / "part", LENGTHS)
    with pytest.raises(ValueError, match=rule):
        megatron_samples(order(prefix, num_valid_samples=10, **changes), tmp_path)


def test_files_for_validation(tmp_path):
    train = write_distinct(tmp_path / "train", LENGTHS)
    valid = write_distinct(tmp_path / "valid", LENGTHS, first_id=5000)
    samples = megatron_samples(order(train, valid=valid, num_valid_samples=20), tmp_path)
    assert samples[0].batch(0, 300).max() < 5000 <= samples[1].batch(0, 20).max()


def test_samples_that_are_not_there(tmp_path):
    prefix = write_distinct(tmp_path / "part", LENGTHS)
    samples, valid = megatron_samples(order(prefix, split="1"), tmp_path)
    assert valid is None and len(samples) == 312
    for index in (-1, 312):
        with pytest.raises(ValueError, match=rf"index {index}: Megatron's order was built for 312 samples"):
            samples.sample(index)
    shutil.rmtree(tmp_path / INDEX_FOLDER)
    assert samples.sample(0).shape == (SEQ_LEN + 1,)
