"""`moe-exp ckpt average`: the weighted average of the weights of checkpoints, as one without optimizer.

The average of the last checkpoints of a run with a constant learning rate takes the place of its decay (Tian
et al. 2025, WSM, arXiv 2507.17634). With weights c_0 ... c_k of the checkpoints t_0 ... t_k it is t_0 plus
all later updates, those between t_{i-1} and t_i times w_i = c_i + ... + c_k. So a decay w_1 >= ... >= w_k has
c_k = w_k, c_i = w_i - w_{i+1} and c_0 = 1 - w_1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import usable
from moe_exp.checkpoint.format.naming import KEEP_BYTES, LogicalTensor, logical_tensors
from moe_exp.checkpoint.format.settings import order_in, saved_config
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.tools.info import chosen, iteration_of
from moe_exp.checkpoint.tools.reshape import Reshaping, Written, reshape
from moe_exp.config import problem
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
    """The weight of each of `number` checkpoints, the oldest first; their sum is 1.

    Args:
        name: `uniform` (a linear decay), `1-sqrt`, `cosine` or `inverse-sqrt`: the decay whose place the
            average takes; `ema`, in which each weighs `ema_decay` times the one after it; or numbers with
            commas between them.
        number: of checkpoints.
        ema_decay: between 0 and 1.

    Raises:
        ValueError: there is no such name, or the numbers are not as many, or have no positive sum.
    """
    if name in _DECAYS:
        decay = [1.0, *(_DECAYS[name](i, number) for i in range(1, number)), 0.0]
        return [now - after for now, after in pairwise(decay)]
    if name == "ema":
        if not 0 < ema_decay < 1:
            raise ValueError(problem("ema_decay", ema_decay, "must be between 0 and 1", "give 0.9"))
        found = [ema_decay ** (number - 1 - i) for i in range(number)]
    else:
        found = _numbers(name)
        if len(found) != number:
            rule = f"{len(found)} numbers for {number} checkpoints"
            raise ValueError(problem("weights", name, rule, "give one for each, the oldest first"))
    if not 0 < sum(found) < math.inf:
        raise ValueError(problem("weights", name, "must have a positive sum", "give other numbers"))
    return [one / sum(found) for one in found]


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        fix = "give one of them, or numbers as in 1,2,3"
        raise ValueError(problem("weights", text, f"is none of {', '.join(WEIGHTS)}", fix)) from None


def sources_of(paths: Sequence[Path], *, last: int = 0) -> list[Path]:
    """The folders of the checkpoints that paths mean, in order: of a run or checkpoints folder all, or its
    `last`.

    Raises:
        ValueError: there is none, or one is there twice.
    """
    if last < 0:
        raise ValueError(problem("last", last, "must not be negative", "give the number of checkpoints"))
    found: list[Path] = []
    for path in paths:
        of_path = usable(path)[::-1] or [path]
        found += [chosen(folder) for folder in of_path[-last:]]
    places = [path.resolve() for path in found]
    if twice := next((path for path in found if places.count(path.resolve()) > 1), None):
        raise ValueError(problem("SRC", twice, "is there twice", "name it once, with a larger weight"))
    return found


def average(
    sources: Sequence[Path],
    target: Path,
    weights: Sequence[float],
    *,
    of_ema: bool = False,
) -> Written:
    """Writes the average of the weights as a checkpoint without optimizer, of the last one's iteration.

    Values are added in fp64 and rounded once; where all checkpoints have fp32 main weights, those are added.
    What is no floating-point number is the last one's. In memory is one box of each checkpoint.

    Args:
        sources: folders of iterations, the oldest first, in any layout and style.
        target: checkpoints folder to make.
        weights: one for each.
        of_ema: take the averages that the run kept (EMA_DECAY) in place of the weights. The routers' expert
            bias, which has none, is the checkpoints' own.

    Raises:
        ValueError: the checkpoints are not of one model, or have no such average, or as of `reshape`.
    """
    keep_bytes = KEEP_BYTES // len(sources)
    readers = [CheckpointReader(source, keep_bytes=keep_bytes) for source in sources]
    stored = [logical_tensors(reader) for reader in readers]
    main = [logical_tensors(reader, AVERAGE if of_ema else "param") for reader in readers]
    for reader in readers if of_ema else ():
        if not reader.common().get("progress", {}).get("num_averaged"):
            fix = "leave --ema out, or name a checkpoint of a run with EMA_DECAY"
            raise ValueError(problem("SRC", reader.folder, "has no average of the weights", fix))
    for source, tensors in zip(sources, stored, strict=True):
        check_same_shapes(sources[-1], stored[-1], source, tensors)
    _check_same_function(readers)
    _check_same_tokens(readers)
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


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_same_shapes(
    reference: Path, expected: Mapping[str, _Shaped], source: Path, found: Mapping[str, _Shaped]
) -> None:
    """Raises a ValueError if tensors of `source` differ from those of `reference` in name or shape."""
    for name in sorted(expected.keys() | found.keys()):
        shapes = [list(one[name].shape) if name in one else None for one in (found, expected)]
        if shapes[0] != shapes[1]:
            rule = f"has {name} of shape {shapes[0]}, {reference} of shape {shapes[1]}"
            raise ValueError(problem("SRC", source, rule, "average weights of one model"))


@dataclass(frozen=True)
class _Averaged(LogicalTensor):
    """The weighted sum of tensors."""

    parts: tuple[LogicalTensor, ...] = ()
    weights: tuple[float, ...] = ()

    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Its values, or a box of them; the sum is rounded once."""
        values = [part.read(offsets, sizes).contiguous() for part in self.parts]
        if values[-1].is_floating_point():
            add_weighted(values, self.weights, out=values[-1])
        return values[-1]


def add_weighted(values: Sequence[Tensor], weights: Sequence[float], *, out: Tensor) -> None:
    """Sets `out`, which may be one of `values`, to their weighted sum, added in fp64 and rounded once."""
    flat = [one.view(-1).split(_BLOCK) for one in (*values, out)]
    for *block, rounded in zip(*flat, strict=True):
        # a sum that begins with 0 would lose the sign of -0
        total = block[0].to(torch.float64).mul_(weights[0])
        for one, weight in zip(block[1:], weights[1:], strict=True):
            total.add_(one.to(torch.float64), alpha=weight)
        rounded.copy_(total)


def _check_same_function(readers: Sequence[CheckpointReader]) -> None:
    """ValueError if one of the models computes something else with its weights than the last."""
    *others, last = [(reader.folder, reader.common().get("config")) for reader in readers]
    if last[1] is None:  # not written by this package
        return
    config = saved_config(last[0])
    for folder, saved in others:
        shapes, functions = ([], []) if saved is None else model_changes(config, saved, str(folder))
        changes = shapes + functions
        if changes:
            name, value, before = changes[0].name.upper(), changes[0].value, changes[0].before
            rule = f"has {name}={before}, and {last[0]} has {name}={value}"
            raise ValueError(problem("SRC", folder, rule, "average checkpoints of one model"))


def _check_same_tokens(readers: Sequence[CheckpointReader]) -> None:
    """ValueError if the training of one is known to have had another tokenizer than the last, or documents
    that begin or end with other tokens.
    """
    *others, last = [(reader.folder, order_in(reader.common())) for reader in readers]
    for folder, order in others:
        prints = [one.get("tokenizer") or "" for one in (order, last[1])]
        ends = [(one.get("eod_id"), one.get("bos_id")) for one in (order, last[1])]
        if all(prints) and not same_fingerprint(*prints):
            rule = "another tokenizer"
        elif (None, None) not in ends and ends[0] != ends[1]:
            rule = f"documents that end and begin with other tokens {ends[0]}"
        else:
            continue
        rule = f"was trained with {rule} than {last[0]}"
        raise ValueError(problem("SRC", folder, rule, "average checkpoints of one model"))
