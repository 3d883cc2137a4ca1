"""Plain torch files whose tensors are views of larger storages, written again without what nobody sees:
`moe-exp ckpt shrink`.

`torch.save` writes the whole storage of a tensor. A row of a matrix, a rank's part of a model or one layer of
a flat buffer so takes the bytes of all of it. Here every tensor gets a storage of its own size. Tensors that
are one and the same view (tied weights) stay so, and views that overlap in part keep a common storage, cut to
what they cover. Nothing but tensors and plain containers is read.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import MANIFEST
from moe_exp.config import problem

PATTERNS = ("*.pt", "*.pth", "*.bin")


@dataclass
class ShrunkFile:
    """What became of a file. `before_bytes` and `after_bytes` are those of the file; `problem` says why it
    was left alone.
    """

    path: Path
    before_bytes: int
    after_bytes: int
    problem: str = ""

    @property
    def gain_bytes(self) -> int:
        """Bytes that are saved."""
        return self.before_bytes - self.after_bytes


def torch_files(path: Path, patterns: Sequence[str] = PATTERNS, *, recursive: bool = True) -> list[Path]:
    """The files that a path means: itself, or those in it whose names fit a pattern.

    Raises:
        ValueError: where there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"PATH={path}: is not there. Fix: name a file or a folder.")
    for pattern in patterns:
        if not pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            rule = "is a pattern of names inside of PATH"
            raise ValueError(
                problem("pattern", pattern, rule, "give one such as '*.pt', and the folder as PATH")
            )
    found = {
        file
        for pattern in patterns
        for file in (path.rglob(pattern) if recursive else path.glob(pattern))
        if file.is_file()
    }
    if not found:
        raise ValueError(
            f"PATH={path}: has no files like {' '.join(patterns)}. Fix: name another folder, or give"
            " --pattern."
        )
    return sorted(found)


def shrink(path: Path, *, target: Path | None = None, dry_run: bool = False) -> ShrunkFile:
    """Writes a file again, smaller, once what was written has been read back and compared; leaves it alone
    where nothing is gained.

    Args:
        path: of a file that torch.save wrote.
        target: of the new file, which must not exist; None: in the place of the old one, with its permissions
            and time.
        dry_run: only work out what would be gained.
    """
    before = path.stat().st_size
    if target is None and (path.parent / MANIFEST).exists():
        return ShrunkFile(path, before, before, f"belongs to a checkpoint, whose {MANIFEST} has its checksum")
    try:
        loaded = _load(path)
        tensors = _tensors_of(loaded)
    except Exception as error:  # whatever a damaged or foreign file does to the unpickler
        return ShrunkFile(path, before, before, _reason(error))
    compact = _Compact(tensors)
    if compact.gain_bytes <= 0:
        return ShrunkFile(path, before, before)
    if dry_run:
        return ShrunkFile(path, before, max(0, before - compact.gain_bytes))
    place = path.resolve() if target is None else target  # of a link, what it points to
    if target is not None and target.exists():
        return ShrunkFile(path, before, before, f"{target} exists already")
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        problem = _write(temporary, loaded, compact, path)
        if problem:
            return ShrunkFile(path, before, before, problem)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
    return ShrunkFile(path, before, place.stat().st_size)


def _write(temporary: Path, loaded: Any, compact: _Compact, path: Path) -> str:
    """Writes the file and reads it back; what is wrong with it, or nothing."""
    state = path.stat()
    with temporary.open("wb") as file:
        torch.save(compact.replaced(loaded), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(state.st_mode & 0o7777)
    os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
    if temporary.stat().st_size >= state.st_size:
        return "nothing is gained"
    different = difference(_load(path), _load(temporary))
    return f"what was written is not what was read ({different})" if different else ""


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about storages of old files
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "Unsupported global: GLOBAL " in text:
        name = text.partition("Unsupported global: GLOBAL ")[2].split()[0]
        return f"holds more than tensors and plain containers ({name}), and is not read"
    if isinstance(error, _Unsupported):
        return text
    return "is no file of torch.save, or damaged"


class _Unsupported(ValueError):
    pass


def _tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors in nested containers, in order; the same object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        if (
            value.layout is not torch.strided
            or value.is_quantized
            or type(value) not in (Tensor, torch.nn.Parameter)
        ):
            raise _Unsupported(f"holds a tensor of another kind ({type(value).__name__}, {value.layout})")
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors_of(item, seen)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_of(item, seen)]
    return []


View = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]  # storage, type, shape, strides, offset


def _view(tensor: Tensor) -> View:
    return (
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of the storage that a tensor covers, and the one after the last."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    last: int = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


@dataclass
class _Island:
    """Views of one storage that overlap, each with one before it: they go on sharing what they cover.

    All are of one type: torch.save refuses views of a storage as several.
    """

    low: int
    high: int
    members: list[Tensor] = field(default_factory=list)

    @property
    def is_one_view(self) -> bool:
        return len({_view(tensor) for tensor in self.members}) == 1

    @property
    def num_bytes(self) -> int:
        """What the island takes when it is written again."""
        covered = self.high - self.low
        return min(covered, self.members[0].nbytes) if self.is_one_view else covered

    def parted(self) -> list[_Island]:
        """One island for each view where no two of them share an element, as columns of a matrix do not;
        itself otherwise.
        """
        views: dict[View, list[Tensor]] = {}
        for tensor in self.members:
            views.setdefault(_view(tensor), []).append(tensor)
        if len(views) == 1 or self._share_elements([members[0] for members in views.values()]):
            return [self]
        return [_Island(*_extent(members[0]), members) for members in views.values()]

    def _share_elements(self, tensors: list[Tensor]) -> bool:
        itemsize = tensors[0].itemsize
        marks = torch.zeros((self.high - self.low) // itemsize, dtype=torch.bool)
        for tensor in tensors:
            sizes = [
                1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ]
            seen = marks.as_strided(
                sizes, tensor.stride(), int(tensor.storage_offset()) - self.low // itemsize
            )
            if bool(seen.any()):
                return True
            try:
                seen.fill_(True)
            except RuntimeError:  # it shares elements with itself, as torch.as_strided can make it
                return True
        return False


class _Compact:
    """Tensors and what takes their place."""

    def __init__(self, tensors: list[Tensor]):
        storages: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._islands = [island for members in storages.values() for island in _islands(members)]
        held = sum(members[0].untyped_storage().nbytes() for members in storages.values())
        self.gain_bytes = held - sum(island.num_bytes for island in self._islands)
        self._tensors: dict[int, Tensor] = {}

    def replaced(self, value: Any) -> Any:
        """`value` with the new tensors. Its containers are changed, so that attributes of theirs stay, but
        for tuples.
        """
        for island in self._islands:
            self._tensors |= _copied(island)
        return self._replaced(value, {})

    def _replaced(self, value: Any, done: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            return self._tensors[id(value)]
        if id(value) in done:
            return done[id(value)]
        if isinstance(value, dict):
            done[id(value)] = value
            for key, item in list(value.items()):
                value[key] = self._replaced(item, done)
        elif isinstance(value, list):
            done[id(value)] = value
            value[:] = [self._replaced(item, done) for item in value]
        elif type(value) is tuple:
            done[id(value)] = value = tuple(self._replaced(item, done) for item in value)
        return value


def _islands(members: list[Tensor]) -> Iterator[_Island]:
    current: _Island | None = None
    for tensor in sorted(members, key=_extent):
        low, high = _extent(tensor)
        if current is not None and (low < current.high or _view(tensor) == _view(current.members[-1])):
            current.high = max(current.high, high)
            current.members.append(tensor)
            continue
        if current is not None:
            yield from current.parted()
        current = _Island(low, high, [tensor])
    if current is not None:
        yield from current.parted()


def _copied(island: _Island) -> dict[int, Tensor]:
    """The island's tensors by the id of the old ones."""
    first = island.members[0]
    if island.num_bytes == first.nbytes and island.is_one_view:
        copy = first.detach().clone()
        copies = [copy.as_strided(copy.shape, copy.stride()) for _ in island.members]
    else:
        storage = torch.UntypedStorage(island.high - island.low)
        storage.copy_(first.untyped_storage()[island.low : island.high])
        copies = []
        for tensor in island.members:
            offset = tensor.storage_offset() - island.low // tensor.itemsize
            copies.append(
                torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())
            )
    return {id(tensor): _like(tensor, copy) for tensor, copy in zip(island.members, copies, strict=True)}


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def difference(a: Any, b: Any) -> str:
    """Where two loaded files differ in structure, values or in what is shared; nothing where they do not."""
    found = _difference(a, b, "")
    if found:
        return found
    views: list[dict[View, int]] = [{}, {}]
    for index, pair in enumerate(zip(_tensors_of(a), _tensors_of(b), strict=True)):
        firsts = [known.setdefault(_view(tensor), index) for known, tensor in zip(views, pair, strict=True)]
        if firsts[0] != firsts[1]:
            return f"tensor {index} is shared with another one in one of them"
    return ""


def _difference(a: Any, b: Any, where: str) -> str:
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, Tensor):
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.requires_grad == b.requires_grad
            and _same_bits(a, b)
        )
        return "" if same else f"{where}: tensors"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{where}: keys"
        return next((found for key in a if (found := _difference(a[key], b[key], f"{where}[{key!r}]"))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{where}: lengths"
        return next((found for i in range(len(a)) if (found := _difference(a[i], b[i], f"{where}[{i}]"))), "")
    return "" if a == b or (isinstance(a, float) and math.isnan(a)) else f"{where}: values"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0:
        return True
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(bits[0], bits[1])
