"""Tokenizes the inputs in parts, and joins the tokens of all parts in one file."""

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe_exp.config import setting_error
from moe_exp.data.documents import Counted, Tally, read_lines, skip_or_raise, text_of
from moe_exp.data.execution import complete_files
from moe_exp.data.kinds import FILES, BadDocument, TextRule, is_stream, total_bytes
from moe_exp.data.shuffle.blocks import Slice
from moe_exp.data.stage import MAKE_AGAIN
from moe_exp.data.tokens.encoders import CheckedGigatoken, Encoded, Encoder, find_differences, own_package
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.data.tokens.tokens import TokenDtype, token_dtype, write_index
from moe_exp.host.files import BlockHash, read_json, write_json

LARGEST_PART_BYTES, SMALLEST_PART_BYTES, NUM_PARTS = 2**26, 2**22, 256
CHECKED_BYTES = 2**26  # size of the token blocks that are hashed separately
BATCH_BYTES = 2**20  # text per batch; the results of the tokenizers package take about 40 MB

JOINED = "joined.json"  # number of joined parts (without tasks)
NOT_WRITTEN = (
    "does not match its recorded hash. Fix: check the disk and repeat the command, which remakes the part."
)
_COPY_BYTES = 2**22
# Sample of a part of the largest size for the comparison with the tokenizer's own package, which takes about
# 0.1 s per 200 KB.
_NUM_SAMPLED, _NUM_ODD, _CLIP_CHARACTERS = 32, 16, 4096
_ODD_CHARACTERS = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u0300-\u036f\u1680\u180e"
    "\u2000-\u200f\u2028-\u202f\u3000\ufeff\U00010000-\U0010ffff]"
)


@dataclass(frozen=True)
class Part(Slice):
    """A slice of the inputs that is tokenized as one unit."""

    index: int  # number among all parts

    @property
    def stem(self) -> str:
        return f"part.{self.index:06d}"


@dataclass
class PartCounts(Counted):
    tally: Tally = field(default_factory=Tally)
    num_tokens: int = 0  # including end-of-document tokens
    num_eods: int = 0  # end-of-document tokens, including those in texts
    num_checked: int = 0  # documents compared with the tokenizer's own package
    num_rerouted: int = 0  # documents not encoded with gigatoken, see CheckedGigatoken
    token_hash: str = ""  # XXH3-128 of the tokens
    block_hashes: list[str] = field(default_factory=list)  # XXH3-128 of each block of CHECKED_BYTES

    def __iadd__(self, other: "PartCounts") -> "PartCounts":
        self.tally += other.tally
        for name in ("num_tokens", "num_eods", "num_checked", "num_rerouted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def default_part_bytes(paths: Sequence[Path]) -> int:
    """Default part size. Depends only on the inputs, because a resumed run needs the same parts."""
    return min(LARGEST_PART_BYTES, max(SMALLEST_PART_BYTES, total_bytes(paths) // NUM_PARTS))


def plan_parts(paths: Sequence[Path], part_bytes: int) -> list[Part]:
    """Splits plain JSONL files into parts of `part_bytes`; any other file is one part. Skips empty files."""
    parts: list[Part] = []
    for path in paths:
        size = path.stat().st_size
        # A stream can only be read from its start.
        whole = is_stream(path)
        for start in range(0, size, max(1, size) if whole else part_bytes):
            parts.append(Part(path, start, None if whole else min(start + part_bytes, size), len(parts)))
    return parts


@dataclass(frozen=True)
class PartSettings:
    """Settings that determine the tokens. `append_eod` without an EOD token raises ValueError."""

    tokenizer: TextTokenizer
    json_key: str = "text"  # field with the text
    append_eod: bool = False
    skip_bad: bool = False  # skip and count invalid lines instead of stopping
    rule: TextRule = FILES

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eod_id is None:
            rule = f"the tokenizer {self.tokenizer.name} defines no end-of-document token"
            raise setting_error("append_eod", True, rule, "set one with --eod-token")

    def facts(self) -> dict[str, Any]:
        """Manifest entries for everything that determines the tokens."""
        given = {"json_key": self.json_key, "append_eod": self.append_eod, "skip_bad": self.skip_bad}
        return {"tokenizer": self.tokenizer.facts()} | given | self.rule.facts()

    @property
    def dtype(self) -> TokenDtype:
        return token_dtype(self.tokenizer.vocab_size)


class PartEncoder:
    """Tokenizes parts in one process."""

    def __init__(self, settings: PartSettings, backend: str):
        self.settings, tokenizer = settings, settings.tokenizer
        is_gigatoken = backend == "gigatoken"
        self._encoder: Encoder = CheckedGigatoken(tokenizer) if is_gigatoken else own_package(tokenizer)
        self._special_tokens = tokenizer.special_tokens()
        self._is_special = np.zeros(tokenizer.vocab_size, bool)
        # A lookup table, to check a whole batch in one vectorized operation.
        self._is_special[list(self._special_tokens)] = True

    def encode(self, part: Part, folder: Path, advance: Callable[[int], None]) -> None:
        """Writes `part.NNNNNN.bin`, `.lengths` (int32) and finally `.json` to `folder`. `advance` receives
        the number of bytes read. Raises BadDocument for an invalid line, and ValueError for ids outside the
        vocabulary.
        """
        counts, lengths = PartCounts(), [np.empty(0, np.int32)]
        digest, blocks = xxhash.xxh3_128(), BlockHash(CHECKED_BYTES)
        sample = _Sample(part.index, min(1.0, part.num_bytes / LARGEST_PART_BYTES))
        paths = [folder / f"{part.stem}{suffix}" for suffix in (".bin", ".lengths")]
        with part.numbered_errors(), complete_files(paths) as (bin_path, lengths_path):
            with bin_path.open("wb") as file:
                for batch in self._batches(part, counts.tally, sample, advance):
                    tokens, batch_lengths = self._tokens(part, batch, counts)
                    lengths.append(batch_lengths)
                    digest.update(tokens.data)
                    blocks.update(tokens.view(np.uint8).data)
                    file.write(tokens.data)
            self._check(part, sample, counts)
            np.concatenate(lengths).tofile(lengths_path)
        # Last: the counts mark the part as complete.
        counts.token_hash = digest.hexdigest()
        counts.block_hashes = [block.hex() for block in blocks.digests()]
        write_json(folder / f"{part.stem}.json", counts.to_json())

    def _batches(
        self, part: Part, tally: Tally, sample: "_Sample", advance: Callable[[int], None]
    ) -> Iterator[list[tuple[int, str]]]:
        """Yields batches of (line number, text): up to BATCH_BYTES of text, or a single longer document."""
        batch: list[tuple[int, str]] = []
        batch_bytes = line_bytes = 0
        how: dict[str, Any] = {"text_field": self.settings.json_key, "rule": self.settings.rule}
        for number, line in read_lines(part.path, *part.bounds(), **how):
            line_bytes += len(line) + 1
            try:
                text = text_of(line, self.settings.json_key)
            except ValueError as error:
                skip_or_raise(part.path, number, str(error), tally, skip_bad=self.settings.skip_bad)
                continue
            encoded = text.encode()
            if batch and batch_bytes + len(encoded) > BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
                if part.end is not None:
                    advance(line_bytes)
                    line_bytes = 0
            tally.add(encoded)
            sample.add(number, text)
            batch.append((number, text))
            batch_bytes += len(encoded)
        if batch:
            yield batch
        advance(line_bytes if part.end is not None else part.num_bytes)

    def _tokens(
        self, part: Part, batch: Sequence[tuple[int, str]], counts: PartCounts
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int32]]:
        """Concatenated tokens of a batch, and the length of each document."""
        tokenizer = self.settings.tokenizer
        ids, lengths = self._encoder([text for _, text in batch])
        if isinstance(self._encoder, CheckedGigatoken):
            counts.num_rerouted += self._encoder.num_rerouted
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            rule = f"returned ids outside its vocabulary 0..{tokenizer.vocab_size - 1}"
            raise ValueError(f"{tokenizer.name}: {rule}. Fix: correct the tokenizer's files.")
        ids, lengths = self._without_special(part, batch, ids, lengths, counts.tally)
        if tokenizer.eod_id is not None and tokenizer.allow_special:
            counts.num_eods += int(np.count_nonzero(ids == tokenizer.eod_id))
        ids = ids.astype(self.settings.dtype, copy=False)
        if tokenizer.bos_id is not None:
            # np.insert refers to positions in the old array: the start of each document.
            ids = np.insert(ids, np.cumsum(lengths) - lengths, tokenizer.bos_id)
            lengths = lengths + 1
        if self.settings.append_eod and tokenizer.eod_id is not None:
            ids = np.insert(ids, np.cumsum(lengths), tokenizer.eod_id)
            lengths = lengths + 1
            counts.num_eods += len(lengths)
        counts.num_tokens += len(ids)
        return ids, lengths.astype(np.int32)

    def _without_special(
        self, part: Part, batch: Sequence[tuple[int, str]], ids: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.int64], tally: Tally,
    ) -> Encoded:  # fmt: skip
        """Removes documents whose text produced special tokens."""
        found = np.flatnonzero(self._is_special[ids])
        if not len(found):  # nearly all batches
            return ids, lengths
        ends = np.cumsum(lengths)
        # The error reports the first special token of each document.
        documents, firsts = np.unique(np.searchsorted(ends, found, side="right"), return_index=True)
        for document, token in zip(documents, ids[found[firsts]], strict=True):
            number, text = batch[document]
            reason = f"the tokenizer reads {self._special_tokens[int(token)]} in the text as a special token"
            if not self.settings.skip_bad:
                raise BadDocument(part.path, number, reason)
            tally.add(text.encode(), -1)
            tally.skipped[reason] += 1
        is_kept = np.ones(len(lengths), bool)
        is_kept[documents] = False
        return ids[np.repeat(is_kept, lengths)], lengths[is_kept]

    def _check(self, part: Part, sample: "_Sample", counts: PartCounts) -> None:
        if not isinstance(self._encoder, CheckedGigatoken):
            return
        clips = [*sample.chosen, *sample.odd]
        counts.num_checked, texts = len(clips), [text for _, text in clips]
        if clips and (wrong := find_differences(self._encoder, self._encoder.own, texts)):
            where = f"{part.path}:{part.line_number(clips[wrong[0]][0])}"
            rule = "gigatoken encodes this document differently than the tokenizer's own package"
            raise ValueError(f"{where}: {rule}. Fix: add --backend tokenizers --start-over.")


class _Sample:
    """Excerpts to compare encoders: first document, random documents, documents with unusual characters."""

    def __init__(self, seed: int, scale: float):
        self._random = random.Random(seed)
        self._num_sampled, self._num_odd = max(2, int(scale * _NUM_SAMPLED)), max(2, int(scale * _NUM_ODD))
        self._num_documents = 0
        self.chosen, self.odd = list[tuple[int, str]](), list[tuple[int, str]]()

    def add(self, number: int, text: str) -> None:
        # Reservoir sampling: the number of documents is unknown in advance.
        place = 0 if not self._num_documents else self._random.randrange(self._num_documents + 1)
        self._num_documents += 1
        if len(self.chosen) < self._num_sampled:
            self.chosen.append((number, text[:_CLIP_CHARACTERS]))
        elif 0 < place < self._num_sampled:  # the first document stays
            self.chosen[place] = (number, text[:_CLIP_CHARACTERS])
        if len(self.odd) < self._num_odd:
            found = _ODD_CHARACTERS.search(text) if not text.isascii() or "\0" in text else None
            start = found.start() if found else text.find("<|")  # most special tokens start like this
            if start >= 0:
                start = max(0, start - _CLIP_CHARACTERS // 2)
                self.odd.append((number, text[start : start + _CLIP_CHARACTERS]))


def is_complete(part: Part, folder: Path) -> bool:
    """Whether a part was fully written. True even if its .bin was removed after joining."""
    return (folder / f"{part.stem}.json").is_file()


class JoinedParts:
    """The file to which the parts in a folder are appended in order. `resume` continues an interrupted run.

    Parts are joined while later parts are still being made. A joined part's own .bin is removed, so that the
    tokens are stored only once. After a crash, the joined file is checked against the hashes of the parts.
    """

    def __init__(self, folder: Path, output: Path, parts: Sequence[Part], settings: PartSettings):
        self.folder, self.parts, self.settings = folder, parts, settings
        self.bin_path, self.idx_path = (folder / f"{output.name}{suffix}" for suffix in (".bin", ".idx"))
        self._published = output.with_name(self.bin_path.name)
        self.num_parts = 0
        self.counts = PartCounts()
        self._num_bytes = 0

    def take_back(self) -> None:
        """Moves a published .bin back if an earlier call was killed before it published the manifest."""
        if not self.bin_path.exists() and self._published.exists():
            self._published.replace(self.bin_path)

    def resume(self) -> None:
        """Keeps what an earlier call joined, except the first damaged part and all parts after it."""
        joined_path, num_joined = self.folder / JOINED, 0
        if joined_path.exists():
            self.take_back()
            num_joined = read_json(joined_path, fix=MAKE_AGAIN)["num_parts"]
        self.bin_path.touch()
        with self.bin_path.open("rb+") as file:
            for part in self.parts[:num_joined]:
                # A crash may have lost or damaged the end of the file.
                counts, digest = self.read_counts(part), xxhash.xxh3_128()
                left = counts.num_tokens * self.settings.dtype.itemsize
                while left and (chunk := file.read(min(_COPY_BYTES, left))):
                    digest.update(chunk)
                    left -= len(chunk)
                if counts.token_hash != digest.hexdigest():  # join again from this part
                    break
                self.add(counts)
            file.truncate(self._num_bytes)
        for part in self.parts[self.num_parts :]:
            if not (self.folder / f"{part.stem}.bin").exists():
                (self.folder / f"{part.stem}.json").unlink(missing_ok=True)

    def append_complete(self) -> None:
        """Appends parts until the next part is incomplete. Raises ValueError if a part was damaged."""
        for part in self.parts[self.num_parts :]:
            if not is_complete(part, self.folder):
                break
            self._append(part)

    def _append(self, part: Part) -> None:
        """Appends the next part and removes the part's .bin."""
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
            raise ValueError(f"{path}: {NOT_WRITTEN}")
        self.add(counts)
        write_json(self.folder / JOINED, {"num_parts": self.num_parts})
        path.unlink()

    def write_index(self) -> None:
        """Writes the .idx once all parts are joined. Raises ValueError if the files contradict the counts."""
        paths = [self.folder / f"{part.stem}.lengths" for part in self.parts]
        sizes = [path.stat().st_size // 4 for path in paths]
        # Not concatenated: billions of lengths should not be in memory twice.
        lengths = np.empty(sum(sizes), np.int32)
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
                fix = "check the disk, and add --start-over"
                raise ValueError(f"{self.bin_path}: has {number} {what} instead of {expected}. Fix: {fix}.")
        write_index(self.idx_path, lengths, self.settings.dtype)

    def read_counts(self, part: Part) -> PartCounts:
        return PartCounts.from_json(read_json(self.folder / f"{part.stem}.json", fix=MAKE_AGAIN))

    def add(self, counts: PartCounts) -> None:
        """Adds the counts of a newly joined part."""
        self.counts += counts
        self.num_parts += 1
        self._num_bytes += counts.num_tokens * self.settings.dtype.itemsize
