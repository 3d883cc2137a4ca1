"""The corpus of a run that names none: sources of Python and torch, tokenized with a BPE trained on them.

It is built once per data folder, versions and vocabulary size, and reused afterwards. The folder gets its
name when it is complete, so a folder of that name is a finished corpus.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from tokenizers import Tokenizer

from moe_exp.config import setting_error
from moe_exp.config.checks.checks import EMBEDDED_VOCAB_SIZE
from moe_exp.data.download.sources import (
    PYTHON_STDLIB_LICENSE,
    TORCH_LICENSE,
    path_hash,
    python_stdlib_documents,
    torch_documents,
)
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import BinIdxWriter, bin_idx_problem
from moe_exp.host.files import bytes_text, read_json

logger = logging.getLogger(__name__)

_SMALLEST_FREE_BYTES = 200 * 10**6
_DOCUMENTS_PER_CHUNK = 64
_MOST_TORCH_BYTES = 20 * 10**6
_TEXTS_PER_BPE_TEXT = 4


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Paths and sizes of the corpus; token counts include one end-of-document token per document."""

    train_prefix: str
    valid_prefix: str
    tokenizer_path: str
    num_train_tokens: int
    num_valid_tokens: int
    num_documents: int
    was_cached: bool


def embedded_folder(data_dir: Path, vocab_size: int = EMBEDDED_VOCAB_SIZE) -> Path:
    """Folder of the corpus for these versions of Python and torch; its tokenizer.json is the tokenizer."""
    return data_dir / f"python_{platform.python_version()}_torch_{_torch_version()}_bpe{vocab_size}"


def _torch_version() -> str:
    """Version of torch without its build tag, "none" if torch is not installed."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "none"


def ensure_embedded_corpus(data_dir: Path, vocab_size: int = EMBEDDED_VOCAB_SIZE) -> EmbeddedCorpus:
    """Builds the corpus under `data_dir`, or finds the one there. Processes that call it at once build one.

    Args:
        data_dir: folder of all prepared corpora; made if it does not exist, only read if the corpus is there.
        vocab_size: tokens of the BPE, at least 257.

    Raises:
        ValueError: `data_dir` cannot be written, less than 200 MB are free, or `vocab_size` is too small.
    """
    data_dir = Path(data_dir)
    folder = embedded_folder(data_dir, vocab_size)
    if not _problems(folder):
        return _open(folder, was_cached=True)
    _check_writable(data_dir)
    with _lock(folder):
        problems = _problems(folder)
        if not problems:  # another process has built it in the meantime
            return _open(folder, was_cached=True)
        if folder.exists():
            logger.warning("embedded corpus: built again, as %s", "; ".join(problems))
        _build(folder, vocab_size)
    return _open(folder, was_cached=False)


def _problems(folder: Path) -> list[str]:
    """Why the folder cannot be used; nothing if it is complete."""
    names = [name for name in ("manifest.json", "tokenizer.json") if not (folder / name).is_file()]
    missing = [f"{folder / name} is missing" for name in names]
    return missing + [wrong for name in ("train", "valid") if (wrong := bin_idx_problem(folder / name))]


def _open(folder: Path, *, was_cached: bool) -> EmbeddedCorpus:
    manifest = read_json(folder / "manifest.json", fix=f"remove {folder}, and it is made again")
    train, valid = manifest["train"], manifest["valid"]
    return EmbeddedCorpus(
        str(folder / "train"),
        str(folder / "valid"),
        str(folder / "tokenizer.json"),
        num_train_tokens=train["num_tokens"],
        num_valid_tokens=valid["num_tokens"],
        num_documents=train["num_documents"] + valid["num_documents"],
        was_cached=was_cached,
    )


def _check_writable(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        # Permission bits say nothing about a read-only file system, and root passes all of them.
        probe = data_dir / ".write_probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        rule = f"the embedded corpus cannot be written there ({error.strerror})"
        fix = "set DATA_DIR to a folder that you can write to, or set TRAIN_DATA"
        raise setting_error("data_dir", data_dir, rule, fix) from error
    free_bytes = shutil.disk_usage(data_dir).free
    if free_bytes < _SMALLEST_FREE_BYTES:
        rule = (
            f"has {bytes_text(free_bytes)} free, the embedded corpus needs {bytes_text(_SMALLEST_FREE_BYTES)}"
        )
        raise setting_error("data_dir", data_dir, rule, "free some space, or set DATA_DIR to another disk")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("embedded corpus: waiting for the process that builds %s", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, vocab_size: int) -> None:
    started = time.monotonic()
    # One fixed name is enough under the lock, and it makes sure that what a killed process left is cleared
    # away.
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        manifest = _write_corpus(building, vocab_size)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    num_tokens = manifest["train"]["num_tokens"] + manifest["valid"]["num_tokens"]
    logger.info(
        "embedded corpus: %.1fM tokens in %s, %.1f s", num_tokens / 1e6, folder, time.monotonic() - started
    )


def _write_corpus(folder: Path, vocab_size: int) -> dict[str, Any]:
    with _step("reading the sources of Python and torch"):
        documents = _documents()
    held_out = {path: text for path, text in documents if _is_held_out(path)}
    parts = {
        "train": [text for path, text in documents if path not in held_out],
        # In random order: a short validation reads only the first, and neighbors by path are similar.
        "valid": [held_out[path] for path in sorted(held_out, key=path_hash)],
    }
    manifest: dict[str, Any] = {
        "source": "Python standard library without tests, and a sample of torch's .py files",
        "license": f"{PYTHON_STDLIB_LICENSE} and {TORCH_LICENSE}",
        "python_version": platform.python_version(),
        "torch_version": _torch_version(),
        "vocab_size": vocab_size,
    }
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in parts.items()}
    counts = {name: {"num_documents": len(parts[name]), "num_bytes": sizes[name]} for name in parts}
    # A quarter of the texts: on all of them, training takes four times as long for hardly fewer tokens.
    sample = parts["train"][::_TEXTS_PER_BPE_TEXT]
    size = bytes_text(sum(len(text.encode()) for text in sample))
    with _step(f"training a BPE of {vocab_size} tokens on {size}"):
        tokenizer = train_bpe(sample, vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, texts in parts.items():
        with _step(f"tokenizing {len(texts)} files, {bytes_text(sizes[name])}, into {name}.bin"):
            counts[name]["num_tokens"] = _write_tokens(folder / name, tokenizer, texts)
    manifest |= counts
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _documents() -> list[tuple[str, str]]:
    return [*python_stdlib_documents(), *torch_documents(_MOST_TORCH_BYTES)]


def _is_held_out(path: str) -> bool:
    """Holds out one file in 20, by a hash of its path: it stays so whatever other files come and go."""
    return int.from_bytes(path_hash(path)[:4], "big") % 20 == 0


def _write_tokens(prefix: Path, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Writes the documents and returns the number of tokens."""
    # A document that quotes <|endoftext|> does not end there.
    tokenizer.encode_special_tokens = True
    with BinIdxWriter(prefix, vocab_size=tokenizer.get_vocab_size()) as writer:
        for first in range(0, len(texts), _DOCUMENTS_PER_CHUNK):
            for encoding in tokenizer.encode_batch_fast(texts[first : first + _DOCUMENTS_PER_CHUNK]):
                writer.add_document(encoding.ids)
    return writer.num_tokens


@contextmanager
def _step(message: str) -> Iterator[None]:
    """A spinner on a terminal, and a log line with the time taken everywhere."""
    started = time.monotonic()
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"embedded corpus: {message}"):
            yield
    else:
        yield
    logger.info("embedded corpus: %s (%.1f s)", message, time.monotonic() - started)
