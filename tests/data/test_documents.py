"""Lines and documents: what is text, what is skipped and counted, what stops; the counts add up."""

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest
import xxhash
import zstandard

from helpers import ROOT
from moe_exp.data.documents import (
    BadDocument,
    Tally,
    estimate_line_bytes,
    files_in,
    read_documents,
    read_lines,
    text_of,
)
from moe_exp.data.download.sources import python_stdlib_documents

BAD_LINES = {
    b'{"text": "a"': "not valid JSON",
    b'{"text": "a"} {"text": "b"}': "not valid JSON",
    b"{'text': 'a'}": "not valid JSON",
    b'{"text": NaN}': "not valid JSON",
    b'{"text": "a\tb"}': "not valid JSON",
    b'{"text": "a"}\x00': "not valid JSON",
    b'\x0c{"text": "a"}': "not valid JSON",
    rb'{"text": "\ud800"}': "not valid JSON",
    b'{"text": "\xed\xa0\x80"}': "invalid UTF-8",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'\xef\xbb\xbf{"text": "a"}': "not valid JSON",  # a BOM that is not the file's
    b'["text"]': "not a JSON object",
    b'"text"': "not a JSON object",
    b"null": "not a JSON object",
    b"{}": "no field 'text'",
    b'{"Text": "a"}': "no field 'text'",
    b'{"text": null}': "field 'text' is null, not a text",
    b'{"text": false}': "field 'text' is a boolean, not a text",
    b'{"text": 7}': "field 'text' is a number, not a text",
    b'{"text": 7.5}': "field 'text' is a number, not a text",
    b'{"text": ["a"]}': "field 'text' is a list, not a text",
    b'{"text": {"text": "a"}}': "field 'text' is an object, not a text",
}
TEXTS = {
    b'{"text": "a"}': "a",
    b' {"text" : "a" } ': "a",
    b'{"text": "a", "text": "b"}': "b",
    b'{"id": 1, "text": "a", "metadata": {"text": 7}}': "a",
    b'{"text": " "}': " ",
    rb'{"text": "\u0000"}': "\0",
    rb'{"text": "\ud83d\ude00"}': "\U0001f600",
    b'{"text": "\xe2\x80\xa8\xc2\x85\xe2\x80\xa9"}': "\u2028\x85\u2029",
    b'{"text": "<|endoftext|></s>"}': "<|endoftext|></s>",
    b'{"text": "' + b"x" * 750_000 + b'"}': "x" * 750_000,
}
COMPRESS = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}


def read(path, **options):
    tally = Tally()
    return list(read_documents(path, tally, **options)), tally


@pytest.fixture(params=COMPRESS)
def write(request, tmp_path):
    """A function that writes a file of each kind."""

    def write_file(content):
        path = tmp_path / f"a.{request.param}"
        path.write_bytes(COMPRESS[request.param](content))
        return path

    return write_file


@pytest.mark.parametrize(("line", "text"), TEXTS.items(), ids=lambda value: str(value[:30]))
def test_texts(write, line, text):
    documents, tally = read(write(line))
    assert documents == [(line, text)] and not tally.skipped


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=lambda value: str(value)[:40])
def test_a_bad_line_stops_with_file_and_line_or_is_counted(write, line, reason):
    path = write(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(BadDocument) as error:
        read(path)
    assert (error.value.path, error.value.line_number, error.value.reason) == (str(path), 3, reason)
    assert str(error.value) == f"{path}:3: {reason}"
    documents, tally = read(path, skip_bad=True)
    assert [text for _, text in documents] == ["first", "last"]
    assert tally.skipped == {"blank line": 1, reason: 1} and tally.num_documents == 2


def test_another_text_field(tmp_path):
    assert text_of(b'{"content": "a", "text": 7}', "content") == "a"
    with pytest.raises(ValueError, match="no field 'content'"):
        text_of(b'{"text": "a"}', "content")


@pytest.mark.parametrize("line", [b"", b" ", b"\t", b"\r", b'{"text": ""}'])
def test_blank_lines_and_empty_texts_are_skipped_and_counted(write, line):
    documents, tally = read(write(b'{"text": "a"}\n' + line + b'\n{"text": "b"}'))
    assert len(documents) == 2
    assert tally.skipped == {"empty text" if b"text" in line else "blank line": 1}


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_files_without_documents(write, content):
    documents, tally = read(write(content))
    assert documents == [] and tally.num_documents == 0 and set(tally.skipped) <= {"blank line"}


def test_ends_of_lines(write):
    """LF alone ends a line; a BOM at the start and a CR at the end of a line are not text."""
    path = write(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\n{"text": "\xe2\x80\xa8"}\r\r\n{"text": "c"}\r')
    lines = [b'{"text": "a"}', b'{"text": "b"}', b'{"text": "\xe2\x80\xa8"}\r', b'{"text": "c"}']
    assert list(read_lines(path)) == list(enumerate(lines, 1))
    assert [text for _, text in read(path)[0]] == ["a", "b", "\u2028", "c"]


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1])
def test_lines_that_end_on_the_boundary_of_a_buffer(write, size):
    documents = [b'{"text": "%s"}' % (b"x" * (size - len(b'{"text": ""}\n'))), b'{"text": "last"}']
    for content in (b"\n".join(documents), b"\n".join(documents) + b"\n", documents[0] + b"\n"):
        assert [line for _, line in read_lines(write(content))] == content.removesuffix(b"\n").split(b"\n")


def test_several_members_and_frames(tmp_path):
    parts = [b'{"text": "a"}\n{"te', b"", b'xt": "b"}\n{"text": "c"}']
    for suffix in ("jsonl.gz", "jsonl.zst"):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
        assert [text for _, text in read(path)[0]] == ["a", "b", "c"]


NUMBERS = b"".join(b'{"text": "%d"}\n' % (number * 7919) for number in range(5000))
PACKED = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
DAMAGE = {
    "empty": lambda packed: b"",
    "in its header": lambda packed: packed[:3],
    "in the middle": lambda packed: packed[: len(packed) // 2],
    "a byte less": lambda packed: packed[:-1],
    "another first byte": lambda packed: bytes([packed[0] ^ 0x55]) + packed[1:],
    "other bytes inside": lambda packed: packed[:100] + bytes([packed[100] ^ 0x55]) + packed[101:],
    "another checksum": lambda packed: packed[:-2] + bytes([packed[-2] ^ 0x55]) + packed[-1:],
    "plain text": lambda packed: b'{"text": "a"}\n',
}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_compressed_file_that_is_damaged_stops(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(DAMAGE[damage](PACKED[suffix](NUMBERS)))
    with pytest.raises(BadDocument, match=r"a.jsonl.\w+:\d+: the compressed file is damaged or ends early"):
        read(path, skip_bad=True)


def test_the_size_of_compressed_files_is_known_roughly(tmp_path):
    texts = [text for _, text in islice(python_stdlib_documents(), 300)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    paths = [tmp_path / f"a.{suffix}" for suffix in COMPRESS] + [tmp_path / "b.jsonl.gz"]
    for path, compress in zip(paths, [*COMPRESS.values(), gzip.compress], strict=True):
        path.write_bytes(compress(content))
    assert estimate_line_bytes(paths) == pytest.approx(4 * len(content), rel=0.1)
    for path in paths[1:]:
        path.write_bytes(b"damaged")
    assert estimate_line_bytes(paths) == len(content) + 3 * 7
    paths[1].write_bytes(b"")
    assert estimate_line_bytes(paths[:2]) == len(content)


def test_tallies_of_parts_add_up_whatever_the_order(tmp_path):
    texts = [text for _, text in islice(python_stdlib_documents(), 200)]
    whole = Tally()
    for text in texts:
        whole.add(text.encode())
    whole.skipped["blank line"] += 3
    first, second = Tally(skipped=Counter({"blank line": 1})), Tally(skipped=Counter({"blank line": 2}))
    for number, text in enumerate(reversed(texts)):
        (first if number % 3 else second).add(text.encode())
    first += second
    assert first == whole
    assert whole.text_hash == sum(xxhash.xxh3_128_intdigest(text.encode()) for text in texts) % 2**128
    assert Tally.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    second.add(b"one more")
    first += second
    assert first.text_hash != whole.text_hash


def test_a_bad_document_reaches_the_parent_of_a_worker():
    error = pickle.loads(pickle.dumps(BadDocument("a.jsonl", 7, "no field 'text'")))
    assert str(error) == "a.jsonl:7: no field 'text'"
    assert (error.path, error.line_number, error.reason) == ("a.jsonl", 7, "no field 'text'")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_fifo_among_the_files_of_a_folder_is_refused(tmp_path, suffix):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    fifo = tmp_path / f"b.{suffix}"
    os.mkfifo(fifo)
    refusal = rf"input={re.escape(str(fifo))}: must be a regular file\. Fix: give a file, or remove"
    with pytest.raises(ValueError, match=refusal):
        files_in(tmp_path)
    with pytest.raises(ValueError, match=refusal):
        next(read_lines(fifo))


@pytest.mark.slow
def test_memory_of_a_file_that_compresses_well_is_that_of_its_chunks(tmp_path):
    """100 MB of blank lines in 3 kB."""
    path = tmp_path / "blank.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(b"\n" * 100_000_000))
    assert path.stat().st_size < 20_000
    code = f"""
import resource
from pathlib import Path
from moe_exp.data.documents import compression_ratio, read_lines
from moe_exp.data.kinds import read_chunks
path = Path({str(path)!r})
next(read_lines(path))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(map(len, read_chunks(path))) == 100_000_000 and compression_ratio(path) > 100
lines = read_lines(path)
for _ in range(500_000):
    next(lines)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", code]
    grown = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert int(grown.stdout) < 40_000, grown.stdout + grown.stderr  # kB
