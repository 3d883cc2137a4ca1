"""Held-out token files, cut into sequences so that every token but the first of a text is predicted once. No
torch in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_exp.config import problem
from moe_exp.data.tokens.files import TokenFiles
from moe_exp.data.tokens.text_bytes import TokenBytes

Int64Array = npt.NDArray[np.int64]

_SCANNED_TOKENS = 2**24


@dataclass(frozen=True)
class Cut:
    """How a text becomes sequences.

    Args:
        seq_len: S, tokens that are predicted per sequence; the last one of a text has fewer.
        by_document: every document is a text of its own, whose first token is not predicted. Otherwise all
            documents of the files are one text, in their order, as in validation during training.
        whole_only: leave out sequences with fewer than S predicted tokens, as validation during training
            does.
        samples: sequences at most, the first ones; None: all.
    """

    seq_len: int
    by_document: bool = False
    whole_only: bool = False
    samples: int | None = None


class HeldOut:
    """The sequences of one prefix. Sequence i is the tokens from `begins[i]` up to `ends[i]`, all but the
    first of which are predicted.

    Args:
        prefix: of .bin/.idx, with a suffix or without.
        cut: into sequences.

    Raises:
        ValueError: files are missing or damaged, or have no token to predict.
    """

    def __init__(self, prefix: str, cut: Cut):
        self.prefix = prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
        self.files = TokenFiles(self.prefix)
        self.begins, self.ends = self._sequences(cut)
        if not len(self.begins):
            least = f"a whole sequence of SEQ_LEN + 1 = {cut.seq_len + 1}" if cut.whole_only else "two"
            where = "each of its documents" if cut.by_document else "it"
            raise ValueError(
                problem("data", self.prefix, f"{where} has fewer tokens than {least}", "give more text")
            )

    def _sequences(self, cut: Cut) -> tuple[Int64Array, Int64Array]:
        bounds = self.files.document_bounds if cut.by_document else self.files.document_bounds[[0, -1]]
        lengths = np.maximum(np.diff(bounds) - 1, 0)  # predicted tokens of each text
        counts = -(-lengths // cut.seq_len)
        # of a sequence in its text
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(bounds[:-1], counts) + place * cut.seq_len
        ends = np.minimum(begins + cut.seq_len + 1, np.repeat(bounds[1:], counts))
        if cut.whole_only:
            whole = ends - begins == cut.seq_len + 1
            begins, ends = begins[whole], ends[whole]
        return begins[: cut.samples], ends[: cut.samples]

    def __len__(self) -> int:
        return len(self.begins)

    @cached_property
    def num_predicted(self) -> int:
        """Tokens."""
        return int((self.ends - self.begins - 1).sum())

    def read(self, first: int, count: int) -> list[Int64Array]:
        """Token ids of the sequences `first` to `first + count - 1`."""
        bounds = zip(
            self.begins[first : first + count].tolist(),
            self.ends[first : first + count].tolist(),
            strict=True,
        )
        return [self.files.read(begin, end).astype(np.int64) for begin, end in bounds]

    def count_bytes(self, first: int, sequences: Sequence[Int64Array], token_bytes: TokenBytes) -> int:
        """Bytes of text that the predicted tokens of the sequences from `first` on stand for."""
        bounds, total = self.files.document_bounds, 0
        for begin, ids in zip(self.begins[first:], sequences, strict=False):
            is_first = np.zeros(len(ids) - 1, dtype=bool)
            documents = bounds[np.searchsorted(bounds, begin + 1) : np.searchsorted(bounds, begin + len(ids))]
            is_first[documents - begin - 1] = True
            total += token_bytes.count(ids[1:], is_first)
        return total

    def id_problem(self, vocab_size: int) -> str | None:
        """The complaint about the first block of tokens with an id that the model does not have. Reads what
        is evaluated.
        """
        for begin, end in self._blocks():
            ids = self.files.read(begin, end)
            for value in (int(ids.min()), int(ids.max())):
                if not 0 <= value < vocab_size:
                    rule = (
                        f"has the id {value} at token {begin + int((ids == value).argmax())}, the model has 0"
                        f" to {vocab_size - 1}"
                    )
                    return problem("data", self.prefix, rule, "give files of the training's tokenizer")
        return None

    def _blocks(self) -> Iterator[tuple[int, int]]:
        last = int(self.ends[-1])
        for begin in range(int(self.begins[0]), last, _SCANNED_TOKENS):
            yield begin, min(begin + _SCANNED_TOKENS, last)


def short_names(prefixes: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart; whole paths where nothing does."""
    for count in range(1, 4):
        names = ["/".join(Path(prefix).parts[-count:]) for prefix in prefixes]
        if len(set(names)) == len(names):
            return names
    return list(prefixes)
