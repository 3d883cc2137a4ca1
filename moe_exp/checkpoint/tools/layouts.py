"""Which chunk of which tensor every rank of a layout asks a checkpoint for, from the logical tensors of
another checkpoint.

The rules are Megatron's: column-parallel weights are split along their first axis, row-parallel ones along
their second; a gated first projection is two halves, each split by itself; experts lie along EP and are split
over ETP; the rest is on every rank.
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
    """Sizes of the parallel dimensions that split a model."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage that hold something that no rank before them holds."""
        return max(self.tp, self.ep * self.etp)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Pipeline rank of a layer. Where the stages do not divide the layers, they differ by one layer."""
        return layer * self.pp * (self.vpp or 1) // num_layers % self.pp


@dataclass(frozen=True)
class Style:
    """In which of Megatron's ways a checkpoint is written: one key for all layers, one key for all experts
    (and gated halves).
    """

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
    """A chunk as a rank asks for it: `pieces`, one for each of its experts, lie along the axis before their
    own.
    """

    rank: int
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.sizes) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Its values; one piece is in memory beside them.

        Raises:
            ValueError: where a file of the source is damaged.
        """
        if len(self.pieces) == 1:
            piece = self.pieces[0]
            return piece.source.read(piece.offsets, piece.sizes).to(self.dtype).reshape(self.sizes)
        values = torch.empty((len(self.pieces), *self.pieces[0].sizes), dtype=self.dtype)
        for index, piece in enumerate(self.pieces):
            values[index] = piece.source.read(piece.offsets, piece.sizes)
        return values.reshape(self.sizes)


@dataclass(frozen=True)
class Model:
    """What the names and shapes of a checkpoint's weights say of its model; `gated` are the first projections
    with a gate.
    """

    num_layers: int
    num_experts: int
    layers_are_alike: bool
    gated: frozenset[str]

    @classmethod
    def of(cls, weights: Mapping[str, LogicalTensor]) -> Model:
        """From the logical tensors of the weights. A gate doubles the first projection: [2F, D] before [D,
        F].
        """
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
        return cls(
            len(layers),
            num_experts,
            len({frozenset(inner) for inner in layers.values()}) <= 1,
            frozenset(gated),
        )


@dataclass(frozen=True)
class _Family:
    """What becomes one tensor of a layer: one logical tensor, or the same one of all experts."""

    layer: int | None
    prefix: str  # what the optimizer puts before the key
    base: str  # the key without layer, expert and half
    members: tuple[LogicalTensor, ...]

    @property
    def is_expert(self) -> bool:
        return "experts.experts." in self.base


@dataclass(frozen=True)
class _Cut:
    """What rank `rank` of a tensor parallel group has of a logical tensor, and where that is in the stored
    one.
    """

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    suffix: str  # of the key: _w and _v where halves are tensors of their own
    stored_offsets: tuple[int, ...]
    stored_shape: tuple[int, ...]


@dataclass(frozen=True)
class TargetPlan:
    """How a checkpoint is written anew.

    Args:
        model: that of the checkpoint.
        layout: for whose ranks the chunks are.
        style: of the new checkpoint.
    """

    model: Model
    layout: Layout
    style: Style

    def stage_of(self, layer: int | None, base: str) -> int:
        """Pipeline rank of a tensor: the embedding is on the first, what follows the layers on the last."""
        if layer is not None:
            return self.layout.stage_of(layer, self.model.num_layers)
        return 0 if base.startswith("embedding.") else self.layout.pp - 1

    def chunks(
        self,
        tensors: Mapping[str, LogicalTensor],
        dtypes: Mapping[str, torch.dtype],
        *,
        keep_prefix: bool = False,
    ) -> Iterator[TargetChunk]:
        """The chunks of some logical tensors: the weights, or one state of the optimizer.

        Args:
            tensors: where the values are, in the order of `logical_tensors`.
            dtypes: types in the new checkpoint by logical name.
            keep_prefix: with what stands before the key of the parameter in the optimizer's keys.

        Raises:
            ValueError: where a size of the layout does not divide what it splits.
        """
        for family in _families(tensors):
            name = family.members[0].name
            prefix = family.prefix if keep_prefix else ""
            for cut in self._cuts(family, gated=name in self.model.gated):
                for block, members in self._groups(family):
                    yield self._chunk(family, cut, block, members, prefix, dtypes[name])

    def _groups(self, family: _Family) -> Iterator[tuple[int, range]]:
        """Which members are in one chunk, each with the expert parallel rank that has them."""
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
        rank = (
            self.layout.ranks_per_stage * self.stage_of(layer, base)
            + cut.rank
            + block * (self.layout.etp if family.is_expert else 0)
        )
        key = prefix + styled_key(base, layer, members[0], self.style) + cut.suffix
        pieces = tuple(Piece(family.members[member], cut.offsets, cut.sizes) for member in members)
        return TargetChunk(rank, key, shape, offsets, sizes, pieces, dtype)

    def _cuts(self, family: _Family, *, gated: bool) -> Iterator[_Cut]:
        shape = family.members[0].shape
        axis, name = _split_axis(family), ("etp" if family.is_expert else "tp")
        size = self.layout.etp if family.is_expert else self.layout.tp
        single = gated and not self.style.experts_stacked
        # Of stacked experts a rank that has both halves whole asks for them at once; of everything else for
        # half after half.
        num_halves = 2 if gated and (single or size > 1 or not family.is_expert) else 1
        if axis is None:
            yield _Cut(0, (0,) * len(shape), shape, "", (0,) * len(shape), shape)
            return
        if shape[axis] % (num_halves * size):
            gate = ", its gate by itself" if num_halves > 1 else ""
            rule = (
                f"the {shape[axis]} {'columns' if axis else 'rows'} of {family.members[0].name} cannot be"
                f" split evenly{gate}"
            )
            raise ValueError(problem(name, size, rule, f"give another --{name}"))
        width = shape[axis] // (num_halves * size)
        for rank in range(size):
            for half in range(num_halves):
                sizes = _replaced(shape, axis, width)
                offsets = _replaced((0,) * len(shape), axis, (half * size + rank) * width)
                if single:
                    own = _replaced(offsets, axis, rank * width)
                    yield _Cut(
                        rank, offsets, sizes, ("_w", "_v")[half], own, _replaced(shape, axis, size * width)
                    )
                else:
                    yield _Cut(rank, offsets, sizes, "", offsets, shape)


def styled_key(base: str, layer: int | None, expert: int, style: Style) -> str:
    """The key of a tensor or object in a style.

    Args:
        base: as `unstyled` gives it.
        layer: whose it is, None for what is in no layer.
        expert: whose it is; of no meaning but for those of experts.
        style: of the checkpoint.
    """
    if not style.experts_stacked:
        base = base.replace("experts.experts.", f"experts.experts.{expert}.")
    if layer is None:
        return base
    return f"decoder.layers.{base}" if style.layers_stacked else f"decoder.layers.{layer}.{base}"


def unstyled(key: str) -> str:
    """A key without layer, expert and half: `mlp.experts.experts.linear_fc1.weight`,
    `embedding.word_embeddings.weight`.
    """
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
        return 0  # as moe_exp.layers.megatron.sharding and Megatron's experts do
    if family.base.endswith(_COLUMN_PARALLEL):
        return 0
    return 1 if family.base.endswith(_ROW_PARALLEL) else None


def _replaced(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
