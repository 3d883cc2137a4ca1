"""Constraints on the learning-rate schedule and on parameter groups. Returns lines as checks.py does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from moe_exp.config.choices import SCHEDULES
from moe_exp.config.parameter_groups import (
    Rule,
    close_names,
    deciding_rules,
    is_norm_or_bias,
    parameter_sizes,
    rules_of,
)
from moe_exp.config.schedule import decay_ends, is_composed, pieces_of
from moe_exp.config.settings import Config, problem


def check_schedule(c: Config) -> Iterator[str]:
    """LR, MIN_LR, LR_DECAY_STYLE and the iterations that they name."""
    decay_name, decay = "DECAY_ITERS" if c.decay_iters else "TRAIN_ITERS", c.decay_end
    if c.warmup_iters >= decay:
        fix = f"set WARMUP_ITERS below {decay}, or raise {decay_name}"
        yield problem(
            "warmup_iters", c.warmup_iters, f"is not below {decay_name}={decay}, where the decay ends", fix
        )
    if c.min_lr > c.lr:
        yield problem(
            "min_lr",
            c.min_lr,
            f"is over LR={c.lr}",
            f"set MIN_LR to at most {c.lr}, for instance {c.lr / 10:g}",
        )
    if is_composed(c.lr_decay_style):
        yield from _pieces(c, decay_name)
        return
    schedule = SCHEDULES[c.lr_decay_style]
    least = int(schedule.needs_it)
    if schedule.has_final_decay and not least <= c.wsd_decay_iters <= decay:
        fix = f"set WSD_DECAY_ITERS to {least} to {decay}, or another LR_DECAY_STYLE"
        rule = f"LR_DECAY_STYLE={c.lr_decay_style} decays over {least} to {decay_name}={decay} iterations"
        yield problem("wsd_decay_iters", c.wsd_decay_iters, rule, fix)
    elif c.lr_decay_style == "WSD-S":
        yield from _decays(c)
    if c.lr_decay_style == "inverse-square-root" and not c.warmup_iters:
        rule = "LR_DECAY_STYLE=inverse-square-root is LR * sqrt(WARMUP_ITERS / iteration)"
        yield problem("warmup_iters", 0, rule, "set WARMUP_ITERS to 1 or more")


def _decays(c: Config) -> Iterator[str]:
    """The decays of WSD-S follow one another, and all are over before the final one begins."""
    if not c.wsd_decay_ends:
        rule = "LR_DECAY_STYLE=WSD-S needs the iterations with which decays before the final one end"
        yield problem("wsd_decay_ends", "", rule, "set for instance WSD_DECAY_ENDS=25%,50%")
        return
    before = c.warmup_iters
    for end in decay_ends(c):
        begin = end - c.wsd_decay_iters
        if begin < before:
            rule = f"a decay of WSD_DECAY_ITERS={c.wsd_decay_iters} up to iteration {end} begins at {begin},"
            rule += f" before {'the warm-up' if before == c.warmup_iters else 'the decay before it'} ends"
            rule += f" at {before}"
            fix = "give iterations in order, at least WSD_DECAY_ITERS apart, and from the end of the run"
            yield problem("wsd_decay_ends", c.wsd_decay_ends, rule, fix)
            return
        before = end


def _pieces(c: Config, decay_name: str) -> Iterator[str]:
    """Pieces follow one another, from the end of the warm-up to that of the schedule."""
    pieces = pieces_of(c)
    before, fix = c.warmup_iters, "give the iterations, or shares, in order"
    for number, piece in enumerate(pieces, 1):
        end = piece.end // c.gbsz
        if end <= before:
            where = "the warm-up ends" if number == 1 else "the piece before it ends"
            rule = f"piece {number} ends at iteration {end}, but {where} at {before}"
            yield problem("lr_decay_style", c.lr_decay_style, rule, fix)
            return
        before = end
    if before > c.decay_end:
        rule = f"its last piece ends at iteration {before}, after {decay_name}={c.decay_end}"
        yield problem("lr_decay_style", c.lr_decay_style, rule, f"leave that end out, or raise {decay_name}")
    if pieces[0].style == "inverse-square-root" and not c.warmup_iters:
        rule = "an inverse square root falls from the end of the warm-up on"
        yield problem("warmup_iters", 0, rule, "set WARMUP_ITERS to 1 or more")


def check_groups(c: Config) -> Iterator[str]:
    """Every line of LR_GROUPS, ROUTER_LR_MULT and EXPERT_LR_MULT has an effect on some parameter."""
    if not (rules := rules_of(c)):
        return
    names = list(parameter_sizes(c))
    deciding = {name: deciding_rules(rules, name) for name in names}
    used = [
        {id(found[index]) for name, found in deciding.items() if not index or not is_norm_or_bias(name)}
        for index in (0, 1)
    ]
    for rule in rules:
        value = rule.pattern if rule.setting == "lr_groups" else getattr(c, rule.setting)
        matching = [name for name in names if rule.matches(name)]
        if not matching:
            if rule.setting == "lr_groups":
                fix = f"write it as in {', '.join(close_names(rule.pattern, names))}"
                yield problem(rule.setting, value, "matches no parameter of this model", fix)
            continue
        yield from (problem(rule.setting, value, *text) for text in _unused(rule, matching, used))


def _unused(
    rule: Rule, matching: Sequence[str], used: Sequence[Collection[int]]
) -> Iterator[tuple[str, str]]:
    """Rule and fix of a problem for each multiple of a line that has no effect."""
    for key, by in zip(("lr", "wd"), used, strict=True):
        if getattr(rule, key) is None or id(rule) in by:
            continue
        if key == "wd" and all(map(is_norm_or_bias, matching)):
            yield "has a wd, but matches norms and biases only, which never decay", "leave out the wd"
        else:
            where = "an earlier pattern" if rule.setting == "lr_groups" else "LR_GROUPS"
            fix = "put this pattern before it" if rule.setting == "lr_groups" else "leave out one of the two"
            yield f"{where} has the {key} of every parameter that it is for", fix
