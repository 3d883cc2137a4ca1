"""Writes token files document by document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_exp.data.tokens.tokens import EOD_ID, write_token_files


class BinIdxWriter:
    """Collects documents, and writes them when the `with` block ends without an exception."""

    def __init__(self, prefix: str | Path, *, vocab_size: int, eod_id: int = EOD_ID):
        self._prefix, self._ids = prefix, {"vocab_size": vocab_size, "eod_id": eod_id}
        self._documents: list[Any] = []

    def __enter__(self) -> "BinIdxWriter":
        return self

    def add_document(self, ids: Sequence[int]) -> None:
        self._documents.append(ids)

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            write_token_files(self._prefix, self._documents, **self._ids)
