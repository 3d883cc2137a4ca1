"""`moe-exp ckpt shrink`: rewrites `torch.save` files without unused storage bytes.

`torch.save` writes a tensor's whole storage, even if the tensor is only one row of a matrix.
`shrink` gives every tensor a storage of its own size. Identical views (tied weights) stay shared; overlapping
views share one storage that covers their range. Only tensors and plain containers are supported.
"""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import MANIFEST
from moe_exp.config import setting_error

PATTERNS = ("*.pt", "*.pth", "*.bin")


@dataclass
class ShrunkFile:
    """File sizes before and after `shrink`; `problem` is the reason why a file was not changed."""

    path: Path
    before_bytes: int
    after_bytes: int
    problem: str = ""

    @property
    def gain_bytes(self) -> int:
        return self.before_bytes - self.after_bytes


def torch_files(path: Path, patterns: Sequence[str] = PATTERNS, *, recursive: bool = True) -> list[Path]:
    """Lists `path` if it is a file, else all matching files in this folder. ValueError if no file matches."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise setting_error("PATH", path, "does not exist", "specify a file or a folder")
    for pattern in patterns:
        if not pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            fix = "use a pattern such as '*.pt', and pass the folder as PATH"
            raise setting_error("pattern", pattern, "must match files in the folder PATH", fix)
    glob = path.rglob if recursive else path.glob
    found = sorted({file for pattern in patterns for file in glob(pattern) if file.is_file()})
    if not found:
        fix = "specify another folder, or pass --pattern"
        raise setting_error("PATH", path, f"has no files that match {' '.join(patterns)}", fix)
    return found


def shrink(path: Path, *, target: Path | None = None, dry_run: bool = False) -> ShrunkFile:
    """Rewrites a torch.save file if the new file is smaller and contains the same values. The new file is
    written to `target` (must not exist); by default, it replaces `path`. Permissions and times are kept.
    """
    before = path.stat().st_size
    if target is None and (path.parent / MANIFEST).exists():
        why = f"belongs to a checkpoint whose {MANIFEST} has its checksum: use ckpt reshape --weights-only or"
        return ShrunkFile(path, before, before, f"{why} ckpt prune instead")
    try:
        loaded = _load(path)
        tensors = _tensors_of(loaded)
    # For a damaged or foreign file, the unpickler can raise any exception.
    except Exception as error:
        text = " ".join(str(error).split())
        reason = text if isinstance(error, _Unsupported) else "is not a file of torch.save, or is damaged"
        if named := text.partition("Unsupported global: GLOBAL ")[2].split():
            reason = f"contains more than tensors and plain containers ({named[0]})"
        return ShrunkFile(path, before, before, reason)
    islands = list(_islands_of(tensors))
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    gain_bytes = sum(storages.values()) - sum(island.num_bytes for island in islands)
    if gain_bytes <= 0:
        return ShrunkFile(path, before, before)
    if dry_run:
        return ShrunkFile(path, before, max(0, before - gain_bytes))
    # For a symbolic link, the file it points to is replaced, not the link.
    place = path.resolve() if target is None else target
    if target is not None and target.exists():
        return ShrunkFile(path, before, before, f"{target} already exists")
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        if problem := _write(temporary, loaded, islands, path):
            return ShrunkFile(path, before, before, problem)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
    return ShrunkFile(path, before, place.stat().st_size)


def _write(temporary: Path, loaded: Any, islands: Sequence["_Island"], path: Path) -> str:
    """Writes and rereads a smaller copy of `path`. Returns what went wrong, or an empty string on success."""
    state = path.stat()
    memo: dict[int, Any] = {}
    for island in islands:
        memo |= island.copied()
    with temporary.open("wb") as file:
        # deepcopy takes the copy of a tensor from `memo`, so it copies only the containers.
        torch.save(deepcopy(loaded, memo), file)
        memo.clear()  # frees the copies before both files are loaded
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(state.st_mode & 0o7777)
    os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
    if temporary.stat().st_size >= state.st_size:
        return "would not become smaller"
    different = difference(_load(path), _load(temporary))
    return f"the written file differs from the original ({different})" if different else ""


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about the storage types of old files
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # files from before PyTorch 1.6 cannot be memory-mapped
        except RuntimeError:
            return torch.load(path, map_location="cpu", weights_only=True)


class _Unsupported(ValueError):
    pass


def _nodes(value: Any, where: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields (key path, item) for `value` and all nested items, in order; enters each container once."""
    yield where, value
    seen = set() if seen is None else seen
    if isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _nodes(item, f"{where}[{key!r}]", seen)


def _tensors_of(value: Any) -> list[Tensor]:
    tensors = [node for _, node in _nodes(value) if isinstance(node, Tensor)]
    for one in tensors:
        is_plain = one.layout is torch.strided and not one.is_quantized
        if not is_plain or type(one) not in (Tensor, torch.nn.Parameter):
            raise _Unsupported(f"contains an unsupported tensor ({type(one).__name__}, {one.layout})")
    return tensors


View = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]  # storage, type, shape, strides, offset


def _view(tensor: Tensor) -> View:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return tensor.untyped_storage()._cdata, tensor.dtype, *place


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Range of bytes [first, end) that a tensor covers in its storage."""
    if tensor.numel() == 0:
        return 0, 0
    first, axes = int(tensor.storage_offset()), zip(tensor.shape, tensor.stride(), strict=True)
    last: int = first + sum((size - 1) * stride for size, stride in axes)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


@dataclass
class _Island:
    """Overlapping views of one dtype (as torch.save requires). They share a storage in the new file."""

    low: int
    high: int
    members: list[Tensor] = field(default_factory=list)

    @property
    def is_one_view(self) -> bool:
        return len({_view(tensor) for tensor in self.members}) == 1

    @property
    def num_bytes(self) -> int:
        """Storage size in bytes after rewriting."""
        covered = self.high - self.low
        return min(covered, self.members[0].nbytes) if self.is_one_view else covered

    def parted(self) -> "list[_Island]":
        """Gives each view its own storage if the views (such as columns of a matrix) share no elements."""
        views: dict[View, list[Tensor]] = {}
        for tensor in self.members:
            views.setdefault(_view(tensor), []).append(tensor)
        if len(views) == 1 or self._share_elements([members[0] for members in views.values()]):
            return [self]
        return [_Island(*_extent(members[0]), members) for members in views.values()]

    def copied(self) -> dict[int, Tensor]:
        """Maps the `id` of each tensor to a compact copy of the tensor."""
        first = self.members[0]
        if self.num_bytes == first.nbytes and self.is_one_view:
            copy = first.detach().clone()
            copies = [copy.as_strided(copy.shape, copy.stride()) for _ in self.members]
        else:
            storage = torch.UntypedStorage(self.high - self.low)
            storage.copy_(first.untyped_storage()[self.low : self.high])
            copies = []
            for tensor in self.members:
                offset = tensor.storage_offset() - self.low // tensor.itemsize
                empty = torch.empty(0, dtype=tensor.dtype)
                copies.append(empty.set_(storage, offset, tensor.shape, tensor.stride()))
        found: dict[int, Tensor] = {}
        for tensor, copy in zip(self.members, copies, strict=True):
            like = torch.nn.Parameter(copy) if isinstance(tensor, torch.nn.Parameter) else copy
            found[id(tensor)] = like.requires_grad_(tensor.requires_grad)
        return found

    def _share_elements(self, tensors: list[Tensor]) -> bool:
        itemsize = tensors[0].itemsize
        marks = torch.zeros((self.high - self.low) // itemsize, dtype=torch.bool)
        for tensor in tensors:
            axes = zip(tensor.shape, tensor.stride(), strict=True)
            sizes = [1 if stride == 0 else size for size, stride in axes]
            offset = int(tensor.storage_offset()) - self.low // itemsize
            seen = marks.as_strided(sizes, tensor.stride(), offset)
            if bool(seen.any()):
                return True
            try:
                seen.fill_(True)
            # the tensor overlaps itself, as torch.as_strided allows
            except RuntimeError:
                return True
        return False


def _islands_of(tensors: Sequence[Tensor]) -> Iterator[_Island]:
    storages: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for members in storages.values():
        # Sorted by first byte, so that overlapping views are adjacent and become one island.
        found: list[_Island] = []
        for tensor in sorted(members, key=_extent):
            low, high = _extent(tensor)
            if found and (low < found[-1].high or _view(tensor) == _view(found[-1].members[-1])):
                found[-1].high = max(found[-1].high, high)
                found[-1].members.append(tensor)
            else:
                found.append(_Island(low, high, [tensor]))
        for island in found:
            yield from island.parted()


def difference(a: Any, b: Any) -> str:
    """Describes the first difference (structure, values, tensor sharing) of two loaded files; '' if equal."""

    def alike(a: Any, b: Any) -> bool:
        # Tensors are compared bit by bit. Containers are skipped, since _nodes also visits their items.
        if isinstance(a, Tensor):
            same = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            bits = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b))
            return same and (not a.numel() or torch.equal(*bits))
        return isinstance(a, dict | list | tuple) or a == b or (isinstance(a, float) and math.isnan(a))

    for (where, one), (other_place, other) in zip_longest(_nodes(a), _nodes(b), fillvalue=("nothing", None)):
        if where != other_place:
            return f"{where} and {other_place}: keys"
        if type(one) is not type(other):
            return f"{where}: {type(one).__name__} and {type(other).__name__}"
        if not alike(one, other):
            return f"{where}: {'tensors' if isinstance(one, Tensor) else 'values'}"
    views: list[dict[View, int]] = [{}, {}]
    for index, pair in enumerate(zip(_tensors_of(a), _tensors_of(b), strict=True)):
        firsts = [known.setdefault(_view(tensor), index) for known, tensor in zip(views, pair, strict=True)]
        if firsts[0] != firsts[1]:
            return f"tensor {index} is shared in only one of the files"
    return ""
