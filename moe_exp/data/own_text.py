"""Replaces text and remote token files in data settings with local token files, and sets TOKENIZER."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson

from moe_exp.config import Config, ConfigError, problem, setting_error
from moe_exp.config.setting_types import blend_members, is_prepared_first, is_text, names_text
from moe_exp.data import prepared_text
from moe_exp.data.documents import estimate_line_bytes, find_inputs, read_lines
from moe_exp.data.kinds import TEXT_SUFFIXES, BadDocument, TextRule, total_bytes
from moe_exp.data.prepared_text import FACTS, Prepared, TextSource, ensure_prepared
from moe_exp.data.tokens.ranged import ensure_index, find_tokens
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_named_tokenizer
from moe_exp.host.exit_codes import PREPARED_TEXT
from moe_exp.host.files import bytes_text, ending, is_url


def fitting_vocab_size(config: Config) -> int | None:
    """VOCAB_SIZE for a tokenizer trained on TRAIN_DATA; None if TOKENIZER is set or TRAIN_DATA has no text.

    The result is a power of two from 512 to 32768, near 1/1000 of the text's size in bytes.
    """
    if config.tokenizer or not names_text(config.train_data):
        return None
    with suppress(ValueError, OSError):  # `text_problems` reports the error
        num_bytes, size = estimate_line_bytes(_text_sources(config)[0].files), 512
        while size < 32768 and 2 * size * 1000 <= num_bytes:
            size *= 2
        return size
    return None


def needs_preparation(config: Config) -> bool:
    """Whether TRAIN_DATA, VALID_DATA or DATA_STAGES refer to text or to remote token files."""
    return any(map(is_prepared_first, (config.train_data, config.valid_data, *config.stage_blends)))


def with_prepared_text(config: Config) -> Config:
    """Prepares data if necessary; returns `config` with token files in place of text and URLs.

    A trained tokenizer has VOCAB_SIZE tokens, or fewer if the text is too short. Raises ConfigError if the
    text or DATA_DIR cannot be used, or a package is missing.
    """
    if not needs_preparation(config):
        return config
    try:
        return _resolved(config, partial(ensure_prepared, data_dir=Path(config.data_dir)), is_text)
    except (ValueError, OSError) as error:
        raise ConfigError(_problems(error)) from None


def already_prepared(config: Config) -> Config | None:
    """Result of `with_prepared_text` if all data are local and prepared; otherwise None."""
    blends = (config.train_data, config.valid_data, *config.stage_blends)
    if any(is_url(name) for blend in blends for _, name in blend_members(blend)):
        return None

    def found(source: TextSource) -> Prepared:
        if (made := prepared_text.matching(source, Path(config.data_dir))) is None:
            raise LookupError
        return made

    try:
        return _resolved(config, found, is_text) if needs_preparation(config) else config
    except (LookupError, ValueError, OSError):  # `text_problems` reports the error
        return None


def prepared_by_launcher(config: Config) -> Config:
    """Returns the launcher's result of `with_prepared_text`; without a launcher, prepares the data here."""
    if not needs_preparation(config):
        return config
    # all ranks use what the launcher resolved, even if files have changed since
    if made := os.environ.get(PREPARED_TEXT):
        return config.model_copy(update=json.loads(made))
    return with_prepared_text(config)


def facts_for_ranks(prepared: Config) -> str:
    """Converts the result of `with_prepared_text` to the value of PREPARED_TEXT."""
    names = ("train_data", "valid_data", "data_stages", "tokenizer")
    return json.dumps({name: getattr(prepared, name) for name in names})


def find_prepared_text(config: Config, trained: str = "") -> Config:
    """Like `with_prepared_text`, but prepares nothing: finds the data of an already trained run.

    If files have changed or are missing, logs a warning and uses the newest preparation of the same text.
    Raises ValueError if there is no preparation. `trained`: fingerprint of the run's tokenizer (empty: any).
    """
    known = prepared_text.known_places(Path(config.data_dir))
    config = config.model_copy(update={"data_stages": ""})  # only used in training

    def is_known(name: str) -> bool:
        return is_text(name) or prepared_text.place_of(name) in known

    members = blend_members(config.train_data) + blend_members(config.valid_data)
    if not any(is_known(name) or is_url(name) for _, name in members):
        return config
    find = partial(prepared_text.find_prepared, data_dir=Path(config.data_dir), trained=trained)
    return _resolved(config, find, is_known)


def text_problems(config: Config) -> list[str]:
    """Returns problems of the text that data settings name, without reading all of the text."""
    try:
        for source in _text_sources(config):
            with _named_errors(source):
                _check_first_documents(source)
        for url in _remote_tokens(config):
            find_tokens(url)
    except (ValueError, OSError) as error:
        return _problems(error)
    return []


def plan_text(config: Config) -> list[str]:
    """Returns dry-run lines that describe the data a real run would prepare. Writes nothing."""
    how = "only its index is copied; tokens are read on demand"
    lines = [f"{url}: {how}" for url in _remote_tokens(config)]
    for source in _text_sources(config):
        what = f"{source.setting.upper()}: {len(source.files)} files, {bytes_text(total_bytes(source.files))}"
        if found := prepared_text.matching(source, Path(config.data_dir)):
            lines.append(f"{what}, already prepared in {found.folder}")
            continue
        tokenizer = source.tokenizer.name if source.tokenizer else ""
        made = tokenizer or f"a {source.vocab_size}-token tokenizer trained on this text"
        held_out = ", documents held out for validation" if source.holds_out else ""
        folder = Path(config.data_dir) / prepared_text.folder_name(source)
        lines.append(f"{what}, would be tokenized into {folder} with {made}{held_out}")
    return lines


def validation_setting(config: Config) -> str:
    """Setting that provides the validation text: train_data if text was held out from it, else valid_data."""
    trained = {Path(name) for _, name in blend_members(config.train_data)}
    names = [Path(name) for _, name in blend_members(config.valid_data)]
    is_held_out = [one.with_name("train") in trained and one.with_name(FACTS).is_file() for one in names]
    return "train_data" if names and all(is_held_out) else "valid_data"


def validation_overlaps(config: Config) -> Iterator[str]:
    """Yields one problem for each text in VALID_DATA that shares files with training text."""
    sources = _text_sources(config)
    for valid in (one for one in sources if one.setting == "valid_data"):
        others = (one for one in sources if one.setting != "valid_data" and one.real_files & valid.real_files)
        if one := next(others, None):
            rule = f"shares files with {one.setting.upper()}={one.name}, so validation uses training text"
            yield problem("valid_data", valid.name, rule, "use different text")


def _remote_tokens(config: Config) -> list[str]:
    members = blend_members(config.train_data) + blend_members(config.valid_data)
    return [name for _, name in members if is_url(name) and not is_text(name)]


def _resolved(
    config: Config, prepare: Callable[[TextSource], Prepared], is_text: Callable[[str], bool]
) -> Config:
    tokenizer, held_out = config.tokenizer, list[str]()
    sources: dict[tuple[str, str], TextSource] = {}
    for source in _text_sources(config, is_text):
        sources |= {(source.setting, name): source for name in (source.name, *source.aliases)}
    made: dict[tuple[str, str], Prepared] = {}

    def resolved(setting: str, blend: str) -> str:
        nonlocal tokenizer
        words = []
        for weight, name in blend_members(blend):
            words += [weight] if weight else []
            source = sources.get((setting, name))
            if source is None and setting == "data_stages":
                source = sources.get(("train_data", name))
            if source is None:
                is_remote = is_url(name) and not is_text(name)
                words.append(ensure_index(name, Path(config.data_dir)) if is_remote else name)
                continue
            key = source.setting, source.name
            if key not in made:
                # order matters: the first text in TRAIN_DATA determines the tokenizer of all others
                if source.tokenizer is None and tokenizer:  # trained on TRAIN_DATA just now
                    source = replace(source, tokenizer=_loaded(tokenizer), vocab_size=0)
                with _named_errors(source):
                    made[key] = prepare(source)
                tokenizer = tokenizer or made[key].tokenizer
            words.append(made[key].train)
            if setting == "train_data" and made[key].valid:
                held_out.extend([weight, made[key].valid] if weight else [made[key].valid])
        return " ".join(words)

    data = {name: resolved(name, getattr(config, name)) for name in ("train_data", "valid_data")}
    data["valid_data"] = data["valid_data"] or " ".join(held_out)
    stages = [resolved("data_stages", blend) for blend in config.stage_blends]
    data["data_stages"] = config.with_stage_blends(stages)
    return config.model_copy(update=data | {"tokenizer": tokenizer})


def _problems(error: Exception) -> list[str]:
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        fix = "make it readable, or set DATA_DIR to a writable folder"
        return [f"{error.filename or 'DATA_DIR'}: {error.strerror or error}. Fix: {fix}."]
    return str(error).replace("set --text-field", "set TEXT_FIELD").splitlines()


# Text in data settings


def _text_sources(config: Config, is_text: Callable[[str], bool] = is_text) -> list[TextSource]:
    """Text sources in all data settings. They share one tokenizer, which is None until it is trained."""
    problems, members = [], [name for _, name in blend_members(config.train_data)]
    texts = [name for name in members if is_text(name)]
    valid = [name for _, name in blend_members(config.valid_data) if is_text(name)]
    staged = [name for blend in config.stage_blends for _, name in blend_members(blend) if is_text(name)]
    staged = [name for name in dict.fromkeys(staged) if name not in texts]
    settings = {"train_data": texts, "valid_data": valid, "data_stages": staged}
    given = [(setting, name) for setting, names in settings.items() for name in names]
    if not given:
        return []
    tokenizer = None
    if config.tokenizer:
        tokenizer = _loaded(config.tokenizer, prepend_bos=config.prepend_bos)
    elif len(members) > 1 or not texts:
        rule = "is a blend with text" if texts else "is text, and the tokenizer of TRAIN_DATA is unknown"
        fix = "set TOKENIZER; moe-exp data train-tokenizer trains a tokenizer"
        problems.append(config.problem(given[0][0], f"{rule}, so TOKENIZER is required", fix))
    if config.prepend_bos and not config.tokenizer:
        fix = "set TOKENIZER to a tokenizer with a BOS token, or omit PREPEND_BOS"
        problems.append(config.problem("prepend_bos", "a tokenizer trained by the run has no BOS token", fix))
    others = [name for name in members if not is_text(name)]
    holds_out = not config.valid_data and not config.split
    if texts and others and holds_out and config.eval_interval:
        rule = "validation documents can only be held out from text"
        rule += f", but {others[0]} is a prefix of token files"
        problems.append(config.problem("train_data", rule, "set VALID_DATA or SPLIT=99,1"))
    for setting, name in given:
        if is_url(name):
            rule = "only token files can be read from an object store, not text"
            fix = f"run moe-exp data download {name}, and set {setting.upper()} to its folder"
            problems.append(problem(setting, name, rule, fix))
    if problems:
        raise ConfigError(problems)
    sources = [_source(config, "train_data", name, tokenizer, holds_out=holds_out) for name in texts]
    rest = [_source(config, "valid_data", name, tokenizer, holds_out=False) for name in valid]
    for name in staged:
        stage = _source(config, "data_stages", name, tokenizer, holds_out=False)
        shared = [one for one in sources if one.real_files & stage.real_files]
        if same := next((one for one in shared if one.real_files == stage.real_files), None):
            # reuse that preparation: its held-out documents must not be trained on in a stage
            sources[sources.index(same)] = replace(same, aliases=(*same.aliases, name))
        elif shared and not config.valid_data:
            rule = f"shares only some files with TRAIN_DATA={shared[0].name}, which has held-out documents"
            fix = "use all files of that text or none of them, or set VALID_DATA"
            raise ConfigError([problem("data_stages", name, rule, fix)])
        else:
            rest.append(stage)
    return sources + rest


def _source(
    config: Config, setting: str, name: str, tokenizer: TextTokenizer | None, *, holds_out: bool
) -> TextSource:
    field, files = config.text_field, list[Path]()
    if is_text(name):  # otherwise the text was removed after it was prepared (find_prepared_text)
        files = find_inputs([Path(name).expanduser()], setting.upper(), field)
    rule = TextRule(config.text_documents)
    if rule.documents == "file" and len(files) < 20:
        # few long texts: cut them, so that pieces can be held out
        num_bytes = estimate_line_bytes(path for path in files if ending(path) in TEXT_SUFFIXES)
        rule = TextRule(rule.documents, max(2**11, min(rule.longest_bytes, num_bytes // 100)))
    vocab_size = 0 if tokenizer else config.vocab_size
    return TextSource(setting, name, files, field, rule, tokenizer, vocab_size, holds_out)


def _loaded(name: str, *, prepend_bos: bool = False) -> TextTokenizer:
    tokenizer = load_named_tokenizer(name, prepend_bos=prepend_bos)
    if tokenizer.eod_id is None:
        fix = "set eos_token in its tokenizer_config.json"
        raise setting_error("tokenizer", name, "does not define an end-of-document token", fix)
    return tokenizer


@contextmanager
def _named_errors(source: TextSource) -> Iterator[None]:
    """Context manager that adds the setting's name to errors about documents and missing packages."""
    try:
        yield
    except BadDocument as error:
        path = os.path.relpath(error.path, Path(source.name).expanduser()) if source.name else error.path
        where = error.path if path.startswith("..") or path == "." else path
        rule = f"{where}, line {error.line_number}: {error.reason}"
        fix = error.fix or "correct the line, or remove the file from the input"
        raise setting_error(source.setting, source.name, rule, fix) from error
    except ModuleNotFoundError as error:
        rule, fix = f"requires the package {error.name}", 'pip install "moe-exp[data]"'
        raise setting_error(source.setting, source.name, rule, fix) from error


def _check_first_documents(source: TextSource) -> None:
    """Checks the first file of each format; raises ValueError if its first document lacks the text field."""
    by_kind = {ending(path): path for path in reversed(source.files) if path.stat().st_size}
    if not by_kind:
        raise setting_error(source.setting, source.name, "contains only empty files", "use non-empty files")
    for path in by_kind.values():
        field = source.text_field
        # raises an error for a table without this column
        _, line = next(read_lines(path, text_field=field, rule=source.rule), (0, b""))
        row = None
        with suppress(orjson.JSONDecodeError):  # reading the file reports the line
            row = orjson.loads(line)
        if isinstance(row, dict) and field not in row:
            rule = f"{path.name} has no field {field!r}; its fields are {', '.join(row) or 'none'}"
            fix = "set TEXT_FIELD to the field with the text"
            raise setting_error(source.setting, source.name, rule, fix)
