"""Many 128-bit hashes of documents in little memory, to count duplicates and to compare corpora."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

HASH_BYTES = 16
_Words = npt.NDArray[np.uint64]


class Hashes:
    """XXH3-128 of documents, 16 bytes each, in the order in which they were added."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes) // HASH_BYTES

    def add(self, document: bytes | memoryview) -> None:
        """Adds a document."""
        self._bytes += xxhash.xxh3_128_digest(document)

    def extend(self, other: Hashes) -> None:
        """Adds those of another instance."""
        self._bytes += other._bytes

    @property
    def _words(self) -> tuple[_Words, _Words]:
        first, second = np.frombuffer(self._bytes, dtype=np.uint64).reshape(-1, 2).T
        return first, second

    def sorted_words(self) -> tuple[_Words, _Words]:
        """Both halves of every hash, sorted by the first half, then by the second."""
        first, second = self._words
        order = np.lexsort((second, first))
        return first[order], second[order]

    def num_duplicates(self) -> int:
        """Documents that another one before them is equal to."""
        first, second = self.sorted_words()
        return int(((first[1:] == first[:-1]) & (second[1:] == second[:-1])).sum())

    def is_in(self, first: _Words, second: _Words) -> npt.NDArray[np.bool_]:
        """Whether each document is among `sorted_words` of another instance.

        If two of those agree in the first 64 bits but not in the last, only one is compared; that takes
        2**32 documents.
        """
        mine_first, mine_second = self._words
        if not len(first):
            return np.zeros(len(self), dtype=np.bool_)
        place = np.minimum(np.searchsorted(first, mine_first), len(first) - 1)
        return (first[place] == mine_first) & (second[place] == mine_second)


def difference(one: Hashes, other: Hashes) -> tuple[int, int]:
    """Documents of `one` that `other` lacks, and the reverse; two equal documents count as two."""
    joined = Hashes()
    joined.extend(one)
    joined.extend(other)
    first, second = joined._words
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_start = np.ones(len(order), dtype=np.bool_)
    is_start[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    if not len(order):
        return 0, 0
    # Of every run of equal hashes: how many more of them `one` has.
    surplus = np.add.reduceat(np.where(order < len(one), 1, -1), np.flatnonzero(is_start))
    return int(surplus[surplus > 0].sum()), int(-surplus[surplus < 0].sum())
