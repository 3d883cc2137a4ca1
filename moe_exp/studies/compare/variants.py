"""The models of a comparison: from `moe,dense` and `name:NUM_EXPERTS=16,TOPK=2` to settings. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import TRAITS, Config, ConfigError, load_config, problem

# Settings by name in --runs. A dropless run rejects CAPACITY_FACTOR, one with capacity TOKEN_ROUNDING.
KINDS: dict[str, dict[str, str]] = {
    "moe": {"use_moe": "true", "moe_type": "moe", "token_rounding": "0"},
    "dmoe": {"use_moe": "true", "moe_type": "dmoe", "capacity_factor": "0", "min_capacity": "0"},
    "dense": {"use_moe": "false"},
}
# Data, batch and length, which must be equal for losses to compare, and what the comparison itself sets.
_SAME_FOR_ALL = {
    "train_iters", "gbsz", "seq_len", "rampup_batch_size", "train_data", "valid_data", "split",
    "data_order", "data_stages", "document_packing", "eod_mask_loss", "text_documents", "text_field",
    "tokenizer", "vocab_size", "seed", "data_dir", "run_dir", "run_name", "load_dir", "eval_iters",
    "nnodes", "node_rank", "master_addr", "master_port", "preset",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
# In the folder of a comparison.
_TAKEN = ("logs", "pace", "report.md", "report.html", "results.json", "compare.json")
_NEXT_SETTING = re.compile(r",(?=[A-Za-z_-]+=)")  # values may contain commas: MOE_LAYER_FREQ=0,1,1,1


@dataclass(frozen=True)
class Variant:
    """One model.

    Attributes:
        name: of its folder and its column.
        own: settings on top of the shared ones, by field name.
        flags: all settings that are not defaults, as `moe-exp train` takes them.
        config: the resulting configuration.
    """

    name: str
    own: dict[str, str]
    flags: dict[str, Any]
    config: Config

    @classmethod
    def of(cls, name: str, own: Mapping[str, str], given: Mapping[str, Any]) -> Variant:
        """The variant with settings `own` on top of `given`."""
        flags = {**given, **own}
        return cls(name, dict(own), flags, load_config(flags, {}))

    def having(self, **settings: Any) -> Variant:
        flags = {**self.flags, **settings}
        return Variant(self.name, self.own, flags, load_config(flags, {}))


def make_variants(runs: str, written: Sequence[str], given: Mapping[str, Any]) -> list[Variant]:
    """The variants of a comparison, in the order given.

    Args:
        runs: comma-separated names of KINDS; empty: the MoE layer of the settings, and dense, unless two are
            `written`.
        written: others, each `NAME:SETTING=VALUE,SETTING=VALUE`.
        given: shared settings, see `child_runs.given_settings`.

    Raises:
        ConfigError: lists every name, setting and value that cannot be read.
    """
    if not runs and len(written) < 2:
        runs = f"{load_config(given, {}).moe_type},dense"
    problems: list[str] = []
    variants: list[Variant] = []
    for text in [*filter(None, (name.strip() for name in runs.split(","))), *written]:
        try:
            name, own = _parsed(text)
            if name in (variant.name for variant in variants):
                rule = "there is another of this name"
                raise ConfigError([problem("variant", text, rule, "give each its own")])
            variants.append(Variant.of(name, own, given))
        except ConfigError as error:
            problems += [
                line if text in line or ":" not in text else f"VARIANT={text}: {line}"
                for line in error.problems
            ]
    if len(variants) < 2 and not problems:
        fix = "add another, as in --runs dmoe,dense"
        problems.append(problem("runs", ",".join([runs, *written]), "a comparison needs at least two", fix))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return variants


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    if text in KINDS:
        return text, KINDS[text]
    name, colon, settings = text.partition(":")
    if not colon:
        rule = f"is none of {', '.join(KINDS)}"
        raise ConfigError([problem("runs", text, rule, "use these, or --variant NAME:SETTING=VALUE")])
    if not _NAME.fullmatch(name) or name in _TAKEN:
        rule = "its name is that of a folder: letters, digits, dots, dashes and underscores"
        rule = f"{name} is a file or folder of the comparison itself" if name in _TAKEN else rule
        raise ConfigError([problem("variant", text, rule, "write NAME:SETTING=VALUE")])
    own, problems = {}, []
    for part in _NEXT_SETTING.split(settings):
        key, equals, value = part.partition("=")
        field = key.strip().lower().replace("-", "_")
        if found := _setting_problem(text, key, field, equals):
            problems.append(found)
        own[field] = value.strip()
    if problems:
        raise ConfigError(problems)
    return name, own


def _setting_problem(text: str, key: str, field: str, equals: str) -> str:
    if not equals or field not in Config.model_fields:
        near = difflib.get_close_matches(field, list(Config.model_fields), n=1)
        fix = (
            f"write {near[0].upper()}, if that is meant" if near else "moe-exp train --help has all settings"
        )
        rule = f"{key or 'what follows the colon'} is not SETTING=VALUE of a setting"
        return problem("variant", text, rule, fix)
    if field in _SAME_FOR_ALL:
        rule = f"{field.upper()} is the same for all runs of a comparison"
        return problem("variant", text, rule, "set it for all of them")
    return ""


def reference_of(variants: Sequence[Variant]) -> Variant:
    """The variant whose size the others match: the first MoE, else the first."""
    return next((variant for variant in variants if variant.config.use_moe), variants[0])


def differences(variants: Sequence[Variant]) -> dict[str, list[Any]]:
    """Settings that differ between variants, with their values; None for a MoE setting of a dense model."""
    settings = [_said(variant.config) for variant in variants]
    rows = {name: [values[name] for values in settings] for name in settings[0] if name != "run_name"}
    return {
        name: values
        for name, values in rows.items()
        if len({str(value) for value in values if value is not None}) > 1
    }


def _said(config: Config) -> dict[str, Any]:
    """Settings by name, None for those of experts in a dense model."""
    return {
        name: value if config.use_moe or TRAITS[name].part != "experts" else None
        for name, value in config.model_dump().items()
    }
