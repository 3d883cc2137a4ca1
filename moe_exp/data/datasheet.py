"""The datasheet of a mixture: sources, removed documents, lengths, languages and overlaps."""

import glob
import importlib.util
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moe_exp.data.convert.filters import language_identifier
from moe_exp.data.documents import Tally, read_objects
from moe_exp.data.inspection import length_summary, read_with_progress
from moe_exp.data.tokens.tokens import TokenFiles
from moe_exp.host.files import bytes_text, replacing

_MOST_HASHES = 20_000_000  # over all sources; of more documents, only a sample is compared
_LANGUAGES_OF = 1000


@dataclass(frozen=True)
class MixturePart:
    """A prepared source."""

    name: str  # base name of its files
    source: str  # the dataset or path, with its commit
    licence: str
    converted: Mapping[str, Any]  # manifests of these two steps
    shuffled: Mapping[str, Any]
    num_tokens: int
    shards: Sequence[Path]  # files with the training documents
    prefix: Path  # of the training token files
    valid_prefix: Path
    asked: float = 0.0  # requested share of the tokens
    weight: float = 0.0  # effective share


def datasheet(name: str, parts: Sequence[MixturePart], *, total_tokens: float | None, tokenizer: str) -> str:
    """Returns the datasheet as Markdown."""
    training = f"a training run of {total_tokens:,.0f} tokens" if total_tokens else "a training run"
    lines = [f"# {name}", "", f"Tokenizer: {tokenizer}. Shares refer to the tokens of {training}.", ""]
    rows = list[tuple[str, ...]]()
    for part in parts:
        train, tokens = part.shuffled["train"], part.num_tokens
        counts = f"{train['num_documents']:,}", bytes_text(train["num_text_bytes"]), f"{tokens:,}"
        epochs = f"{part.weight * total_tokens / tokens:.2f}" if total_tokens else ""
        shares = f"{part.asked:.2%}", f"{part.weight:.2%}", epochs
        rows.append((part.name, part.source, part.licence, *counts, *shares))
    head = "source", "origin", "license", "documents", "text", "tokens", "requested share", "share", "epochs"
    lines += _table(head, rows)
    lines += ["## Documents removed", ""]
    for part in parts:
        lines += [f"### {part.name}", "", *_table(("step", "documents", "text"), _removed(part))]
    found = {one.name: length_summary(np.diff(TokenFiles(one.prefix).document_bounds)) for one in parts}
    lengths = [
        (name, f"{one['min']:,}", f"{one['median']:,.0f}", f"{one['mean']:,.0f}", f"{one['max']:,}")
        for name, one in found.items()
    ]
    lines += ["## Tokens per document", ""]
    lines += _table(("source", "smallest", "median", "mean", "largest"), lengths)
    # the sources have different ranges of lengths: a row for each bin that occurs in any of them
    ends = {begin: end for one in found.values() for begin, end, _ in one["histogram"]}
    counts_of = [{begin: count for begin, _, count in one["histogram"]} for one in found.values()]
    spans = {f"{begin:,} to {end:,}": begin for begin, end in sorted(ends.items())}
    shown = [(span, *(f"{one.get(begin, 0):,}" for one in counts_of)) for span, begin in spans.items()]
    lines += _table(("tokens", *found), shown)
    has_langid = importlib.util.find_spec("py3langid") is not None
    how = f"Shares in the first {_LANGUAGES_OF:,} documents of each source, by the field `language`"
    how += ", or by py3langid for documents without it." if has_langid else "."
    lines += ["## Languages", "", how, ""]
    languages = [(part.name, _languages(part, has_langid=has_langid)) for part in parts]
    lines += _table(("source", "languages"), languages)
    lines += ["## Documents in two sources", "", *_overlaps(parts)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Any) -> list[str]:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return [*(f"| {line} |" for line in lines), ""]


def _removed(part: MixturePart) -> list[tuple[str, str, str]]:
    converted = part.converted

    def row(what: str, tally: Mapping[str, Any]) -> tuple[str, str, str]:
        return what, f"{tally['num_documents']:,}", bytes_text(tally["num_text_bytes"])

    rows = [row("read", converted["read"])]
    rows += [(f"skipped: {why}", f"{count:,}", "") for why, count in converted["read"]["skipped"].items()]
    for name, tally in converted["filtered"].items():
        rows.append(row(f"removed: {name}", tally))
        for why, count in converted.get("reasons", {}).get(name, {}).items():
            rows.append((f"removed: {name}: {why or 'no reason'}", f"{count:,}", ""))
    for name, (before, after) in converted.get("edited", {}).items():
        change = after["num_text_bytes"] - before["num_text_bytes"]
        rows.append((f"edited: {name}", f"{before['num_documents']:,}", f"{change:+,} bytes"))
    rows.append(row("kept", converted["written"]))
    return [*rows, row("of these held out for validation", part.shuffled["valid"])]


def _languages(part: MixturePart, *, has_langid: bool) -> str:
    found: Counter[str] = Counter()
    documents = (one for path in part.shards for _, one in read_objects(path, Tally()))
    identify = language_identifier().classify if has_langid else None
    for one in islice(documents, _LANGUAGES_OF):
        metadata = one.get("metadata")
        language = metadata.get("language") if isinstance(metadata, dict) else None
        if not isinstance(language, str):
            # the beginning is enough, and identification time grows with the length
            language = identify(one["text"][:2000])[0] if identify else "unknown"
        found[language] += 1
    total = max(1, sum(found.values()))
    return ", ".join(f"{language} {count / total:.1%}" for language, count in found.most_common(8))


def _overlaps(parts: Sequence[MixturePart]) -> list[str]:
    """Returns a table that counts the texts shared by each pair of sources; texts are compared by hash."""
    # a sample of one text in `every`, chosen by hash so that all sources are sampled alike
    every = 1 + sum(part.shuffled["train"]["num_documents"] for part in parts) // _MOST_HASHES
    words = [_distinct(part, every) for part in parts]
    rows = []
    for index, part in enumerate(parts):
        cells = [f"{len(np.intersect1d(words[index], other, assume_unique=True)):,}" for other in words]
        cells[index] = f"({len(words[index]):,})"
        rows.append((part.name, *cells))
    share = "" if every == 1 else f" Based on a sample of one in {every} texts, chosen by hash."
    note = f"Distinct texts that two sources share; in parentheses, distinct texts in one source.{share}"
    return [note, "", *_table(("", *(part.name for part in parts)), rows)]


def _distinct(part: MixturePart, every: int) -> Any:
    """Hashes of the distinct texts in a sample (one text in `every`), cached next to the token files."""
    path = part.prefix.with_name(f"{part.name}.{part.shuffled['line_hash'][:16]}.{every}.npy")
    if path.exists():
        return np.load(path)
    for old in path.parent.glob(f"{glob.escape(part.name)}.{'?' * 16}.*.npy"):
        old.unlink()
    found = array("Q")
    for _, _, text in read_with_progress(f"hashing {part.name}", part.shards, Tally()):
        digest = xxhash.xxh3_64_intdigest(text.encode())
        # by hash and not by position: a text is sampled in all sources or in none
        if digest % every == 0:
            found.append(digest)
    distinct = np.unique(np.frombuffer(found, dtype=np.uint64))
    with replacing(path) as file:
        np.save(file, distinct)
    return distinct
