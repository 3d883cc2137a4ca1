"""The text that data settings name: its files, how they are read, what is wrong with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from moe_exp.config import Config, ConfigError, problem, setting_error
from moe_exp.config.data_stages import stage_blends
from moe_exp.config.setting_types import blend_members, is_text
from moe_exp.data.documents import estimate_line_bytes, find_inputs, read_lines
from moe_exp.data.kinds import TABLE_SUFFIXES, TEXT_SUFFIXES, BadDocument, TextRule, table_schema
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_named_tokenizer
from moe_exp.host.files import ending, is_url

_FORMAT = 1
_FEWEST_DOCUMENTS, _PIECES, _SHORTEST_PIECE = 20, 100, 2**11


@dataclass(frozen=True)
class TextSource:
    """Text to prepare.

    Args:
        setting: train_data, valid_data or data_stages.
        name: the path or pattern that it has.
        files: of its documents.
        text_field: field or column with the text.
        rule: what a document of a text file is.
        tokenizer: the given one; None: train one on the text.
        vocab_size: of the tokenizer to train; 0: none.
        holds_out: whether some documents are kept for validation.
        aliases: other spellings in DATA_STAGES.
    """

    setting: str
    name: str
    files: Sequence[Path]
    text_field: str
    rule: TextRule
    tokenizer: TextTokenizer | None
    vocab_size: int
    holds_out: bool
    aliases: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the files that the result depends on."""
        options: dict[str, Any] = {"tokenizer": self.tokenizer.facts() if self.tokenizer else None}
        options |= {"text_field": self.text_field, "documents": self.rule.documents}
        options |= {"vocab_size": self.vocab_size, "holds_out": self.holds_out, "format": _FORMAT}
        plain: dict[str, Any] = json.loads(json.dumps(options))
        return plain

    @cached_property
    def real_files(self) -> frozenset[Path]:
        """The files, however the name is spelled."""
        return frozenset(path.resolve() for path in self.files)

    @property
    def place(self) -> str:
        """Absolute path or pattern."""
        return place_of(self.name)

    def listing(self) -> list[dict[str, Any]]:
        """Name, size and time of each file."""
        root = os.path.commonpath([path.absolute().parent for path in self.files])
        found = []
        for path in self.files:
            stat = path.stat()
            name = os.path.relpath(path.absolute(), root)
            found.append({"name": name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
        return found


def place_of(name: str) -> str:
    return os.path.abspath(Path(name).expanduser())  # noqa: PTH100  # of a pattern, too


def text_sources(config: Config, is_text: Callable[[str], bool] = is_text) -> list[TextSource]:
    """The text of all data settings. A tokenizer that would be trained on TRAIN_DATA is None for all.

    Raises:
        ValueError: a path, TOKENIZER or their combination cannot be used.
    """
    problems, members = [], [name for _, name in blend_members(config.train_data)]
    texts = [name for name in members if is_text(name)]
    valid = [name for _, name in blend_members(config.valid_data) if is_text(name)]
    staged = [name for blend in stage_blends(config) for _, name in blend_members(blend) if is_text(name)]
    staged = [name for name in dict.fromkeys(staged) if name not in texts]
    settings = {"train_data": texts, "valid_data": valid, "data_stages": staged}
    given = [(setting, name) for setting, names in settings.items() for name in names]
    if not given:
        return []
    tokenizer = None
    if config.tokenizer:
        tokenizer = loaded(config.tokenizer, prepend_bos=config.prepend_bos)
    elif len(members) > 1 or not texts:
        rule = "is a blend with text" if texts else "is text, and the tokenizer of TRAIN_DATA is not known"
        fix = "set TOKENIZER; moe-exp data train-tokenizer trains one"
        first = given[0][0]
        problems.append(problem(first, getattr(config, first), f"{rule}, which needs one tokenizer", fix))
    if config.prepend_bos and not config.tokenizer:
        fix = "set TOKENIZER to one with a BOS, or omit PREPEND_BOS"
        problems.append(problem("prepend_bos", "true", "a tokenizer that is trained here has no BOS", fix))
    others = [name for name in members if not is_text(name)]
    holds_out = not config.valid_data and not config.split
    if texts and others and holds_out and config.eval_interval:
        rule = f"holds out documents of text only, and {others[0]} is token files"
        problems.append(problem("train_data", config.train_data, rule, "set VALID_DATA or SPLIT=99,1"))
    for setting, name in given:
        if is_url(name):
            rule = "is text at an object store, where token files can be"
            fix = f"fetch it with moe-exp data download {name}, and name the folder"
            problems.append(problem(setting, name, rule, fix))
    if problems:
        raise ConfigError(problems)
    sources = [_source(config, "train_data", name, tokenizer, holds_out=holds_out) for name in texts]
    rest = [_source(config, "valid_data", name, tokenizer, holds_out=False) for name in valid]
    for name in staged:
        stage = _source(config, "data_stages", name, tokenizer, holds_out=False)
        shared = [one for one in sources if one.real_files & stage.real_files]
        if same := next((one for one in shared if one.real_files == stage.real_files), None):
            # without the documents that are held out there
            sources[sources.index(same)] = replace(same, aliases=(*same.aliases, name))
        elif shared and not config.valid_data:
            rule = f"has some of the files of TRAIN_DATA={shared[0].name}, of which documents are held out"
            fix = "name all its files, or others, or set VALID_DATA"
            raise ConfigError([problem("data_stages", name, rule, fix)])
        else:
            rest.append(stage)
    return sources + rest


def _source(
    config: Config, setting: str, name: str, tokenizer: TextTokenizer | None, *, holds_out: bool
) -> TextSource:
    # one that is gone was prepared before (find_prepared_text)
    place, field = Path(name).expanduser(), config.text_field
    files = find_inputs([place], setting.upper(), field) if is_text(name) else []
    rule = TextRule(config.text_documents)
    if rule.documents == "file" and len(files) < _FEWEST_DOCUMENTS:
        # of few long texts, pieces are held out
        num_bytes = estimate_line_bytes(path for path in files if ending(path) in TEXT_SUFFIXES)
        piece_bytes = max(_SHORTEST_PIECE, min(rule.longest_bytes, num_bytes // _PIECES))
        rule = TextRule(rule.documents, piece_bytes)
    vocab_size = 0 if tokenizer else config.vocab_size
    return TextSource(setting, name, files, field, rule, tokenizer, vocab_size, holds_out)


def loaded(name: str, *, prepend_bos: bool = False) -> TextTokenizer:
    tokenizer = load_named_tokenizer(name, prepend_bos=prepend_bos)
    if tokenizer.eod_id is None:
        fix = "name one as eos_token in its tokenizer_config.json"
        raise setting_error("tokenizer", name, "names no token that ends a document", fix)
    return tokenizer


@contextmanager
def named_errors(source: TextSource) -> Iterator[None]:
    """Errors of documents and of packages name the setting."""
    try:
        yield
    except BadDocument as error:
        path = os.path.relpath(error.path, Path(source.name).expanduser()) if source.name else error.path
        where = error.path if path.startswith("..") or path == "." else path
        rule = f"{where}, line {error.line_number}: {error.reason}"
        fix = error.fix or "correct the line, or leave the file out"
        raise setting_error(source.setting, source.name, rule, fix) from error
    except ModuleNotFoundError as error:
        rule, fix = f"reading it needs the package {error.name}", 'pip install "moe-exp[data]"'
        raise setting_error(source.setting, source.name, rule, fix) from error


def check_first_documents(source: TextSource) -> None:
    """Whether the first file of each kind has text, as far as its beginning shows."""
    if not any(path.stat().st_size for path in source.files):
        fix = "give files with text"
        raise setting_error(source.setting, source.name, "has only empty files", fix)
    seen = set()
    for path in source.files:
        if (kind := ending(path)) in seen or not path.stat().st_size:
            continue
        seen.add(kind)
        field = source.text_field
        if kind in TABLE_SUFFIXES:
            names = table_schema(path).names
        else:
            _, line = next(read_lines(path, text_field=field, rule=source.rule), (0, b""))
            names = None
            with suppress(orjson.JSONDecodeError):  # reading names the line
                row = orjson.loads(line)
                names = list(row) if isinstance(row, dict) else None
        if names is not None and field not in names:
            texts = ", ".join(names) or "nothing"
            rule = f"{path.name} has no field {field!r}, but {texts}"
            fix = "set TEXT_FIELD to the field with the text"
            raise setting_error(source.setting, source.name, rule, fix)
