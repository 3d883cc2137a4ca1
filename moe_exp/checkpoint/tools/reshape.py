"""Rewrites a checkpoint for the ranks of another layout, in another style or type: on one process, chunk by
chunk.

A checkpoint can be loaded under any layout as it is; one that was rewritten for it has one file per rank with
the very chunks that the rank asks for, so that nothing is read twice or in slices. Styles are those of
keys.py. In memory are the chunk that is written, the piece that is copied into it, and the chunks of the
source that were read last.
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
from moe_exp.checkpoint.format.torch_dist import COMMON_OBJECT, CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import CheckpointWriter
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
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_EXTRA_STATE = "._extra_state"

# What torch.save adds to a chunk, and the metadata about it.
_CHUNK_OVERHEAD_BYTES = 2500


@dataclass(frozen=True)
class Reshaping:
    """What is changed.

    Args:
        layout: for whose ranks the files are.
        weights_only: leave out optimizer, schedule, random streams and progress: a run that loads it starts
            at iteration 0.
        dtype: of the weights, `bf16` or `fp32`, which takes the optimizer's main weights where there are;
            None: as they are.
        layers: `stacked` or `single`; None: as they are, but single where the experts are to be.
        experts: `stacked` or `single`; None: as they are.
    """

    layout: Layout
    weights_only: bool = False
    dtype: str | None = None
    layers: str | None = None
    experts: str | None = None


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written: its folder, number of files for ranks, bytes."""

    folder: Path
    num_rank_files: int
    num_bytes: int


def reshape(source: Path, target: Path, changes: Reshaping, *, keep_bytes: int = KEEP_BYTES) -> Written:
    """Writes the checkpoint in `source` anew, as the only one of the checkpoints folder `target`.

    Args:
        source: of one iteration; it is only read.
        target: is made, and appears when all is written.
        changes: what is to be different.
        keep_bytes: memory for chunks of the source that were read last, or for the last one where that is
            larger.

    Raises:
        ValueError: where the source is damaged, the changes do not fit it, or `target` exists or its disk is
            too small.
    """
    if target.exists():
        raise ValueError(f"DST={target}: exists already. Fix: give the name of a folder that does not.")
    reader = CheckpointReader(source, keep_bytes=keep_bytes)
    work = _Work(reader, changes)
    chunks = work.chunks()  # before anything is written: it may refuse
    num_bytes = sum(chunk.num_bytes for chunk in chunks)
    _check_space(target, num_bytes + _CHUNK_OVERHEAD_BYTES * (len(chunks) + len(reader.objects)))
    iteration = iteration_of(source, work.common)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    folder = iteration_folder(partial, iteration)
    try:
        with progress("writing", num_bytes) as advance:
            _write(folder, work, chunks, advance)
        _keep_fingerprints(source, folder, changes)
        manifest = Manifest(iteration, entries_of(folder), _facts(source, changes))
        manifest.write(folder)
        write_atomically(partial / LATEST, str(iteration))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(
        iteration_folder(target, iteration), len({chunk.rank for chunk in chunks}), manifest.num_bytes
    )


def _write(folder: Path, work: _Work, chunks: list[TargetChunk], advance: Callable[[int], None]) -> None:
    per_stage, stage = work.plan.layout.ranks_per_stage, 0
    with CheckpointWriter(folder) as writer:
        for chunk in chunks:
            if chunk.rank // per_stage != stage:
                stage = chunk.rank // per_stage
                writer.next_file()  # so that the files of one stage alone are open
            writer.rank = chunk.rank
            writer.add_chunk(chunk.key, chunk.read(), shape=chunk.shape, offsets=chunk.offsets)
            advance(chunk.num_bytes)
        writer.rank = 0
        for key, value in work.objects():
            writer.add_object(key, value)
        writer.finish(work.new_common())


def _keep_fingerprints(source: Path, folder: Path, changes: Reshaping) -> None:
    """They are of the values, which are the same, not of the files."""
    dtype = str(DTYPES[changes.dtype]).removeprefix("torch.") if changes.dtype else None
    saved = fingerprints.read(source) or {}
    if found := fingerprints.kept(saved, weights_only=changes.weights_only, dtype=dtype):
        fingerprints.write(folder, found)


class _Work:
    """One rewriting: what the source holds and what becomes of it."""

    def __init__(self, reader: CheckpointReader, changes: Reshaping):
        self.reader, self.changes = reader, changes
        self.common = reader.common()
        self.weights = logical_tensors(reader)
        self.states = [] if changes.weights_only else states(reader)
        self.plan = TargetPlan(Model.of(self.weights), changes.layout, _style(reader, self.weights, changes))
        self._check()

    def chunks(self) -> list[TargetChunk]:
        """All chunks that are to be written, those of a pipeline stage together."""
        main = logical_tensors(self.reader, "param") if self.changes.dtype == "fp32" else {}
        values = {name: main.get(name, tensor) for name, tensor in self.weights.items()}
        found = list(self.plan.chunks(values, {name: self._dtype_of(name) for name in values}))
        for state in self.states:
            tensors = logical_tensors(self.reader, state)
            found += self.plan.chunks(
                tensors, {name: tensor.dtype for name, tensor in tensors.items()}, keep_prefix=True
            )
        return sorted(found, key=lambda chunk: chunk.rank // self.plan.layout.ranks_per_stage)

    def objects(self) -> list[tuple[str, Any]]:
        """Objects of the new checkpoint, under their full keys."""
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
            common = {name: common[name] for name in ("config", "content_metadata") if name in common}
        if "content_metadata" in common:
            common["content_metadata"] = {
                **common["content_metadata"],
                "singleton_local_shards": not self.plan.style.experts_stacked,
            }
        if "config" in common:
            sizes: dict[str, Any] = {
                "tp": layout.tp,
                "pp": layout.pp,
                "vpp": layout.vpp,
                "ep": layout.ep,
                "etp": layout.etp,
            }
            if common["config"].get("pp") != layout.pp:
                even = {"first_stage_layers": 0, "last_stage_layers": 0, "pipeline_layers": ""}
                sizes |= {name: value for name, value in even.items() if name in common["config"]}
            common["config"] = {
                **common["config"],
                **sizes,
                **({"dtype": self.changes.dtype} if self.changes.dtype else {}),
            }
        if "layout" in common:
            common["layout"] = {**common["layout"], "tp": layout.tp, "pp": layout.pp}
            if self._other_rng():
                # No layout of a run is equal to this one, so that its random streams start from the seed.
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
        axes += (
            [(expert, self.plan.model.num_experts)] if expert is not None and style.experts_stacked else []
        )
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
        for name in ("tp", "pp", "vpp", "ep", "etp"):
            size = getattr(layout, name)
            if size is not None and size < 1:
                raise ValueError(problem(name, size, "must be 1 or more", "give a positive number"))
        if layout.pp * (layout.vpp or 1) > model.num_layers:
            rule = f"{layout.pp * (layout.vpp or 1)} stages are more than the {model.num_layers} layers"
            raise ValueError(problem("pp", layout.pp, rule, "give a smaller one"))
        if layout.ep > 1 and (not model.num_experts or model.num_experts % layout.ep):
            raise ValueError(
                problem(
                    "ep",
                    layout.ep,
                    f"does not divide the {model.num_experts} experts",
                    "give a divisor of them",
                )
            )
        self._check_optimizer()
        if self.plan.style.layers_stacked and not model.layers_are_alike:
            raise ValueError(
                "layers=stacked: the layers differ, as dense and MoE layers do. Fix: give --layers single."
            )
        if self.plan.style.layers_stacked and not self.plan.style.experts_stacked:
            raise ValueError(
                "layers=stacked: Megatron has no such style with single experts. Fix: give --layers single."
            )
        if (
            changes.dtype == "bf16"
            and "optimizer" in self.common
            and not changes.weights_only
            and "param" not in self.states
        ):
            rule = "the fp32 weights that the optimizer goes on from would be lost"
            raise ValueError(problem("dtype", "bf16", rule, "give --weights-only, too"))

    def _check_optimizer(self) -> None:
        known = {key for key in self.reader.tensors if not is_optimizer(key)}
        for key in self.reader.tensors:
            state = optimizer_state(key)
            if (
                not self.changes.weights_only
                and is_optimizer(key)
                and (state is None or state[2] not in known)
            ):
                rule = f"{key} belongs to the layout that wrote it"
                raise ValueError(
                    f"SRC={self.reader.folder}: {rule}, and cannot be rewritten. Fix: give --weights-only."
                )


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
        needed = (
            f"{place} has {bytes_text(free_bytes)} free and the checkpoint needs {bytes_text(needed_bytes)}"
        )
        raise ValueError(f"DST={target}: {needed}. Fix: choose a larger disk, or make room.")


def _facts(source: Path, changes: Reshaping) -> dict[str, Any]:
    own = Manifest.read(source)
    facts = {name: value for name, value in (own.facts if own else {}).items() if name != "world_size"}
    return {
        **facts,
        "layout": vars(changes.layout),
        "reshaped_from": source.name,
        "weights_only": changes.weights_only,
    }
