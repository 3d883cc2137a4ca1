"""Reads data files of every supported kind as JSON lines.

Plain JSONL is read as it is. Compressed files, text, tables and JSON arrays are streams: they can only be
read from the beginning. Each text document or table row becomes a line `{"text": ...}`; each array element
becomes a line.
"""

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from moe_exp.host.files import DATA_SUFFIXES, ending

JSON_SUFFIXES = tuple(one for one in DATA_SUFFIXES if one.startswith((".json", ".ndjson")))
JSON_FILES = (".json", ".json.gz", ".json.zst")  # data or metadata: the name does not tell
TEXT_SUFFIXES = tuple(one for one in DATA_SUFFIXES if one.startswith((".txt", ".text", ".md")))
PARQUET_SUFFIX = ".parquet"
TABLE_SUFFIXES = (PARQUET_SUFFIX, ".arrow")
RECORD_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES)
KINDS = ".jsonl, .ndjson, .json, .txt, .text, .md (also with .gz or .zst), .parquet or .arrow"

BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**20
_BATCH_BYTES = 2**24  # uncompressed size of a batch of rows, if documents are long
_ARROW_FILE, _ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
_BLANK_LINES = re.compile(rb"\n(?:[^\S\n]*\n)+")
# start of a .json file that is not JSONL: an array, or an object over several lines
_JSON_VALUES = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[|\{[^\S\n]*\n)")
_BETWEEN_VALUES = re.compile(r"[\s,]*")
_LONGEST_ESCAPE = len("\\u0000")  # an error this close to the end of the buffer may be a cut escape
_LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class TextRule:
    """How text files are divided into documents.

    Documents over `longest_bytes` are cut after a blank line, a line or a word, in this order of preference.
    """

    documents: Literal["file", "block"] = "file"  # one per file, or per block between blank lines
    longest_bytes: int = 2**20

    def facts(self) -> dict[str, Any]:
        """Options that differ from their defaults; data preparation steps record them in their settings."""
        usual = vars(TextRule())
        return {f"text_{name}": value for name, value in vars(self).items() if value != usual[name]}


FILES = TextRule()

NOT_JSON = "not valid JSON"
_BINARY = "the file is binary, not text (has a NUL byte)"
_UTF16 = "the file is UTF-16, not UTF-8"
_NOT_UTF8 = "the file is not UTF-8 text"
# for text files that are not UTF-8
_FIXES = {
    _BINARY: "remove it from the input",
    _UTF16: "convert it with iconv -f utf-16 -t utf-8 OLD > NEW",
    _NOT_UTF8: "convert it, for example with iconv -f latin1 -t utf-8 OLD > NEW, or remove it from the input",
}


def input_error(what: object, rule: str, fix: str) -> ValueError:
    """Error for an input or argument, in the format of `moe_exp.config.setting_error`."""
    return ValueError(f"{what}: {rule}. Fix: {fix}.")


class BadDocument(ValueError):
    """An invalid line, or a file that cannot be read to its end.

    Args:
        line_number: starts at 1.
        reason: identical for all errors of the same kind, so that errors can be counted by reason.
    """

    def __init__(self, path: str | Path, line_number: int, reason: str):
        super().__init__(f"{path}:{line_number}: {reason}")
        self.path, self.line_number, self.reason = str(path), line_number, reason

    @property
    def fix(self) -> str:
        return _FIXES.get(self.reason, "")

    def __reduce__(self) -> tuple[Any, ...]:  # to be pickled in a worker process
        return type(self), (self.path, self.line_number, self.reason)


def total_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def without_ending(name: str) -> str:
    """File name without its file-type suffix."""
    return name[: len(name) - len(ending(name))]


def check_regular(paths: Iterable[Path]) -> None:
    """Raises ValueError for a path that exists but is not a regular file, or whose name is not UTF-8."""
    for path in paths:
        name = os.fsencode(path).decode(errors="backslashreplace")
        if name != str(path):
            fix = "rename it or its folder; manifests and logs require UTF-8 names"
            raise input_error(f"input={name}", "name must be UTF-8", fix)
        if (path.exists() or path.is_symlink()) and not path.is_file():
            fix = "give a file, or remove this path from the folder"
            raise input_error(f"input={path}", "must be a regular file", fix)


def is_compressed(path: Path) -> bool:
    return ending(path).endswith((".gz", ".zst"))


def is_stream(path: Path) -> bool:
    """Whether a file can only be read from the beginning, because its lines are decoded or converted."""
    return is_compressed(path) or ending(path) in (*TABLE_SUFFIXES, *TEXT_SUFFIXES) or _has_values(path)


def _has_values(path: Path) -> bool:
    """Whether a .json file is an array or multi-line object, not JSONL; raises one of `DAMAGE` if damaged."""
    return ending(path) in JSON_FILES and bool(_JSON_VALUES.match(next(_file_chunks(path), b"")))


class ZstdDamage(Exception):
    """Raised if a .zst file cannot be read to its end."""


# Exceptions from reading a compressed file that is damaged or truncated.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, ZstdDamage)


def damaged(path: Path, line_number: int, error: Exception) -> BadDocument:
    """Converts an exception for a damaged file (see `DAMAGE`) to an error that names the line."""
    return BadDocument(path, line_number, f"the compressed file is damaged or ends early ({error})")


def raw_lines(path: Path, *, text_field: str = "text", rule: TextRule = FILES) -> Iterator[bytes]:
    """Yields any data file as JSON lines. Each line ends with LF, except perhaps the last of a .jsonl file.

    Args:
        text_field: name of the text column in tables, and of the text field in the yielded lines.

    Raises:
        BadDocument: a table is damaged, or a text file is not UTF-8.
        ValueError: a table has no column `text_field`.
        An exception of `DAMAGE`: a compressed file is damaged or truncated.
    """
    kind = ending(path)
    if kind in TEXT_SUFFIXES:
        for text in _read_texts(path, rule):
            yield orjson.dumps({text_field: text}, option=orjson.OPT_APPEND_NEWLINE)
    elif kind in TABLE_SUFFIXES:
        for number, batch in read_table(path, text_field=text_field, columns=[text_field]):
            type_ = str(batch.schema.field(text_field).type)
            if "string" not in type_ and type_ != "null":
                not_text = f"the column {text_field!r} contains {type_}, not text"
                raise input_error(path, not_text, "set --text-field to the text column")
            try:
                yield from (orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in batch.to_pylist())
            except UnicodeDecodeError as error:  # pyarrow does not validate strings when it reads them
                raise BadDocument(path, number + 1, "invalid UTF-8 in this or a later row") from error
    elif _has_values(path):
        yield from _json_values(path)
    elif is_compressed(path):
        rest: list[bytes] = []  # parts of a line, which may span many chunks
        for chunk in _file_chunks(path):
            *lines, last = chunk.split(b"\n")
            for line in lines:
                yield b"".join([*rest, line, b"\n"])
                rest = []
            rest.append(last)
        if last_line := b"".join(rest):
            yield last_line
    else:
        check_regular([path])
        with path.open("rb", buffering=_CHUNK_BYTES) as file:
            yield from file


def read_chunks(path: Path, *, text_field: str = "text", rule: TextRule = FILES) -> Iterator[bytes]:
    """Like `raw_lines`, but yields compressed JSONL as decompressed chunks of up to 1 MiB, not as lines."""
    if is_compressed(path) and ending(path) in JSON_SUFFIXES and not _has_values(path):
        yield from _file_chunks(path)
    else:
        yield from raw_lines(path, text_field=text_field, rule=rule)


def _file_chunks(path: Path, num_bytes: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """Yields a file's decompressed content in chunks of up to `num_bytes` (compressed files: up to 1 MiB)."""
    check_regular([path])
    with path.open("rb") as file:
        if not is_compressed(path):
            yield from iter(partial(file.read, num_bytes), b"")
        elif not path.stat().st_size:
            raise EOFError("it is empty")  # both formats have a header, even without content
        else:
            yield from decompressed(path, file)


def decompressed(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yields the content of a .gz or .zst file in chunks of up to 1 MiB; damage raises one of `DAMAGE`."""
    if ending(path).endswith(".gz"):
        with gzip.GzipFile(fileobj=file) as stream:
            yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
        return
    import pyarrow

    # The zstandard package decompresses its whole input at once, and accepts truncated files silently.
    try:
        with pyarrow.CompressedInputStream(file, "zstd") as stream:
            yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
    except OSError as error:
        if error.errno is not None:  # a disk error
            raise
        raise ZstdDamage(str(error)) from error


# JSON arrays


def _json_values(path: Path) -> Iterator[bytes]:
    """Yields each value of a JSON array, or of concatenated JSON values, as a line."""
    # not orjson, which does not return where a value ends
    decoder, scan = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    buffer, number, wanted, closing = "", 1, 0, None
    for chunk in chain(_file_chunks(path), [b""]):
        try:
            buffer += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise BadDocument(path, number, _NOT_UTF8) from error
        if chunk and len(buffer) < wanted:
            continue
        if closing is None and (start := buffer.lstrip()):
            closing = "]" if start.startswith("[") else ""
            buffer = start[len(closing) :]
        place = 0
        while (gap := _BETWEEN_VALUES.match(buffer, place)) and (place := gap.end()) < len(buffer):
            try:
                end = scan(buffer, place)[1]
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(buffer) - _LONGEST_ESCAPE
                if (chunk and is_cut) or buffer[place:].strip() == closing:
                    break
                raise BadDocument(path, number, NOT_JSON) from error
            if chunk and end == len(buffer):  # a number may continue in the next chunk
                break
            yield buffer[place:end].replace("\n", " ").replace("\r", " ").encode() + b"\n"
            # errors count values, not lines: a value may span many lines, and a line may contain many values
            place, number = end, number + 1
        buffer = buffer[place:]
        wanted = 2 * len(buffer)  # doubling limits how often a long value is scanned again
    if closing and not buffer:
        raise BadDocument(path, number, NOT_JSON)


# Text files


def _read_texts(path: Path, rule: TextRule) -> Iterator[str]:
    """Yields the documents of a text file; all line ends become LF."""
    buffer, num_lines, is_empty = b"", 1, True
    # memory: twice the longest document
    for chunk in _file_chunks(path, max(_CHUNK_BYTES, rule.longest_bytes)):
        # first chunk
        if num_lines == 1 and not buffer:
            if chunk.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise BadDocument(path, 1, _UTF16)
            chunk = chunk.removeprefix(BOM)
        # the last piece may continue in the next chunk
        *documents, buffer = _cut(buffer + chunk, rule)
        for document in documents:
            text = _decoded(path, num_lines, document, rule)
            num_lines += document.count(b"\n")
            is_empty &= not text
            if text:
                yield text
    text = _decoded(path, num_lines, buffer, rule)
    if text or is_empty:  # an empty file counts as one empty text
        yield text


def _cut(buffer: bytes, rule: TextRule) -> list[bytes]:
    """Splits `buffer` into complete documents and, as the last item, the remaining bytes."""
    blanks = _BLANK_LINES.finditer(buffer) if rule.documents == "block" else ()
    bounds = [0, *(match.end() for match in blanks), len(buffer)]
    pieces, longest_bytes = [], rule.longest_bytes
    for document in (buffer[first:last] for first, last in pairwise(bounds)):
        while len(document) > longest_bytes:
            # after a blank line, or else a line or a word, in the second half of the allowed length
            half, separators = longest_bytes // 2, (b"\n\n", b"\r\n\r\n", b"\n", b" ")
            places = ((document.rfind(one, half, longest_bytes), one) for one in separators)
            end = next((place + len(one) for place, one in places if place >= 0), 0)
            if not end:  # or else between UTF-8 characters
                end = longest_bytes
                while end > longest_bytes - 4 and document[end] & 0xC0 == 0x80:
                    end -= 1
            pieces.append(document[:end])
            document = document[end:]
        pieces.append(document)
    return pieces


def _decoded(path: Path, num_lines: int, document: bytes, rule: TextRule) -> str:
    """Decoded text, or "" if it is blank. `num_lines`: number of the document's first line, for errors."""
    if (place := document.find(b"\0")) >= 0:
        raise BadDocument(path, num_lines + document.count(b"\n", 0, place), _BINARY)
    try:
        text = document.decode()
    except UnicodeDecodeError as error:
        raise BadDocument(path, num_lines + document.count(b"\n", 0, error.start), _NOT_UTF8) from error
    # blank texts are not documents; the caller counts them
    if not text or text.isspace():
        return ""
    text = text.replace("\r\n", "\n")
    return _LEADING_BLANK_LINES.sub("", text).rstrip() if rule.documents == "block" else text


# Parquet and Arrow


def read_table(path: Path, *, text_field: str, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Yields (number of rows before the batch, batch) for each record batch of a .parquet or .arrow file.

    Args:
        path: an .arrow file may have Arrow's file format or stream format (which `datasets` uses).
        text_field: required column; ValueError if it does not exist.
        columns: columns to read (default: all).

    Raises:
        BadDocument: the file is damaged or truncated.
    """
    import pyarrow

    kind, number, num_rows = "Parquet" if ending(path) == PARQUET_SUFFIX else "Arrow", 0, None
    check_regular([path])
    try:
        with ExitStack() as stack:
            batches, schema, num_rows = (_parquet if kind == "Parquet" else _arrow)(stack, path, columns)
            if text_field not in schema.names:
                rule = f"has no column {text_field!r}; its columns are {', '.join(schema.names)}"
                raise input_error(path, rule, "set --text-field to the text column")
            for batch in batches:
                yield number, batch if columns is None else batch.select(columns)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        # a disk error, not a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = f"the {kind} file is damaged or ends early ({' '.join(str(error).split())})"
        raise BadDocument(path, number + 1, reason) from error
    # pyarrow may stop early without an error
    if num_rows not in (None, number):
        raise BadDocument(path, number, f"only {number} of {num_rows} rows can be read")


def _parquet(stack: ExitStack, path: Path, columns: list[str] | None) -> tuple[Iterable[Any], Any, int]:
    import pyarrow.parquet

    file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
    wanted = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
    num_rows, groups = file.metadata.num_rows, range(file.metadata.num_row_groups)
    num_bytes = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    # based on the mean row size: documents may be megabytes long
    batch_rows = max(1, min(1000, _BATCH_BYTES * num_rows // max(1, num_bytes)))
    return file.iter_batches(batch_rows, use_threads=False, columns=wanted), file.schema_arrow, num_rows


def _arrow(stack: ExitStack, path: Path, columns: list[str] | None) -> tuple[Iterable[Any], Any, None]:
    import pyarrow.ipc

    with path.open("rb") as file:
        # pyarrow reads a truncated stream without an error, so look for its end marker
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_ARROW_END)))
        if not is_file and file.read() != _ARROW_END:
            raise EOFError("the end of the stream is missing")
    source = stack.enter_context(pyarrow.memory_map(str(path)))
    if not is_file:
        reader = stack.enter_context(pyarrow.ipc.open_stream(source))
        return reader, reader.schema, None
    reader = stack.enter_context(pyarrow.ipc.open_file(source))
    return (reader.get_batch(index) for index in range(reader.num_record_batches)), reader.schema, None
