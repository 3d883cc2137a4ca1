"""Maps every tensor of a checkpoint to tensors of a Hugging Face folder, for one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_exp.checkpoint.hf.families import Architecture
from moe_exp.checkpoint.hf.tensor_rules import CONDITIONS, TensorRule, joined_shape, sizes_of
from moe_exp.config import Config


@dataclass(frozen=True)
class Theirs:
    """A tensor of a Hugging Face folder, or one expert of it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of one of our tensors, and the tensors of theirs that it is made of."""

    key: str  # of ours; empty for a tensor that only they have
    shape: tuple[int, ...]  # of the whole tensor under that key
    offsets: tuple[int, ...]  # of the box
    box: tuple[int, ...]  # its sizes, 1 for layer and expert
    theirs: tuple[Theirs, ...]  # in joining order
    join: str  # see tensor_rules
    expert: int | None = None  # its index
    alias: str = ""  # another name for theirs, see TensorRule
    factor: float = 1.0  # theirs is ours times it: ROUTER_SCALING_FACTOR where config.json cannot express it

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of the box without the axes of layer and expert."""
        return self.box[len(self.box) - len(self.theirs[0].shape) :]


def layers_are_stacked(config: Config) -> bool:
    """Whether a checkpoint stores all layers as one tensor; Megatron's condition."""
    return len(set(config.moe_layers)) == 1


def pieces(architecture: Architecture, config: Config) -> Iterator[Piece]:
    """All tensors of the model: the embedding, layer by layer, then the rest."""
    once = [rule for rule in architecture.tensors if rule.layers == "model" and CONDITIONS[rule.when](config)]
    yield from _of_model(once[:1], config)
    for layer, is_moe in enumerate(config.moe_layers):
        for rule in architecture.tensors:
            if rule.layers in ("all", "moe" if is_moe else "dense") and CONDITIONS[rule.when](config):
                factor = config.router_scaling_factor if rule.weighted and not architecture.scales else 1.0
                yield from _of_layer(rule, layer, config, factor)
    yield from _of_model(once[1:], config)


def _of_model(rules: list[TensorRule], config: Config) -> Iterator[Piece]:
    for rule in rules:
        theirs = _theirs(rule, config)
        shape = joined_shape(rule.join, [part.shape for part in theirs], config)
        yield Piece(rule.ours, shape, (0,) * len(shape), shape, theirs, rule.join)


def _of_layer(rule: TensorRule, layer: int, config: Config, factor: float) -> Iterator[Piece]:
    stacked = layers_are_stacked(config)
    key = f"decoder.layers.{rule.ours}" if stacked else f"decoder.layers.{layer}.{rule.ours}"
    before = f"model.layers.{layer}."
    for expert in range(config.num_experts) if rule.per_expert else (None,):
        theirs = _theirs(rule, config, before, expert)
        shape = joined_shape(rule.join, [part.shape for part in theirs], config)
        axes = [(layer, config.num_layers)] if stacked else []
        axes += [(expert, config.num_experts)] if expert is not None else []
        whole = tuple(size for _, size in axes) + shape
        offsets = tuple(index for index, _ in axes) + (0,) * len(shape)
        box, alias = (1,) * len(axes) + shape, before + rule.alias if rule.alias else ""
        yield Piece(key if rule.ours else "", whole, offsets, box, theirs, rule.join, expert, alias, factor)


def _theirs(
    rule: TensorRule, config: Config, before: str = "", expert: int | None = None
) -> tuple[Theirs, ...]:
    sizes = sizes_of(config)
    return tuple(
        Theirs(before + name.format(expert=expert), tuple(sizes[letter] for letter in letters.split()))
        for name, letters in rule.theirs.items()
    )


def misfits(lists: Mapping[str, Sequence[str]]) -> str:
    """'missing: a, b; without a use: c' with the first five of each list; empty if all lists are."""
    return "; ".join(f"{what}: {_first(names)}" for what, names in lists.items() if names)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
