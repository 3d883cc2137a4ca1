"""`moe-exp ckpt verify`: checks that a checkpoint is as it was written and can be loaded."""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

from moe_exp.checkpoint.format import fingerprints, folders
from moe_exp.checkpoint.format.fingerprints import Fingerprints, fingerprints_of, shown
from moe_exp.checkpoint.format.folders import Manifest
from moe_exp.checkpoint.format.naming import KEEP_BYTES, LogicalTensor, logical_tensors, states
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, Chunk, StoredTensor
from moe_exp.host.progress import progress

# Cause and text of a problem. Those of one cause, a damaged file or a kind of damage, follow from each other.
Finding = tuple[str, str]


@dataclass
class Verification:
    """Checks one checkpoint and counts what was checked."""

    folder: Path  # of one iteration
    finite: bool = False  # also report values that are not finite
    num_files: int = 0
    num_tensors: int = 0
    num_chunks: int = 0
    _shares: list[Fingerprints] = field(default_factory=list, repr=False)

    @property
    def has_checksums(self) -> bool:
        """Whether there is a manifest; Megatron-LM writes none."""
        return (self.folder / folders.MANIFEST).exists()

    def findings(self) -> Iterator[Finding]:
        """One problem at a time, as found; the counts are complete at the end."""
        try:
            manifest = Manifest.read(self.folder)
            if manifest is not None:
                yield from self._damages(manifest)
            reader = CheckpointReader(self.folder, keep_bytes=KEEP_BYTES)
            # a run treats ours as damaged without it; Megatron-LM's have neither
            if "versions" in reader.common() and manifest is None:
                missing = str(self.folder / folders.MANIFEST)
                yield missing, f"{missing}: is missing"
            for stored in reader.tensors.values():
                if problem := layout_problem(stored):
                    yield "places of chunks", f"{self.folder}: {stored.key} {problem}"
            yield from self._unreadable(reader)
            yield from self._disagreements(reader)
        except ValueError as error:
            yield str(error).partition(": ")[0], str(error)  # which begins with a path

    def _damages(self, manifest: Manifest) -> Iterator[Finding]:
        with progress("checksums", manifest.num_bytes) as advance:
            for name, entry in manifest.files.items():
                for text in folders.damages(self.folder, {name: entry}):
                    yield str(self.folder / name), text
                advance(int(entry["bytes"]))
                self.num_files += 1

    def _unreadable(self, reader: CheckpointReader) -> Iterator[Finding]:
        with progress("chunks", sum(stored.num_bytes for stored in reader.tensors.values())) as advance:
            for stored in reader.tensors.values():
                yield from self._bad_chunks(reader, stored, advance)
                self.num_tensors += 1
        # without tensors that are not stored under their fingerprint's key: `reshape` may rename experts'
        shares = fingerprints.added(self._shares)
        for name, saved in (fingerprints.read(self.folder) or {}).items():
            found = shares.get(name, saved)
            if found.num_values == saved.num_values and found != saved:
                rule = "is not what was in memory when it was saved, by its fingerprint"
                yield "fingerprints", f"{self.folder}: {shown(name)} {rule}"
        for key in reader.objects:
            try:
                reader.read_object(key)
            except ValueError as error:
                yield str(self.folder / reader.objects[key].file), f"{key}: {error}"

    def _bad_chunks(
        self, reader: CheckpointReader, stored: StoredTensor, advance: Callable[[int], None]
    ) -> Iterator[Finding]:
        for chunk in stored.chunks:
            file, place = str(self.folder / chunk.file), f"{stored.key} at {list(chunk.offsets)}"
            try:
                values = reader.read_chunk(stored, chunk)
                self._shares.append(fingerprints_of([(stored.key, values, chunk.offsets)]))
                if self.finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    cause = "values that are not finite"
                    yield cause, f"{file}: {place} has {cause}"
            except ValueError as error:
                yield file, f"{place}: {error}"
            advance(math.prod(chunk.sizes) * stored.dtype.itemsize)
            self.num_chunks += 1

    def _disagreements(self, reader: CheckpointReader) -> Iterator[Finding]:
        weights = logical_tensors(reader)
        for state in states(reader):
            of_state = logical_tensors(reader, state)
            for name in of_state.keys() - weights.keys():
                text = f"{self.folder}: the optimizer's {state} of {name} belongs to no weight"
                yield f"{state} without weights", text
            for name in filter(weights.__contains__, of_state):
                weight, tensor = weights[name], of_state[name]
                if tensor.shape != weight.shape:
                    shapes = f"{list(weight.shape)}, the optimizer's {state} {list(tensor.shape)}"
                    yield f"shapes of {state}", f"{self.folder}: {name} has the shape {shapes}"
                elif state == "param":
                    yield from self._unequal_main_weights(weight, tensor)

    def _unequal_main_weights(self, weight: LogicalTensor, main: LogicalTensor) -> Iterator[Finding]:
        try:
            ours, theirs = weight.read(), main.read().to(weight.dtype)
        except ValueError:
            return  # already reported
        differing = int((ours != theirs).logical_and_(ours.eq(ours)).sum())
        if differing:
            values = f"{differing} of {ours.numel()} values of {weight.name}"
            yield "main weights", f"{self.folder}: {values} are not the optimizer's main weights, rounded"


def layout_problem(stored: StoredTensor) -> str:
    """Describes why a tensor's chunks do not fill it without overlap; empty if they do."""
    for chunk in stored.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        is_inside = len(ends) == len(stored.shape) and min(chunk.offsets, default=0) >= 0
        if not is_inside or any(map(operator.gt, ends, stored.shape)):
            place = f"{list(chunk.offsets)} of {list(chunk.sizes)}"
            return f"has a chunk at {place}, outside of its shape {list(stored.shape)}"
    return _uneven(list(stored.chunks), stored.shape, 0)


def _uneven(chunks: list[Chunk], shape: tuple[int, ...], axis: int) -> str:
    """Describes why the chunks do not fill `shape` exactly once, from `axis` on; empty if they do."""
    if len(chunks) == 1 and chunks[0].sizes[axis:] == shape[axis:]:
        return ""
    if axis == len(shape):
        overlap = f"has chunks that overlap, at {list(chunks[0].offsets)}" if chunks else ""
        return overlap or "is not filled by its chunks"
    spans = [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for chunk in chunks]
    for low, high in pairwise(sorted({0, shape[axis], *chain.from_iterable(spans)})):
        pairs = zip(chunks, spans, strict=True)
        inside = [chunk for chunk, (start, end) in pairs if start <= low and end >= high]
        if problem := _uneven(inside, shape, axis + 1):
            return problem
    return ""
