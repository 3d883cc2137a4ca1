"""Rewrites a checkpoint in one process, to change its key style (see keys.py) or its dtype, or to keep only
its weights. Also writes the weighted average of several checkpoints.

The new checkpoint has one chunk per layer and expert. Memory holds one new chunk and recent source chunks.

Averaging the last checkpoints of a constant-learning-rate run can replace learning rate decay (Tian et al.
2025, WSM, arXiv 2507.17634). Let c_0 ... c_k be the averaging weights of checkpoints t_0 ... t_k. The
average is t_0 plus all later updates; the update from t_{i-1} to t_i is scaled by w_i = c_i + ... + c_k.
A decay w_1 >= ... >= w_k thus corresponds to the weights c_k = w_k, c_i = w_i - w_{i+1} and c_0 = 1 - w_1.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format import fingerprints, folders, naming
from moe_exp.checkpoint.format.settings import order_in, saved_config
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, TensorChunk, read_common
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.tools.info import BUFFERS, chosen, iteration_of
from moe_exp.config import setting_error
from moe_exp.config.model_changes import model_changes
from moe_exp.data.tokens.tokenizer import same_fingerprint
from moe_exp.engine.optimizer_classes import AVERAGE
from moe_exp.host.files import write_atomically
from moe_exp.host.megatron_versions import COMMON_OBJECT
from moe_exp.host.progress import progress
from moe_exp.runs.run_folder import LATEST

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_EXPERT = re.compile(r".*\.experts\.(\d+)\..+")
_STYLED_LAYER = re.compile(r"^decoder\.layers\.(\d+\.)?")
_STYLED_EXPERT = re.compile(r"experts\.experts\.(\d+\.)?")

_CHUNK_OVERHEAD_BYTES = 2500  # per chunk: overhead of torch.save, and an entry in .metadata
Tensors = Mapping[str, naming.LogicalTensor]  # by name

# w_i as a function of i and the number of checkpoints
_DECAYS: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda i, number: 1 - i / number,
    "1-sqrt": lambda i, number: 1 - math.sqrt(i / number),
    "cosine": lambda i, number: (1 + math.cos(math.pi * i / number)) / 2,
    "inverse-sqrt": lambda i, number: 1 / math.sqrt(1 + i),
}
WEIGHTS = (*_DECAYS, "ema")
_BLOCK = 2**18  # values per step of an fp64 sum


@dataclass(frozen=True)
class Reshaping:
    """Changes that `reshape` makes to a checkpoint."""

    # drop optimizer, schedule, random streams and progress: a run that loads it starts at iteration 0
    weights_only: bool = False
    # dtype of the weights: `bf16`, or `fp32` (from the optimizer's main weights, if any); None: unchanged
    dtype: str | None = None
    layers: str | None = None  # `stacked` or `single`; None: unchanged, but single if experts become single
    experts: str | None = None  # `stacked` or `single`; None: unchanged


@dataclass(frozen=True)
class Written:
    """The new checkpoint."""

    folder: Path
    num_bytes: int


def reshape(
    source: Path, target: Path, changes: Reshaping, *, keep_bytes: int = naming.KEEP_BYTES,
    values: Tensors | None = None, facts: Mapping[str, Any] | None = None,
) -> Written:  # fmt: skip
    """Atomically writes a changed copy of `source` (an iter_ folder) to `target` (a checkpoints folder).
    Keeps up to `keep_bytes` of recent source chunks in memory. `values` replace the weights; `facts` are
    added to the manifest. Raises ValueError if the source is damaged, the changes do not apply, `target`
    exists, or the disk lacks space.
    """
    folders.check_target(target)
    reader = CheckpointReader(source, keep_bytes=keep_bytes)
    work = _Work(reader, changes, values)  # checks the changes
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
                    if values is not None and work.experts_stacked:  # fingerprints use the stacked keys
                        found.append(fingerprints.fingerprints_of([(key, chunk, offsets)]))
                    advance(chunk.nbytes)
            for key, value in work.objects():
                writer.add_object(key, value)
            entries = writer.finish(work.new_common())
        written = fingerprints.added(found)
        if values is None:
            dtype_name = str(DTYPES[changes.dtype]).removeprefix("torch.") if changes.dtype else None
            saved = fingerprints.read(source) or {}
            written = fingerprints.kept(saved, weights_only=changes.weights_only, dtype=dtype_name)
        if written:
            fingerprints.write(folder, written)
            entries[fingerprints.FILE] = folders.entry_of(folder / fingerprints.FILE)
        own = folders.Manifest.read(source)
        all_facts = {name: fact for name, fact in (own.facts if own else {}).items() if name != "world_size"}
        all_facts |= {"reshaped_from": source.name, "weights_only": changes.weights_only} | dict(facts or {})
        manifest = folders.Manifest(iteration, entries, all_facts)
        manifest.write(folder)
        write_atomically(partial / LATEST, str(iteration))
    return Written(folders.iteration_folder(target, iteration), manifest.num_bytes)


class _Work:
    """What `reshape` has to read and write. Raises ValueError if `changes` do not apply to the checkpoint."""

    def __init__(self, reader: CheckpointReader, changes: Reshaping, values: Tensors | None):
        self.reader, self.changes, self.values = reader, changes, values
        self.common = reader.common()
        self.weights = naming.logical_tensors(reader)
        self.states = [] if changes.weights_only else naming.states(reader)
        layers: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in self.weights.items():
            layer, inner = naming.layer_of(name)
            if layer is not None:
                layers.setdefault(layer, set()).add((inner, tensor.shape))
        self.num_layers = len(layers)
        self.num_experts = max((_expert_of(name) + 1 for name in self.weights), default=0)
        single_layers, single_experts = naming.single_styles(naming.weight_keys(reader.tensors))
        # Megatron's stacked styles: one key for all layers; one for all experts, with both gated halves.
        self.experts_stacked = changes.experts == "stacked" if changes.experts else not single_experts
        self.layers_stacked = not single_layers and self.experts_stacked
        if changes.layers:
            self.layers_stacked = changes.layers == "stacked"
        for key in [] if changes.weights_only else filter(naming.is_optimizer, reader.tensors):
            if (state := naming.optimizer_state(key)) is None or state[2] not in reader.tensors:
                rule = f"{key} depends on the parallel layout of its run and cannot be rewritten"
                raise folders.unusable(f"SRC={reader.folder}", rule, "pass --weights-only")
        rule = ""
        if self.layers_stacked and len(set(map(frozenset, layers.values()))) > 1:
            rule = "requires layers with the same tensors, but dense and MoE layers differ"
        elif self.layers_stacked and not self.experts_stacked:
            rule = "cannot be combined with one key per expert in Megatron"
        if rule:
            raise folders.unusable("layers=stacked", rule, "pass --layers single")
        has_optimizer = "optimizer" in self.common and not changes.weights_only
        if changes.dtype == "bf16" and has_optimizer and "param" not in self.states:
            rule = "would lose the fp32 weights that the optimizer needs"
            raise folders.unusable("DTYPE=bf16", rule, "add --weights-only")

    def tensors(self) -> Iterator[tuple[str, naming.LogicalTensor, torch.dtype]]:
        """Yields (key prefix, values, new dtype) of each tensor: all weights, then all optimizer states."""
        main = naming.logical_tensors(self.reader, "param") if self.changes.dtype == "fp32" else {}
        for name, stored in self.weights.items():
            dtype = stored.dtype
            if self.changes.dtype and dtype.is_floating_point and not name.endswith(BUFFERS):
                dtype = DTYPES[self.changes.dtype]
            yield "", self.values[name] if self.values else main.get(name, stored), dtype
        for state in self.states:
            for tensor in naming.logical_tensors(self.reader, state).values():
                prefix, _, _ = naming.optimizer_state(tensor.boxes[0].stored.key) or ("", "", "")
                yield prefix, tensor, tensor.dtype

    def chunks(self, tensor: naming.LogicalTensor) -> Iterator[TensorChunk]:
        """Yields each chunk of a tensor: key, values, shape of the whole tensor, and the chunk's offsets."""
        key = tensor.boxes[0].stored.key
        _, _, key = naming.optimizer_state(key) or ("", "", key)
        key, axes = self._styled(key, tensor.name)
        values = tensor.read()
        parts = {"": values}
        # In the single-expert style, the two halves of a gated first projection have separate keys. Gated
        # projections are recognized by their shape: [2F, D] followed by [D, F].
        if not self.experts_stacked and (first := re.fullmatch(r"(.+\.linear_fc)1\.\w+", tensor.name)):
            second = self.weights.get(f"{first[1]}2.weight")
            if second is not None and values.size(0) == 2 * second.shape[1]:
                parts = dict(zip(("_w", "_v"), values.chunk(2), strict=True))
        for suffix, part in parts.items():
            shape = (*(count for _, count in axes), *part.shape)
            offsets = (*(index for index, _ in axes), *(0 for _ in part.shape))
            yield key + suffix, part.reshape((1,) * len(axes) + part.shape), shape, offsets

    def _styled(self, key: str, name: str) -> tuple[str, list[tuple[int, int]]]:
        """New-style key of a logical tensor, and (index, size) of its layer and expert axes if stacked."""
        key = _STYLED_EXPERT.sub("experts.experts.", _STYLED_LAYER.sub("", key))
        key = key[:-2] if key.endswith(("_w", "_v")) else key
        (layer, _), expert, axes = naming.layer_of(name), _expert_of(name), []
        if layer is not None:
            key = f"decoder.layers.{key}" if self.layers_stacked else f"decoder.layers.{layer}.{key}"
            axes += [(layer, self.num_layers)] if self.layers_stacked else []
        if expert >= 0 and self.experts_stacked:
            axes.append((expert, self.num_experts))
        elif expert >= 0:
            key = key.replace("experts.experts.", f"experts.experts.{expert}.")
        return key, axes

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yields the full key and the value of each object in the new checkpoint."""
        for full_key in self.reader.objects:
            key, match = full_key, _OBJECT.fullmatch(full_key)
            if full_key == COMMON_OBJECT:  # written as common.pt
                continue
            if match and match[1].endswith("._extra_state"):
                place = tuple(map(int, match[2].split(".")))
                name, _ = naming.logical_name(match[1], place[: naming.num_leading(match[1])])
                key, axes = self._styled(match[1], name)
                axes = axes or [(0, 1)]
                indices, sizes = (".".join(str(axis[part]) for axis in axes) for part in (0, 1))
                key = f"{key}/shard_{indices}_{sizes}"
            elif self.changes.weights_only:
                continue
            value = self.reader.read_object(full_key)
            yield key, value[0] if isinstance(value, list) and len(value) == 1 else value

    def new_common(self) -> dict[str, Any]:
        """Content of common.pt in the new checkpoint."""
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
    """Expert index in a logical tensor's name; -1 if the tensor does not belong to an expert."""
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else -1


def weights_of(name: str, number: int, *, ema_decay: float = 0.9) -> list[float]:
    """Weights of `number` checkpoints, oldest first. The weights sum to 1. If `name` is `1-sqrt`, `cosine`
    or `inverse-sqrt`, the average replaces a learning rate decay of this shape; `uniform` replaces a linear
    decay. With `ema`, each weight is `ema_decay` times the next weight. Otherwise, `name` is comma-separated
    numbers. Raises ValueError if the name is unknown or the numbers are invalid.
    """
    if name in _DECAYS:
        decay = [1.0, *(_DECAYS[name](i, number) for i in range(1, number)), 0.0]
        return [now - after for now, after in pairwise(decay)]
    if name == "ema":
        if not 0 < ema_decay < 1:
            raise setting_error("ema_decay", ema_decay, "must be between 0 and 1", "use a value such as 0.9")
        found = [ema_decay ** (number - 1 - i) for i in range(number)]
    else:
        try:
            found = [float(word) for word in name.split(",")]
        except ValueError:
            rule = f"must be one of {', '.join(WEIGHTS)}, or numbers"
            raise setting_error("weights", name, rule, "use a name, or numbers such as 1,2,3") from None
        if len(found) != number:
            rule = f"has {len(found)} numbers for {number} checkpoints"
            raise setting_error("weights", name, rule, "list one number per checkpoint, oldest first")
    if not 0 < sum(found) < math.inf:
        raise setting_error("weights", name, "must have a positive sum", "use other numbers")
    return [one / sum(found) for one in found]


def sources_of(paths: Sequence[Path], *, last: int = 0) -> list[Path]:
    """The `last` newest iter_ folders of each path (0: all). Raises ValueError if a folder occurs twice."""
    if last < 0:
        raise setting_error("last", last, "must not be negative", "use the number of checkpoints to average")
    found: list[Path] = []
    for path in paths:
        found += [chosen(folder) for folder in (folders.usable(path)[::-1] or [path])[-last:]]
    places = [path.resolve() for path in found]
    if twice := next((path for path in found if places.count(path.resolve()) > 1), None):
        raise setting_error("SRC", twice, "is listed twice", "list it once, with a larger --weights number")
    return found


def average(
    sources: Sequence[Path], target: Path, weights: Sequence[float], *, of_ema: bool = False
) -> Written:
    """Writes the weighted average of `sources` as a weights-only checkpoint with the last source's iteration.
    The sources are iter_ folders of any layout, oldest first. `of_ema` averages the stored moving averages
    (EMA_DECAY) instead. The expert bias has no moving average, so its own values are averaged. Raises
    ValueError if the models differ or a needed moving average is missing, and whenever `reshape` would.
    """
    readers = [CheckpointReader(source, keep_bytes=naming.KEEP_BYTES // len(sources)) for source in sources]
    stored = [naming.logical_tensors(reader) for reader in readers]
    main = [naming.logical_tensors(reader, AVERAGE if of_ema else "param") for reader in readers]
    for reader in readers if of_ema else ():
        if not reader.common().get("progress", {}).get("num_averaged"):
            fix = "omit --ema, or specify a checkpoint of a run with EMA_DECAY"
            raise setting_error("SRC", reader.folder, "has no moving average of the weights", fix)
    for source, tensors in zip(sources, stored, strict=True):
        if rule := _difference(source, tensors, sources[-1], stored[-1]):
            raise setting_error("SRC", source, rule, "average only checkpoints of one model")
    # Tensors with fp32 main weights in all checkpoints are averaged from those, which are more precise.
    values: dict[str, naming.LogicalTensor] = {}
    for name in stored[-1]:
        of_each = main if all(name in one for one in main) else stored
        parts = tuple(one[name] for one in of_each)
        values[name] = _Averaged(name, parts[-1].boxes, readers[-1], parts, tuple(weights))
    origin: list[dict[str, Any]] = []
    for source, reader, weight in zip(sources, readers, weights, strict=True):
        iteration = iteration_of(source, reader.common())
        origin.append({"checkpoint": str(source), "iteration": iteration, "weight": weight})
        origin[-1] |= {"state": AVERAGE} if of_ema else {}
    facts = {"averaged_from": origin, "valid_loss": None}
    return reshape(sources[-1], target, Reshaping(weights_only=True), values=values, facts=facts)


def _difference(source: Path, tensors: Tensors, last: Path, expected: Tensors) -> str:
    """Describes how the models of `source` and `last` differ; empty if they do not."""
    for name in sorted(expected.keys() | tensors.keys()):
        shapes = [list(one[name].shape) if name in one else None for one in (tensors, expected)]
        if shapes[0] != shapes[1]:
            return f"has {name} with shape {shapes[0]}, but in {last} its shape is {shapes[1]}"
    common, common_of_last = read_common(source), read_common(last)
    if "config" in common and "config" in common_of_last:  # otherwise Megatron-LM's, without settings
        shapes_changed, functions_changed = model_changes(saved_config(last), common["config"], str(source))
        if changes := shapes_changed + functions_changed:
            name = changes[0].name.upper()
            return f"has {name}={changes[0].before}, but {last} has {name}={changes[0].value}"
    orders = [order_in(one) for one in (common, common_of_last)]
    prints = [one.get("tokenizer") or "" for one in orders]
    if all(prints) and not same_fingerprint(*prints):
        return f"was trained with a different tokenizer than {last}"
    ends = [(one.get("eod_id"), one.get("bos_id")) for one in orders]
    if (None, None) not in ends and ends[0] != ends[1]:
        return f"was trained with end and begin tokens {ends[0]}, but {last} with {ends[1]}"
    return ""


@dataclass(frozen=True)
class _Averaged(naming.LogicalTensor):
    """Weighted sum of tensors, computed when it is read."""

    parts: tuple[naming.LogicalTensor, ...] = ()
    weights: tuple[float, ...] = ()

    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Reads all values, or the box of shape `sizes` at `offsets`. Sums in fp64 and rounds once."""
        # Integer tensors are not averaged: the last checkpoint's values are used.
        *values, out = [part.read(offsets, sizes).contiguous() for part in self.parts]
        if out.is_floating_point():
            flat = [one.view(-1).split(_BLOCK) for one in (*values, out)]
            for block in zip(*flat, strict=True):
                # starts with the first term, because adding it to 0 would lose the sign of -0
                total = block[0].to(torch.float64).mul_(self.weights[0])
                for one, weight in zip(block[1:], self.weights[1:], strict=True):
                    total.add_(one.to(torch.float64), alpha=weight)
                block[-1].copy_(total)
        return out
