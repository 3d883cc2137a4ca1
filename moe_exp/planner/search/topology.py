"""Finds the layout that trains a model fastest on given GPUs. No torch.

Memory only grows with the micro-batch and model chunks, and only shrinks with recompute. So each split of the
model tries micro-batches from the smallest, each with the least recompute that fits, as more would be slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config, ConfigError
from moe_exp.planner.costs.job import Job
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, load_constants, predict
from moe_exp.planner.search.layout_rules import (
    NOT_NEEDED,
    OUT_OF_MEMORY,
    TOO_SLOW,
    Family,
    Space,
    families,
    model_problems,
    notes,
)

RUNNER_UP = 0.02  # relative to the best: below the precision of predictions
_HOPELESS = 1.5  # skip layouts whose layers and bubble alone take this multiple of the best iteration so far


@dataclass(frozen=True)
class Candidate:
    """A layout that breaks no rule."""

    config: Config
    prediction: Prediction  # its memory and time

    @property
    def seconds(self) -> float:
        """Seconds per iteration."""
        return self.prediction.time.total

    @property
    def filling_batch(self) -> int:
        """The smallest global batch with a micro-batch for every stage: PP*MBSZ*DP samples."""
        return self.config.pp * self.config.mbsz * self.config.data_parallel_size

    @property
    def notes(self) -> list[str]:
        """Short notes on what is allowed but worth knowing."""
        unfilled = self.config.gbsz < self.filling_batch
        return [
            *notes(self.config),
            *["memory within the error"] * self.prediction.is_close,
            *["pipeline never full"] * unfilled,
        ]


@dataclass(frozen=True)
class Search:
    ranked: list[Candidate]  # layouts that fit, fastest first
    rejected: Counter[str]  # layouts refused per reason; each counts once
    smallest: Candidate | None  # the one out of memory that needs least

    @property
    def num_tried(self) -> int:
        return len(self.ranked) + self.rejected.total()

    def runner_ups(self) -> list[Candidate]:
        """Layouts within 2% of the best."""
        return [one for one in self.ranked[1:] if one.seconds <= (1 + RUNNER_UP) * self.ranked[0].seconds]

    def place_of(self, seconds: float) -> int:
        """Rank of an iteration time among all layouts, from 1."""
        return 1 + sum(one.seconds < seconds for one in self.ranked)


def search(
    config: Config,
    hardware: Hardware,
    *,
    fixed: Mapping[str, Sequence[Any]] | None = None,
    constants: Constants | None = None,
) -> Search:
    """Ranks layouts of a model on NNODES * GPUS_PER_NODE devices by time per iteration. `fixed` maps settings
    to their allowed values; the layout of `config` is ignored. ConfigError with all `model_problems`.
    """
    if problems := model_problems(config):
        raise ConfigError(problems)
    space, constants, rejected = Space.of(config, fixed), constants or load_constants(), Counter[str]()
    work = _Evaluation(hardware, constants, space.recompute, rejected)
    for family in families(config, space, rejected):
        work.add(family)

    def order(one: Candidate) -> tuple[float, int, int]:
        return one.seconds, len(notes(one.config)), one.config.tp * one.config.pp * one.config.cp

    ranked = sorted(work.fitting, key=order)
    return Search(ranked, +rejected, work.smallest)  # without reasons that refused none


class _Evaluation:
    """Predicts as few layouts of each family as needed."""

    def __init__(
        self, hardware: Hardware, constants: Constants, recompute: Sequence[str], rejected: Counter[str]
    ):
        self._hardware, self._constants = hardware, constants
        self._recompute, self._rejected = recompute, rejected
        self._least_seconds = float("inf")
        self._last_fitted = True
        self._layer_seconds: dict[tuple[int, ...], float] = {}
        self.fitting: list[Candidate] = []
        self.smallest: Candidate | None = None

    def add(self, family: Family) -> None:
        """Tries experts' parallelism and model chunks; no chunks, which take least memory, come first."""
        for ep, etp in family.experts:
            levels: dict[int, int] = {}
            for vpp, sizes in family.batches.items():
                config = family.config.model_copy(update={"ep": ep, "etp": etp, "vpp": vpp})
                hopeful = [mbsz for mbsz in sizes if self._is_hopeful(config, mbsz)]
                self._rejected[TOO_SLOW] += (len(sizes) - len(hopeful)) * len(self._recompute)
                needed = self._add_batches(config, hopeful, levels)
                levels = levels or ({} if vpp else needed)

    def _add_batches(self, config: Config, sizes: Sequence[int], least: Mapping[int, int]) -> dict[int, int]:
        """First index of recompute that fits, by micro-batch size; `least` is this without model chunks."""
        level, num_levels, needed = 0, len(self._recompute), dict[int, int]()
        # the last one did not fit, so this one likely will not: try what needs the least memory first
        if sizes and not self._last_fitted and not least:
            smallest = config.model_copy(update={"mbsz": sizes[0], "recompute": self._recompute[-1]})
            level = 0 if self._fitting(smallest) else num_levels
        for mbsz in sizes:
            candidate = None
            level = max(level, least.get(mbsz, 0))
            while level < num_levels and not candidate:
                tried = {"mbsz": mbsz, "recompute": self._recompute[level]}
                candidate = self._fitting(config.model_copy(update=tried))
                level += candidate is None
            needed[mbsz] = level
            self._last_fitted = candidate is not None
            self._rejected[OUT_OF_MEMORY] += level
            if candidate:
                self._rejected[NOT_NEEDED] += num_levels - level - 1
                self.fitting.append(candidate)
        return needed

    def _fitting(self, config: Config) -> Candidate | None:
        candidate = Candidate(config, predict(Job.of(config), self._hardware, self._constants))
        if config.recompute == self._recompute[0]:
            time = candidate.prediction.time
            layers = time.compute + time.tensor_parallel + time.context_parallel + time.expert_parallel
            self._layer_seconds[_layers_key(config, config.mbsz)] = layers
        if not candidate.prediction.oom:
            self._least_seconds = min(self._least_seconds, candidate.seconds)
            return candidate
        if self.smallest is None or candidate.prediction.peak_bytes < self.smallest.prediction.peak_bytes:
            self.smallest = candidate
        return None

    def _is_hopeful(self, config: Config, mbsz: int) -> bool:
        """Whether an iteration may be fast enough, by the time of its layers and even stages' bubble."""
        layers = self._layer_seconds.get(_layers_key(config, mbsz), 0.0)
        num_chunks = config.gbsz // (mbsz * config.data_parallel_size) * (config.vpp or 1)
        return layers * (1 + (config.pp - 1) / num_chunks) <= _HOPELESS * self._least_seconds


def _layers_key(config: Config, mbsz: int) -> tuple[int, ...]:
    """All that the layers' total time depends on, except recompute, which only adds: no PP and VPP."""
    return config.tp, config.cp, config.ep, config.etp, mbsz
