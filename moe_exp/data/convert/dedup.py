"""Steps that need an earlier pass: exact duplicates, by datatrove's own blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.data.convert.filters import Filter
from moe_exp.host.processes import allow_open_files


def _text(document: Any) -> bytes:
    return document.text.encode()  # newer xxhash takes no str


def _dedup_config() -> Any:
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig

    return ExactDedupConfig(content_getter=_text)


@dataclass
class BlockStep:
    """A step of a pass that runs a block of datatrove's, which is built where it runs."""

    build: Callable[[], Any]
    stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        allow_open_files()
        block = self.build()
        self.stats = block.stats
        block.run(data, rank, world_size)


def sign_documents(folder: str, num_finders: int) -> Any:
    """Hashes every text, at the end of the first pass, for `num_finders` tasks: ExactDedupSignature."""
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupSignature

    return ExactDedupSignature(folder, _dedup_config(), finder_workers=num_finders)


def find_duplicates(signatures_folder: str, duplicates_folder: str) -> Any:
    """The second pass: which documents have a text that stands before them, by ExactFindDedups."""
    from datatrove.pipeline.dedup.exact_dedup import ExactFindDedups

    Path(duplicates_folder).mkdir(parents=True, exist_ok=True)  # there may be no duplicate
    return ExactFindDedups(signatures_folder, duplicates_folder, _dedup_config())


@dataclass
class DuplicateFilter(Filter):
    """Keeps one of each text, with `duplicate_count` in its metadata, by ExactDedupFilter. Its 64-bit hashes
    take two different texts for one with probability n^2 / 2^65: 3e-6 for ten million documents, 0.03 for a
    billion.
    """

    name: str
    duplicates_folder: str

    def block(self) -> Any:
        """ExactDedupFilter."""
        from datatrove.pipeline.dedup.exact_dedup import ExactDedupFilter

        return ExactDedupFilter(self.duplicates_folder, _dedup_config())
