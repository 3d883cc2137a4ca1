"""Token files in an object store: the index is copied; token blocks are read on demand and cached.

    DATA_DIR/remote/NAME_1a2b3c4d/
        NAME.idx NAME.manifest.json    copies
        NAME.remote.json               URL, size and version of NAME.bin; written last
        NAME.blocks                    sparse copy of NAME.bin with the blocks read so far
        NAME.hashes                    XXH3-64 of each block; 0: not read yet

All ranks and workers of a host share the folder. No lock is needed: all writers of a block write the same
bytes. A block is used only if its hash matches, so blocks truncated by a crash or a full disk are read again.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator
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
_LEFT_FREE_BYTES = 20 * 2**30  # reserved for checkpoints; at most a tenth of the disk


@dataclass(frozen=True)
class _Remote:
    """Contents of NAME.remote.json."""

    url: str
    bytes: int
    version: str


def prefix_of(name: str) -> str:
    """Prefix of token files: `name` without .bin or .idx."""
    return name[:-4] if name.endswith((".bin", ".idx")) else name


def split_url(url: str) -> tuple[Store, str]:
    """Splits `url` into a Store (its folder) and the file name without .bin or .idx."""
    parent, _, name = prefix_of(url.rstrip("/")).rpartition("/")
    if not name or not parent.partition("://")[2]:
        raise ValueError(f"{url}: has no file name. Fix: set a prefix such as s3://bucket/corpus/train.")
    return Store(parent), name


def remote_manifest(url: str) -> dict[str, Any]:
    """Manifest of token files in a store; {} if missing."""
    store, name = split_url(url)
    for manifest in (f"{name}.manifest.json", "manifest.json"):
        try:
            content = json.loads(store.read(manifest))
        except FileNotFoundError:
            continue
        except ValueError as error:
            rule = f"is damaged ({error})"
            raise ValueError(f"{store.url}/{manifest}: {rule}. Fix: push the token files again.") from None
        return content if isinstance(content, dict) else {}
    return {}


def find_tokens(url: str) -> dict[str, StoredFile]:
    """The .bin and .idx files of a URL (a prefix in a store), by suffix. Raises ValueError if a file is
    missing or access is denied, ConnectionError if the store keeps failing.
    """
    store, name = split_url(url)
    found = {}
    for suffix in (".bin", ".idx"):
        if (file := store.find(name + suffix)) is None:
            raise ValueError(f"{url}: {store.url}/{name}{suffix} not found. Fix: correct the URL.")
        found[suffix] = file
    return found


def ensure_index(url: str, data_dir: Path) -> str:
    """Copies the index and manifest, unless this version of the files was copied before. Returns the local
    prefix for `TokenFiles` and `open_tokens`. Raises the errors of `find_tokens`.
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
            logger.info("copying the index of %s to %s", url, folder)
            files = {f"{name}.idx": found[".idx"]}
            if manifest := store.find(f"{name}.manifest.json"):
                files[f"{name}.manifest.json"] = manifest
            with progress(f"index of {name}", sum(file.bytes for file in files.values())) as advance:
                fetch(store, files, folder, advance)
            num_blocks = -(-remote.bytes // _BLOCK_BYTES)
            for suffix, size in (("blocks", remote.bytes), ("hashes", num_blocks * _HASH_BYTES)):
                with (folder / f"{name}.{suffix}").open("wb") as file:
                    file.truncate(size)  # a sparse file: takes no disk space until written
            write_json(facts, asdict(remote))
    return str(folder / name)


def _remote_of(prefix: str | Path) -> _Remote | None:
    """Contents of a prefix's .remote.json; None if the tokens are local or missing."""
    path = Path(f"{prefix}.remote.json")
    is_remote = path.is_file() and not Path(f"{prefix}.bin").is_file()
    return _Remote(**read_json(path, fix="remove its folder")) if is_remote else None


def bin_bytes(prefix: str | Path) -> int | None:
    """Size of a prefix's .bin, local or in a store; None if it does not exist."""
    path = Path(f"{prefix}.bin")
    if path.is_file():
        return path.stat().st_size
    remote = _remote_of(prefix)
    return remote.bytes if remote else None


# Reading


class RemoteTokens:
    """Tokens of a .bin in a store, which can be sliced like an array. Blocks are cached locally."""

    def __init__(self, prefix: str | Path, remote: _Remote, dtype: np.dtype[Any]):
        self.num_bytes, self._version, self._dtype = remote.bytes, remote.version, dtype
        parent, _, self._name = remote.url.rpartition("/")
        self._store = Store(parent)
        self._files = [os.open(f"{prefix}.{suffix}", os.O_RDWR) for suffix in ("blocks", "hashes")]
        self._sound: set[int] = set()  # blocks whose hash this process has verified
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
                # Checked after the read, because the file may be replaced at any time.
                if found is None or found.version != self._version:
                    rule = "was replaced while it was being read"
                    fix = "restart the run, which resumes if the tokens are the same"
                    raise ValueError(f"{self._store.url}/{self._name}: {rule}. Fix: {fix}.")
                if self._keeps:
                    self._keep(block, data)
                part = data[low:high]
            parts.append(part)
        return np.frombuffer(b"".join(parts), self._dtype)

    def _size(self, block: int) -> int:
        return min(_BLOCK_BYTES, self.num_bytes - block * _BLOCK_BYTES)

    def _kept(self, block: int, low: int, high: int) -> bytes | None:
        """Bytes `low` to `high` of a cached block; None if it is missing or damaged."""
        blocks, hashes = self._files
        start = block * _BLOCK_BYTES
        if block not in self._sound:
            known = os.pread(hashes, _HASH_BYTES, block * _HASH_BYTES)
            # Verified once per process, because cached blocks do not change.
            if not any(known) or _hash(os.pread(blocks, self._size(block), start)) != known:
                return None
            self._sound.add(block)
        return os.pread(blocks, high - low, start + low)

    def _keep(self, block: int, data: bytes) -> None:
        disk = os.fstatvfs(self._files[0])
        try:
            left_free = min(_LEFT_FREE_BYTES, disk.f_frsize * disk.f_blocks // 10)
            if disk.f_frsize * disk.f_bavail < left_free:
                raise OSError(errno.ENOSPC, f"less than {left_free / 2**30:.3g} GiB of free space")
            os.pwrite(self._files[0], data, block * _BLOCK_BYTES)
            # The hash comes last, so that it never describes a block that was not written.
            os.pwrite(self._files[1], _hash(data), block * _HASH_BYTES)
        except OSError as error:
            self._keeps = False
            what = "%s: blocks are no longer cached but read from the store each time: %s"
            logger.warning(what, self._name, error.strerror)


def _hash(data: bytes) -> bytes:
    # 0 marks a missing block.
    return max(1, xxhash.xxh3_64_intdigest(data)).to_bytes(_HASH_BYTES, "little")


def open_remote(prefix: str, dtype: np.dtype[Any]) -> RemoteTokens | None:
    """Tokens of a prefix in an object store; None if the tokens are local or do not exist."""
    return RemoteTokens(prefix, remote, dtype) if (remote := _remote_of(prefix)) else None


def open_tokens(prefix: str, dtype: np.dtype[Any]) -> npt.NDArray[Any] | RemoteTokens:
    """Tokens of a prefix: memory-mapped if local, otherwise read from a store."""
    remote = open_remote(prefix, dtype)
    return np.memmap(f"{prefix}.bin", dtype, mode="r") if remote is None else remote


def read_ranges(prefix: str, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yields the bytes of each range of a prefix's .bin. An object store is read in parallel, uncached."""
    if remote := _remote_of(prefix):
        folder, _, name = remote.url.rpartition("/")
        yield from Store(folder).read_ranges(name, list(ranges))
        return
    with Path(f"{prefix}.bin").open("rb") as file:
        for begin, end in ranges:
            file.seek(begin)
            yield file.read(end - begin)
