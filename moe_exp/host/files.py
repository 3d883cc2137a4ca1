"""Atomic file writes, checksums, and which files have documents by their names."""

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

# of files with documents, see data/kinds.py
_PACKABLE = (".jsonl", ".ndjson", ".json", ".txt", ".text", ".md")
DATA_SUFFIXES = (*(one + packed for one in _PACKABLE for packed in ("", ".gz", ".zst")), ".parquet", ".arrow")
_CHUNK_BYTES = 1 << 20


def bytes_text(num_bytes: float) -> str:
    """Three digits and a decimal unit: 1.75 TB."""
    return scaled_text(num_bytes, (" bytes", " kB", " MB", " GB", " TB", " PB", " EB"))


def count_text(number: float, digits: int = 3) -> str:
    """Significant digits and the letter of a count: 30.5B."""
    return scaled_text(number, ("", "K", "M", "B", "T"), digits)


def scaled_text(number: float, units: Sequence[str], digits: int = 3) -> str:
    """Significant digits and the first of `units`, each a thousand of the one before, that needs no more."""
    *smaller, largest = units
    limit = 1000 - 0.5 * 10 ** (3 - digits)  # from here on it rounds to the next unit
    for unit in smaller:
        if abs(number) < limit:
            return f"{number:.{digits}g}{unit}"
        number /= 1000
    return f"{number:,.0f}{largest}" if abs(number) >= limit else f"{number:.{digits}g}{largest}"


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` so that readers, also after a crash, see either the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end of the block, atomically."""
    # beside it: a rename is atomic only inside one file system
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
    """Whether text names a place at an object store (`host/object_store.py`) rather than a path."""
    return "://" in text


def ending(name: str | os.PathLike[str]) -> str:
    """Which of `DATA_SUFFIXES` a name ends with, whatever its case; "" if it ends with none of them."""
    lower = os.fspath(name).lower()
    return next((suffix for suffix in DATA_SUFFIXES if lower.endswith(suffix)), "")


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with the home folder for a leading ~, unlike `Path.expanduser` unchanged for an unknown user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def regular(path: Path) -> Path:
    """Returns `path` if it is a regular file, else OSError: reading e.g. a pipe could block."""
    # EISDIR as Python's own `open` has it
    if not stat.S_ISREG(path.stat().st_mode):
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


def read_json(path: Path, *, fix: str = "") -> Any:
    """The value in a JSON file.

    `fix`: what to do about a damaged file; makes the error message a whole line.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: not JSON, too deep, or too long numbers for Python; without `fix`, only the reason.
    """
    try:
        return json.loads(regular(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error, fix) from None


def read_yaml(path: Path, *, fix: str = "") -> Any:
    """Like `read_json`, for YAML."""
    import yaml

    try:
        return yaml.safe_load(shallow(regular(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(path, error, fix) from None


def shallow(text: str) -> str:
    """Returns YAML text; ValueError if its brackets nest too deep, which takes PyYAML many seconds to say."""
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
    """Makes renames in `folder` durable, if the file system can."""
    # an fsync of the file alone does not keep its name
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class HashedFile:
    """A new binary file that computes its checksum while writing, so that it need not be read again.

    Use it in a `with` block: at its end the file is synced to disk, or an error is raised.
    """

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._num_bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Appends bytes, or any buffer."""
        self._digest.update(data)
        try:
            num_bytes = self._file.write(data)
        except OSError as error:
            error.filename = self._file.name
            self._error = self._error or error
            raise
        self._num_bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """Hands written data to the system."""
        self._file.flush()

    def tell(self) -> int:
        """Bytes so far."""
        return self._num_bytes

    def entry(self) -> dict[str, Any]:
        """Size, and XXH3-128 as in `file_hash`."""
        return {"bytes": self.tell(), "xxh3_128": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._error is not None:
                # torch.save hides the system's error behind its own
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
    """XXH3-128 of a file, 32 hex digits; for one of several blocks as `BlockHash.of_all`."""
    digest, buffer = BlockHash(block_bytes), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):  # one buffer: allocation would take longer than the hash
            digest.update(buffer[:num_bytes])
    return BlockHash.of_all(digest.digests(), block_bytes)


def has_hash(path: Path, expected: str) -> bool:
    """Whether a file has this hash, whole or of blocks."""
    block_bytes, _, _ = expected.rpartition("-")
    return file_hash(path, int(block_bytes or sys.maxsize)) == expected


class BlockHash:
    """XXH3-128 of each block of a file, so that several tasks can make the hash of one file."""

    def __init__(self, block_bytes: int):
        self.block_bytes, self.num_bytes = block_bytes, 0
        self._digests, self._block = list[bytes](), xxhash.xxh3_128()

    def update(self, content: memoryview) -> None:
        """Adds what follows."""
        while len(content):
            some = content[: self.block_bytes - self.num_bytes % self.block_bytes]
            self._block.update(some)
            self.num_bytes, content = self.num_bytes + len(some), content[len(some) :]
            if self.num_bytes % self.block_bytes == 0:
                self._digests.append(self._block.digest())
                self._block.reset()

    def digests(self) -> list[bytes]:
        """Digests of the blocks so far."""
        return [*self._digests, *([self._block.digest()] if self.num_bytes % self.block_bytes else [])]

    @staticmethod
    def of_all(digests: Iterable[bytes], block_bytes: int) -> str:
        """Hash of a file by those of its blocks: the only one's, or `BYTES-` and the hash of all."""
        # a file of one block has the hash that it has as a whole, whatever the size of blocks
        several = list(digests)
        if len(several) <= 1:
            return (several[0] if several else xxhash.xxh3_128_digest(b"")).hex()
        return f"{block_bytes}-{xxhash.xxh3_128_hexdigest(b''.join(several))}"
