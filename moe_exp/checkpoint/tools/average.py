"""`moe-exp ckpt average`: the weighted average of the weights of checkpoints, as one without optimizer.

The average of the last checkpoints of a run with a constant learning rate takes the place of its decay (Tian
et al. 2025, WSM, arXiv 2507.17634). With weights c_0 ... c_k of the checkpoints t_0 ... t_k it is t_0 plus
all later updates, those between t_{i-1} and t_i times w_i = c_i + ... + c_k. So a decay w_1 >= ... >= w_k has
c_k = w_k, c_i = w_i - w_{i+1} and c_0 = 1 - w_1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import usable
from moe_exp.checkpoint.format.naming import KEEP_BYTES, LogicalTensor, logical_tensors
from moe_exp.checkpoint.format.settings import order_in, saved_config
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, read_common
from moe_exp.checkpoint.tools.info import chosen, iteration_of
from moe_exp.checkpoint.tools.reshape import Reshaping, Written, reshape
from moe_exp.config import setting_error
from moe_exp.config.model_changes import model_changes
from moe_exp.data.tokens.tokenizer import same_fingerprint
from moe_exp.engine.optimizer_classes import AVERAGE

# w_i by i and the number of checkpoints
_DECAYS: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda i, number: 1 - i / number,
    "1-sqrt": lambda i, number: 1 - math.sqrt(i / number),
    "cosine": lambda i, number: (1 + math.cos(math.pi * i / number)) / 2,
    "inverse-sqrt": lambda i, number: 1 / math.sqrt(1 + i),
}
WEIGHTS = (*_DECAYS, "ema")
_BLOCK = 2**18  # values that are in fp64 at a time


def weights_of(name: str, number: int, *, ema_decay: float = 0.9) -> list[float]:
    """The weight of each of `number` checkpoints, the oldest first; their sum is 1. `name`: `uniform` (a
    linear decay), `1-sqrt`, `cosine` or `inverse-sqrt`, the decay whose place the average takes; `ema`, in
    which each weighs `ema_decay` (0 to 1) times the one after it; or numbers with commas between them.
    ValueError if there is no such name, or the numbers are not as many, or have no positive sum.
    """
    if name in _DECAYS:
        decay = [1.0, *(_DECAYS[name](i, number) for i in range(1, number)), 0.0]
        return [now - after for now, after in pairwise(decay)]
    if name == "ema":
        if not 0 < ema_decay < 1:
            raise setting_error("ema_decay", ema_decay, "must be between 0 and 1", "give 0.9")
        found = [ema_decay ** (number - 1 - i) for i in range(number)]
    else:
        try:
            found = [float(word) for word in name.split(",")]
        except ValueError:
            rule, fix = f"is none of {', '.join(WEIGHTS)}", "give one of them, or numbers as in 1,2,3"
            raise setting_error("weights", name, rule, fix) from None
        if len(found) != number:
            rule = f"{len(found)} numbers for {number} checkpoints"
            raise setting_error("weights", name, rule, "give one for each, the oldest first")
    if not 0 < sum(found) < math.inf:
        raise setting_error("weights", name, "must have a positive sum", "give other numbers")
    return [one / sum(found) for one in found]


def sources_of(paths: Sequence[Path], *, last: int = 0) -> list[Path]:
    """Folders of the checkpoints that paths mean, of a run all or its `last`; ValueError if one is twice."""
    if last < 0:
        raise setting_error("last", last, "must not be negative", "give the number of checkpoints")
    found: list[Path] = []
    for path in paths:
        of_path = usable(path)[::-1] or [path]
        found += [chosen(folder) for folder in of_path[-last:]]
    places = [path.resolve() for path in found]
    if twice := next((path for path in found if places.count(path.resolve()) > 1), None):
        raise setting_error("SRC", twice, "is there twice", "name it once, with a larger weight")
    return found


def average(
    sources: Sequence[Path], target: Path, weights: Sequence[float], *, of_ema: bool = False
) -> Written:
    """Writes the average of the weights of `sources`, iterations' folders of any layout, the oldest first, as
    a checkpoint without optimizer, of the last one's iteration. `of_ema`: of the averages that the run kept
    (EMA_DECAY), and the expert bias, which has none. ValueError if they are not of one model, or have no such
    average, or as of `reshape`.

    Values are added in fp64 and rounded once; where all checkpoints have fp32 main weights, those are added.
    What is no floating-point number is the last one's. In memory is one box of each checkpoint.
    """
    keep_bytes = KEEP_BYTES // len(sources)
    readers = [CheckpointReader(source, keep_bytes=keep_bytes) for source in sources]
    stored = [logical_tensors(reader) for reader in readers]
    main = [logical_tensors(reader, AVERAGE if of_ema else "param") for reader in readers]
    for reader in readers if of_ema else ():
        if not reader.common().get("progress", {}).get("num_averaged"):
            fix = "omit --ema, or name a checkpoint of a run with EMA_DECAY"
            raise setting_error("SRC", reader.folder, "has no average of the weights", fix)
    for source, tensors in zip(sources, stored, strict=True):
        if rule := _difference(source, tensors, sources[-1], stored[-1]):
            raise setting_error("SRC", source, rule, "average checkpoints of one model")
    values: dict[str, LogicalTensor] = {}
    for name in stored[-1]:
        of_each = main if all(name in one for one in main) else stored
        parts = tuple(one[name] for one in of_each)
        values[name] = _Averaged(name, parts[-1].boxes, readers[-1], parts, tuple(weights))
    facts: list[dict[str, Any]] = [
        {"checkpoint": str(source), "iteration": iteration_of(source, reader.common()), "weight": weight}
        | ({"state": AVERAGE} if of_ema else {})
        for source, reader, weight in zip(sources, readers, weights, strict=True)
    ]
    changes = Reshaping(weights_only=True)
    return reshape(
        sources[-1], target, changes, values=values, facts={"averaged_from": facts, "valid_loss": None}
    )


def _difference(
    source: Path, tensors: Mapping[str, LogicalTensor], last: Path, expected: Mapping[str, LogicalTensor]
) -> str:
    """Why the weights of `source` are not those of the model of `last`; empty if they are."""
    for name in sorted(expected.keys() | tensors.keys()):
        shapes = [list(one[name].shape) if name in one else None for one in (tensors, expected)]
        if shapes[0] != shapes[1]:
            return f"has {name} of shape {shapes[0]}, {last} of shape {shapes[1]}"
    common, common_of_last = read_common(source), read_common(last)
    if "config" in common and "config" in common_of_last:  # else not written by this package
        shapes_changed, functions_changed = model_changes(saved_config(last), common["config"], str(source))
        if changes := shapes_changed + functions_changed:
            name = changes[0].name.upper()
            return f"has {name}={changes[0].before}, and {last} has {name}={changes[0].value}"
    orders = [order_in(one) for one in (common, common_of_last)]
    prints = [one.get("tokenizer") or "" for one in orders]
    if all(prints) and not same_fingerprint(*prints):
        return f"was trained with another tokenizer than {last}"
    ends = [(one.get("eod_id"), one.get("bos_id")) for one in orders]
    if (None, None) not in ends and ends[0] != ends[1]:
        return f"was trained with documents that end and begin with other tokens {ends[0]} than {last}"
    return ""


@dataclass(frozen=True)
class _Averaged(LogicalTensor):
    """The weighted sum of tensors."""

    parts: tuple[LogicalTensor, ...] = ()
    weights: tuple[float, ...] = ()

    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Its values, or a box of them; the sum is rounded once."""
        *values, out = [part.read(offsets, sizes).contiguous() for part in self.parts]
        if out.is_floating_point():
            flat = [one.view(-1).split(_BLOCK) for one in (*values, out)]
            for block in zip(*flat, strict=True):
                # a sum that begins with 0 would lose the sign of -0
                total = block[0].to(torch.float64).mul_(self.weights[0])
                for one, weight in zip(block[1:], self.weights[1:], strict=True):
                    total.add_(one.to(torch.float64), alpha=weight)
                block[-1].copy_(total)
        return out
