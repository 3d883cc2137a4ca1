"""DOCUMENT_PACKING=best_fit: samples of whole documents. No torch.

A document that is longer than a sample is cut into full ones and a rest. Rests and shorter documents, longest
first, each go into the sample with the least room that is enough (best-fit decreasing; Ding et al. 2024,
"Fewer Truncations Improve Language Modeling", arXiv 2404.10830). Pieces of one length are exchangeable, so
that whole classes of them are placed at once: the plan takes no longer for a billion documents than for a
million, and is the same in every epoch, which only deals other documents to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moe_exp.data.samples.corpus import Corpus, Epoch, Piece, hash_of, shuffled
from moe_exp.data.tokens.files import Int64Array, TokenFiles

_BLOCKS, _BLOCK = 64, 2**16  # documents whose lengths stand for all
_SHORTEST = 2  # tokens: one to predict the next from


class Item(NamedTuple):
    """Pieces of one length: `each` in every sample of a group, of all pieces of this length those from
    `first` on in its first sample.
    """

    length: int
    first: int
    each: int


@dataclass(frozen=True)
class Group:
    """Samples that are filled with pieces of the same lengths."""

    count: int
    items: tuple[Item, ...] = ()

    def split(self, count: int) -> tuple[Group, Group]:
        """The first `count` samples, and the others."""
        later = tuple(item._replace(first=item.first + count * item.each) for item in self.items)
        return Group(count, self.items), Group(self.count - count, later)


def best_fit(counts: Int64Array, room: int) -> list[Group]:
    """Which pieces share a sample.

    Args:
        counts: pieces of each length in tokens, [room + 1]; none is shorter than 2.
        room: tokens of a sample.
    """
    by_room: dict[int, list[Group]] = {}
    rooms: list[int] = []  # those that groups have, ascending

    def put(left: int, group: Group) -> None:
        if group.count and left not in by_room:
            insort(rooms, left)
        if group.count:
            by_room.setdefault(left, []).append(group)

    def take(length: int) -> tuple[int, Group | None]:
        at = bisect_left(rooms, length)
        if at == len(rooms):
            return room, None
        left = rooms[at]
        group = by_room[left].pop()
        if not by_room[left]:
            del by_room[left], rooms[at]
        return left, group

    for length in range(room, _SHORTEST - 1, -1):
        first, end = 0, int(counts[length])
        while first < end:
            left, group = take(length)
            # The fullest sample with enough room stays the fullest until no other piece of this length fits.
            each = min(left // length, end - first)
            group = group or Group((end - first) // each)
            chosen, others = group.split(min(group.count, (end - first) // each))
            filled = Group(chosen.count, (*chosen.items, Item(length, first, each)))
            put(left - each * length, filled)
            put(left, others)
            first += chosen.count * each
    return [group for left in rooms for group in by_room[left]]


class PackedCorpus(Corpus):
    """Windows of whole documents, filled up with end-of-document tokens. Memory: as `Corpus`, and 16 bytes
    more per document and cached epoch.

    Every token of a piece but its last is the input of one sample per epoch. Of a document that is cut, the
    last token of a piece is the first of the next. Documents of one token are left out.
    """

    def _filler_of(self, files: TokenFiles) -> int:
        return files.end_of_document[0] or 0

    def _count_windows(self) -> int:
        lengths = np.diff(self._bounds[self._first : self._end + 1])
        counts = piece_counts(lengths, self.seq_len)
        self._num_full = int(counts[-1])
        counts[-1] = 0
        self._groups = best_fit(counts, self.seq_len + 1)
        self._group_ends = list(accumulate(group.count for group in self._groups))
        self._class_begins = np.concatenate([[0], np.cumsum(counts)])
        return self._num_full + (self._group_ends[-1] if self._groups else 0)

    def _order(self, documents: Int64Array, window_key: int) -> Epoch:
        num_full, rest = _cut(self._bounds[documents + 1] - self._bounds[documents], self.seq_len)
        by_length = documents[np.argsort(rest, kind="stable")][int((rest == 0).sum()) :]
        return Epoch(documents, np.cumsum(num_full), window_key, by_length)

    def _pieces(self, epoch: Epoch, window: int) -> list[Piece]:
        if window < self._num_full:
            place = int(np.searchsorted(epoch.ends, window, side="right"))
            document = int(epoch.documents[place])
            before = int(epoch.ends[place - 1]) if place else 0
            begin = int(self._bounds[document]) + (window - before) * self.seq_len
            return [Piece(document, begin, begin + self.seq_len + 1)]
        sample = window - self._num_full
        number = bisect_right(self._group_ends, sample)
        group = self._groups[number]
        sample -= self._group_ends[number] - group.count
        pieces = []
        for length, first, each in group.items:
            begin = int(self._class_begins[length]) + first + sample * each
            for document in epoch.by_length[begin : begin + each].tolist():
                end = int(self._bounds[document + 1])
                pieces.append(Piece(document, end - length, end))
        if not self.shuffle:
            return pieces
        return [pieces[place] for place in shuffled(len(pieces), hash_of(f"{epoch.key}/{window}"))]


def piece_counts(lengths: Int64Array, seq_len: int) -> Int64Array:
    """Pieces of each length in tokens, [seq_len + 2], of documents of these lengths."""
    num_full, rest = _cut(lengths, seq_len)
    counts = np.bincount(rest, minlength=seq_len + 2)
    counts[0], counts[-1] = 0, num_full.sum()
    return counts


def _cut(lengths: Int64Array, seq_len: int) -> tuple[Int64Array, Int64Array]:
    """Full samples of each document, and the tokens of the piece that is left, 0 or 2 to seq_len."""
    num_full, predicted = np.divmod(np.maximum(lengths - 1, 0), seq_len)
    return num_full, np.where(predicted > 0, predicted + 1, 0)


def cut_documents(lengths: Int64Array, seq_len: int) -> dict[str, float]:
    """Counts how samples of `seq_len` tokens cut documents of these lengths, both ways of making them.

    Returns:
        `concatenated`: share of the documents that are cut when all are one text, 0 to 1: one of n tokens
        with a probability of (n - 1) / seq_len, as its place is random. `best_fit`: the same by best fit,
        where only those longer than a sample are. `filler`: share of end-of-document tokens that fill samples
        up by best fit. And `seq_len`.
    """
    counts = piece_counts(lengths, seq_len)
    num_samples = _num_samples(counts)
    num_filled = int((counts * np.arange(len(counts))).sum())
    return {
        "seq_len": seq_len,
        "concatenated": float(np.clip((lengths - 1) / seq_len, 0, 1).mean()) if len(lengths) else 0.0,
        "best_fit": float((lengths > seq_len + 1).mean()) if len(lengths) else 0.0,
        "filler": 1 - num_filled / (num_samples * (seq_len + 1)) if num_samples else 0.0,
    }


def _num_samples(counts: Int64Array) -> int:
    return sum(group.count for group in best_fit(counts, len(counts) - 1))


def attended_share(files: TokenFiles, seq_len: int, packing: str = "concatenate") -> float:
    """Pairs of a query and a key in one document over all pairs in a sample, mean over samples, 0 to 1.

    Of samples that are cut from the documents in the order of the file. Shuffled ones have nearly the same,
    and so has a part of very many documents.
    """
    lengths = _some_lengths(files.document_bounds)
    if packing == "best_fit":
        counts = piece_counts(lengths, seq_len)
        num_samples = _num_samples(counts)
        squares = np.minimum(np.arange(len(counts)), seq_len).astype(np.float64) ** 2
        return float((counts * squares).sum() / (num_samples * seq_len**2)) if num_samples else 1.0
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1]) // seq_len * seq_len
    cuts = np.union1d(ends[ends < num_tokens], np.arange(seq_len, num_tokens + 1, seq_len))
    inside = np.diff(cuts, prepend=0).astype(np.float64)
    return float((inside**2).sum() / (num_tokens * seq_len)) if num_tokens else 1.0


def _some_lengths(bounds: Int64Array) -> Int64Array:
    """Lengths of all documents; of very many those in blocks evenly over them: each costs 50 bytes."""
    if len(bounds) - 1 <= _BLOCKS * _BLOCK:
        return np.diff(bounds)
    firsts = np.linspace(0, len(bounds) - 1 - _BLOCK, _BLOCKS, dtype=np.int64)
    return np.concatenate([np.diff(bounds[first : first + _BLOCK + 1]) for first in firsts])
