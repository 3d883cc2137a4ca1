"""Constraints between the settings of a run; those of this machine are in launch/machine_checks.py.

Every function yields a line per problem (name, value, rule, fix). Values that are invalid on their own are
rejected by `moe_exp.config`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.checks.data import EMBEDDED_VOCAB_SIZE, check_data, check_packing, check_stages
from moe_exp.config.checks.layout import check_batch, check_node_rank, check_parallel, check_pipeline
from moe_exp.config.checks.learning import check_groups, check_optimizer, check_schedule
from moe_exp.config.checks.model import check_attention, check_fp8, check_model, check_parametrization
from moe_exp.config.checks.moe import check_moe, check_upcycle
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.config.settings import Config

__all__ = ["EMBEDDED_VOCAB_SIZE", "check_config", "check_node_rank"]


def check_config(config: Config) -> list[str]:
    """Problems among the settings themselves, the same on every machine."""
    return [
        *check_model(config),
        *check_attention(config),
        *check_moe(config),
        *check_parametrization(config),
        *check_fp8(config),
        *check_upcycle(config),
        *check_parallel(config),
        *check_pipeline(config),
        *check_batch(config),
        *check_schedule(config),
        *check_groups(config),
        *check_optimizer(config),
        *_profiling(config),
        *check_data(config),
        *check_packing(config),
        *check_stages(config),
        *_retention(config),
        *_dumps(config),
        *_loss_guard(config),
    ]


# A trace of one iteration of a large model has hundreds of MB.
_MOST_TRACED = 100


def _profiling(c: Config) -> Iterator[str]:
    """PROFILE_ITERS, MEMORY_SNAPSHOT and their ranks; launch/machine_checks.py checks device support."""
    for name in ("profile_iters", "memory_snapshot"):
        ranges = iteration_ranges(getattr(c, name))
        if any(first > c.train_iters for first, _ in ranges):
            fix = f"name iterations up to {c.train_iters}"
            yield c.problem(name, f"is after TRAIN_ITERS={c.train_iters}", fix)
        if (most := max((last - first + 1 for first, last in ranges), default=0)) > _MOST_TRACED:
            rule = f"are {most} iterations, more than a viewer can load"
            yield c.problem(name, rule, f"name at most {_MOST_TRACED}")
    ranks = [] if c.profile_ranks == "all" else [int(rank) for rank in c.profile_ranks.split(",")]
    if missing := [rank for rank in ranks if rank >= c.world_size]:
        rule = f"there is no rank {missing[0]}, the run has {c.world_size}"
        yield c.problem("profile_ranks", rule, f"name ranks from 0 to {c.world_size - 1}, or all")


def _retention(c: Config) -> Iterator[str]:
    for name in ("keep_every", "keep_best"):
        if getattr(c, name) and not c.keep_last:
            rule = "has no effect with KEEP_LAST=0, which keeps all checkpoints"
            yield c.problem(name, rule, "set KEEP_LAST")
    if c.keep_every and c.save_interval and c.keep_every % c.save_interval:
        rule = f"is no multiple of SAVE_INTERVAL={c.save_interval}"
        yield c.problem("keep_every", rule, f"set it to {c.save_interval}")
    if c.keep_best and (not c.eval_interval or not c.save_interval or c.save_interval % c.eval_interval):
        rule = f"needs a validation at every save, SAVE_INTERVAL={c.save_interval} is no multiple of"
        fix = "set both to the same number"
        yield c.problem("keep_best", f"{rule} EVAL_INTERVAL={c.eval_interval}", fix)


def _dumps(c: Config) -> Iterator[str]:
    ranks = [int(rank) for rank in c.dump_ranks.split(",") if rank]
    if missing := [rank for rank in ranks if rank >= c.world_size]:
        fix = f"name ranks from 0 to {c.world_size - 1}"
        yield c.problem("dump_ranks", f"there is no rank {missing[0]} of {c.world_size}", fix)
    if ranks and not c.dump_iters:
        fix = "set DUMP_ITERS to the iterations"
        yield c.problem("dump_ranks", "has no effect without DUMP_ITERS", fix)


def _loss_guard(c: Config) -> Iterator[str]:
    if c.spike_action == "rollback" and not c.save_interval:
        rule = "goes back to a checkpoint, but SAVE_INTERVAL=0 saves none before the end"
        yield c.problem("spike_action", rule, "set SAVE_INTERVAL, or SPIKE_ACTION=log")
    if c.spike_action == "rollback" and c.keep_last == 1:
        rule = "keeps no checkpoint from before a spike that comes right after a save, and"
        fix = "set KEEP_LAST=2 or more, or 0 for all"
        yield c.problem("keep_last", f"{rule} SPIKE_ACTION=rollback goes back to one", fix)
