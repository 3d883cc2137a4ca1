"""Constraints on settings of batch ramp-up, optimizer and profiler. Returns lines as checks.py does."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.choices import OPTIMIZERS
from moe_exp.config.ramp import ramp_sizes
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.config.settings import Config, problem

# bf16 has 8 bits of precision: relative changes below 2^-8 may be rounded away.
_LARGEST_BF16_BETA = 1 - 2**-8

_MOST_RAMP_STEPS, _MOST_RAMP_SAMPLES = 10_000, 10**15


def check_rampup(c: Config, replicas: int) -> Iterator[str]:
    """RAMPUP_BATCH_SIZE: this many data-parallel replicas can run every batch size of the ramp."""
    try:
        rampup = c.rampup
    except ValueError:
        rampup = (0, 0, 0)
    if rampup is None:
        return
    start, increment, samples = rampup
    step = c.mbsz * replicas
    if min(start, increment, samples) < 1:
        rule = "must be three positive whole numbers"
    elif start > c.gbsz or (c.gbsz - start) % increment:
        rule = f"START must reach GBSZ={c.gbsz} in whole steps of INCREMENT"
    elif (c.gbsz - start) // increment > _MOST_RAMP_STEPS or samples > _MOST_RAMP_SAMPLES:
        rule = f"must have at most {_MOST_RAMP_STEPS} steps and {_MOST_RAMP_SAMPLES} samples"
    else:
        rule = _step_that_does_not_divide(c, replicas)
    if rule:
        size = step * c.pp if c.vpp else step
        fix = (
            f"give START INCREMENT SAMPLES, for instance '{size} {size} 1000'"
            if c.gbsz % size == 0
            else "first correct GBSZ"
        )
        yield problem("rampup_batch_size", c.rampup_batch_size, rule, fix)


def _step_that_does_not_divide(c: Config, replicas: int) -> str:
    """The first batch size of the ramp that is not a multiple of a micro-batch on all replicas, or ''."""
    step, sizes = c.mbsz * replicas, ramp_sizes(c)
    for number, size in enumerate(sizes[:-1], start=1):
        has = f"step {number} of {len(sizes)} has a batch of {size}"
        if size % step:
            return f"{has}, no multiple of MBSZ*DP={c.mbsz}*{replicas}={step}"
        if c.vpp and size % (step * c.pp):
            return (
                f"{has}, with VPP={c.vpp} no multiple of PP*MBSZ*DP={c.pp}*{c.mbsz}*{replicas}={step * c.pp}"
            )
    return ""


def check_parametrization(c: Config) -> Iterator[str]:
    """PARAMETRIZATION=mup: what its rules do not cover."""
    if c.parametrization == "standard":
        return
    if not c.mup_base_hidden_size:
        fix = "set it to the HIDDEN_SIZE for which LR was found"
        yield problem("mup_base_hidden_size", 0, "PARAMETRIZATION=mup needs the sizes of a base model", fix)
    others = {
        f"OPTIMIZER={c.optimizer}, as its rules are for Adam": (
            OPTIMIZERS[c.optimizer].moments != "adam",
            "OPTIMIZER=adam",
        ),
        "TIE_EMBEDDINGS=true, as embedding and output layer have different rules": (
            c.tie_embeddings,
            "TIE_EMBEDDINGS=false",
        ),
        "MULTI_LATENT_ATTENTION=true, whose ranks have no rule": (
            c.multi_latent_attention,
            "MULTI_LATENT_ATTENTION=false",
        ),
        f"MOE_LATENT_SIZE={c.moe_latent_size}, whose projections have no rule": (
            c.use_moe and c.moe_latent_size > 0,
            "MOE_LATENT_SIZE=0",
        ),
    }
    for other, (is_set, fix) in others.items():
        if is_set:
            yield problem("parametrization", "mup", f"does not go with {other}", f"set {fix}")


def check_optimizer(c: Config) -> Iterator[str]:
    """OPTIMIZER and its settings; the packages that it needs are seen to by launch/machine_checks.py."""
    if c.distributed_optimizer and not OPTIMIZERS[c.optimizer].is_sharded:
        rule = (
            f"OPTIMIZER={c.optimizer} needs whole matrices, of which the distributed optimizer gives a rank"
            " ranges of values"
        )
        yield problem(
            "distributed_optimizer", "true", rule, "set DISTRIBUTED_OPTIMIZER=false, or OPTIMIZER=adam"
        )
    if c.ema_decay and c.average_every > c.train_iters:
        rule = (
            f"with TRAIN_ITERS={c.train_iters} the average of EMA_DECAY={c.ema_decay:g} would have no weights"
        )
        yield problem("average_every", c.average_every, rule, f"set it to at most {c.train_iters}")
    if c.qk_clip and c.distributed_optimizer:
        rule = "the distributed optimizer gives a rank ranges of values, not the rows of a head"
        yield problem("qk_clip", c.qk_clip, rule, "set DISTRIBUTED_OPTIMIZER=false, or QK_CLIP=0")
    if c.qk_clip and c.qk_norm and not c.multi_latent_attention:
        rule = "QK_NORM=true undoes every scaling of queries and keys, and bounds the logits itself"
        yield problem("qk_clip", c.qk_clip, rule, "set QK_CLIP=0, or QK_NORM=false")
    if c.optimizer_state_dtype == "fp32":
        return
    if not OPTIMIZERS[c.optimizer].has_bf16:
        fix = "set OPTIMIZER_STATE_DTYPE=fp32, or OPTIMIZER=adam"
        yield problem(
            "optimizer_state_dtype",
            c.optimizer_state_dtype,
            f"is of the moments of Adam, but OPTIMIZER={c.optimizer}",
            fix,
        )
        return
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(c, name) > _LARGEST_BF16_BETA:
            rule = (
                "a moment of OPTIMIZER_STATE_DTYPE=bf16 would not decay any more, its change in a step is"
                " lost by rounding"
            )
            fix = f"set {name.upper()} to at most {_LARGEST_BF16_BETA:.3f}, or OPTIMIZER_STATE_DTYPE=fp32"
            yield problem(name, getattr(c, name), rule, fix)


# A trace of one iteration of a large model has hundreds of MB.
_MOST_TRACED = 100


def check_profiling(c: Config) -> Iterator[str]:
    """PROFILE_ITERS, MEMORY_SNAPSHOT and their ranks; launch/machine_checks.py checks device support."""
    for name in ("profile_iters", "memory_snapshot"):
        ranges = iteration_ranges(getattr(c, name))
        if any(first > c.train_iters for first, _ in ranges):
            yield problem(
                name,
                getattr(c, name),
                f"is after TRAIN_ITERS={c.train_iters}",
                f"name iterations up to {c.train_iters}",
            )
        if (most := max((last - first + 1 for first, last in ranges), default=0)) > _MOST_TRACED:
            rule = f"are {most} iterations, more than a viewer can load"
            yield problem(name, getattr(c, name), rule, f"name at most {_MOST_TRACED}")
    ranks = [] if c.profile_ranks == "all" else [int(rank) for rank in c.profile_ranks.split(",")]
    if missing := [rank for rank in ranks if rank >= c.world_size]:
        rule = f"there is no rank {missing[0]}, the run has {c.world_size}"
        yield problem(
            "profile_ranks", c.profile_ranks, rule, f"name ranks from 0 to {c.world_size - 1}, or all"
        )
