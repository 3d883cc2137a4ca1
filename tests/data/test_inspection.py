"""What inspect says, against files whose contents are known; and against a plain count of real text."""

import json
import os
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from helpers.token_files import write_tokens
from moe_exp.cli import main
from moe_exp.data.download.sources import python_stdlib_documents
from moe_exp.data.inspection import inspect_path, inspect_tokens, length_summary, token_blocks
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import EOD_ID, TokenFiles

DOCUMENTS = [[5, 6, 7], [], [5, 6, 7], [999], [5, 0, 6], [5, 6, 7], [1] * 100]


@pytest.fixture(scope="session")
def texts():
    return [text for _, text in islice(python_stdlib_documents(), 60)]


@pytest.fixture(scope="session")
def tokenizer(texts, tmp_path_factory):
    """A folder with tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(texts[:40], 600).save(str(folder / "tokenizer.json"))
    return folder


def test_token_files_by_hand(tmp_path):
    report = inspect_path(write_tokens(tmp_path / "part", DOCUMENTS), num_samples=2)
    samples, lengths, cut = (report.pop(name) for name in ("samples", "lengths", "cut_documents"))
    assert report == {
        "kind": "tokens", "prefix": str(tmp_path / "part"), "documents": 7, "sequences": 7, "tokens": 120,
        "bytes": 240, "index_bytes": (tmp_path / "part.idx").stat().st_size, "dtype": "uint16",
        "highest_id": 999, "vocab_size": None, "out_of_vocabulary": None, "eod_id": 0,
        "eod_from": "the last token of most documents", "end_with_eod": 7, "eods_inside": 1,
        "empty_documents": 1, "duplicate_documents": 2,
    }  # fmt: skip
    # By best fit: 1 sample of 4097 for the 6 documents that have something to predict.
    shares = {"concatenated": (120 - 7) / 4096 / 7, "best_fit": 0.0, "filler": 1 - 119 / 4097}
    assert cut == pytest.approx({"seq_len": 4096} | shares)
    counts = [(1, 1, 1), (2, 3, 1), (4, 7, 4), (8, 15, 0), (16, 31, 0), (32, 63, 0), (64, 127, 1)]
    assert lengths == {"min": 1, "median": 4.0, "mean": 17.1, "max": 101, "histogram": counts}
    assert samples == [
        {"document": 0, "tokens": 4, "first_ids": [5, 6, 7, 0], "last_ids": []},
        {"document": 6, "tokens": 101, "first_ids": [1] * 80, "last_ids": [1] * 7 + [0]},
    ]
    for suffix in (".bin", ".idx"):
        again = inspect_path(tmp_path / f"part{suffix}", num_samples=2)
        assert again == report | {"samples": samples, "lengths": lengths, "cut_documents": cut}


def test_real_text_against_a_plain_count(texts, tokenizer, tmp_path, monkeypatch):
    """In blocks that are smaller than the longest document."""
    monkeypatch.setattr("moe_exp.data.inspection.BLOCK_TOKENS", 5000)
    bpe = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [encoding.ids for encoding in bpe.encode_batch([*texts, *texts[:7], "the \0 end"])]
    prefix = write_tokens(tmp_path / "part", ids)
    report = inspect_path(prefix, tokenizer=tokenizer)
    assert report["documents"] == len(ids)
    assert report["tokens"] == sum(map(len, ids)) + len(ids)
    assert report["highest_id"] == max(map(max, filter(None, ids)))
    assert report["duplicate_documents"] == len(ids) - len({tuple(document) for document in ids})
    assert report["empty_documents"] == sum(not document for document in ids)
    assert (report["vocab_size"], report["out_of_vocabulary"]) == (600, 0)
    assert (report["end_with_eod"], report["eods_inside"]) == (len(ids), 0)
    assert report["lengths"]["max"] == max(map(len, ids)) + 1
    assert sum(count for *_, count in report["lengths"]["histogram"]) == len(ids)
    first, last = report["samples"][0], report["samples"][-1]
    assert texts[0].startswith(first["text"].partition(" [...] ")[0][:50])
    assert first["text"].endswith("<|endoftext|>")
    assert last["document"] == len(ids) - 1
    assert last["text"] == "the \0 end<|endoftext|>"


def test_ids_that_the_tokenizer_lacks(tokenizer, tmp_path):
    report = inspect_path(write_tokens(tmp_path / "part", [[1, 2, 600, 999], [599]]), tokenizer=tokenizer)
    assert (report["vocab_size"], report["highest_id"], report["out_of_vocabulary"]) == (600, 999, 2)


def test_manifest_says_vocabulary_and_end_of_document(tmp_path):
    prefix = write_tokens(tmp_path / "part", [[5, 7], [5, 999, 7]])
    manifest = {"settings": {"tokenizer": {"vocab_size": 999, "eod_id": 7}}}
    (tmp_path / "part.manifest.json").write_text(json.dumps(manifest))
    report = inspect_path(prefix)
    assert (report["vocab_size"], report["out_of_vocabulary"]) == (999, 1)
    names = ("eod_id", "eod_from", "end_with_eod", "eods_inside")
    assert [report[name] for name in names] == [7, "the manifest", 0, 2]


def test_documents_that_end_in_no_token_of_their_own(tmp_path):
    write_tokens(tmp_path / "part", [[5, 6], [5, 7], [5, 8], [5, 9]])
    tokens = np.fromfile(tmp_path / "part.bin", dtype="<u2").reshape(4, 3)[:, [2, 0, 1]]
    tokens.tofile(tmp_path / "part.bin")
    report = inspect_tokens(TokenFiles(tmp_path / "part"))
    assert (report["eod_id"], report["end_with_eod"], report["tokens"]) == (None, 0, 12)
    assert report["eod_from"] == "no token ends most documents"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 40))
def test_blocks_are_all_documents_in_order(lengths, block_tokens):
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    files = SimpleNamespace(document_bounds=bounds, num_documents=len(lengths), read=np.arange)
    blocks = list(token_blocks(files, block_tokens))
    assert np.concatenate([tokens for tokens, _ in blocks]).tolist() == list(range(sum(lengths)))
    assert [size for _, inside in blocks for size in np.diff(inside)] == lengths
    assert all(inside[0] == 0 and inside[-1] == len(tokens) for tokens, inside in blocks)
    assert all(len(inside) == 2 or len(tokens) <= block_tokens for tokens, inside in blocks)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_histogram_holds_every_length(lengths):
    summary = length_summary(np.array(lengths, dtype=np.int64))
    for begin, end, count in summary["histogram"]:
        assert count == sum(begin <= length <= end for length in lengths)
    assert sum(count for *_, count in summary["histogram"]) == len(lengths)


def test_damaged_files(tmp_path):
    write_tokens(tmp_path / "part", DOCUMENTS)
    os.truncate(tmp_path / "part.bin", 100)
    for path, rule in (
        (tmp_path / "part", r"part\.bin is truncated: 100 bytes, but .* sum to 240\. Fix: "),
        (tmp_path / "gone", r"gone\.bin is missing\. Fix: "),
        (tmp_path, r"the folder contains token files\. Fix: give their prefix, .*part\."),
    ):
        with pytest.raises(ValueError, match=rule):
            inspect_path(path)


def test_a_folder_of_records(tmp_path):
    lines = ['{"text": "one", "id": 1}', "", '{"text": "three"}', '{"text": "one", "id": 2}']
    lines += ["{broken", '{"text": 5}', '{"text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.jsonl").write_text('{"text": "\\u00e4\\u2028"}')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["b"]}), tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("not read")
    report = inspect_path(tmp_path, num_samples=2)
    assert report["files"] == {"a.jsonl": 3, "b.jsonl": 1, "c.parquet": 1}
    assert (report["documents"], report["text_bytes"], report["duplicate_documents"]) == (5, 3 + 5 + 3 + 6, 1)
    reasons = ("blank line", "empty text", "field 'text' is a number, not a text", "not valid JSON")
    assert report["skipped"] == dict.fromkeys(reasons, 1)
    assert report["fields"] == {"id": 2, "text": 5}
    assert report["lengths"]["histogram"] == [(1, 1, 1), (2, 3, 2), (4, 7, 2)]
    assert [sample["text"] for sample in report["samples"]] == ["one", "three"]
    for name in ("b.jsonl", "notes.txt"):
        assert inspect_path(tmp_path / name)["documents"] == 1
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").rename(tmp_path / "sub" / "a.jsonl")
    assert inspect_path(tmp_path)["files"] == {"a.jsonl": 3, "sub/a.jsonl": 1, "c.parquet": 1}


def test_command(texts, tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    bpe = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encoded = bpe.encode_batch(["[bold]a[/bold] text", *texts[:9]])
    prefix = write_tokens(tmp_path / "part", [encoding.ids for encoding in encoded])
    assert main(["data", "inspect", str(prefix), "--tokenizer", str(tokenizer), "--samples", "1"]) == 0
    printed = capsys.readouterr().out
    rows = ("documents ending with EOD", "10", f"{EOD_ID} (the last token of most documents)", "█")
    for text in (*rows, "[bold]a[/bold] text<|endoftext|>"):
        assert text in printed
    assert main(["data", "inspect", str(prefix), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 10
    assert main(["data", "inspect", str(prefix), "--tokenizer", str(tmp_path / "gone")]) == 1
    assert f"TOKENIZER={tmp_path}/gone: is not a Hugging Face tokenizer.json" in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.jsonl").write_text('{"text": "one", "id": 1}\n' * 3)
    assert main(["data", "inspect", str(tmp_path / "x")]) == 0
    printed = capsys.readouterr().out
    lengths = "Lengths in text bytes: min 3, median 3, mean 3, max 3"
    for text in ("duplicates of another document", "id, text", lengths):
        assert text in printed
