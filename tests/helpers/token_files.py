"""Token files whose tokens are all different, so that a sample shows where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moe_exp.data.tokens.tokens import BinIdxWriter

VOCAB_SIZE = 60000


def write(prefix: str | Path, lengths: Iterable[int], first_id: int = 1) -> str:
    """Documents of the given lengths (EOD included); every token but EOD has an id of its own."""
    with BinIdxWriter(prefix, vocab_size=VOCAB_SIZE) as writer:
        for length in lengths:
            writer.add_document(range(first_id, first_id + length - 1))
            first_id += length - 1
    return str(prefix)
