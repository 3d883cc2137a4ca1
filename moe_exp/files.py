"""Files that are whole or not there, and their checksums."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

_CHUNK_BYTES = 1 << 20


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` so that a reader, or the next start after a crash, sees the old file or the new one and never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def file_hash(path: Path) -> str:
    """XXH3-128 of a file, 32 hex digits."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):  # one buffer: fresh memory would take longer than the hash
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()
