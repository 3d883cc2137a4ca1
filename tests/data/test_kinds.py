"""Files of every kind become the same documents; what is no text is named."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from helpers import ROOT
from moe_exp.data.documents import Tally, find_inputs, read_documents
from moe_exp.data.kinds import BadDocument, TextRule, raw_lines
from moe_exp.data.shuffle.shuffle import shuffle_documents
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


TEXT_WRITERS = {
    ".txt": bytes, ".md": bytes, ".TXT": bytes, ".text": bytes, ".Txt.gz": gzip.compress,
    ".MD.zst": zstandard.compress, ".text.GZ": gzip.compress,
}  # fmt: skip


def write_texts(path):
    path.mkdir()
    for number, text in enumerate(TEXTS):
        # a BOM and CRLF, as Windows writes them, are not text
        content = text.encode() if number else b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
        suffix = list(TEXT_WRITERS)[number % len(TEXT_WRITERS)]
        (path / f"{number:03d}{suffix}").write_bytes(TEXT_WRITERS[suffix](content))


def write_values(path):
    """An object a file over several lines, as json.dump(indent=1) writes it."""
    path.mkdir()
    for number, text in enumerate(TEXTS):
        (path / f"{number:03d}.json").write_text(json.dumps({"id": number, "text": text}, indent=1))


ARRAY = json.dumps([{"text": text, "id": 1} for text in TEXTS], indent=1).encode()
WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=9),
    "a.arrow": write_stream,
    "b.arrow": write_file,
    "folder": write_texts,
    "a.JSONL.Gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.ndjson": lambda path: path.write_bytes(LINES),
    "lines.JSON": lambda path: path.write_bytes(LINES),
    "array.json": lambda path: path.write_bytes(ARRAY),
    "dense.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS])),
    "array.json.zst": lambda path: path.write_bytes(zstandard.compress(ARRAY)),
    "values": write_values,
    "a.PARQUET": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=9),
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
    shuffled = shuffle_documents(files, tmp_path / "shuffled", name="x", num_shards=2)
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
    letters = ["ü" * 500, "x" * 500, "x" + "\U0001f600" * 300]
    for text in ["word " * 500, "line\n" * 500, "para\n\n" * 500, *letters]:
        path.write_text(text, encoding="utf-8")
        texts = [json.loads(line)["text"] for line in raw_lines(path, rule=rule)]
        assert "".join(texts) == text and max(len(one.encode()) for one in texts) <= 100 < len(texts) * 60
    path.write_text("para\n\n" * 500)
    assert all(json.loads(line)["text"].endswith("\n\n") for line in raw_lines(path, rule=rule))


def test_what_is_no_text(tmp_path):
    for content, number, rule in (
        (b"fine\ncaf\xe9\n", 2, "not UTF-8 text"),
        (b"fine\n\0\n", 2, "binary"),
        ("text".encode("utf-16"), 1, "UTF-16"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(BadDocument, match=rf"a\.txt:{number}: the file is {rule}") as raised:
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
    with pytest.raises(ValueError, match=r"n\.parquet: the column 'text' contains int64, not text\. Fix: "):
        list(raw_lines(tmp_path / "n.parquet"))
    with pytest.raises(ValueError, match=r"n\.parquet: has no column 'body'; its columns are text\. Fix: "):
        list(raw_lines(tmp_path / "n.parquet", text_field="body"))


@pytest.mark.parametrize(
    ("beside", "read", "left_out"),
    [
        # name: size of what stands beside a.jsonl of 1,000 bytes
        ({"README.md": 9000, "LICENSE.txt": 9000, "manifest.json": 90, ".x.pdf": 9000, "_SUCCESS": 0}, 1, ""),
        ({"t.idx": 9000, "t.bin": 9000, "a.val.jsonl": 9000, "x.manifest.json": 90}, 1, ""),
        ({"B.JSONL": 9, "c.Json": 9, "d.ndjson.gz": 9, "deep/e.JSON": 9}, 5, ""),
        ({"meta.json": 30, "deep/b.PDF": 500, "c.pdf": 200, "d": 100}, 1,
         "left out 4 files, 830 bytes: 2 .pdf, 1 .json without a field 'text', 1 without an ending"
         " (c.pdf, d, deep/b.PDF, meta.json)"),
        ({"notes.txt": 10, "b.txt.gz": 20, "c.TEXT": 30}, 1,
         "left out 3 files, 60 bytes: 1 .text next to records, 1 .txt next to records, 1 .txt.gz next to"
         " records (b.txt.gz, c.TEXT, notes.txt)"),
        ({f"{number}.png": 10 for number in range(9)}, 1,
         "left out 9 files, 90 bytes: 9 .png (0.png, 1.png, 2.png, 3.png, 4.png and 4 more)"),
    ],
)  # fmt: skip
def test_what_a_folder_leaves_out_is_named_and_counted(tmp_path, caplog, beside, read, left_out):
    for name, size in {"a.jsonl": 1000, **beside}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = b'{"text": "a"}' if name.lower().endswith((".json", ".jsonl")) and size < 20 else b""
        path.write_bytes(content or b'{"x": 1}' + b" " * (size - 8) if size else b"")
    assert len(find_inputs([tmp_path])) == len(find_inputs([tmp_path])) == read
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ([f"{tmp_path}: {left_out}"] if left_out else [])


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["a.png", "README.md"], "left out 1 file, 10 bytes: 1 .png .*, which is most of the data. Fix: "),
        (["corpus.pdf", "b.txt"], "left out 1 file, 2 kB: 1 .pdf .*, which is most of the data. Fix: "),
        (["b.txt", "a.jsonl"], r"1 \.txt next to records .*Fix: .* such as '.*/\*\*/\*\.jsonl'"),
        (["corpus.json", "README.md"], "1 .json without a field 'text' .* Fix: give the name"),
        (["corpus.json"], "its .json files have no field 'text'. Fix: give the name .*TEXT_FIELD"),
    ],
)  # fmt: skip
def test_a_folder_that_would_lose_most_bytes_is_refused(tmp_path, names, match):
    for name, size in zip(names, (10 if "a.png" in names else 2000, 100), strict=False):
        (tmp_path / name).write_text('{"content": "a"}'[:size].ljust(size))
    with pytest.raises(ValueError, match=match):
        find_inputs([tmp_path])
    if names == ["corpus.json", "README.md"]:
        assert find_inputs([tmp_path], text_field="content") == [tmp_path / "corpus.json"]


def test_text_beside_data_files_is_left_out(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.jsonl").write_bytes(LINES)
    assert find_inputs([tmp_path]) == find_inputs([f"{tmp_path}/d*"]) == [tmp_path / "deep/a.jsonl"]
    assert find_inputs([f"{tmp_path}/**/*.md"]) == [tmp_path / "README.md"]
    assert find_inputs([ROOT / "README.md"]) == [ROOT / "README.md"]


@pytest.mark.parametrize(
    ("content", "number", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b"}', 3, "not valid JSON"),
        (b'[{"text": "a"}, {"text": "b', 2, "not valid JSON"),
        (b'[{"text": "a"}, {"text" "b"}' + b" " * 100 + b"]", 2, "not valid JSON"),
        (b'[{"text": "a"}] {"text": "b"}', 2, "not valid JSON"),
        (b'[{"text": "\xff"}]', 1, "not UTF-8"),
        (b'[{"text": "a"}, 5, "b"]', 2, "not a JSON object"),
        (b'{\n"data": [{"text": "a"}]}', 1, "no field 'text'"),
    ],
)
def test_a_json_array_that_is_damaged(tmp_path, content, number, reason):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadDocument, match=reason) as raised:
        list(read_documents(tmp_path / "a.json", Tally()))
    assert raised.value.line_number == number


def test_values_longer_than_what_is_read_at_once(tmp_path):
    texts = ["é" * 3_000_000, "\\" * 1_500_000, "a"]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert [text for _, text in read_documents(tmp_path / "a.json", Tally())] == texts
