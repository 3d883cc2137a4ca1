"""Token files as sequences that predict every token but a text's first exactly once. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_exp.config import problem, setting_error
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.text_bytes import TokenBytes
from moe_exp.data.tokens.tokens import Share, TokenFiles, share_range

Int64Array = npt.NDArray[np.int64]

_SCANNED_TOKENS = 2**24


@dataclass(frozen=True)
class Cut:
    """How texts are cut into sequences."""

    seq_len: int  # S, predicted tokens per sequence; a text's last sequence may have fewer
    by_document: bool = False  # each document is a text; else all are one, as in validation during training
    whole_only: bool = False  # leave out sequences shorter than S, as validation during training does
    samples: int | None = None  # only the first sequences; None: all
    share: Share = (0.0, 1.0)  # the part of the documents, as SPLIT divides them
    share_of_sequences: bool = False  # DATA_ORDER=megatron divides the sequences of the file instead


class HeldOut:
    """Sequences of one .bin/.idx prefix: i is the tokens `begins[i]` to `ends[i] - 1`, all but the first of
    which are predicted. ValueError if files are missing, damaged or predict no token.
    """

    def __init__(self, prefix: str, cut: Cut):
        self.prefix = prefix_of(prefix)
        self.files = TokenFiles(self.prefix)
        self.begins, self.ends = self._sequences(cut)
        if not len(self.begins):
            least = f"a whole sequence of SEQ_LEN + 1 = {cut.seq_len + 1}" if cut.whole_only else "two"
            where = "each of its documents" if cut.by_document else "it"
            rule = f"{where} has fewer tokens than {least}"
            raise setting_error("data", self.prefix, rule, "give more text")

    def _sequences(self, cut: Cut) -> tuple[Int64Array, Int64Array]:
        divided = self.files.sequence_bounds if cut.share_of_sequences else self.files.document_bounds
        first, last = divided[list(share_range(len(divided) - 1, cut.share))]
        bounds = np.unique(np.clip(self.files.document_bounds, first, last))
        bounds = bounds if cut.by_document else bounds[[0, -1]]
        lengths = np.maximum(np.diff(bounds) - 1, 0)  # predicted tokens of each text
        counts = -(-lengths // cut.seq_len)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(bounds[:-1], counts) + place * cut.seq_len
        ends = np.minimum(begins + cut.seq_len + 1, np.repeat(bounds[1:], counts))
        if cut.whole_only:
            whole = ends - begins == cut.seq_len + 1
            begins, ends = begins[whole], ends[whole]
        return begins[: cut.samples], ends[: cut.samples]

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, first: int, count: int) -> list[Int64Array]:
        """Token ids of the sequences `first` to `first + count - 1`."""
        chosen = slice(first, first + count)
        bounds = zip(self.begins[chosen].tolist(), self.ends[chosen].tolist(), strict=True)
        return [self.files.read(begin, end).astype(np.int64) for begin, end in bounds]

    def count_bytes(
        self, first: int, sequences: Sequence[Int64Array], token_bytes: TokenBytes, masked_id: int | None
    ) -> int:
        """Bytes of the predicted tokens of `sequences`, from `first` on, but those after `masked_id`."""
        bounds, total = self.files.document_bounds, 0
        for begin, ids in zip(self.begins[first:], sequences, strict=False):
            is_first = np.zeros(len(ids) - 1, dtype=bool)
            documents = bounds[np.searchsorted(bounds, begin + 1) : np.searchsorted(bounds, begin + len(ids))]
            is_first[documents - begin - 1] = True
            is_first |= ids[:-1] == (-1 if token_bytes.bos_id is None else token_bytes.bos_id)
            counts = ids[:-1] != (-1 if masked_id is None else masked_id)
            total += int(token_bytes.each(ids[1:], is_first)[counts].sum())
        return total

    def id_problem(self, vocab_size: int) -> str | None:
        """Line on the first id that the model does not have, or None."""
        last = int(self.ends[-1])
        for begin in range(int(self.begins[0]), last, _SCANNED_TOKENS):
            ids = self.files.read(begin, min(begin + _SCANNED_TOKENS, last))
            for value in (int(ids.min()), int(ids.max())):
                if not 0 <= value < vocab_size:
                    place = begin + int((ids == value).argmax())
                    rule = f"has the id {value} at token {place}, the model has 0 to {vocab_size - 1}"
                    return problem("data", self.prefix, rule, "give files of the training's tokenizer")
        return None


def short_names(prefixes: Sequence[str]) -> list[str]:
    """The shortest distinct endings of paths, of up to three parts; else the whole paths."""
    for count in range(1, 4):
        names = ["/".join(Path(prefix).parts[-count:]) for prefix in prefixes]
        if len(set(names)) == len(names):
            return names
    return list(prefixes)
