"""The datasheet of a mixture: origin of its documents, what was removed, lengths, languages, overlaps."""

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
from moe_exp.data.inspection import documents_with_progress, length_summary
from moe_exp.data.kinds import total_bytes
from moe_exp.data.tokens.tokens import TokenFiles
from moe_exp.host.files import bytes_text, replacing
from moe_exp.host.progress import progress

_MOST_HASHES = 20_000_000  # of all sources: of more documents a share is compared
_LANGUAGES_OF = 1000


@dataclass(frozen=True)
class MixturePart:
    """A source that is prepared.

    Args:
        name: of its files.
        source: what it is called, with its commit.
        converted, shuffled, tokenized: manifests of its steps.
        shards: files of its training documents.
        prefix, valid_prefix: its token files.
        asked, weight: share of the tokens that was asked for, and that it has.
    """

    name: str
    source: str
    licence: str
    converted: Mapping[str, Any]
    shuffled: Mapping[str, Any]
    tokenized: Mapping[str, Any]
    shards: Sequence[Path]
    prefix: Path
    valid_prefix: Path
    asked: float = 0.0
    weight: float = 0.0

    @property
    def num_tokens(self) -> int:
        return int(self.tokenized["num_tokens"])


def datasheet(name: str, parts: Sequence[MixturePart], *, total_tokens: float | None, tokenizer: str) -> str:
    """Markdown text."""
    training = f"a training with {total_tokens:,.0f} tokens" if total_tokens else "a training"
    lines = [f"# {name}", "", f"Tokenizer: {tokenizer}. Shares are of the tokens of {training}.", ""]
    rows = list[tuple[str, ...]]()
    for part in parts:
        train, tokens = part.shuffled["train"], part.num_tokens
        counts = f"{train['num_documents']:,}", bytes_text(train["num_text_bytes"]), f"{tokens:,}"
        epochs = f"{part.weight * total_tokens / tokens:.2f}" if total_tokens else ""
        shares = f"{part.asked:.2%}", f"{part.weight:.2%}", epochs
        rows.append((part.name, part.source, part.licence, *counts, *shares))
    head = "source", "from", "licence", "documents", "text", "tokens", "share asked", "share", "epochs"
    lines += _table(head, rows)
    lines += ["## Documents removed", ""]
    for part in parts:
        lines += [f"### {part.name}", "", *_table(("what", "documents", "text"), _removed(part))]
    found = {one.name: length_summary(np.diff(TokenFiles(one.prefix).document_bounds)) for one in parts}
    lengths = [
        (name, f"{one['min']:,}", f"{one['median']:,.0f}", f"{one['mean']:,.0f}", f"{one['max']:,}")
        for name, one in found.items()
    ]
    lines += ["## Tokens per document", ""]
    lines += _table(("source", "smallest", "median", "mean", "largest"), lengths)
    # how many documents there are of each length
    ends = {begin: end for one in found.values() for begin, end, _ in one["histogram"]}
    counts_of = [{begin: count for begin, _, count in one["histogram"]} for one in found.values()]
    spans = {f"{begin:,} to {end:,}": begin for begin, end in sorted(ends.items())}
    shown = [(span, *(f"{one.get(begin, 0):,}" for one in counts_of)) for span, begin in spans.items()]
    lines += _table(("tokens", *found), shown)
    how = f"Of the first {_LANGUAGES_OF:,} documents"
    has_langid = importlib.util.find_spec("py3langid") is not None
    by = ": their field `language`, else by py3langid." if has_langid else ", by their field `language`."
    lines += ["## Languages", "", how + by, ""]
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
    return [*rows, row("of these for validation", part.shuffled["valid"])]


def _languages(part: MixturePart, *, has_langid: bool) -> str:
    found: Counter[str] = Counter()
    documents = (one for path in part.shards for _, one in read_objects(path, Tally()))
    identify = language_identifier().classify if has_langid else None
    for one in islice(documents, _LANGUAGES_OF):
        metadata = one.get("metadata")
        language = metadata.get("language") if isinstance(metadata, dict) else None
        if not isinstance(language, str):
            # the beginning is enough, and the time grows with the length
            language = identify(one["text"][:2000])[0] if identify else "unknown"
        found[language] += 1
    total = max(1, sum(found.values()))
    return ", ".join(f"{language} {count / total:.1%}" for language, count in found.most_common(8))


def _overlaps(parts: Sequence[MixturePart]) -> list[str]:
    """Texts that two sources share, compared by hash."""
    # of one text in `every` alone, chosen by its hash, so that the same ones are compared in all sources
    every = 1 + sum(part.shuffled["train"]["num_documents"] for part in parts) // _MOST_HASHES
    words = [_distinct(part, every) for part in parts]
    rows = []
    for index, part in enumerate(parts):
        cells = [f"{len(np.intersect1d(words[index], other, assume_unique=True)):,}" for other in words]
        cells[index] = f"({len(words[index]):,})"
        rows.append((part.name, *cells))
    share = "" if every == 1 else f" Of one in {every} texts, chosen by their hashes."
    note = f"Different texts that both have; in brackets all of a source.{share}"
    return [note, "", *_table(("", *(part.name for part in parts)), rows)]


def _distinct(part: MixturePart, every: int) -> Any:
    """Hashes of the different texts, of one in `every`; kept in a file beside the tokens."""
    path = part.prefix.with_name(f"{part.name}.{part.shuffled['line_hash'][:16]}.{every}.npy")
    if path.exists():
        return np.load(path)
    for old in path.parent.glob(f"{glob.escape(part.name)}.{'?' * 16}.*.npy"):
        old.unlink()
    found = array("Q")
    with progress(f"texts of {part.name}", total_bytes(part.shards)) as advance:
        for shard in part.shards:
            for _, text in documents_with_progress(shard, Tally(), advance, text_field="text"):
                digest = xxhash.xxh3_64_intdigest(text.encode())
                # the same share of every source, so that equal texts meet
                if digest % every == 0:
                    found.append(digest)
    distinct = np.unique(np.frombuffer(found, dtype=np.uint64))
    with replacing(path) as file:
        np.save(file, distinct)
    return distinct
