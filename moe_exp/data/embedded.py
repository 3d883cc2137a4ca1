"""The default corpus: source code of Python and PyTorch, tokenized with a BPE tokenizer trained on it.

The corpus is built once for each combination of data folder, vocabulary size, Python version and PyTorch
version. The folder gets its final name when the corpus is complete.
"""

import logging
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_exp.config import setting_error
from moe_exp.config.sections.data import EMBEDDED_VOCAB_SIZE
from moe_exp.data.download import sources
from moe_exp.data.stage import free_disk, locked
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import bin_idx_problem, write_token_files
from moe_exp.host.files import bytes_text, write_json

logger = logging.getLogger(__name__)

_DOCUMENTS_PER_CHUNK = 64
_TEXTS_PER_BPE_TEXT = 4


@dataclass(frozen=True)
class EmbeddedCorpus:
    """Prefixes of the token files and path of the tokenizer."""

    train_prefix: str
    valid_prefix: str
    tokenizer_path: str


def embedded_folder(data_dir: Path, vocab_size: int = EMBEDDED_VOCAB_SIZE) -> Path:
    """Folder of the corpus and tokenizer.json that belong to the installed versions of Python and PyTorch."""
    return data_dir / f"python_{platform.python_version()}_torch_{_torch_version()}_bpe{vocab_size}"


def _torch_version() -> str:
    with suppress(PackageNotFoundError):
        return version("torch").partition("+")[0]  # without the build tag
    return "none"


def ensure_embedded_corpus(data_dir: Path, vocab_size: int = EMBEDDED_VOCAB_SIZE) -> EmbeddedCorpus:
    """Returns the corpus under `data_dir`, building it if necessary. If several processes call this function
    at once, one of them builds the corpus.

    Args:
        data_dir: folder of all prepared corpora; created if missing, left unchanged if the corpus exists.
        vocab_size: vocabulary size of the BPE, at least 257.

    Raises:
        ValueError: if `data_dir` cannot be written, less than 200 MB are free, or `vocab_size` is too small.
    """
    folder = embedded_folder(data_dir, vocab_size)
    if _problems(folder):
        _check_writable(data_dir)
        with locked(folder, f"embedded corpus: waiting for the process that builds {folder}"):
            if problems := _problems(folder):  # another process may have built it in the meantime
                if folder.exists():
                    logger.warning("embedded corpus: rebuilding it because %s", "; ".join(problems))
                _build(folder, vocab_size)
    return EmbeddedCorpus(*(str(folder / name) for name in ("train", "valid", "tokenizer.json")))


def _problems(folder: Path) -> list[str]:
    names = [name for name in ("manifest.json", "tokenizer.json") if not (folder / name).is_file()]
    missing = [f"{folder / name} is missing" for name in names]
    return missing + [wrong for name in ("train", "valid") if (wrong := bin_idx_problem(folder / name))]


def _check_writable(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        # Permission bits do not show a read-only file system, and do not apply to root.
        probe = data_dir / ".write_probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        rule = f"cannot write the embedded corpus ({error.strerror})"
        fix = "set DATA_DIR to a writable folder, or set TRAIN_DATA"
        raise setting_error("data_dir", data_dir, rule, fix) from error
    if (free_bytes := free_disk(data_dir)) < 200 * 10**6:
        rule = f"has {bytes_text(free_bytes)} free; the embedded corpus requires 200 MB"
        raise setting_error("data_dir", data_dir, rule, "free up space, or set DATA_DIR to another disk")


def _build(folder: Path, vocab_size: int) -> None:
    started = time.monotonic()
    # only one process holds the lock, so an existing folder is left over from a killed process
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        num_tokens = _write_corpus(building, vocab_size)
        shutil.rmtree(folder, ignore_errors=True)
        # last: a folder with the final name is complete
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    seconds = time.monotonic() - started
    logger.info("embedded corpus: %.1fM tokens in %s, %.1f s", num_tokens / 1e6, folder, seconds)


def _write_corpus(folder: Path, vocab_size: int) -> int:
    with _step("reading the source code of Python and PyTorch"):
        documents = embedded_documents()
    # one file in 20, by a hash of its path: independent of which other files are installed
    held_out = {path for path, _ in documents if int.from_bytes(sources.path_hash(path)[:4], "big") % 20 == 0}
    # Random order: a short validation reads only the beginning, and files with nearby paths are similar.
    shuffled = sorted(documents, key=lambda document: sources.path_hash(document[0]))
    parts = {
        "train": [text for path, text in documents if path not in held_out],
        # ordered by hash, which is the same on every machine
        "valid": [text for path, text in shuffled if path in held_out],
    }
    manifest: dict[str, Any] = {
        "source": "Python standard library without tests, and a sample of torch's .py files",
        "license": f"{sources.PYTHON_STDLIB_LICENSE} and {sources.TORCH_LICENSE}",
        "python_version": platform.python_version(),
        "torch_version": _torch_version(),
        "vocab_size": vocab_size,
    }
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in parts.items()}
    counts = {name: {"num_documents": len(parts[name]), "num_bytes": sizes[name]} for name in parts}
    # A quarter of the texts: using all of them takes four times as long and saves hardly any tokens.
    sample = parts["train"][::_TEXTS_PER_BPE_TEXT]
    size = bytes_text(sum(len(text.encode()) for text in sample))
    with _step(f"training a BPE tokenizer with {vocab_size} tokens on {size}"):
        tokenizer = train_bpe(sample, vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # <|endoftext|> inside a document is ordinary text

    def encoded(texts: list[str]) -> Iterator[list[int]]:
        for first in range(0, len(texts), _DOCUMENTS_PER_CHUNK):
            batch = tokenizer.encode_batch_fast(texts[first : first + _DOCUMENTS_PER_CHUNK])
            yield from (encoding.ids for encoding in batch)

    num_ids = tokenizer.get_vocab_size()
    for name, texts in parts.items():
        with _step(f"tokenizing {len(texts)} files ({bytes_text(sizes[name])}) into {name}.bin"):
            num_tokens = write_token_files(folder / name, encoded(texts), vocab_size=num_ids)
        counts[name]["num_tokens"] = num_tokens
    write_json(folder / "manifest.json", manifest | counts)
    return sum(one["num_tokens"] for one in counts.values())


def embedded_documents() -> list[tuple[str, str]]:
    """Path and text of each source file."""
    return [*sources.python_stdlib_documents(), *sources.torch_documents(20 * 10**6)]


@contextmanager
def _step(message: str) -> Iterator[None]:
    # a spinner on a terminal only; the log line with the elapsed time always
    started, console = time.monotonic(), Console(stderr=True)
    with console.status(f"embedded corpus: {message}") if console.is_terminal else nullcontext():
        yield
    logger.info("embedded corpus: %s (%.1f s)", message, time.monotonic() - started)
