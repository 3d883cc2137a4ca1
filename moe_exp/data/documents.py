"""Documents in JSONL files: read line by line, checked, counted and hashed, so that none is lost silently.

A line ends at LF alone, as JSONL says: U+2028 and other separators are text. A BOM at the start of a file and
a CR at the end of a line are not text. Blank lines and empty texts are no documents: they are skipped and
counted. Whatever else is no document stops, or is skipped and counted by its reason, as the caller wants.
"""

from __future__ import annotations

import glob
import gzip
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
import xxhash

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
BLANK_LINE, EMPTY_TEXT = "blank line", "empty text"

_CHUNK_BYTES = 2**20
BOM = b"\xef\xbb\xbf"
_MASK128 = 2**128 - 1


class BadDocument(ValueError):
    """A line that is no document, or a file that ends early.

    Args:
        path: the file.
        line_number: from 1.
        reason: the same text for the same kind of defect, so that it can be counted by.
    """

    def __init__(self, path: str | Path, line_number: int, reason: str):
        super().__init__(f"{path}:{line_number}: {reason}")
        self.path, self.line_number, self.reason = str(path), line_number, reason

    def __reduce__(self) -> tuple[Any, ...]:  # so that it reaches the parent of a worker process
        return type(self), (self.path, self.line_number, self.reason)


@dataclass
class Tally:
    """Counts of what was read or written; the counts of parts add up to those of the whole.

    Args:
        num_documents: documents.
        num_text_bytes: of their texts in UTF-8.
        text_hash: sum of the XXH3-128 of the texts modulo 2**128: equal for the same multiset of texts,
            whatever their order.
        skipped: reason to number of lines that are no documents.
    """

    num_documents: int = 0
    num_text_bytes: int = 0
    text_hash: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, text: bytes) -> None:
        """Counts a document by its text in UTF-8."""
        self.num_documents += 1
        self.num_text_bytes += len(text)
        self.text_hash = (self.text_hash + xxhash.xxh3_128_intdigest(text)) & _MASK128

    def take_back(self, text: bytes) -> None:
        """Takes out a document that was added."""
        self.num_documents -= 1
        self.num_text_bytes -= len(text)
        self.text_hash = (self.text_hash - xxhash.xxh3_128_intdigest(text)) & _MASK128

    def __iadd__(self, other: Tally) -> Tally:
        self.num_documents += other.num_documents
        self.num_text_bytes += other.num_text_bytes
        self.text_hash = (self.text_hash + other.text_hash) & _MASK128
        self.skipped += other.skipped
        return self

    def to_json(self) -> dict[str, Any]:
        """JSON values for a manifest."""
        counts: dict[str, Any] = {"num_documents": self.num_documents, "num_text_bytes": self.num_text_bytes}
        return counts | {"text_hash": f"{self.text_hash:032x}", "skipped": dict(sorted(self.skipped.items()))}

    @classmethod
    def from_json(cls, counts: dict[str, Any]) -> Tally:
        """The other way round."""
        text_hash, skipped = int(counts["text_hash"], 16), Counter(counts["skipped"])
        return cls(counts["num_documents"], counts["num_text_bytes"], text_hash, skipped)


def is_validation_file(path: Path) -> bool:
    """Whether a file is for validation by its name, *.val.jsonl."""
    return path.name.endswith(tuple(f".val{suffix}" for suffix in JSONL_SUFFIXES))


def jsonl_files_in(folder: Path) -> list[Path]:
    """The JSONL files of a folder, sorted by name; logs those for validation, which are left out."""
    inside = sorted(
        path for path in folder.iterdir() if path.name.endswith(JSONL_SUFFIXES) and not path.is_dir()
    )
    check_regular(inside)
    validation = [path.name for path in inside if is_validation_file(path)]
    if validation:
        logger.info("%s: left out, as it is for validation: %s", folder, ", ".join(validation))
    return [path for path in inside if not is_validation_file(path)]


def find_inputs(names: Iterable[str | Path]) -> list[Path]:
    """The files that names stand for: files, folders (see `jsonl_files_in`) and globs, in this order.

    JSONL files are often called .json; such ones are taken where they are named, but not from a folder, where
    other JSON may lie.

    Raises:
        ValueError: there is none, a name stands for nothing, a file is no JSONL file or given twice.
    """
    found: list[Path] = []
    suffixes = " or ".join(JSONL_SUFFIXES)
    for path in map(Path, names):
        if path.is_dir():
            matches = jsonl_files_in(path)
        elif path.exists() or path.is_symlink():
            matches = [path]
        else:  # not Path.glob, which takes no absolute pattern
            matches = sorted(Path(one) for one in glob.glob(str(path)) if Path(one).is_file())  # noqa: PTH207
        if not matches and path.is_dir():
            raise ValueError(
                f"input={path}: the folder has no file that ends with {suffixes}. Fix: another one."
            )
        if not matches:
            fix = "check the path, or quote the pattern"
            raise ValueError(f"input={path}: there is no such file. Fix: {fix}.")
        found += matches
    if not found:
        raise ValueError("input=: no file is given. Fix: give JSONL files or folders of them.")
    check_regular(found)
    for path, times in Counter(file.resolve() for file in found).items():
        if times > 1:
            rule = f"is given {times} times, its documents would be there as often"
            raise ValueError(f"input={path}: {rule}. Fix: give it once.")
    for path in found:
        if not path.name.endswith((*JSONL_SUFFIXES, ".json", ".json.gz", ".json.zst")):
            fix = "rename it if each line is a JSON object, else convert it (moe-exp data prepare)"
            raise ValueError(f"input={path}: does not end with {suffixes}. Fix: {fix}.")
        if is_validation_file(path) and len(found) > 1:
            logger.warning("%s is for validation, by its name, and is read with the others", path)
    return found


def check_regular(paths: Iterable[Path]) -> None:
    """Checks that files can be read to an end, unlike a FIFO or a device, and named in a manifest.

    Raises:
        ValueError: one exists and is no regular file, or its name is not UTF-8.
    """
    for path in paths:
        name = os.fsencode(path).decode(errors="backslashreplace")
        if name != str(path):
            fix = "rename it, or its folder: manifests and logs name their files in UTF-8"
            raise ValueError(f"input={name}: its name is not UTF-8. Fix: {fix}.")
        if (path.exists() or path.is_symlink()) and not path.is_file():
            fix = "name files, or remove it from the folder"
            raise ValueError(f"input={path}: is not a regular file. Fix: {fix}.")


def check_apart(inputs: Iterable[Path], output: Path) -> None:
    """Checks that a step can make, replace and remove the folder `output` without touching its inputs.

    Args:
        inputs: files, and folders that are read whole.
        output: folder to make; beside it are those that a step works in, OUTPUT.partial and OUTPUT.old.

    Raises:
        ValueError: an input is in one of them, is one of them, or has one in it.
    """
    for path in inputs:
        places = {Path(os.path.abspath(path)), path.resolve()}  # noqa: PTH100  # a link is lost as a file is
        for suffix in ("", ".partial", ".old"):
            folder = output.resolve().with_name(output.resolve().name + suffix)
            if any(folder in (place, *place.parents) for place in places):
                raise ValueError(f"output={output}: the input {path} is in it. Fix: another output folder.")
            if path.resolve() in folder.parents:
                rule = f"is in the input {path}, of which it would become a part"
                raise ValueError(f"output={output}: {rule}. Fix: another output folder.")


def read_documents(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False
) -> Iterator[tuple[bytes, str]]:
    """Yields (line without its end, text) of every document of a JSONL file, and counts into `tally`.

    Args and Raises: as `read_objects`.
    """
    for line, document in read_objects(path, tally, text_field=text_field, skip_bad=skip_bad):
        yield line, document[text_field]


def read_objects(
    path: Path, tally: Tally, *, text_field: str = "text", skip_bad: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields (line without its end, JSON object) of every document of a JSONL file, and counts into `tally`.

    Args:
        path: the file.
        tally: what is read is added here, when it is yielded.
        text_field: name of the field with the text.
        skip_bad: skip and count what is no document instead of raising. A file that ends early raises all the
            same.

    Raises:
        BadDocument: at the first line that is no document, or if a compressed file is damaged.
    """
    for number, line in read_lines(path):
        try:
            document = _object_of(line)
            text = text_in(document, text_field)
        except ValueError as error:
            skip_or_raise(path, number, str(error), tally, skip_bad=skip_bad)
            continue
        tally.add(text.encode())
        yield line, document


def skip_or_raise(path: Path, number: int, reason: str, tally: Tally, *, skip_bad: bool) -> None:
    """Counts line `number` of `path` as skipped, or raises BadDocument unless it or its text is empty."""
    if not skip_bad and reason not in (BLANK_LINE, EMPTY_TEXT):
        raise BadDocument(path, number, reason)
    tally.skipped[reason] += 1


def text_of(line: bytes, text_field: str = "text") -> str:
    """The text of a line of JSONL.

    Raises:
        ValueError: the line is no document; its text is the reason.
    """
    return text_in(_object_of(line), text_field)


def text_in(document: dict[str, Any], text_field: str = "text") -> str:
    """The text of a document.

    Raises:
        ValueError: it has none; the message is the reason.
    """
    text = document.get(text_field)
    if text_field not in document:
        raise ValueError(f"no field {text_field!r}")
    if not isinstance(text, str):
        kinds = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}
        kinds |= {int: "a number", float: "a number"}
        kind = kinds.get(type(text), f"a {type(text).__name__}")
        raise ValueError(f"field {text_field!r} is {kind}, not a text")
    if not text:
        raise ValueError(EMPTY_TEXT)
    return text


def _object_of(line: bytes) -> dict[str, Any]:
    if not line or line.isspace():
        raise ValueError(BLANK_LINE)
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(_json_problem(line)) from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def _json_problem(line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return "invalid UTF-8"
    return "not valid JSON"  # lone surrogates among it, which UTF-8 has no bytes for


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line without LF or CRLF) of a plain, .gz or .zst file; memory: the longest line.

    Raises:
        BadDocument: a compressed file is damaged or ends early.
    """
    number = 0
    try:
        for number, line in enumerate(_raw_lines(path), 1):
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except DAMAGE as error:
        raise damaged(path, number + 1, error) from error


class ZstdDamage(Exception):
    """A .zst file that cannot be read to its end."""


# What reading a compressed file raises where it is damaged or ends early.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, ZstdDamage)


def damaged(path: Path, line_number: int, error: Exception) -> BadDocument:
    """One of `DAMAGE` as the error that names the line."""
    return BadDocument(path, line_number, f"the compressed file is damaged or ends early ({error})")


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yields the decompressed bytes of a .gz or .zst file, up to 1 MiB at a time; raises one of `DAMAGE`."""
    check_regular([path])
    if not path.stat().st_size:
        raise EOFError("it is empty")  # both formats have a header even for no bytes at all
    with path.open("rb") as file:
        yield from _decompressed(path, file)


def _decompressed(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    if path.suffix == ".gz":
        with gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
        return
    import pyarrow

    # The zstandard package decompresses all it is given at once, or ends silently where the file does.
    with pyarrow.CompressedInputStream(file, "zstd") as stream:
        while True:
            try:
                chunk = stream.read(_CHUNK_BYTES)
            except OSError as error:
                if error.errno is not None:  # of the disk
                    raise
                raise ZstdDamage(str(error)) from error
            if not chunk:
                return
            yield chunk


def estimate_line_bytes(paths: Iterable[Path]) -> int:
    """Decompressed bytes of files, roughly: by the ratio at the beginning of the largest of each kind."""
    total_bytes = 0
    by_suffix: dict[str, list[Path]] = {}
    for path in paths:
        by_suffix.setdefault(path.suffix, []).append(path)
    for suffix, files in by_suffix.items():
        sizes, ratio = [path.stat().st_size for path in files], 1.0
        if suffix in (".gz", ".zst"):
            with suppress(BadDocument):  # reading it will say so
                ratio = compression_ratio(files[sizes.index(max(sizes))])
        total_bytes += int(sum(sizes) * ratio)
    return total_bytes


def compression_ratio(path: Path) -> float:
    """Decompressed by compressed bytes of a .gz or .zst file's beginning, up to 4 MB.

    Raises:
        BadDocument: it is damaged there.
    """
    num_compressed = num_bytes = 0
    with path.open("rb") as file:
        try:
            for chunk in _decompressed(path, file):
                num_compressed, num_bytes = file.tell(), num_bytes + len(chunk)
                if num_bytes >= 2**22:
                    break
        except DAMAGE as error:
            for _ in read_lines(path):  # which stops at the line
                pass
            raise damaged(path, 1, error) from error
    return num_bytes / num_compressed if num_bytes else 1.0


def _raw_lines(path: Path) -> Iterator[bytes]:
    if path.suffix in (".gz", ".zst"):
        yield from _split(read_chunks(path))
    else:
        check_regular([path])
        with path.open("rb", buffering=_CHUNK_BYTES) as file:
            yield from file


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        *lines, last = chunk.split(b"\n")
        for line in lines:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if last_line := b"".join(rest):
        yield last_line
