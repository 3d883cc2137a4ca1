"""Atomic file writes, reading of JSON and YAML, checksums, and suffixes of document files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

# suffixes of files with documents, see data/kinds.py
_PACKABLE = (".jsonl", ".ndjson", ".json", ".txt", ".text", ".md")
DATA_SUFFIXES = (*(one + packed for one in _PACKABLE for packed in ("", ".gz", ".zst")), ".parquet", ".arrow")
_CHUNK_BYTES = 1 << 20


def bytes_text(num_bytes: float) -> str:
    """Size with three digits and a decimal unit, such as `1.75 TB`."""
    return scaled_text(num_bytes, (" bytes", " kB", " MB", " GB", " TB", " PB", " EB"))


def count_text(number: float, digits: int = 3) -> str:
    """Count with `digits` significant digits and a suffix, such as `30.5B`."""
    return scaled_text(number, ("", "K", "M", "B", "T"), digits)


def scaled_text(number: float, units: Sequence[str], digits: int = 3) -> str:
    """Number with `digits` digits, in the first of `units` (1, 1000, 1000^2, ...) that makes it < 1000."""
    *smaller, largest = units
    limit = 1000 - 0.5 * 10 ** (3 - digits)  # from here on, rounding reaches the next unit
    for unit in smaller:
        if abs(number) < limit:
            return f"{number:.{digits}g}{unit}"
        number /= 1000
    return f"{number:,.0f}{largest}" if abs(number) >= limit else f"{number:.{digits}g}{largest}"


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` so that readers see either the old or the new file, even after a crash."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write to. At the end of the block, this file atomically replaces `path`."""
    # in the same folder, as a rename is atomic only within a file system
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def is_url(text: str) -> bool:
    """Whether `text` is a URL of an object store (`host/object_store.py`) instead of a path."""
    return "://" in text


def ending(name: str | os.PathLike[str]) -> str:
    """Suffix of a name if it is in `DATA_SUFFIXES` (in upper or lower case), otherwise ""."""
    lower = os.fspath(name).lower()
    return next((suffix for suffix in DATA_SUFFIXES if lower.endswith(suffix)), "")


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with ~ expanded. Unlike `Path.expanduser`, this raises no error for an unknown user after ~."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def regular(path: Path) -> Path:
    """Returns `path`. Raises OSError if `path` is not a regular file, because reading a pipe could block."""
    if not stat.S_ISREG(path.stat().st_mode):
        if path.is_dir():  # the error of Python's own `open`
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


def read_json(path: Path, *, fix: str = "") -> Any:
    """Value in a JSON file.

    Raises:
        OSError: if the file cannot be read or is not a regular file.
        ValueError: if the file is damaged. If `fix` is given, the message is a complete error line;
            otherwise, the message is only the reason.
    """
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error, fix) from None


def read_yaml(path: Path, *, fix: str = "") -> Any:
    """Like `read_json`, for YAML."""
    import yaml

    try:
        text = shallow(regular(path).read_text(encoding="utf-8"))
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # C's is ten times faster
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(path, error, fix) from None


def shallow(text: str) -> str:
    """Returns the YAML `text`. Raises ValueError if brackets nest so deeply that reading it takes seconds."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > 100:
            raise ValueError("brackets are nested more than 100 deep")
    return text


def _damaged(path: Path, error: Exception, fix: str) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"{path}: is damaged ({reason}). Fix: {fix}." if fix else reason)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable if the file system supports syncing folders."""
    # an fsync of a file does not cover its name
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class HashedFile:
    """A new binary file that computes its checksum while it is written.

    Use it in a `with` block; leaving the block syncs the file to disk, or raises the first write error.
    """

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Appends bytes or any other buffer."""
        self._digest.update(data)
        try:
            num_bytes = self._file.write(data)
        except OSError as error:
            self._error = self._error or error
            raise
        self._num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._num_bytes

    def entry(self) -> dict[str, Any]:
        """Size and XXH3-128 of this file, as stored in manifests."""
        return {"bytes": self.tell(), "xxh3_128": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._error is not None:
                # torch.save replaces the system's error by its own
                raise self._error
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as failed:
            failed.filename = self._file.name
            raise
        finally:
            with contextlib.suppress(OSError):
                self._file.close()


def file_hash(path: Path, block_bytes: int = sys.maxsize) -> str:
    """XXH3-128 of a file (32 hex digits). Files larger than `block_bytes`: result of `BlockHash.of_all`."""
    digest, buffer = BlockHash(block_bytes), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):  # one buffer, as allocation takes longer than hashing
            digest.update(buffer[:num_bytes])
    return BlockHash.of_all(digest.digests(), block_bytes)


def has_hash(path: Path, expected: str) -> bool:
    """Whether a file has the `expected` hash, which may be a result of `BlockHash.of_all`."""
    block_bytes, _, _ = expected.rpartition("-")
    return file_hash(path, int(block_bytes or sys.maxsize)) == expected


class BlockHash:
    """Computes the XXH3-128 hash of each block of a file, so that several tasks can share the work."""

    def __init__(self, block_bytes: int):
        self.block_bytes, self.num_bytes = block_bytes, 0
        self._digests, self._block = list[bytes](), xxhash.xxh3_128()

    def update(self, content: memoryview) -> None:
        while len(content):
            some = content[: self.block_bytes - self.num_bytes % self.block_bytes]
            self._block.update(some)
            self.num_bytes, content = self.num_bytes + len(some), content[len(some) :]
            if self.num_bytes % self.block_bytes == 0:
                self._digests.append(self._block.digest())
                self._block.reset()

    def digests(self) -> list[bytes]:
        """Digests of all blocks so far, including an incomplete last block."""
        return [*self._digests, *([self._block.digest()] if self.num_bytes % self.block_bytes else [])]

    @staticmethod
    def of_all(digests: Iterable[bytes], block_bytes: int) -> str:
        """Hash of a file from its blocks' digests: the block size, a hyphen, and the hash of all digests."""
        # a file with a single block has the same hash for every block size
        several = list(digests)
        if len(several) <= 1:
            return (several[0] if several else xxhash.xxh3_128_digest(b"")).hex()
        return f"{block_bytes}-{xxhash.xxh3_128_hexdigest(b''.join(several))}"
