"""Reads and writes the files of a `torch_dist` checkpoint piece by piece, on one process and without process groups.

The format is that of torch.distributed.checkpoint. A tensor has a key, a shape and a type, and lies in chunks: boxes that do not
overlap and fill it. A chunk is what `torch.save` writes, at an offset of a `.distcp` file. `.metadata`, a pickle, holds the shapes
and the places. Beside tensors there are objects: `torch.save` of a list with one item, under keys such as `rng_state/shard_0.0_1.1`.
Megatron adds common.pt (everything that is not sharded) and metadata.json (the name of the format).

Nothing here runs code from a file: the pickle may name the classes of the format and no others, all else is `weights_only`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import json
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

COMMON = "common.pt"
METADATA = ".metadata"
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
# What a .metadata may be made of.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) in _CLASSES or (module in _MODULES and "." not in name):
            found = super().find_class(module, name)
            # Of those modules their own classes alone, not what they import.
            if module not in _MODULES or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of the format")


def read_metadata(folder: Path) -> Metadata:
    """`.metadata` of a checkpoint, unpickled with the classes of the format and no others.

    Raises:
        ValueError: where it is missing or damaged, or would run other code.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # a damaged pickle can raise whatever its opcodes happen to do
        reason = "it is missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: cannot be used ({reason}). Fix: use another checkpoint.") from None
    return metadata


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Writes `.metadata`, and metadata.json, by which Megatron knows the format."""
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
        _sync(file)
    with (folder / "metadata.json").open("w") as text:
        json.dump(_BACKEND, text)
        _sync(text)


def read_common(folder: Path) -> dict[str, Any]:
    """What is not sharded: optimizer settings, schedule, progress, config.

    Raises:
        ValueError: where the file is missing or damaged, or holds more than tensors and plain values.
    """
    with plain_settings(folder):
        return dict(_load(folder / COMMON))


def plain_settings(folder: Path) -> AbstractContextManager[None]:
    """Inside, `weights_only` takes what common.pt of Megatron-LM has beside plain values: its arguments, and enumerations in them."""
    found: list[Any] = []
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(folder / COMMON)
    except Exception:  # it is missing or damaged, as is said where it is read
        names = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        if name in ("argparse.Namespace", "types.SimpleNamespace", "signal.Signals"):
            found.append(getattr(importlib.import_module(module), attribute))
        elif module.startswith("megatron.core."):
            import moe_exp.megatron_cpu  # noqa: F401  # before megatron

            with contextlib.suppress(ImportError):
                value = getattr(importlib.import_module(module), attribute, None)
                found += [value] if isinstance(value, type) and issubclass(value, enum.Enum) else []
    return cast("AbstractContextManager[None]", torch.serialization.safe_globals(found))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... as the damage will have it
        reason = "it is missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: cannot be used ({reason}). Fix: use another checkpoint.") from None


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, without its values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader:
    """What is in a checkpoint; values are read where they are asked for.

    Args:
        folder: of one iteration.

    Raises:
        ValueError: where it is none, or its metadata is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        metadata = read_metadata(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Chunk] = {}
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                chunks = tuple(self._chunk(metadata, key, tuple(c.offsets), tuple(c.sizes)) for c in value.chunks)
                self.tensors[key] = StoredTensor(key, tuple(value.size), value.properties.dtype, chunks)
            else:
                self.objects[key] = self._chunk(metadata, key, None, ())

    def _chunk(self, metadata: Metadata, key: str, offsets: tuple[int, ...] | None, sizes: tuple[int, ...]) -> Chunk:
        try:
            place = metadata.storage_data[MetadataIndex(key, offsets)]
        except KeyError:
            raise ValueError(f"{self.folder}: says nothing of where {key} {offsets or ''} lies. Fix: use another checkpoint.") from None
        return Chunk(offsets or (), sizes, place.relative_path, place.offset, place.length)

    def read(self, key: str, offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        """A tensor, or the box of it at `offsets` with `sizes`; one chunk at a time is in memory beside the result.

        Raises:
            KeyError: when there is no such tensor.
            ValueError: where a file is damaged.
        """
        stored = self.tensors[key]
        offsets, sizes = tuple(offsets) or (0,) * len(stored.shape), tuple(sizes) or stored.shape
        result = torch.empty(sizes, dtype=stored.dtype)
        filled = 0
        for chunk in stored.chunks:
            lows = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            highs = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                source = self._read_chunk(chunk, stored)
                source = source[tuple(slice(low - b, high - b) for low, high, b in zip(lows, highs, chunk.offsets, strict=True))]
                result[tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, offsets, strict=True))] = source
                filled += source.numel()
        if filled != result.numel():
            raise ValueError(f"{self.folder}: lacks values of {key} ({filled} of {result.numel()}). Fix: use another checkpoint.")
        return result

    def chunks(self, key: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The chunks of a tensor, one after the other: offsets and values."""
        stored = self.tensors[key]
        for chunk in stored.chunks:
            yield chunk.offsets, self._read_chunk(chunk, stored)

    def read_object(self, key: str) -> Any:
        """An object of the checkpoint, or None."""
        return self._load(self.objects[key])

    def common(self) -> dict[str, Any]:
        """See `read_common`."""
        return read_common(self.folder)

    def _read_chunk(self, chunk: Chunk, stored: StoredTensor) -> Tensor:
        value = self._load(chunk)
        if not isinstance(value, Tensor) or tuple(value.shape) != chunk.sizes or value.dtype != stored.dtype:
            raise ValueError(f"{self.folder / chunk.file}: holds something else than {stored.key}. Fix: use another checkpoint.")
        return value

    def _load(self, chunk: Chunk) -> Any:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                return torch.load(io.BytesIO(file.read(chunk.num_bytes)), map_location="cpu", weights_only=True)
        except Exception as error:  # see _load above
            reason = "it is missing" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())[:200]
            raise ValueError(f"{path}: cannot be used ({reason}). Fix: use another checkpoint.") from None


class CheckpointWriter:
    """Writes a checkpoint chunk by chunk; nothing but the chunk at hand is in memory.

    `add_tensor`, `add_chunk`, `add_object` in any order, then `finish`. Without `finish` the folder is no checkpoint.

    Args:
        folder: that of the new checkpoint, empty or not there yet.
        file_bytes: a new file is begun where the current one has reached this size.
    """

    def __init__(self, folder: Path, *, file_bytes: int = 4 << 30):
        self.folder, self.file_bytes = folder, file_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: IO[bytes] | None = None
        self._num_files = 0

    def next_file(self) -> None:
        """The chunks that follow go to a file of their own: those of one rank of a layout, say."""
        self._close_file()

    def add_tensor(self, key: str, values: Tensor) -> None:
        """A whole tensor as one chunk."""
        self.add_chunk(key, values, shape=tuple(values.shape), offsets=(0,) * values.dim())

    def add_chunk(self, key: str, values: Tensor, *, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """The box at `offsets` of the tensor `key`, which has `shape`. The boxes of a tensor must fill it without overlap."""
        info = self._tensors.get(key)
        if info is None:
            properties = TensorProperties(dtype=values.dtype)
            info = self._tensors[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        if tuple(info.size) != tuple(shape) or info.properties.dtype != values.dtype:
            raise ValueError(f"{key}: chunks disagree, {tuple(shape)} {values.dtype} and {tuple(info.size)} {info.properties.dtype}.")
        info.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.size()))
        values = values.detach().contiguous()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()  # torch.save writes the whole storage of a view
        self._write(MetadataIndex(key, offsets), values)

    def add_object(self, key: str, value: Any) -> None:
        """An object under a full key such as `rng_state/shard_0.0_1.1`."""
        self._objects[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), [value])

    def finish(self, common: dict[str, Any]) -> None:
        """Checks that every tensor is filled, and writes `common` and what makes the folder a checkpoint.

        Raises:
            ValueError: where chunks of a tensor are missing.
        """
        self._close_file()
        for key, info in self._tensors.items():
            filled = sum(math.prod(chunk.sizes) for chunk in info.chunks)
            if filled != math.prod(info.size):
                raise ValueError(f"{key}: {filled} of {math.prod(info.size)} values were written.")
        metadata = Metadata({**self._tensors, **self._objects}, storage_data=self._places, storage_meta=StorageMeta(), version="1.0.0")
        with (self.folder / COMMON).open("wb") as file:
            torch.save(common, file)
            _sync(file)
        write_metadata(self.folder, metadata)

    def _write(self, index: MetadataIndex, value: Any) -> None:
        if self._file is None:
            self._file = (self.folder / f"__0_{self._num_files}.distcp").open("wb")
        start = self._file.tell()
        torch.save(value, self._file)
        end = self._file.tell()
        self._places[index] = _StorageInfo(Path(self._file.name).name, start, end - start)
        if end >= self.file_bytes:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
            self._file = None
            self._num_files += 1


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
