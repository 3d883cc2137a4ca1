"""Writes safetensors shards with one tensor in memory; the safetensors package needs all of a file.

Format (https://github.com/huggingface/safetensors): header length (8 bytes, little-endian), header (JSON,
padded with spaces to a multiple of 8 bytes), values of tensor after tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from moe_exp.checkpoint.hf.model_folder import DTYPES, INDEX, SINGLE
from moe_exp.host.files import write_json

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _in_files(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    num_bytes = 0
    for entry in entries:
        if shards[-1] and num_bytes + entry.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(entry)
        num_bytes += entry.num_bytes
    return shards


class ShardWriter:
    """Writes tensors in the order of `entries` into an existing folder, at most `max_bytes` of them per file;
    a larger tensor gets its own file. `finish` writes the index if there is more than one file.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], *, max_bytes: int):
        self.folder = folder
        self._shards = _in_files(entries, max_bytes)
        self._expected = [(index, entry) for index, shard in enumerate(self._shards) for entry in shard]
        self._next = 0
        self._file: IO[bytes] | None = None
        self._open_index = -1

    def add(self, name: str, values: Tensor) -> None:
        """Writes the next tensor."""
        index, entry = self._expected[self._next]
        assert (name, tuple(values.shape), values.dtype) == (entry.name, entry.shape, entry.dtype)
        if index != self._open_index:
            self._begin(index)
        assert self._file is not None
        self._file.write(values.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        self._next += 1

    def finish(self) -> None:
        """Closes the last file and writes the index."""
        assert self._next == len(self._expected)
        self.close()
        if len(self._shards) > 1:
            weight_map = {entry.name: self._name(index) for index, entry in self._expected}
            total = sum(entry.num_bytes for _, entry in self._expected)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.folder / INDEX, index)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, index: int) -> None:
        self.close()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in self._shards[index]:
            end = start + entry.num_bytes
            offsets = {"data_offsets": [start, end]}
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), **offsets}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = (self.folder / self._name(index)).open("wb")
        self._open_index = index
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _name(self, index: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
