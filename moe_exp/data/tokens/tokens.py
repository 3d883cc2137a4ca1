"""Megatron's .bin/.idx token files, blends of them, and the shares set by SPLIT. Does not import torch.

Layout of the .idx file (little-endian), as in `megatron.core.datasets.indexed_dataset`: magic, version, dtype
code, number of sequences, number of document indices, then the sequences' sizes in tokens (int32), the
sequences' pointers in bytes (int64) and the document indices (int64). The .bin file has the tokens. We write
one sequence per document, in order. Only `moe-exp data tokenize --merge` reads files with sequences in
another order; the files it writes are in order.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_exp.config.parsers import number_in
from moe_exp.data.tokens.ranged import bin_bytes, open_remote, prefix_of, read_ranges, remote_manifest
from moe_exp.data.tokens.tokenizer import same_tokenizer
from moe_exp.host.files import is_url, read_json, replacing

EOD_ID = 0

_MAGIC = b"MMIDIDX\x00\x00"
# magic, version, dtype code, number of sequences, number of document indices
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_BLEND_RULE = "must be 'PREFIX', 'PREFIX PREFIX ...' or 'WEIGHT PREFIX WEIGHT PREFIX ...'"
_CODES = {name: code for code, name in _DTYPES.items()}
_LENGTHS_PER_WRITE = 2**20
_ENDS_LOOKED_AT = 2000
_MOST_PARTS = 3  # training, validation and test

TokenDtype = np.dtype[np.uint16] | np.dtype[np.int32]
Share = tuple[float, float]
Int64Array = npt.NDArray[np.int64]


# Token files


def write_token_files(
    prefix: str | Path, documents: Iterable[Sequence[int] | npt.NDArray[np.integer]], *, vocab_size: int,
    eod_id: int = EOD_ID,
) -> int:  # fmt: skip
    """Writes `prefix`.bin first and `prefix`.idx last, because no program reads a .bin without its .idx. Each
    document gets `eod_id` at its end; `vocab_size` determines the token dtype. Returns the number of tokens.
    """
    # An array takes 4 bytes per document, a list about 36.
    sizes, dtype = array("i"), token_dtype(vocab_size)
    # An index must never be next to another .bin.
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    with replacing(Path(f"{prefix}.bin")) as file:
        for ids in documents:
            file.write(np.append(ids, eod_id).astype(dtype).tobytes())
            sizes.append(len(ids) + 1)
    write_index(Path(f"{prefix}.idx"), np.array(sizes, dtype=np.int32), dtype)
    return sum(sizes)


def token_dtype(vocab_size: int) -> TokenDtype:
    """Integer dtype of stored tokens, as in Megatron (DType.optimal_dtype)."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def write_index(
    path: Path, sizes: npt.NDArray[np.int32], dtype: np.dtype[Any], document_indices: Int64Array | None = None
) -> None:
    """Writes an .idx file; `sizes`: number of tokens in each sequence.

    `document_indices`: index of each document's first sequence; its last entry is the number of sequences.
    Default: each sequence is a document.
    """
    num_indices = len(sizes) + 1 if document_indices is None else len(document_indices)
    with replacing(path) as file:
        file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype.name], len(sizes), num_indices))
        file.write(np.ascontiguousarray(sizes).data)
        # The rest is written in pieces, because a corpus may have billions of documents.
        for pointers in _pointers_in_order(sizes, dtype):
            file.write(pointers.data)
        for start in range(0, num_indices, _LENGTHS_PER_WRITE):
            end = min(start + _LENGTHS_PER_WRITE, num_indices)
            indices = np.arange(start, end) if document_indices is None else document_indices[start:end]
            file.write(np.ascontiguousarray(indices, dtype=np.int64).data)


def _pointers_in_order(sizes: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the byte offsets of contiguous sequences, chunk by chunk."""
    first_token = 0
    for start in range(0, len(sizes), _LENGTHS_PER_WRITE):
        ends = first_token + np.cumsum(sizes[start : start + _LENGTHS_PER_WRITE], dtype=np.int64)
        yield np.append(first_token, ends[:-1]) * np.int64(dtype.itemsize)
        first_token = int(ends[-1])


class Index(NamedTuple):
    """Contents of a valid .idx file."""

    dtype: np.dtype[Any]  # of the tokens
    sizes: npt.NDArray[np.int32]  # tokens of each sequence
    pointers: npt.NDArray[np.int64]  # first byte of each sequence in the .bin
    documents: npt.NDArray[np.int64]  # first sequence of each document, then the number of sequences


def read_index(prefix: str | Path) -> Index:
    """Memory-maps `prefix`.idx. The file must be valid."""
    path, offset = Path(f"{prefix}.idx"), _HEADER.size
    _, _, code, num_sequences, num_indices = _read_header(path)
    columns = []
    for dtype, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_indices)):
        columns.append(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
        offset += columns[-1].nbytes
    return Index(np.dtype(_DTYPES[code]), *columns)


def order_problem(prefix: str | Path) -> str | None:
    """Error naming the first out-of-order sequence in `prefix`.idx; None if all sequences are in order."""
    dtype, sizes, pointers, _ = read_index(prefix)
    start = 0
    for expected in _pointers_in_order(sizes, dtype):
        differs = pointers[start : start + len(expected)] != expected
        if differs.any():
            first = int(differs.argmax())
            begin, place = pointers[start + first], f"sequence {start + first} of {prefix}.idx"
            return f"{place} begins at byte {begin} of the .bin, not at byte {expected[first]}"
        start += len(expected)
    return None


def bin_idx_problem(prefix: str | Path, *, in_order: bool = True) -> str | None:
    """Problem with `prefix`.bin or `prefix`.idx, in one line; None if both are valid. Reads no tokens.

    `in_order`: sequences must also be contiguous in the .bin.
    """
    if bin_bytes(prefix) is None:
        return f"{prefix}.bin is missing"
    path = Path(f"{prefix}.idx")
    if not path.is_file():
        return f"{prefix}.idx is missing"
    actual_bytes = path.stat().st_size
    if actual_bytes < _HEADER.size:
        return f"{path} is truncated: {actual_bytes} bytes, but its header alone has {_HEADER.size}"
    magic, version, code, num_sequences, num_indices = _read_header(path)
    if magic != _MAGIC:
        return f"{path} is not a Megatron index: it starts with {magic!r}, not with {_MAGIC!r}"
    if version != 1:
        return f"{path} has index version {version}, but only version 1 is supported"
    if _DTYPES.get(code, "float").startswith("float"):
        return f"{path} has dtype code {code}, which is not one of Megatron's integer types"
    if num_sequences == 0 or num_indices < 2:
        return f"{path} has no documents"
    expected_bytes = _HEADER.size + 12 * num_sequences + 8 * num_indices
    # Larger is valid: a multimodal index has one more byte per sequence.
    if actual_bytes < expected_bytes:
        return f"{path} is truncated: {actual_bytes} bytes instead of {expected_bytes}"
    return _size_problem(str(prefix), in_order)


def _size_problem(prefix: str, in_order: bool) -> str | None:
    dtype, sizes, begins, documents = read_index(prefix)
    actual_bytes = bin_bytes(prefix) or 0
    # Every sequence must belong to a document.
    if documents[0] != 0 or documents[-1] != len(sizes):
        covered = f"sequences {documents[0]} to {documents[-1]} of {len(sizes)}"
        return f"{prefix}.idx is damaged: its documents cover {covered}"
    if wrong := order_problem(prefix):
        fix = f"moe-exp data tokenize --merge {prefix} --output-prefix {prefix}_in_order sorts the sequences"
        if in_order:
            return f"{wrong} ({fix})"
        ends = begins + sizes.astype(np.int64) * dtype.itemsize
        worst = int(begins.argmin()) if begins.min() < 0 else int(ends.argmax())
        if begins[worst] >= 0 and ends[worst] <= actual_bytes:
            return None
        ended = f"begins at byte {begins[worst]} and ends at byte {ends[worst]}"
        return f"sequence {worst} of {prefix}.idx {ended} of the .bin, which has {actual_bytes}"
    expected_bytes = bin_idx_tokens(prefix) * dtype.itemsize
    if actual_bytes == expected_bytes:
        return None
    state = "is truncated" if actual_bytes < expected_bytes else "does not match its .idx"
    return f"{prefix}.bin {state}: {actual_bytes} bytes, but the sizes in its .idx sum to {expected_bytes}"


def bin_idx_tokens(prefix: str | Path) -> int:
    """Number of tokens according to `prefix`.idx, which must be valid."""
    return int(read_index(prefix).sizes.sum(dtype=np.int64))


def _read_header(path: Path) -> tuple[Any, ...]:
    with path.open("rb") as file:
        return _HEADER.unpack(file.read(_HEADER.size))


# Blends


def parse_blend(text: str) -> list[tuple[float, str]]:
    """Parses 'PREFIX', 'PREFIX PREFIX ...' or 'WEIGHT PREFIX WEIGHT PREFIX ...' into (weight, prefix) pairs.

    Prefixes may end in .bin or .idx. As in Megatron, if several prefixes have no weights, their numbers of
    tokens are the weights, so their files must exist. A word that parses as a number is a weight. If the
    whole text is an existing prefix, the text is not split, because DATA_DIR may contain spaces.

    Raises:
        ValueError: if the text has none of these forms, or tokens must be counted and a file cannot be read.
    """
    words = text.split()
    if len(words) > 1 and bin_bytes(prefix_of(text.strip())) is not None:
        return [(1.0, prefix_of(text.strip()))]
    if words and all(math.isnan(number_in(word)) for word in words):
        prefixes = [prefix_of(word) for word in words]
        if len(prefixes) == 1:
            return [(1.0, prefixes[0])]
        for prefix in prefixes:
            if wrong := bin_idx_problem(prefix):
                fix = "correct the path, or add a weight before each prefix"
                raise ValueError(f"'{' '.join(prefixes)}': {wrong}. Fix: {fix}.")
        return [(float(bin_idx_tokens(prefix)), prefix) for prefix in prefixes]
    if not words or len(words) % 2:
        raise ValueError(f"'{text}': {_BLEND_RULE}. Fix: add a weight to every prefix, or to none.")
    pairs = []
    for word, prefix in zip(words[0::2], words[1::2], strict=True):
        if math.isnan(weight := number_in(word)):
            fix = "add a weight to every prefix, or to none"
            raise ValueError(f"'{text}': {_BLEND_RULE}, but '{word}' is not a weight. Fix: {fix}.")
        if not 0 < weight < math.inf:
            fix = "set another weight or omit the prefix"
            raise ValueError(f"'{text}': weight {word} must be greater than 0 and finite. Fix: {fix}.")
        if not math.isnan(number_in(prefix)):
            fix = "add a path after each weight"
            raise ValueError(f"'{text}': {_BLEND_RULE}, and {prefix} is not a prefix. Fix: {fix}.")
        pairs.append((weight, prefix_of(prefix)))
    return pairs


# Token files as arrays, and the parts of SPLIT


class TokenFiles:
    """`prefix`.bin and `prefix`.idx as arrays; raises ValueError if a file is missing or damaged."""

    # Opened at the first read, because it needs permission to write to the local cache.
    _remote = cached_property(lambda self: open_remote(self.prefix, self.dtype))

    def __init__(self, prefix: str | Path):
        if wrong := bin_idx_problem(prefix):
            raise ValueError(f"{wrong}. Fix: correct the path, or prepare the data again.")
        self.prefix = str(prefix)
        self.dtype, self._lengths, _, self._documents = read_index(prefix)
        self.num_sequences, self.num_documents = len(self._lengths), len(self._documents) - 1

    @cached_property
    def sequence_bounds(self) -> Int64Array:
        """Position of each sequence's first token, then the end of the last sequence. [sequences + 1]."""
        bounds = np.zeros(self.num_sequences + 1, dtype=np.int64)
        np.cumsum(self._lengths, dtype=np.int64, out=bounds[1:])
        return bounds

    @cached_property
    def document_bounds(self) -> Int64Array:
        """Position of each document's first token, then the end of the last document. [documents + 1]."""
        return self.sequence_bounds[self._documents]

    def read(self, begin: int, end: int) -> npt.NDArray[np.integer]:
        """Tokens [begin, end). A memory map is not used, because its pages would stay in memory."""
        if self._remote is not None:
            return self._remote[begin:end]
        return np.fromfile(f"{self.prefix}.bin", self.dtype, end - begin, offset=begin * self.dtype.itemsize)

    @cached_property
    def end_of_document(self) -> tuple[int | None, str]:
        """Id of the end-of-document token, and how it was determined."""
        if (from_manifest := tokenizer_fact(manifest_of(self.prefix), "eod_id")) is not None:
            return from_manifest, "the manifest"
        if not len(self._last_tokens):
            return None, "no document has tokens"
        ids, counts = np.unique(self._last_tokens, return_counts=True)
        best = int(counts.argmax())
        # Without a manifest this is a guess, which requires a majority.
        if 2 * counts[best] <= len(self._last_tokens):
            return None, "no token ends most documents"
        return int(ids[best]), "the last token of most documents"

    def share_ending_with(self, token: int) -> float:
        """Fraction of documents that end with `token`, estimated from up to 4,000 documents."""
        return float((self._last_tokens == token).mean()) if len(self._last_tokens) else 0.0

    @cached_property
    def _last_tokens(self) -> npt.NDArray[np.integer]:
        """Last tokens of evenly spaced non-empty documents."""
        bounds = self.document_bounds
        ends = bounds[1:][np.diff(bounds) > 0] - 1
        ends = ends[:: max(1, len(ends) // _ENDS_LOOKED_AT)] * self.dtype.itemsize
        tokens = read_ranges(self.prefix, [(end, end + self.dtype.itemsize) for end in ends.tolist()])
        return np.frombuffer(b"".join(tokens), self.dtype)


def tokenizer_fact(manifest: dict[str, Any], name: str) -> int | None:
    """Tokenizer fact `name` (`vocab_size`, `eod_id` or `bos_id`) in a manifest of token files, or None."""
    values = (place.get(name) for place in (tokenizer_facts(manifest), manifest))
    return next((value for value in values if isinstance(value, int)), None)


def tokenizer_facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """Tokenizer facts (`TextTokenizer.recorded`) in the manifest of tokenized or merged files, or {}."""
    for place in (manifest, manifest.get("settings")):
        if isinstance(place, dict) and isinstance(facts := place.get("tokenizer"), dict):
            return facts
    return {}


def other_tokenizer(prefixes: Iterable[str]) -> str:
    """Error if the manifests of token files record different tokenizers, or different tokens at the start
    or end of documents; otherwise empty. Ignores manifests that record no tokenizer.
    """
    known: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        facts = tokenizer_facts(manifest_of(prefix))
        if not isinstance(facts.get("hash"), str):
            continue
        first, expected = next(iter(known.items()), (prefix, facts))
        # any, not all: files of the same tokenizer may differ in their bytes
        if known and not any(same_tokenizer(facts, one) for one in known.values()):
            rule = f"{first} and {prefix} were tokenized with different tokenizer.json files"
            return f"{rule}: unless both give the same ids, the model learns two meanings for each id"
        if any(facts.get(name) != expected.get(name) for name in ("eod_id", "bos_id")):
            return f"the documents of {first} and {prefix} begin or end with different tokens"
        known[prefix] = facts
    return ""


def manifest_of(prefix: str) -> dict[str, Any]:
    """Manifest of token files, or of their folder, or {}. Raises ValueError if the manifest is damaged."""
    if is_url(prefix):
        return remote_manifest(prefix)
    for path in (Path(f"{prefix}.manifest.json"), Path(prefix).parent / "manifest.json"):
        if path.is_file():
            content = read_json(path, fix="restore or remove this file")
            return content if isinstance(content, dict) else {}
    return {}


def parse_split(text: str) -> list[Share | None]:
    """Parses SPLIT into shares for training, validation and test.

    A share is (begin, end), both from 0 to 1; an empty share is None. If `text` is empty, all documents are
    used for training. Sums the numbers in Megatron's order, so that a document at a boundary falls into the
    same share as in Megatron.

    Raises:
        ValueError: if `text` is not one to three numbers, or if the first number is 0.
    """
    weights = [number_in(word) for word in (text or "1").split(",")]
    if len(weights) > _MOST_PARTS or weights[0] == 0 or not all(0 <= weight < math.inf for weight in weights):
        rule = "must be up to three numbers for training, validation and test, the first greater than 0"
        raise ValueError(f"SPLIT={text}: {rule}. Fix: set SPLIT, for example to 99,1.")
    total = sum(weights)
    bounds = [*accumulate((weight / total for weight in weights), initial=0.0)]
    parts = [(begin, end) if end > begin else None for begin, end in pairwise(bounds)]
    return parts + [None] * (_MOST_PARTS - len(parts))


def share_range(count: int, share: Share) -> tuple[int, int]:
    """Range [first, end) that `share` selects from `count` documents, rounded as in Megatron."""
    begin, end = share
    return round(begin * count), round(end * count)


def part_tokens(files: TokenFiles, share: Share, *, by_sequence: bool = False) -> int:
    """Number of tokens in a share of the documents; if `by_sequence`, of the sequences (as in GPTDataset)."""
    bounds = files.sequence_bounds if by_sequence else files.document_bounds
    begin, end = share_range(len(bounds) - 1, share)
    return int(bounds[end] - bounds[begin])
