"""Verifies files against their manifest, and compares the documents of two corpora.

Verification and comparison read and hash all data. Verification takes about 100 bytes of memory per
validation document; comparison takes about 50 bytes per document of both corpora.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moe_exp.data import inspection
from moe_exp.data.documents import TALLIED, Tally, is_validation_file
from moe_exp.data.kinds import JSON_FILES, JSON_SUFFIXES, RECORD_SUFFIXES, input_error
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.tokens import TokenFiles, bin_idx_problem
from moe_exp.host.files import ending, has_hash, read_json
from moe_exp.host.progress import progress


@dataclass(frozen=True)
class Finding:
    name: str  # file or comparison
    problem: str = ""
    facts: str = ""  # details to print


@dataclass(frozen=True)
class Manifest:
    """A manifest. The names of outputs are relative to the manifest's folder."""

    path: Path
    content: dict[str, Any]
    only: str = ""  # name of the only output to check; empty for all

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, size in bytes and hash of each file to check."""
        return [one for one in self.content["outputs"] if not self.only or one["name"] == self.only]

    @property
    def text_field(self) -> str:
        if self.content.get("stage") == "convert":  # its setting is the text field of its inputs
            return "text"
        return str(self.content.get("settings", {}).get("text_field") or "text")


def find_manifest(path: Path) -> Manifest:
    """Finds the manifest of `path`: a folder, a prefix of token files, or a file that a manifest lists."""
    stem = prefix_of(path.name.removesuffix(ending(path)))
    candidates = [
        *((one, "") for one in (path / "manifest.json", path.with_name(path.name + ".manifest.json"), path)),
        *((path.with_name(one), path.name) for one in (stem + ".manifest.json", "manifest.json")),
    ]
    for candidate, only in candidates:
        if not (candidate.name.endswith("manifest.json") and candidate.is_file()):
            continue
        try:
            content = read_json(candidate)
            if not isinstance(content["outputs"], list):
                raise TypeError("outputs is not a list")
        except (ValueError, KeyError, TypeError) as error:
            fix = "recreate the files, or read them with moe-exp data inspect"
            rule = f"must be a manifest with a list of outputs ({type(error).__name__}: {error})"
            raise ValueError(f"{candidate}: {rule}. Fix: {fix}.") from error
        found = Manifest(candidate, content, only)
        if found.outputs or not only:
            return found
    raise input_error(path, "no manifest found", "give a folder or file created by moe-exp data")


# Against the manifest


def verify(path: Path) -> Iterator[Finding]:
    """Checks `path` against its manifest: sizes, hashes, token files and documents. Also checks that no
    validation document is in the training files. Raises ValueError if the manifest is missing or damaged, or
    if a line of a JSONL file is invalid.
    """
    manifest, files = find_manifest(path), list[Finding]()
    num_bytes = sum(int(one["bytes"]) for one in manifest.outputs)
    with progress(f"hashing files in {manifest.path}", num_bytes) as advance:
        for one in manifest.outputs:
            path, wrong = manifest.path.parent / one["name"], ""
            if not path.is_file():
                wrong = "is missing"
            elif (size := path.stat().st_size) != one["bytes"]:
                wrong = f"has {size:,} bytes, the manifest lists {one['bytes']:,}"
            elif not has_hash(path, one["hash"]):
                wrong = "has changed since it was created: its hash differs"
            files.append(Finding(one["name"], wrong, f"{one['bytes']:,} bytes"))
            advance(int(one["bytes"]))
    yield from files
    if not manifest.only and manifest.path.name == "manifest.json":  # otherwise the folder is shared
        # a training run or the next step would also read data files that are not listed
        listed = {one["name"] for one in manifest.outputs}
        # .json files are manifests and notes
        suffixes = tuple({*RECORD_SUFFIXES, ".bin", ".idx"} - {*JSON_FILES})
        for file in sorted(manifest.path.parent.iterdir()):
            if file.is_file() and file.name.endswith(suffixes) and file.name not in listed:
                yield Finding(file.name, "is not in the manifest")
    # reading damaged files would only report the same damage again
    if not any(finding.problem for finding in files):
        yield from _token_findings(manifest)
        yield from _document_findings(manifest)


def _token_findings(manifest: Manifest) -> Iterator[Finding]:
    for name in (one["name"] for one in manifest.outputs if one["name"].endswith(".idx")):
        prefix = manifest.path.parent / name.removesuffix(".idx")
        if wrong := bin_idx_problem(prefix):
            yield Finding(prefix.name, wrong)
            continue
        files = TokenFiles(prefix)
        seen = {"documents": files.num_documents, "tokens": int(files.sequence_bounds[-1])}
        listed = {what: manifest.content.get(f"num_{what}", count) for what, count in seen.items()}
        wrong = "; ".join(
            f"has {count:,} {what}, the manifest lists {listed[what]:,}"
            for what, count in seen.items()
            if listed[what] != count
        )
        yield Finding(prefix.name, wrong, ", ".join(f"{count:,} {what}" for what, count in seen.items()))


def _document_findings(manifest: Manifest) -> list[Finding]:
    """Checks JSONL outputs: documents per file, totals, and whether training and validation overlap."""
    names = [one["name"] for one in manifest.outputs if ending(one["name"]) in JSON_SUFFIXES]
    if not names:
        return []
    expected = manifest.content.get("num_documents")
    found, total, valid, num_shared = list[Finding](), Tally(), set[bytes](), 0
    # Validation files first, because the training files are compared with them.
    names.sort(key=lambda one: not is_validation_file(Path(one)))
    paths = [manifest.path.parent / name for name in names]
    counts, validation = dict.fromkeys(paths, 0), {path for path in paths if is_validation_file(path)}
    what, field = "reading the documents", manifest.text_field
    for path, _, text in inspection.read_with_progress(what, paths, total, text_field=field):
        digest = xxhash.xxh3_128_digest(text.encode())
        counts[path] += 1
        if path in validation:
            valid.add(digest)
        else:
            num_shared += digest in valid
    for name in names:
        count = counts[manifest.path.parent / name]
        # a shuffle counts documents per file, other steps only in total
        listed = expected.get(name, count) if isinstance(expected, dict) else count
        wrong = f"has {count:,} documents, the manifest lists {listed:,}" if count != listed else ""
        found.append(Finding(name, wrong, f"{count:,} documents"))
    if not manifest.only:
        found.append(_total_finding(manifest, total))
    # a single file cannot be compared with itself
    if valid and len(names) > 1:
        wrong = f"{num_shared:,} training documents are also validation documents"
        num_valid = sum(counts[path] for path in validation)
        facts = f"none of the {num_valid:,} validation documents is in the training files"
        found.append(Finding("validation against training", wrong if num_shared else "", facts))
    return found


def _total_finding(manifest: Manifest, total: Tally) -> Finding:
    content = manifest.content
    # output counts, depending on the step: shuffle (two parts), conversion, other steps, merge
    sides = [content.get("train"), content.get("valid")]
    for parts in (sides, [content.get("written")], [content], [content.get("read")]):
        tallies = [part for part in parts if isinstance(part, dict) and "text_hash" in part]
        if len(tallies) == len(parts):
            break
    else:
        facts = f"{total.num_documents:,}; the manifest contains no counts to compare"
        return Finding("all documents", "", facts)
    expected = Tally()
    for one in tallies:
        expected += Tally.from_json({"skipped": {}, **one})
    counts, expected_counts = total.to_json(), expected.to_json()
    wrong = "; ".join(
        f"{name} is {counts[name]}, the manifest lists {expected_counts[name]}"
        for name in TALLIED
        if counts[name] != expected_counts[name]
    )
    return Finding("all documents", wrong, f"{total.num_documents:,}, text hash {counts['text_hash']}")


# Against another corpus


def compare(path: Path, other: Path, *, text_field: str = "text") -> Finding:
    """Compares two corpora as multisets of documents. Both are JSONL (file or folder), or both .bin/.idx."""
    are_tokens = {not one.is_dir() and ending(one) not in JSON_SUFFIXES for one in (path, other)}
    if len(are_tokens) > 1:
        fix = "give two .bin/.idx prefixes, or JSONL for both"
        raise ValueError(f"{path}: must be of the same kind as {other} (tokens or JSONL). Fix: {fix}.")
    here, there = (_all_hashes(one, text_field, is_tokens=True in are_tokens) for one in (path, other))
    only_here, only_there = inspection.difference(here, there)
    wrong = f"{only_here:,} documents are missing from {other}, which has {only_there:,} additional ones"
    wrong = wrong if only_here or only_there else ""
    return Finding(f"{path} against {other}", wrong, f"the same {len(here) // 16:,} documents")


def _all_hashes(path: Path, text_field: str, *, is_tokens: bool) -> bytearray:
    """Concatenated XXH3-128 digests of the documents."""
    hashes = bytearray()
    if is_tokens:
        # as int64, to compare files with different token types
        files = TokenFiles(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)
        for tokens, bounds in inspection.token_blocks(files, inspection.BLOCK_TOKENS):
            wide = tokens.astype(np.int64)
            for begin, end in pairwise(bounds.tolist()):
                hashes += xxhash.xxh3_128_digest(wide[begin:end].data)
        return hashes
    paths = inspection.data_files(path, text_field)
    for _, _, text in inspection.read_with_progress("reading", paths, Tally(), text_field=text_field):
        hashes += xxhash.xxh3_128_digest(text.encode())
    return hashes
