""".bin/.idx files as Megatron's own reader sees them, and blends."""

import re
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.token_files import write_tokens
from moe_exp.data.inspection import inspect_path
from moe_exp.data.tokens import tokens
from moe_exp.data.tokens.preprocess import merge_token_files
from moe_exp.data.tokens.tokens import TokenFiles, bin_idx_problem, bin_idx_tokens, parse_blend

from megatron.core.datasets.indexed_dataset import IndexedDataset

documents = st.lists(st.lists(st.integers(0, 299), max_size=20), min_size=1, max_size=20)


@settings(max_examples=25, deadline=None)
@given(documents, st.sampled_from([300, 65499, 65500]))
def test_megatron_reads_what_we_write(tmp_path_factory, docs, vocab_size):
    prefix = str(tmp_path_factory.mktemp("tokens") / "part")
    write_tokens(prefix, docs, vocab_size, eod_id=299)
    read = IndexedDataset(prefix)
    assert read.index.dtype == (np.uint16 if vocab_size < 65500 else np.int32)
    assert [list(read[i]) for i in range(len(read))] == [[*ids, 299] for ids in docs]
    assert list(read.document_indices) == list(range(len(docs) + 1))
    assert bin_idx_tokens(prefix) == sum(len(ids) + 1 for ids in docs)
    assert bin_idx_problem(prefix) is None


def test_an_index_that_is_written_in_several_pieces(tmp_path, monkeypatch):
    docs = [[number] * (number % 4 + 1) for number in range(11)]
    write_tokens(tmp_path / "one", docs)
    monkeypatch.setattr(tokens, "_LENGTHS_PER_WRITE", 3)
    write_tokens(tmp_path / "pieces", docs)
    assert (tmp_path / "pieces.idx").read_bytes() == (tmp_path / "one.idx").read_bytes()
    assert [list(read) for read in IndexedDataset(str(tmp_path / "pieces"))] == [[*ids, 0] for ids in docs]


SEQUENCES = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15]]


@pytest.mark.parametrize("documents", [[0, 1, 2, 3, 4, 5], [0, 2, 5]])
@pytest.mark.parametrize(
    ("stored", "places"),
    [
        # numbers of SEQUENCES in the order of the .bin (-1: bytes of none), and where each begins there
        ([0, 1, 2, 3, 4], [0, 3, 4, 6, 10]),
        ([3, 0, 4, 2, 1], [4, 10, 8, 0, 7]),
        ([0, -1, 1, 2, 3, 4], [0, 4, 5, 7, 11]),
        ([-1, 0, 1, 2, 3, 4], [1, 4, 5, 7, 11]),
        ([0, 1, 2, 4, 3, -1], [0, 3, 4, 7, 6]),
    ],
)
def test_pointers_of_an_index_are_followed_or_refused(documents, stored, places, tmp_path):
    prefix, sizes = tmp_path / "x", [len(one) for one in SEQUENCES]
    kept = [token for number in stored for token in ([99] if number < 0 else SEQUENCES[number])]
    np.array(kept, np.uint16).tofile(f"{prefix}.bin")
    index = [struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sizes), len(documents))]
    index += [np.array(sizes, "<i4"), 2 * np.array(places, "<i8"), np.array(documents, "<i8")]
    (tmp_path / "x.idx").write_bytes(b"".join(bytes(one) for one in index))
    megatrons = IndexedDataset(str(prefix))
    assert [one.tolist() for one in megatrons] == SEQUENCES
    if stored == [0, 1, 2, 3, 4]:
        assert bin_idx_problem(prefix) is None
    else:
        refusal = r"sequence \d of .*x\.idx begins at byte \d+ of the \.bin, not at byte \d+ .* Fix: "
        for read in (TokenFiles, inspect_path, lambda prefix: parse_blend(f"{prefix} {prefix}")):
            with pytest.raises(ValueError, match=refusal):
                read(prefix)
    manifest = merge_token_files([prefix, prefix], tmp_path / "merged")
    files = TokenFiles(tmp_path / "merged")
    assert [files.read(*bounds).tolist() for bounds in pairwise(files.sequence_bounds)] == 2 * SEQUENCES
    assert [one.tolist() for one in IndexedDataset(str(tmp_path / "merged"))] == 2 * SEQUENCES
    assert files.document_bounds[: len(documents)].tolist() == [sum(sizes[:one]) for one in documents]
    assert manifest["num_documents"] == 2 * len(documents) - 2


def test_pointers_beyond_the_tokens_are_refused(tmp_path):
    write_tokens(tmp_path / "x", [[1, 2], [3]])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[34 + 8 : 34 + 24] = np.array([0, 2000], "<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(ValueError, match=r"sequence 1 of .* ends at byte 2004 of the \.bin, which has 10"):
        merge_token_files([tmp_path / "x"], tmp_path / "merged")


def test_an_unfinished_bin_has_no_index(tmp_path):
    write_tokens(tmp_path / "part", [[1, 2]])

    def documents():
        assert not (tmp_path / "part.idx").exists()
        yield [1, 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "part", documents())
    assert bin_idx_problem(tmp_path / "part") == f"{tmp_path}/part.idx is missing"


@pytest.mark.parametrize(
    ("suffix", "kept", "text"),
    [
        ("bin", None, "part.bin is missing"),
        ("idx", None, "part.idx is missing"),
        ("bin", 11, "part.bin is truncated: 11 bytes, but the sizes in its .idx sum to 12"),
        ("bin", 0, "part.bin is truncated: 0 bytes, but the sizes in its .idx sum to 12"),
        ("bin", 14, "part.bin does not match its .idx: 14 bytes, but the sizes in its .idx sum to 12"),
        *(("idx", size, f"part.idx is truncated: {size} bytes") for size in (0, 10, 33, 34, 60)),
    ],
)
def test_files_of_another_size_are_reported(suffix, kept, text, tmp_path):
    write_tokens(tmp_path / "part", [[1, 2, 3], [4]])
    path = tmp_path / f"part.{suffix}"
    if kept is None:
        path.unlink()
    else:
        path.write_bytes((path.read_bytes() + b"\0\0")[:kept])
    assert bin_idx_problem(tmp_path / "part").startswith(f"{tmp_path}/{text}")


@pytest.mark.parametrize(
    ("offset", "new", "text"),
    [
        (0, b"XXIDIDX", "is not a Megatron index"),
        (9, struct.pack("<Q", 2), "has index version 2"),
        (17, b"\x07", "has dtype code 7"),
        (17, b"\x63", "has dtype code 99"),
        (18, struct.pack("<Q", 0), "has no documents"),
        (26, struct.pack("<Q", 1), "has no documents"),
        (18, struct.pack("<Q", 3), "is truncated"),
        (34 + 2 * 12 + 2 * 8, struct.pack("<q", 1), "is damaged: its documents cover sequences 0 to 1 of 2"),
    ],
)
def test_damaged_index_is_reported(offset, new, text, tmp_path):
    write_tokens(tmp_path / "part", [[1, 2, 3], [4]])
    index = bytearray((tmp_path / "part.idx").read_bytes())
    index[offset : offset + len(new)] = new
    (tmp_path / "part.idx").write_bytes(index)
    assert text in bin_idx_problem(tmp_path / "part")


@pytest.mark.parametrize(
    ("text", "blend"),
    [
        ("data/a", [(1.0, "data/a")]),
        (" data/a.bin ", [(1.0, "data/a")]),
        ("data/a.idx", [(1.0, "data/a")]),
        ("0.3 a 0.7 b", [(0.3, "a"), (0.7, "b")]),
        ("2 a.bin 1e-1 b.idx", [(2.0, "a"), (0.1, "b")]),
        ("1 a", [(1.0, "a")]),
        ("a.binary", [(1.0, "a.binary")]),
    ],
)
def test_parse_blend(text, blend):
    assert parse_blend(text) == blend


def test_prefixes_without_weights_are_weighted_by_size(tmp_path):
    write_tokens(tmp_path / "a", [[1, 2, 3]])
    write_tokens(tmp_path / "b", [[1, 2, 3, 4], [5]], vocab_size=70000)
    assert parse_blend(f"{tmp_path}/a.bin {tmp_path}/b") == [(4.0, f"{tmp_path}/a"), (7.0, f"{tmp_path}/b")]
    with pytest.raises(ValueError, match=r"c\.bin is missing\. Fix: "):
        parse_blend(f"{tmp_path}/a {tmp_path}/c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be 'PREFIX'"),
        ("0.5 a b", "must be 'PREFIX'"),
        ("0.5", "must be 'PREFIX'"),
        ("a 0.5", "but 'a' is not a weight"),
        ("0.5 a b 0.5", "but 'b' is not a weight"),
        ("0.5 0.5", "and 0.5 is not a prefix"),
        ("0 a 1 b", "weight 0 must be greater than 0 and finite"),
        ("-1 a 1 b", "weight -1 must be greater than 0 and finite"),
        ("nan a 1 b", "but 'nan' is not a weight"),
    ],
)
def test_text_that_is_no_blend(text, message):
    with pytest.raises(ValueError, match=f"{re.escape(message)}.* Fix: "):
        parse_blend(text)


def test_a_corpus_in_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my 2 data"
    folder.mkdir()
    (folder / "train.bin").touch()
    for text in (f"{folder}/train", f" {folder}/train.bin "):
        assert parse_blend(text) == [(1.0, f"{folder}/train")]


def test_documents_without_a_single_token(tmp_path):
    tokens.write_index(tmp_path / "a.idx", np.zeros(3, np.int32), np.dtype(np.uint16))
    (tmp_path / "a.bin").touch()
    files = TokenFiles(tmp_path / "a")
    assert not len(files.read(0, 0)) and files.end_of_document == (None, "no document has tokens")
