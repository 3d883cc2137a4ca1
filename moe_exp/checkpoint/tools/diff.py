"""Compares two checkpoints tensor by tensor, regardless of parallel layout and Megatron key style."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_exp.checkpoint.format.naming import KEEP_BYTES, LogicalTensor, logical_tensors, states
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.tools.info import iteration_of
from moe_exp.host.progress import progress

_BLOCK_BYTES = 32 << 20
_PLACES = ("run_name", "run_dir", "master_addr", "master_port", "node_rank")  # do not affect numbers
_MEMORIES = ("spike_windows",)  # recent losses, which differ whenever anything else differs


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between two checkpoints; `relative` is ||a - b|| / ||b||."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    num_equal: int
    max_abs: float
    relative: float

    @property
    def is_equal(self) -> bool:
        return self.num_equal == math.prod(self.shape)


@dataclass
class Comparison:
    """Result of `compare`; `settings` and `progress` hold differences as {name: (value in A, value in B)}."""

    tensors: list[TensorDifference] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    progress: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def num_equal(self) -> int:
        """Number of tensors with equal values in A and B."""
        return sum(tensor.is_equal for tensor in self.tensors)

    def worst(self, count: int) -> list[TensorDifference]:
        """Up to `count` unequal tensors, with the largest relative differences first."""
        differing = [tensor for tensor in self.tensors if not tensor.is_equal]
        return sorted(differing, key=lambda tensor: -tensor.relative)[:count]

    def is_within(self, rtol: float) -> bool:
        """Whether both checkpoints have the same tensors and no relative difference is above `rtol`."""
        same = not (self.only_in_a or self.only_in_b or self.shapes)
        return same and all(tensor.is_equal or tensor.relative <= rtol for tensor in self.tensors)


def compare(a: Path, b: Path, *, optimizer: bool = False) -> Comparison:
    """Compares two iter_ folders; differences are relative to `b`. `optimizer`: also compare the optimizer
    states, named `exp_avg of NAME` for example. Raises ValueError if a checkpoint is damaged.
    """
    readers = [CheckpointReader(folder, keep_bytes=KEEP_BYTES) for folder in (a, b)]
    sides: list[dict[str, LogicalTensor]] = []
    for reader in readers:
        sides.append(logical_tensors(reader))
        for state in states(reader) if optimizer else []:
            of_state = logical_tensors(reader, state)
            sides[-1] |= {f"{state} of {name}": tensor for name, tensor in of_state.items()}
    found = compare_tensors(*sides)
    commons = [reader.common() for reader in readers]
    found.settings = _differing(*(common.get("config") or {} for common in commons), without=_PLACES)
    # One level of nesting is flattened, so that only the facts that differ are shown.
    flat: list[dict[str, Any]] = [{}, {}]
    for side, reader, common in zip(flat, readers, commons, strict=True):
        progress_of = common.get("progress") or {"iteration": iteration_of(reader.folder, common)}
        for name, value in progress_of.items():
            is_group = isinstance(value, Mapping)
            side |= {f"{name}.{inner}": one for inner, one in value.items()} if is_group else {name: value}
    found.progress = _differing(*flat, without=_MEMORIES)
    return found


class Readable(Protocol):
    """A tensor whose values are read on request."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor: ...


def compare_tensors(in_a: Mapping[str, Readable], in_b: Mapping[str, Readable]) -> Comparison:
    """Compares tensors of the same name, block by block. Raises ValueError if a tensor cannot be read."""
    found = Comparison()
    found.only_in_a = [name for name in in_a if name not in in_b]
    found.only_in_b = [name for name in in_b if name not in in_a]
    both = [name for name in in_a if name in in_b]
    shapes = {name: (in_a[name].shape, in_b[name].shape) for name in both}
    found.shapes = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    same = [name for name in both if name not in found.shapes]
    num_bytes = sum(math.prod(in_a[name].shape) * in_a[name].dtype.itemsize for name in same)
    with progress("comparing", num_bytes) as advance:
        found.tensors = [_difference(name, in_a[name], in_b[name], advance) for name in same]
    return found


def _difference(name: str, a: Readable, b: Readable, advance: Callable[[int], None]) -> TensorDifference:
    num_equal, max_abs, squares, reference = 0, 0.0, 0.0, 0.0
    # Compared in blocks of rows to limit the memory of the fp64 copies; a scalar has no rows.
    rows = max(1, _BLOCK_BYTES // max(1, math.prod(a.shape[1:]) * 8))
    for low in range(0, a.shape[0] if a.shape else 1, rows):
        offsets = (low, *(0 for _ in a.shape[1:])) if a.shape else ()
        sizes = (min(rows, a.shape[0] - low), *a.shape[1:]) if a.shape else ()
        x, y = a.read(offsets, sizes).double(), b.read(offsets, sizes).double()
        equal = (x == y) | (x.isnan() & y.isnan())
        # inf - inf is NaN even though the values are equal
        difference = (x - y).masked_fill_(equal, 0.0)
        num_equal += int(equal.sum())
        if difference.numel():
            max_abs = max(max_abs, float(difference.abs().nan_to_num(nan=math.inf).max()))
        squares += float(difference.square().sum())
        reference += float(y.square().sum())
        advance(x.numel() * a.dtype.itemsize)
    # infinite if B is zero or one of the sums overflows
    relative = math.inf if squares else 0.0
    if squares and math.isfinite(squares) and math.isfinite(reference) and reference > 0:
        relative = math.sqrt(squares / reference)
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (a, b))
    return TensorDifference(name, a.shape, (dtypes[0], dtypes[1]), num_equal, max_abs, relative)


def _differing(
    a: Mapping[str, Any], b: Mapping[str, Any], *, without: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    if not a or not b:  # Megatron-LM's checkpoints have no settings
        return {}
    names = [name for name in sorted(a.keys() | b.keys()) if name.partition(".")[0] not in without]
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def print_comparison(found: Comparison, *, top: int) -> None:
    """Prints the differences between two checkpoints; lists at most `top` tensors per kind of difference."""
    for title, names in (("only in A", found.only_in_a), ("only in B", found.only_in_b)):
        for name in names[:top]:
            print(f"{title}: {name}")
        if len(names) > top:
            print(f"{title}: and {len(names) - top} more")
    for name, (a, b) in list(found.shapes.items())[:top]:
        print(f"shape: {name} {list(a)} and {list(b)}")
    for what, pairs in (("setting", found.settings), ("progress", found.progress)):
        for name, values in pairs.items():
            texts = [text if len(text) <= 80 else f"{text[:80]}..." for text in map(str, values)]
            print(f"{what}: {name} {' and '.join(texts)}")
    for one in found.worst(top):
        types = " and ".join(dict.fromkeys(one.dtypes))
        equal = f"{one.num_equal:,} of {math.prod(one.shape):,} values equal"
        by = f"relative {one.relative:.3g}  max abs {one.max_abs:.3g}"
        print(f"differs: {one.name}  {by}  {equal}  {types}")
    total = len(found.tensors)
    only = f"{len(found.only_in_a)} are only in A, {len(found.only_in_b)} only in B"
    counts = f"{found.num_equal} of {total} tensors are equal, {total - found.num_equal} differ"
    print(f"{counts}, {len(found.shapes)} have different shapes, {only}")
