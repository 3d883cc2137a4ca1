"""The windows of one token file, epoch after epoch, and the keyed shuffles of their order. No torch.

Shapes: S = seq_len, S1 = seq_len + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moe_exp.data.tokens.ranged import open_tokens
from moe_exp.data.tokens.tokens import Int64Array, Share, TokenFiles, share_range

_Word = TypeVar("_Word", int, npt.NDArray[Any])

_MASK64 = 0xFFFFFFFFFFFFFFFF
_FEISTEL_ROUNDS = 6


class Piece(NamedTuple):
    """Tokens `begin` to `end - 1` of the file, all of one document."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True)
class Epoch:
    """An order of documents."""

    documents: Int64Array  # numbers in the file
    ends: Int64Array  # running sums of what is counted of each document: tokens, or whole windows
    key: int  # of the shuffle of windows
    # For `PackedCorpus`, documents with a rest, by its length.
    by_length: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


class Corpus:
    """The windows of one prefix, epoch after epoch. Memory: 8 bytes a document, 16 more per cached epoch.

    The documents of an epoch are concatenated and cut into windows. Arguments and errors are those of
    `SampleStream`; `key` is that of the shuffles.
    """

    def __init__(self, prefix: str, *, seq_len: int, key: str, shuffle: bool, share: Share):
        self.prefix, self.seq_len, self.key, self.shuffle = prefix, seq_len, key, shuffle
        files = TokenFiles(prefix)  # not kept: it has the bounds of sequences, too
        self.dtype, self._bounds = files.dtype, files.document_bounds
        self._first, self._end = share_range(len(self._bounds) - 1, share)
        self._filler = self._filler_of(files)
        if (windows := self._count_windows()) < 1:
            num_tokens = int(self._bounds[self._end] - self._bounds[self._first])
            part = f" in the documents from {share[0]:.4g} to {share[1]:.4g} of it"
            part = "" if share == (0.0, 1.0) else part
            rule = f"has {num_tokens} tokens{part}, one sample needs SEQ_LEN + 1 = {seq_len + 1}"
            raise ValueError(f"{prefix}: {rule}. Fix: use more data or a smaller SEQ_LEN.")
        self.num_windows = windows
        self._tokens = open_tokens(prefix, self.dtype)
        self._epochs: dict[int, Epoch] = {}

    def window(self, index: int) -> Int64Array:
        """Token ids [S1] of window `index`, counted over all epochs."""
        tokens = np.full(self.seq_len + 1, self._filler, dtype=np.int64)
        filled = 0
        for _, begin, end in self._place(index):
            tokens[filled : (filled := filled + end - begin)] = self._tokens[begin:end]
        return tokens

    def documents(self, index: int) -> tuple[int, ...]:
        """Numbers in the file of the documents that window `index` has tokens of."""
        return tuple(piece.document for piece in self._place(index))

    def _place(self, index: int) -> Iterable[Piece]:
        number, index = divmod(index, self.num_windows)
        epoch = self._epoch(number)
        if self.shuffle:
            index = permuted(index, self.num_windows, epoch.key)
        return self._pieces(epoch, index)

    def _epoch(self, number: int) -> Epoch:
        number = number if self.shuffle else 0
        if number not in self._epochs:
            # Two: a global batch may reach over the end of an epoch.
            while len(self._epochs) >= 2:
                del self._epochs[next(iter(self._epochs))]
            documents = np.arange(self._end - self._first, dtype=np.int64)
            if self.shuffle:
                documents = shuffled(len(documents), hash_of(f"{self.key}/{number}/documents"))
            window_key = hash_of(f"{self.key}/{number}/windows")
            self._epochs[number] = self._order(self._first + documents, window_key)
        return self._epochs[number]

    # Overridden where windows are made otherwise.

    def _filler_of(self, files: TokenFiles) -> int:
        """The token of places in a window that no piece fills; here there are none."""
        return 0

    def _count_windows(self) -> int:
        return (int(self._bounds[self._end] - self._bounds[self._first]) - 1) // self.seq_len

    def _order(self, documents: Int64Array, window_key: int) -> Epoch:
        return Epoch(documents, np.cumsum(self._bounds[documents + 1] - self._bounds[documents]), window_key)

    def _pieces(self, epoch: Epoch, window: int) -> Iterable[Piece]:
        """Pieces of a window of an epoch, in order."""
        start = window * self.seq_len
        stop = start + self.seq_len + 1
        first, last = np.searchsorted(epoch.ends, [start, stop - 1], side="right")
        for place in range(int(first), int(last) + 1):
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            count = min(stop, end) - start
            begin = int(self._bounds[document + 1]) - (end - start)
            yield Piece(document, begin, begin + count)
            start += count


# Keyed shuffles. Not numpy's Generator, whose streams may change between numpy versions.


def hash_of(text: str) -> int:
    """64 bits of a hash, a key for the shuffles."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(x: _Word) -> _Word:
    """splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), a bijection of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def shuffled(size: int, key: int) -> Int64Array:
    """Permutation of range(size): sorted by a keyed hash, which has no ties as it is a bijection."""
    return np.argsort(_mix(_mix(np.arange(size, dtype=np.uint64)) ^ np.uint64(key)))


def permuted(index: int, size: int, key: int) -> int:
    """Image of `index` under a keyed permutation of range(size), without a table of all windows.

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
