"""Files of JSONL, written with their folder and read back; token files, document by document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from moe_exp.data.tokens.tokens import EOD_ID, write_token_files


def write_jsonl(path: Path, documents: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in documents))
    return path


def write_parts(folder: Path, documents: Sequence[dict[str, Any]], number: int) -> list[Path]:
    """Deals the documents to a number of files."""
    return [write_jsonl(folder / f"{part}.jsonl", documents[part::number]) for part in range(number)]


def read_texts(*paths: Path) -> list[str]:
    return [one["text"] for one in read_jsonl(*paths)]


def read_jsonl(*paths: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for path in sorted(paths) for line in path.read_bytes().split(b"\n")[:-1]]


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
