"""Rewrites a checkpoint with other keys (see keys.py), another dtype or the weights alone, in one process.

Any checkpoint loads under any layout, so the new one has a chunk for every layer and expert, whatever the
layout of the run. In memory are the chunk being written and the source chunks read last.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format import fingerprints, folders
from moe_exp.checkpoint.format.naming import (
    KEEP_BYTES,
    LogicalTensor,
    is_optimizer,
    layer_of,
    logical_name,
    logical_tensors,
    num_leading,
    optimizer_state,
    single_styles,
    states,
)
from moe_exp.checkpoint.format.settings import order_in
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.tools.info import BUFFERS, iteration_of
from moe_exp.host.files import write_atomically
from moe_exp.host.megatron_versions import COMMON_OBJECT
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_EXPERT = re.compile(r".*\.experts\.(\d+)\..+")
_STYLED_LAYER = re.compile(r"^decoder\.layers\.(\d+\.)?")
_STYLED_EXPERT = re.compile(r"experts\.experts\.(\d+\.)?")

_CHUNK_OVERHEAD_BYTES = 2500  # torch.save's per chunk, and its metadata
_Chunk = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Reshaping:
    """The changes to make."""

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
    folders.check_target(target)
    reader = CheckpointReader(source, keep_bytes=keep_bytes)
    work = _Work(reader, changes, values)  # refuses what does not fit
    tensors = list(work.tensors())
    num_bytes = sum(math.prod(tensor.shape) * dtype.itemsize for _, tensor, dtype in tensors)
    overhead_bytes = _CHUNK_OVERHEAD_BYTES * (2 * len(tensors) + len(reader.objects))
    iteration = iteration_of(source, work.common)
    found: list[fingerprints.Fingerprints] = []
    with folders.new_folder(target, num_bytes=num_bytes + overhead_bytes) as partial:
        folder = folders.iteration_folder(partial, iteration)
        with TorchDistWriter(folder) as writer, progress("writing", num_bytes) as advance:
            for prefix, tensor, dtype in tensors:
                for key, chunk, shape, offsets in work.chunks(tensor):
                    chunk = chunk.to(dtype)
                    writer.add_chunk(prefix + key, chunk, shape=shape, offsets=offsets)
                    if values is not None and work.experts_stacked:  # else keys are others
                        found.append(fingerprints.fingerprints_of([(key, chunk, offsets)]))
                    advance(chunk.nbytes)
            for key, value in work.objects():
                writer.add_object(key, value)
            writer.finish(work.new_common())
        written = fingerprints.added(found)
        if values is None:
            dtype_name = str(DTYPES[changes.dtype]).removeprefix("torch.") if changes.dtype else None
            saved = fingerprints.read(source) or {}
            written = fingerprints.kept(saved, weights_only=changes.weights_only, dtype=dtype_name)
        if written:
            fingerprints.write(folder, written)
        own = folders.Manifest.read(source)
        all_facts = {name: fact for name, fact in (own.facts if own else {}).items() if name != "world_size"}
        all_facts |= {"reshaped_from": source.name, "weights_only": changes.weights_only} | dict(facts or {})
        manifest = folders.Manifest(iteration, folders.entries_of(folder), all_facts)
        manifest.write(folder)
        write_atomically(partial / LATEST, str(iteration))
    return Written(folders.iteration_folder(target, iteration), manifest.num_bytes)


class _Work:
    """What is read and written. Raises a ValueError if the changes do not fit the checkpoint."""

    def __init__(
        self, reader: CheckpointReader, changes: Reshaping, values: Mapping[str, LogicalTensor] | None
    ):
        self.reader, self.changes, self.values = reader, changes, values
        self.common = reader.common()
        self.weights = logical_tensors(reader)
        self.states = [] if changes.weights_only else states(reader)
        layers: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in self.weights.items():
            layer, inner = layer_of(name)
            if layer is not None:
                layers.setdefault(layer, set()).add((inner, tensor.shape))
        self.num_layers = len(layers)
        self.num_experts = max((_expert_of(name) + 1 for name in self.weights), default=0)
        single_layers, single_experts = single_styles(filterfalse(is_optimizer, reader.tensors))
        # Megatron's ways of writing: one key for all layers, one for all experts (and both gated halves).
        self.experts_stacked = changes.experts == "stacked" if changes.experts else not single_experts
        self.layers_stacked = not single_layers and self.experts_stacked
        if changes.layers:
            self.layers_stacked = changes.layers == "stacked"
        self._check(layers_are_alike=len(set(map(frozenset, layers.values()))) <= 1)

    def _check(self, *, layers_are_alike: bool) -> None:
        for key in [] if self.changes.weights_only else filter(is_optimizer, self.reader.tensors):
            if (state := optimizer_state(key)) is None or state[2] not in self.reader.tensors:
                rule = f"{key} belongs to the layout that wrote it, and cannot be rewritten"
                raise folders.unusable(f"SRC={self.reader.folder}", rule, "give --weights-only")
        rule = ""
        if self.layers_stacked and not layers_are_alike:
            rule = "the layers differ, as dense and MoE layers do"
        elif self.layers_stacked and not self.experts_stacked:
            rule = "Megatron has no such style with single experts"
        if rule:
            raise folders.unusable("layers=stacked", rule, "give --layers single")
        has_optimizer = "optimizer" in self.common and not self.changes.weights_only
        if self.changes.dtype == "bf16" and has_optimizer and "param" not in self.states:
            rule = "the fp32 weights that the optimizer continues from would be lost"
            raise folders.unusable("DTYPE=bf16", rule, "give --weights-only, too")

    def tensors(self) -> Iterator[tuple[str, LogicalTensor, torch.dtype]]:
        """Prefix of the key, values and new dtype of the weights, then of the optimizer's states."""
        main = logical_tensors(self.reader, "param") if self.changes.dtype == "fp32" else {}
        for name, stored in self.weights.items():
            dtype = stored.dtype
            if self.changes.dtype and dtype.is_floating_point and not name.endswith(BUFFERS):
                dtype = DTYPES[self.changes.dtype]
            yield "", self.values[name] if self.values else main.get(name, stored), dtype
        for state in self.states:
            for tensor in logical_tensors(self.reader, state).values():
                prefix, _, _ = optimizer_state(tensor.boxes[0].stored.key) or ("", "", "")
                yield prefix, tensor, tensor.dtype

    def chunks(self, tensor: LogicalTensor) -> Iterator[_Chunk]:
        """Key, values, shape of the whole and offsets of the chunks of a tensor: one, or two if the halves of
        a gated first projection have keys of their own, as they do where experts are single.
        """
        key = tensor.boxes[0].stored.key
        _, _, key = optimizer_state(key) or ("", "", key)
        key, axes = self._styled(key, tensor.name)
        values = tensor.read()
        parts = {"": values}
        # A gate doubles the first projection: [2F, D] before [D, F].
        if not self.experts_stacked and (first := re.fullmatch(r"(.+\.linear_fc)1\.\w+", tensor.name)):
            second = self.weights.get(f"{first[1]}2.weight")
            if second is not None and values.size(0) == 2 * second.shape[1]:
                parts = dict(zip(("_w", "_v"), values.chunk(2), strict=True))
        for suffix, part in parts.items():
            shape = (*(count for _, count in axes), *part.shape)
            offsets = (*(index for index, _ in axes), *(0 for _ in part.shape))
            yield key + suffix, part.reshape((1,) * len(axes) + part.shape), shape, offsets

    def _styled(self, key: str, name: str) -> tuple[str, list[tuple[int, int]]]:
        """Key of a logical tensor in the new style, from the old one; index and size of its leading axes."""
        key = _STYLED_EXPERT.sub("experts.experts.", _STYLED_LAYER.sub("", key))
        key = key[:-2] if key.endswith(("_w", "_v")) else key
        (layer, _), expert, axes = layer_of(name), _expert_of(name), []
        if layer is not None:
            key = f"decoder.layers.{key}" if self.layers_stacked else f"decoder.layers.{layer}.{key}"
            axes += [(layer, self.num_layers)] if self.layers_stacked else []
        if expert >= 0 and self.experts_stacked:
            axes.append((expert, self.num_experts))
        elif expert >= 0:
            key = key.replace("experts.experts.", f"experts.experts.{expert}.")
        return key, axes

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Objects of the new checkpoint, by full key."""
        for full_key in self.reader.objects:
            key, match = full_key, _OBJECT.fullmatch(full_key)
            if full_key == COMMON_OBJECT:  # it becomes common.pt
                continue
            if match and match[1].endswith("._extra_state"):
                place = tuple(map(int, match[2].split(".")))
                name, _ = logical_name(match[1], place[: num_leading(match[1])])
                key, axes = self._styled(match[1], name)
                axes = axes or [(0, 1)]
                indices, sizes = (".".join(str(axis[part]) for axis in axes) for part in (0, 1))
                key = f"{key}/shard_{indices}_{sizes}"
            elif self.changes.weights_only:
                continue
            value = self.reader.read_object(full_key)
            yield key, value[0] if isinstance(value, list) and len(value) == 1 else value

    def new_common(self) -> dict[str, Any]:
        """common.pt of the new checkpoint."""
        common = dict(self.common)
        if self.changes.weights_only:
            kept = {name: common[name] for name in ("config", "content_metadata") if name in common}
            common = kept | {"sample_order": order_in(common)}
        if "content_metadata" in common:
            singles = {"singleton_local_shards": not self.experts_stacked}
            common["content_metadata"] = common["content_metadata"] | singles
        if "config" in common and self.changes.dtype:
            common["config"] = common["config"] | {"dtype": self.changes.dtype}
        return common


def _expert_of(name: str) -> int:
    """The expert of a logical tensor; -1: it is of none."""
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else -1
