"""Tokenizes the text given in data settings, and keeps the tokens in a folder under DATA_DIR for reuse.

    DATA_DIR/NAME_1a2b3c4d/   train.bin .idx .manifest.json, valid.* with the held-out documents,
                              tokenizer/ if one was trained, text.json

The folder has a temporary name until it is complete. It is reused as long as the tokenizer, the options, and
the names, sizes and contents of the files stay the same. A hash of each document's text decides whether it is
held out, so adding files never moves a training document to the held-out set.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from moe_exp.config import setting_error
from moe_exp.data.documents import estimate_line_bytes
from moe_exp.data.kinds import BadDocument, TextRule, total_bytes
from moe_exp.data.shuffle.shuffle import shuffle_documents
from moe_exp.data.stage import Unfinished, locked
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import sample_texts, tokenize_files
from moe_exp.data.tokens.tokenizer import (
    TextTokenizer,
    load_named_tokenizer,
    same_fingerprint,
    tokenizer_fingerprint,
)
from moe_exp.data.tokens.tokenizer_training import train_tokenizer
from moe_exp.host.files import bytes_text, file_hash, read_json, write_json
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

FACTS = "text.json"
_FORMAT = 1


@dataclass(frozen=True)
class TextSource:
    """Text to tokenize, given in a data setting."""

    setting: str  # train_data, valid_data or data_stages
    name: str  # path or pattern in the setting
    files: Sequence[Path]
    text_field: str
    rule: TextRule
    tokenizer: TextTokenizer | None  # None to train one on the text
    vocab_size: int  # of a tokenizer to train, else 0
    holds_out: bool  # whether some documents are held out for validation
    aliases: tuple[str, ...] = ()  # other spellings in DATA_STAGES

    @property
    def options(self) -> dict[str, Any]:
        """Everything that the token files depend on, except the text files."""
        options: dict[str, Any] = {"tokenizer": self.tokenizer.facts() if self.tokenizer else None}
        options |= {"text_field": self.text_field, "documents": self.rule.documents}
        options |= {"vocab_size": self.vocab_size, "holds_out": self.holds_out, "format": _FORMAT}
        return dict(json.loads(json.dumps(options)))

    @cached_property
    def real_files(self) -> frozenset[Path]:
        """Resolved paths of the files, independent of how the setting spells them."""
        return frozenset(path.resolve() for path in self.files)

    def listing(self) -> list[dict[str, Any]]:
        root = os.path.commonpath([path.absolute().parent for path in self.files])
        found = [(os.path.relpath(path.absolute(), root), path.stat()) for path in self.files]
        return [{"name": name, "bytes": one.st_size, "mtime_ns": one.st_mtime_ns} for name, one in found]


def place_of(name: str) -> str:
    return os.path.abspath(Path(name).expanduser())  # noqa: PTH100  # may be a pattern


@dataclass(frozen=True)
class Prepared:
    """Token files created from text, and the contents of text.json."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def train(self) -> str:
        return str(self.folder / "train")

    @property
    def valid(self) -> str:
        """Prefix of the held-out token files, or '' if there are none."""
        return str(self.folder / "valid") if self.facts.get("valid") else ""

    @property
    def tokenizer(self) -> str:
        """Name of the given tokenizer, or folder of the tokenizer trained on the text."""
        return self.facts["tokenizer_path"] or str(self.folder / "tokenizer")


# Finding preparations


def folder_name(source: TextSource) -> str:
    """Folder name derived from the text's name, options and files; the same on every node."""
    parts = [source.options, source.listing()]
    # without hashes of contents: every node computes the name, and reading all files would be slow
    key = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:8]
    stem = Path(place_of(source.name)).name.split(".")[0]
    if any(one in stem for one in "*?["):
        stem = Path(place_of(source.name)).parent.name
    safe = "".join(one if one.isalnum() or one in "-_" else "_" for one in stem)[:60]
    return f"{safe or 'text'}_{key}"


def _all_prepared(data_dir: Path) -> Iterator[Prepared]:
    for path in data_dir.glob(f"*/{FACTS}"):
        # another process may be removing or writing the folder
        with suppress(ValueError, OSError):
            if isinstance(facts := read_json(path), dict):
                yield Prepared(path.parent, facts)


def _known(source: TextSource, data_dir: Path) -> list[Prepared]:
    """Texts prepared with the options of `source`, newest first."""
    found = [one for one in _all_prepared(data_dir) if one.facts.get("options") == source.options]
    return sorted(found, key=lambda one: str(one.facts.get("made_at")), reverse=True)


def known_places(data_dir: Path) -> set[str]:
    """Sources of all prepared texts, as absolute paths or patterns."""
    return {str(one.facts.get("source")) for one in _all_prepared(data_dir)}


def matching(source: TextSource, data_dir: Path) -> Prepared | None:
    """Data prepared from the same files: equal names and sizes, and equal modification times or contents."""
    listing = source.listing()
    for one in _known(source, data_dir):
        before = one.facts["files"]
        names = [[(file["name"], file["bytes"]) for file in files] for files in (listing, before)]
        if names[0] != names[1]:
            continue
        pairs = list(zip(source.files, listing, before, strict=True))
        touched = [(path, old["hash"]) for path, new, old in pairs if new["mtime_ns"] != old["mtime_ns"]]
        # copies and checkouts change modification times, not contents
        if all(file_hash(path) == content for path, content in touched):
            if touched:
                files = [{**old, "mtime_ns": new["mtime_ns"]} for _, new, old in pairs]
                with suppress(OSError):  # read-only folder
                    write_json(one.folder / FACTS, {**one.facts, "files": files})
            return one
    return None


def find_prepared(source: TextSource, data_dir: Path, *, trained: str = "") -> Prepared:
    """Prepared data that a run was trained on. `trained`: the run's tokenizer fingerprint, '' if unknown."""

    def is_its_own(one: Prepared) -> bool:
        return not trained or same_fingerprint(tokenizer_fingerprint(one.tokenizer), trained)

    if source.files and (found := matching(source, data_dir)) and is_its_own(found):
        return found
    for one in _known(source, data_dir):
        if one.facts["source"] == place_of(source.name) and is_its_own(one):
            what = "%s=%s: files have changed since the text was prepared; using %s"
            logger.warning(what, source.setting, source.name, one.folder)
            return one
    rule = f"is text, and its token files were not found in DATA_DIR={data_dir}"
    raise setting_error(source.setting, source.name, rule, "set DATA_DIR to the folder used for training")


# Preparing


def ensure_prepared(source: TextSource, data_dir: Path) -> Prepared:
    """Finds or creates a text's token files; only one process across all nodes creates them."""
    if found := matching(source, data_dir):
        logger.info("%s: already prepared, %s", source.name, _summary(found))
        return found
    folder = data_dir / folder_name(source)
    with locked(folder, f"{source.name}: waiting for the process that prepares {folder}"):
        if found := matching(source, data_dir):
            return found
        # explain why the text is prepared again
        if known := [one for one in _known(source, data_dir) if one.facts["source"] == place_of(source.name)]:
            before = {file["name"]: file for file in known[0].facts["files"]}
            now = {file["name"]: file for file in source.listing()}
            both = [name for name in now if name in before]
            kinds = {
                "changed": [name for name in both if now[name].items() - before[name].items()],
                "new": [name for name in now if name not in before],
                "gone": [name for name in before if name not in now],
            }
            parts = [f"{len(names)} {how} ({', '.join(names[:3])})" for how, names in kinds.items() if names]
            if parts:
                what = "%s: preparing again because files differ from those prepared in %s: %s"
                logger.warning(what, source.name, known[0].folder, "; ".join(parts))
        started = time.monotonic()
        made = _build_again(source, folder)
    logger.info("%s: %s, %.1f s", source.name, _summary(made), time.monotonic() - started)
    return made


def _summary(made: Prepared) -> str:
    facts = made.facts
    text = f"{facts['train']['num_tokens']:,} tokens from {facts['train']['num_documents']:,} documents"
    if valid := facts.get("valid"):
        text += f", {valid['num_tokens']:,} from {valid['num_documents']:,} held out for validation"
    own = "" if facts["tokenizer_path"] else f", a tokenizer with {facts['vocab_size']:,} tokens"
    return f"{text}{own}, in {made.folder}"


def _build_again(source: TextSource, folder: Path) -> Prepared:
    """Builds the folder. Resumes an interrupted build unless its files belong to other texts or settings."""
    work = folder.with_name(f"{folder.name}.partial")
    resumes = work.exists()
    try:
        return _build(source, folder, work)
    except Unfinished:
        raise
    except ValueError as error:
        # leftover files may belong to other files or settings: retry once without them
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, BadDocument) or not resumes:
            raise
    return _build(source, folder, work)


def _build(source: TextSource, folder: Path, work: Path) -> Prepared:
    work.mkdir(exist_ok=True)
    size = total_bytes(source.files)
    logger.info("%s: preparing %d files, %s", source.name, len(source.files), bytes_text(size))
    files = source.listing()
    with progress("hashing", size) as advance:
        for path, file in zip(source.files, files, strict=True):
            file["hash"] = file_hash(path)
            advance(file["bytes"])
    documents = _shuffled(source, work / "documents")
    tokenizer = source.tokenizer
    if tokenizer is None:
        options: dict[str, Any] = {"vocab_size": source.vocab_size, "json_key": source.text_field}
        train_tokenizer(documents["train"], work / "tokenizer", **options, max_bytes=300 * 10**6)
        tokenizer = load_named_tokenizer(str(work / "tokenizer"))
    tokenizer.log_left_out()
    settings = PartSettings(tokenizer, source.text_field, append_eod=True)
    # another process is worth its start-up time for 16 MB
    workers = min(os.cpu_count() or 1, 1 + size // 2**24)
    facts: dict[str, Any] = {}
    for part, paths in documents.items():
        manifest = tokenize_files(paths, work / part, settings, workers=workers)
        facts[part] = {name: manifest[name] for name in ("num_documents", "num_tokens", "num_text_bytes")}
    facts |= {"source": place_of(source.name), "options": source.options, "files": files}
    facts |= {"tokenizer_path": source.tokenizer.name if source.tokenizer else ""}
    facts |= {"vocab_size": tokenizer.vocab_size, "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    shutil.rmtree(work / "documents")
    for left in work.glob(".*.lock"):
        left.unlink()
    write_json(work / FACTS, facts)
    # an earlier preparation whose text.json is missing
    shutil.rmtree(folder, ignore_errors=True)
    # last: a folder with the final name is complete
    work.rename(folder)
    return Prepared(folder, facts)


def _shuffled(source: TextSource, output: Path) -> dict[str, list[Path]]:
    """Shuffles the documents into JSONL files. Returns the files of `train` and (if any) `valid`."""
    texts = sample_texts(source.files, source.text_field, 2**22, source.rule)  # cuts texts to a 16th
    mean_bytes = sum(len(text.encode()) for text in texts) / max(1, len(texts))
    number = max(len(source.files), estimate_line_bytes(source.files) / max(1.0, mean_bytes))
    share = min(0.1, max(0.01, 8 / number))  # 1%, or about 8 documents if fewer than 800, at most 10%
    options: dict[str, Any] = {"text_field": source.text_field, "rule": source.rule, "num_shards": 1}
    try:
        manifest = shuffle_documents(source.files, output, name="text", valid_fraction=share, **options)
    except ValueError as error:
        if "has no documents" in str(error):
            rule, fix = "contains no text", "give files with text"
        elif "for validation" in str(error):
            rule = "contains only one document, so none can be held out for validation"
            fix = "add more text, or set VALID_DATA to another text"
        else:
            raise
        raise setting_error(source.setting, source.name, rule, fix) from error
    assert manifest is not None  # no SLURM jobs
    train, valid = (output / one["name"] for one in reversed(manifest["outputs"]))
    return {"train": [train], "valid": [valid]} if source.holds_out else {"train": [train, valid]}
