"""TRAIN_DATA or VALID_DATA that names text instead of token files: tokenized once, under DATA_DIR.

    DATA_DIR/NAME_1a2b3c4d/   train.bin .idx .manifest.json, valid.* of the documents held out,
                              tokenizer/ if one was trained, text.json

A folder of that name is complete. It is used again while names, sizes and contents of the files, the
tokenizer and the options are the same. The documents held out are chosen by their text, so a text that was
trained on is not held out after other files were added.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import xxhash
from filelock import FileLock, Timeout

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.setting_types import blend_members, is_text, names_text
from moe_exp.data.documents import estimate_line_bytes, find_inputs, read_lines
from moe_exp.data.kinds import TABLE_SUFFIXES, TEXT_SUFFIXES, BadDocument, TextRule, table_schema
from moe_exp.data.shuffle.shuffle import shuffle
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.preprocess import sample_texts, tokenize_files
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_named_tokenizer
from moe_exp.data.tokens.tokenizer_training import train_tokenizer
from moe_exp.host.exit_codes import PREPARED_TEXT
from moe_exp.host.files import bytes_text, file_hash, read_json, write_json
from moe_exp.host.progress import progress

logger = logging.getLogger(__name__)

FACTS = "text.json"
_FORMAT = 1
_FEWEST_DOCUMENTS, _PIECES, _SHORTEST_PIECE = 20, 100, 2**11
_HELD_OUT, _MOST_HELD_OUT, _FEWEST_HELD_OUT = 0.01, 0.1, 8
_SMALLEST_VOCAB, _LARGEST_VOCAB, _BYTES_PER_TOKEN_TYPE = 512, 32768, 1000
_TOKENIZER_BYTES = 300 * 10**6  # of text that a tokenizer is trained on
_BYTES_PER_WORKER = 2**24
_SAMPLE_BYTES = 2**16
_MOST_NAMED = 3
_MORE = "add more text, or set VALID_DATA to another text"


@dataclass(frozen=True)
class Prepared:
    """Token files made of text.

    Args:
        folder: that they are in.
        facts: of text.json.
    """

    folder: Path
    facts: Mapping[str, Any]

    @property
    def train(self) -> str:
        """Prefix of the training tokens."""
        return str(self.folder / "train")

    @property
    def valid(self) -> str:
        """Prefix of the tokens that are held out, or ''."""
        return str(self.folder / "valid") if self.facts.get("valid") else ""

    @property
    def tokenizer(self) -> str:
        """The tokenizer that was trained on the text, or the one that was given."""
        return self.facts["tokenizer_path"] or str(self.folder / "tokenizer")

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer."""
        return int(self.facts["vocab_size"])


@dataclass(frozen=True)
class TextSource:
    """Text to prepare.

    Args:
        setting: train_data or valid_data.
        name: the path or pattern that it has.
        files: of its documents.
        text_field: field or column with the text.
        rule: what a document of a text file is.
        tokenizer: the given one; None: train one on the text.
        vocab_size: of the tokenizer to train; 0: none.
        holds_out: whether some documents are kept for validation.
    """

    setting: str
    name: str
    files: Sequence[Path]
    text_field: str
    rule: TextRule
    tokenizer: TextTokenizer | None
    vocab_size: int
    holds_out: bool

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the files that the result depends on."""
        given = {"tokenizer": self.tokenizer.facts() if self.tokenizer else None}
        options = {"text_field": self.text_field, "documents": self.rule.documents}
        plain: dict[str, Any] = json.loads(json.dumps(given | options))
        return plain | {"vocab_size": self.vocab_size, "holds_out": self.holds_out, "format": _FORMAT}

    @property
    def place(self) -> str:
        """Absolute path or pattern."""
        return _place(self.name)

    def listing(self) -> list[dict[str, Any]]:
        """Name, size and time of each file."""
        root = os.path.commonpath([path.absolute().parent for path in self.files])
        found = []
        for path in self.files:
            stat = path.stat()
            name = os.path.relpath(path.absolute(), root)
            found.append({"name": name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
        return found


def _place(name: str) -> str:
    return os.path.abspath(Path(name).expanduser())  # noqa: PTH100  # of a pattern, too


# From settings


def fitting_vocab_size(config: Config) -> int | None:
    """VOCAB_SIZE for the tokenizer that would be trained on TRAIN_DATA; None if there is one, or no text.

    A power of two of about a thousandth of the text's bytes, from 512 to 32768.
    """
    if config.tokenizer or not names_text(config.train_data):
        return None
    with suppress(ValueError, OSError):  # the checks of files name it
        num_bytes, size = estimate_line_bytes(text_sources(config)[0].files), _SMALLEST_VOCAB
        while size < _LARGEST_VOCAB and 2 * size * _BYTES_PER_TOKEN_TYPE <= num_bytes:
            size *= 2
        return size
    return None


def with_prepared_text(config: Config) -> Config:
    """`config` with token files and tokenizer in place of the text that it names; prepares what is missing.

    A tokenizer that is trained has VOCAB_SIZE tokens, or fewer if the text gives no more.

    Raises:
        ConfigError: text or DATA_DIR cannot be used; a package is missing.
    """
    if not (names_text(config.train_data) or names_text(config.valid_data)):
        return config
    with _as_config_error():
        ensure = partial(ensure_prepared, data_dir=Path(config.data_dir))
        return _resolved(config, ensure, is_text)


def prepared_by_launcher(config: Config) -> Config:
    """`with_prepared_text` in a rank: the launcher has prepared it, except with torchrun alone."""
    if not (names_text(config.train_data) or names_text(config.valid_data)):
        return config
    if made := os.environ.get(PREPARED_TEXT):
        return config.model_copy(update=json.loads(made))
    return with_prepared_text(config)


def facts_for_ranks(prepared: Config) -> str:
    """The value of PREPARED_TEXT, from what `with_prepared_text` gave."""
    return json.dumps({name: getattr(prepared, name) for name in ("train_data", "valid_data", "tokenizer")})


def find_prepared_text(config: Config) -> Config:
    """`with_prepared_text` for a run that was trained: prepares nothing.

    If files have changed since, or are gone, the newest preparation of the same text is used and logged.

    Raises:
        ValueError: there is none.
    """
    known = _known_places(Path(config.data_dir))

    def is_known(name: str) -> bool:
        return is_text(name) or _place(name) in known

    if not any(
        is_known(name) for _, name in blend_members(config.train_data) + blend_members(config.valid_data)
    ):
        return config
    find = partial(_find, data_dir=Path(config.data_dir))
    return _resolved(config, find, is_known)


def text_problems(config: Config) -> list[str]:
    """Problems with the text that settings name, found without reading all of it."""
    try:
        for source in text_sources(config):
            with _named(source):
                _check_first_documents(source)
    except ConfigError as error:
        return error.problems
    except (ValueError, OSError) as error:
        return [_line(error)]
    return []


def plan_text(config: Config) -> list[str]:
    """Lines about what a start of these settings would prepare, for a dry run. Writes nothing."""
    lines = []
    for source in text_sources(config):
        size = bytes_text(sum(path.stat().st_size for path in source.files))
        what = f"{source.setting.upper()}: {len(source.files)} files, {size}"
        if found := _matching(source, Path(config.data_dir)):
            lines.append(f"{what}, prepared already in {found.folder}")
            continue
        tokenizer = source.tokenizer.name if source.tokenizer else ""
        made = tokenizer or f"a tokenizer of {source.vocab_size} tokens, trained on it"
        held_out = ", documents held out for validation" if source.holds_out else ""
        lines.append(f"{what}, would be tokenized with {made}{held_out}, into {_folder(source, config)}")
    return lines


def text_sources(config: Config, is_text: Callable[[str], bool] = is_text) -> list[TextSource]:
    """The text of TRAIN_DATA and VALID_DATA. A tokenizer that would be trained on the first is None for both.

    Raises:
        ValueError: a path, TOKENIZER or their combination cannot be used.
    """
    problems = []
    texts = [name for _, name in blend_members(config.train_data) if is_text(name)]
    tokenizer = None
    if config.tokenizer:
        tokenizer = _loaded(config.tokenizer)
    elif len(blend_members(config.train_data)) > 1 or not texts:
        rule = "is a blend with text" if texts else "is text, and the tokenizer of TRAIN_DATA is not known"
        name, value = ("train_data", config.train_data) if texts else ("valid_data", config.valid_data)
        fix = "set TOKENIZER; moe-exp data train-tokenizer trains one"
        problems.append(problem(name, value, f"{rule}, which needs one tokenizer", fix))
    others = [name for _, name in blend_members(config.train_data) if not is_text(name)]
    holds_out = not config.valid_data and not config.split
    if texts and others and holds_out and config.eval_interval:
        rule = f"holds out documents of text only, and {others[0]} is token files"
        problems.append(problem("train_data", config.train_data, rule, "set VALID_DATA or SPLIT=99,1"))
    if problems:
        raise ConfigError(problems)
    sources = [_source(config, "train_data", name, tokenizer, holds_out=holds_out) for name in texts]
    valid = [name for _, name in blend_members(config.valid_data) if is_text(name)]
    return sources + [_source(config, "valid_data", name, tokenizer, holds_out=False) for name in valid]


def _source(
    config: Config, setting: str, name: str, tokenizer: TextTokenizer | None, *, holds_out: bool
) -> TextSource:
    # one that is gone was prepared before (find_prepared_text)
    files = find_inputs([Path(name).expanduser()], setting.upper()) if is_text(name) else []
    rule = TextRule(config.text_documents)
    if rule.documents == "file" and len(files) < _FEWEST_DOCUMENTS:
        # of few long texts, pieces are held out
        num_bytes = sum(path.stat().st_size for path in files if path.name.endswith(TEXT_SUFFIXES))
        piece_bytes = max(_SHORTEST_PIECE, min(rule.longest_bytes, num_bytes // _PIECES))
        rule = TextRule(rule.documents, piece_bytes)
    vocab_size = 0 if tokenizer else config.vocab_size
    return TextSource(setting, name, files, config.text_field, rule, tokenizer, vocab_size, holds_out)


def _resolved(
    config: Config,
    prepare: Callable[[TextSource], Prepared],
    is_text: Callable[[str], bool],
) -> Config:
    valid_given, tokenizer = bool(config.valid_data), config.tokenizer
    sources = {(source.setting, source.name): source for source in text_sources(config, is_text)}
    blends: dict[str, list[str]] = {"train_data": [], "valid_data": []}
    for setting in ("train_data", "valid_data"):
        for weight, name in blend_members(getattr(config, setting)):
            source = sources.get((setting, name))
            words = [weight] if weight else []
            if source is None:
                blends[setting] += [*words, name]
                continue
            if source.tokenizer is None and tokenizer:  # trained on TRAIN_DATA
                source = replace(source, tokenizer=_loaded(tokenizer), vocab_size=0)
            with _named(source):
                made = prepare(source)
            blends[setting] += [*words, made.train]
            tokenizer = tokenizer or made.tokenizer
            if setting == "train_data" and made.valid and not valid_given:
                blends["valid_data"] += [*words, made.valid]
    prefixes = {setting: " ".join(words) for setting, words in blends.items()}
    return config.model_copy(update=prefixes | {"tokenizer": tokenizer})


def _loaded(name: str) -> TextTokenizer:
    tokenizer = load_named_tokenizer(name)
    if tokenizer.eod_id is None:
        fix = "name one as eos_token in its tokenizer_config.json"
        raise ValueError(problem("tokenizer", name, "names no token that ends a document", fix))
    return tokenizer


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(_line(error).splitlines()) from None


@contextmanager
def _named(source: TextSource) -> Iterator[None]:
    """Errors of documents and of packages name the setting."""
    try:
        yield
    except BadDocument as error:
        path = os.path.relpath(error.path, Path(source.name).expanduser()) if source.name else error.path
        where = error.path if path.startswith("..") or path == "." else path
        rule, fix = f"{where}, line {error.line_number}: {error.reason}", error.fix
        fixed = fix or "correct the line, or leave the file out"
        raise ValueError(problem(source.setting, source.name, rule, fixed)) from error
    except ModuleNotFoundError as error:
        rule, fix = f"reading it needs the package {error.name}", 'pip install "moe-exp[data]"'
        raise ValueError(problem(source.setting, source.name, rule, fix)) from error


def _line(error: Exception) -> str:
    """What a user can fix, in a line."""
    if isinstance(error, OSError):
        fix = "make it readable, or set DATA_DIR to a folder that you can write to"
        return f"{error.filename or 'DATA_DIR'}: {error.strerror or error}. Fix: {fix}."
    return str(error).replace("--text-field", "TEXT_FIELD the name of the column with the text")


def _check_first_documents(source: TextSource) -> None:
    """Whether the first file of each kind has text, as far as its beginning shows."""
    if not any(path.stat().st_size for path in source.files):
        fix = "give files with text"
        raise ValueError(problem(source.setting, source.name, "has only empty files", fix))
    seen = set()
    for path in source.files:
        if path.suffix in seen or not path.stat().st_size:
            continue
        seen.add(path.suffix)
        field = source.text_field
        if path.suffix in TABLE_SUFFIXES:
            names = table_schema(path).names
        else:
            lines = islice(read_lines(path, text_field=field, rule=source.rule), 1)
            names = next((_fields(line) for _, line in lines), None)
        if names is not None and field not in names:
            texts = ", ".join(names) or "nothing"
            rule = f"{path.name} has no field {field!r}, but {texts}"
            fix = "set TEXT_FIELD to the field with the text"
            raise ValueError(problem(source.setting, source.name, rule, fix))


def _fields(line: bytes) -> list[str] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None  # reading names the line
    return list(row) if isinstance(row, dict) else None


# Finding what is prepared


def _folder(source: TextSource, config: Config) -> Path:
    return Path(config.data_dir) / _folder_name(source)


def _folder_name(source: TextSource) -> str:
    """The same on every node: of the name, the options and the files."""
    parts = [source.options, source.listing()]
    key = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:8]
    stem = Path(source.place).name.split(".")[0]
    if any(one in stem for one in "*?["):
        stem = Path(source.place).parent.name
    safe = "".join(one if one.isalnum() or one in "-_" else "_" for one in stem)[:60]
    return f"{safe or 'text'}_{key}"


def _known(source: TextSource, data_dir: Path) -> list[Prepared]:
    """What was made with the same options, the newest first."""
    found = []
    for path in data_dir.glob(f"*/{FACTS}"):
        with suppress(ValueError, OSError):
            facts = read_json(path)
            if isinstance(facts, dict) and facts.get("options") == source.options:
                found.append(Prepared(path.parent, facts))
    return sorted(found, key=lambda one: str(one.facts.get("made_at")), reverse=True)


def _matching(source: TextSource, data_dir: Path) -> Prepared | None:
    """What was made of the same files: by names, sizes and times, or if times differ by their contents."""
    listing = source.listing()
    for one in _known(source, data_dir):
        before = one.facts["files"]
        names = [[(file["name"], file["bytes"]) for file in files] for files in (listing, before)]
        if names[0] != names[1]:
            continue
        pairs = list(zip(source.files, listing, before, strict=True))
        touched = [(path, old["hash"]) for path, new, old in pairs if new["mtime_ns"] != old["mtime_ns"]]
        if all(file_hash(path) == content for path, content in touched):
            if touched:
                _remember_times(one, listing)
            return one
    return None


def _remember_times(prepared: Prepared, listing: Sequence[Mapping[str, Any]]) -> None:
    files = [
        {**old, "mtime_ns": new["mtime_ns"]}
        for old, new in zip(prepared.facts["files"], listing, strict=True)
    ]
    with suppress(OSError):  # a folder that is only read
        write_json(prepared.folder / FACTS, {**prepared.facts, "files": files})


def _known_places(data_dir: Path) -> set[str]:
    places = set()
    for path in data_dir.glob(f"*/{FACTS}"):
        with suppress(ValueError, OSError, AttributeError):
            places.add(read_json(path).get("source"))
    return places


def _find(source: TextSource, data_dir: Path) -> Prepared:
    if found := _matching(source, data_dir) if source.files else None:
        return found
    for one in _known(source, data_dir):
        if one.facts["source"] == source.place:
            logger.warning(
                "%s=%s: changed since it was prepared; %s is used", source.setting, source.name, one.folder
            )
            return one
    rule = f"is text, and what was made of it is not in DATA_DIR={data_dir}"
    raise ValueError(problem(source.setting, source.name, rule, "set DATA_DIR to that of the training"))


# Preparing


def ensure_prepared(source: TextSource, data_dir: Path) -> Prepared:
    """Finds the token files of a text, or makes them. Processes and nodes that call it at once make one.

    Raises:
        ValueError: the text cannot be used.
        OSError: `data_dir` cannot be written.
    """
    if found := _matching(source, data_dir):
        logger.info("%s: prepared before, %s", source.name, _summary(found))
        return found
    data_dir.mkdir(parents=True, exist_ok=True)
    folder = data_dir / _folder_name(source)
    with _lock(folder, source.name):
        if found := _matching(source, data_dir):
            return found
        _log_changes(source, data_dir)
        started = time.monotonic()
        made = _build_again(source, folder)
    logger.info("%s: %s, %.1f s", source.name, _summary(made), time.monotonic() - started)
    return made


@contextmanager
def _lock(folder: Path, name: str) -> Iterator[None]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("%s: waiting for the process that prepares %s", name, folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _summary(made: Prepared) -> str:
    facts = made.facts
    text = f"{facts['train']['num_tokens']:,} tokens of {facts['train']['num_documents']:,} documents"
    if facts.get("valid"):
        valid = facts["valid"]
        text += f", {valid['num_tokens']:,} of {valid['num_documents']:,} held out for validation"
    own = "" if facts["tokenizer_path"] else f", a tokenizer of {made.vocab_size:,} tokens"
    return f"{text}{own}, in {made.folder}"


def _log_changes(source: TextSource, data_dir: Path) -> None:
    """Says why the text is prepared again."""
    earlier = next((one for one in _known(source, data_dir) if one.facts["source"] == source.place), None)
    if earlier is None:
        return
    before = {file["name"]: file for file in earlier.facts["files"]}
    now = {file["name"]: file for file in source.listing()}
    changed = [
        name
        for name in now
        if name in before and any(now[name][key] != before[name][key] for key in ("bytes", "mtime_ns"))
    ]
    kinds = {
        "changed": changed,
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    parts = [
        f"{len(names)} {how} ({', '.join(names[:_MOST_NAMED])})" for how, names in kinds.items() if names
    ]
    if parts:
        what = "%s: prepared again, files differ from those of %s: %s"
        logger.warning(what, source.name, earlier.folder, "; ".join(parts))


def _build_again(source: TextSource, folder: Path) -> Prepared:
    """Resumes what an interrupted start has left, or begins anew if that cannot be used."""
    work = folder.with_name(f"{folder.name}.partial")
    resumes = work.exists()
    try:
        return _build(source, folder, work)
    except BadDocument:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except ValueError:
        shutil.rmtree(work, ignore_errors=True)
        if not resumes:
            raise
    return _build(source, folder, work)


def _build(source: TextSource, folder: Path, work: Path) -> Prepared:
    work.mkdir(exist_ok=True)
    size = sum(path.stat().st_size for path in source.files)
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
        train_tokenizer(documents["train"], work / "tokenizer", **options, max_bytes=_TOKENIZER_BYTES)
        tokenizer = load_named_tokenizer(str(work / "tokenizer"))
    settings = PartSettings(tokenizer, source.text_field, append_eod=True)
    workers = min(os.cpu_count() or 1, 1 + size // _BYTES_PER_WORKER)
    facts: dict[str, Any] = {
        part: _counts(tokenize_files(paths, work / part, settings, workers=workers))
        for part, paths in documents.items()
    }
    facts |= {"source": source.place, "options": source.options, "files": files}
    facts |= {"tokenizer_path": source.tokenizer.name if source.tokenizer else ""}
    facts |= {"vocab_size": tokenizer.vocab_size, "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    shutil.rmtree(work / "documents")
    for left in work.glob(".*.lock"):
        left.unlink()
    write_json(work / FACTS, facts)
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    return Prepared(folder, facts)


def _counts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("num_documents", "num_tokens", "num_text_bytes")}


def _shuffled(source: TextSource, output: Path) -> dict[str, list[Path]]:
    """JSONL files of the training and the held-out documents."""
    share = _held_out_share(source)
    options: dict[str, Any] = {"text_field": source.text_field, "rule": source.rule, "num_shards": 1}
    try:
        manifest = shuffle(source.files, output, name="text", valid_fraction=share, **options)
    except BadDocument:
        raise
    except ValueError as error:
        if "no document in the input" in str(error):
            rule, fix = "has no text", "give files with text"
        elif "for validation" in str(error):
            rule, fix = "has one document, so that none can be held out for validation", _MORE
        else:
            raise
        raise ValueError(problem(source.setting, source.name, rule, fix)) from error
    train, valid = (output / one["name"] for one in reversed(manifest["outputs"]))
    return {"train": [train], "valid": [valid]} if source.holds_out else {"train": [train, valid]}


def _held_out_share(source: TextSource) -> float:
    """1% of the documents, or about eight of fewer than 800, but not more than a tenth."""
    texts = sample_texts(source.files, source.text_field, _SAMPLE_BYTES, source.rule)
    mean_bytes = sum(len(text.encode()) for text in texts) / max(1, len(texts))
    number = max(len(source.files), estimate_line_bytes(source.files) / max(1.0, mean_bytes))
    return min(_MOST_HELD_OUT, max(_HELD_OUT, _FEWEST_HELD_OUT / number))
