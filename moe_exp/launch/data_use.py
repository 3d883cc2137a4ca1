"""How a run uses its token files: how often it reads each, and what it validates on. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from moe_exp.config import Config, problem
from moe_exp.config.data_stages import stages_of
from moe_exp.config.ramp import samples_left
from moe_exp.config.setting_types import names_text
from moe_exp.data.own_text.settings import needs_preparation, validation_overlaps, validation_setting
from moe_exp.data.tokens.manifests import tokenizer_problems
from moe_exp.data.tokens.tokens import Share, TokenFiles, parse_blend, parse_split, part_tokens, share_range
from moe_exp.host.files import read_json

# Repeated up to so often, data is worth nearly as much as new data (arXiv:2305.16264).
_WORTHWHILE_EPOCHS = 4
_ROUNDING = 1.01  # of weights, and of TRAIN_ITERS to whole batches


def data_warnings(config: Config) -> list[str]:
    """Warns of token files that do not fit together, of sources that are read too often, and of validation on
    one document; where a setting names text, of validation on what is trained on. Empty if files cannot be
    read.
    """
    with suppress(ValueError, OSError):  # which the checks of files name
        if not config.train_data or needs_preparation(config):
            return list(validation_overlaps(config))
        shares = parse_split(config.split) if config.split else [(0.0, 1.0), None]
        return [
            *(tokenizer_problems(config) if config.allow_other_data else ()),
            *_repeated(config, shares[0] or (0.0, 1.0)),
            *_small_validation(config, shares[1]),
        ]
    return []


def _repeated(config: Config, share: Share) -> Iterator[str]:
    tokens, num_sources = _tokens_of_sources(config)
    for prefix, read in tokens.items():
        there = part_tokens(TokenFiles(prefix), share, by_sequence=config.data_order == "megatron")
        asked = _max_epochs(prefix)
        # The weights of a blend repeat a source unnoticed; TRAIN_ITERS repeats a single one on purpose.
        limit = asked or (1 if num_sources > 1 else _WORTHWHILE_EPOCHS)
        if there and read > _ROUNDING * limit * there:
            rule = f"this run reads it {read / there:.2f} times"
            rule += f", and its mixture says max_epochs={asked:g}" if asked else ""
            fix = "train for fewer iterations, add data" + (
                ", or lower its weight" if num_sources > 1 else ""
            )
            fix += (
                f"; for max_epochs, repeat data mix with total_tokens={_num_tokens(config):.4g}"
                if asked
                else ""
            )
            yield problem("train_data", prefix, rule, fix)


def _num_tokens(config: Config) -> int:
    return config.seq_len * samples_left(config, 0, config.train_iters)


def _tokens_of_sources(config: Config) -> tuple[Counter[str], int]:
    """Tokens that the run reads of each prefix, over all stages; and the sources of the largest blend."""
    stages, total = stages_of(config), _num_tokens(config)
    firsts = [min(stage.first_sample * config.seq_len, total) for stage in stages]
    tokens, num_sources = Counter[str](), 0
    for stage, (begin, end) in zip(stages, pairwise([*firsts, total]), strict=True):
        if names_text(stage.train_data):
            continue
        blend = parse_blend(stage.train_data)
        num_sources = max(num_sources, len(blend))
        for weight, prefix in blend:
            tokens[prefix] += round((end - begin) * weight / sum(weight for weight, _ in blend))
    return tokens, num_sources


def _max_epochs(prefix: str) -> float | None:
    """The limit that `moe-exp data mix` was given for these token files, if it has made them."""
    path = Path(prefix).with_name("mixture.json")
    if not path.is_file():
        return None
    try:
        facts = read_json(path)
        prefixes = [Path(word).name for word in facts["train_data"].split()[1::2]]
        limits = dict(zip(prefixes, facts["settings"]["sources"], strict=False))
        found = limits.get(Path(prefix).name, {}).get("max_epochs")
        return None if found is None else float(found)
    except (KeyError, TypeError, AttributeError, ValueError):  # another program's file of this name
        return None


def _small_validation(config: Config, share: Share | None) -> Iterator[str]:
    if not config.eval_interval:
        return
    name = validation_setting(config) if config.valid_data else "train_data"
    share = (0.0, 1.0) if config.valid_data else share
    if share is None:
        return
    for _, prefix in parse_blend(config.valid_data or config.train_data):
        begin, end = share_range(TokenFiles(prefix).num_documents, share)
        if end - begin == 1:
            part = "" if config.valid_data else f" for validation by SPLIT={config.split}"
            rule = f"has one document{part}: its loss says little about other texts"
            yield problem(name, prefix, rule, "hold out more documents")
