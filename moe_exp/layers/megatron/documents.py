"""Document boundaries in a micro-batch, for attention and positions. This module does not import megatron.

Megatron passes a `Documents` to every layer as `packed_seq_params`, in place of PackedSeqParams, which
describes one long sequence. Tokens keep their shape [S, B]. Capacity and losses are therefore computed per
micro-batch or per sequence, not per document.
C: context-parallel size; H: query heads; G: key/value heads; d: channels per head.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

Lengths = tuple[tuple[int, ...], ...]


def document_lengths(tokens_BS: Tensor, eod_id: int) -> Lengths:
    """Token counts of the documents in each sample, in order. The end-of-document token is included.

    Args:
        tokens_BS: token ids [B, S], on the CPU.
        eod_id: end-of-document token.

    Returns:
        For each sample, lengths that add up to S. A document that crosses a sample boundary is cut there.
    """
    num_tokens = tokens_BS.size(1)
    found = []
    for row in (tokens_BS == eod_id).numpy():
        ends = [*(row[:-1].nonzero()[0] + 1).tolist(), num_tokens]
        found.append(tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)))
    return tuple(found)


def document_positions(lengths: Lengths) -> Tensor:
    """Position of each token in its document, from 0, int64 [B, S]. `lengths`: see `document_lengths`."""
    counts = torch.tensor([length for one in lengths for length in one])
    begins = torch.tensor([begin for one in lengths for begin in accumulate(one[:-1], initial=0)])
    places_BS = torch.arange(sum(lengths[0])).repeat(len(lengths), 1)
    return places_BS - begins.repeat_interleave(counts).view_as(places_BS)


class Segment(NamedTuple):
    """Consecutive attention queries of one document on a rank."""

    sample: int
    document: int  # index in the sample
    num_queries: int
    num_keys: int  # keys of the document that the last query sees


@dataclass(frozen=True, eq=False)
class Documents:
    """Boundaries of the documents in each sample of a micro-batch."""

    lengths: Lengths  # from `document_lengths`
    positions_BS: Tensor  # positions of this rank's tokens in their documents, int64 [B, S/C]
    ranges: tuple[tuple[int, int], ...] = ()  # parts [first, end) of a sample on this rank; empty: all

    # Attributes that Megatron reads from PackedSeqParams: tokens are [S, B], in the default process group.
    qkv_format: ClassVar[str] = "sbhd"
    cp_group: ClassVar[Any] = None
    local_cp_size: ClassVar[Any] = None

    @property
    def are_whole_samples(self) -> bool:
        """Whether every sample is a single document."""
        return all(len(lengths) == 1 for lengths in self.lengths)

    @cached_property
    def ids(self) -> Tensor:
        """Index of each token's document, int64 [B, S], on the CPU. Not usable if CP splits samples."""
        rows = [torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in self.lengths]
        return torch.stack(rows)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's segments, sample by sample; the segments cover every query once, in order."""
        found = []
        for sample, lengths in enumerate(self.lengths):
            bounds = list(pairwise(accumulate(lengths, initial=0)))
            for first, end in self.ranges or ((0, sum(lengths)),):
                for document, (begin, stop) in enumerate(bounds):
                    left, right = max(begin, first), min(stop, end)
                    if left < right:
                        found.append(Segment(sample, document, right - left, right - begin))
        return tuple(found)

    def queries_of(self, x: Tensor) -> list[Tensor]:
        """Splits queries [S/C, B, H, d] into segments of [num_queries, H, d]."""
        # The segments of a sample cover this rank's part of the sample, so the split is complete.
        found: list[Tensor] = []
        for sample, row in enumerate(x.unbind(1)):
            found += row.split([one.num_queries for one in self.segments if one.sample == sample])
        return found

    def keys_of(self, x: Tensor) -> list[Tensor]:
        """Selects each segment's keys [num_keys, G, d] from whole samples [S, B, G, d]."""
        # The backward pass of split writes every gradient once, unlike the backward pass of separate slices.
        documents = [row.split(lengths) for row, lengths in zip(x.unbind(1), self.lengths, strict=True)]
        return [documents[one.sample][one.document][: one.num_keys] for one in self.segments]

    def joined(self, parts: list[Tensor], batch_size: int) -> Tensor:
        """Concatenates the segments to [S/C, B, H, d]; the inverse of `queries_of`."""
        return torch.cat(parts).unflatten(0, (batch_size, -1)).transpose(0, 1)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Cumulative counts of queries and of keys over the segments, from 0, each int32 [segments + 1]."""
        counts = [[one.num_queries for one in self.segments], [one.num_keys for one in self.segments]]
        sums = torch.tensor([list(accumulate(count, initial=0)) for count in counts], dtype=torch.int32)
        queries, keys = sums.to(self.positions_BS.device, non_blocking=True)
        return queries, keys


class RestartingPositions(nn.Module):
    """Wraps Megatron's rotary embedding (also YaRN's) so that positions restart at every document."""

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary
        self.documents: Documents | None = None  # set during a call for which Megatron does not pass them

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, inputs: Any, config: Any, documents: Documents | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """The value that Megatron passes on to `forward`: a number of positions, or the documents."""
        documents = documents or self.documents
        return documents or self.rotary.get_rotary_seq_len(context, transformer, inputs, config, **options)

    def forward(self, positions: Any, *args: Any, **options: Any) -> Any:
        """Angles: [S, B, 1, d] for `Documents`, else [positions, 1, 1, d]. With YaRN: (angles, factor)."""
        if not isinstance(positions, Documents):
            return self.rotary(positions, *args, **options)
        found = self.rotary.get_emb(max(map(max, positions.lengths)))
        angles, *factor = found if isinstance(found, tuple) else (found,)
        angles = angles[:, 0][positions.positions_BS.t()]
        return (angles, *factor) if factor else angles
