"""The layout that trains a model fastest on given GPUs. No torch.

Memory decides what may be timed, and it only grows with the micro-batch and with model chunks, and only shrinks with recompute. So for each
way of splitting the model micro-batches are gone through from the smallest, each with the least recompute that fits: more would be slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config, ConfigError
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.job import Job
from moe_exp.planner.layout_rules import NOT_NEEDED, OUT_OF_MEMORY, Family, Space, families, model_problems, notes
from moe_exp.planner.memory import memory_of
from moe_exp.planner.prediction import Constants, Prediction, load_constants, prediction_of
from moe_exp.planner.timing import time_of

RUNNER_UP = 0.02  # relative to the best: closer than predictions can tell apart


@dataclass(frozen=True)
class Candidate:
    """A layout that keeps every rule.

    Attributes:
        config: the settings with the layout.
        prediction: what it costs.
    """

    config: Config
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Per iteration."""
        return self.prediction.time.total

    @property
    def filling_batch(self) -> int:
        """The smallest global batch with a micro-batch for every stage: PP*MBSZ*DP samples."""
        return self.config.pp * self.config.mbsz * self.config.data_parallel_size

    @property
    def notes(self) -> list[str]:
        """What is allowed but to be known."""
        unfilled = self.config.gbsz < self.filling_batch
        return [*notes(self.config), *["memory within the error"] * self.prediction.is_close, *["pipeline never full"] * unfilled]


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        ranked: layouts that fit, the fastest first.
        rejected: reason to the number of layouts that it refused; a layout counts once.
        smallest: of those out of memory the one that needs least.
    """

    ranked: list[Candidate]
    rejected: Counter[str]
    smallest: Candidate | None

    @property
    def num_tried(self) -> int:
        """All layouts of the space."""
        return len(self.ranked) + self.rejected.total()

    def runner_ups(self) -> list[Candidate]:
        """Those within 2% of the best."""
        return [one for one in self.ranked[1:] if one.seconds <= (1 + RUNNER_UP) * self.ranked[0].seconds]

    def place_of(self, seconds: float) -> int:
        """The place that an iteration time would have, from 1."""
        return 1 + sum(one.seconds < seconds for one in self.ranked)


def search(
    config: Config, hardware: Hardware, *, fixed: Mapping[str, Sequence[Any]] | None = None, constants: Constants | None = None
) -> Search:
    """Ranks the layouts of a model on NNODES * GPUS_PER_NODE devices by time per iteration.

    Args:
        config: model, batch and number of devices; its layout does not matter.
        hardware: the devices.
        fixed: layout setting to the values that it may have; the others are searched.
        constants: of the predictions; those of the package by default.

    Raises:
        ConfigError: no layout would help, with all lines.
    """
    if problems := model_problems(config):
        raise ConfigError(problems)
    space, constants, rejected = Space.of(config, fixed), constants or load_constants(), Counter[str]()
    work = _Evaluation(hardware, constants, space.recompute, rejected)
    for family in families(config, space, rejected):
        work.add(family)
    ranked = sorted(work.fitting, key=lambda one: (one.seconds, len(notes(one.config)), one.config.tp * one.config.pp * one.config.cp))
    return Search(ranked, +rejected, work.smallest)  # without reasons that refused none


class _Evaluation:
    """Memory and time of families of layouts, no more of them than it takes."""

    def __init__(self, hardware: Hardware, constants: Constants, recompute: Sequence[str], rejected: Counter[str]):
        self._hardware, self._constants, self._recompute, self._rejected = hardware, constants, recompute, rejected
        self._least_bytes = float("inf")
        self.fitting: list[Candidate] = []
        self.smallest: Candidate | None = None

    def add(self, family: Family) -> None:
        for ep, etp in family.experts:
            # With the first entry (no model chunks) out of memory at the smallest micro-batch, all others are, too.
            fits = True
            for vpp, sizes in family.batches.items():
                config = family.config.model_copy(update={"ep": ep, "etp": etp, "vpp": vpp})
                if fits:
                    fits = self._add_batches(config, sizes)
                else:
                    self._rejected[OUT_OF_MEMORY] += len(sizes) * len(self._recompute)

    def _add_batches(self, config: Config, sizes: Sequence[int]) -> bool:
        """Goes through micro-batch sizes; whether any fits, or there is none."""
        level, num_levels = 0, len(self._recompute)
        for index, mbsz in enumerate(sizes):
            while level < num_levels and not self._fits(config.model_copy(update={"mbsz": mbsz, "recompute": self._recompute[level]})):
                level += 1
            if level == num_levels:
                self._rejected[OUT_OF_MEMORY] += num_levels * (len(sizes) - index)
                return index > 0
            self._rejected[OUT_OF_MEMORY] += level
            self._rejected[NOT_NEEDED] += num_levels - level - 1
        return True

    def _fits(self, config: Config) -> bool:
        job = Job.of(config)
        stages = memory_of(job, self._hardware, self._constants.memory)
        peak = max(stage.total for stage in stages)
        fits = peak <= self._hardware.memory_bytes
        if fits or peak < self._least_bytes:
            time = time_of(job, self._hardware, self._constants.time)
            candidate = Candidate(config, prediction_of(stages, time, self._hardware, self._constants))
            if fits:
                self.fitting.append(candidate)
            else:
                self._least_bytes, self.smallest = peak, candidate
        return fits
