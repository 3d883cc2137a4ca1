"""Speed and cost of a run (days, GPU-hours, price), and savings from changing one setting. No torch."""

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
from moe_exp.planner.hardware import Hardware, load_hardware, profile_of
from moe_exp.planner.prediction import Constants, Prediction, at_stage, load_constants, predict
from moe_exp.planner.search.layout_rules import RECOMPUTE, recompute_settings


@dataclass(frozen=True)
class Speed:
    """Speed of a run at the full global batch."""

    seconds: float  # per iteration
    tflops_per_gpu: float  # model TFLOP/s (`flops_per_iteration`, which does not count recompute)
    # model FLOPs utilization: the share of the GPU's peak in the compute type (PaLM, arXiv:2204.02311,
    # appendix B)
    mfu: float
    tokens_per_second: float  # over all GPUs


@dataclass(frozen=True)
class Cost:
    """Cost of a whole run without evaluation and checkpoints."""

    num_iterations: int  # until TRAIN_ITERS or the token budget
    num_tokens: int  # training tokens
    seconds: float  # of all iterations, including the shorter ones of a batch ramp-up
    gpu_hours: float
    price: float | None  # None without a price per GPU-hour

    @property
    def days(self) -> float:
        return self.seconds / 86400


def speed_of(config: Config, hardware: Hardware, seconds: float) -> Speed:
    """Returns the speed of a run whose iterations at the full global batch take `seconds`."""
    flops_per_second = flops_per_iteration(config) / seconds / config.world_size
    return Speed(
        seconds=seconds,
        tflops_per_gpu=flops_per_second / 1e12,
        mfu=flops_per_second / hardware.dense_flops[config.dtype],
        tokens_per_second=config.gbsz * config.seq_len / seconds,
    )


def cost_of(
    config: Config, hardware: Hardware, *, num_tokens: int | None = None,
    price_per_gpu_hour: float | None = None, constants: Constants | None = None,
) -> Cost:  # fmt: skip
    """Returns the cost of training for `num_tokens` (default: TRAIN_ITERS), in the GPU price's currency."""
    constants = constants or load_constants()
    steps = config.batches.steps(None if num_tokens is None else -(-num_tokens // config.seq_len))
    # Iterations take equally long while batch size (ramp-up) and sample length (DATA_STAGES) are constant.
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
    """Returns `config` with its schedule adapted to `num_tokens`, or unchanged if `num_tokens` is None."""
    if num_tokens is None:
        return config
    iterations = sum(step.num_iterations for step in config.batches.steps(-(-num_tokens // config.seq_len)))
    warmup = min(config.warmup_iters, iterations - 1)
    return config.model_copy(update={"train_iters": iterations, "decay_iters": 0, "warmup_iters": warmup})


@dataclass(frozen=True)
class Lever:
    """Effect of changing one setting; negative savings mean that the change needs more memory."""

    setting: str  # as in TP=2
    activation_bytes: float  # activations saved on the rank that needs the most memory
    needed_bytes: float  # required memory saved on that rank
    slower: float  # relative increase of the iteration time: 0.1 is 10% slower
    fits: bool  # whether the changed run fits in memory
    problem: str = ""  # the first rule that the change violates; the numbers are then 0


def levers(config: Config, hardware: Hardware, constants: Constants, prediction: Prediction) -> list[Lever]:
    """Returns single-setting changes that may save memory on the same devices at the same global batch.

    Changes are sorted by memory saved; invalid changes come last. `prediction` is for the unchanged run.
    """
    found = []
    for setting, changes in _changes(config, hardware):
        changed = config.model_copy(update=changes)
        problems = list(changed.problems())
        if not problems and setting == "CROSS_ENTROPY=triton" and not hardware.runs_kernels:
            problems = [f"{setting}: {hardware.name} cannot run the kernel"]
        if problems:
            rule = problems[0].partition(" Fix: ")[0]
            found.append(Lever(setting, 0.0, 0.0, 0.0, fits=False, problem=rule))
            continue
        after = predict(PlannedJob.of(changed), hardware, constants)
        # of the fullest rank, which may be on another stage after the change
        activations = [of.stages[of.peak_stage].activations for of in (prediction, after)]
        saved = prediction.needed_bytes - after.needed_bytes
        slower = after.time.total / prediction.time.total - 1
        found.append(Lever(setting, activations[0] - activations[1], saved, slower, fits=not after.oom))
    return sorted(found, key=lambda lever: (bool(lever.problem), -lever.needed_bytes))


def predicted_on(device: str, config: Config) -> tuple[Hardware, Prediction] | None:
    """Predicts a run on `device` (the driver's name for it). Returns None if the planner lacks data."""
    if not (profile := profile_of(device)):
        return None
    hardware = load_hardware(profile)
    try:
        return hardware, predict(PlannedJob.of(config), hardware)
    except ValueError:
        return None


def memory_advice(config: Config, hardware: Hardware, prediction: Prediction) -> str:
    """Returns up to four setting changes that save memory, sorted by whether they suffice, then by speed."""
    found = [lever for lever in levers(config, hardware, load_constants(), prediction) if not lever.problem]
    # a change below the error of the prediction is no help
    found = [lever for lever in found if lever.needed_bytes > 0.01 * prediction.memory_bytes]
    found.sort(key=lambda lever: (not lever.fits, lever.slower))
    return ", ".join(
        f"{lever.setting} ({lever.needed_bytes / 2**30:.1f} GiB less, {lever.slower:+.0%} time"
        f"{', enough' if lever.fits else ''})"
        for lever in found[:4]
    )


def _changes(config: Config, hardware: Hardware) -> Iterator[tuple[str, dict[str, Any]]]:
    for value in RECOMPUTE[RECOMPUTE.index(config.recompute) + 1 :]:
        if config.use_moe or value != "moe_act":
            moved = {"offload_modules": config.offload_modules}
            yield f"RECOMPUTE={value}", recompute_settings(value) | moved
    if config.use_moe and "experts" not in config.recomputed:
        modules = ",".join(filter(None, [config.recompute_modules, "experts"]))
        yield f"RECOMPUTE_MODULES={modules}", {"recompute_modules": modules}
    for name in ("grad_dtype", "optimizer_state_dtype"):
        if getattr(config, name) == "fp32":
            yield f"{name.upper()}=bf16", {name: "bf16"}
    even = {"pipeline_layers": "", "first_stage_layers": 0, "last_stage_layers": 0}
    # SP is not a change of its own: TP > 1 always enables it.
    for name in ("tp", "cp", "ep", "etp", "pp") if config.use_moe else ("tp", "cp", "pp"):
        size = 2 * getattr(config, name)
        yield f"{name.upper()}={size}", {name: size} | (even if name == "pp" else {})
    if config.mbsz > 1:
        yield f"MBSZ={config.mbsz // 2}", {"mbsz": config.mbsz // 2}
    if not config.offload_optimizer and not hardware.is_cpu:
        yield "OFFLOAD_OPTIMIZER=true", {"offload_optimizer": True}
    for name in ("attention", "experts" if config.use_moe else "mlp") if not hardware.is_cpu else ():
        if name not in config.offloaded | config.recomputed:
            modules = ",".join(filter(None, [config.offload_modules, name]))
            yield f"OFFLOAD_MODULES={modules}", {"offload_modules": modules}
    loss = planned_loss(config, hardware)
    if loss == "megatron":
        yield "CROSS_ENTROPY=triton", {"cross_entropy": "triton"}
    if loss != "linear":
        yield "CROSS_ENTROPY=linear", {"cross_entropy": "linear"}
