"""Costs of a run: speed, days, GPU-hours, money; and what one change of a setting saves. No torch."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moe_exp.config import Config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.products import planned_loss
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, at_stage, load_constants, predict
from moe_exp.planner.search.layout_rules import RECOMPUTE


@dataclass(frozen=True)
class Speed:
    """How fast iterations at the full batch are."""

    seconds: float  # per iteration
    # model FLOPs (`flops_per_iteration`, recompute not counted) per second and GPU, in 10^12
    tflops_per_gpu: float
    # that by the peak of the GPU in the compute type: model FLOPs utilization (PaLM, arXiv:2204.02311,
    # appendix B)
    mfu: float
    tokens_per_second: float  # of the whole run


@dataclass(frozen=True)
class Cost:
    """Cost of a whole run; evaluation and checkpoints are not counted."""

    num_iterations: int  # until TRAIN_ITERS or the token budget
    num_tokens: int  # trained on
    seconds: float  # of all iterations, those of the batch ramp-up at their smaller batches
    gpu_hours: float  # GPUs times hours
    price: float | None  # for it, None where none was given

    @property
    def days(self) -> float:
        return self.seconds / 86400


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
    """Cost of training for TRAIN_ITERS or a token budget, at a price in any currency, with DATA_STAGES."""
    constants = constants or load_constants()
    num_samples = None if num_tokens is None else -(-num_tokens // config.seq_len)
    steps = config.batches.steps(num_samples)
    # Iterations cost alike while batch size (ramp-up) and sample length (DATA_STAGES) stay the same.
    stages, seconds, consumed = config.stages, 0.0, 0
    begins = [stage.first_sample for stage in stages[1:]]
    for step in steps:
        end = consumed + step.samples
        bounds = [consumed, *(begin for begin in begins if consumed < begin < end), end]
        for first, last in pairwise(bounds):
            at = at_stage(config, stages[bisect.bisect_right(begins, first)].seq_len)
            batch_size = step.batch_size // (at.seq_len // config.seq_len)
            each = time_of(PlannedJob.of(at), hardware, constants.time, batch_size=batch_size).total
            seconds += (last - first) // step.batch_size * each
        consumed = end
    iterations, samples = sum(step.num_iterations for step in steps), sum(step.samples for step in steps)
    gpu_hours = seconds / 3600 * config.world_size
    price = None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour
    return Cost(iterations, samples * config.seq_len, seconds, gpu_hours, price)


def with_budget(config: Config, num_tokens: int | None) -> Config:
    """The settings with TRAIN_ITERS and the decay for a token budget; None: as they are."""
    if num_tokens is None:
        return config
    steps = config.batches.steps(-(-num_tokens // config.seq_len))
    iterations = sum(step.num_iterations for step in steps)
    warmup = min(config.warmup_iters, iterations - 1)
    changes = {"train_iters": iterations, "decay_iters": 0, "warmup_iters": warmup}
    return config.model_copy(update=changes)


@dataclass(frozen=True)
class Lever:
    """A change of one setting. What it saves is less than 0 if it takes more."""

    setting: str  # as in TP=2
    activation_bytes: float  # saved, of the rank that needs most
    needed_bytes: float  # saved of all memory that has to fit
    slower: float  # time of an iteration, relative: 0.1 is 10% more
    fits: bool  # whether the changed run fits
    problem: str = ""  # the first rule that the change breaks; the numbers are 0 then


def levers(config: Config, hardware: Hardware, constants: Constants, prediction: Prediction) -> list[Lever]:
    """Changes of one setting of the run with this prediction that may save memory, on the same devices with
    the same global batch: those that save most first, then those refused.
    """
    found, before = [], prediction
    for setting, changes in _changes(config, hardware):
        changed = config.model_copy(update=changes)
        problems = list(changed.problems())
        if not problems and setting == "CROSS_ENTROPY=triton" and not hardware.runs_kernels:
            problems = [f"{setting}: {hardware.name} does not run the kernel"]
        if problems:
            rule = problems[0].partition(" Fix: ")[0]
            found.append(Lever(setting, 0.0, 0.0, 0.0, fits=False, problem=rule))
            continue
        after = predict(PlannedJob.of(changed), hardware, constants)
        # of the rank that needs most, which may be another one after the change
        activations = [of.stages[of.peak_stage].activations for of in (before, after)]
        saved = before.needed_bytes - after.needed_bytes
        slower = after.time.total / before.time.total - 1
        found.append(Lever(setting, activations[0] - activations[1], saved, slower, fits=not after.oom))
    return sorted(found, key=lambda lever: (bool(lever.problem), -lever.needed_bytes))


def _changes(config: Config, hardware: Hardware) -> Iterator[tuple[str, dict[str, Any]]]:
    for value in RECOMPUTE[RECOMPUTE.index(config.recompute) + 1 :]:
        if config.use_moe or value != "moe_act":
            yield f"RECOMPUTE={value}", {"recompute": value}
    even = {"pipeline_layers": "", "first_stage_layers": 0, "last_stage_layers": 0}
    # sequence parallelism comes with TP
    for name in ("tp", "cp", "ep", "etp", "pp") if config.use_moe else ("tp", "cp", "pp"):
        size = 2 * getattr(config, name)
        yield f"{name.upper()}={size}", {name: size} | (even if name == "pp" else {})
    if config.mbsz > 1:
        yield f"MBSZ={config.mbsz // 2}", {"mbsz": config.mbsz // 2}
    if planned_loss(config, on_cpu=hardware.is_cpu, runs_kernels=hardware.runs_kernels) == "megatron":
        yield "CROSS_ENTROPY=triton", {"cross_entropy": "triton"}
