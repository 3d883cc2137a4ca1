"""From seconds per iteration to what a run costs: speed, days, GPU-hours, money. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.flops import flops_per_iteration
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.job import Job
from moe_exp.planner.prediction import Constants, load_constants
from moe_exp.planner.timing import time_of

_SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Speed:
    """How fast iterations at the full batch are.

    Attributes:
        seconds: per iteration.
        tflops_per_gpu: model FLOPs (`flops_per_iteration`, recompute not counted) per second and GPU, in 10^12.
        mfu: that by the peak of the GPU in the compute type: model FLOPs utilization (PaLM, arXiv:2204.02311, appendix B).
        tokens_per_second: of the whole run.
    """

    seconds: float
    tflops_per_gpu: float
    mfu: float
    tokens_per_second: float


@dataclass(frozen=True)
class Phase:
    """Iterations in a row at one batch size."""

    batch_size: int
    num_iterations: int


@dataclass(frozen=True)
class Cost:
    """What a whole run costs; evaluation and checkpoints are not counted.

    Attributes:
        num_iterations: until TRAIN_ITERS or the token budget.
        num_tokens: trained on.
        seconds: of all iterations, those of the batch ramp-up at their smaller batches.
        gpu_hours: GPUs times hours.
        price: for it, None where none was given.
    """

    num_iterations: int
    num_tokens: int
    seconds: float
    gpu_hours: float
    price: float | None

    @property
    def days(self) -> float:
        """The same in days."""
        return self.seconds / _SECONDS_PER_DAY


def speed_of(config: Config, hardware: Hardware, seconds: float) -> Speed:
    """Speed of iterations of `seconds` at the full global batch."""
    flops_per_second = flops_per_iteration(config) / seconds / config.world_size
    return Speed(
        seconds=seconds,
        tflops_per_gpu=flops_per_second / 1e12,
        mfu=flops_per_second / hardware.dense_flops[config.dtype],
        tokens_per_second=config.gbsz * config.seq_len / seconds,
    )


def cost_of(
    config: Config,
    hardware: Hardware,
    *,
    num_tokens: int | None = None,
    price_per_gpu_hour: float | None = None,
    constants: Constants | None = None,
) -> Cost:
    """What training costs.

    Args:
        config: settings that keep the rules.
        hardware: the devices.
        num_tokens: token budget; TRAIN_ITERS by default.
        price_per_gpu_hour: in any currency.
        constants: of the predictions; those of the package by default.
    """
    constants, iterations, samples, seconds = constants or load_constants(), 0, 0, 0.0
    for phase in batch_phases(config, num_tokens=num_tokens):
        job = Job.of(config.model_copy(update={"gbsz": phase.batch_size}))
        iterations, samples = iterations + phase.num_iterations, samples + phase.num_iterations * phase.batch_size
        seconds += phase.num_iterations * time_of(job, hardware, constants.time).total
    gpu_hours = seconds / 3600 * config.world_size
    price = None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour
    return Cost(iterations, samples * config.seq_len, seconds, gpu_hours, price)


def batch_phases(config: Config, *, num_tokens: int | None = None) -> Iterator[Phase]:
    """The batch sizes of a run in their order, by the rule of `optim.BatchSchedule`.

    Args:
        config: GBSZ, RAMPUP_BATCH_SIZE and, without a budget, TRAIN_ITERS.
        num_tokens: train until so many tokens are used.
    """
    consumed, done = 0, 0

    def affordable(batch_size: int, wanted: int) -> int:
        if num_tokens is None:
            return min(wanted, config.train_iters - done)
        left = -(-num_tokens // config.seq_len) - consumed
        return max(0, min(wanted, -(-left // batch_size)))

    start, increment, samples = config.rampup or (config.gbsz, 1, 0)
    num_steps = (config.gbsz - start) // increment
    for step in range(num_steps):
        batch_size = start + step * increment
        # The next step begins at the first iteration with (step + 1) / num_steps of the samples behind it.
        wanted = -(-((step + 1) * samples - consumed * num_steps) // (num_steps * batch_size))
        if (count := affordable(batch_size, max(0, wanted))) > 0:
            yield Phase(batch_size, count)
        consumed, done = consumed + count * batch_size, done + count
    if (count := affordable(config.gbsz, config.train_iters if num_tokens is None else num_tokens)) > 0:
        yield Phase(config.gbsz, count)
