"""The order of a shuffle: every document's key, and its choice, by which it is for validation.

Every document gets a 64-bit key from the seed and its place among all documents that were read. The shuffled
order is the order of the keys, so it is the same however many buckets there are and however much memory. Keys
differ: splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) is a
bijection of its counter. A bucket is a range of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moe_exp.data.documents import Tally
from moe_exp.data.shuffle.blocks import DIGEST_BYTES, Documents, sum_digests

NUM_KEYS = 2**64
_GAMMA = 0x9E3779B97F4A7C15
Keys = NDArray[np.uint64]


def mix(values: Keys) -> Keys:
    """splitmix64's output function: a bijection of 64 bits in which every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def document_keys(seed: int, first: int, count: int) -> Keys:
    """Keys of documents `first`, `first + 1`, ...: splitmix64's outputs from a hash of the seed."""
    start = xxhash.xxh3_64_intdigest(f"order {seed}".encode()) + _GAMMA * (first + 1)
    return mix(np.uint64(start % NUM_KEYS) + np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA))


def text_choices(seed: int, text_digests: bytes) -> Keys:
    """A number for each text that depends on it and the seed alone: the smallest ones are for validation."""
    start = xxhash.xxh3_64_intdigest(f"validation {seed}".encode())
    return mix(np.frombuffer(text_digests, dtype=">u8")[::2].astype(np.uint64) ^ np.uint64(start))


@dataclass
class ValidTally:
    """Counts the documents with a choice under `threshold`, or if there are none, with the smallest one."""

    threshold: int  # the wanted fraction of 2**64
    below: Tally = field(default_factory=Tally)
    smallest: int = NUM_KEYS  # choice so far
    at_smallest: Tally = field(default_factory=Tally)  # one text and its duplicates

    def add(self, choices: Keys, documents: Documents) -> None:
        """Counts the documents of a block."""
        if not len(choices):
            return
        smallest = int(choices.min())
        if smallest < self.smallest:
            self.smallest, self.at_smallest = smallest, Tally()
        if smallest == self.smallest:
            self.at_smallest += _tally_where(choices == np.uint64(smallest), documents)
        if smallest < self.threshold:
            self.below += _tally_where(choices < np.uint64(self.threshold), documents)

    def limit(self) -> int:
        """Documents with a smaller choice are for validation."""
        return self.threshold if self.below.num_documents else self.smallest + 1

    def __iadd__(self, other: ValidTally) -> ValidTally:
        self.below += other.below
        if other.smallest < self.smallest:
            self.smallest, self.at_smallest = other.smallest, Tally()
        if other.smallest == self.smallest:
            self.at_smallest += other.at_smallest
        return self

    def to_json(self) -> dict[str, Any]:
        """JSON values for a file."""
        return vars(self) | {"below": self.below.to_json(), "at_smallest": self.at_smallest.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ValidTally:
        """The other way round."""
        tallies = {name: Tally.from_json(content[name]) for name in ("below", "at_smallest")}
        return cls(**content | tallies)

    def total(self) -> Tally:
        """Counts of the validation documents."""
        return self.below if self.below.num_documents else self.at_smallest


def _tally_where(chosen: NDArray[np.bool_], documents: Documents) -> Tally:
    digests = np.frombuffer(documents.text_digests, dtype=f"V{DIGEST_BYTES}")[chosen]
    return Tally(int(chosen.sum()), int(documents.text_bytes[chosen].sum()), sum_digests(digests.tobytes()))


def first_key(bucket: int, num_buckets: int) -> int:
    """The smallest key of a bucket; of the one after the last, 2**64."""
    return -(-bucket * NUM_KEYS // num_buckets)


def bucket_bounds(num_buckets: int) -> Keys:
    """The smallest key of each bucket."""
    return np.array([first_key(bucket, num_buckets) for bucket in range(num_buckets)], dtype=np.uint64)
