"""Constraints on the learning-rate schedule, parameter groups and the optimizer."""

from collections.abc import Collection, Iterator, Sequence

from moe_exp.config.choices import OPTIMIZERS, SCHEDULES
from moe_exp.config.learning_rate import decay_ends, pieces_of
from moe_exp.config.parameter_groups import (
    close_names,
    deciding_rules,
    is_norm_or_bias,
    parameter_sizes,
    rules_of,
)
from moe_exp.config.parsers import Rule, is_composed
from moe_exp.config.settings import Config, problem


def check_schedule(c: Config) -> Iterator[str]:
    """LR, MIN_LR, LR_DECAY_STYLE and the iterations that they name."""
    decay_name, decay = "DECAY_ITERS" if c.decay_iters else "TRAIN_ITERS", c.decay_end
    yield from c.problems(
        (c.warmup_iters >= decay, "warmup_iters", f"is not below {decay_name}={decay}, where the decay ends",
         f"set WARMUP_ITERS below {decay}, or raise {decay_name}"),
        (c.min_lr > c.lr, "min_lr",
         f"is over LR={c.lr}", f"set MIN_LR to at most {c.lr}, for instance {c.lr / 10:g}"),
    )  # fmt: skip
    if is_composed(c.lr_decay_style):
        yield from _pieces(c, decay_name)
        return
    schedule = SCHEDULES[c.lr_decay_style]
    least = int(schedule.needs_it)
    if schedule.has_final_decay and not least <= c.wsd_decay_iters <= decay:
        fix = f"set WSD_DECAY_ITERS to {least} to {decay}, or another LR_DECAY_STYLE"
        rule = f"LR_DECAY_STYLE={c.lr_decay_style} decays over {least} to {decay_name}={decay} iterations"
        yield c.problem("wsd_decay_iters", rule, fix)
    elif c.lr_decay_style == "WSD-S":
        yield from _decays(c)
    if c.lr_decay_style == "inverse-square-root" and not c.warmup_iters:
        rule = "LR_DECAY_STYLE=inverse-square-root is LR * sqrt(WARMUP_ITERS / iteration)"
        yield c.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")


def _decays(c: Config) -> Iterator[str]:
    """The decays of WSD-S follow one another, and all are over before the final one begins."""
    if not c.wsd_decay_ends:
        rule = "LR_DECAY_STYLE=WSD-S needs the iterations with which decays before the final one end"
        yield c.problem("wsd_decay_ends", rule, "set for instance WSD_DECAY_ENDS=25%,50%")
        return
    before, what = c.warmup_iters, "the warm-up"
    for end in decay_ends(c):
        begin = end - c.wsd_decay_iters
        if begin < before:
            rule = f"a decay of WSD_DECAY_ITERS={c.wsd_decay_iters} up to iteration {end} begins at {begin},"
            fix = "give iterations in order, at least WSD_DECAY_ITERS apart, and from the end of the run"
            yield c.problem("wsd_decay_ends", f"{rule} before {what} ends at {before}", fix)
            return
        before, what = end, "the decay before it"


def _pieces(c: Config, decay_name: str) -> Iterator[str]:
    """Pieces follow one another, from the end of the warm-up to that of the schedule."""
    pieces = pieces_of(c)
    before, what = c.warmup_iters, "the warm-up"
    for number, piece in enumerate(pieces, 1):
        end = piece.end // c.gbsz
        if end <= before:
            rule = f"piece {number} ends at iteration {end}, but {what} ends at {before}"
            yield c.problem("lr_decay_style", rule, "give the iterations, or shares, in order")
            return
        before, what = end, "the piece before it"
    if before > c.decay_end:
        rule = f"its last piece ends at iteration {before}, after {decay_name}={c.decay_end}"
        yield c.problem("lr_decay_style", rule, f"leave that end out, or raise {decay_name}")
    if pieces[0].style == "inverse-square-root" and not c.warmup_iters:
        rule = "an inverse square root falls from the end of the warm-up on"
        yield c.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")


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


# bf16 has 8 bits of precision: relative changes below 2^-8 may be rounded away.
_LARGEST_BF16_BETA = 1 - 2**-8


def check_optimizer(c: Config) -> Iterator[str]:
    """OPTIMIZER and its settings; the packages that it needs are seen to by launch/machine_checks.py."""
    optimizer = OPTIMIZERS[c.optimizer]
    is_bf16 = c.optimizer_state_dtype != "fp32"
    yield from c.problems(
        (c.distributed_optimizer and not optimizer.is_sharded, "distributed_optimizer",
         f"OPTIMIZER={c.optimizer} needs whole matrices, and the distributed optimizer gives a rank ranges of"
         " values", "set DISTRIBUTED_OPTIMIZER=false, or OPTIMIZER=adam"),
        (c.ema_decay and c.average_every > c.train_iters, "average_every",
         f"with TRAIN_ITERS={c.train_iters} the average of EMA_DECAY={c.ema_decay:g} would have no weights",
         f"set it to at most {c.train_iters}"),
        (c.qk_clip and c.distributed_optimizer, "qk_clip",
         "the distributed optimizer gives a rank ranges of values, not the rows of a head",
         "set DISTRIBUTED_OPTIMIZER=false, or QK_CLIP=0"),
        (c.qk_clip and c.qk_norm and not c.multi_latent_attention, "qk_clip",
         "QK_NORM=true undoes every scaling of queries and keys, and bounds the logits itself",
         "set QK_CLIP=0, or QK_NORM=false"),
        (is_bf16 and not optimizer.has_bf16, "optimizer_state_dtype",
         f"is of the moments of Adam, but OPTIMIZER={c.optimizer}",
         "set OPTIMIZER_STATE_DTYPE=fp32, or OPTIMIZER=adam"),
    )  # fmt: skip
    for name in ("adam_beta1", "adam_beta2") if is_bf16 and optimizer.has_bf16 else ():
        if getattr(c, name) > _LARGEST_BF16_BETA:
            rule = "a moment of OPTIMIZER_STATE_DTYPE=bf16 would not decay any more, its change in a step is"
            fix = f"set {name.upper()} to at most {_LARGEST_BF16_BETA:.3f}, or OPTIMIZER_STATE_DTYPE=fp32"
            yield c.problem(name, f"{rule} lost by rounding", fix)
