"""Whether files are still what their manifest says, and whether two corpora hold the same documents.

Everything is read again and hashed. Memory: 16 bytes a validation document; for a comparison about 50 a
document of both sides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.data.documents import Tally, is_validation_file
from moe_exp.data.inspection import (
    BLOCK_TOKENS,
    Hashes,
    data_files,
    difference,
    documents_with_progress,
    token_blocks,
)
from moe_exp.data.kinds import JSON_FILES, JSON_SUFFIXES, RECORD_SUFFIXES, total_bytes
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.tokens import TokenFiles, bin_idx_problem
from moe_exp.host.files import ending, has_hash, read_json
from moe_exp.host.progress import progress

_HASHES_AT_ONCE = 2**16
_COUNTS = ("num_documents", "num_text_bytes", "text_hash")


@dataclass(frozen=True)
class Finding:
    name: str  # of a file, or what was compared
    problem: str = ""
    facts: str = ""  # for a reader


@dataclass(frozen=True)
class Manifest:
    """A manifest; the names of its outputs are relative to its folder."""

    path: Path
    content: dict[str, Any]
    only: str = ""  # the output that is asked for; empty for all

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Name, bytes and hash of each file that is asked for."""
        return [one for one in self.content["outputs"] if not self.only or one["name"] == self.only]

    @property
    def text_field(self) -> str:
        if self.content.get("stage") == "convert":  # whose setting is the field of its inputs
            return "text"
        return str(self.content.get("settings", {}).get("text_field") or "text")


def find_manifest(path: Path) -> Manifest:
    """The manifest of a folder, of a prefix of token files, or of one of the files that a manifest lists."""
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
                raise TypeError("outputs is no list")
        except (ValueError, KeyError, TypeError) as error:
            fix = "make the files again, or read them with moe-exp data inspect"
            rule = f"is no manifest with a list of outputs ({type(error).__name__}: {error})"
            raise ValueError(f"{candidate}: {rule}. Fix: {fix}.") from error
        found = Manifest(candidate, content, only)
        if found.outputs or not only:
            return found
    fix = "give a folder or file that moe-exp data has made"
    raise ValueError(f"{path}: has no manifest.json, and no manifest.json lists it. Fix: {fix}.")


# Against the manifest


def verify(path: Path) -> Iterator[Finding]:
    """Checks `path` against its manifest: sizes, hashes, token files, documents, validation against training.
    ValueError if there is no manifest, or it is damaged; or a line of JSONL is no document.
    """
    manifest, files = find_manifest(path), list[Finding]()
    num_bytes = sum(int(one["bytes"]) for one in manifest.outputs)
    with progress(f"hashing what {manifest.path} lists", num_bytes) as advance:
        for one in manifest.outputs:
            path, wrong = manifest.path.parent / one["name"], ""
            if not path.is_file():
                wrong = "is missing"
            elif (size := path.stat().st_size) != one["bytes"]:
                wrong = f"has {size:,} bytes, the manifest says {one['bytes']:,}"
            elif not has_hash(path, one["hash"]):
                wrong = "has other content than when it was made: its hash differs"
            files.append(Finding(one["name"], wrong, f"{one['bytes']:,} bytes"))
            advance(int(one["bytes"]))
    yield from files
    if not manifest.only and manifest.path.name == "manifest.json":  # else it is beside files of others
        # unlisted data that a training run or the next step would read
        listed = {one["name"] for one in manifest.outputs}
        # .json files are manifests and notes
        suffixes = tuple({*RECORD_SUFFIXES, ".bin", ".idx"} - {*JSON_FILES})
        for file in sorted(manifest.path.parent.iterdir()):
            if file.is_file() and file.name.endswith(suffixes) and file.name not in listed:
                yield Finding(file.name, "is not in the manifest")
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
            f"has {count:,} {what}, the manifest says {listed[what]:,}"
            for what, count in seen.items()
            if listed[what] != count
        )
        yield Finding(prefix.name, wrong, ", ".join(f"{count:,} {what}" for what, count in seen.items()))


def _document_findings(manifest: Manifest) -> list[Finding]:
    """Reads the documents of JSONL outputs: number per file, all together, and none on both sides."""
    names = [one["name"] for one in manifest.outputs if ending(one["name"]) in JSON_SUFFIXES]
    if not names:
        return []
    expected = manifest.content.get("num_documents")
    found, total, valid, num_shared = list[Finding](), Tally(), Hashes(), 0
    num_bytes = sum((manifest.path.parent / name).stat().st_size for name in names)
    with progress("reading the documents", num_bytes) as advance:
        # Those for validation first, as the others are compared with them.
        for is_validation in (True, False):
            valid_words = valid.sorted_words()
            for name in [one for one in names if is_validation_file(Path(one)) == is_validation]:
                tally = Tally()
                for hashes in hash_blocks(manifest.path.parent / name, tally, advance, manifest.text_field):
                    if is_validation:
                        valid.extend(hashes)
                    else:
                        num_shared += int(hashes.is_in(*valid_words).sum())
                total += tally
                count = tally.num_documents
                # a shuffle counts by file, other steps only in all
                listed = expected.get(name, count) if isinstance(expected, dict) else count
                wrong = f"has {count:,} documents, the manifest says {listed:,}" if count != listed else ""
                found.append(Finding(name, wrong, f"{count:,} documents"))
    if not manifest.only:
        found.append(_total_finding(manifest, total))
    # a single file has no other side
    if len(valid) and len(names) > 1:
        wrong = f"{num_shared:,} training documents are equal to one for validation"
        facts = f"none of {len(valid):,} is in training"
        found.append(Finding("validation against training", wrong if num_shared else "", facts))
    return found


def _total_finding(manifest: Manifest, total: Tally) -> Finding:
    content = manifest.content
    # counts of the output: both sides of a shuffle, those of a conversion, of the manifest itself, of a merge
    sides = [content.get("train"), content.get("valid")]
    for parts in (sides, [content.get("written")], [content], [content.get("read")]):
        tallies = [part for part in parts if isinstance(part, dict) and "text_hash" in part]
        if len(tallies) == len(parts):
            break
    else:
        facts = f"{total.num_documents:,}; the manifest has no counts to compare with"
        return Finding("all documents", "", facts)
    expected = Tally()
    for one in tallies:
        expected += Tally.from_json({"skipped": {}, **one})
    counts, expected_counts = total.to_json(), expected.to_json()
    wrong = "; ".join(
        f"{name} is {counts[name]}, the manifest says {expected_counts[name]}"
        for name in _COUNTS
        if counts[name] != expected_counts[name]
    )
    return Finding("all documents", wrong, f"{total.num_documents:,}, text hash {counts['text_hash']}")


def hash_blocks(
    path: Path, tally: Tally, advance: Callable[[int], None], text_field: str
) -> Iterator[Hashes]:
    """Hashes of the documents of a JSONL file, a block at a time; BadDocument at a line that is none."""
    hashes = Hashes()
    for _, text in documents_with_progress(path, tally, advance, text_field=text_field):
        hashes.add(text.encode())
        if len(hashes) == _HASHES_AT_ONCE:
            yield hashes
            hashes = Hashes()
    yield hashes


# Against another corpus


def compare(path: Path, other: Path, *, text_field: str = "text") -> Finding:
    """Whether two corpora (both JSONL files or folders, or both prefixes of .bin/.idx) hold the same
    documents, each as often, in any files and order.
    """
    is_tokens, other_is_tokens = (
        not one.is_dir() and ending(one) not in JSON_SUFFIXES for one in (path, other)
    )
    if is_tokens != other_is_tokens:
        fix = "give two prefixes of .bin/.idx, or JSONL on both sides"
        raise ValueError(f"{path}: can only be compared with the same kind. Fix: {fix}.")
    hashes = [_all_hashes(one, text_field, is_tokens=is_tokens) for one in (path, other)]
    only_here, only_there = difference(*hashes)
    wrong = f"{only_here:,} documents are not in {other}, {only_there:,} of it are not here"
    wrong = wrong if only_here or only_there else ""
    return Finding(f"{path} against {other}", wrong, f"the same {len(hashes[0]):,} documents")


def _all_hashes(path: Path, text_field: str, *, is_tokens: bool) -> Hashes:
    hashes = Hashes()
    if is_tokens:
        # as int64, so that files of another token type can be compared
        files = TokenFiles(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)
        bounds = files.document_bounds
        for first, end in token_blocks(bounds, BLOCK_TOKENS):
            tokens = files.read(int(bounds[first]), int(bounds[end])).astype(np.int64)
            for begin, stop in pairwise((bounds[first : end + 1] - bounds[first]).tolist()):
                hashes.add(tokens[begin:stop].data)
        return hashes
    paths = data_files(path, text_field)
    with progress("reading", total_bytes(paths)) as advance:
        for one in paths:
            for part in hash_blocks(one, Tally(), advance, text_field):
                hashes.extend(part)
    return hashes
