"""Memory that one change of a setting saves, and the time that it costs. No torch.

Each changed run is predicted like the given one, on the same devices with the same global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config
from moe_exp.config.checks.checks import check_config
from moe_exp.planner.costs.code_paths import planned_loss
from moe_exp.planner.costs.job import Job
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, predict
from moe_exp.planner.search.layout_rules import RECOMPUTE

# Sizes that are doubled. Sequence parallelism comes with TP; a pipeline is split evenly.
_PARALLEL = ("tp", "cp", "ep", "etp", "pp")
_EVEN_STAGES = {"pipeline_layers": "", "first_stage_layers": 0, "last_stage_layers": 0}


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
    """All changes of one setting of the run with this prediction that may save memory, those that save most
    first, then those refused.
    """
    found = [
        _lever(setting, config.model_copy(update=changes), hardware, constants, prediction)
        for setting, changes in _changes(config, hardware)
    ]
    return sorted(found, key=lambda lever: (bool(lever.problem), -lever.needed_bytes))


def _changes(config: Config, hardware: Hardware) -> Iterator[tuple[str, dict[str, Any]]]:
    for value in RECOMPUTE[RECOMPUTE.index(config.recompute) + 1 :]:
        if config.use_moe or value != "moe_act":
            yield f"RECOMPUTE={value}", {"recompute": value}
    for name in _PARALLEL:
        if not config.use_moe and name in ("ep", "etp"):
            continue
        size = 2 * getattr(config, name)
        yield f"{name.upper()}={size}", {name: size} | (_EVEN_STAGES if name == "pp" else {})
    if config.mbsz > 1:
        yield f"MBSZ={config.mbsz // 2}", {"mbsz": config.mbsz // 2}
    if planned_loss(config, on_cpu=hardware.is_cpu, runs_kernels=hardware.runs_kernels) == "megatron":
        yield "CROSS_ENTROPY=triton", {"cross_entropy": "triton"}


def _lever(
    setting: str, config: Config, hardware: Hardware, constants: Constants, before: Prediction
) -> Lever:
    problems = check_config(config)
    if not problems and setting == "CROSS_ENTROPY=triton" and not hardware.runs_kernels:
        problems = [f"{setting}: {hardware.name} does not run the kernel"]
    if problems:
        return Lever(setting, 0.0, 0.0, 0.0, fits=False, problem=problems[0].partition(" Fix: ")[0])
    after = predict(Job.of(config), hardware, constants)
    return Lever(
        setting,
        _fullest(before) - _fullest(after),
        before.needed_bytes - after.needed_bytes,
        after.time.total / before.time.total - 1,
        fits=not after.oom,
    )


def _fullest(prediction: Prediction) -> float:
    """Activations of the rank that needs most."""
    return prediction.stages[prediction.peak_stage].activations
