"""Writes the files of a `torch_dist` checkpoint (see torch_dist.py) chunk by chunk in one process."""

import json
import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from moe_exp.checkpoint.format.torch_dist import COMMON, METADATA
from moe_exp.host.files import replacing, write_atomically

_BACKEND = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip


def write_metadata(
    folder: Path, metadata: dcp.Metadata, places: dict[dcp.MetadataIndex, _StorageInfo]
) -> None:
    """Writes `.metadata` with the file position of each piece, and metadata.json with the format's name."""
    metadata.storage_data, metadata.storage_meta = places, dcp.StorageMeta()
    metadata.version = "1.0.0"
    with replacing(folder / METADATA) as file:
        pickle.dump(metadata, file)
    write_atomically(folder / "metadata.json", json.dumps(_BACKEND))


class TorchDistWriter:
    """Writes a checkpoint in chunks: call `add_tensor`, `add_chunk` and `add_object` in any order, then
    `finish`. Starts a new file after `file_bytes`. A `with` block closes the open file if there is an error.
    """

    def __init__(self, folder: Path, *, file_bytes: int = 4 << 30):
        self.folder, self.file_bytes = folder, file_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {}
        self._objects: dict[str, dcp.BytesStorageMetadata] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._file: IO[bytes] | None = None
        self._num_files = 0

    def __enter__(self) -> "TorchDistWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def next_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def add_tensor(self, key: str, values: Tensor) -> None:
        """Writes a whole tensor as one chunk."""
        self.add_chunk(key, values, shape=tuple(values.shape), offsets=(0,) * values.dim())

    def add_chunk(self, key: str, values: Tensor, *, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Writes the box `values` at `offsets` of a tensor of `shape`; boxes must fill it without overlap."""
        info = self._tensors.get(key)
        if info is None:
            properties = dcp.TensorProperties(dtype=values.dtype)
            info = self._tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
        if tuple(info.size) != tuple(shape) or info.properties.dtype != values.dtype:
            kinds = f"{tuple(shape)} {values.dtype} and {tuple(info.size)} {info.properties.dtype}"
            raise ValueError(f"{key}: chunks must have one shape and dtype, not {kinds}.")
        info.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), values.size()))
        values = values.detach().contiguous()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            # torch.save would write the view's whole storage
            values = values.clone()
        self._write(dcp.MetadataIndex(key, offsets), values)

    def add_object(self, key: str, value: Any) -> None:
        """Writes an object under a full key such as `rng_state/shard_0.0_1.1`."""
        self._objects[key] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(key), [value])

    def finish(self, common: dict[str, Any]) -> None:
        """Writes `common` and the metadata; ValueError if chunks of a tensor are missing."""
        self.next_file()
        for key, info in self._tensors.items():
            filled = sum(math.prod(chunk.sizes) for chunk in info.chunks)
            if filled != math.prod(info.size):
                raise ValueError(f"{key}: only {filled} of {math.prod(info.size)} values were written.")
        with replacing(self.folder / COMMON) as file:
            torch.save(common, file)
        write_metadata(self.folder, dcp.Metadata({**self._tensors, **self._objects}), self._places)

    def _write(self, index: dcp.MetadataIndex, value: Any) -> None:
        if self._file is None:
            self._file = (self.folder / f"__0_{self._num_files}.distcp").open("wb")
            self._num_files += 1
        start = self._file.tell()
        torch.save(value, self._file)
        end = self._file.tell()
        self._places[index] = _StorageInfo(Path(self._file.name).name, start, end - start)
        if end >= self.file_bytes:
            self.next_file()
