"""Megatron's .bin/.idx files as numpy arrays, without torch; and the parts that SPLIT makes of them.

The layout is in tokens.py. A document may consist of several sequences, as other programs write them; ours
have one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_exp.data.tokens.ranged import RemoteTokens, open_remote, remote_manifest
from moe_exp.data.tokens.tokenizer import same_tokenizer
from moe_exp.data.tokens.tokens import bin_idx_problem, read_index
from moe_exp.host.files import is_url, read_json

Int64Array = npt.NDArray[np.int64]
Share = tuple[float, float]

_ENDS_LOOKED_AT = 2000
_MOST_PARTS = 3  # training, validation, test


class TokenFiles:
    """`prefix`.bin and `prefix`.idx.

    Args:
        prefix: path without suffix.

    Raises:
        ValueError: a file is missing or damaged, or the two do not fit together.
    """

    def __init__(self, prefix: str | Path):
        if wrong := bin_idx_problem(prefix):
            raise ValueError(f"{wrong}. Fix: correct the path, or prepare the data again.")
        self.prefix = str(prefix)
        self.dtype, self._lengths, _, self._documents = read_index(prefix)
        self.num_sequences, self.num_documents = len(self._lengths), len(self._documents) - 1

    @cached_property
    def sequence_bounds(self) -> Int64Array:
        """First token of each sequence, and the end of the last one: [sequences + 1]."""
        bounds = np.zeros(self.num_sequences + 1, dtype=np.int64)
        np.cumsum(self._lengths, dtype=np.int64, out=bounds[1:])
        return bounds

    @cached_property
    def document_bounds(self) -> Int64Array:
        """First token of each document, and the end of the last one: [documents + 1]."""
        return self.sequence_bounds[self._documents]

    def read(self, begin: int, end: int) -> npt.NDArray[np.integer]:
        """Tokens `begin` to `end - 1`. Not mapped: what is read once would stay in memory."""
        if self._remote is not None:
            return self._remote[begin:end]
        return np.fromfile(
            f"{self.prefix}.bin", dtype=self.dtype, count=end - begin, offset=begin * self.dtype.itemsize
        )

    @cached_property
    def _remote(self) -> RemoteTokens | None:
        """The tokens if they are at a store."""
        return open_remote(self.prefix, self.dtype)

    @cached_property
    def end_of_document(self) -> tuple[int | None, str]:
        """The id of the end-of-document token, and how it is known."""
        if (from_manifest := self.tokenizer_fact("eod_id")) is not None:
            return from_manifest, "the manifest"
        if not len(self._last_tokens):
            return None, "no document has tokens"
        ids, counts = np.unique(self._last_tokens, return_counts=True)
        best = int(counts.argmax())
        if 2 * counts[best] <= len(self._last_tokens):
            return None, "no token ends most documents"
        return int(ids[best]), "the last token of most documents"

    def share_ending_with(self, token: int) -> float:
        """Share of the documents that end with `token`, 0 to 1, by up to 4,000 of them."""
        return float((self._last_tokens == token).mean()) if len(self._last_tokens) else 0.0

    @cached_property
    def _last_tokens(self) -> npt.NDArray[np.integer]:
        """Last tokens of documents evenly over the file, without empty ones."""
        bounds = self.document_bounds
        ends = bounds[1:][np.diff(bounds) > 0] - 1
        ends = ends[:: max(1, len(ends) // _ENDS_LOOKED_AT)]
        if self._remote is not None:
            return self._remote.each(ends.tolist())
        return np.array([self.read(end, end + 1)[0] for end in ends.tolist()], dtype=self.dtype)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, see `manifest_of`."""
        return manifest_of(self.prefix)

    def tokenizer_fact(self, name: str) -> int | None:
        """A fact of the manifest, see `tokenizer_fact`."""
        return tokenizer_fact(self.manifest, name)


def tokenizer_fact(manifest: dict[str, Any], name: str) -> int | None:
    """`vocab_size`, `eod_id` or `bos_id` of the tokenizer of token files; None if their manifest lacks it."""
    for place in (tokenizer_facts(manifest), manifest):
        if isinstance(value := place.get(name), int):
            return value
    return None


def tokenizer_facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """`TextTokenizer.recorded` as the manifest of token files, tokenized or merged, has it; else empty."""
    settings = manifest.get("settings")
    for place in (manifest, settings):
        if isinstance(place, dict) and isinstance(facts := place.get("tokenizer"), dict):
            return facts
    return {}


def other_tokenizer(prefixes: Iterable[str]) -> str:
    """Says that token files were made with different tokenizer files, or documents begin or end with
    different tokens; empty if not, or if that is not recorded.
    """
    known: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        facts = tokenizer_facts(manifest_of(prefix))
        if not isinstance(facts.get("hash"), str):
            continue
        first, expected = next(iter(known.items()), (prefix, facts))
        if known and not any(same_tokenizer(facts, one) for one in known.values()):
            rule = f"{first} and {prefix} were tokenized with different tokenizer.json files"
            return f"{rule}: unless both give the same ids, the model learns two meanings of each"
        if any(facts.get(name) != expected.get(name) for name in ("eod_id", "bos_id")):
            return f"the documents of {first} and {prefix} begin or end with different tokens"
        known[prefix] = facts
    return ""


def manifest_of(prefix: str) -> dict[str, Any]:
    """The manifest beside the token files or in their folder; empty if there is none.

    Raises:
        ValueError: the file is damaged.
    """
    if is_url(prefix):
        return remote_manifest(prefix)
    for path in (Path(f"{prefix}.manifest.json"), Path(prefix).parent / "manifest.json"):
        if path.is_file():
            content = read_json(path, fix="restore it, or remove it")
            return content if isinstance(content, dict) else {}
    return {}


def parse_split(text: str) -> list[Share | None]:
    """SPLIT as parts of the documents (begin and end, of 0 to 1) for training, validation and test, or None.

    Sums in the order in which Megatron has them, so that a document at a bound falls to the same side.

    Raises:
        ValueError: `text` is not one to three numbers, or the first is 0.
    """
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        weights = []
    are_finite = all(0 <= weight < float("inf") for weight in weights)
    if not 0 < len(weights) <= _MOST_PARTS or weights[0] == 0 or not are_finite:
        rule = "must be up to three numbers for training, validation and test, the first over 0"
        raise ValueError(f"SPLIT={text}: {rule}. Fix: set for instance SPLIT=99,1.")
    total = sum(weights)
    bounds = [0.0]
    for weight in weights:
        bounds.append(bounds[-1] + weight / total)
    parts = [(begin, end) if end > begin else None for begin, end in pairwise(bounds)]
    return parts + [None] * (_MOST_PARTS - len(parts))


def share_range(count: int, share: Share) -> tuple[int, int]:
    """The first of `count` documents in a share, and the first after it: rounded as Megatron does."""
    begin, end = share
    return round(begin * count), round(end * count)


def part_tokens(files: TokenFiles, share: Share, *, by_sequence: bool = False) -> int:
    """Tokens of the documents in a share; `by_sequence` counts sequences as Megatron's GPTDataset does."""
    bounds = files.sequence_bounds if by_sequence else files.document_bounds
    begin, end = share_range(len(bounds) - 1, share)
    return int(bounds[end] - bounds[begin])
