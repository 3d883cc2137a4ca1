"""Token files -> the endless sequence of training samples -> batches.

Megatron's GPTDataset shuffles over all samples of the run, so the data order depends on the number of
training iterations, and extending a run changes it; `megatron_dataset.py` reproduces that order. Here sample
i is a function of the files, the sequence length, the seed and i alone, without an index on disk.

Shape suffixes: B samples, S = seq_len tokens that are read, S1 one more, for the last label.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from moe_exp.data.samples.corpus import Corpus, PackedCorpus
from moe_exp.data.tokens.ranged import bin_bytes, read_ranges
from moe_exp.data.tokens.tokens import Int64Array, Share, TokenFiles

Packing = Literal["concatenate", "best_fit"]
Range = tuple[int, int]

_BLOCK_BYTES, _NUM_BLOCKS = 2**14, 2**12  # of `content_of`


class DataStage(NamedTuple):
    """A part of the training data: its number, from 0, tokens per sample, and whether samples end in filler
    (`PackedCorpus`).
    """

    number: int
    seq_len: int
    has_filler: bool = False


class Origin(NamedTuple):
    """The prefix of a sample's files, and the numbers there, from 0, of the documents that it is from."""

    prefix: str
    documents: tuple[int, ...]


class Samples(Protocol):
    """Samples of a run by number, in an order that does not change during the run."""

    def stage_at(self, index: int) -> DataStage:
        """The stage of DATA_STAGES that sample number `index` belongs to."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples `first` to `first + count - 1`: int64 token ids of shape [count, S1]."""

    def origin(self, index: int) -> Origin:
        """Origin of sample number `index`."""


class _StagePart(NamedTuple):
    """A stage of a `SampleStream`: of every file the corpus, and the windows that earlier stages took."""

    first_sample: int
    seq_len: int
    weights: list[int]  # running sums, from 0
    names: list[tuple[str, int, int]]
    corpora: list[Corpus]
    taken: list[int]


class SampleStream:
    """The endless, shuffled sequence of training samples over one token file or a weighted blend of several.

    Within one file and epoch the documents are shuffled, concatenated and cut into windows of `seq_len`
    tokens (plus one, for the last label, that is also the first of the next window), and the windows are
    shuffled. Every token is the input of exactly one sample per epoch, but for the remainder that is shorter
    than a window. The files of a blend have epochs of their own, see `blend_position`.

    Samples are counted in tokens of the first stage, as everywhere: in a stage whose samples are F times as
    long, one stands for F numbers, and these are always read together.

    Args:
        blend: (weight, prefix of .bin/.idx) pairs as of `parse_blend`; weights are relative.
        seq_len: tokens per sample.
        seed: key of both shuffles.
        shuffle: False keeps the order of the file, as for validation.
        share: the part of each file's documents that is read, from 0 to 1 (`tokens.files.parse_split`).
        packing: DOCUMENT_PACKING; with "best_fit" the windows are those of `PackedCorpus`.

    Raises:
        ValueError: a file is missing, damaged or smaller than one window.
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
        self.seq_len = seq_len
        self._shuffle, self._share, self._key = shuffle, share, str(seed)
        self._kind = PackedCorpus if packing == "best_fit" else Corpus
        self._stages: list[_StagePart] = []
        # Windows that each corpus gave in stages so far; one that comes twice in a blend is two.
        self._given: dict[tuple[str, int, int], tuple[Corpus, int]] = {}
        self._append(blend, seq_len, first_sample=0, key=self._key)

    def add_stage(self, blend: Sequence[tuple[float, str]], *, seq_len: int, first_sample: int) -> None:
        """Lets the samples from `first_sample` on come from another blend; files continue where they are.

        With another `seq_len`, a multiple of that of the first stage, a file begins a new epoch, without what
        was left of the one before. `first_sample` is as far after the stage before as whole samples reach.
        """
        last = self._stages[-1]
        num_samples = (first_sample - last.first_sample) * self.seq_len // last.seq_len
        for name, count in zip(last.names, blend_counts(num_samples, last.weights), strict=True):
            corpus, before = self._given[name]
            self._given[name] = corpus, before + count
        key = f"{self._key}/stage {len(self._stages)}"
        self._append(blend, seq_len, first_sample=first_sample, key=key)

    def _append(
        self, blend: Sequence[tuple[float, str]], seq_len: int, *, first_sample: int, key: str
    ) -> None:
        weights = [0, *accumulate(integer_weights([weight for weight, _ in blend]))]
        names: list[tuple[str, int, int]] = []
        for position, (_, prefix) in enumerate(blend):
            # a file that comes twice in a blend is read by two corpora, each with its own order
            times = sum(name[0] == prefix for name in names)
            names.append(name := (prefix, seq_len, times))
            if name not in self._given:
                how: dict[str, Any] = {"shuffle": self._shuffle, "share": self._share}
                corpus = self._kind(prefix, seq_len=seq_len, key=f"{key}/{position}", **how)
                self._given[name] = corpus, 0
        corpora, taken = zip(*(self._given[name] for name in names), strict=True)
        self._stages.append(_StagePart(first_sample, seq_len, weights, names, list(corpora), list(taken)))

    def stage_at(self, index: int) -> DataStage:
        number = bisect_right(self._stages, index, key=lambda stage: stage.first_sample) - 1
        return DataStage(number, self._stages[number].seq_len, self._kind is PackedCorpus)

    def sample(self, index: int) -> Int64Array:
        """Sample number `index` (0 and up): int64 token ids of shape [S1]."""
        corpus, window = self._place(index)
        return corpus.window(window)

    def origin(self, index: int) -> Origin:
        corpus, window = self._place(index)
        return Origin(corpus.prefix, corpus.documents(window))

    def _place(self, index: int) -> tuple[Corpus, int]:
        """The corpus of a sample, and the number of its window there."""
        stage = self._stages[self.stage_at(index).number]
        local = (index - stage.first_sample) * self.seq_len // stage.seq_len
        position, window = blend_position(local, stage.weights)
        return stage.corpora[position], stage.taken[position] + window

    def batch(self, first: int, count: int) -> torch.Tensor:
        """The samples that stand for `first` to `first + count - 1`: int64 token ids of shape [count/F, S1].
        ValueError if these numbers are not those of whole samples of one stage.
        """
        number, seq_len, _ = self.stage_at(first)
        # a longer sample stands for several numbers
        factor = seq_len // self.seq_len
        inside = (first - self._stages[number].first_sample) % factor
        if inside or count % factor or self.stage_at(first + count - 1).number != number:
            rule = f"samples {first} to {first + count - 1} are not those of whole samples of a stage"
            raise ValueError(f"{rule}. Fix: read {factor} at a time.")
        return torch.from_numpy(np.stack([self.sample(n) for n in range(first, first + count, factor)]))


def fingerprint_of(prefixes: Sequence[str]) -> str:
    """16 hex digits that identify token files by sizes, document lengths, first and last bytes, not by paths.

    Order matters, as it keys the shuffle. About half a second for 50 million documents.
    """
    digest = hashlib.blake2b(digest_size=8)
    for prefix in prefixes:
        files = TokenFiles(prefix)
        bounds, size = files.document_bounds, bin_bytes(prefix) or 0
        digest.update(f"{files.dtype.name} {len(bounds)} {bounds[-1]}".encode())
        digest.update(np.ascontiguousarray(bounds, dtype="<i8").data)
        for block in read_ranges(prefix, [(0, min(size, 4096)), (max(0, size - 4096), size)]):
            digest.update(block)
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


# Which data set of a blend gives which sample


def blend_position(index: int, cumulative_weights: Sequence[int]) -> tuple[int, int]:
    """Which data set sample `index` of a blend comes from, and how many samples it gave before.

    The data sets are split in halves again and again. Of the n samples that reach a node, round(n * p) go to
    its left half, where p is the share of that half. This has a closed form, so random access needs no
    history. Rounding adds at most 1/2 per level: after any number of samples, each of K data sets is within
    ceil(log2 K) / 2 samples of its share. The weights are 0 and running sums of integers: it is exact.
    """
    low, high = 0, len(cumulative_weights) - 1
    while high - low > 1:
        middle = (low + high) // 2
        left = cumulative_weights[middle] - cumulative_weights[low]
        total = cumulative_weights[high] - cumulative_weights[low]
        # round(n * p) in integers; the left half got this sample if its count grows with it
        before, after = ((2 * n * left + total) // (2 * total) for n in (index, index + 1))
        if after > before:
            high, index = middle, before
        else:
            low, index = middle, index - before
    return low, index


def blend_counts(count: int, cumulative_weights: Sequence[int]) -> list[int]:
    """How many of the first `count` samples of a blend come from each data set, see `blend_position`."""
    if len(cumulative_weights) == 2:
        return [count]
    middle = (len(cumulative_weights) - 1) // 2
    left = cumulative_weights[middle] - cumulative_weights[0]
    total = cumulative_weights[-1] - cumulative_weights[0]
    of_left = (2 * count * left + total) // (2 * total)
    return blend_counts(of_left, cumulative_weights[: middle + 1]) + blend_counts(
        count - of_left, cumulative_weights[middle:]
    )


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The same ratios in whole numbers."""
    # By way of the text, so that 0.3 is 3/10 and not the binary fraction next to it.
    fractions = [Fraction(str(float(weight))) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


# Batches


def split_batch(
    tokens_BS1: torch.Tensor, positions_BS: torch.Tensor | None = None, masked_id: int | None = None
) -> dict[str, torch.Tensor]:
    """Splits token ids [B, S1] into `tokens`, `labels` (the next tokens), `position_ids` (int64), `loss_mask`
    (float32 ones and zeros), each [B, S], as Megatron's forward step takes them.

    Args:
        positions_BS: of the tokens in their documents, int64; None: in the samples.
        masked_id: the token that ends a document, after which the next one is not predicted; None: every
            token counts.
    """
    tokens_BS = tokens_BS1[:, :-1].contiguous()
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.size(1)).repeat(len(tokens_BS), 1)
    counted = torch.ones_like(tokens_BS, dtype=torch.bool) if masked_id is None else tokens_BS != masked_id
    return {
        "tokens": tokens_BS,
        "labels": tokens_BS1[:, 1:].contiguous(),
        "loss_mask": counted.float(),
        "position_ids": positions_BS.to(tokens_BS.device, non_blocking=True),
    }


def filler_mask(tokens_BS1: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Which inputs, bool [B, S], only fill a sample up (DOCUMENT_PACKING=best_fit): of the end-of-document
    tokens that it ends with, all but the first, which ends its last document.
    """
    at_end_BS1 = (tokens_BS1 == eod_id).flip(1).cumprod(dim=1).flip(1).bool()
    return torch.nn.functional.pad(at_end_BS1[:, :-2], (1, 0))


def context_part(
    batch: Mapping[str, torch.Tensor], ranges: tuple[tuple[int, int], ...]
) -> dict[str, torch.Tensor]:
    """The part of a batch, each [B, S], that a context parallel rank has: tokens `first` to `end - 1` of each
    of its `ranges`, together [B, S/C].
    """
    if len(ranges) == 1:
        return dict(batch)
    return {
        name: torch.cat([values[:, first:end] for first, end in ranges], dim=1)
        for name, values in batch.items()
    }


# Samples without some that are left out: what a run continues with after it has gone back to before a spike.
#
# Training counts the samples that it consumes; schedule, batch ramp-up and checkpoints know only that number.
# The stream counts its own. Consumed sample n is the n-th of the stream that is not skipped: the order of all
# others stays, and none is lost or repeated. Ranges are [first, end) in numbers of the stream.


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """The same numbers as ranges that neither overlap nor touch, in order; empty ones are left out."""
    found: list[Range] = []
    for first, end in sorted((int(first), int(end)) for first, end in ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif first < end:
            found.append((first, end))
    return tuple(found)


def stream_number(consumed: int, skipped: Sequence[Range]) -> int:
    """Number in the stream of consumed sample `consumed`. `skipped`: as `merged` returns them."""
    for first, end in skipped:
        if consumed < first:
            break
        consumed += end - first
    return consumed


def stream_ranges(first: int, end: int, skipped: Sequence[Range]) -> tuple[Range, ...]:
    """Numbers in the stream of the consumed samples [first, end). `skipped`: as `merged` returns them."""
    found = []
    begin = stream_number(first, skipped)
    while first < end:
        # As far as the next skip, or to the end.
        limit = next((start for start, _ in skipped if start > begin), begin + end - first)
        count = min(end - first, limit - begin)
        found.append((begin, begin + count))
        first += count
        begin = stream_number(first, skipped)
    return tuple(found)


def skipped_from(
    saved: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], consumed: int
) -> tuple[Range, ...]:
    """Ranges that are skipped after a checkpoint: its own (`saved`), and those of the run (`wanted`) from its
    place in the stream on. What lies before was skipped or trained on, and only the checkpoint knows.
    """
    past = merged(saved)
    # The sample before is the last that was trained; skips that follow it at once are ahead.
    place = stream_number(consumed - 1, past) + 1 if consumed else 0
    return merged([*past, *((max(int(first), place), int(end)) for first, end in wanted if end > place)])


class SkippingSamples:
    """`samples` without the ranges `skipped`: `Samples` by numbers of consumed samples.

    `length`: of a stream that ends, such as Megatron's order: as many of its first samples as were skipped
    come again at its end; None: it has no end.
    """

    def __init__(self, samples: Samples, skipped: Iterable[Sequence[int]], length: int | None = None):
        self.skipped = merged(skipped)
        # Without skips a stream that has come to its end says so itself.
        self._samples, self._length = samples, length if self.skipped else None

    def stage_at(self, index: int) -> DataStage:
        return self._samples.stage_at(self._within(stream_number(index, self.skipped)))

    def batch(self, first: int, count: int) -> torch.Tensor:
        ranges = stream_ranges(first, first + count, self.skipped)
        if self._length is None or ranges[-1][1] <= self._length:
            parts = [self._samples.batch(begin, end - begin) for begin, end in ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        numbers = (number for begin, end in ranges for number in range(begin, end))
        return torch.cat([self._samples.batch(self._within(number), 1) for number in numbers])

    def origin(self, index: int) -> Origin:
        return self._samples.origin(self._within(stream_number(index, self.skipped)))

    def _within(self, number: int) -> int:
        while self._length is not None and number >= self._length:
            number = stream_number(number - self._length, self.skipped)
        return number
