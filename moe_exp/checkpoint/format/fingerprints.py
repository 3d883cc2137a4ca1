"""Layout-independent 64-bit fingerprints of a checkpoint's tensors, which cover every bit of every value.

A tensor's fingerprint is a sum over all its values, modulo 2^64,

    sum over (i, j, ...) of bits(x[i, j, ...]) * w_last(j) * ... * w_first(i)

where bits() interprets a value's bits as an integer, and each w is an odd number derived from an axis and a
position on it (SplitMix64; Steele, Lea and Flood 2014, Fast Splittable Pseudorandom Number Generators). The
sum is a multilinear hash (Lemire and Kaser 2014, Strongly universal string hashing is fast). A value's weight
is the product of one w per axis, so:

- The sum can be computed in any order and split in any way: adding the ranks' partial sums gives the same
  number in every parallel layout.
- Changing one value always changes the sum, because odd weights are invertible modulo 2^64. Swapped values,
  permuted rows and exchanged shards go unnoticed with a probability of about 2^-40 (not 2^-64, because the
  low bits of round values are zero).

Fingerprints are named after this package's keys. A tensor stacked over layers has one fingerprint per layer.
Fingerprints therefore do not depend on the key style (`keys.py`), and remain valid when tools rewrite files.
"""

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
# Values per step: 2 MB of 64-bit copies is near the optimum for one core; a GPU needs more work per call.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a tensor, or one rank's partial sum of it."""

    dtype: str  # such as `float32`
    num_values: int  # number of values in the sum
    total: int  # the sum, from 0 to 2^64 - 1

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint(self.dtype, self.num_values + other.num_values, (self.total + other.total) & _MASK)


Fingerprints = dict[str, Fingerprint]
# Key in a checkpoint, values, and their offsets in the whole tensor. Leading axes of size 1 may be missing.
TensorPiece = tuple[str, Tensor, Sequence[int]]


@torch.no_grad()
def multilinear_sum(values: Tensor, offsets: Sequence[int]) -> Tensor:
    """Fingerprint sum (int64 scalar, modulo 2^64) of `values`, the piece of a tensor at index `offsets`."""
    values = values.detach().view(_BITS.get(values.element_size(), torch.uint8))
    while values.dim() < 2:
        values, offsets = values[None], (0, *offsets)
    # PyTorch's int64 arithmetic wraps around, which makes all sums and products modulo 2^64.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if values.numel() == 0:
        return total
    weights = []
    for axis, (offset, size) in enumerate(zip(offsets, values.shape, strict=True)):
        # Layers have the same sizes, so the weights of short axes are cached (at most 16 MB).
        drawn = _kept_weights if size <= 1 << 14 else axis_weights
        weights.append(drawn(values.dim() - axis, offset, size, values.device))
    chunk = _CHUNK.get(values.device.type, 1 << 18)
    # Small tensors take one step, matrices one per block, and other tensors are summed over their first axis.
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
    """Odd integer weights for positions `start` to `start + size - 1` on `axis`; axis 1 is the last axis."""
    z = torch.arange(start + 1, start + size + 1, dtype=torch.int64, device=device)
    # SplitMix64 with its constants as signed numbers, as PyTorch has no arithmetic for unsigned ones
    z = (z + (axis << 40)) * (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        shifted = (z >> shift) & ((1 << (64 - shift)) - 1)  # clears the sign bits that PyTorch shifts in
        z = (z ^ shifted) * factor
    return z | 1


_kept_weights = lru_cache(128)(axis_weights)


def name_and_place(key: str, offsets: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns a fingerprint's name and offsets. For stacked layers, the layer offset moves to the name."""
    if match := _STACKED.fullmatch(key):
        return f"{match[1]}{offsets[0]}.{match[2]}", tuple(offsets[1:])
    return key, tuple(offsets)


def fingerprints_of(pieces: Iterable[TensorPiece]) -> Fingerprints:
    """Fingerprints of `pieces` by name. Across all ranks, each value must be in exactly one piece."""
    found: dict[str, tuple[str, int, Tensor]] = {}
    for key, values, offsets in pieces:
        name, place = name_and_place(key, offsets)
        values = values.view(values.shape[values.dim() - len(place) :])  # a layer's axis, of size 1
        share = multilinear_sum(values, place)
        nothing = (str(values.dtype).removeprefix("torch."), 0, torch.zeros_like(share))
        dtype, num_values, total = found.get(name, nothing)
        found[name] = (dtype, num_values + values.numel(), total + share)
    # One device synchronization for all tensors. Some may be in host memory (OFFLOAD_OPTIMIZER).
    shares = [total for *_, total in found.values()]
    totals = torch.stack([one.to(shares[0].device) for one in shares]).tolist() if found else []
    named = zip(found.items(), totals, strict=True)
    return {name: Fingerprint(dtype, count, total & _MASK) for (name, (dtype, count, _)), total in named}


def added(shares: Iterable[Mapping[str, Fingerprint]]) -> Fingerprints:
    """Adds up the ranks' shares of each fingerprint; returns the sums by name."""
    found: Fingerprints = {}
    for of_rank in shares:
        for name, share in of_rank.items():
            found[name] = found[name] + share if name in found else share
    return found


def write(folder: Path, fingerprints: Mapping[str, Fingerprint]) -> None:
    """Writes fingerprints into a checkpoint's folder, one per line."""
    rows = ((name, [one.dtype, one.num_values, f"{one.total:016x}"]) for name, one in fingerprints.items())
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows))
    text = f'{{\n  "format_version": {_FORMAT_VERSION},\n  "tensors": {{\n{lines}\n  }}\n}}\n'
    write_atomically(folder / FILE, text)


def read(folder: Path) -> Fingerprints | None:
    """A checkpoint's fingerprints; None if it has none in this format. ValueError if the file is damaged."""
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
    """Fingerprints that remain valid for a rewritten checkpoint. If `weights_only` is true, the optimizer's
    fingerprints are dropped. If `dtype` is set, it is the new dtype of the weights: weights that had another
    dtype get the fingerprints of the optimizer's main weights.
    """
    found: Fingerprints = {}
    for name, one in fingerprints.items():
        of_state = _OF_STATE.fullmatch(name)
        if not weights_only if of_state else dtype in (None, one.dtype):
            found[name] = one
        elif not of_state:
            main = fingerprints.get(f"optimizer.state.param.{name}")
            if main and main.dtype == dtype:
                found[name] = main  # the rewritten weights are the main weights
    return found


def shown(name: str) -> str:
    """Readable form of a name, such as `exp_avg of decoder.layers.3.mlp.router.weight`."""
    match = _OF_STATE.fullmatch(name)
    return f"{'main weights' if match[1] == 'param' else match[1]} of {match[2]}" if match else name
