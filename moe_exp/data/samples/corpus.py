"""Windows of a token file in successive epochs, and keyed shuffles of documents and windows.

Does not import torch.
"""

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moe_exp.data.tokens.ranged import open_tokens
from moe_exp.data.tokens.tokens import Int64Array, Share, TokenFiles, share_range

_Word = TypeVar("_Word", int, npt.NDArray[Any])

_MASK64 = 0xFFFFFFFFFFFFFFFF
_FEISTEL_ROUNDS = 6
_BLOCKS, _BLOCK = 64, 2**16  # number and size of document blocks that `attended_share` samples


class CorpusPiece(NamedTuple):
    """Tokens [begin, end) of the file, all from one document."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True)
class Epoch:
    """The order of documents in one epoch."""

    documents: Int64Array  # numbers in the file
    ends: Int64Array  # running sums over documents of tokens (`Corpus`) or full windows (`PackedCorpus`)
    key: int  # of the window shuffle
    # `PackedCorpus` only: documents with a remainder, sorted by its length
    by_length: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


class Corpus:
    """Windows of the token files at one prefix: in each epoch, the documents are concatenated and cut into
    windows. Arguments and errors are those of `SampleStream`; `key` is the shuffle key. Memory use per
    document is 8 bytes, plus 16 bytes per cached epoch.
    """

    def __init__(self, prefix: str, *, seq_len: int, key: str, shuffle: bool, share: Share):
        self.prefix, self.seq_len, self.key, self.shuffle = prefix, seq_len, key, shuffle
        files = TokenFiles(prefix)  # not stored: it also caches the sequence bounds
        self.dtype, self._bounds = files.dtype, files.document_bounds
        self._first, self._end = share_range(len(self._bounds) - 1, share)
        self._filler = 0  # unused unless packed: the pieces fill every window
        if (windows := self._count_windows(files)) < 1:
            num_tokens = int(self._bounds[self._end] - self._bounds[self._first])
            part = f" in SPLIT's part {share[0]:.4g} to {share[1]:.4g}" if share != (0.0, 1.0) else ""
            rule = f"has {num_tokens} tokens{part}, but one sample requires SEQ_LEN + 1 = {seq_len + 1}"
            raise ValueError(f"{prefix}: {rule}. Fix: use more data or a smaller SEQ_LEN.")
        self.num_windows = windows
        self._tokens = open_tokens(prefix, self.dtype)
        self._epochs: dict[int, Epoch] = {}

    def window(self, index: int) -> Int64Array:
        """Token ids [seq_len + 1] of window `index`; windows are numbered across all epochs."""
        tokens = np.full(self.seq_len + 1, self._filler, dtype=np.int64)
        filled = 0
        for _, begin, end in self._place(index):
            tokens[filled : (filled := filled + end - begin)] = self._tokens[begin:end]
        return tokens

    def documents(self, index: int) -> tuple[int, ...]:
        """Numbers (positions in the file) of the documents in window `index`."""
        return tuple(piece.document for piece in self._place(index))

    def _place(self, index: int) -> Iterable[CorpusPiece]:
        number, index = divmod(index, self.num_windows)
        epoch = self._epoch(number)
        if self.shuffle:
            # without a table: a corpus may have billions of windows
            index = permuted(index, self.num_windows, epoch.key)
        return self._pieces(epoch, index)

    def _epoch(self, number: int) -> Epoch:
        number = number if self.shuffle else 0
        if number not in self._epochs:
            # Cache two epochs, because a global batch may span an epoch boundary.
            while len(self._epochs) >= 2:
                del self._epochs[next(iter(self._epochs))]
            documents = np.arange(self._end - self._first, dtype=np.int64)
            if self.shuffle:
                documents = shuffled(len(documents), hash_of(f"{self.key}/{number}/documents"))
            window_key = hash_of(f"{self.key}/{number}/windows")
            self._epochs[number] = self._order(self._first + documents, window_key)
        return self._epochs[number]

    # The methods below are overridden by `PackedCorpus`.

    def _count_windows(self, files: TokenFiles) -> int:
        return (int(self._bounds[self._end] - self._bounds[self._first]) - 1) // self.seq_len

    def _order(self, documents: Int64Array, window_key: int) -> Epoch:
        return Epoch(documents, np.cumsum(self._bounds[documents + 1] - self._bounds[documents]), window_key)

    def _pieces(self, epoch: Epoch, window: int) -> Iterable[CorpusPiece]:
        """The pieces of a window, in order."""
        start = window * self.seq_len
        stop = start + self.seq_len + 1
        first, last = np.searchsorted(epoch.ends, [start, stop - 1], side="right")
        for place in range(int(first), int(last) + 1):
            document, end = int(epoch.documents[place]), int(epoch.ends[place])
            count = min(stop, end) - start
            # `end - start` tokens of the document remain.
            begin = int(self._bounds[document + 1]) - (end - start)
            yield CorpusPiece(document, begin, begin + count)
            start += count


# Keyed shuffles. numpy's Generator is not used because its streams may change between numpy versions.


def hash_of(text: str) -> int:
    """64-bit hash of a text, used as a shuffle key."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(x: _Word) -> _Word:
    """splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), a bijection of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def shuffled(size: int, key: int) -> Int64Array:
    """Permutation of range(size), sorted by a keyed hash; the hash is bijective, so there are no ties."""
    return np.argsort(_mix(_mix(np.arange(size, dtype=np.uint64)) ^ np.uint64(key)))


def permuted(index: int, size: int, key: int) -> int:
    """Image of `index` under a keyed permutation of range(size), computed without a table.

    A Feistel network permutes the range up to the next power of four. The network is applied again
    until the result is below `size`, on average fewer than four times (cycle-walking; Black and Rogaway
    2002, "Ciphers with arbitrary finite domains").
    """
    half_bits = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            # A Feistel round is invertible for any round function, so the network is a permutation.
            left, right = right, left ^ (_mix(_mix(key + turn) ^ right) & mask)
        index = left << half_bits | right
        if index < size:
            return index


# DOCUMENT_PACKING=best_fit: samples of whole documents.
#
# A document longer than a sample is cut into full samples and a remainder. Remainders and shorter documents
# are placed, longest first, into the fullest sample with enough room (best-fit decreasing; Ding et al. 2024,
# "Fewer Truncations Improve Language Modeling", arXiv 2404.10830). Pieces of equal length are
# interchangeable, so they are placed as classes: planning takes no longer for a billion documents than for a
# million, and every epoch uses the same plan with other documents.


class Item(NamedTuple):
    """Pieces of one length in a group of samples. `each`: number of such pieces in every sample. Pieces
    of this length are numbered across all groups; the group's first piece has number `first`.
    """

    length: int
    first: int
    each: int


@dataclass(frozen=True)
class Group:
    """Samples that are alike: for any length, all have the same number of pieces of that length."""

    count: int
    items: tuple[Item, ...] = ()

    def split(self, count: int) -> "tuple[Group, Group]":
        """Splits the group into its first `count` samples and the rest."""
        later = tuple(item._replace(first=item.first + count * item.each) for item in self.items)
        return Group(count, self.items), Group(self.count - count, later)


def best_fit(counts: Int64Array, room: int) -> list[Group]:
    """Packs pieces into samples of `room` tokens. `counts` [room + 1]: number of pieces of each length."""
    # At first all samples are empty; no more are needed than there are pieces.
    by_room = {room: [Group(int(counts.sum()) + 1)]}
    rooms = [room]  # sorted keys of `by_room`

    def put(left: int, group: Group) -> None:
        if group.count and left not in by_room:
            insort(rooms, left)
        if group.count:
            by_room.setdefault(left, []).append(group)

    for length in range(room, 1, -1):  # pieces have at least two tokens: an input and its label
        first, end = 0, int(counts[length])
        while first < end:
            at = bisect_left(rooms, length)
            left = rooms[at]
            group = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[at]
            # The chosen sample stays the fullest one until no other piece of this length fits, so fill it.
            each = min(left // length, end - first)
            chosen, others = group.split(min(group.count, (end - first) // each))
            filled = Group(chosen.count, (*chosen.items, Item(length, first, each)))
            put(left - each * length, filled)
            put(left, others)
            first += chosen.count * each
    return [group for left in rooms for group in by_room[left] if group.items]


class PackedCorpus(Corpus):
    """Windows of whole documents, padded with end-of-document tokens. A cached epoch takes 16 bytes more
    per document than with `Corpus`.

    Only documents longer than a window are cut into pieces. In each epoch, every token of a piece is an
    input exactly once, except the piece's last token. Consecutive pieces of a document overlap by one token.
    Documents of one token are omitted.
    """

    def _count_windows(self, files: TokenFiles) -> int:
        self._filler = files.end_of_document[0] or 0
        counts = piece_counts(np.diff(self._bounds[self._first : self._end + 1]), self.seq_len)
        self._num_full = int(counts[-1])
        # Full samples have no room for other pieces and are not packed.
        counts[-1] = 0
        self._groups = best_fit(counts, self.seq_len + 1)
        self._group_ends = list(accumulate(group.count for group in self._groups))
        self._class_begins = np.concatenate([[0], np.cumsum(counts)])
        return self._num_full + (self._group_ends[-1] if self._groups else 0)

    def _order(self, documents: Int64Array, window_key: int) -> Epoch:
        num_full, rest = _cut(self._bounds[documents + 1] - self._bounds[documents], self.seq_len)
        # Stable: pieces of equal length stay in the order of the epoch.
        by_length = documents[np.argsort(rest, kind="stable")][int((rest == 0).sum()) :]
        return Epoch(documents, np.cumsum(num_full), window_key, by_length)

    def _pieces(self, epoch: Epoch, window: int) -> list[CorpusPiece]:
        if window < self._num_full:
            place = int(np.searchsorted(epoch.ends, window, side="right"))
            document = int(epoch.documents[place])
            before = int(epoch.ends[place - 1]) if place else 0
            begin = int(self._bounds[document]) + (window - before) * self.seq_len
            return [CorpusPiece(document, begin, begin + self.seq_len + 1)]
        sample = window - self._num_full
        number = bisect_right(self._group_ends, sample)
        group = self._groups[number]
        sample -= self._group_ends[number] - group.count
        pieces = []
        for length, first, each in group.items:
            begin = int(self._class_begins[length]) + first + sample * each
            for document in epoch.by_length[begin : begin + each].tolist():
                end = int(self._bounds[document + 1])
                pieces.append(CorpusPiece(document, end - length, end))
        if not self.shuffle:
            return pieces
        return [pieces[place] for place in shuffled(len(pieces), hash_of(f"{epoch.key}/{window}"))]


def piece_counts(lengths: Int64Array, seq_len: int) -> Int64Array:
    """How many pieces of each length result from cutting documents of `lengths` tokens; [seq_len + 2]."""
    num_full, rest = _cut(lengths, seq_len)
    counts = np.bincount(rest, minlength=seq_len + 2)
    counts[0], counts[-1] = 0, num_full.sum()
    return counts


def _cut(lengths: Int64Array, seq_len: int) -> tuple[Int64Array, Int64Array]:
    """Per document: number of full samples, and length of the remainder (0 if it predicts no token)."""
    num_full, predicted = np.divmod(np.maximum(lengths - 1, 0), seq_len)
    return num_full, np.where(predicted > 0, predicted + 1, 0)


def cut_documents(lengths: Int64Array, seq_len: int) -> dict[str, float]:
    """Fraction of documents that are cut, for two ways to pack them into samples of `seq_len` tokens.

    `concatenated`: a document of n tokens is cut with probability (n - 1) / seq_len. `best_fit`: only
    documents longer than a sample are cut. `filler`: fraction of padding tokens with `best_fit`.
    """
    counts = piece_counts(lengths, seq_len)
    num_samples = sum(group.count for group in best_fit(counts, seq_len + 1))
    num_filled = int((counts * np.arange(len(counts))).sum())
    return {
        "seq_len": seq_len,
        "concatenated": float(np.clip((lengths - 1) / seq_len, 0, 1).mean()) if len(lengths) else 0.0,
        "best_fit": float((lengths > seq_len + 1).mean()) if len(lengths) else 0.0,
        "filler": 1 - num_filled / (num_samples * (seq_len + 1)) if num_samples else 0.0,
    }


def attended_share(files: TokenFiles, seq_len: int, packing: str = "concatenate") -> float:
    """Mean fraction (0 to 1) of a sample's query-key pairs whose tokens are in the same document.

    It is computed for samples in file order; shuffled samples have nearly the same value. For very large
    files, only a subset of the documents is used.
    """
    bounds = files.document_bounds
    firsts, block = np.array([0]), len(bounds) - 1
    if block > _BLOCKS * _BLOCK:  # limits memory (50 bytes per document): evenly spaced blocks
        firsts, block = np.linspace(0, block - _BLOCK, _BLOCKS, dtype=np.int64), _BLOCK
    lengths = np.concatenate([np.diff(bounds[first : first + block + 1]) for first in firsts])
    if packing == "best_fit":
        counts = piece_counts(lengths, seq_len)
        num_samples = sum(group.count for group in best_fit(counts, seq_len + 1))
        squares = np.minimum(np.arange(len(counts)), seq_len).astype(np.float64) ** 2
        return float((counts * squares).sum() / (num_samples * seq_len**2)) if num_samples else 1.0
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1]) // seq_len * seq_len
    cuts = np.union1d(ends[ends < num_tokens], np.arange(seq_len, num_tokens + 1, seq_len))
    inside = np.diff(cuts, prepend=0).astype(np.float64)
    return float((inside**2).sum() / (num_tokens * seq_len)) if num_tokens else 1.0
