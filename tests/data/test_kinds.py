"""Files of every kind become the same documents; what is no text is named."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from helpers import ROOT
from moe_exp.data.documents import Tally, find_inputs, read_documents
from moe_exp.data.kinds import BadDocument, TextRule, raw_lines
from moe_exp.data.shuffle.shuffle import shuffle
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import tokenize_files
from moe_exp.data.tokens.tokenizer import load_named_tokenizer

TEXTS = ["one\n\ntwo\n", "Grüße, 世界! 🙂\n", *(f"document {number}\n" * 50 for number in range(40))]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()
TABLE = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})


def write_stream(path):
    with pyarrow.ipc.new_stream(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)


def write_file(path):
    with pyarrow.ipc.new_file(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)


def write_texts(path):
    path.mkdir()
    for number, text in enumerate(TEXTS):
        # a BOM and CRLF, as Windows writes them, are not text
        content = text.encode() if number else b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
        (path / f"{number:03d}{('.txt', '.md')[number % 2]}").write_bytes(content)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=9),
    "a.arrow": write_stream,
    "b.arrow": write_file,
    "folder": write_texts,
}


@pytest.fixture(params=WRITERS)
def source(request, tmp_path):
    WRITERS[request.param](tmp_path / request.param)
    return tmp_path / request.param


def test_documents_and_tokens_are_the_same_of_every_kind(source, tmp_path):
    files, tally = find_inputs([source]), Tally()
    assert [text for path in files for _, text in read_documents(path, tally)] == TEXTS
    settings = PartSettings(load_named_tokenizer("bytes"), append_eod=True)
    manifest = tokenize_files(files, tmp_path / "out", settings)
    assert manifest["text_hash"] == tally.to_json()["text_hash"]
    tokens = (tmp_path / "out.bin").read_bytes()[::2]  # uint16: the low bytes; 256 ends a document
    assert tokens == b"".join(text.encode() + b"\0" for text in TEXTS)
    shuffled = shuffle(files, tmp_path / "shuffled", name="x", num_shards=2)
    assert shuffled["read"] == tally.to_json()


def test_blocks_between_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\n  one\nline\n\n \t\ntwo\r\n\r\nthree\n\n\n")
    texts = [json.loads(line)["text"] for line in raw_lines(path, rule=TextRule("block"))]
    assert texts == ["  one\nline", "two", "three"]
    # of a file that is read in chunks
    path.write_bytes(b"\n\n".join(b"block %d" % number for number in range(10**5)))
    texts = [json.loads(line)["text"] for line in raw_lines(path, rule=TextRule("block", 2**12))]
    assert texts == [f"block {number}" for number in range(10**5)]


def test_long_files_are_cut_where_they_read_on_least(tmp_path):
    path, rule = tmp_path / "a.txt", TextRule(longest_bytes=100)
    for text in (
        "word " * 500,
        "line\n" * 500,
        "para\n\n" * 500,
        "ü" * 500,
        "x" * 500,
        "x" + "\U0001f600" * 300,
    ):
        path.write_text(text, encoding="utf-8")
        texts = [json.loads(line)["text"] for line in raw_lines(path, rule=rule)]
        assert "".join(texts) == text and max(len(one.encode()) for one in texts) <= 100 < len(texts) * 60
    path.write_text("para\n\n" * 500)
    assert all(json.loads(line)["text"].endswith("\n\n") for line in raw_lines(path, rule=rule))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\ncaf\xe9\n", r"a\.txt:2: the file is not UTF-8 text"),
        (b"fine\n\0\n", r"a\.txt:2: the file is binary"),
        ("text".encode("utf-16"), r"a\.txt:1: the file is UTF-16"),
    ],
)
def test_what_is_no_text(content, message, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(BadDocument, match=message) as raised:
        list(raw_lines(tmp_path / "a.txt"))
    assert raised.value.fix


def test_tables_that_cannot_be_read(tmp_path):
    for writer, name in ((write_stream, "a.arrow"), (write_file, "b.arrow")):
        writer(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for cut in (0, 5, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(BadDocument, match="the Arrow file is damaged or ends early"):
                list(raw_lines(tmp_path / name))
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "n.parquet")
    with pytest.raises(ValueError, match=r"n\.parquet: the column 'text' is int64, not text\. Fix: "):
        list(raw_lines(tmp_path / "n.parquet"))
    with pytest.raises(ValueError, match=r"n\.parquet: there is no column 'body', but text\. Fix: "):
        list(raw_lines(tmp_path / "n.parquet", text_field="body"))


def test_text_beside_data_files_is_left_out(tmp_path, caplog):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.jsonl").write_bytes(LINES)
    with caplog.at_level("INFO"):
        assert find_inputs([tmp_path]) == [tmp_path / "deep/a.jsonl"]
    assert caplog.messages == [f"{tmp_path}: left out, text files beside data files: README.md"]
    assert find_inputs([f"{tmp_path}/**/*.md"]) == [tmp_path / "README.md"]
    assert find_inputs([ROOT / "README.md"]) == [ROOT / "README.md"]
