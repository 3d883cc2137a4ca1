"""Sizes and lengths that make models comparable: equal FLOPs or active parameters per token, or time.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from moe_exp.config import Config, ConfigError, problem
from moe_exp.config.parsers import scaled_points
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import count_parameters
from moe_exp.studies.compare.variants import Variant, reference_of

Match = Literal["flops", "active-params", "time"]
MATCHES: tuple[Match, ...] = ("flops", "active-params", "time")

# Settings that name points of the schedule, as iterations or as shares.
POINTS = ("lr_decay_style", "wsd_decay_ends")
# GEMMs are faster at round widths; an error up to this share is fine.
_ROUND_WIDTHS, _CLOSE = (64, 8), 2e-3


def flops_per_token(config: Config) -> float:
    """Model FLOPs per token, forward and backward."""
    return flops_per_iteration(config, 1) / config.seq_len


def active_parameters(config: Config) -> float:
    """Parameters that one token uses; all in a dense model."""
    return count_parameters(config).active_per_token


def measure_of(match: Match) -> Callable[[Config], float]:
    """Quantity by which sizes are matched; with `time`, FLOPs per token, too."""
    return active_parameters if match == "active-params" else flops_per_token


def apart(config: Config, reference: Config, match: Match) -> float:
    """Relative difference to the reference in FLOPs, or active parameters, per token."""
    measure = measure_of(match)
    return measure(config) / measure(reference) - 1


def width_setting(config: Config) -> str:
    """The setting that changes a model's size: width of the dense MLP, or of a routed expert."""
    return "moe_ffn_hidden_size" if config.use_moe else "ffn_hidden_size"


def matched_width(config: Config, target: float, measure: Callable[[Config], float]) -> int:
    """The MLP width whose `measure` is closest to `target`, rounded if that stays within 0.2%; 0 if the model
    is larger even without any MLP. FLOPs and parameters are linear in the width, so two widths determine it.
    """
    name, unit = width_setting(config), config.etp if config.use_moe else config.tp

    def measured(width: int) -> float:
        return measure(config.model_copy(update={name: width}))

    slope = (measured(2 * unit) - measured(unit)) / unit
    exact = (target - measured(unit)) / slope + unit
    if exact < unit / 2:
        return 0
    for step in (*(width * unit for width in _ROUND_WIDTHS), unit):
        width = max(1, round(exact / step)) * step
        if abs(measured(width) / target - 1) <= _CLOSE:
            break
    return width


def match_sizes(variants: Sequence[Variant], match: Match) -> list[Variant]:
    """Sets MLP widths to match the reference, unless a variant sets its own width or already matches.
    ConfigError if a variant cannot be made that small.
    """
    reference, measure = reference_of(variants), measure_of(match)
    target, matched, problems = measure(reference.config), [], []
    for variant in variants:
        name = width_setting(variant.config)
        if name in variant.own or abs(apart(variant.config, reference.config, match)) <= _CLOSE:
            matched.append(variant)
            continue
        if width := matched_width(variant.config, target, measure):
            matched.append(variant.having(**{name: width}))
        else:
            unit = "active parameters" if match == "active-params" else "FLOPs per token"
            rule = f"has more than the {target:.4g} {unit} of {reference.name} by its other settings alone"
            fix = f"set its {name.upper()} yourself, or make it smaller"
            problems.append(problem("variant", variant.name, rule, fix))
    if problems:
        raise ConfigError(problems)
    return matched


def with_iterations(variant: Variant, iterations: int) -> Variant:
    """The variant with this TRAIN_ITERS, and the learning rate decay scaled in proportion."""
    before = variant.config
    if iterations == before.train_iters:
        return variant

    def scaled(value: int) -> int:
        return max(1, round(value * iterations / before.train_iters)) if value else 0

    decay = scaled(before.decay_iters)
    last = decay or iterations
    warmup = min(before.warmup_iters, last - 1)
    wsd = min(scaled(before.wsd_decay_iters), last)
    texts = {name: scaled_points(getattr(before, name), iterations / before.train_iters) for name in POINTS}
    texts = {name: text for name, text in texts.items() if text != getattr(before, name)}
    return variant.having(
        train_iters=iterations, decay_iters=decay, warmup_iters=warmup, wsd_decay_iters=wsd, **texts
    )
