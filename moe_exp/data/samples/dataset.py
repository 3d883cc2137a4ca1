"""Token files -> endless sequence of training samples -> batches.

Here, sample i depends only on the files, the sequence length, the seed and i; no index is stored on disk.
Megatron's GPTDataset instead shuffles all samples of a run, so extending a run changes the data order;
`megatron_dataset.py` reproduces the order of GPTDataset.

Shape suffixes: B samples, S = seq_len input tokens, S1 = S + 1 (with the last label).
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
    """Stage `number` (from 0) of DATA_STAGES. If `has_filler`, samples of the stage may end in padding."""

    number: int
    seq_len: int
    has_filler: bool = False


class Origin(NamedTuple):
    """Source of a sample: the prefix of its token files, and the numbers (from 0) of its documents there."""

    prefix: str
    documents: tuple[int, ...]


class Samples(Protocol):
    """Samples of a run, accessed by number. The order does not change during the run."""

    def stage_at(self, index: int) -> DataStage:
        """Stage of sample `index`."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples [first, first + count): int64 token ids of shape [count, S1]."""

    def origin(self, index: int) -> Origin:
        """Origin of sample `index`."""


class _StagePart(NamedTuple):
    """A stage of a `SampleStream`."""

    first_sample: int
    seq_len: int
    weights: list[int]  # running sums, from 0
    # for each file its key in `_given`, corpus, and the number of windows that earlier stages used
    files: list[tuple[tuple[str, int, int], Corpus, int]]


class SampleStream:
    """Endless shuffled sequence of training samples from one token file or a weighted blend of files.

    In each epoch of a file, the documents are shuffled and concatenated, then cut into windows of `seq_len`
    tokens; the windows are shuffled too. A sample is a window plus the next token, which is the last label.
    Except for a remainder shorter than a window, every token is the input of exactly one sample per epoch.
    Each file of a blend has its own epochs. `blend_position` chooses the file of each sample.

    In a later stage (see `add_stage`), samples may be F times as long as in the first stage. Each of these
    samples then covers F consecutive sample numbers.

    Args:
        blend: (weight, prefix) pairs from `parse_blend`; weights are relative.
        seq_len: tokens per sample.
        seed: key of the shuffles of documents and windows.
        shuffle: if False, keep the file order, as is done for validation.
        share: range of each file's documents to use, as fractions from 0 to 1 (see `parse_split`).
        packing: value of DOCUMENT_PACKING; "best_fit" uses `PackedCorpus`.

    Raises:
        ValueError: if a file is missing, damaged or smaller than one window.
    """

    def __init__(
        self, blend: Sequence[tuple[float, str]], *, seq_len: int, seed: int, shuffle: bool = True,
        share: Share = (0.0, 1.0), packing: Packing = "concatenate",
    ):  # fmt: skip
        self.seq_len = seq_len
        self._shuffle, self._share, self._key = shuffle, share, str(seed)
        self._kind = PackedCorpus if packing == "best_fit" else Corpus
        self._stages: list[_StagePart] = []
        # Windows used of each corpus in earlier stages; a file listed twice in a blend has two corpora.
        self._given: dict[tuple[str, int, int], tuple[Corpus, int]] = {}
        self._append(blend, seq_len, first_sample=0, key=self._key)

    def add_stage(self, blend: Sequence[tuple[float, str]], *, seq_len: int, first_sample: int) -> None:
        """Switches to another blend at `first_sample`. A file in both blends continues at its position.

        If `seq_len` changes, each file drops the rest of its epoch and starts a new epoch. The new `seq_len`
        must be a multiple of the first stage's `seq_len`. `first_sample` must be on a sample boundary of the
        previous stage.
        """
        last = self._stages[-1]
        num_samples = (first_sample - last.first_sample) * self.seq_len // last.seq_len
        counts = blend_counts(num_samples, last.weights)
        for (name, corpus, before), count in zip(last.files, counts, strict=True):
            self._given[name] = corpus, before + count
        self._append(blend, seq_len, first_sample=first_sample, key=f"{self._key}/stage {len(self._stages)}")

    def _append(
        self, blend: Sequence[tuple[float, str]], seq_len: int, *, first_sample: int, key: str
    ) -> None:
        # Integer weights with the same ratios, from the decimal text, so that 0.3 becomes 3/10 and not the
        # nearest binary fraction.
        fractions = [Fraction(str(float(weight))) for weight, _ in blend]
        denominator = lcm(*(fraction.denominator for fraction in fractions))
        weights = [0, *accumulate(int(fraction * denominator) for fraction in fractions)]
        stage = _StagePart(first_sample, seq_len, weights, [])
        for position, (_, prefix) in enumerate(blend):
            # A file listed twice in a blend gets two corpora, each with its own order.
            name = prefix, seq_len, sum(before == prefix for _, before in blend[:position])
            if name not in self._given:
                how: dict[str, Any] = {"shuffle": self._shuffle, "share": self._share}
                self._given[name] = self._kind(prefix, seq_len=seq_len, key=f"{key}/{position}", **how), 0
            stage.files.append((name, *self._given[name]))
        self._stages.append(stage)

    def stage_at(self, index: int) -> DataStage:
        number = bisect_right(self._stages, index, key=lambda stage: stage.first_sample) - 1
        return DataStage(number, self._stages[number].seq_len, self._kind is PackedCorpus)

    def sample(self, index: int) -> Int64Array:
        """Sample `index` (from 0): int64 token ids of shape [S1]."""
        corpus, window = self._place(index)
        return corpus.window(window)

    def origin(self, index: int) -> Origin:
        corpus, window = self._place(index)
        return Origin(corpus.prefix, corpus.documents(window))

    def _place(self, index: int) -> tuple[Corpus, int]:
        """Corpus that contains sample `index`, and the number of the sample's window in that corpus."""
        stage = self._stages[self.stage_at(index).number]
        local = (index - stage.first_sample) * self.seq_len // stage.seq_len
        position, window = blend_position(local, stage.weights)
        _, corpus, taken = stage.files[position]
        return corpus, taken + window

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples with the numbers [first, first + count), as int64 token ids [count/F, S1]. A sample covers
        F numbers (see the class). Raises ValueError if the range cuts a sample or spans two stages.
        """
        number, seq_len, _ = self.stage_at(first)
        # A longer sample covers several numbers.
        factor = seq_len // self.seq_len
        inside = (first - self._stages[number].first_sample) % factor
        if inside or count % factor or self.stage_at(first + count - 1).number != number:
            rule = f"samples {first} to {first + count - 1}: must be whole samples of one stage"
            raise ValueError(f"{rule}. Fix: start and end the range at multiples of {factor} within a stage.")
        return torch.from_numpy(np.stack([self.sample(n) for n in range(first, first + count, factor)]))


def fingerprint_of(prefixes: Sequence[str]) -> str:
    """Fingerprint (16 hex digits) of token files: their sizes, document lengths, and first and last bytes.

    The fingerprint depends on the order of the files, but not on their paths. Computing it takes about 0.5 s
    for 50 million documents.
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
    """Hash (16 hex digits) of the token files. Above 64 MiB in total, it covers evenly spaced 16 KiB blocks.

    The hash detects every changed range longer than 1/4096 of the total size. `moe-exp data verify` detects
    shorter changes, because it reads all data. Hashing takes about 0.1 s for 64 MiB on a local disk.
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


# Assignment of samples to the data sets of a blend


def blend_position(index: int, cumulative_weights: Sequence[int]) -> tuple[int, int]:
    """Returns the dataset of sample `index` in a blend, and how many earlier samples are from that dataset.

    The datasets are the leaves of a binary tree. If n samples reach a node, round(n * p) of them go to its
    left subtree, where p is the left subtree's share of the node's weight. The result therefore does not
    depend on earlier calls. Rounding errs by at most 1/2 sample per level. With K datasets, each dataset's
    number of samples is therefore always within ceil(log2 K) / 2 of the dataset's share. Integer weights make
    the computation exact.
    """
    low, high = 0, len(cumulative_weights) - 1
    while high - low > 1:
        middle = (low + high) // 2
        left = cumulative_weights[middle] - cumulative_weights[low]
        total = cumulative_weights[high] - cumulative_weights[low]
        # round(n * p) in integers; the sample belongs to the left half if it increases that count
        before, after = ((2 * n * left + total) // (2 * total) for n in (index, index + 1))
        if after > before:
            high, index = middle, before
        else:
            low, index = middle, index - before
    return low, index


def blend_counts(count: int, cumulative_weights: Sequence[int]) -> list[int]:
    """Number of samples of each dataset among a blend's first `count` samples, see `blend_position`."""
    if len(cumulative_weights) == 2:
        return [count]
    middle = (len(cumulative_weights) - 1) // 2
    left = cumulative_weights[middle] - cumulative_weights[0]
    total = cumulative_weights[-1] - cumulative_weights[0]
    of_left = (2 * count * left + total) // (2 * total)
    lefts, rights = cumulative_weights[: middle + 1], cumulative_weights[middle:]
    return blend_counts(of_left, lefts) + blend_counts(count - of_left, rights)


# Batches


def split_batch(
    tokens_BS1: torch.Tensor, positions_BS: torch.Tensor | None = None, masked_id: int | None = None
) -> dict[str, torch.Tensor]:
    """Splits token ids [B, S1] into the inputs of Megatron's forward step, each [B, S]: `tokens`, `labels`
    (the next tokens), `position_ids` (int64) and `loss_mask` (float32, 0 or 1).

    Args:
        positions_BS: positions of the tokens in their documents, int64. Default: positions in the sample.
        masked_id: end-of-document token; predictions at its positions do not count in the loss. Default: all
            predictions count.
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


def future_batch(
    tokens_BS1: torch.Tensor, batch: Mapping[str, torch.Tensor], depth: int
) -> dict[str, torch.Tensor]:
    """Inputs and labels of K = `depth` layers for multi-token prediction (arXiv:2412.19437, section 2.2).

    Args:
        batch: result of `split_batch` for `tokens_BS1`.

    Returns:
        `future_tokens`, int64 [B, S, K+1]: for each position, the next K+1 tokens; 0 beyond the end of the
        sample. Layer k reads the token k positions ahead and predicts the token k+1 positions ahead.
        `future_mask`, float32 [B, S, K]: 1 or 0 for each position i and layer k. It is 1 if the predicted
        token exists, `loss_mask` counts this token, and the tokens at i and i+k belong to the same document
        (by `position_ids`).
    """
    num_tokens = batch["tokens"].size(1)
    ahead = torch.nn.functional.pad(tokens_BS1[:, 1:], (0, depth)).to(batch["tokens"].device)
    masks = torch.zeros(*batch["tokens"].shape, depth, device=ahead.device)
    places = batch["position_ids"]
    for k in range(1, min(depth, num_tokens - 1) + 1):
        is_near = places[:, k:] == places[:, :-k] + k  # false if a document starts in between
        masks[:, : num_tokens - k, k - 1] = batch["loss_mask"][:, k:] * is_near
    return {"future_tokens": ahead.unfold(1, depth + 1, 1).contiguous(), "future_mask": masks}


def filler_mask(tokens_BS1: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Mask of padding inputs, bool [B, S] (DOCUMENT_PACKING=best_fit). If a sample ends in end-of-document
    tokens, the first of these tokens ends the sample's last document, and the others are padding.
    """
    at_end_BS1 = (tokens_BS1 == eod_id).flip(1).cumprod(dim=1).flip(1).bool()
    return torch.nn.functional.pad(at_end_BS1[:, :-2], (1, 0))


def context_part(batch: Mapping[str, torch.Tensor], ranges: tuple[Range, ...]) -> dict[str, torch.Tensor]:
    """Selects a context-parallel rank's `ranges` from a batch's tensors, [B, S] -> [B, S/C] with C ranks."""
    if len(ranges) == 1:
        return dict(batch)
    return {
        name: torch.cat([values[:, first:end] for first, end in ranges], dim=1)
        for name, values in batch.items()
    }


# Skipped samples: after a rollback, a run continues without the samples around the loss spike.
#
# Schedule, batch ramp-up and checkpoints count consumed samples; the stream has its own numbers. Consumed
# sample n is the n-th sample of the stream that is not skipped, so all others keep their order and none is
# lost or repeated. Ranges are [first, end) in numbers of the stream.


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Sorted, non-empty ranges that cover the same numbers as `ranges` but do not overlap or touch."""
    found: list[Range] = []
    for first, end in sorted((int(first), int(end)) for first, end in ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif first < end:
            found.append((first, end))
    return tuple(found)


def stream_number(consumed: int, skipped: Sequence[Range]) -> int:
    """Converts the number of a consumed sample (from 0) to the sample's index in the stream, which also
    contains the skipped samples. `skipped`: result of `merged`.
    """
    for first, end in skipped:
        if consumed < first:
            break
        consumed += end - first
    return consumed


def stream_ranges(first: int, end: int, skipped: Sequence[Range]) -> tuple[Range, ...]:
    """Stream indices of the consumed samples [first, end), as ranges. `skipped`: result of `merged`."""
    numbers = (stream_number(consumed, skipped) for consumed in range(first, end))
    return merged((number, number + 1) for number in numbers)


def skipped_from(
    saved: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], consumed: int
) -> tuple[Range, ...]:
    """Ranges to skip after a resume: the checkpoint's ranges (`saved`) and the run's requested ranges
    (`wanted`). `wanted` counts only from the checkpoint's position on; before it, only `saved` was skipped.
    """
    past = merged(saved)
    # Directly after the last trained sample: ranges that start there are still ahead.
    place = stream_number(consumed - 1, past) + 1 if consumed else 0
    return merged([*past, *((max(int(first), place), int(end)) for first, end in wanted if end > place)])


class SkippingSamples:
    """The samples in `samples` without the `skipped` ranges, numbered in the order of consumption.

    `length`: number of samples of a finite stream (Megatron's order is finite); None for an endless stream. A
    finite stream repeats its first samples at the end to make up for the skipped ones.
    """

    def __init__(self, samples: Samples, skipped: Iterable[Sequence[int]], length: int | None = None):
        self.skipped = merged(skipped)
        # Without skips, a finite stream itself raises an error at its end.
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
