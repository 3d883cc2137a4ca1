"""Settings that name text, or token files at an object store, and the same with token files here and a
tokenizer in their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.data_stages import stage_blends, with_stage_blends
from moe_exp.config.setting_types import blend_members, is_prepared_first, is_text, names_text
from moe_exp.data.documents import estimate_line_bytes
from moe_exp.data.own_text.preparation import (
    FACTS,
    Prepared,
    ensure_prepared,
    find_prepared,
    folder_name,
    known_places,
    matching,
)
from moe_exp.data.own_text.sources import (
    TextSource,
    check_first_documents,
    loaded,
    named_errors,
    place_of,
    text_sources,
)
from moe_exp.data.tokens.ranged import ensure_index, find_tokens
from moe_exp.host.exit_codes import PREPARED_TEXT
from moe_exp.host.files import bytes_text, is_url

_SMALLEST_VOCAB, _LARGEST_VOCAB, _BYTES_PER_TOKEN_TYPE = 512, 32768, 1000


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


def needs_preparation(config: Config) -> bool:
    """Whether TRAIN_DATA, VALID_DATA or DATA_STAGES name text, or token files at an object store."""
    return any(map(is_prepared_first, (config.train_data, config.valid_data, *stage_blends(config))))


def with_prepared_text(config: Config) -> Config:
    """`config` with token files and tokenizer in place of the text, and of the URLs, that it names; prepares
    what is missing.

    A tokenizer that is trained has VOCAB_SIZE tokens, or fewer if the text gives no more.

    Raises:
        ConfigError: text or DATA_DIR cannot be used; a package is missing.
    """
    if not needs_preparation(config):
        return config
    try:
        return _resolved(config, partial(ensure_prepared, data_dir=Path(config.data_dir)), is_text)
    except (ValueError, OSError) as error:
        raise ConfigError(_problems(error)) from None


def already_prepared(config: Config) -> Config | None:
    """`with_prepared_text` where nothing is left to prepare, else None; also None for data at a store."""
    blends = (config.train_data, config.valid_data, *stage_blends(config))
    if any(is_url(name) for blend in blends for _, name in blend_members(blend)):
        return None

    def found(source: TextSource) -> Prepared:
        if (made := matching(source, Path(config.data_dir))) is None:
            raise LookupError
        return made

    try:
        return _resolved(config, found, is_text) if needs_preparation(config) else config
    except (LookupError, ValueError, OSError):  # the checks of files name what is wrong
        return None


def prepared_by_launcher(config: Config) -> Config:
    """`with_prepared_text` in a rank: the launcher has prepared it, except with torchrun alone."""
    if not needs_preparation(config):
        return config
    if made := os.environ.get(PREPARED_TEXT):
        return config.model_copy(update=json.loads(made))
    return with_prepared_text(config)


def facts_for_ranks(prepared: Config) -> str:
    """The value of PREPARED_TEXT, from what `with_prepared_text` gave."""
    names = ("train_data", "valid_data", "data_stages", "tokenizer")
    return json.dumps({name: getattr(prepared, name) for name in names})


def find_prepared_text(config: Config, trained: str = "") -> Config:
    """`with_prepared_text` for a run that was trained: prepares nothing.

    If files have changed since, or are gone, the newest preparation of the same text is used and logged; with
    `trained`, the `tokenizer_fingerprint` of the training, the newest with that tokenizer.

    Raises:
        ValueError: there is none.
    """
    known = known_places(Path(config.data_dir))
    config = config.model_copy(update={"data_stages": ""})  # only training reads them

    def is_known(name: str) -> bool:
        return is_text(name) or place_of(name) in known

    members = blend_members(config.train_data) + blend_members(config.valid_data)
    if not any(is_known(name) or is_url(name) for _, name in members):
        return config
    find = partial(find_prepared, data_dir=Path(config.data_dir), trained=trained)
    return _resolved(config, find, is_known)


def text_problems(config: Config) -> list[str]:
    """Problems with the text that settings name, found without reading all of it."""
    try:
        for source in text_sources(config):
            with named_errors(source):
                check_first_documents(source)
        for url in _remote_tokens(config):
            find_tokens(url)
    except (ValueError, OSError) as error:
        return _problems(error)
    return []


def plan_text(config: Config) -> list[str]:
    """Lines about what a start of these settings would prepare, for a dry run. Writes nothing."""
    how = "its index is copied, tokens are read when they are needed"
    lines = [f"{url}: {how}" for url in _remote_tokens(config)]
    for source in text_sources(config):
        size = bytes_text(sum(path.stat().st_size for path in source.files))
        what = f"{source.setting.upper()}: {len(source.files)} files, {size}"
        if found := matching(source, Path(config.data_dir)):
            lines.append(f"{what}, prepared already in {found.folder}")
            continue
        tokenizer = source.tokenizer.name if source.tokenizer else ""
        made = tokenizer or f"a tokenizer of {source.vocab_size} tokens, trained on it"
        held_out = ", documents held out for validation" if source.holds_out else ""
        folder = Path(config.data_dir) / folder_name(source)
        lines.append(f"{what}, would be tokenized with {made}{held_out}, into {folder}")
    return lines


def validation_setting(config: Config) -> str:
    """The setting that validation data came from: TRAIN_DATA for what was held out of its text, as of
    `with_prepared_text`.
    """
    trained = {Path(name) for _, name in blend_members(config.train_data)}
    names = [Path(name) for _, name in blend_members(config.valid_data)]
    is_held_out = [one.with_name("train") in trained and one.with_name(FACTS).is_file() for one in names]
    return "train_data" if names and all(is_held_out) else "valid_data"


def validation_overlaps(config: Config) -> Iterator[str]:
    """A line for text of VALID_DATA that is trained on, too."""
    sources = text_sources(config)
    for valid in (one for one in sources if one.setting == "valid_data"):
        others = (one for one in sources if one.setting != "valid_data" and one.real_files & valid.real_files)
        if one := next(others, None):
            rule = f"has files of {one.setting.upper()}={one.name}: validation is on text that is trained on"
            yield problem("valid_data", valid.name, rule, "name other text")


def _remote_tokens(config: Config) -> list[str]:
    members = blend_members(config.train_data) + blend_members(config.valid_data)
    return [name for _, name in members if is_url(name) and not is_text(name)]


def _resolved(
    config: Config, prepare: Callable[[TextSource], Prepared], is_text: Callable[[str], bool]
) -> Config:
    tokenizer = config.tokenizer
    held_out: list[str] = []
    sources: dict[tuple[str, str], TextSource] = {}
    for source in text_sources(config, is_text):
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
                if source.tokenizer is None and tokenizer:  # trained on TRAIN_DATA
                    source = replace(source, tokenizer=loaded(tokenizer), vocab_size=0)
                with named_errors(source):
                    made[key] = prepare(source)
                tokenizer = tokenizer or made[key].tokenizer
            words.append(made[key].train)
            if setting == "train_data" and made[key].valid:
                held_out.extend([weight, made[key].valid] if weight else [made[key].valid])
        return " ".join(words)

    data = {name: resolved(name, getattr(config, name)) for name in ("train_data", "valid_data")}
    data["valid_data"] = data["valid_data"] or " ".join(held_out)
    stages = [resolved("data_stages", blend) for blend in stage_blends(config)]
    data["data_stages"] = with_stage_blends(config, stages)
    return config.model_copy(update=data | {"tokenizer": tokenizer})


def _problems(error: Exception) -> list[str]:
    """Lines about an error: value, rule, fix."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        fix = "make it readable, or set DATA_DIR to a folder that you can write to"
        return [f"{error.filename or 'DATA_DIR'}: {error.strerror or error}. Fix: {fix}."]
    return str(error).replace("--text-field", "TEXT_FIELD the name of the column with the text").splitlines()
