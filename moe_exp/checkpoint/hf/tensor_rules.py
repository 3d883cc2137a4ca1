"""Rules that map Hugging Face tensors to checkpoint tensors, and functions that join and split tensors.

Letters are sizes: D hidden, V vocabulary, Q all query heads, K all key heads, W all value heads, H one head,
h number of query heads, O all attention outputs (h times the size of a value head), F dense MLP, f one
expert, S the shared expert, E number of experts. Gate and up together have size G = 2f in an
expert and T = 2S in the shared expert. With multi-head latent attention, A is the rank of compressed queries
and B the rank of compressed keys; R is B plus the rotary part of a key; N is all queries; M is all values
plus all keys without the rotary part; O is all values.

Reversible ways to join Hugging Face tensors ("theirs") into one tensor of a checkpoint ("ours"):

- plain   the same tensor in both formats.
- padded  zero rows pad our vocabulary to a multiple of 128. Added tokens without a row in the Hugging Face
          tensor get the mean of its rows, so that no added token is more probable than the average token.
- rows    concatenated rows, for example of the gate and the up projection, gate first.
- heads   Megatron's order: for each query group, the query heads, their gates if any, the key head and the
          value head. Zero rows pad value heads to the size of key heads (VALUE_HEAD_DIM).
- outputs   zero columns pad the output projection to match padded value heads.
- adjacent heads   like heads, but the channels of a rotary pair are adjacent in theirs and H/2 apart in ours.
- flat    theirs has an additional first axis of size 1.
- columns, pairs, pairs of columns   one tensor for all experts of a layer (gpt-oss). In theirs, the
          last two axes are swapped (columns), gate and up rows alternate (pairs), or both.
- halved  our values are theirs divided by 2.
- zeros   exists only in the Hugging Face folder: all zeros, without effect, but needed by other software.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import first_few
from moe_exp.config import Config


@dataclass(frozen=True)
class TensorRule:
    """One of our tensors (per model, layer or expert) and the Hugging Face tensors it is built from."""

    ours: str  # key; in layers without `decoder.layers.<layer>.`
    theirs: Mapping[str, str]  # names to sizes; in layers without `model.layers.<layer>.`; `{expert}`: index
    join: str = "plain"  # see above
    # `model` (once), or the layers that have it: `all`, `moe`, `dense`, `windowed`, `mtp` (multi-token
    # prediction)
    layers: str = "all"
    when: str = ""  # key of CONDITIONS
    # name in folders that transformers 5 writes with `save_original_format=False`; there, one tensor contains
    # all experts along its first axis
    alias: str = ""
    weighted: bool = False  # its output is multiplied by the router weights
    # in each layer a copy of this Hugging Face tensor; then `ours` is the key of the original
    copy_of: str = ""


def averages(config: Config) -> bool:
    """Whether MoE layers average the routed and shared expert outputs, as in Cohere2Moe."""
    return config.shared_expert_size > 0 and config.router_scaling_factor == 0.5


CONDITIONS: Mapping[str, Callable[[Config], bool]] = {
    "": lambda c: True,
    "untied": lambda c: not c.tie_embeddings,
    "tied": lambda c: c.tie_embeddings,
    "qk_norm": lambda c: c.qk_norm,
    "qkv_bias": lambda c: c.qkv_bias,
    "no_qkv_bias": lambda c: not c.qkv_bias,
    "expert_bias": lambda c: c.has_expert_bias,
    "no_expert_bias": lambda c: not c.has_expert_bias,
    "shared": lambda c: c.shared_expert_size > 0,
    "no_shared": lambda c: not c.shared_expert_size,
    "shared_gate": lambda c: c.shared_expert_size > 0 and c.shared_expert_gate,
    "q_lora": lambda c: c.q_lora_rank > 0,
    "no_q_lora": lambda c: not c.q_lora_rank,
    "average": averages,
    "no_average": lambda c: not averages(c),
    "shared, no_average": lambda c: c.shared_expert_size > 0 and not averages(c),
}


_OF_EXPERTS = ("columns", "pairs", "pairs of columns")
# Width of the all-zero shared expert in exports whose architecture requires one; divisible by usual TP sizes.
ZERO_EXPERT_SIZE = 64


def sizes_of(config: Config, *, has_window: bool = False) -> dict[str, int]:
    """Sizes by letter (see the top of this file) for layers with or without SLIDING_WINDOW."""
    groups = (has_window and config.window_query_groups) or config.num_query_groups
    value_head = config.value_head_dim or config.kv_channels
    value_head = config.v_head_dim if config.multi_latent_attention else value_head
    heads, rank = config.num_heads, config.kv_lora_rank
    nope, rope = config.qk_head_dim, config.qk_pos_emb_head_dim
    shared = config.shared_expert_size or ZERO_EXPERT_SIZE
    value, queries = heads * value_head, heads * config.kv_channels
    return {
        "1": 1, "D": config.hidden_size, "V": config.vocab_size, "H": config.kv_channels, "Q": queries,
        "h": heads, "2D": 2 * config.hidden_size, "K": groups * config.kv_channels, "W": groups * value_head,
        "F": config.ffn_hidden_size,
        "f": config.expert_ffn_size, "S": shared, "E": config.num_experts,
        "G": 2 * config.expert_ffn_size, "T": 2 * shared,
        "A": config.q_lora_rank, "B": rank, "R": rank + rope, "N": heads * (nope + rope),
        "M": heads * nope + value, "O": value,
    }  # fmt: skip


def joined_shape(join: str, parts: list[tuple[int, ...]], config: Config) -> tuple[int, ...]:
    """Shape of our tensor, given the Hugging Face shapes."""
    if join == "padded":
        return (config.padded_vocab_size, *parts[0][1:])
    if join == "flat":
        return parts[0][1:]
    if join.endswith("columns"):
        experts, columns, rows = parts[0]
        return (experts, rows, columns)
    if join == "outputs":
        return (parts[0][0], config.num_heads * config.kv_channels)
    if join.endswith("heads"):
        parts = [*parts[:-1], parts[-2]]
    return (sum(shape[0] for shape in parts), *parts[0][1:])


def joined(join: str, parts: list[Tensor], config: Config) -> Tensor:
    """Joins Hugging Face tensors into one of ours."""
    if join == "plain":
        return parts[0]
    if join == "padded":
        (table,) = parts
        if (missing := config.padded_vocab_size - table.size(0)) == 0:
            return table
        new_rows = table.new_zeros(missing, *table.shape[1:])
        if (num_added := config.vocab_size - table.size(0)) > 0:
            new_rows[:num_added] = table.mean(0, dtype=torch.float32)
        return torch.cat([table, new_rows])
    if join == "flat":
        return parts[0][0]
    if join in _OF_EXPERTS:  # of one expert, see `by_expert`
        ours = parts[0].t() if join.endswith("columns") else parts[0]
        return (_reordered(ours, (len(ours) // 2, 2)) if join.startswith("pairs") else ours).contiguous()
    if join == "halved":
        return parts[0] / 2
    if join == "outputs":
        (output,) = parts
        return _padded(output.reshape(-1, output.size(1) // config.num_heads), config).view(len(output), -1)
    if join == "adjacent heads":
        query, key, value = parts
        parts = [*(_reordered(part, (config.kv_channels // 2, 2)) for part in (query, key)), value]
    if join.endswith("heads"):
        groups = parts[-2].size(0) // config.kv_channels
        *others, value = (part.view(groups, -1, *part.shape[1:]) for part in parts)
        return torch.cat([*others, _padded(value, config)], dim=1).flatten(0, 1)
    return torch.cat(parts)


def taken_apart(join: str, ours: Tensor, shapes: list[tuple[int, ...]], config: Config) -> list[Tensor]:
    """Splits our tensor into Hugging Face tensors (views if possible); drops rows that pad the vocabulary."""
    if join == "padded":
        return [ours[: shapes[0][0]]]
    if join == "flat":
        return [ours.unsqueeze(0)]
    if join in _OF_EXPERTS:
        if join.startswith("pairs"):
            ours = _reordered(ours.flatten(0, 1), (2, ours.size(1) // 2)).view_as(ours)
        return [ours.transpose(1, 2) if join.endswith("columns") else ours]
    if join == "halved":
        return [ours * 2]
    if join == "outputs":
        return [_unpadded(ours.reshape(-1, config.kv_channels), config).reshape(shapes[0])]
    if join.endswith("heads"):
        groups = shapes[-2][0] // config.kv_channels
        rows = [*(shape[0] // groups for shape in shapes[:-1]), config.kv_channels]
        *others, value = ours.view(groups, -1, *ours.shape[1:]).split(rows, dim=1)
        parts = [part.flatten(0, 1) for part in (*others, _unpadded(value, config))]
        if join == "adjacent heads":
            parts[:2] = (_reordered(part, (2, config.kv_channels // 2)) for part in parts[:2])
        return parts
    return list(ours.split([shape[0] for shape in shapes]))


def _padded(values: Tensor, config: Config) -> Tensor:
    """Pads the channels of `values` [heads, channels, ...] with zeros to the size of key heads."""
    if not (missing := config.kv_channels - values.size(1)):
        return values
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


def _unpadded(values: Tensor, config: Config) -> Tensor:
    size = config.value_head_dim or config.kv_channels
    if values[:, size:].any():
        rule = "channels beyond it have nonzero weights. Fix: train with this setting from the start"
        raise ValueError(f"VALUE_HEAD_DIM={size}: {rule}.")
    return values[:, :size]


def _reordered(part: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Reorders each head's channels, or each expert's rows: reshapes them to `sizes` and transposes."""
    return part.unflatten(0, (-1, *sizes)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Theirs:
    """A tensor of a Hugging Face folder, or one expert's slice of it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MappedPiece:
    """A rectangular part (box) of one of our tensors, and the Hugging Face tensors it is built from."""

    key: str  # our key; empty for a tensor that only the Hugging Face folder has
    shape: tuple[int, ...]  # shape of the whole tensor under that key
    offsets: tuple[int, ...]  # offsets of the box
    box: tuple[int, ...]  # sizes of the box, 1 for layer and expert
    theirs: tuple[Theirs, ...]  # in joining order
    join: str  # see above
    expert: int | None = None  # expert index
    alias: str = ""  # alternative name, see TensorRule
    factor: float = 1.0  # theirs = factor * ours: ROUTER_SCALING_FACTOR if config.json cannot express it
    copy_of: str = ""  # see TensorRule


def pieces(rules: Sequence[TensorRule], config: Config, *, scales: bool) -> Iterator[MappedPiece]:
    """Yields all pieces, the embedding first. `scales`: whether config.json has routed_scaling_factor."""
    rules = [rule for rule in rules if CONDITIONS[rule.when](config)]
    of_layers = [sizes_of(config, has_window=has_window) for has_window in (False, True)]
    has_windows = [*config.window_layers, *[False] * config.mtp_num_layers]
    embedding, *others = [rule for rule in rules if rule.layers == "model"]
    yield from _pieces_of(embedding, config, of_layers[0])
    for layer, (is_moe, has_window) in enumerate(zip(config.all_moe_layers, has_windows, strict=True)):
        kinds = ["all", "moe" if is_moe else "dense", *["windowed"] * has_window]
        kinds += ["mtp"] * (layer >= config.num_layers)
        for rule in rules:
            if rule.layers in kinds:
                factor = config.router_scaling_factor if rule.weighted and not scales else 1.0
                yield from _pieces_of(rule, config, of_layers[has_window], layer, factor)
    for rule in others:
        yield from _pieces_of(rule, config, of_layers[0])


def _pieces_of(
    rule: TensorRule, config: Config, sizes: Mapping[str, int], layer: int | None = None, factor: float = 1.0
) -> Iterator[MappedPiece]:
    key, before = rule.ours, ""
    of_layer: list[tuple[int, int]] = []  # index and size on the layer axis
    if layer is not None:
        before, in_model = f"model.layers.{layer}.", "decoder.layers."
        if (number := layer - config.num_layers) >= 0:
            in_model = f"mtp.layers.{number}." + ("" if rule.layers == "mtp" else "transformer_layer.")
        elif len(set(config.moe_layers)) == 1 and config.has_equal_attention:
            # All layers are stacked in one tensor, as in Megatron.
            of_layer = [(layer, config.num_layers)]
        else:
            in_model += f"{layer}."
        key = in_model + key if key and not rule.copy_of else key
    is_per_expert = any("{expert}" in name for name in rule.theirs)
    for expert in range(config.num_experts) if is_per_expert else (None,):
        theirs = tuple(
            Theirs(before + name.format(expert=expert), tuple(sizes[letter] for letter in letters.split()))
            for name, letters in rule.theirs.items()
        )
        shape = joined_shape(rule.join, [part.shape for part in theirs], config)
        axes = of_layer + ([(expert, config.num_experts)] if expert is not None else [])
        whole = tuple(size for _, size in axes) + shape
        offsets = tuple(index for index, _ in axes) + (0,) * len(shape)
        box, alias = (1,) * len(axes) + shape, before + rule.alias if rule.alias else ""
        yield MappedPiece(key, whole, offsets, box, theirs, rule.join, expert, alias, factor, rule.copy_of)


def by_expert(piece: MappedPiece) -> Iterator[tuple[MappedPiece, int | None]]:
    """Yields the whole piece and None, unless the piece's `join` reorders each expert's values (which
    requires a copy). Then yields, for each expert, the expert's part of the piece and the expert's index.
    """
    if piece.join not in _OF_EXPERTS:
        yield piece, None
        return
    axis = len(piece.box) - len(piece.theirs[0].shape)
    for expert in range(piece.box[axis]):
        offsets, box = list(piece.offsets), list(piece.box)
        offsets[axis], box[axis] = expert, 1
        yield replace(piece, offsets=tuple(offsets), box=tuple(box)), expert


Shapes = Mapping[str, tuple[int, ...]]


def misfits(needed: Shapes, found: Shapes, unused: Sequence[str], of_other_types: Sequence[str] = ()) -> str:
    """Describes misfits, such as 'missing: a, b; unused: c' (at most five of each kind); '' if all fit."""
    others = []
    for name, shape in needed.items():
        if found.get(name, shape) != shape:
            others.append(f"{name} {list(found[name])} instead of {list(shape)}")
    lists = {
        "missing": [name for name in needed if name not in found],
        "unused": unused,
        "with another shape": others,
        "with an unsupported type": of_other_types,
    }
    return "; ".join(f"{what}: {first_few(names)}" for what, names in lists.items() if names)
