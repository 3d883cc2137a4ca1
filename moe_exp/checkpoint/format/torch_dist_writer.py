"""Writes the files of a `torch_dist` checkpoint (see torch_dist.py), in one or more processes."""

import contextlib
import json
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from moe_exp.checkpoint.format.folders import entry_of
from moe_exp.checkpoint.format.torch_dist import COMMON, METADATA
from moe_exp.host.files import HashedFile, replacing, write_atomically

_BACKEND = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip


@dataclass(frozen=True)
class WrittenFiles:
    """Facts about the files that one process has written, for `.metadata` and the manifest."""

    parts: dict[str, Any] = field(default_factory=dict)  # tensors with their chunks, and objects, by key
    places: dict[dcp.MetadataIndex, _StorageInfo] = field(default_factory=dict)  # their file positions
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # manifest entries of the files


def write_metadata(folder: Path, written: Iterable[WrittenFiles]) -> dict[str, dict[str, Any]]:
    """Writes `.metadata` for the files of all processes, and metadata.json with the format's name. Returns
    the manifest entries of all files. Raises ValueError if chunks of a tensor are missing.
    """
    whole = WrittenFiles()
    for one in written:
        for key, part in one.parts.items():
            if (known := whole.parts.setdefault(key, part)) is not part:
                known.chunks.extend(part.chunks)
        whole.places.update(one.places)
        whole.entries.update(one.entries)
    for key, part in whole.parts.items():
        if isinstance(part, dcp.TensorStorageMetadata):
            filled = sum(math.prod(chunk.sizes) for chunk in part.chunks)
            if filled != math.prod(part.size):
                raise ValueError(f"{key}: only {filled} of {math.prod(part.size)} values were written.")
    metadata = dcp.Metadata(whole.parts, storage_data=whole.places, storage_meta=dcp.StorageMeta())
    metadata.version = "1.0.0"
    with replacing(folder / METADATA) as file:
        pickle.dump(metadata, file)
    write_atomically(folder / "metadata.json", json.dumps(_BACKEND))
    return whole.entries | {name: entry_of(folder / name) for name in (METADATA, "metadata.json")}


class TorchDistWriter(contextlib.AbstractContextManager["TorchDistWriter"]):
    """Writes a checkpoint in chunks: call `add_chunk` and `add_object` in any order, then `finish`.
    Starts a new file when a file reaches `file_bytes`. A `with` block closes the open file on errors.

    If `rank` is given, this is one of several writers. Each writer writes one file to an existing folder and
    calls `next_file` instead of `finish`. Then one process calls `write_metadata` with the attribute
    `written` of every writer.
    """

    def __init__(self, folder: Path, *, rank: int | None = None, file_bytes: int = 4 << 30):
        self.folder, self.written = folder, WrittenFiles()
        self._rank, self._file_bytes = rank or 0, math.inf
        if rank is None:
            self._file_bytes = file_bytes
            folder.mkdir(parents=True, exist_ok=True)
        self._open = contextlib.ExitStack()
        self._name = ""
        self._file: HashedFile | None = None

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def next_file(self) -> None:
        """Syncs and closes the open file; further chunks go into a new file."""
        if self._file is not None:
            self._open.close()
            self.written.entries[self._name] = self._file.entry()
            self._file = None

    def add_chunk(self, key: str, values: Tensor, *, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Writes `values`, which start at `offsets` in a tensor of `shape`. Chunks must tile the tensor."""
        info = self.written.parts.get(key)
        if info is None:
            properties = dcp.TensorProperties(dtype=values.dtype)
            info = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
            self.written.parts[key] = info
        if tuple(info.size) != tuple(shape) or info.properties.dtype != values.dtype:
            kinds = f"{tuple(shape)} {values.dtype} and {tuple(info.size)} {info.properties.dtype}"
            raise ValueError(f"{key}: chunks must have the same tensor shape and dtype, not {kinds}.")
        info.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), values.size()))
        values = values.detach().cpu().contiguous()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            # torch.save would write the view's whole storage
            values = values.clone()
        self._write(dcp.MetadataIndex(key, offsets), values)

    def add_object(self, key: str, value: Any) -> None:
        """Writes an object under a full key such as `rng_state/shard_0.0_1.1`."""
        self.written.parts[key] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(key), [value])

    def add_common(self, common: dict[str, Any]) -> None:
        """Writes the unsharded state."""
        with HashedFile(self.folder / COMMON) as file:
            torch.save(common, cast("IO[bytes]", file))
        self.written.entries[COMMON] = file.entry()

    def finish(self, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Writes `common` and the metadata. Return value and errors are those of `write_metadata`."""
        self.next_file()
        self.add_common(common)
        return write_metadata(self.folder, [self.written])

    def _write(self, index: dcp.MetadataIndex, value: Any) -> None:
        if self._file is None:
            self._name = f"__{self._rank}_{len(self.written.entries)}.distcp"
            # hashed while it is written: reading it again would take as long as writing it
            self._file = self._open.enter_context(HashedFile(self.folder / self._name))
        start = self._file.tell()
        torch.save(value, cast("IO[bytes]", self._file))
        end = self._file.tell()
        self.written.places[index] = _StorageInfo(self._name, start, end - start)
        if end >= self._file_bytes:
            self.next_file()
