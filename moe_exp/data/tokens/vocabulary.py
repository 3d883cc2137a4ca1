"""VOCAB_SIZE by the tokenizer of the data, for runs that do not give it. No torch."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from moe_exp.config import Config, ConfigError
from moe_exp.config.checks.checks import EMBEDDED_VOCAB_SIZE
from moe_exp.config.loading import recorded_settings
from moe_exp.config.setting_types import blend_members, names_text
from moe_exp.data.own_text.settings import fitting_vocab_size
from moe_exp.data.tokens.files import manifest_of, tokenizer_fact
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.tokenizer import tokenizer_vocab_size


def with_vocab_size(
    config: Config, given: Container[str], recorded: Path | None = None
) -> tuple[Config, str]:
    """`config` with the vocabulary of its data, and the reason in words; unchanged, and '', if VOCAB_SIZE is
    `given` or the data's vocabulary is not known. Every rank and node gets the same.

    Args:
        config: settings of the run.
        given: names of the settings that do not come from a preset or a default.
        recorded: config.yaml of the run folder; if it exists, its VOCAB_SIZE is used, as the run resumes.
    """
    if "vocab_size" in given or (found := _of_data(config)) is None:
        return config, ""
    size, reason = found[0], f"vocabulary of {found[1]}"
    if recorded is not None and (before := _recorded(recorded)):
        size, reason = before, f"recorded in {recorded}"
    config = config.model_copy(update={"vocab_size": size})
    padding = f", {config.padded_vocab_size} with padding" if config.padded_vocab_size > size else ""
    return config, reason + padding


def _of_data(config: Config) -> tuple[int, str] | None:
    """The largest vocabulary of the data and TOKENIZER, and which has it; None if one is unknown."""
    if size := fitting_vocab_size(config):
        return size, f"the tokenizer for {config.train_data}"
    try:
        blends = [
            blend for blend in (config.train_data, config.valid_data) if blend and not names_text(blend)
        ]
        prefixes = [prefix_of(name) for blend in blends for _, name in blend_members(blend)]
        facts = {prefix: tokenizer_fact(manifest_of(prefix), "vocab_size") for prefix in prefixes}
        sizes = {place: size for place, size in facts.items() if size}
        if config.tokenizer:
            sizes[config.tokenizer] = tokenizer_vocab_size(config.tokenizer)
        elif len(sizes) < len(facts):
            return None
    except ConnectionError as error:  # else it would be another model
        raise ConfigError([str(error)]) from None
    except (OSError, ValueError):
        return None  # the checks of files name it
    if sizes and not config.train_data:
        sizes["the embedded corpus"] = EMBEDDED_VOCAB_SIZE
    place = max(sizes, key=lambda one: sizes[one], default="")
    return (sizes[place], place) if place and 0 < sizes[place] <= 10**9 else None


def _recorded(path: Path) -> int | None:
    try:
        size = recorded_settings(path).get("vocab_size")
    except ValueError:
        return None  # a new run, or the checks of the run folder name it
    return size if isinstance(size, int) else None
