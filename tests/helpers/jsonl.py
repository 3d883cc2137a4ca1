"""Files of JSONL, written with their folder and read back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson


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
