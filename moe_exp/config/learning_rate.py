"""Learning rate at every point of a run, and checks that a schedule fits the run. Does not import torch.

Every LR_DECAY_STYLE defines the pieces that follow the warm-up (`config.pieces`). Training
(`engine.optimizer_setup.LearningRateScheduler`) and planning commands both call `learning_rate`. This
function counts samples instead of iterations, so that a batch ramp-up does not distort the curve. For styles
that Megatron's OptimizerParamScheduler also supports, the learning rates equal Megatron's.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from moe_exp.config.choices import DECAYS, SCHEDULES
from moe_exp.config.parsers import POINTS, is_composed, scaled_points
from moe_exp.config.sections.learning import Piece
from moe_exp.config.settings import Config

# Points of the run at which a dry run prints the learning rate.
_SHOWN_PERCENT = (0, 25, 50, 75, 100)
# Range of DECAY_ITERS, as a fraction of the run, without a warning.
_EARLIEST_END, _LATEST_END = 0.9, 1.1


class Start(NamedTuple):
    """Progress of the run when training starts: 0 in a new run; the checkpoint's progress on a resume."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_samples: int = 0  # in iterations without an optimizer step, which the schedule does not count

    @property
    def scheduled_samples(self) -> int:
        """Consumed samples that count towards the schedule."""
        return self.consumed_samples - self.skipped_samples


BEGIN = Start()


def learning_rate(
    config: Config, consumed_samples: int, *, max_lr: float | None = None, min_lr: float | None = None
) -> float:
    """Learning rate of the next iteration after `consumed_samples`.

    The rate rises linearly from 0 during the warm-up, then follows the pieces of the schedule. Once a piece
    has ended, the next piece applies: with WSD-S, the iteration after a decay trains at LR. After the last
    piece, the rate is the target of that piece (default: MIN_LR). If the last piece is constant, its rate
    continues.

    Args:
        config: valid settings (`config.problems()` yields nothing).
        consumed_samples: samples since the start of the run.
        max_lr, min_lr: LR and MIN_LR of a parameter group (default: the run's LR and MIN_LR).
    """
    bounds = (config.lr if max_lr is None else max_lr, config.min_lr if min_lr is None else min_lr)
    pieces, warmup = config.pieces, config.warmup_iters * config.gbsz
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
    """Learning rate in `piece` after `samples`; `before` is the final rate of the previous piece."""
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


def samples_after(config: Config, iteration: int, start: Start) -> int:
    """Number of samples that the schedule has counted at `iteration` of a run that began at `start`."""
    iterations = iteration - start.iteration
    return start.scheduled_samples + config.batches.samples_of(iterations, start.consumed_samples)


def learning_rate_text(config: Config, start: Start = BEGIN) -> str:
    """Returns one line of text. It shows the learning rate at `start` and at each quarter of the run, and the
    iterations at which the remaining pieces of the schedule end.
    """
    shown = {config.train_iters * percent // 100: f" ({percent}%)" for percent in _SHOWN_PERCENT}
    if start.iteration:
        later = {iteration: text for iteration, text in shown.items() if iteration > start.iteration}
        shown = {start.iteration: " (resumed)"} | later
    points = []
    for iteration, text in shown.items():
        rate = learning_rate(config, samples_after(config, iteration, start))
        points.append(f"{rate:.3g} at {iteration}{text}")
    style = config.lr_decay_style
    if len(pieces := config.pieces) > 1:  # remaining pieces: `constant until 800`, in full batches
        left = [(piece.style, piece.end - start.scheduled_samples) for piece in pieces]
        ends = [f"{name} until {start.iteration + num // config.gbsz}" for name, num in left if num > 0]
        style += f"; {', '.join(ends) or 'at its end'}"
    return f"learning rate after iteration ({style}): {', '.join(points)}"


# Allowed jump of the learning rate at a resume, relative to LR - MIN_LR, as iterations are rounded.
_LARGEST_JUMP = 0.03


def schedule_change(config: Config, old: Config, start: Start) -> str | None:
    """Returns an error line if a change of GBSZ since `old` prevents resuming at `start`, else None.

    WARMUP_ITERS, DECAY_ITERS and similar settings count batches of GBSZ samples. Changing only GBSZ therefore
    scales the schedule: the learning rate would jump, and might not reach its final value.
    """
    if config.gbsz == old.gbsz or not start.consumed_samples:
        return None
    bounds = {"max_lr": config.lr, "min_lr": config.min_lr}
    before, now = (learning_rate(c, start.scheduled_samples, **bounds) for c in (old, config))
    last, reached = (
        learning_rate(c, samples_after(c, c.train_iters, start), **bounds) for c in (old, config)
    )
    allowed = _LARGEST_JUMP * (config.lr - config.min_lr) + 1e-9 * config.lr
    if abs(now - before) <= allowed and reached <= last + allowed:
        return None
    rule = f"after training with GBSZ={old.gbsz} to iteration {start.iteration}, the learning rate would jump"
    rule += f" from {before:.3g} to {now:.3g} and end at {reached:.3g} instead of {last:.3g}"
    setting = " ".join(f"{name.upper()}={value}" for name, value in _rescaled(config, old, start).items())
    fix = f"set {setting} (the same schedule in batches of {config.gbsz}), or GBSZ={old.gbsz}"
    return config.problem("gbsz", rule, fix)


def _rescaled(config: Config, old: Config, start: Start) -> dict[str, int | str]:
    """Settings that continue the schedule of `old` with the new GBSZ."""
    factor = old.gbsz / config.gbsz
    left = samples_after(old, old.train_iters, start) - start.scheduled_samples
    values: dict[str, int | str] = {}
    if left > 0:  # else TRAIN_ITERS extends the run beyond the old schedule
        values["train_iters"] = start.iteration + -(-left // config.gbsz)
    values["warmup_iters"] = round(old.warmup_iters * factor)
    values["decay_iters"] = round(old.decay_end * factor)
    if old.wsd_decay_iters:
        values["wsd_decay_iters"] = max(1, round(old.wsd_decay_iters * factor))
    for name in POINTS:
        if (scaled := scaled_points(text := str(getattr(old, name)), factor)) != text:
            values[name] = scaled
    return values


def schedule_warnings(c: Config, start: Start = BEGIN) -> Iterator[str]:
    """Yields warnings if the run ends during the warm-up, or if it ends long before or after DECAY_ITERS."""
    num_samples = samples_after(c, c.train_iters, start)
    reached = learning_rate(c, num_samples)
    if c.warmup_iters >= c.train_iters:
        rule = f"the run ends at TRAIN_ITERS={c.train_iters} during the warm-up"
        rule += f", at a learning rate of {reached:.3g} instead of LR={c.lr:g}"
        fix = f"set WARMUP_ITERS to {c.train_iters // 10}, a tenth of TRAIN_ITERS, or raise TRAIN_ITERS"
        yield c.problem("warmup_iters", rule, fix)
    if not is_composed(c.lr_decay_style) and SCHEDULES[c.lr_decay_style].ends_at_lr:
        return
    run = num_samples / c.gbsz  # in full batches, as the schedule counts
    *others, last_piece = c.pieces
    if c.decay_end < _EARLIEST_END * run:
        share = f"{1 - c.decay_end / run:.0%}"
        rate = f"MIN_LR={c.min_lr:g}" if reached == c.min_lr else f"{reached:.3g}"
        rule = f"the last {share} of TRAIN_ITERS={c.train_iters} would train at {rate}"
    elif c.decay_end > _LATEST_END * run or (others and last_piece.start >= num_samples):
        last = f"{reached:.3g}, above MIN_LR={c.min_lr:g}"
        rule = f"the run ends at TRAIN_ITERS={c.train_iters} with a learning rate of {last}"
    else:
        return
    fix = "set DECAY_ITERS=0, so that the decay ends at TRAIN_ITERS"
    if c.rampup is not None or start.iteration:
        fix = f"set DECAY_ITERS={round(run)}, the length of the run in batches of GBSZ"
    yield c.problem("decay_iters", rule, fix)
