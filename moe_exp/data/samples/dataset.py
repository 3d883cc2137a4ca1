"""Token files -> the endless sequence of training samples. Shapes: B samples, S = seq_len, S1 = seq_len + 1.

Megatron's GPTDataset shuffles over all samples of the run, so the data order depends on the number of
training iterations, and a run that is prolonged sees other data; whoever needs that order finds it in
megatron_dataset.py. Here sample i is a function of the files, the sequence length, the seed and i, and of
nothing else. There is no index to be built, stored or to go stale.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moe_exp.data.samples.blend import blend_counts, blend_position, integer_weights
from moe_exp.data.tokens.files import Share, TokenFiles, share_range

Int64Array = npt.NDArray[np.int64]
_Word = TypeVar("_Word", int, npt.NDArray[Any])

_MASK64 = 0xFFFFFFFFFFFFFFFF
_FEISTEL_ROUNDS = 6
_BLOCK_BYTES, _NUM_BLOCKS = 2**14, 2**12  # of `content_of`


class Samples(Protocol):
    """Samples of a run by number, in an order that does not change during the run."""

    def sample(self, index: int) -> Int64Array:
        """Sample number `index` (0 and up): int64 token ids of shape [S1]."""

    def stage_at(self, index: int) -> Stage:
        """The stage of DATA_STAGES that sample number `index` is of."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples `first` to `first + count - 1`: int64 token ids of shape [count, S1]."""

    def fingerprint(self) -> str:
        """Fingerprint of the files, see `fingerprint_of`."""

    def content(self) -> str:
        """Hash of the tokens, see `content_of`."""

    def origin(self, index: int) -> Origin:
        """Origin of sample number `index`."""


class Stage(NamedTuple):
    """A part of the training data: its number, from 0, and tokens per sample."""

    number: int
    seq_len: int


@dataclass(frozen=True)
class Origin:
    """Origin of a sample: files and documents.

    Args:
        prefix: of the .bin/.idx files.
        documents: that it has tokens of, numbers in that file from 0, in their order.
    """

    prefix: str
    documents: tuple[int, ...]


class SampleStream:
    """The endless, shuffled sequence of training samples over one token file or a weighted blend of several.

    Within one file and epoch the documents are shuffled, concatenated and cut into windows of `seq_len`
    tokens (plus one, for the last label, that is also the first of the next window), and the windows are
    shuffled. Every token is the input of exactly one sample per epoch, but for the remainder that is shorter
    than a window. The files of a blend have epochs of their own, see `blend_position`.

    Args:
        blend: (weight, prefix of .bin/.idx) pairs; weights are relative.
        seq_len: tokens per sample.
        seed: key of both shuffles.
        shuffle: False keeps the order of the file, as validation wants it.
        share: the part of each file's documents that is read, from 0 to 1 (`tokens.files.parse_split`).

    Raises:
        ValueError: a file is missing, damaged or smaller than one window, a weight is not positive, or there
            is no file.
    """

    def __init__(
        self,
        blend: Sequence[tuple[float, str]],
        *,
        seq_len: int,
        seed: int,
        shuffle: bool = True,
        share: Share = (0.0, 1.0),
    ):
        if not blend:
            raise ValueError("TRAIN_DATA=: a blend needs at least one prefix. Fix: name a .bin/.idx prefix.")
        self.seq_len = seq_len
        self._shuffle, self._share, self._key = shuffle, share, str(seed)
        # Windows that each corpus gave in stages before this one; one that comes twice in a blend is two.
        self._given: dict[tuple[str, int, int], tuple[_Corpus, int]] = {}
        self._take(blend, self._key)

    def _take(self, blend: Sequence[tuple[float, str]], key: str) -> None:
        self._cumulative_weights = [0, *accumulate(integer_weights([weight for weight, _ in blend]))]
        self._names: list[tuple[str, int, int]] = []
        for position, (_, prefix) in enumerate(blend):
            times = sum(name[0] == prefix for name in self._names)
            self._names.append(name := (prefix, self.seq_len, times))
            if name not in self._given:
                corpus = _Corpus(
                    prefix,
                    seq_len=self.seq_len,
                    key=f"{key}/{position}",
                    shuffle=self._shuffle,
                    share=self._share,
                )
                self._given[name] = corpus, 0
        self._corpora = [self._given[name][0] for name in self._names]
        self._before = [self._given[name][1] for name in self._names]

    def next_stage(
        self, blend: Sequence[tuple[float, str]], *, seq_len: int, num_samples: int, number: int
    ) -> SampleStream:
        """The stream that follows this one after `num_samples`; files continue where they are.

        With another `seq_len` a file begins a new epoch. What was left of the one before is not read.

        Args:
            blend: as above.
            seq_len: tokens per sample.
            num_samples: that this stream gave.
            number: of the stage, a key of the shuffle of files that are new.

        Raises:
            ValueError: as above.
        """
        stream = copy.copy(self)
        stream.seq_len, stream._given = seq_len, dict(self._given)
        counts = blend_counts(num_samples, self._cumulative_weights)
        for name, count in zip(self._names, counts, strict=True):
            corpus, before = self._given[name]
            stream._given[name] = corpus, before + count
        stream._take(blend, f"{self._key}/stage {number}")
        return stream

    def stage_at(self, index: int) -> Stage:
        """The only one."""
        return Stage(0, self.seq_len)

    def sample(self, index: int) -> Int64Array:
        """Sample number `index` (0 and up): int64 token ids of shape [S1]."""
        corpus, local = self._place(index)
        return corpus.window(local)

    def origin(self, index: int) -> Origin:
        """Origin of sample number `index`."""
        corpus, local = self._place(index)
        return Origin(corpus.prefix, corpus.documents(local))

    def _place(self, index: int) -> tuple[_Corpus, int]:
        if index < 0:
            fix = "count samples from the start of the run"
            raise ValueError(f"sample index {index}: must be 0 or more. Fix: {fix}.")
        position, local = blend_position(index, self._cumulative_weights)
        return self._corpora[position], self._before[position] + local

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples `first` to `first + count - 1`: int64 token ids of shape [count, S1]."""
        return torch.from_numpy(np.stack([self.sample(index) for index in range(first, first + count)]))

    def fingerprint(self) -> str:
        """Fingerprint of the files, see `fingerprint_of`."""
        digest = hashlib.blake2b(digest_size=8)
        for corpus in self._corpora:
            corpus.add_to(digest)
        return digest.hexdigest()

    def content(self) -> str:
        """Hash of the tokens, see `content_of`."""
        return content_of([corpus.prefix for corpus in self._corpora])


def fingerprint_of(prefixes: Sequence[str]) -> str:
    """16 hex digits that identify token files by sizes, document lengths and ends, not by their paths.

    Order matters, as it keys the shuffle. Weights, sequence length and seed are settings and not part of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for prefix in prefixes:
        files = TokenFiles(prefix)
        _add_files(digest, prefix, files.dtype, files.document_bounds)
    return digest.hexdigest()


def content_of(prefixes: Sequence[str]) -> str:
    """16 hex digits of the tokens themselves: of all up to 64 MiB, else of blocks of 16 KiB evenly over all.

    A stretch of other tokens that is longer than a 4096th of all files is always noticed; what is shorter,
    by `moe-exp data verify`, which reads everything. 64 MiB take a tenth of a second from a local disk.
    """
    paths = [Path(f"{prefix}.bin") for prefix in prefixes]
    sizes = [path.stat().st_size for path in paths]
    step = max(_BLOCK_BYTES, sum(sizes) // _NUM_BLOCKS)
    digest = hashlib.blake2b(digest_size=8)
    for path, size in zip(paths, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _add_files(digest: hashlib.blake2b, prefix: str, dtype: np.dtype[Any], bounds: Int64Array) -> None:
    digest.update(f"{dtype.name} {len(bounds)} {bounds[-1]}".encode())
    digest.update(np.ascontiguousarray(bounds, dtype="<i8").data)
    path = Path(f"{prefix}.bin")
    with path.open("rb") as file:
        digest.update(file.read(4096))
        file.seek(max(0, path.stat().st_size - 4096))
        digest.update(file.read(4096))


# One data set


@dataclass(frozen=True)
class _Epoch:
    """The order of documents in one epoch, where each ends in its text, in tokens, and the key of windows."""

    documents: Int64Array
    ends: Int64Array
    window_key: int


class _Corpus:
    """The windows of one prefix, epoch after epoch. Memory: 8 bytes a document, 16 more per cached epoch."""

    def __init__(self, prefix: str, *, seq_len: int, key: str, shuffle: bool, share: Share):
        self.prefix, self.seq_len, self.key, self.shuffle = prefix, seq_len, key, shuffle
        files = TokenFiles(prefix)
        self._dtype, self._bounds = files.dtype, files.document_bounds
        self._first, self._end = share_range(len(self._bounds) - 1, share)
        num_tokens = int(self._bounds[self._end] - self._bounds[self._first])
        self.num_windows = (num_tokens - 1) // seq_len
        if self.num_windows < 1:
            part = f" in the documents from {share[0]:.4g} to {share[1]:.4g} of it"
            part = "" if share == (0.0, 1.0) else part
            rule = f"has {num_tokens} tokens{part}, one sample needs SEQ_LEN + 1 = {seq_len + 1}"
            raise ValueError(f"{prefix}: {rule}. Fix: use more data or a smaller SEQ_LEN.")
        self._tokens = np.memmap(f"{prefix}.bin", self._dtype, mode="r")
        self._epochs: dict[int, _Epoch] = {}

    def add_to(self, digest: hashlib.blake2b) -> None:
        """Adds what identifies the files. About half a second for 50 million documents."""
        _add_files(digest, self.prefix, self._dtype, self._bounds)

    def window(self, index: int) -> Int64Array:
        """Token ids [S1] of window `index`, counted over all epochs."""
        epoch, start = self._place(index)
        return self._read(epoch, start=start, stop=start + self.seq_len + 1)

    def documents(self, index: int) -> tuple[int, ...]:
        """Numbers in the file of the documents that window `index` has tokens of."""
        epoch, start = self._place(index)
        return tuple(int(epoch.documents[place]) for place in _places(epoch, start, start + self.seq_len + 1))

    def _place(self, index: int) -> tuple[_Epoch, int]:
        """The epoch of window `index`, and where in its text the window begins."""
        number, index = divmod(index, self.num_windows)
        epoch = self._epoch(number)
        if self.shuffle:
            index = _permuted(index, self.num_windows, epoch.window_key)
        return epoch, index * self.seq_len

    def _read(self, epoch: _Epoch, *, start: int, stop: int) -> Int64Array:
        """Tokens `start` to `stop` of the epoch's text, gathered from the documents that they lie in."""
        tokens = np.empty(stop - start, dtype=np.int64)
        filled = 0
        for place in _places(epoch, start, stop):
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            count = min(stop, end) - (start + filled)
            begin = int(self._bounds[document + 1]) - (end - start - filled)
            tokens[filled : filled + count] = self._tokens[begin : begin + count]
            filled += count
        return tokens

    def _epoch(self, number: int) -> _Epoch:
        number = number if self.shuffle else 0
        if number not in self._epochs:
            # Two: a global batch may reach over the end of an epoch.
            while len(self._epochs) >= 2:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = self._order(number)
        return self._epochs[number]

    def _order(self, number: int) -> _Epoch:
        lengths = np.diff(self._bounds[self._first : self._end + 1])
        documents = np.arange(len(lengths), dtype=np.int64)
        if self.shuffle:
            documents = _shuffled(len(lengths), _key(f"{self.key}/{number}/documents"))
        return _Epoch(
            self._first + documents, np.cumsum(lengths[documents]), _key(f"{self.key}/{number}/windows")
        )


def _places(epoch: _Epoch, start: int, stop: int) -> range:
    """Places in the epoch's order of the documents that tokens `start` to `stop` of its text lie in."""
    first, last = np.searchsorted(epoch.ends, [start, stop - 1], side="right")
    return range(int(first), int(last) + 1)


# Keyed shuffles. Not numpy's Generator, whose streams may change between numpy versions: a resumed run would
# see other data.


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(x: _Word) -> _Word:
    """splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), a bijection of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _shuffled(size: int, key: int) -> Int64Array:
    """Permutation of range(size): sorted by a keyed hash, which has no ties as it is a bijection."""
    return np.argsort(_mix(_mix(np.arange(size, dtype=np.uint64)) ^ np.uint64(key)))


def _permuted(index: int, size: int, key: int) -> int:
    """Image of `index` under a keyed permutation of range(size); needs no memory, unlike a table of all
    windows.

    A Feistel network over the next power of four, walked until it lands below `size` (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains", cycle-walking): less than four steps on average.
    """
    half_bits = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key + turn) ^ right) & mask)
        index = left << half_bits | right
        if index < size:
            return index
