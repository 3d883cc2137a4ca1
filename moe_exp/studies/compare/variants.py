"""Variants of a comparison, parsed from text such as `moe,dense` or `name:NUM_EXPERTS=16,TOPK=2`. Sizes are
matched in FLOPs per token, active parameters per token or training time. Does not import torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moe_exp.config import TRAITS, Config, ConfigError, load_config, problem, raise_for
from moe_exp.config.parsers import POINTS, scaled_points
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import count_parameters

# Settings by name in --runs. Dropless MoE requires CAPACITY_FACTOR=0; MoE with capacity, TOKEN_ROUNDING=0.
KINDS: dict[str, dict[str, str]] = {
    "moe": {"use_moe": "true", "moe_type": "moe", "token_rounding": "0"},
    "dmoe": {"use_moe": "true", "moe_type": "dmoe", "capacity_factor": "0", "min_capacity": "0"},
    "dense": {"use_moe": "false"},
}
# Data, batch and length, which must be equal for comparable losses, and settings of the comparison itself.
_SAME_FOR_ALL = {
    "train_iters", "gbsz", "seq_len", "rampup_batch_size", "train_data", "valid_data", "split",
    "data_order", "data_stages", "document_packing", "eod_mask_loss", "text_documents", "text_field",
    "tokenizer", "vocab_size", "seed", "data_dir", "run_dir", "run_name", "load_dir", "eval_iters",
    "nnodes", "node_rank", "master_addr", "master_port", "preset",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
# Names in a comparison's folder that are not available for variants.
_TAKEN = ("logs", "pace", "report.md", "report.html", "results.json", "compare.json")
_NEXT_SETTING = re.compile(r",(?=[A-Za-z_-]+=)")  # values may contain commas: MOE_LAYER_FREQ=0,1,1,1


@dataclass(frozen=True)
class Variant:
    """One model of a comparison."""

    name: str  # of its folder and column
    own: dict[str, str]  # settings beyond the shared ones, by field name
    flags: dict[str, Any]  # all settings that are not defaults, as options of `moe-exp train`
    config: Config  # the resulting configuration

    @classmethod
    def of(cls, name: str, own: Mapping[str, str], given: Mapping[str, Any]) -> Variant:
        """Creates the variant from the settings in `given` and `own`; `own` takes precedence."""
        flags = {**given, **own}
        return cls(name, dict(own), flags, load_config(flags, {}))

    @property
    def compared(self) -> dict[str, Any]:
        """Settings that must be the same in all runs of a variant, including runs of later commands."""
        return {name: value for name, value in self.config.model_dump().items() if TRAITS[name].compared}

    def having(self, **settings: Any) -> Variant:
        flags = {**self.flags, **settings}
        return Variant(self.name, self.own, flags, load_config(flags, {}))

    def lasting(self, iterations: int) -> Variant:
        """Returns the variant with TRAIN_ITERS=`iterations` and a learning rate schedule adapted to it."""
        before, share = self.config, iterations / self.config.train_iters
        if share == 1:
            return self

        def scaled(value: int) -> int:
            return max(1, round(value * iterations / before.train_iters)) if value else 0

        # 0 remains 0, which means TRAIN_ITERS. A short run keeps at least one iteration of each phase.
        decay = scaled(before.decay_iters)
        last = decay or iterations
        changes: dict[str, Any] = {"train_iters": iterations, "decay_iters": decay}
        changes["warmup_iters"] = min(before.warmup_iters, last - 1)
        changes["wsd_decay_iters"] = min(scaled(before.wsd_decay_iters), last)
        old = {name: str(getattr(before, name)) for name in POINTS}
        texts = {name: scaled_points(text, share) for name, text in old.items()}
        return self.having(**changes, **{name: text for name, text in texts.items() if text != old[name]})


def make_variants(runs: str, written: Sequence[str], given: Mapping[str, Any]) -> list[Variant]:
    """Parses the variants of a comparison. Raises a ConfigError that lists all problems.

    Args:
        runs: comma-separated names from KINDS. If `runs` is empty and `written` has fewer than two variants,
            `dense` and the value of MOE_TYPE are added.
        written: further variants, each `NAME:SETTING=VALUE,SETTING=VALUE`.
        given: shared settings, see `child_runs.given_settings`.
    """
    if not runs and len(written) < 2:
        runs = f"{load_config(given, {}).moe_type},dense"
    problems: list[str] = []
    variants: list[Variant] = []
    # Collect the problems of all variants, so that the command can be corrected at once.
    for text in [*filter(None, (name.strip() for name in runs.split(","))), *written]:
        try:
            name, own = _parsed(text)
            if name in (variant.name for variant in variants):
                raise ConfigError([problem("variant", text, "duplicate name", "choose a unique name")])
            variants.append(Variant.of(name, own, given))
        except ConfigError as error:
            head = f"VARIANT={text}: " if ":" in text else ""
            problems += [line if text in line else head + line for line in error.problems]
    if len(variants) < 2 and not problems:
        fix = "add another variant, as in --runs dmoe,dense"
        rule = "a comparison requires at least two variants"
        problems.append(problem("runs", ",".join([runs, *written]), rule, fix))
    raise_for(dict.fromkeys(problems))
    return variants


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    if text in KINDS:
        return text, KINDS[text]
    name, colon, settings = text.partition(":")
    if not colon:
        rule = f"must be one of {', '.join(KINDS)}"
        raise ConfigError([problem("runs", text, rule, "correct it, or use --variant NAME:SETTING=VALUE")])
    if not _NAME.fullmatch(name) or name in _TAKEN:
        rule = "the name must consist of letters, digits, dots, dashes and underscores"
        rule = f"{name} is reserved for a file or folder of the comparison" if name in _TAKEN else rule
        raise ConfigError([problem("variant", text, rule, "use the form NAME:SETTING=VALUE")])
    own, problems = {}, []
    for part in _NEXT_SETTING.split(settings):
        key, equals, value = part.partition("=")
        field = key.strip().lower().replace("-", "_")
        if not equals or field not in Config.model_fields:
            near = difflib.get_close_matches(field, list(Config.model_fields), n=1)
            fix = f"use {near[0].upper()}, if intended" if near else "see moe-exp train --help"
            rule = f"{part or 'the text after the colon'} must be SETTING=VALUE with a known setting"
            problems.append(problem("variant", text, rule, fix))
        elif field in _SAME_FOR_ALL:
            rule = f"{field.upper()} must be the same for all runs of a comparison"
            problems.append(problem("variant", text, rule, f"set {field.upper()} for all runs instead"))
        own[field] = value.strip()
    raise_for(problems)
    return name, own


def reference_of(variants: Sequence[Variant]) -> Variant:
    """Returns the variant that other variants match in size: the first MoE, or the first if all are dense."""
    return next((variant for variant in variants if variant.config.use_moe), variants[0])


def differences(variants: Sequence[Variant]) -> dict[str, list[Any]]:
    """Returns every differing setting with its value per variant (None for MoE settings of dense models)."""
    found = {}
    for name in (name for name in Config.model_fields if name != "run_name"):
        is_of_experts = TRAITS[name].part == "experts"
        configs = [variant.config for variant in variants]
        values = [getattr(one, name) if one.use_moe or not is_of_experts else None for one in configs]
        if len({str(value) for value in values if value is not None}) > 1:
            found[name] = values
    return found


Match = Literal["flops", "active-params", "time"]
# GEMMs are faster at round widths, which justifies a mismatch of up to 0.2%.
_ROUND_WIDTHS, _CLOSE = (64, 8), 2e-3


def flops_per_token(config: Config) -> float:
    """Returns the model FLOPs per token, forward and backward."""
    return flops_per_iteration(config, 1) / config.seq_len


# Quantity by which sizes are matched. With `time`, FLOPs per token are matched as well.
MEASURES: dict[Match, Callable[[Config], float]] = {
    "flops": flops_per_token,
    "active-params": lambda config: count_parameters(config).active_per_token,
    "time": flops_per_token,
}
MATCHED_BY = {"flops": "FLOPs per token", "active-params": "active parameters", "time": "FLOPs per token"}


def apart(config: Config, reference: Config, match: Match) -> float:
    """Returns the relative difference of `config` from `reference` in the quantity of `match`."""
    return MEASURES[match](config) / MEASURES[match](reference) - 1


def width_setting(config: Config) -> str:
    """Returns the setting that changes a model's size: the width of its dense MLP or routed experts."""
    return "moe_ffn_hidden_size" if config.use_moe else "ffn_hidden_size"


def matched_width(config: Config, target: float, measure: Callable[[Config], float]) -> int:
    """Returns an MLP width that brings `measure` near `target`; 0 if `target` is too small for any MLP."""
    name, unit = width_setting(config), config.etp if config.use_moe else config.tp

    def measured(width: int) -> float:
        return measure(config.model_copy(update={name: width}))

    # FLOPs and parameters are linear in the width, so two widths determine it.
    slope = (measured(2 * unit) - measured(unit)) / unit
    exact = (target - measured(unit)) / slope + unit
    if exact < unit / 2:
        return 0
    # Prefer the roundest width that is close enough; the last step always gives the nearest one.
    for step in (*(width * unit for width in _ROUND_WIDTHS), unit):
        width = max(1, round(exact / step)) * step
        if abs(measured(width) / target - 1) <= _CLOSE:
            break
    return width


def match_sizes(variants: Sequence[Variant], match: Match) -> list[Variant]:
    """Sets the MLP width of each variant so that the variant matches the size of the reference. A variant
    that sets the width itself keeps it. Raises a ConfigError if no width matches.
    """
    reference, measure = reference_of(variants), MEASURES[match]
    target, matched, problems = measure(reference.config), [], []
    for variant in variants:
        name = width_setting(variant.config)
        if name in variant.own or abs(apart(variant.config, reference.config, match)) <= _CLOSE:
            matched.append(variant)
            continue
        if width := matched_width(variant.config, target, measure):
            matched.append(variant.having(**{name: width}))
        else:
            rule = f"exceeds the {target:.4g} {MATCHED_BY[match]} of {reference.name} even without MLPs"
            fix = f"set its {name.upper()}, or reduce its other sizes"
            problems.append(problem("variant", variant.name, rule, fix))
    raise_for(problems)
    return matched
