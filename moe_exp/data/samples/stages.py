"""Samples of a run with DATA_STAGES: those of every stage, one after the other.

Samples are counted in SEQ_LEN tokens, as everywhere. In a stage whose samples are F times as long, one stands
for F numbers, and these are always read together.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from moe_exp.data.samples.dataset import Origin, SampleStream, Stage, print_of
from moe_exp.data.tokens.files import Int64Array


class StagedSamples:
    """One stream after the other; the interface is `dataset.Samples`.

    Args:
        streams: (first sample, its stream) of every stage, the first of 0; in order, each begin as far after
            the one before as whole samples reach.
    """

    def __init__(self, streams: Sequence[tuple[int, SampleStream]]):
        self._begins = [first for first, _ in streams]
        self._streams = [stream for _, stream in streams]
        self._seq_len = self._streams[0].seq_len

    def stage_at(self, index: int) -> Stage:
        """The stage that sample number `index` is of."""
        number = bisect.bisect_right(self._begins, index) - 1
        return self._streams[number].stage_at(index)._replace(number=number)

    def sample(self, index: int) -> Int64Array:
        """The sample at number `index`: int64 token ids of shape [S1]."""
        stream, local, _ = self._place(index)
        return stream.sample(local)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """The samples that stand for `first` to `first + count - 1`: int64 token ids of shape [count/F, S1].

        Raises:
            ValueError: these numbers are not those of whole samples of one stage.
        """
        stream, local, factor = self._place(first)
        stage = self.stage_at(first).number
        inside, ends = (first - self._begins[stage]) % factor, self._begins[stage + 1 :]
        if inside or count % factor or (ends and first + count > ends[0]):
            rule = f"samples {first} to {first + count - 1} are not those of whole samples of a stage"
            raise ValueError(f"{rule}. Fix: read {factor} at a time.")
        return stream.batch(local, count // factor)

    def origin(self, index: int) -> Origin:
        """Origin of the sample at number `index`."""
        stream, local, _ = self._place(index)
        return stream.origin(local)

    def fingerprint(self) -> str:
        """Fingerprint of the files of the first stage, see `dataset.fingerprint_of`."""
        return self._streams[0].fingerprint()

    def content(self) -> str:
        """Hash of the tokens of the first stage, see `dataset.content_of`."""
        return self._streams[0].content()

    def stage_prints(self) -> list[str]:
        """Fingerprint and hash of the tokens of every later stage, together."""
        return [print_of(stream.fingerprint(), stream.content()) for stream in self._streams[1:]]

    def _place(self, index: int) -> tuple[SampleStream, int, int]:
        """Stream, number in it, and numbers that a sample stands for."""
        stage, seq_len, _ = self.stage_at(index)
        factor = seq_len // self._seq_len
        return self._streams[stage], (index - self._begins[stage]) // factor, factor
