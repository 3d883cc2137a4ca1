"""Summarizes token files or documents: counts, lengths, duplicates, end-of-document tokens, samples.

Needs memory for a block of tokens or for the longest document, if that is larger. Lengths and hashes need
about 50 more bytes per document.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash
from rich.markup import escape
from tokenizers import Tokenizer

from moe_exp.data.documents import Tally, files_in, find_inputs, read_documents
from moe_exp.data.kinds import input_error, is_stream, total_bytes
from moe_exp.data.samples.corpus import cut_documents
from moe_exp.data.stage import read_json
from moe_exp.data.tokens.tokenizer import tokenizer_vocab_size
from moe_exp.data.tokens.tokens import Int64Array, TokenFiles, manifest_of, tokenizer_fact
from moe_exp.host.files import ending
from moe_exp.host.progress import print_summary, print_table, progress, table_console

BLOCK_TOKENS = 2**22
_SHOWN_TOKENS, _SHOWN_LAST_TOKENS, _SHOWN_CHARACTERS = 80, 8, 300
_BAR_CHARACTERS = 40
_FIELDS_OF = 1000
_ADVANCE_BYTES = 2**20
_DIGEST = np.dtype("V16")  # numpy compares such values byte by byte


def inspect_path(
    path: Path, *, tokenizer: Path | None = None, num_samples: int = 3, text_field: str = "text",
    seq_len: int = 4096,
) -> dict[str, Any]:  # fmt: skip
    """Reads all data at `path` and returns the report of --json. Its `kind` is tokens or documents.

    Args:
        path: prefix of .bin/.idx files (or one of the two), a document file, or a folder of document files.
        tokenizer: tokenizer.json or its folder, to decode samples and count unknown ids.
        seq_len: training sequence length in tokens, to report the fraction of documents cut at sample ends.
    """
    if path.is_dir() or ending(path):
        files = data_files(path, text_field)
        report = inspect_documents(files, num_samples=num_samples, text_field=text_field)
        return report | filter_effects(path, num_samples)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if seq_len < 1:
        fix = "give the number of tokens per sample"
        raise input_error(f"--seq-len={seq_len}", "must be at least 1", fix)
    return inspect_tokens(TokenFiles(prefix), tokenizer=tokenizer, num_samples=num_samples, seq_len=seq_len)


def data_files(path: Path, text_field: str) -> list[Path]:
    """Document files at `path`: the file itself, or all files in the folder, including validation files."""
    found = files_in(path, text_field=text_field, with_validation=True) if path.is_dir() else []
    return found or find_inputs([path], text_field=text_field)


def num_duplicates(hashes: bytearray) -> int:
    """Number of documents that repeat an earlier one. `hashes`: all XXH3-128 digests, concatenated."""
    digests = np.frombuffer(hashes, dtype=_DIGEST)
    return len(digests) - len(np.unique(digests))


def difference(one: bytearray, other: bytearray) -> tuple[int, int]:
    """Pairs equal document hashes of `one` and `other`. Returns the number of unpaired hashes in each."""
    digests = np.frombuffer(one + other, dtype=_DIGEST)
    _, kinds = np.unique(digests, return_inverse=True)
    # For each different hash: by how many `one` exceeds `other`.
    sides = np.split(kinds, [len(one) // _DIGEST.itemsize])
    surplus = np.subtract(*(np.bincount(side, minlength=len(kinds)) for side in sides))
    return int(surplus[surplus > 0].sum()), int(-surplus[surplus < 0].sum())


# Token files


def inspect_tokens(
    files: TokenFiles, *, tokenizer: Path | None = None, num_samples: int = 3, seq_len: int = 4096
) -> dict[str, Any]:
    """See `inspect_path`."""
    manifest = manifest_of(files.prefix)
    vocab_size = tokenizer_vocab_size(tokenizer) if tokenizer else tokenizer_fact(manifest, "vocab_size")
    lengths, num_tokens = np.diff(files.document_bounds), int(files.document_bounds[-1])
    eod_id, eod_from = files.end_of_document
    hashes, counts, highest_id = bytearray(), Counter[str](), -1
    with progress(f"reading {files.prefix}.bin", num_tokens * files.dtype.itemsize) as advance:
        for tokens, bounds in token_blocks(files, BLOCK_TOKENS):
            for begin, end in pairwise(bounds.tolist()):
                hashes += xxhash.xxh3_128_digest(tokens[begin:end].data)
            # only empty documents: max() of no tokens is an error
            if not len(tokens):
                continue
            highest_id = max(highest_id, int(tokens.max()))
            if vocab_size is not None:
                counts["out_of_vocabulary"] += int(((tokens < 0) | (tokens >= vocab_size)).sum())
            if eod_id is not None:
                sizes, is_eod = np.diff(bounds), tokens == eod_id
                ends_with_eod = is_eod[bounds[1:][sizes > 0] - 1]
                counts["eods"] += int(is_eod.sum())
                counts["ending_with_eod"] += int(ends_with_eod.sum())
                counts["only_eod"] += int((ends_with_eod & (sizes[sizes > 0] == 1)).sum())
            advance(tokens.nbytes)
    return {
        "kind": "tokens",
        "prefix": files.prefix,
        "documents": files.num_documents,
        "sequences": files.num_sequences,
        "tokens": num_tokens,
        "bytes": Path(f"{files.prefix}.bin").stat().st_size,
        "index_bytes": Path(f"{files.prefix}.idx").stat().st_size,
        "dtype": files.dtype.name,
        "highest_id": highest_id,
        "vocab_size": vocab_size,
        "out_of_vocabulary": counts["out_of_vocabulary"] if vocab_size is not None else None,
        "eod_id": eod_id,
        "eod_from": eod_from,
        "end_with_eod": counts["ending_with_eod"],
        "eods_inside": counts["eods"] - counts["ending_with_eod"],
        "empty_documents": int((lengths == 0).sum()) + counts["only_eod"],
        "duplicate_documents": num_duplicates(hashes),
        "cut_documents": cut_documents(lengths, seq_len),
        "lengths": length_summary(lengths),
        "samples": _token_samples(files, tokenizer, num_samples),
    }


def token_blocks(
    files: TokenFiles, block_tokens: int
) -> Iterator[tuple[npt.NDArray[np.integer], Int64Array]]:
    """Yields blocks of consecutive documents as (tokens, bounds of the documents in the block). A block has
    at most `block_tokens` tokens, unless it is a single longer document.
    """
    bounds, first = files.document_bounds, 0
    while first < files.num_documents:
        end = int(np.searchsorted(bounds, bounds[first] + block_tokens, side="right")) - 1
        end = min(max(end, first + 1), files.num_documents)
        yield files.read(int(bounds[first]), int(bounds[end])), bounds[first : end + 1] - bounds[first]
        first = end


def _token_samples(files: TokenFiles, path: Path | None, count: int) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path)) if path else None
    found = []
    # evenly spaced from the first document to the last
    places = np.linspace(0, files.num_documents - 1, min(max(0, count), files.num_documents))
    for number in np.unique(places.astype(int)).tolist():
        begin, end = (int(bound) for bound in files.document_bounds[number : number + 2])
        ids = files.read(begin, min(end, begin + _SHOWN_TOKENS)).tolist()
        last = files.read(max(begin + len(ids), end - _SHOWN_LAST_TOKENS), end).tolist()
        sample = {"document": number, "tokens": end - begin, "first_ids": ids, "last_ids": last}
        if tokenizer is not None:
            texts = [tokenizer.decode(part, skip_special_tokens=False) for part in (ids, last) if part]
            sample["text"] = " [...] ".join(texts)
        found.append(sample)
    return found


# JSONL files


def inspect_documents(paths: Sequence[Path], *, num_samples: int, text_field: str) -> dict[str, Any]:
    """See `inspect_path`. Invalid lines are counted by reason."""
    tally, hashes, lengths = Tally(), bytearray(), array("q")
    fields: Counter[str] = Counter()
    samples: list[dict[str, Any]] = []
    folder = os.path.commonpath([path.parent for path in paths])  # subfolders may repeat the names of files
    names = {path: str(path.relative_to(folder)) for path in paths}
    per_file = dict.fromkeys(names.values(), 0)
    for path, line, text in read_with_progress("reading", paths, tally, text_field=text_field, skip_bad=True):
        data = text.encode()
        hashes += xxhash.xxh3_128_digest(data)
        lengths.append(len(data))
        per_file[names[path]] += 1
        if tally.num_documents <= _FIELDS_OF:
            # a list of names: from a dict, Counter would add the values
            fields.update(list(orjson.loads(line)))
        if len(samples) < num_samples:
            samples.append({"file": names[path], "bytes": len(data), "text": text[:_SHOWN_CHARACTERS]})
    return {
        "kind": "documents",
        "files": per_file,
        "documents": tally.num_documents,
        "bytes": total_bytes(paths),
        "text_bytes": tally.num_text_bytes,
        "text_hash": f"{tally.text_hash:032x}",
        "skipped": dict(sorted(tally.skipped.items())),
        "duplicate_documents": num_duplicates(hashes),
        "fields": dict(sorted(fields.items())),
        "fields_of": min(tally.num_documents, _FIELDS_OF),
        "lengths": length_summary(np.frombuffer(lengths, dtype=np.int64)),
        "samples": samples,
    }


def read_with_progress(
    what: str, paths: Sequence[Path], tally: Tally, *, text_field: str = "text", skip_bad: bool = False
) -> Iterator[tuple[Path, bytes, str]]:
    """Yields (file, line, text) like `read_documents`, and shows the progress with the label `what`."""
    with progress(what, total_bytes(paths)) as advance:
        for path in paths:
            reported = pending = 0
            for line, text in read_documents(path, tally, text_field=text_field, skip_bad=skip_bad):
                yield path, line, text
                # the lines of a compressed file do not tell how much of the file was read
                pending += len(line) + 1
                if pending >= _ADVANCE_BYTES and not is_stream(path):
                    advance(pending)
                    reported, pending = reported + pending, 0
            advance(path.stat().st_size - reported)


def filter_effects(folder: Path, num_samples: int) -> dict[str, Any]:
    """Documents removed or edited by filters, according to the manifest of `moe-exp data prepare`."""
    manifest = read_json(folder / "manifest.json") or {} if folder.is_dir() else {}
    if not manifest.get("filtered"):
        return {}
    edited, reasons = manifest.get("edited", {}), manifest.get("reasons", {})
    effects = [
        {"filter": name, "removed": tally["num_documents"], "removed_text_bytes": tally["num_text_bytes"]}
        | {"edited": edited[name][0]["num_documents"] if name in edited else 0}
        | {"reasons": reasons.get(name, {})}
        for name, tally in manifest["filtered"].items()
    ]
    samples: list[dict[str, Any]] = []
    by_filter: Counter[str] = Counter()
    found: Any = read_json(folder / "datatrove/samples.json")
    for sample in found or []:
        by_filter[sample["filter"]] += 1
        if by_filter[sample["filter"]] <= num_samples:
            samples.append(sample)
    return {"read": manifest["read"]["num_documents"], "filters": effects, "removed_samples": samples}


# Lengths


def length_summary(lengths: Int64Array) -> dict[str, Any]:
    """Statistics of document lengths. Each histogram bin (0, 1, 2 to 3, ...) is (from, to, documents)."""
    if not len(lengths):
        return {"min": 0, "median": 0, "mean": 0, "max": 0, "histogram": []}
    num_bits = np.frexp(lengths.astype(np.float64))[1]  # 0 for 0, 1 for 1, 2 for 2 and 3
    counts = list(enumerate(np.bincount(num_bits).tolist()))[int(num_bits.min()) :]
    histogram = [(1 << bits >> 1, max(0, (1 << bits) - 1), count) for bits, count in counts]
    middle = {"median": float(np.median(lengths)), "mean": round(float(lengths.mean()), 1)}
    return {"min": int(lengths.min()), **middle, "max": int(lengths.max()), "histogram": histogram}


# Printed tables


def print_inspection(report: dict[str, Any]) -> None:
    """Prints the result of `inspect_path` as tables."""
    is_tokens = report["kind"] == "tokens"
    title = f"{report['prefix']}.bin and .idx" if is_tokens else f"{len(report['files'])} files"
    print_summary(title, _rows(report))
    lengths = report["lengths"]
    unit = "tokens" if is_tokens else "text bytes"
    middle = f"median {lengths['median']:,.0f}, mean {lengths['mean']:,.0f}"
    rule = f"min {lengths['min']:,}, {middle}, max {lengths['max']:,}"
    most = max((count for *_, count in lengths["histogram"]), default=1)
    bins = [(*one, "█" * -(-one[-1] * _BAR_CHARACTERS // most)) for one in lengths["histogram"]]
    rows = [(f"{begin:,}", f"{end:,}", f"{count:,}", bar) for begin, end, count, bar in bins]
    print_table(f"Lengths in {unit}: {rule}", ("from", "to", "documents", ""), rows)
    console = table_console()
    for sample in report["samples"]:
        where = sample.get("file") or f"document {sample['document']:,}, {sample['tokens']:,} tokens"
        if (text := sample.get("text")) is None:
            text = " ".join(map(str, sample["first_ids"]))
            text += " ... " + " ".join(map(str, sample["last_ids"])) if sample["last_ids"] else ""
        shown = f"[bold]{escape(where)}[/bold]\n{escape(text)}"
        console.print(shown, highlight=False, emoji=False, soft_wrap=True)
    if "filters" in report:
        effects = []
        for one in report["filters"]:
            counts = [f"{reason or 'no reason'} {count:,}" for reason, count in one["reasons"].items()]
            share, edited = f"{one['removed'] / max(1, report['read']):.2%}", f"{one['edited']:,}"
            effects.append((one["filter"], f"{one['removed']:,}", share, edited, ", ".join(counts)))
        print_table("Filters", ("filter", "removed", "share", "edited", "reasons"), effects)
    for sample in report.get("removed_samples", []):
        why = sample.get("reason") or ""
        if "cluster" in sample:
            why = f"cluster {sample['cluster']}, {'kept' if sample['stays'] else 'removed'}"
        where = escape(f"{sample['filter']}{': ' if why else ''}{why}: {sample['id']}")
        text = f"[bold]{where}[/bold]\n{escape(sample['text'][:_SHOWN_CHARACTERS])}"
        console.print(text, highlight=False, emoji=False, soft_wrap=True)


def _rows(report: dict[str, Any]) -> dict[str, object]:
    if report["kind"] == "documents":
        rows: dict[str, object] = {name: report[name] for name in ("documents", "bytes")}
        rows["text bytes"] = report["text_bytes"]
        rows |= {f"skipped: {reason}": count for reason, count in report["skipped"].items()}
        rows["duplicates of another document"] = report["duplicate_documents"]
        in_all, counts = report["fields_of"], report["fields"].items()
        fields = (name if count == in_all else f"{name} ({count:,})" for name, count in counts)
        rows[f"fields of the first {in_all:,}"] = ", ".join(fields)
        return rows | {"text hash": report["text_hash"]}
    eod = report["eod_id"]
    rows = {name: report[name] for name in ("documents", "tokens", "bytes", "dtype")}
    rows["highest id"] = report["highest_id"]
    if report["vocab_size"] is not None:
        rows["vocabulary"] = report["vocab_size"]
        rows["ids outside the vocabulary"] = report["out_of_vocabulary"]
    rows["EOD"] = f"none: {report['eod_from']}" if eod is None else f"{eod} ({report['eod_from']})"
    if eod is not None:
        rows["documents ending with EOD"] = report["end_with_eod"]
        rows["EODs elsewhere"] = report["eods_inside"]
    rows["empty documents"] = report["empty_documents"]
    cut = report["cut_documents"]
    by_best_fit = f"{cut['best_fit']:.1%} with best-fit packing ({cut['filler']:.2%} filler)"
    rows["duplicates of another document"] = report["duplicate_documents"]
    what = f"documents cut at {cut['seq_len']:,} tokens per sample"
    return rows | {what: f"{cut['concatenated']:.1%} concatenated, {by_best_fit}"}
