"""Fingerprints of the tensors of a checkpoint that do not depend on the layout: 64 bits for each, of every
bit of its values.

A tensor's fingerprint is a sum over all of its values, modulo 2^64,

    sum over (i, j, ...) of bits(x[i, j, ...]) * w_last(j) * ... * w_first(i)

in which bits() takes a value's bits for a whole number and every w is an odd number drawn by the place of the
value on that axis (SplitMix64; Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators).
It is a multilinear hash (Lemire and Kaser 2014, Strongly universal string hashing is fast), with weights that
are products over the axes:

- A sum can be taken in any order and any split: the shards of whatever layout, boxes with offsets, add up to
  the same number, and the ranks' shares need nothing but additions.
- One changed value always changes it: an odd weight has an inverse modulo 2^64. Two values that were swapped,
  rows in another order and shards in each other's place change it but for a chance of about 2^-40 (the low
  bits of round values are zeros, which costs some).

Tensors have the keys that this package writes; what all layers share under one key is a tensor of its own for
each. So a fingerprint belongs to the model and not to the style of the files (`keys.py`), and a tool that
rewrites those keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import unusable
from moe_exp.host.files import read_json, write_atomically

FILE = "fingerprints.json"
_FORMAT_VERSION = 1
_STACKED = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(?!\d)(.+)")
_OF_STATE = re.compile(r"optimizer\.state\.(\w+?)\.(.+)")
_MASK = 2**64 - 1
# Values at a time: 2 MB of 64-bit copies, near what is fastest on a core; a GPU wants more work in one call.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a tensor, or of one rank's share of it."""

    dtype: str  # of its values, `float32`
    num_values: int  # that are in the sum
    total: int  # the sum, from 0 to 2^64 - 1

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.dtype, self.num_values + other.num_values, (self.total + other.total) & _MASK)


Fingerprints = dict[str, Fingerprint]
# Key in a checkpoint, values, and where they begin in the whole tensor; axes of size 1 in front may be
# missing in the values.
TensorPiece = tuple[str, Tensor, Sequence[int]]


@torch.no_grad()
def multilinear_sum(values: Tensor, offsets: Sequence[int]) -> Tensor:
    """The share of the box at `offsets` in its tensor's fingerprint: int64 [], modulo 2^64. Values of any
    type, strides and device; takes a chunk of memory, no copy.
    """
    values = values.detach().view(_BITS.get(values.element_size(), torch.uint8))
    while values.dim() < 2:
        values, offsets = values[None], (0, *offsets)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if values.numel() == 0:
        return total
    weights = []
    for axis, (offset, size) in enumerate(zip(offsets, values.shape, strict=True)):
        # All layers have the same sizes: the weights of short axes are drawn once, at most 16 MB of them.
        drawn = _kept_weights if size <= 1 << 14 else axis_weights
        weights.append(drawn(values.dim() - axis, offset, size, values.device))
    chunk = _CHUNK.get(values.device.type, 1 << 18)
    # A small tensor in one go; one of more axes as a sum over its first; a matrix block by block.
    if values.numel() <= chunk:
        sums = values.to(torch.int64, copy=True)
        for weights_of_axis in reversed(weights):
            sums = sums.mul_(weights_of_axis).sum(-1)
        return sums
    if values.dim() > 2:
        sums = torch.stack([multilinear_sum(part, offsets[1:]) for part in values])
        return (sums * weights[0]).sum()
    rows, columns = weights
    width = min(values.size(1), chunk)
    height = max(1, chunk // width)
    for left in range(0, values.size(1), width):
        for top in range(0, values.size(0), height):
            bits = values[top : top + height, left : left + width].to(torch.int64, copy=True)
            total += (bits.mul_(columns[left : left + width]).sum(1) * rows[top : top + height]).sum()
    return total


def axis_weights(axis: int, start: int, size: int, device: torch.device) -> Tensor:
    """Odd weights of `size` places from `start` on, of an axis counted from the last, which is 1."""
    z = torch.arange(start + 1, start + size + 1, dtype=torch.int64, device=device)
    # SplitMix64, with its constants as signed numbers
    z = (z + (axis << 40)) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        shifted = (z >> shift) & ((1 << (64 - shift)) - 1)  # without the sign that torch shifts in
        z = (z ^ shifted) * factor
    return z | 1


_kept_weights = lru_cache(128)(axis_weights)


def name_and_place(key: str, offsets: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The name, with its layer, of what lies at `offsets` of a tensor, and the offsets without that."""
    if match := _STACKED.fullmatch(key):
        return f"{match[1]}{offsets[0]}.{match[2]}", tuple(offsets[1:])
    return key, tuple(offsets)


def fingerprints_of(pieces: Iterable[TensorPiece]) -> Fingerprints:
    """Fingerprints, or a rank's shares, by name; each value has to be in one piece of one rank."""
    found: dict[str, tuple[str, int, Tensor]] = {}
    for key, values, offsets in pieces:
        name, place = name_and_place(key, offsets)
        values = values.view(values.shape[values.dim() - len(place) :])  # a layer's axis, of size 1
        share = multilinear_sum(values, place)
        nothing = (str(values.dtype).removeprefix("torch."), 0, torch.zeros_like(share))
        dtype, num_values, total = found.get(name, nothing)
        found[name] = (dtype, num_values + values.numel(), total + share)
    # one wait for the device
    totals = torch.stack([total for *_, total in found.values()]).tolist() if found else []
    named = zip(found.items(), totals, strict=True)
    return {name: Fingerprint(dtype, count, total & _MASK) for (name, (dtype, count, _)), total in named}


def added(shares: Iterable[Mapping[str, Fingerprint]]) -> Fingerprints:
    """The fingerprints that shares of several ranks add up to."""
    found: Fingerprints = {}
    for of_rank in shares:
        for name, share in of_rank.items():
            found[name] = found[name] + share if name in found else share
    return found


def write(folder: Path, fingerprints: Mapping[str, Fingerprint]) -> None:
    """Writes them into a checkpoint's folder, a line each."""
    rows = ((name, [one.dtype, one.num_values, f"{one.total:016x}"]) for name, one in fingerprints.items())
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows))
    text = f'{{\n  "format_version": {_FORMAT_VERSION},\n  "tensors": {{\n{lines}\n  }}\n}}\n'
    write_atomically(folder / FILE, text)


def read(folder: Path) -> Fingerprints | None:
    """The fingerprints of a checkpoint; None without them, or of another version. ValueError if damaged."""
    path = folder / FILE
    try:
        content = read_json(path)
        if content["format_version"] != _FORMAT_VERSION:
            return None
        found = {}
        for name, (dtype, num_values, total) in content["tensors"].items():
            found[name] = Fingerprint(str(dtype), int(num_values), int(total, 16))
        return found
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise unusable(path, f"cannot be read ({' '.join(str(error).split())})") from None


def kept(fingerprints: Mapping[str, Fingerprint], *, weights_only: bool, dtype: str | None) -> Fingerprints:
    """Fingerprints that remain valid for a rewritten checkpoint: with `weights_only` without the optimizer's,
    and with `dtype` (`float32`) those of weights of that type, or of the main weights that took their place.
    """
    found: Fingerprints = {}
    for name, one in fingerprints.items():
        of_state = _OF_STATE.fullmatch(name)
        if not weights_only if of_state else dtype in (None, one.dtype):
            found[name] = one
        elif not of_state:
            main = fingerprints.get(f"optimizer.state.param.{name}")
            if main and main.dtype == dtype:
                # the weights are the main weights now
                found[name] = main
    return found


def shown(name: str) -> str:
    """A name as people read it: `exp_avg of decoder.layers.3.mlp.router.weight`."""
    match = _OF_STATE.fullmatch(name)
    return f"{'main weights' if match[1] == 'param' else match[1]} of {match[2]}" if match else name
