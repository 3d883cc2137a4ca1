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
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from moe_exp.data.samples.blend import blend_counts, blend_position, integer_weights
from moe_exp.data.samples.corpus import Corpus, add_files
from moe_exp.data.samples.packing import PackedCorpus
from moe_exp.data.tokens.files import Int64Array, Share, TokenFiles
from moe_exp.data.tokens.ranged import bin_bytes, read_ranges

Packing = Literal["concatenate", "best_fit"]

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
    """A part of the training data: its number, from 0, tokens per sample, and whether samples end in filler
    (`packing.PackedCorpus`).
    """

    number: int
    seq_len: int
    has_filler: bool = False


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
        packing: DOCUMENT_PACKING; with "best_fit" the windows are those of `packing.PackedCorpus`.

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
        packing: Packing = "concatenate",
    ):
        if not blend:
            raise ValueError("TRAIN_DATA=: a blend needs at least one prefix. Fix: name a .bin/.idx prefix.")
        self.seq_len = seq_len
        self._shuffle, self._share, self._key = shuffle, share, str(seed)
        self._kind = PackedCorpus if packing == "best_fit" else Corpus
        # Windows that each corpus gave in stages before this one; one that comes twice in a blend is two.
        self._given: dict[tuple[str, int, int], tuple[Corpus, int]] = {}
        self._take(blend, self._key)

    def _take(self, blend: Sequence[tuple[float, str]], key: str) -> None:
        self._cumulative_weights = [0, *accumulate(integer_weights([weight for weight, _ in blend]))]
        self._names: list[tuple[str, int, int]] = []
        for position, (_, prefix) in enumerate(blend):
            times = sum(name[0] == prefix for name in self._names)
            self._names.append(name := (prefix, self.seq_len, times))
            if name not in self._given:
                corpus = self._kind(
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
        return Stage(0, self.seq_len, self._kind is PackedCorpus)

    def sample(self, index: int) -> Int64Array:
        """Sample number `index` (0 and up): int64 token ids of shape [S1]."""
        corpus, local = self._place(index)
        return corpus.window(local)

    def origin(self, index: int) -> Origin:
        """Origin of sample number `index`."""
        corpus, local = self._place(index)
        return Origin(corpus.prefix, corpus.documents(local))

    def _place(self, index: int) -> tuple[Corpus, int]:
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


def print_of(fingerprint: str, content: str) -> str:
    """16 hex digits for the fingerprint and the hash of the tokens of files together."""
    return hashlib.blake2b(f"{fingerprint} {content}".encode(), digest_size=8).hexdigest()


def fingerprint_of(prefixes: Sequence[str]) -> str:
    """16 hex digits that identify token files by sizes, document lengths and ends, not by their paths.

    Order matters, as it keys the shuffle. Weights, sequence length and seed are settings and not part of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for prefix in prefixes:
        files = TokenFiles(prefix)
        add_files(digest, prefix, files.dtype, files.document_bounds)
    return digest.hexdigest()


def content_of(prefixes: Sequence[str]) -> str:
    """16 hex digits of the tokens themselves: of all up to 64 MiB, else of blocks of 16 KiB evenly over all.

    A stretch of other tokens that is longer than a 4096th of all files is always noticed; what is shorter,
    by `moe-exp data verify`, which reads everything. 64 MiB take a tenth of a second from a local disk.
    """
    sizes = [bin_bytes(prefix) or 0 for prefix in prefixes]
    step = max(_BLOCK_BYTES, sum(sizes) // _NUM_BLOCKS)
    digest = hashlib.blake2b(digest_size=8)
    for prefix, size in zip(prefixes, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        ranges = [(begin, min(begin + _BLOCK_BYTES, size)) for begin in range(0, size, step)]
        for block in read_ranges(prefix, ranges):
            digest.update(block)
    return digest.hexdigest()
