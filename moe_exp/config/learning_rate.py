"""The learning rate at every point of a run, and settings whose schedule does not fit the run. No torch.

The only place with the formulas: training (`engine.optimizer_setup.LearningRateScheduler`) and commands that
only plan call `learning_rate`. It counts samples, not iterations, so that a batch ramp-up does not bend the
curve. For the styles that Megatron's OptimizerParamScheduler has, it is the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from moe_exp.config.choices import DECAYS, SCHEDULES
from moe_exp.config.ramp import samples_left
from moe_exp.config.schedule import Piece, is_composed, pieces_of, shown_pieces
from moe_exp.config.settings import Config, problem

# Of the run, at which a dry run prints the learning rate.
_SHOWN_PERCENT = (0, 25, 50, 75, 100)
# DECAY_ITERS may end in this range, as a share of the run, without a warning.
_EARLIEST_END, _LATEST_END = 0.9, 1.1


def learning_rate(
    config: Config, consumed_samples: int, *, max_lr: float | None = None, min_lr: float | None = None
) -> float:
    """The learning rate after `consumed_samples`, as `metrics.jsonl` has it after that iteration.

    A linear warm-up from 0, then the pieces of the schedule. Where one ends, the next has begun: with WSD-S,
    the iteration after a decay trains at LR. After the last it is MIN_LR, or stays if it was constant.

    Args:
        config: the settings; they passed config/checks.
        consumed_samples: since the start of the run; with the next iteration's rate as the result.
        max_lr: LR of a group of parameters, by default LR.
        min_lr: MIN_LR of that group, likewise.
    """
    bounds = (config.lr if max_lr is None else max_lr, config.min_lr if min_lr is None else min_lr)
    pieces, warmup = pieces_of(config), config.warmup_iters * config.gbsz
    if warmup and consumed_samples <= warmup:
        return _rate(config, pieces[0], warmup, bounds[0], bounds) * consumed_samples / warmup
    rate = bounds[0]
    for piece in pieces:
        if consumed_samples < piece.end:
            return _rate(config, piece, consumed_samples, rate, bounds)
        rate = _rate(config, piece, piece.end, rate, bounds)
    last = pieces[-1]
    return rate if consumed_samples == last.end or last.style == "constant" else _target(last, bounds)


def _target(piece: Piece, bounds: tuple[float, float]) -> float:
    max_lr, min_lr = bounds
    return min_lr if piece.target is None else piece.target * max_lr


def _rate(config: Config, piece: Piece, samples: int, before: float, bounds: tuple[float, float]) -> float:
    """The rate inside a piece, or at its end; `before` is the rate at which the one before has ended."""
    target = _target(piece, bounds)
    if piece.style == "constant":
        return before if piece.target is None else target
    if piece.style == "inverse-square-root":
        return max(target, before * math.sqrt(max(piece.start, 1) / max(samples, 1)))
    if piece.style == "power":  # Shen et al. 2024, arXiv:2408.13359, equation 7
        tokens, multiple = max(samples, 1) * config.seq_len, bounds[0] / config.lr
        power = multiple * config.gbsz * config.lr_power_a * tokens**config.lr_power_b
        return max(target, min(bounds[0], power))
    if samples <= piece.start:
        return before
    share = (samples - piece.start) / (piece.end - piece.start)
    return target + DECAYS[piece.style](share) * (before - target)


def learning_rate_text(config: Config) -> str:
    """One line with the learning rate at 0, 25, 50, 75 and 100% of the run, and where pieces end."""
    points = []
    for percent in _SHOWN_PERCENT:
        iteration = config.train_iters * percent // 100
        rate = learning_rate(config, samples_left(config, 0, iteration))
        points.append(f"{rate:.3g} at {iteration} ({percent}%)")
    pieces = f"; {shown_pieces(config)}" if len(pieces_of(config)) > 1 else ""
    return f"learning rate after iteration ({config.lr_decay_style}{pieces}): {', '.join(points)}"


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
    is_constant = not is_composed(c.lr_decay_style) and SCHEDULES[c.lr_decay_style].ends_at_lr
    if is_constant:
        return
    run = num_samples / c.gbsz  # in full batches, as the schedule counts
    *others, last_piece = pieces_of(c)
    if c.decay_end < _EARLIEST_END * run:
        share = f"{1 - c.decay_end / run:.0%}"
        rate = f"MIN_LR={c.min_lr:g}" if reached == c.min_lr else f"{reached:.3g}"
        rule = f"the last {share} of TRAIN_ITERS={c.train_iters} would train at {rate}"
    elif c.decay_end > _LATEST_END * run or (others and last_piece.start >= num_samples):
        last = f"{reached:.3g}, above MIN_LR={c.min_lr:g}"
        rule = f"the run ends at TRAIN_ITERS={c.train_iters} with a learning rate of {last}"
    else:
        return
    fix = "set DECAY_ITERS=0, which follows TRAIN_ITERS"
    if c.rampup is not None:
        fix = f"set DECAY_ITERS={round(run)}, what the run is in batches of GBSZ"
    yield problem("decay_iters", c.decay_iters, rule, fix)
