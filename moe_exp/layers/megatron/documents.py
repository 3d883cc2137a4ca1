"""The documents of a micro-batch, for the layers that keep them apart. No megatron import here.

Megatron hands a `Documents` to every layer as `packed_seq_params`. Its own kind of these describes one long
sequence of documents; here tokens stay [S, B], so that capacity and balancing losses keep their scopes.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

Lengths = tuple[tuple[int, ...], ...]


def document_lengths(tokens_BS: Tensor, eod_id: int) -> Lengths:
    """Tokens of each document in each sample, in order; the end-of-document token belongs to the one it ends.

    Args:
        tokens_BS: token ids of shape [B, S], on the CPU.
        eod_id: the token that ends a document.

    Returns:
        For each sample lengths that add up to S. A document that a sample cuts counts with the part in it.
    """
    num_tokens = tokens_BS.size(1)
    found = []
    for row in (tokens_BS == eod_id).numpy():
        ends = [*(row[:-1].nonzero()[0] + 1).tolist(), num_tokens]
        found.append(tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)))
    return tuple(found)


def document_positions(lengths: Lengths) -> Tensor:
    """Position of each token in its document, from 0 on: int64 [B, S], by `document_lengths`."""
    counts = torch.tensor([length for one in lengths for length in one])
    begins = torch.tensor([begin for one in lengths for begin in accumulate(one[:-1], initial=0)])
    places_BS = torch.arange(sum(lengths[0])).repeat(len(lengths), 1)
    return places_BS - begins.repeat_interleave(counts).view_as(places_BS)


class Segment(NamedTuple):
    """Queries of one document that follow one another on a rank."""

    sample: int
    document: int  # of the sample
    num_queries: int
    num_keys: int  # of the document, that the last of the queries sees


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of each sample of a micro-batch begin and end."""

    lengths: Lengths  # tokens of each document, in order, for each of B samples; they add up to S
    positions_BS: Tensor  # of this rank's tokens in their documents, int64 [B, S/C]
    ranges: tuple[tuple[int, int], ...] = ()  # parts [first, end) of a sample on this rank; empty: all of it

    # What Megatron asks of its own PackedSeqParams: tokens are [S, B], and there is no group but the usual.
    qkv_format: ClassVar[str] = "sbhd"
    cp_group: ClassVar[Any] = None
    local_cp_size: ClassVar[Any] = None

    @property
    def are_whole_samples(self) -> bool:
        """Whether every sample is one document, so that there is nothing to keep apart."""
        return all(len(lengths) == 1 for lengths in self.lengths)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's queries, sample by sample, in its order; every query is in one segment."""
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
        """[num_queries, H, d] of each segment, from [S/C, B, H, d]."""
        found: list[Tensor] = []
        for sample, row in enumerate(x.unbind(1)):
            found += row.split([one.num_queries for one in self.segments if one.sample == sample])
        return found

    def keys_of(self, x: Tensor) -> list[Tensor]:
        """[num_keys, G, d] of each segment, from those of whole samples, [S, B, G, d].

        By split, whose backward pass writes every gradient once, unlike that of one slice for each.
        """
        documents = [row.split(lengths) for row, lengths in zip(x.unbind(1), self.lengths, strict=True)]
        return [documents[one.sample][one.document][: one.num_keys] for one in self.segments]

    def joined(self, parts: list[Tensor], batch_size: int) -> Tensor:
        """[S/C, B, H, d] from the segments' parts; the opposite of `queries_of`."""
        return torch.cat(parts).unflatten(0, (batch_size, -1)).transpose(0, 1)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Running sums of the segments' numbers of queries and of keys, from 0: int32 [segments + 1]."""
        counts = [[one.num_queries for one in self.segments], [one.num_keys for one in self.segments]]
        sums = torch.tensor([list(accumulate(count, initial=0)) for count in counts], dtype=torch.int32)
        queries, keys = sums.to(self.positions_BS.device, non_blocking=True)
        return queries, keys


class RestartingPositions(nn.Module):
    """Megatron's rotary embedding (`rotary`, also YaRN's), whose positions begin at 0 in every document of a
    micro-batch with `Documents`.
    """

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary
        self.documents: Documents | None = None  # of this call, from where Megatron does not hand them on

    def get_rotary_seq_len(
        self,
        context: Any,
        transformer: Any,
        inputs: Any,
        config: Any,
        documents: Documents | None = None,
        **options: Any,
    ) -> Any:
        """The argument that Megatron passes to `forward` next: a number of positions, or the documents."""
        documents = documents or self.documents
        return documents or self.rotary.get_rotary_seq_len(context, transformer, inputs, config, **options)

    def forward(self, positions: Any, *args: Any, **options: Any) -> Any:
        """Angles [S, B, 1, d] of `Documents`, or [positions, 1, 1, d]; with YaRN also its factor."""
        if not isinstance(positions, Documents):
            return self.rotary(positions, *args, **options)
        found = self.rotary.get_emb(max(map(max, positions.lengths)))
        angles, *factor = found if isinstance(found, tuple) else (found,)
        angles = angles[:, 0][positions.positions_BS.t()]
        return (angles, *factor) if factor else angles
