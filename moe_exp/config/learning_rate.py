"""The learning rate at every point of a run, and settings whose schedule does not fit the run. No torch.

Training uses Megatron's OptimizerParamScheduler (`engine.optimizer_setup.build_scheduler`); this is the same
schedule as a function of the settings, for commands that only plan. Both count samples, not iterations.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config.choices import SCHEDULES
from moe_exp.config.ramp import samples_left
from moe_exp.config.settings import Config, problem

# Of the run, at which a dry run prints the learning rate.
_SHOWN_PERCENT = (0, 25, 50, 75, 100)
# DECAY_ITERS may end in this range, as a share of the run, without a warning.
_EARLIEST_END, _LATEST_END = 0.9, 1.1


def learning_rate(config: Config, consumed_samples: int) -> float:
    """The learning rate after `consumed_samples`, as `metrics.jsonl` has it after that iteration."""
    warmup, end = config.warmup_iters * config.gbsz, config.decay_end * config.gbsz
    if warmup and consumed_samples <= warmup:
        return config.lr * consumed_samples / warmup
    schedule = SCHEDULES[config.lr_decay_style]
    if schedule.remaining is None:
        return config.lr
    if consumed_samples > end:
        return config.min_lr
    start = end - config.wsd_decay_iters * config.gbsz if schedule.has_final_decay else warmup
    progress = max(0, consumed_samples - start) / (end - start)
    return config.min_lr + schedule.remaining(progress) * (config.lr - config.min_lr)


def learning_rate_text(config: Config) -> str:
    """One line with the learning rate at 0, 25, 50, 75 and 100% of the run."""
    points = []
    for percent in _SHOWN_PERCENT:
        iteration = config.train_iters * percent // 100
        rate = learning_rate(config, samples_left(config, 0, iteration))
        points.append(f"{rate:.3g} at {iteration} ({percent}%)")
    return f"learning rate after iteration ({config.lr_decay_style}): {', '.join(points)}"


def schedule_warnings(config: Config) -> list[str]:
    """A line if the run ends inside the warm-up, or long before or after DECAY_ITERS."""
    return list(_schedule_warnings(config))


def _schedule_warnings(c: Config) -> Iterator[str]:
    num_samples = samples_left(c, 0, c.train_iters)
    reached = learning_rate(c, num_samples)
    if c.warmup_iters >= c.train_iters:
        rule = (
            f"the run ends at TRAIN_ITERS={c.train_iters}, still warming up, at {reached:.3g} of LR={c.lr:g}"
        )
        fix = f"set WARMUP_ITERS to {c.train_iters // 10}, a tenth of it, or raise TRAIN_ITERS"
        yield problem("warmup_iters", c.warmup_iters, rule, fix)
    if not c.decay_iters or SCHEDULES[c.lr_decay_style].remaining is None:
        return
    run = num_samples / c.gbsz  # in full batches, as the schedule counts
    if c.decay_iters < _EARLIEST_END * run:
        share = f"{1 - c.decay_iters / run:.0%}"
        rule = f"the last {share} of TRAIN_ITERS={c.train_iters} would train at MIN_LR={c.min_lr:g}"
    elif c.decay_iters > _LATEST_END * run:
        last = f"{reached:.3g}, above MIN_LR={c.min_lr:g}"
        rule = f"the run ends at TRAIN_ITERS={c.train_iters} with a learning rate of {last}"
    else:
        return
    yield problem("decay_iters", c.decay_iters, rule, "set DECAY_ITERS=0, which follows TRAIN_ITERS")
