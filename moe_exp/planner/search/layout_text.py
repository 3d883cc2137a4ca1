"""Parses texts such as `1,2,4`, `TP=4,PP=12` and `300B`, and exports layouts as settings. No torch."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from moe_exp.config import Config, ConfigError, load_config, problem, raise_for, setting_error
from moe_exp.config.loading import explain
from moe_exp.config.parsers import number_in
from moe_exp.config.setting_types import as_given
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS, SPLIT_SETTINGS

_LISTS = ("pipeline_layers", "recompute_modules", "offload_modules")  # one value contains commas
_MOST_TOKENS = 10**18  # a million times the largest corpora
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_fixed(texts: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    """Parses the values allowed for each layout setting, such as `2,4`; ConfigError if a value is invalid."""
    values, problems = {}, []
    for name, text in texts.items():
        parts = [text] if name in _LISTS else text.split(",")
        try:
            values[name] = tuple(_parsed({name: part})[name] for part in parts)
        except ConfigError as error:
            problems += error.problems
    raise_for(problems)
    return values


def parse_wanted(text: str, config: Config) -> dict[str, Any]:
    """Parses a layout such as `TP=4,PP=12,DP=8`; DP is checked but not returned. ConfigError if invalid."""
    pairs, problems = {}, []
    # Split only at commas before a setting, as values may contain commas.
    for part in re.split(r",(?=[^,=]*=)", text):
        name, equals, value = part.partition("=")
        name = name.strip().lower().replace("-", "_")
        name = "mbsz" if name in ("mbs", "micro_batch_size") else name
        if not equals or name not in (*LAYOUT_SETTINGS, "dp"):
            fix = f"use the form TP=4,PP=12 with settings from {', '.join(LAYOUT_SETTINGS).upper()}"
            rule = "must be SETTING=VALUE, where SETTING is a layout setting"
            problems.append(problem("explain", part, rule, fix))
        pairs[name] = value.strip()
    raise_for(problems)
    replicas = pairs.pop("dp", None)
    wanted = _parsed(pairs)
    if replicas is not None:
        size = wanted.get("tp", 1) * wanted.get("pp", 1) * wanted.get("cp", 1)
        if not {"tp", "pp"} <= wanted.keys() or config.world_size != number_in(replicas) * size:
            rule = f"must be GPUs / (TP*PP*CP) = {config.world_size} / {size}"
            raise ConfigError([problem("dp", replicas, rule, "omit DP, which follows from TP, PP and CP")])
    return wanted


def _parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parses setting values as training does; ConfigError lists all invalid values."""
    given: dict[str, Any] = {"gpus_per_node": 1, **{name: text.strip() for name, text in texts.items()}}
    try:
        config = Config(**given)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    return {name: getattr(config, name) for name in texts}


def parse_budget(tokens: str | None, price: str | None) -> dict[str, Any]:
    """Parses a number of tokens (300000000000, 3e11, 300B or 0.3T) and a price per GPU-hour; returns them as
    arguments for `estimate.cost_of`. ConfigError if invalid.
    """
    budget: dict[str, Any] = {"num_tokens": None, "price_per_gpu_hour": None}
    problems = []
    if tokens is not None:
        factor = _SUFFIXES.get(tokens[-1:].upper())
        count = number_in(tokens[:-1]) * factor if factor else number_in(tokens)
        if 1 <= count <= _MOST_TOKENS:
            budget["num_tokens"] = int(count)
        else:
            rule = f"must be a number of tokens from 1 to {_MOST_TOKENS:.0e}"
            problems.append(problem("tokens", tokens, rule, "use a form such as 300B or 3e11"))
    if price is not None:
        budget["price_per_gpu_hour"] = number_in(price)
        if not 0 <= budget["price_per_gpu_hour"] < float("inf"):
            fix = "set it to the price of a GPU-hour"
            problems.append(problem("price", price, "must be a number of at least 0", fix))
    raise_for(problems)
    return budget


def world_of(num_gpus: int, gpus_per_node: int) -> dict[str, int]:
    """Splits `num_gpus` into NNODES and GPUS_PER_NODE; ValueError if the GPUs do not fill whole nodes."""
    if num_gpus < 1 or gpus_per_node < 1:
        name, value = ("gpus", num_gpus) if num_gpus < 1 else ("gpus_per_node", gpus_per_node)
        raise setting_error(name, value, "must be a whole number of at least 1", "set it to a number of GPUs")
    if num_gpus < gpus_per_node:
        return {"nnodes": 1, "gpus_per_node": num_gpus}
    if num_gpus % gpus_per_node:
        below = num_gpus // gpus_per_node * gpus_per_node
        rule = f"must be a multiple of GPUS_PER_NODE={gpus_per_node}"
        fix = f"use {below} or {below + gpus_per_node}, or another GPUS_PER_NODE"
        raise setting_error("gpus", num_gpus, rule, fix)
    return {"nnodes": num_gpus // gpus_per_node, "gpus_per_node": gpus_per_node}


def settings_for(hardware: Hardware, flags: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """Returns `flags` plus the NNODES and GPUS_PER_NODE that follow from `gpus`."""
    settings = dict(flags)
    if gpus is not None:
        per_node = settings.get("gpus_per_node") or os.environ.get("GPUS_PER_NODE")
        if per_node and not str(per_node).isdecimal():
            rule = "must be a whole number of at least 1"
            raise setting_error("gpus_per_node", per_node, rule, "set GPUS_PER_NODE to a number")
        settings |= world_of(gpus, int(per_node or hardware.gpus_per_node))
    return settings


def exported_settings(
    config: Config, defaults: Config, *, overrides: bool = True
) -> Iterator[tuple[str, str]]:
    """Yields the settings that `moe-exp train` needs to run a layout: layout settings, and all other settings
    that differ from the preset's `defaults`. Node and host settings such as NODE_RANK are omitted.

    With `overrides`, layout settings that the layout does not use are yielded with empty values. As
    environment variables, the empty values replace those of an earlier layout. ValueError if the preset sets
    an unused layout setting, because an empty variable does not override a preset.
    """
    yield "PRESET", config.preset
    # WARMUP_ITERS and DECAY_ITERS follow TRAIN_ITERS, so compare them with its defaults, not the preset's.
    schedule = load_config({"preset": config.preset, "train_iters": config.train_iters}, {})
    usual = defaults.model_dump()
    usual |= {"warmup_iters": schedule.warmup_iters, "decay_iters": schedule.decay_iters}
    always = {*LAYOUT_SETTINGS, "nnodes", "gpus_per_node", "gbsz"}
    always -= set() if overrides else {*SPLIT_SETTINGS, "recompute_modules", "offload_modules"}
    others = ("preset", "master_addr", "master_port", "node_rank", "num_workers", "threads_per_rank")
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in others or (name not in always and value == usual[name]):
            continue
        if value == "" and getattr(defaults, name):
            rule = f"an empty variable does not override PRESET={config.preset}"
            fix = f"keep the preset's value, and train with --{name.replace('_', '-')}="
            raise setting_error(name, "", rule, fix)
        yield name.upper(), as_given(value)
