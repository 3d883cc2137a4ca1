"""Chunks that each rank of a layout requests from a checkpoint, cut from another one's logical tensors.

Megatron's rules: column-parallel weights are split along the first axis, row-parallel ones along the second,
each half of a gated first projection by itself; experts lie along EP, split over ETP; the rest is replicated.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_exp.checkpoint.format.naming import LogicalTensor, layer_of, optimizer_state
from moe_exp.config import problem

_EXPERT = re.compile(r".*\.experts\.(\d+)\..+")
_STYLED_LAYER = re.compile(r"^decoder\.layers\.(\d+\.)?")
_STYLED_EXPERT = re.compile(r"experts\.experts\.(\d+\.)?")
_COLUMN_PARALLEL = (
    "word_embeddings.weight", "output_layer.weight", "output_layer.bias", "linear_qkv.weight",
    "linear_qkv.bias", "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight",
    "linear_fc1.weight", "linear_fc1.bias",
)  # fmt: skip
_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage that hold something no earlier rank holds."""
        return max(self.tp, self.ep * self.etp)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Pipeline rank of a layer; uneven stages differ by one layer."""
        return layer * self.pp * (self.vpp or 1) // num_layers % self.pp


@dataclass(frozen=True)
class Style:
    """Megatron's ways of writing: one key for all layers, one for all experts (and both gated halves)."""

    layers_stacked: bool
    experts_stacked: bool


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor."""

    source: LogicalTensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TargetChunk:
    """A chunk as a rank requests it; `pieces` are stacked along a new first axis, one per expert."""

    rank: int
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Reads the values, with one piece in memory beside them; ValueError if a file is damaged."""
        if len(self.pieces) == 1:
            piece = self.pieces[0]
            return piece.source.read(piece.offsets, piece.sizes).to(self.dtype).reshape(self.sizes)
        values = torch.empty((len(self.pieces), *self.pieces[0].sizes), dtype=self.dtype)
        for index, piece in enumerate(self.pieces):
            values[index] = piece.source.read(piece.offsets, piece.sizes)
        return values.reshape(self.sizes)


@dataclass(frozen=True)
class Model:
    """A checkpoint's model, from names and shapes; `gated` names the first projections with a gate."""

    num_layers: int
    num_experts: int
    layers_are_alike: bool
    gated: frozenset[str]

    @classmethod
    def of(cls, weights: Mapping[str, LogicalTensor]) -> Model:
        """Derived from the weights. A gate doubles the first projection: [2F, D] before [D, F]."""
        layers: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
        num_experts, gated = 0, set()
        for name, tensor in weights.items():
            layer, inner = layer_of(name)
            if layer is not None:
                layers.setdefault(layer, set()).add((inner, tensor.shape))
            if match := _EXPERT.fullmatch(inner):
                num_experts = max(num_experts, int(match[1]) + 1)
            if name.endswith("linear_fc1.weight"):
                second = weights.get(name.replace("linear_fc1", "linear_fc2"))
                if second is not None and tensor.shape[0] == 2 * second.shape[1]:
                    gated |= {name, name.removesuffix("weight") + "bias"}
        are_alike = len({frozenset(inner) for inner in layers.values()}) <= 1
        return cls(len(layers), num_experts, are_alike, frozenset(gated))


@dataclass(frozen=True)
class _Family:
    """The logical tensors that become one tensor of a layer: one, or the same one of all experts."""

    layer: int | None
    prefix: str  # of the optimizer, before the key
    base: str  # key without layer, expert and half
    members: tuple[LogicalTensor, ...]

    @property
    def is_expert(self) -> bool:
        return "experts.experts." in self.base


@dataclass(frozen=True)
class _Cut:
    """A tensor parallel rank's part of a logical tensor, and its place in the stored one."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    suffix: str  # of the key: _w and _v if the halves are separate tensors
    stored_offsets: tuple[int, ...]
    stored_shape: tuple[int, ...]


@dataclass(frozen=True)
class TargetPlan:
    """How a checkpoint is rewritten."""

    model: Model  # of the checkpoint
    layout: Layout  # of the ranks that will load it
    style: Style  # of the new checkpoint

    def stage_of(self, layer: int | None, base: str) -> int:
        """Pipeline rank of a tensor: first for the embedding, last for what follows the layers."""
        if layer is not None:
            return self.layout.stage_of(layer, self.model.num_layers)
        return 0 if base.startswith("embedding.") else self.layout.pp - 1

    def chunks(
        self, tensors: Mapping[str, LogicalTensor], dtypes: Mapping[str, torch.dtype], *, state: bool = False
    ) -> Iterator[TargetChunk]:
        """Chunks of the weights, or of one optimizer state, whose keys keep their prefix. `tensors` are in
        the order of `logical_tensors`. ValueError if a size of the layout does not divide what it splits.
        """
        for family in _families(tensors):
            name = family.members[0].name
            prefix = family.prefix if state else ""
            for cut in self._cuts(family, gated=name in self.model.gated):
                for block, members in self._groups(family):
                    yield self._chunk(family, cut, block, members, prefix, dtypes[name])

    def _groups(self, family: _Family) -> Iterator[tuple[int, range]]:
        """Expert parallel rank and members of each chunk."""
        if not family.is_expert:
            yield 0, range(1)
            return
        size = len(family.members) // self.layout.ep
        for expert in range(0, len(family.members), size if self.style.experts_stacked else 1):
            yield expert // size, range(expert, expert + (size if self.style.experts_stacked else 1))

    def _chunk(
        self, family: _Family, cut: _Cut, block: int, members: range, prefix: str, dtype: torch.dtype
    ) -> TargetChunk:
        layer, base, experts = family.layer, family.base, len(family.members)
        shape, offsets, sizes = cut.stored_shape, cut.stored_offsets, cut.sizes
        if family.is_expert and self.style.experts_stacked:
            shape, offsets, sizes = (experts, *shape), (members[0], *offsets), (len(members), *sizes)
        if layer is not None and self.style.layers_stacked:
            shape, offsets, sizes = (self.model.num_layers, *shape), (layer, *offsets), (1, *sizes)
        rank = self.layout.ranks_per_stage * self.stage_of(layer, base) + cut.rank
        rank += block * self.layout.etp if family.is_expert else 0
        key = prefix + styled_key(base, layer, members[0], self.style) + cut.suffix
        pieces = tuple(Piece(family.members[member], cut.offsets, cut.sizes) for member in members)
        return TargetChunk(rank, key, shape, offsets, sizes, pieces, dtype)

    def _cuts(self, family: _Family, *, gated: bool) -> Iterator[_Cut]:
        shape = family.members[0].shape
        axis, name = _split_axis(family), ("etp" if family.is_expert else "tp")
        size = self.layout.etp if family.is_expert else self.layout.tp
        single = gated and not self.style.experts_stacked
        # both halves in one request only for stacked experts that are not split, else one half at a time
        num_halves = 2 if gated and (single or size > 1 or not family.is_expert) else 1
        if axis is None:
            yield _Cut(0, (0,) * len(shape), shape, "", (0,) * len(shape), shape)
            return
        if shape[axis] % (num_halves * size):
            gate = ", its gate by itself" if num_halves > 1 else ""
            what = f"the {shape[axis]} {'columns' if axis else 'rows'} of {family.members[0].name}"
            rule = f"{what} cannot be split evenly{gate}"
            raise ValueError(problem(name, size, rule, f"give another --{name}"))
        width = shape[axis] // (num_halves * size)
        for rank in range(size):
            for half in range(num_halves):
                sizes = _replaced(shape, axis, width)
                offsets = _replaced((0,) * len(shape), axis, (half * size + rank) * width)
                suffix, own, whole = "", offsets, shape
                if single:
                    suffix, own = ("_w", "_v")[half], _replaced(offsets, axis, rank * width)
                    whole = _replaced(shape, axis, size * width)
                yield _Cut(rank, offsets, sizes, suffix, own, whole)


def styled_key(base: str, layer: int | None, expert: int, style: Style) -> str:
    """Key for `base` (as from `unstyled`) in a style; `expert` is only used for tensors of experts."""
    if not style.experts_stacked:
        base = base.replace("experts.experts.", f"experts.experts.{expert}.")
    if layer is None:
        return base
    return f"decoder.layers.{base}" if style.layers_stacked else f"decoder.layers.{layer}.{base}"


def unstyled(key: str) -> str:
    """Key without layer, expert and half: `mlp.experts.experts.linear_fc1.weight`."""
    key = _STYLED_EXPERT.sub("experts.experts.", _STYLED_LAYER.sub("", key))
    return key[:-2] if key.endswith(("_w", "_v")) else key


def _families(tensors: Mapping[str, LogicalTensor]) -> Iterator[_Family]:
    def kind(tensor: LogicalTensor) -> tuple[int | None, str, str]:
        key = tensor.boxes[0].stored.key
        prefix, _, key = optimizer_state(key) or ("", "", key)
        return layer_of(tensor.name)[0], prefix, unstyled(key)

    for (layer, prefix, base), members in itertools.groupby(tensors.values(), kind):
        yield _Family(layer, prefix, base, tuple(members))


def _split_axis(family: _Family) -> int | None:
    if family.is_expert and family.base.endswith("linear_fc2.bias"):
        return 0  # as in moe_exp.layers.megatron.sharding and Megatron's experts
    if family.base.endswith(_COLUMN_PARALLEL):
        return 0
    return 1 if family.base.endswith(_ROW_PARALLEL) else None


def _replaced(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
