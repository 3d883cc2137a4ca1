"""Reads manifests of a run's token files: tokenizer, vocabulary size, BOS and EOD tokens. No torch."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.loading import recorded_settings
from moe_exp.config.sections.data import EMBEDDED_VOCAB_SIZE
from moe_exp.config.setting_types import blend_members, is_text, names_text
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.own_text import find_prepared_text, fitting_vocab_size
from moe_exp.data.samples.corpus import attended_share
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.tokenizer import (
    TextTokenizer,
    is_tokenizer_of,
    load_named_tokenizer,
    tokenizer_vocab_size,
)
from moe_exp.data.tokens.tokens import (
    TokenFiles,
    manifest_of,
    other_tokenizer,
    parse_blend,
    tokenizer_fact,
    tokenizer_facts,
)

_FIX = "tokenize with --append-eod, or set DOCUMENT_MASK=false and EOD_MASK_LOSS=false"


@dataclass(frozen=True)
class DocumentTokens:
    """Ids of the tokens that end and begin the training documents (None: no such token)."""

    eod_id: int | None = None
    bos_id: int | None = None

    def tokenizer(self, name: str, *, allow_special: bool = False) -> TextTokenizer:
        """Tokenizer `name` with these document tokens; ValueError if it is invalid or lacks `eod_id`."""
        found = load_named_tokenizer(name, allow_special=allow_special)
        # The tokenizer's files may name another end-of-document token than the training used.
        if self.eod_id not in (None, found.eod_id):
            if (token := found.token(self.eod_id)) is None:
                rule = f"has no token {self.eod_id}, which ends the training documents"
                raise ValueError(problem("tokenizer", name, rule, "set the tokenizer used for training"))
            found = load_named_tokenizer(name, eod_token=token, allow_special=allow_special)
        return replace(found, bos_id=self.bos_id)


def documents_of(blend: str) -> DocumentTokens | None:
    """The tokens that begin and end the documents of a blend. None if `blend` is empty, or if its manifests
    lack these tokens or disagree about them.
    """
    manifests = [manifest_of(prefix) for _, prefix in parse_blend(blend)] if blend else []
    found = {(tokenizer_fact(one, "eod_id"), tokenizer_fact(one, "bos_id")) for one in manifests}
    # Merged files of older versions only record the end token; they have no BOS.
    says = (tokenizer_facts(one) or tokenizer_fact(one, "eod_id") is not None for one in manifests)
    return DocumentTokens(*found.pop()) if len(found) == 1 and all(says) else None


def trained_documents(config: Config, order: Mapping[str, Any]) -> DocumentTokens | None:
    """The tokens that begin and end documents of a run's training data; None if unknown.

    If `order` (`SampleOrder.facts` of the checkpoint) lacks the tokens, reads them from the manifests.
    """
    if (order.get("eod_id"), order.get("bos_id")) != (None, None):
        return DocumentTokens(order["eod_id"], order["bos_id"])
    with suppress(ValueError, OSError):
        return documents_of(find_prepared_text(config, order.get("tokenizer") or "").train_data)
    return None


def tokenizer_problems(config: Config) -> Iterator[str]:
    """Yields an error if manifests record different tokenizers, or a tokenizer other than TOKENIZER."""
    # Another check reports a tokenizer that does not exist.
    is_there = bool(config.tokenizer) and Path(config.tokenizer).exists()
    if is_there and not config.train_data:
        own = embedded_folder(Path(config.data_dir)) / "tokenizer.json"
        fix = "set TRAIN_DATA, or omit TOKENIZER"
        if not own.is_file():
            rule = "cannot be compared with the embedded corpus's tokenizer, which does not exist yet"
            yield problem("tokenizer", config.tokenizer, rule, f"{fix}: the corpus has its own tokenizer")
        elif not is_tokenizer_of(config.tokenizer, load_named_tokenizer(str(own)).recorded()):
            rule = "is not the tokenizer of the embedded corpus (TRAIN_DATA is empty)"
            yield problem("tokenizer", config.tokenizer, rule, fix)
    blends = [("train_data", config.train_data), ("valid_data", config.valid_data)]
    blends += [("data_stages", blend) for blend in config.stage_blends]
    fix = "tokenize all data with one tokenizer, or set ALLOW_OTHER_DATA=true if all give the same ids"
    prefixes: list[str] = []
    for name, blend in blends:
        members = [prefix_of(member) for _, member in blend_members(blend) if not is_text(member)]
        # Compare all data so far, so that the error names the first setting that differs.
        if wrong := other_tokenizer([*prefixes, *members]):
            yield problem(name, getattr(config, name), wrong, fix)
            return
        prefixes += members
    facts = {prefix: tokenizer_facts(manifest_of(prefix)) for prefix in prefixes}
    recorded = next((prefix for prefix in prefixes if "hash" in facts[prefix]), None)
    if is_there and recorded and not is_tokenizer_of(config.tokenizer, facts[recorded]):
        rule = f"is not the tokenizer of {recorded} (according to its manifest)"
        fix = "set the tokenizer of the files, or ALLOW_OTHER_DATA=true if both give the same ids"
        yield problem("tokenizer", config.tokenizer, rule, fix)


def check_ends(config: Config, prefixes: Sequence[str]) -> tuple[list[str], int | None]:
    """Returns errors about missing or different end-of-document tokens, and the first end token id found."""
    name = "document_mask" if config.document_mask else "eod_mask_loss"
    problems, found = [], {}
    for prefix in dict.fromkeys(prefixes):
        files = TokenFiles(prefix)
        eod_id, how = files.end_of_document
        if eod_id is None:
            problems.append(problem(name, "true", f"{prefix} has no end-of-document token: {how}", _FIX))
        # A small share: the files were tokenized without it, and it only occurs within texts.
        elif (share := files.share_ending_with(eod_id)) < 0.5:
            rule = f"{share:.0%} of the documents of {prefix} end with the end-of-document token {eod_id}"
            problems.append(problem(name, "true", rule, _FIX))
        else:
            found[prefix] = eod_id
    # The mask looks for a single token id in all data.
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{eod_id} in {prefix}" for prefix, eod_id in found.items())
        rule = f"documents end with different tokens: {listed}"
        problems.append(problem(name, "true", rule, "tokenize all files with the same tokenizer"))
    return problems, next(iter(found.values()), None)


def with_document_tokens(config: Config, blend: str) -> Config:
    """Returns `config`; if DOCUMENT_MASK is on, an unset DOCUMENT_TOKENS is computed from `blend`."""
    if not config.document_mask or config.document_tokens or not blend:
        return config
    weights, prefixes = zip(*parse_blend(blend), strict=True)
    how = config.seq_len, config.document_packing
    shares = [attended_share(TokenFiles(prefix), *how) for prefix in prefixes]
    mean = sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)
    return config.model_copy(update={"document_tokens": max(1.0, mean * config.seq_len)})


def with_vocab_size(
    config: Config, given: Container[str], recorded: Path | None = None
) -> tuple[Config, str]:
    """Returns `config` with the vocabulary size of its data, and a text that names the source of the size. If
    VOCAB_SIZE is in `given` or the size is unknown, returns the unchanged `config` and ''. The result is the
    same on all ranks and nodes.

    Args:
        given: names of the settings that were set explicitly rather than by a preset or default.
        recorded: config.yaml of the run folder; if this file exists, its VOCAB_SIZE is used.
    """
    if "vocab_size" in given:
        return config, ""
    if fitting := fitting_vocab_size(config):
        sizes = {f"the tokenizer for {config.train_data}": fitting}
    else:
        blends = [one for one in (config.train_data, config.valid_data) if one and not names_text(one)]
        try:
            prefixes = [prefix_of(name) for blend in blends for _, name in blend_members(blend)]
            facts = {prefix: tokenizer_fact(manifest_of(prefix), "vocab_size") for prefix in prefixes}
            sizes = {prefix: found for prefix, found in facts.items() if found}
            if config.tokenizer:
                sizes[config.tokenizer] = tokenizer_vocab_size(config.tokenizer)
            elif len(sizes) < len(facts):
                return config, ""
        except ConnectionError as error:  # with the default size it would be another model
            raise ConfigError([str(error)]) from None
        except (OSError, ValueError):
            return config, ""  # reported by the checks of the files
        if sizes and not config.train_data:
            sizes["the embedded corpus"] = EMBEDDED_VOCAB_SIZE
    place = max(sizes, key=lambda one: sizes[one], default="")
    if not 0 < (size := sizes.get(place, 0)) <= 10**9:
        return config, ""
    reason = f"vocabulary of {place}"
    if recorded is not None:
        with suppress(ValueError):  # a new run, or an error reported by the checks of the run folder
            if isinstance(before := recorded_settings(recorded).get("vocab_size"), int) and before:
                size, reason = before, f"recorded in {recorded}"
    config = config.model_copy(update={"vocab_size": size})
    padding = f", {config.padded_vocab_size} with padding" if config.padded_vocab_size > size else ""
    return config, reason + padding
