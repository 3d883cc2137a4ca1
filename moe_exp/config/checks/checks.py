"""Constraints between the settings of a run; those of this machine are in launch/machine_checks.py.

Every function yields a line per problem (name, value, rule, fix). Values that are invalid on their own are
rejected by `moe_exp.config`.
"""

from collections.abc import Iterator, Mapping

from moe_exp.config.checks.data import EMBEDDED_VOCAB_SIZE, check_data, check_stages
from moe_exp.config.checks.layout import check_batch, check_node_rank, check_parallel, check_pipeline
from moe_exp.config.checks.learning import check_groups, check_optimizer, check_schedule
from moe_exp.config.checks.model import check_attention, check_fp8, check_model, check_parametrization
from moe_exp.config.checks.moe import check_moe, check_upcycle
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.config.settings import Config, problem

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
        *_profiled_and_dumped(config),
        *check_data(config),
        *check_stages(config),
        *_saved(config),
    ]


# A trace of one iteration of a large model has hundreds of MB.
_MOST_TRACED = 100


def _profiled_and_dumped(c: Config) -> Iterator[str]:
    """PROFILE_ITERS, MEMORY_SNAPSHOT, DUMP_ITERS and their ranks; machine_checks.py checks device support."""
    for name in ("profile_iters", "memory_snapshot"):
        ranges = iteration_ranges(getattr(c, name))
        if any(first > c.train_iters for first, _ in ranges):
            fix = f"name iterations up to {c.train_iters}"
            yield c.problem(name, f"is after TRAIN_ITERS={c.train_iters}", fix)
        if (most := max((last - first + 1 for first, last in ranges), default=0)) > _MOST_TRACED:
            rule = f"are {most} iterations, more than a viewer can load"
            yield c.problem(name, rule, f"name at most {_MOST_TRACED}")
    for name, others in (("profile_ranks", ", or all"), ("dump_ranks", "")):
        ranks = [int(rank) for rank in getattr(c, name).split(",") if rank not in ("", "all")]
        if missing := [rank for rank in ranks if rank >= c.world_size]:
            fix = f"name ranks from 0 to {c.world_size - 1}{others}"
            yield c.problem(name, f"there is no rank {missing[0]}, the run has {c.world_size}", fix)
    if c.dump_ranks and not c.dump_iters:
        fix = "set DUMP_ITERS to the iterations"
        yield c.problem("dump_ranks", "has no effect without DUMP_ITERS", fix)


def _saved(c: Config) -> Iterator[str]:
    """Checkpoints to keep, and those that a rollback needs."""
    no_effect = "has no effect with KEEP_LAST=0, which keeps all checkpoints"
    save, evaluate, rolls_back = c.save_interval, c.eval_interval, c.spike_action == "rollback"
    return c.problems(
        (c.keep_every and not c.keep_last, "keep_every", no_effect, "set KEEP_LAST"),
        (c.keep_best and not c.keep_last, "keep_best", no_effect, "set KEEP_LAST"),
        (save and c.keep_every % save, "keep_every",
         f"is no multiple of SAVE_INTERVAL={save}", f"set it to {save}"),
        (c.keep_best and (not evaluate or not save or save % evaluate), "keep_best",
         f"needs a validation at every save, SAVE_INTERVAL={save} is no multiple of EVAL_INTERVAL={evaluate}",
         "set both to the same number"),
        (rolls_back and not save, "spike_action",
         "goes back to a checkpoint, but SAVE_INTERVAL=0 saves none before the end",
         "set SAVE_INTERVAL, or SPIKE_ACTION=log"),
        (rolls_back and c.keep_last == 1, "keep_last",
         "keeps no checkpoint from before a spike that comes right after a save, and SPIKE_ACTION=rollback"
         " goes back to one", "set KEEP_LAST=2 or more, or 0 for all"),
    )  # fmt: skip


# For DETERMINISTIC, as Megatron-LM's --deterministic-mode has them; engine/runtime.py configures torch.
# Variables that CUDA's libraries read at start, and values with a fixed order of summation; the first is our
# default. Other NCCL algorithms are repeatable, too, but a tree's order depends on the topology.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring",),
    # required by Megatron's Transformer Engine attention
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def deterministic_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that DETERMINISTIC needs and `environ` lacks."""
    needed = ENVIRONMENT if config.deterministic else {}
    return {name: values[0] for name, values in needed.items() if not environ.get(name)}


def environment_problems(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables of `environ` that conflict with DETERMINISTIC."""
    for name, values in ENVIRONMENT.items() if config.deterministic else ():
        if (value := environ.get(name)) and value not in values:
            fix = f"unset {name}, or set {name}={' or '.join(values)}, or DETERMINISTIC=false"
            yield problem(name, value, "DETERMINISTIC=true needs sums in one order", fix)
