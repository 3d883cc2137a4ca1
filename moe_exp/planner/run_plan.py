"""Plan of one run (memory, time, cost) for `moe-exp plan` and `moe_exp.plan`. No torch."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from moe_exp.config import Config, raise_for, setting_error
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.saves import Goodput, goodput_of
from moe_exp.planner.estimate import Cost, Lever, cost_of, levers, speed_of
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, predict
from moe_exp.planner.search.layout_text import world_of
from moe_exp.planner.tables import PlanPrinter, describe_run


@dataclass(frozen=True, repr=False)
class RunPlan:
    """Predicted memory, time and cost of a run. Printing it shows the tables of `moe-exp plan`."""

    config: Config
    hardware: Hardware
    prediction: Prediction  # memory of each pipeline stage, and the parts of the iteration time
    cost: Cost  # of the complete run
    goodput: Goodput | None = None  # None without `failures`
    levers: Sequence[Lever] = ()  # savings from changing one setting

    def __repr__(self) -> str:
        stream = io.StringIO()
        self.print(stream)
        return stream.getvalue().rstrip()

    def print(self, stream: TextIO) -> None:
        PlanPrinter(stream).run(self.report, self.prediction, self.cost, self.levers, self.goodput)

    @property
    def report(self) -> dict[str, Any]:
        """All values, as `moe-exp plan --json` prints them."""
        report = describe_run(self.config, self.hardware, self.prediction, self.cost, self.goodput)
        return report | {"levers": [asdict(lever) for lever in self.levers]}

    @property
    def fits(self) -> bool:
        return not self.prediction.oom

    @property
    def memory_bytes(self) -> float:
        """Bytes that the fullest rank needs."""
        return self.prediction.needed_bytes

    @property
    def seconds_per_iteration(self) -> float:
        """Iteration time at the full global batch."""
        return self.prediction.time.total

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all GPUs at the full global batch."""
        return speed_of(self.config, self.hardware, self.seconds_per_iteration).tokens_per_second


def plan_run(
    config: Config, hardware: Hardware, constants: Constants, *, num_tokens: int | None = None,
    price_per_gpu_hour: float | None = None, failures: Mapping[str, Any] | None = None,
) -> RunPlan:  # fmt: skip
    """Predicts a run; `failures` are arguments of `goodput_of`. Raises ConfigError for invalid settings."""
    raise_for(config.problems())
    budget: Any = {"num_tokens": num_tokens, "price_per_gpu_hour": price_per_gpu_hour}
    cost = cost_of(config, hardware, **budget, constants=constants)
    prediction = predict(PlannedJob.of(config), hardware, constants)
    times = {"iteration_seconds": prediction.time.total, "training_seconds": cost.seconds}
    goodput = goodput_of(config, **times, **failures) if failures else None
    changes = levers(config, hardware, constants, prediction)
    return RunPlan(config, hardware, prediction, cost, goodput, changes)


def settings_for(hardware: Hardware, flags: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """Returns `flags` with `gpus` split into NNODES and GPUS_PER_NODE."""
    settings = dict(flags)
    if gpus is not None:
        per_node = settings.get("gpus_per_node") or os.environ.get("GPUS_PER_NODE")
        if per_node and not str(per_node).isdecimal():
            rule = "must be a whole number of at least 1"
            raise setting_error("gpus_per_node", per_node, rule, "set GPUS_PER_NODE to a number")
        settings |= world_of(gpus, int(per_node or hardware.gpus_per_node))
    return settings
