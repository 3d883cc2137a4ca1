"""Whether a checkpoint is what it was when it was written, and could be loaded: `moe-exp ckpt verify`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_exp.checkpoint import folders
from moe_exp.checkpoint.folders import Manifest
from moe_exp.checkpoint.naming import KEEP_BYTES, LogicalTensor, logical_tensors, states
from moe_exp.checkpoint.torch_dist import CheckpointReader, StoredTensor
from moe_exp.progress import progress

# More cells than this in the grid of one tensor's chunks: no writer makes such.
_MAX_CELLS = 50_000_000


@dataclass
class Verification:
    """What `verify` looks at.

    Args:
        folder: of the checkpoint, of one iteration.
        finite: also look for values that are not finite.
    """

    folder: Path
    finite: bool = False
    num_files: int = 0
    num_tensors: int = 0
    num_chunks: int = 0
    has_checksums: bool = False

    def findings(self) -> Iterator[str]:
        """A line for everything that is wrong, as it is found. The counts of what was looked at are complete at the end."""
        try:
            manifest = Manifest.read(self.folder)
            if manifest is not None:
                self.has_checksums = True
                yield from self._damages(manifest)
            reader = CheckpointReader(self.folder, keep_bytes=KEEP_BYTES)
            reader.common()
            yield from self._misplaced(reader)
            yield from self._unreadable(reader)
            yield from self._disagreements(reader)
        except ValueError as error:
            yield str(error)

    def _damages(self, manifest: Manifest) -> Iterator[str]:
        with progress("checksums", manifest.num_bytes) as advance:
            for name, entry in manifest.files.items():
                yield from folders.damages(self.folder, {name: entry})
                advance(int(entry["bytes"]))
                self.num_files += 1

    def _misplaced(self, reader: CheckpointReader) -> Iterator[str]:
        for stored in reader.tensors.values():
            problem = layout_problem(stored)
            if problem:
                yield f"{self.folder}: {stored.key} {problem}"

    def _unreadable(self, reader: CheckpointReader) -> Iterator[str]:
        with progress("chunks", sum(stored.num_bytes for stored in reader.tensors.values())) as advance:
            for stored in reader.tensors.values():
                yield from self._bad_chunks(reader, stored, advance)
                self.num_tensors += 1
        for key in reader.objects:
            try:
                reader.read_object(key)
            except ValueError as error:
                yield f"{key}: {error}"

    def _bad_chunks(self, reader: CheckpointReader, stored: StoredTensor, advance: Callable[[int], None]) -> Iterator[str]:
        for chunk in stored.chunks:
            try:
                values = reader.read_chunk(stored, chunk)
                if self.finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    yield f"{self.folder / chunk.file}: {stored.key} at {list(chunk.offsets)} has values that are not finite"
            except ValueError as error:
                yield f"{stored.key} at {list(chunk.offsets)}: {error}"
            advance(math.prod(chunk.sizes) * stored.dtype.itemsize)
            self.num_chunks += 1

    def _disagreements(self, reader: CheckpointReader) -> Iterator[str]:
        weights = logical_tensors(reader)
        for state in states(reader):
            of_state = logical_tensors(reader, state)
            for name in of_state.keys() - weights.keys():
                yield f"{self.folder}: the optimizer's {state} of {name} belongs to no weight"
            for name, tensor in of_state.items():
                weight = weights.get(name)
                if weight is not None and tensor.shape != weight.shape:
                    yield f"{self.folder}: {name} has the shape {list(weight.shape)}, the optimizer's {state} {list(tensor.shape)}"
                elif weight is not None and state == "param":
                    yield from self._unequal_main_weights(weight, tensor)

    def _unequal_main_weights(self, weight: LogicalTensor, main: LogicalTensor) -> Iterator[str]:
        try:
            ours, theirs = weight.read(), main.read().to(weight.dtype)
        except ValueError:
            return  # told already
        differing = int((ours != theirs).logical_and_(ours.eq(ours)).sum())
        if differing:
            yield f"{self.folder}: {differing} of {ours.numel()} values of {weight.name} are not the optimizer's main weights, rounded"


def layout_problem(stored: StoredTensor) -> str:
    """What is wrong with the places of a tensor's chunks, or nothing: together they have to fill it, without overlap."""
    axes = range(len(stored.shape))
    for chunk in stored.chunks:
        bounds = [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis], stored.shape[axis]) for axis in axes]
        if len(chunk.offsets) != len(stored.shape) or any(not 0 <= low <= high <= size for low, high, size in bounds):
            return f"has a chunk at {list(chunk.offsets)} with {list(chunk.sizes)}, outside of its shape {list(stored.shape)}"
    edges = [
        sorted(
            {0, stored.shape[axis], *(c.offsets[axis] for c in stored.chunks), *(c.offsets[axis] + c.sizes[axis] for c in stored.chunks)}
        )
        for axis in axes
    ]
    index = [{edge: number for number, edge in enumerate(edge_list)} for edge_list in edges]
    cells = [len(edge_list) - 1 for edge_list in edges]
    if math.prod(cells) > _MAX_CELLS:
        return f"has {len(stored.chunks)} chunks in no order"
    covered = np.zeros(cells, np.uint8)
    for chunk in stored.chunks:
        box = tuple(slice(index[a][chunk.offsets[a]], index[a][chunk.offsets[a] + chunk.sizes[a]]) for a in axes)
        if covered[box].any():
            return f"has chunks that overlap, at {list(chunk.offsets)}"
        covered[box] = 1
    return "" if covered.all() else f"is not filled by its {len(stored.chunks)} chunks"
