"""Reads the files of a `torch_dist` checkpoint chunk by chunk, in one process and without process groups.

torch.distributed.checkpoint defines the format. A tensor has a key, a shape and a dtype, and is divided into
chunks (non-overlapping boxes). A chunk is the output of `torch.save` at an offset in a `.distcp`
file. The pickle `.metadata` stores shapes and offsets. Other objects have keys such as
`rng_state/shard_0.0_1.1`. Each of these objects is a one-item list, also written by `torch.save`. Megatron
adds metadata.json (the name of the format) and common.pt (unsharded state). Since Megatron 0.19, the object
`common_state` replaces common.pt.

No code from files is executed: `.metadata` may use only the format's classes; other files may only use
tensors and plain values. Reading a chunk checks its CRC-32, which `torch.save` stores and `torch.load`
ignores.
"""

import contextlib
import io
import math
import operator
import os
import pickle
import re
import types
import zipfile
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from moe_exp.checkpoint.format.folders import unusable
from moe_exp.host.files import regular
from moe_exp.host.megatron_versions import COMMON_OBJECT

COMMON = "common.pt"
METADATA = ".metadata"
# Modules and classes that a .metadata may name.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("torch", "device"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
}  # fmt: skip
# Classes that Megatron-LM's common.pt may name, besides Megatron's own, which are replaced by `Inert` copies.
_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("builtins", "set"): set,
    ("builtins", "slice"): slice,
}
# Key, values, shape of the whole tensor and offsets.
TensorChunk = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]


class Box(NamedTuple):
    """A box of a tensor: start and size along every axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_values(self) -> int:
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Splits the values `start` to `stop` - 1 of a tensor of `shape` into boxes. The values are numbered in
    memory order. Each box is contiguous in memory. For n axes, there are at most 2n - 1 boxes. Example:
    `start` 2 and `stop` 10 of shape (4, 3):

        . . 0      (0, 2) of size 1 x 1
        1 1 1      (1, 0) of size 2 x 3
        1 1 1
        2 . .      (3, 0) of size 1 x 1
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    # The first and the last row may be covered partially; all rows between them form one box.
    in_part = [(first, begin, row if begin else 0), (last, 0, end)]
    if first == last:
        in_part = [(first, begin, end)]
    boxes = [
        Box((index, *box.offsets), (1, *box.sizes))
        for index, low, high in in_part
        for box in boxes_of_range(inner, low, high)
    ]
    if (whole := first + (begin > 0)) < last:
        boxes.append(Box((whole, *(0 for _ in inner)), (last - whole, *inner)))
    return sorted(boxes)


def intersection(one: Box, other: Box) -> Box | None:
    """Overlap of two boxes of a tensor, or None if they do not overlap."""
    lows = tuple(map(max, one.offsets, other.offsets))
    ends = ([a + n for a, n in zip(box.offsets, box.sizes, strict=True)] for box in (one, other))
    sizes = tuple(high - low for low, high in zip(lows, map(min, *ends), strict=True))
    return None if any(size <= 0 for size in sizes) else Box(lows, sizes)


def slices(box: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Slices that select `box` within a larger box that starts at `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.offsets, box.sizes, origin, strict=True))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 pickles paths under a private module name that other versions do not have.
        if module == "pathlib._local":
            module = "pathlib"
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of enums by it
            return operator.getitem
        if (module, name) in _CLASSES or (module in _MODULES and "." not in name):
            found = super().find_class(module, name)
            # Only classes defined in these modules are allowed, not names that the modules import.
            if module not in _MODULES or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which this file format does not allow")


def read_metadata(folder: Path) -> Metadata:
    """Unpickles only the format's classes from `.metadata`. Raises ValueError if the file is damaged."""
    path = folder / METADATA
    with _explained(path), regular(path).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it contains a {type(metadata).__name__}")
    return metadata


def read_common(folder: Path) -> dict[str, Any]:
    """Reads the unsharded state: optimizer settings, schedule, progress, config. Megatron-LM's arguments
    become `Inert` copies, which have data but no code. Raises ValueError if the file is missing, is damaged,
    or refers to code outside Megatron-LM.
    """
    path = folder / COMMON
    # Since Megatron 0.19, an object replaces this file.
    if not path.exists() and (folder / METADATA).exists():
        reader = CheckpointReader(folder)
        if COMMON_OBJECT in reader.objects:
            return dict(reader.read_object(COMMON_OBJECT)[0])
    with _explained(path), regular(path).open("rb") as file:
        return dict(_load_foreign(file))


class Inert:
    """Stand-in for a pickled object: has the object's attributes or constructor arguments, but no code."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class _InertUnpickler(pickle.Unpickler):
    """Reads Megatron-LM's arguments (an argparse.Namespace with enums) without importing Megatron."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) == ("argparse", "Namespace") or module.partition(".")[0] == "megatron":
            return type(name, (Inert,), {})
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not an allowed type")


# torch.load expects a module with these names.
_INERT_PICKLE = types.SimpleNamespace(
    Unpickler=_InertUnpickler,
    load=lambda file, **options: _InertUnpickler(file, **options).load(),
    __name__="inert",
)


def _load_foreign(file: IO[bytes]) -> Any:
    """Loads tensors and plain values; Megatron-LM's objects become `Inert` copies, which have no code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # Files from before PyTorch 1.6 are not zip archives, and PyTorch reads them without `pickle_module`.
        if not zipfile.is_zipfile(file):
            raise
        file.seek(0)
        return torch.load(file, map_location="cpu", pickle_module=_INERT_PICKLE, weights_only=False)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error raised while reading `path` into a ValueError that names the file."""
    try:
        yield
    # Depending on the damage, PyTorch raises RuntimeError, UnpicklingError, EOFError and others.
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            reason = "it is missing"
        elif found := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text):
            reason = f"it refers to {found[1]}, which this file format does not allow"
        else:
            reason = text[:200] or type(error).__name__
        raise unusable(path, f"cannot be used ({reason})") from None


@dataclass(frozen=True)
class Chunk:
    """A stored box of a tensor, and the position of the box's bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """Key, shape, dtype and chunks of a checkpoint's tensor, without its values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader:
    """Reads an iter_ folder; values are read on request.

    If `keep_bytes` > 0, the last chunk read stays in memory, whatever its size. Earlier chunks also stay in
    memory while the total size is at most `keep_bytes`. This helps callers that read a chunk slice by slice.
    If `checksums` is false, reads are faster but do not check CRC-32s. Raises ValueError if the metadata is
    damaged.
    """

    def __init__(self, folder: Path, *, keep_bytes: int = 0, checksums: bool = True):
        self.folder, self.keep_bytes, self.checksums = folder, keep_bytes, checksums
        self._kept: OrderedDict[Chunk, Tensor] = OrderedDict()
        self._ordered: dict[str, tuple[list[int], list[Chunk], int]] = {}
        metadata = read_metadata(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Chunk] = {}
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                chunks = tuple(self._chunk(metadata, key, c.offsets, c.sizes) for c in value.chunks)
                stored = StoredTensor(key, tuple(value.size), value.properties.dtype, chunks)
                # A damaged shape, such as 2**40 rows, would exhaust memory when its rows are listed.
                held, rows = sum(chunk.num_bytes for chunk in chunks), max(stored.shape, default=0)
                if stored.num_bytes > held or (stored.num_bytes <= 0 and rows > 2**20):
                    shape = "x".join(map(str, stored.shape))
                    raise unusable(folder, f"shape of {key} is {shape}, but only {held} bytes are stored")
                self.tensors[key] = stored
            else:
                self.objects[key] = self._chunk(metadata, key, None, ())

    def _chunk(
        self, metadata: Metadata, key: str, offsets: Sequence[int] | None, sizes: Sequence[int]
    ) -> Chunk:
        place, at = metadata.storage_data.get(MetadataIndex(key, offsets)), tuple(offsets or ())
        if place is None:
            raise unusable(self.folder, f"does not record the position of {key} {at or ''}")
        # A damaged or malicious file must not cause reads outside the folder.
        if Path(place.relative_path).name != place.relative_path:
            raise unusable(self.folder, f"places {key} outside the folder, in {place.relative_path}")
        return Chunk(at, tuple(sizes), place.relative_path, place.offset, place.length)

    def read(self, key: str, offsets: Sequence[int] = (), sizes: Sequence[int] = ()) -> Tensor:
        """Reads a tensor, or a part of shape `sizes` at `offsets`. KeyError: unknown. ValueError: damaged."""
        stored = self.tensors[key]
        offsets, sizes = tuple(offsets) or (0,) * len(stored.shape), tuple(sizes) or stored.shape
        # Narrows the search by the first axis, since a stacked tensor has thousands of chunks.
        near: Sequence[Chunk] = stored.chunks
        if stored.shape and len(stored.chunks) > 1:
            if key not in self._ordered:
                ordered = sorted(stored.chunks, key=lambda chunk: chunk.offsets)
                starts = [chunk.offsets[0] for chunk in ordered]
                self._ordered[key] = starts, ordered, max(chunk.sizes[0] for chunk in ordered)
            starts, ordered, longest = self._ordered[key]
            first = bisect_right(starts, offsets[0] - longest)
            near = ordered[first : bisect_left(starts, offsets[0] + sizes[0])]
        # A request for exactly one chunk needs neither a copy nor a place in the cache.
        whole = next((chunk for chunk in near if (chunk.offsets, chunk.sizes) == (offsets, sizes)), None)
        if whole and whole not in self._kept:
            return self.read_chunk(stored, whole, keep=False)
        result = torch.empty(sizes, dtype=stored.dtype)
        filled = 0
        for chunk in near:
            if common := intersection(Box(offsets, sizes), Box(chunk.offsets, chunk.sizes)):
                source = self.read_chunk(stored, chunk)[slices(common, chunk.offsets)]
                result[slices(common, offsets)] = source
                filled += source.numel()
        if filled != result.numel():
            raise unusable(self.folder, f"only has {filled} of {result.numel()} values of {key}")
        return result

    def read_object(self, key: str) -> Any:
        """Reads an object; Megatron-LM's arguments become `Inert` copies, without their code."""
        return self._load(self.objects[key], foreign=key == COMMON_OBJECT)

    def common(self) -> dict[str, Any]:
        return read_common(self.folder)

    def read_chunk(self, stored: StoredTensor, chunk: Chunk, *, keep: bool = True) -> Tensor:
        """Reads a chunk. Raises ValueError if it is damaged. Do not modify the values: they may be cached."""
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return self._kept[chunk]
        # Evicts the oldest chunks before reading, to make room for the new one.
        num_bytes = math.prod(chunk.sizes) * stored.dtype.itemsize
        num_bytes += sum(value.nbytes for value in self._kept.values())
        while self._kept and num_bytes > self.keep_bytes:
            num_bytes -= self._kept.popitem(last=False)[1].nbytes
        value = self._load(chunk)
        if not isinstance(value, Tensor) or tuple(value.shape) != chunk.sizes or value.dtype != stored.dtype:
            raise unusable(self.folder / chunk.file, f"does not contain {stored.key} at its position")
        if keep and self.keep_bytes:
            self._kept[chunk] = value
        return value

    def _load(self, chunk: Chunk, *, foreign: bool = False) -> Any:
        path = self.folder / chunk.file
        with _explained(path), regular(path).open("rb") as file:
            window = cast(IO[bytes], _Window(file, chunk.start, chunk.num_bytes))
            if self.checksums:
                with zipfile.ZipFile(window) as archive:
                    if (name := archive.testzip()) is not None:
                        raise ValueError(f"the checksum of {name} is wrong")
                window.seek(0)
            if foreign:
                return _load_foreign(window)
            return torch.load(window, map_location="cpu", weights_only=True)


class _Window(io.RawIOBase):
    """File object for a byte range of a file, so that PyTorch can read a chunk without copying its bytes."""

    def __init__(self, file: IO[bytes], start: int, num_bytes: int):
        super().__init__()
        size = os.fstat(file.fileno()).st_size
        if start < 0 or num_bytes < 0 or start + num_bytes > size:
            place = f"bytes {start} to {start + num_bytes}"
            raise ValueError(f"the file has {size} bytes, but the metadata lists a chunk at {place}")
        self._file, self._start, self._num_bytes, self._position = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._num_bytes - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return int(count)
