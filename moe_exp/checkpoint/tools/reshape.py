"""Rewrites a checkpoint for another layout, style (see keys.py) or dtype, chunk by chunk in one process.

Any checkpoint loads under any layout; a rewritten one has one file per rank with exactly the chunks that the
rank requests, so nothing is read twice or in slices. In memory are the chunk being written, the piece copied
into it, and the source chunks read last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format import fingerprints
from moe_exp.checkpoint.format.folders import Manifest, entries_of, iteration_folder
from moe_exp.checkpoint.format.naming import (
    KEEP_BYTES,
    LogicalTensor,
    is_optimizer,
    layer_of,
    logical_name,
    logical_tensors,
    num_leading,
    optimizer_state,
    states,
)
from moe_exp.checkpoint.format.settings import order_in
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.tools.info import BUFFERS, iteration_of
from moe_exp.checkpoint.tools.layouts import (
    Layout,
    Model,
    Style,
    TargetChunk,
    TargetPlan,
    styled_key,
    unstyled,
)
from moe_exp.config import problem
from moe_exp.host.files import bytes_text, write_atomically
from moe_exp.host.megatron_versions import COMMON_OBJECT
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_EXTRA_STATE = "._extra_state"
_SIZES = ("tp", "pp", "vpp", "ep", "etp")

_CHUNK_OVERHEAD_BYTES = 2500  # torch.save's per chunk, and its metadata


@dataclass(frozen=True)
class Reshaping:
    """The changes to make."""

    layout: Layout  # of the ranks that will load it
    # leave out optimizer, schedule, random streams and progress: a run that loads it starts at iteration 0
    weights_only: bool = False
    # of the weights: `bf16`, or `fp32`, which takes the optimizer's main weights if there are any; None: kept
    dtype: str | None = None
    layers: str | None = None  # `stacked` or `single`; None: kept, but single if the experts become single
    experts: str | None = None  # `stacked` or `single`; None: kept


@dataclass(frozen=True)
class Written:
    """The checkpoint that was written."""

    folder: Path
    num_rank_files: int
    num_bytes: int


def reshape(
    source: Path,
    target: Path,
    changes: Reshaping,
    *,
    keep_bytes: int = KEEP_BYTES,
    values: Mapping[str, LogicalTensor] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Written:
    """Rewrites the checkpoint of an iteration's folder as the only one of a new checkpoints folder, which
    appears atomically. `keep_bytes`: memory for the source chunks read last, at least one chunk. `values`:
    in place of the weights, with `facts` about them for the manifest. ValueError if the source is damaged,
    the changes do not fit it, `target` exists or its disk is too small.
    """
    if target.exists():
        raise ValueError(f"DST={target}: exists already. Fix: give the name of a folder that does not.")
    reader = CheckpointReader(source, keep_bytes=keep_bytes)
    work = _Work(reader, changes, values)
    chunks = work.chunks()  # may raise, so before anything is written
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    _check_space(target, num_bytes + _CHUNK_OVERHEAD_BYTES * (len(chunks) + len(reader.objects)))
    iteration = iteration_of(source, work.common)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    folder = iteration_folder(partial, iteration)
    try:
        with progress("writing", num_bytes) as advance:
            written = _write(folder, work, chunks, advance)
        if values is None:
            written = fingerprints.read(source) or {}
            dtype = str(DTYPES[changes.dtype]).removeprefix("torch.") if changes.dtype else None
            written = fingerprints.kept(written, weights_only=changes.weights_only, dtype=dtype)
        if written:
            fingerprints.write(folder, written)
        manifest = Manifest(iteration, entries_of(folder), _facts(source, changes) | dict(facts or {}))
        manifest.write(folder)
        write_atomically(partial / LATEST, str(iteration))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    num_rank_files = len({chunk.rank for chunk in chunks})
    return Written(iteration_folder(target, iteration), num_rank_files, manifest.num_bytes)


def _write(
    folder: Path, work: _Work, chunks: list[TargetChunk], advance: Callable[[int], None]
) -> fingerprints.Fingerprints:
    """Writes the files; returns the fingerprints of values that are no stored ones."""
    per_stage, stage, found = work.plan.layout.ranks_per_stage, 0, list[fingerprints.Fingerprints]()
    with TorchDistWriter(folder) as writer:
        for chunk in chunks:
            if chunk.rank // per_stage != stage:
                stage = chunk.rank // per_stage
                writer.next_file()  # so only one stage's files are open
            writer.rank = chunk.rank
            values = chunk.read()
            writer.add_chunk(chunk.key, values, shape=chunk.shape, offsets=chunk.offsets)
            if work.values is not None and work.plan.style.experts_stacked:  # else keys are others
                found.append(fingerprints.fingerprints_of([(chunk.key, values, chunk.offsets)]))
            advance(chunk.num_bytes)
        writer.rank = 0
        for key, value in work.objects():
            writer.add_object(key, value)
        writer.finish(work.new_common())
    return fingerprints.added(found)


class _Work:
    def __init__(
        self, reader: CheckpointReader, changes: Reshaping, values: Mapping[str, LogicalTensor] | None = None
    ):
        self.reader, self.changes, self.values = reader, changes, values
        self.common = reader.common()
        self.weights = logical_tensors(reader)
        self.states = [] if changes.weights_only else states(reader)
        self.plan = TargetPlan(Model.of(self.weights), changes.layout, _style(reader, self.weights, changes))
        self._check()

    def chunks(self) -> list[TargetChunk]:
        """Chunks to write, grouped by pipeline stage."""
        main = logical_tensors(self.reader, "param") if self.changes.dtype == "fp32" else {}
        values = self.values or {name: main.get(name, tensor) for name, tensor in self.weights.items()}
        found = list(self.plan.chunks(values, {name: self._dtype_of(name) for name in values}))
        for state in self.states:
            tensors = logical_tensors(self.reader, state)
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            found += self.plan.chunks(tensors, dtypes, state=True)
        return sorted(found, key=lambda chunk: chunk.rank // self.plan.layout.ranks_per_stage)

    def objects(self) -> list[tuple[str, Any]]:
        """Objects of the new checkpoint, by full key."""
        found = []
        for full_key in self.reader.objects:
            if full_key == COMMON_OBJECT:  # it becomes common.pt
                continue
            match = _OBJECT.fullmatch(full_key)
            if match and match[1].endswith(_EXTRA_STATE):
                found.append((self._extra_state_key(match[1], match[2]), self.reader.read_object(full_key)))
            elif not (self.changes.weights_only or (full_key.startswith("rng_state/") and self._other_rng())):
                found.append((full_key, self.reader.read_object(full_key)))
        return [
            (key, value[0] if isinstance(value, list) and len(value) == 1 else value) for key, value in found
        ]

    def new_common(self) -> dict[str, Any]:
        """common.pt of the new checkpoint."""
        layout, common = self.changes.layout, dict(self.common)
        if self.changes.weights_only:
            kept = {name: common[name] for name in ("config", "content_metadata") if name in common}
            common = kept | {"sample_order": order_in(common)}
        if "content_metadata" in common:
            singles = {"singleton_local_shards": not self.plan.style.experts_stacked}
            common["content_metadata"] = common["content_metadata"] | singles
        if "config" in common:
            changed: dict[str, Any] = {name: getattr(layout, name) for name in _SIZES}
            if common["config"].get("pp") != layout.pp:
                even = {"first_stage_layers": 0, "last_stage_layers": 0, "pipeline_layers": ""}
                changed |= {name: value for name, value in even.items() if name in common["config"]}
            changed |= {"dtype": self.changes.dtype} if self.changes.dtype else {}
            common["config"] = common["config"] | changed
        if "layout" in common:
            common["layout"] = {**common["layout"], "tp": layout.tp, "pp": layout.pp}
            if self._other_rng():
                # equals no layout of a run, so random streams start from the seed
                common["layout"]["random_streams"] = None
        return common

    def _other_rng(self) -> bool:
        before, layout = self.common.get("layout", {}), self.changes.layout
        return (before.get("tp"), before.get("pp")) != (layout.tp, layout.pp)

    def _extra_state_key(self, key: str, place: str) -> str:
        style, numbers = self.plan.style, [int(number) for number in place.split(".")]
        name, _ = logical_name(key, tuple(numbers[: num_leading(key)]))
        layer, inner = layer_of(name)
        expert = next((int(part) for part in inner.split(".") if part.isdigit()), None)
        axes = [(layer, self.plan.model.num_layers)] if layer is not None and style.layers_stacked else []
        if expert is not None and style.experts_stacked:
            axes.append((expert, self.plan.model.num_experts))
        axes = axes or [(0, 1)]
        indices, sizes = (".".join(str(axis[part]) for axis in axes) for part in (0, 1))
        return f"{styled_key(unstyled(key), layer, expert or 0, style)}/shard_{indices}_{sizes}"

    def _dtype_of(self, name: str) -> torch.dtype:
        dtype = self.weights[name].dtype
        if self.changes.dtype is None or not dtype.is_floating_point or name.endswith(BUFFERS):
            return dtype
        return DTYPES[self.changes.dtype]

    def _check(self) -> None:
        model, layout, changes = self.plan.model, self.changes.layout, self.changes
        for name in _SIZES:
            size = getattr(layout, name)
            if size is not None and size < 1:
                raise ValueError(problem(name, size, "must be 1 or more", "give a positive number"))
        if (stages := layout.pp * (layout.vpp or 1)) > model.num_layers:
            rule = f"{stages} stages are more than the {model.num_layers} layers"
            raise ValueError(problem("pp", layout.pp, rule, "give a smaller one"))
        if layout.ep > 1 and (not model.num_experts or model.num_experts % layout.ep):
            rule = f"does not divide the {model.num_experts} experts"
            raise ValueError(problem("ep", layout.ep, rule, "give a divisor of them"))
        self._check_optimizer()
        style, rule = self.plan.style, ""
        if style.layers_stacked and not model.layers_are_alike:
            rule = "the layers differ, as dense and MoE layers do"
        elif style.layers_stacked and not style.experts_stacked:
            rule = "Megatron has no such style with single experts"
        if rule:
            raise ValueError(f"layers=stacked: {rule}. Fix: give --layers single.")
        has_optimizer = "optimizer" in self.common and not changes.weights_only
        if changes.dtype == "bf16" and has_optimizer and "param" not in self.states:
            rule = "the fp32 weights that the optimizer continues from would be lost"
            raise ValueError(problem("dtype", "bf16", rule, "give --weights-only, too"))

    def _check_optimizer(self) -> None:
        known = {key for key in self.reader.tensors if not is_optimizer(key)}
        of_optimizer = [key for key in self.reader.tensors if key not in known]
        for key in [] if self.changes.weights_only else of_optimizer:
            if (state := optimizer_state(key)) is None or state[2] not in known:
                rule = f"{key} belongs to the layout that wrote it, and cannot be rewritten"
                raise ValueError(f"SRC={self.reader.folder}: {rule}. Fix: give --weights-only.")


def _style(reader: CheckpointReader, weights: Mapping[str, LogicalTensor], changes: Reshaping) -> Style:
    keys = [key for key in reader.tensors if not is_optimizer(key)]
    single_layers = any(re.match(r"decoder\.layers\.\d", key) for key in keys)
    single_experts = any(re.search(r"\.experts\.\d|\.linear_fc1\.(weight|bias)_w$", key) for key in keys)
    experts_stacked = changes.experts == "stacked" if changes.experts else not single_experts
    if changes.layers:
        return Style(changes.layers == "stacked", experts_stacked)
    return Style(not single_layers and experts_stacked, experts_stacked)


def _check_space(target: Path, needed_bytes: int) -> None:
    place = target.absolute().parent
    if not place.is_dir():
        raise ValueError(f"DST={target}: {place} is no folder. Fix: make it, or give another one.")
    if (free_bytes := shutil.disk_usage(place).free) < needed_bytes:
        rule = (
            f"{place} has {bytes_text(free_bytes)} free and the checkpoint needs {bytes_text(needed_bytes)}"
        )
        raise ValueError(f"DST={target}: {rule}. Fix: choose a larger disk, or make room.")


def _facts(source: Path, changes: Reshaping) -> dict[str, Any]:
    own = Manifest.read(source)
    facts = {name: value for name, value in (own.facts if own else {}).items() if name != "world_size"}
    facts |= {"layout": vars(changes.layout), "reshaped_from": source.name}
    return facts | {"weights_only": changes.weights_only}
