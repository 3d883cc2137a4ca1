"""Accesses a checkpoint's tensors by layer and expert, whatever Megatron key style it uses (see keys.py).

A logical tensor has the same name in every style, such as
`decoder.layers.3.self_attention.linear_qkv.weight`. In `decoder.layers.3.mlp.experts.5.linear_fc1.weight`
[W, D], the gate is the first half of W. The norm before an MLP, dense or MoE, is
`decoder.layers.3.pre_mlp_layernorm.weight`. Tensors outside layers keep their keys. A logical tensor is a
box (index ranges) of one stored tensor, or two joined boxes (gate and up projection). Each logical tensor
can be read without the others.

The optimizer states `param` (fp32 main weights), `exp_avg`, `exp_avg_sq` and `ema` (moving average of the
weights) have the same names as their weights.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import unusable
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, StoredTensor

# Memory for a reader's recent chunks: one chunk can contain many logical tensors.
KEEP_BYTES = 256 << 20

_STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.)(\w+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(.*\.)?experts\.experts\.(?!\d)(.+)")
_SINGLE_EXPERT = re.compile(r"(.*\.)?experts\.experts\.(\d+\..+)")
# Halves of a gated projection in the single-expert style: `_w` is the gate.
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
# Megatron's alternative names of the norms before MLP and attention, and the names used here.
_NORMS = (
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
)
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SINGLE = re.compile(r"\.experts\.\d+\.|\.linear_fc1\.(weight|bias)_w$")


@dataclass(frozen=True)
class StoredBox:
    """Index ranges of a stored tensor; the first `num_leading` ranges (layer, expert) have length 1."""

    stored: StoredTensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_leading: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes[self.num_leading :]


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of one layer, of one expert or of the whole model."""

    name: str  # see the top of this file
    boxes: tuple[StoredBox, ...]  # location of its values; several boxes are joined along the first axis
    reader: CheckpointReader = field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.boxes[0].shape
        return (sum(box.shape[0] for box in self.boxes), *first[1:]) if len(self.boxes) > 1 else first

    @property
    def dtype(self) -> torch.dtype:
        return self.boxes[0].stored.dtype

    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Reads the box at `offsets` with `sizes` (default: all). Raises ValueError if a file is damaged."""
        if not self.shape:
            return self._read_part(self.boxes[0], (), ())
        offsets, sizes = offsets or (0,) * len(self.shape), sizes or self.shape
        parts, start = [], 0
        for box in self.boxes:
            low, high = max(offsets[0], start), min(offsets[0] + sizes[0], start + box.shape[0])
            if low < high or len(self.boxes) == 1:
                parts.append(self._read_part(box, (low - start, *offsets[1:]), (high - low, *sizes[1:])))
            start += box.shape[0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_part(self, box: StoredBox, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        stored, n = box.stored, box.num_leading
        at = (*box.offsets[:n], *(a + b for a, b in zip(box.offsets[n:], offsets, strict=True)))
        return self.reader.read(stored.key, at, (1,) * n + sizes).reshape(sizes)


def optimizer_state(key: str) -> tuple[str, str, str] | None:
    """Splits an optimizer key into prefix, state (such as `param`) and parameter; None for other keys."""
    if (match := _STATE.fullmatch(key)) is None:
        return None
    return match[1] + match[2] + ".", "param" if match[2] == "fp32_param" else match[2], match[3]


def is_optimizer(key: str) -> bool:
    return _OPTIMIZER.match(key) is not None


def weight_keys(keys: Iterable[str]) -> list[str]:
    """The keys of the model's tensors, not of the optimizer's."""
    return [key for key in keys if not is_optimizer(key)]


def single_styles(weights: Iterable[str]) -> tuple[bool, bool]:
    """Returns whether layers have separate keys, and whether experts (or gate and up) have separate keys."""
    keys = list(weights)
    return any(map(_IN_LAYER.match, keys)), any(map(_SINGLE.search, keys))


def states(reader: CheckpointReader) -> list[str]:
    """Optimizer states in a checkpoint, such as `exp_avg`, `exp_avg_sq` and `param`."""
    return sorted({found[1] for key in reader.tensors if (found := optimizer_state(key))})


def logical_tensors(reader: CheckpointReader, state: str | None = None) -> dict[str, LogicalTensor]:
    """Returns the logical tensors by name: the weights or, if `state` is set, that optimizer state.
    If tensors are read in the dict's order, a cache of KEEP_BYTES lets most chunks be read only once.
    """
    parts: dict[str, dict[str, StoredBox]] = {}
    for key, stored in sorted(reader.tensors.items()):
        of_optimizer = optimizer_state(key)
        is_unknown = of_optimizer is None and is_optimizer(key)
        if is_unknown or (of_optimizer[1] if of_optimizer else None) != state:
            continue
        if of_optimizer:
            key = of_optimizer[2]
        if len(stored.shape) < (n := num_leading(key)):
            raise unusable(stored.key, f"has {len(stored.shape)} axes, too few for layers and experts")
        sizes = (1,) * n + stored.shape[n:]
        for place in itertools.product(*map(range, stored.shape[:n])):
            name, half = logical_name(key, place)
            parts.setdefault(name, {})[half] = StoredBox(stored, place + (0,) * (len(sizes) - n), sizes, n)

    def order(name: str) -> tuple[object, ...]:
        # by layer, then kind of tensor, then expert: the tensors of one chunk are adjacent
        layer, inner = layer_of(name)
        numbers = [int(part) for part in inner.split(".") if part.isdigit()]
        return (layer is not None, layer or 0, re.sub(r"\.\d+\.", ".", inner), numbers)

    found = {}
    for name in sorted(parts, key=order):
        # reversed, so that the gate `_w` comes before `_v`
        boxes = tuple(box for _, box in sorted(parts[name].items(), reverse=True))
        found[name] = LogicalTensor(name, boxes, reader)
    return found


def logical_name(key: str, place: tuple[int, ...]) -> tuple[str, str]:
    """Returns the logical name of the part of stored tensor `key` at the leading indices `place`.
    Also returns which half of a gated projection this part is: `w` (gate), `v` (up), or '' for other tensors.
    """
    numbers = list(place)
    if match := _STACKED.fullmatch(key):
        key = f"decoder.layers.{numbers.pop(0)}.{match[1]}"
    if match := _EXPERTS.fullmatch(key):
        key = f"{match[1] or ''}experts.{numbers.pop(0)}.{match[2]}"
    elif match := _SINGLE_EXPERT.fullmatch(key):
        key = f"{match[1] or ''}experts.{match[2]}"
    assert not numbers
    half = ""
    if match := _HALF.fullmatch(key):
        key, half = match[1], match[2]
    if key.startswith("decoder.layers."):
        for other, name in _NORMS:
            key = key.replace(other, name)
    return key, half


def num_leading(key: str) -> int:
    """Number of leading layer and expert axes of a stored tensor."""
    return int(_STACKED.fullmatch(key) is not None) + int(_EXPERTS.fullmatch(key) is not None)


def layer_of(name: str) -> tuple[int | None, str]:
    """Layer of a logical tensor and its name within that layer. Outside layers: None and the full name."""
    match = _IN_LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def group_of(name: str) -> str:
    """Name of a logical tensor's group: `norms`, a group in `_GROUPS`, or `other`."""
    parts = name.split(".")
    if any("norm" in part for part in parts[-2:]):
        return "norms"
    return next((group for group, words in _GROUPS if words & set(parts)), "other")


_GROUPS = (
    ("embedding", {"embedding"}), ("output", {"output_layer"}), ("router", {"router"}),
    ("shared experts", {"shared_experts"}), ("experts", {"experts"}), ("attention", {"self_attention"}),
    ("latent projections", {"fc1_latent_proj", "fc2_latent_proj"}), ("mlp", {"mlp"}),
)  # fmt: skip
