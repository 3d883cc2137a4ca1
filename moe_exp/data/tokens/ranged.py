"""Token files at an object store: the index is copied, tokens are read in blocks when they are needed.

    DATA_DIR/remote/NAME_1a2b3c4d/
        NAME.idx NAME.manifest.json    copies
        NAME.remote.json               URL, size and version of NAME.bin; written last
        NAME.blocks                    blocks of NAME.bin that were read, each at its place
        NAME.hashes                    XXH3-64 of each of them; 0: not read yet

All ranks and workers of a host share the folder without a lock: two that read the same block write the same
bytes. A block is used if it has its hash, so one that a crash or a full disk has cut off is read again.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock

from moe_exp.host.files import read_json, write_json
from moe_exp.host.object_store import Store, StoredFile, fetch
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20
_HASH_BYTES = 8
_LEFT_FREE_BYTES = 20 * 2**30  # for checkpoints; a tenth of a disk that is smaller than ten times that


@dataclass(frozen=True)
class _Remote:
    """Contents of NAME.remote.json."""

    url: str
    bytes: int
    version: str


def prefix_of(name: str) -> str:
    """The prefix of token files, which may be given with .bin or .idx."""
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def split_url(url: str) -> tuple[Store, str]:
    """Folder and name of a prefix at a store, with or without .bin or .idx."""
    parent, _, name = prefix_of(url.rstrip("/")).rpartition("/")
    if not name or not parent.partition("://")[2]:
        raise ValueError(f"{url}: names no files. Fix: give a prefix such as s3://bucket/corpus/train.")
    return Store(parent), name


def remote_manifest(url: str) -> dict[str, Any]:
    """The manifest beside the token files at a store; empty if there is none."""
    store, name = split_url(url)
    for manifest in (f"{name}.manifest.json", "manifest.json"):
        try:
            content = json.loads(store.read(manifest))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ValueError(f"{store.url}/{manifest}: is damaged ({error}). Fix: push it again.") from None
        return content if isinstance(content, dict) else {}
    return {}


def find_tokens(url: str) -> dict[str, StoredFile]:
    """The token files of a prefix at a store, by suffix. Raises ValueError if one is missing or access is
    refused, ConnectionError if the store keeps failing.
    """
    store, name = split_url(url)
    found = {}
    for suffix in (".bin", ".idx"):
        file = store.find(name + suffix)
        if file is None:
            raise ValueError(f"{url}: there is no {store.url}/{name}{suffix}. Fix: correct the URL.")
        found[suffix] = file
    return found


def ensure_index(url: str, data_dir: Path) -> str:
    """Copies what there is beside the tokens, once for each version of the files at the store. Returns the
    prefix here, for `TokenFiles` and `open_tokens`. Raises as `find_tokens`.
    """
    store, name = split_url(url)
    found = find_tokens(url)
    remote = _Remote(f"{store.url}/{name}.bin", found[".bin"].bytes, found[".bin"].version)
    key = xxhash.xxh3_64_hexdigest(json.dumps([asdict(remote), asdict(found[".idx"])]).encode())[:8]
    folder = data_dir / "remote" / f"{name}_{key}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / f"{name}.remote.json"
    with FileLock(folder / ".lock"):
        if not facts.exists():
            logger.info("%s: copying its index to %s", url, folder)
            files = {f"{name}.idx": found[".idx"]}
            if manifest := store.find(f"{name}.manifest.json"):
                files[f"{name}.manifest.json"] = manifest
            with progress(f"index of {name}", sum(file.bytes for file in files.values())) as advance:
                fetch(store, files, folder, advance)
            num_blocks = -(-remote.bytes // _BLOCK_BYTES)
            for suffix, size in (("blocks", remote.bytes), ("hashes", num_blocks * _HASH_BYTES)):
                with (folder / f"{name}.{suffix}").open("wb") as file:
                    file.truncate(size)  # no disk until something is written
            write_json(facts, asdict(remote))
    return str(folder / name)


def _remote_of(prefix: str | Path) -> _Remote | None:
    path = Path(f"{prefix}.remote.json")
    return _Remote(**read_json(path, fix="remove its folder")) if path.is_file() else None


def bin_bytes(prefix: str | Path) -> int | None:
    """Size of a prefix's tokens, here or at a store; None if there are none."""
    path = Path(f"{prefix}.bin")
    if path.is_file():
        return path.stat().st_size
    remote = _remote_of(prefix)
    return remote.bytes if remote else None


# Reading


class RemoteTokens:
    """Tokens of a .bin at a store, sliced like an array; bytes are kept here once they are read. Cheap to
    make: it opens two files.
    """

    def __init__(self, prefix: str | Path, remote: _Remote, dtype: np.dtype[Any]):
        self.num_bytes, self._version, self._dtype = remote.bytes, remote.version, dtype
        parent, _, self._name = remote.url.rpartition("/")
        self._store = Store(parent)
        self._files = [os.open(f"{prefix}.{suffix}", os.O_RDWR) for suffix in ("blocks", "hashes")]
        self._sound: set[int] = set()  # blocks whose hash this process has compared
        self._keeps = True

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", ()):
            os.close(descriptor)

    def __getitem__(self, place: slice) -> npt.NDArray[Any]:
        begin, end = (index * self._dtype.itemsize for index in (place.start, place.stop))
        parts = []
        for block in range(begin // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)) if end > begin else ():
            start = block * _BLOCK_BYTES
            low, high = max(begin - start, 0), min(end - start, _BLOCK_BYTES)
            if (part := self._kept(block, low, high)) is None:
                data = self._store.read(self._name, start, start + self._size(block))
                found = self._store.find(self._name)
                # after the read, as the file may have been replaced meanwhile
                if found is None or found.version != self._version:
                    rule = "is another file than when this process began to read it"
                    fix = "start again; the run continues if the tokens are the same"
                    raise ValueError(f"{self._store.url}/{self._name}: {rule}. Fix: {fix}.")
                if self._keeps:
                    self._keep(block, data)
                part = data[low:high]
            parts.append(part)
        return np.frombuffer(b"".join(parts), self._dtype)

    def each(self, places: Sequence[int]) -> npt.NDArray[Any]:
        """Single tokens, without the blocks that they are in."""
        size = self._dtype.itemsize
        found = self.read_directly([(place * size, (place + 1) * size) for place in places])
        return np.frombuffer(b"".join(found), self._dtype)

    def read_directly(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Bytes of some ranges, several at a time, and without keeping them."""
        return self._store.read_ranges(self._name, ranges)

    def _size(self, block: int) -> int:
        return min(_BLOCK_BYTES, self.num_bytes - block * _BLOCK_BYTES)

    def _kept(self, block: int, low: int, high: int) -> bytes | None:
        """Bytes of a block that was read before; None if it was not, or is not sound."""
        blocks, hashes = self._files
        start = block * _BLOCK_BYTES
        if block not in self._sound:
            known = os.pread(hashes, _HASH_BYTES, block * _HASH_BYTES)
            # compared once a process: a block does not change later
            if not any(known) or _hash(os.pread(blocks, self._size(block), start)) != known:
                return None
            self._sound.add(block)
        return os.pread(blocks, high - low, start + low)

    def _keep(self, block: int, data: bytes) -> None:
        disk = os.fstatvfs(self._files[0])
        try:
            left_free = min(_LEFT_FREE_BYTES, disk.f_frsize * disk.f_blocks // 10)
            if disk.f_frsize * disk.f_bavail < left_free:
                raise OSError(errno.ENOSPC, f"less than {left_free / 2**30:.3g} GiB of the disk is free")
            os.pwrite(self._files[0], data, block * _BLOCK_BYTES)
            # after the block: a hash without it would be wrong, a block without hash is read again
            os.pwrite(self._files[1], _hash(data), block * _HASH_BYTES)
        except OSError as error:
            self._keeps = False
            what = "%s: blocks are not kept from here on, so that they are read again: %s"
            logger.warning(what, self._name, error.strerror)


def _hash(data: bytes) -> bytes:
    # 0 stands for a block that is not there
    return max(1, xxhash.xxh3_64_intdigest(data)).to_bytes(_HASH_BYTES, "little")


def open_remote(prefix: str, dtype: np.dtype[Any]) -> RemoteTokens | None:
    """The tokens of a prefix if they are at a store."""
    remote = None if Path(f"{prefix}.bin").is_file() else _remote_of(prefix)
    return RemoteTokens(prefix, remote, dtype) if remote else None


def open_tokens(prefix: str, dtype: np.dtype[Any]) -> npt.NDArray[Any] | RemoteTokens:
    """The tokens of a prefix, mapped, or at a store."""
    remote = open_remote(prefix, dtype)
    return np.memmap(f"{prefix}.bin", dtype, mode="r") if remote is None else remote


def read_ranges(prefix: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Bytes of a prefix's .bin, range after range."""
    if (remote := open_remote(prefix, np.dtype(np.uint8))) is not None:
        yield from remote.read_directly(list(ranges))
        return
    with Path(f"{prefix}.bin").open("rb") as file:
        for begin, end in ranges:
            file.seek(begin)
            yield file.read(end - begin)
