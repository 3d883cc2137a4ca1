"""Parts (parts.py), joined in order into one .bin and .idx.

Joining continues while later parts are made, and a part's tokens are removed when they are in the joined
file, so that the disk holds them once. What a crash leaves is verified by the parts' hashes before it is
used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moe_exp.data.stage import MAKE_AGAIN
from moe_exp.data.tokens.parts import Part, PartCounts, PartSettings
from moe_exp.data.tokens.tokens import write_index
from moe_exp.host.files import read_json, write_json

JOINED = "joined.json"  # how many parts processes of one machine have joined
_COPY_BYTES = 2**22


class JoinedParts:
    """The file that parts in a folder are appended to, in order, with what an earlier call has appended."""

    def __init__(self, folder: Path, name: str, settings: PartSettings):
        self.folder, self.settings = folder, settings
        self.bin_path, self.idx_path = folder / f"{name}.bin", folder / f"{name}.idx"
        self.num_parts = 0
        self.counts = PartCounts()
        self._num_bytes = 0

    def take_back(self, published: Path) -> None:
        """Takes the .bin, which was complete, back from its place, if a killed call had moved it there."""
        if not self.bin_path.exists() and published.exists():
            published.replace(self.bin_path)

    def resume(self, parts: Sequence[Part], published: Path) -> None:
        """Takes over what is there and sound; of `parts`, all of the run, others are made again."""
        joined_path = self.folder / JOINED
        if joined_path.exists():
            self.take_back(published)
        self.bin_path.touch()
        num_joined = read_json(joined_path, fix=MAKE_AGAIN)["num_parts"] if joined_path.exists() else 0
        with self.bin_path.open("rb+") as file:
            for part in parts[:num_joined]:
                counts = self.read_counts(part)
                if _hash_of(file, counts.num_tokens * self.settings.dtype.itemsize) != counts.token_hash:
                    break
                self.add(counts)
            file.truncate(self._num_bytes)
        for part in parts[self.num_parts :]:
            if not (self.folder / f"{part.stem}.bin").exists():
                (self.folder / f"{part.stem}.json").unlink(missing_ok=True)

    def append(self, part: Part) -> None:
        """Appends the next part and removes its own .bin.

        Raises:
            ValueError: the part is not what was written.
        """
        path, counts = self.folder / f"{part.stem}.bin", self.read_counts(part)
        digest = xxhash.xxh3_128()
        with path.open("rb") as source, self.bin_path.open("rb+") as file:
            file.seek(self._num_bytes)
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != counts.token_hash:
            (self.folder / f"{part.stem}.json").unlink()
            fix = "check the disk, and call it again: the part is made again"
            raise ValueError(f"{path}: is not what was written. Fix: {fix}.")
        self.add(counts)
        write_json(self.folder / JOINED, {"num_parts": self.num_parts})
        path.unlink()

    def write_index(self, parts: Sequence[Part]) -> None:
        """Writes the .idx after all parts are in.

        Raises:
            ValueError: counts do not agree.
        """
        paths = [self.folder / f"{part.stem}.lengths" for part in parts]
        sizes = [path.stat().st_size // 4 for path in paths]
        lengths = np.empty(sum(sizes), np.int32)  # of billions: not in parts and together
        for path, size, end in zip(paths, sizes, np.cumsum(sizes), strict=True):
            lengths[end - size : end] = np.fromfile(path, np.int32)
        counts, tally = self.counts, self.counts.tally
        found = {
            "documents": (len(lengths), tally.num_documents),
            "tokens": (int(lengths.sum(dtype=np.int64)), counts.num_tokens),
            "bytes": (self.bin_path.stat().st_size, counts.num_tokens * self.settings.dtype.itemsize),
        }
        for what, (number, expected) in found.items():
            if number != expected:
                fix = "check the disk, and give --start-over"
                raise ValueError(f"{self.bin_path}: {number} {what} instead of {expected}. Fix: {fix}.")
        write_index(self.idx_path, lengths, self.settings.dtype)

    def read_counts(self, part: Part) -> PartCounts:
        """Counts of a part that is complete."""
        return PartCounts.from_json(read_json(self.folder / f"{part.stem}.json", fix=MAKE_AGAIN))

    def add(self, counts: PartCounts) -> None:
        """Adds the counts of the next part, which is joined."""
        self.counts += counts
        self.num_parts += 1
        self._num_bytes += counts.num_tokens * self.settings.dtype.itemsize


def _hash_of(file: Any, num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    while num_bytes and (chunk := file.read(min(_COPY_BYTES, num_bytes))):
        digest.update(chunk)
        num_bytes -= len(chunk)
    return digest.hexdigest()
