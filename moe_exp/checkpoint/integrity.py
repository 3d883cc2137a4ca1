"""Verifies checkpoints and finds the newest intact checkpoint, without executing code from their files."""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format import fingerprints, folders
from moe_exp.checkpoint.format.fingerprints import Fingerprints, fingerprints_of, shown
from moe_exp.checkpoint.format.folders import MANIFEST, Manifest, NewerFormatError, damages, unusable, usable
from moe_exp.checkpoint.format.naming import KEEP_BYTES, logical_tensors, states
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, Chunk, StoredTensor, read_common
from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.model_changes import model_changes
from moe_exp.host.files import expanded
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

# (cause, text) of a problem. Findings with one cause (a file or a kind of damage) likely share a fault.
Finding = tuple[str, str]


@dataclass(frozen=True)
class Source:
    """The checkpoint that training resumes from."""

    folder: Path  # iter_ folder
    damages: tuple[str, ...] = ()  # one line for each newer, unusable checkpoint


def find_source(path: Path, *, checksums: bool, newest: int | None = None) -> Source | None:
    """Finds the newest intact checkpoint in a checkpoints folder, run folder or iter_ folder. Ignores
    checkpoints of iterations after `newest`. Returns None if the folder has no checkpoints. All ranks must
    call this function. With `checksums`, the ranks read all files; otherwise they only compare file sizes.
    Raises ValueError on every rank if no checkpoint is intact, or if the format of the newest checkpoint
    is too new for this package.
    """

    # imported here, so that a launcher, which only calls `find_source_here`, does not import Megatron
    from moe_exp.engine.runtime import from_all_ranks, from_first_rank

    def damage(folder: Path) -> str:
        # The first rank reads the small files; the large ones are divided among all ranks.
        line, files = from_first_rank(lambda: contents(folder))
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if not line:
            # Largest first, so that each rank reads about the same number of bytes.
            names = sorted(files, key=lambda name: (-files[name]["bytes"], name))
            mine = {name: files[name] for name in names[rank::world_size]}
            # Gathered, so that all ranks reach the same verdict.
            lines = sorted(chain.from_iterable(from_all_ranks([*damages(folder, mine, checksums=checksums)])))
            more = f" (and {len(lines) - 1} more files)" if len(lines) > 1 else ""
            line = lines[0] + more if lines else ""
        if line and rank == 0:
            logger.warning("damaged checkpoint: %s", line)
        return line

    candidates = from_first_rank(lambda: usable(path))
    candidates = [one for one in candidates if newest is None or folders.iteration_of(one) <= newest]
    return _first_whole(path, candidates, damage)


def find_source_here(path: Path) -> Source | None:
    """Like `find_source`, but for one process without a process group; compares only file sizes."""

    def damage(folder: Path) -> str:
        line, files = contents(folder)
        return line or next(damages(folder, files, checksums=False), "")

    return _first_whole(path, usable(path), damage)


def _first_whole(path: Path, candidates: Sequence[Path], damage_of: Callable[[Path], str]) -> Source | None:
    lines: list[str] = []
    for folder in candidates:
        if not (damage := damage_of(folder)):
            return Source(folder, tuple(lines))
        lines.append(damage)
    if not lines:
        return None
    others = f" (and {len(lines) - 1} older checkpoints)" if len(lines) > 1 else ""
    fix = "restore the files, or start a new run in another folder"
    raise unusable(f"checkpoint={path}", f"no checkpoint can be used, {lines[0]}{others}", fix)


def contents(folder: Path) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """Checks a checkpoint's small files. Returns the damage in one line (empty if intact), and the manifest's
    file entries. Megatron-LM writes no manifest; instead, its file sizes are compared with `.metadata`, and
    there are no entries. Raises NewerFormatError if a newer version of this package wrote the checkpoint.
    """
    try:
        manifest = Manifest.read(folders.existing(folder))
        common, reader = read_common(folder), CheckpointReader(folder)
    # A subclass of ValueError, but nothing is damaged: falling back to an older checkpoint would be wrong.
    except NewerFormatError:
        raise
    except ValueError as error:
        return str(error).partition(". Fix:")[0], {}
    except OSError as error:
        return f"{folder}: cannot be read ({error.strerror or error})", {}
    if manifest is not None:
        return "", manifest.files
    if "versions" in common:
        return f"{folder / MANIFEST}: is missing", {}
    logger.info("%s: no %s (written by Megatron-LM); checksums are not verified", folder, MANIFEST)
    # Without checksums, a truncated copy is still detectable: the file ends before its last chunk does.
    ends: dict[str, int] = {}
    chunks = chain.from_iterable(tensor.chunks for tensor in reader.tensors.values())
    for chunk in chain(chunks, reader.objects.values()):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.num_bytes)
    for path, end in sorted((folder / name, end) for name, end in ends.items()):
        if not path.is_file():
            return f"{path}: is missing", {}
        if (size := path.stat().st_size) < end:
            return f"{path}: has {size} bytes, expected at least {end}", {}
    return "", {}


def dense_source(config: Config, find: Callable[[Path], Source | None]) -> Path:
    """Returns the iter_ folder of UPCYCLE_FROM; ConfigError if there is no compatible dense checkpoint."""
    try:
        folder = folders.one_checkpoint(expanded(config.upcycle_from))
    except ValueError as error:
        # name the setting that the user gave
        raise ConfigError([str(error).replace("checkpoint=", "UPCYCLE_FROM=", 1)]) from None
    find(folder)
    if problems := dense_problems(config, read_common(folder).get("config")):
        raise ConfigError(problems)
    return folder


def dense_problems(c: Config, dense: Mapping[str, Any] | None) -> list[str]:
    """Reasons why this run cannot start from a dense run with settings `dense` (None if not recorded)."""
    rule, fix = "was not written by this package", "specify a run of moe_exp"
    if dense is not None:
        rule, fix = "is the checkpoint of an MoE run", "specify a run with USE_MOE=false"
    if dense is None or dense.get("use_moe"):
        return [problem("upcycle_from", c.upcycle_from, rule, fix)]
    source = f"the dense run UPCYCLE_FROM={c.upcycle_from}"
    shapes, functions = model_changes(c.model_copy(update={"use_moe": False}), dense, source)
    return [change.problem(source) for change in shapes + functions]


@dataclass
class Verification:
    """Checks one checkpoint and counts what was checked."""

    folder: Path  # iter_ folder
    finite: bool = False  # also report non-finite values
    num_files: int = 0
    num_tensors: int = 0
    num_chunks: int = 0

    @property
    def has_checksums(self) -> bool:
        """Whether the checkpoint has a manifest with checksums (Megatron-LM writes no manifest)."""
        return (self.folder / MANIFEST).exists()

    def findings(self) -> Iterator[Finding]:
        """Yields each problem when it is found. The counts are complete after the last problem."""
        try:
            manifest = Manifest.read(self.folder)
            if manifest is not None:
                with progress("checksums", manifest.num_bytes) as advance:
                    for name, entry in manifest.files.items():
                        for text in damages(self.folder, {name: entry}):
                            yield str(self.folder / name), text
                        advance(int(entry["bytes"]))
                        self.num_files += 1
            reader = CheckpointReader(self.folder, keep_bytes=KEEP_BYTES)
            # training treats our checkpoints as damaged without it; Megatron-LM writes neither
            if "versions" in reader.common() and manifest is None:
                missing = str(self.folder / MANIFEST)
                yield missing, f"{missing}: is missing"
            for stored in reader.tensors.values():
                if problem := layout_problem(stored):
                    yield "places of chunks", f"{self.folder}: {stored.key} {problem}"
            yield from self._unreadable(reader)
            yield from self._disagreements(reader)
        except ValueError as error:
            yield str(error).partition(": ")[0], str(error)  # the message begins with a path

    def _unreadable(self, reader: CheckpointReader) -> Iterator[Finding]:
        shares: list[Fingerprints] = []
        with progress("chunks", sum(stored.num_bytes for stored in reader.tensors.values())) as advance:
            for stored in reader.tensors.values():
                for chunk in stored.chunks:
                    file, place = str(self.folder / chunk.file), f"{stored.key} at {list(chunk.offsets)}"
                    try:
                        values = reader.read_chunk(stored, chunk)
                        shares.append(fingerprints_of([(stored.key, values, chunk.offsets)]))
                        if self.finite and values.is_floating_point() and not bool(values.isfinite().all()):
                            cause = "values that are not finite"
                            yield cause, f"{file}: {place} has {cause}"
                    except ValueError as error:
                        yield file, f"{place}: {error}"
                    advance(math.prod(chunk.sizes) * stored.dtype.itemsize)
                    self.num_chunks += 1
                self.num_tensors += 1
        # `reshape` may rename experts' tensors: those are not found under their fingerprint's key.
        whole = fingerprints.added(shares)
        for name, saved in (fingerprints.read(self.folder) or {}).items():
            found = whole.get(name, saved)
            if found.num_values == saved.num_values and found != saved:
                rule = "differs from the tensor in memory at the time of the save (by its fingerprint)"
                yield "fingerprints", f"{self.folder}: {shown(name)} {rule}"
        for key in reader.objects:
            try:
                reader.read_object(key)
            except ValueError as error:
                yield str(self.folder / reader.objects[key].file), f"{key}: {error}"

    def _disagreements(self, reader: CheckpointReader) -> Iterator[Finding]:
        weights = logical_tensors(reader)
        for state in states(reader):
            of_state = logical_tensors(reader, state)
            for name in of_state.keys() - weights.keys():
                text = f"{self.folder}: the optimizer's {state} of {name} has no matching weight"
                yield f"{state} without weights", text
            for name in filter(weights.__contains__, of_state):
                weight, tensor = weights[name], of_state[name]
                if tensor.shape != weight.shape:
                    shapes = f"{list(weight.shape)}, but the optimizer's {state} has {list(tensor.shape)}"
                    yield f"shapes of {state}", f"{self.folder}: {name} has the shape {shapes}"
                elif state == "param":
                    try:
                        ours, rounded = weight.read(), tensor.read().to(weight.dtype)
                    except ValueError:  # already reported with its chunk
                        continue
                    # NaN != NaN, so NaNs are excluded from the comparison
                    if differing := int((ours != rounded).logical_and_(ours.eq(ours)).sum()):
                        values = f"{differing} of {ours.numel()} values of {weight.name}"
                        rule = "differ from the optimizer's rounded main weights"
                        yield "main weights", f"{self.folder}: {values} {rule}"


def layout_problem(stored: StoredTensor) -> str:
    """Describes a gap, overlap or misplaced chunk in a tensor; empty string if there is none."""
    for chunk in stored.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        is_inside = len(ends) == len(stored.shape) and min(chunk.offsets, default=0) >= 0
        if not is_inside or any(map(operator.gt, ends, stored.shape)):
            place = f"{list(chunk.offsets)} with sizes {list(chunk.sizes)}"
            return f"has a chunk at {place}, outside its shape {list(stored.shape)}"
    return _uneven(list(stored.chunks), stored.shape, 0)


def _uneven(chunks: list[Chunk], shape: tuple[int, ...], axis: int) -> str:
    """Like `layout_problem`, but checks only `axis` and the axes after it."""
    # One chunk that spans all remaining axes fills them; otherwise cut this axis at every chunk boundary and
    # check each slab separately.
    if len(chunks) == 1 and chunks[0].sizes[axis:] == shape[axis:]:
        return ""
    if axis == len(shape):
        if not chunks:
            return "is not filled by its chunks"
        return f"has overlapping chunks at {list(chunks[0].offsets)}"
    spans = [(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for chunk in chunks]
    for low, high in pairwise(sorted({0, shape[axis], *chain.from_iterable(spans)})):
        pairs = zip(chunks, spans, strict=True)
        inside = [chunk for chunk, (start, end) in pairs if start <= low and end >= high]
        if problem := _uneven(inside, shape, axis + 1):
            return problem
    return ""
