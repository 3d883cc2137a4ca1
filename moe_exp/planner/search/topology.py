"""Finds the fastest layout of a model on given GPUs. Explains why other layouts are slower or invalid.

Recompute saves memory; larger micro-batches and more model chunks need more memory. For each choice of
parallel sizes, the search therefore tries increasing micro-batch sizes, each with the least recompute that
fits. Does not import torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config, problem, raise_for
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, load_constants, predict
from moe_exp.planner.search import layout_rules as rules

RUNNER_UP = 0.02  # relative to the best: below the precision of predictions
_HOPELESS = 1.5  # skip layouts whose layers and bubble alone take this multiple of the best iteration so far


@dataclass(frozen=True)
class Candidate:
    """A valid layout and its predicted memory and time."""

    config: Config
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.time.total

    @property
    def filling_batch(self) -> int:
        """Smallest global batch that fills the pipeline (a micro-batch per stage): PP*MBSZ*DP samples."""
        return self.config.pp * self.config.mbsz * self.config.data_parallel_size

    @property
    def notes(self) -> list[str]:
        """Short notes on possible disadvantages of the layout."""
        config = self.config
        found = {
            "experts span nodes": config.use_moe and config.etp * config.ep > config.gpus_per_node,
            "memory margin within error": self.prediction.is_close,
            "pipeline never full": config.gbsz < self.filling_batch,
        }
        return [note for note, holds in found.items() if holds]


@dataclass(frozen=True)
class Search:
    config: Config  # whose layout was ignored
    hardware: Hardware
    fixed: Mapping[str, Sequence[Any]]  # allowed values by setting
    constants: Constants
    ranked: list[Candidate]  # layouts that fit, fastest first
    rejected: Counter[str]  # number of rejected layouts by reason
    smallest: Candidate | None  # the layout that needs the least memory among those that do not fit

    @property
    def num_tried(self) -> int:
        return len(self.ranked) + self.rejected.total()

    def runner_ups(self) -> list[Candidate]:
        return [one for one in self.ranked[1:] if one.seconds <= (1 + RUNNER_UP) * self.ranked[0].seconds]


def search(
    config: Config, hardware: Hardware, *, fixed: Mapping[str, Sequence[Any]] | None = None,
    constants: Constants | None = None,
) -> Search:  # fmt: skip
    """Ranks layouts of a model on NNODES * GPUS_PER_NODE devices by time per iteration. Raises a
    ConfigError with all problems that no layout can fix. `fixed` maps settings to their allowed values. The
    layout of `config` is ignored.
    """
    raise_for(rules.model_problems(config))
    space, constants, rejected = rules.Space.of(config, fixed), constants or load_constants(), Counter[str]()
    work = _Evaluation(hardware, constants, space.recompute, rejected)
    for family in rules.families(config, space, rejected):
        work.add(family)

    def order(one: Candidate) -> tuple[float, bool, int]:
        # Among equally fast layouts, prefer experts inside a node, then smaller parallel sizes.
        over_nodes = one.config.use_moe and one.config.etp * one.config.ep > one.config.gpus_per_node
        return one.seconds, over_nodes, one.config.tp * one.config.pp * one.config.cp

    ranked = sorted(work.fitting, key=order)
    rejected = +rejected  # without reasons that refused none
    return Search(config, hardware, fixed or {}, constants, ranked, rejected, work.smallest)


# Settings that save memory but change the results, and the share of memory without which they are needed:
# predictions are off by 5% on average.
_SMALLER = ({"optimizer_state_dtype": "bf16"}, {"grad_dtype": "bf16"})
_SPARE = 0.08


def search_smaller(config: Config, hardware: Hardware, **options: Any) -> tuple[Search, dict[str, Any]]:
    """Repeats the search with settings that need less memory until a layout fits with 8% of memory to spare.
    Also returns the changed settings. The arguments are those of `search`.
    """
    changes: dict[str, Any] = {}
    found = search(config, hardware, **options)
    for change in _SMALLER:
        predictions = [one.prediction for one in found.ranked]
        has_room = any(one.margin_bytes >= _SPARE * one.memory_bytes for one in predictions)
        smaller = config.model_copy(update=changes | change)
        if not has_room and smaller != config and not rules.model_problems(smaller):
            changes |= change
            found = search(smaller, hardware, **options)
    return found, changes


class _Evaluation:
    """Evaluates families (sets of similar layouts) with as few predictions as possible."""

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

    def add(self, family: rules.Family) -> None:
        """Tries all expert-parallel sizes and VPP values. VPP=none is first: it needs the least memory."""
        for ep, etp in family.experts:
            levels: dict[int, int] = {}
            for vpp, sizes in family.batches.items():
                config = family.config.model_copy(update={"ep": ep, "etp": etp, "vpp": vpp})
                hopeful = []
                for mbsz in sizes:
                    # A lower bound: the time of the layers, and the bubble of evenly loaded stages.
                    layers = self._layer_seconds.get(_layers_key(config, mbsz), 0.0)
                    num_chunks = config.gbsz // (mbsz * config.data_parallel_size) * (config.vpp or 1)
                    if layers * (1 + (config.pp - 1) / num_chunks) <= _HOPELESS * self._least_seconds:
                        hopeful.append(mbsz)
                self._rejected[rules.TOO_SLOW] += (len(sizes) - len(hopeful)) * len(self._recompute)
                needed = self._add_batches(config, hopeful, levels)
                levels = levels or ({} if vpp else needed)

    def _add_batches(self, config: Config, sizes: Sequence[int], least: Mapping[int, int]) -> dict[int, int]:
        """Maps each micro-batch size to the first index in `_recompute` whose setting fits. `least` maps
        micro-batch sizes to the lowest index to try.
        """
        level, num_levels, needed = 0, len(self._recompute), dict[int, int]()
        # If the previous layout did not fit, this one probably won't either: try the smallest case first.
        if sizes and not self._last_fitted and not least:
            smallest = config.model_copy(
                update={"mbsz": sizes[0], **rules.recompute_settings(self._recompute[-1])}
            )
            level = 0 if self._fitting(smallest) else num_levels
        for mbsz in sizes:
            fitting = dict[int, Candidate]()
            for tried in range(max(level, least.get(mbsz, 0)), num_levels):
                settings = {"mbsz": mbsz, **rules.recompute_settings(self._recompute[tried])}
                if candidate := self._fitting(config.model_copy(update=settings)):
                    fitting[tried] = candidate
                    if not candidate.config.offload_modules:  # else recomputing more may be faster
                        break
            level = needed[mbsz] = min(fitting, default=num_levels)
            self._last_fitted = bool(fitting)
            if fitting:
                self.fitting.append(min(fitting.values(), key=lambda one: one.seconds))
                num_tried = tried + 1
                self._rejected[rules.NOT_NEEDED] += num_levels - num_tried + len(fitting) - 1
                self._rejected[rules.OUT_OF_MEMORY] += num_tried - len(fitting)
            else:
                self._rejected[rules.OUT_OF_MEMORY] += num_levels
        return needed

    def _fitting(self, config: Config) -> Candidate | None:
        candidate = Candidate(config, predict(PlannedJob.of(config), self._hardware, self._constants))
        if rules.recompute_level(config) == self._recompute[0]:
            time = candidate.prediction.time
            layers = time.compute + time.tensor_parallel + time.context_parallel + time.expert_parallel
            self._layer_seconds[_layers_key(config, config.mbsz)] = layers
        if not candidate.prediction.oom:
            self._least_seconds = min(self._least_seconds, candidate.seconds)
            return candidate
        if self.smallest is None or candidate.prediction.peak_bytes < self.smallest.prediction.peak_bytes:
            self.smallest = candidate
        return None


def _layers_key(config: Config, mbsz: int) -> tuple[int, ...]:
    """Returns the settings that determine a layer's shortest time (the time without recompute)."""
    return config.tp, config.cp, config.ep, config.etp, mbsz


@dataclass(frozen=True)
class Explanation:
    """Comparison of the requested settings with the best layout, or why these settings are rejected."""

    wanted: Mapping[str, Any]  # requested layout settings
    candidate: Candidate | None  # fastest valid layout with them, if any
    fits: bool  # whether it fits in memory
    place: int  # its rank among all layouts, from 1; 0 if it does not fit
    losses: dict[str, float]  # seconds lost relative to the best layout, by part of the iteration
    problems: list[str]  # why no layout is valid or fits


def explain(found: Search, wanted: Mapping[str, Any]) -> Explanation:
    """Ranks the fastest layout with the `wanted` settings, or explains why these settings are rejected."""
    config, fixed = found.config, found.fixed
    narrowed = {**fixed, **{name: (value,) for name, value in wanted.items()}}
    # Searching again with the settings fixed finds the best layout that has them, not just any.
    inner = search(config, found.hardware, fixed=narrowed, constants=found.constants)
    if inner.ranked:
        candidate = inner.ranked[0]
        best = found.ranked[0] if found.ranked else candidate
        place = 1 + sum(one.seconds < candidate.seconds for one in found.ranked)
        mine, other = candidate.prediction.time.parts(), best.prediction.time.parts()
        losses = sorted(((name, mine[name] - other[name]) for name in mine), key=lambda item: -item[1])
        return Explanation(wanted, candidate, True, place, dict(losses), [])
    if inner.smallest is not None:
        return Explanation(wanted, inner.smallest, False, 0, {}, [memory_line(inner.smallest)])
    given = {name: values[0] for name, values in fixed.items() if len(values) == 1} | dict(wanted)
    # Problems of the given settings regardless of the others.
    layout = dict(given)
    if "pp" in layout and not layout.keys() & set(rules.SPLIT_SETTINGS):
        layout |= rules.stage_splits(config, layout["pp"])[0]
    problems = rules.layout_problems(rules.with_layout(config, **layout))
    # Sizes that are not given are 1 here, which may itself violate rules on ranks or batch.
    if not {"tp", "pp"} <= given.keys():
        problems = [line for line in problems if line.partition("=")[0].lower() in given]
    if not problems:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in inner.rejected.most_common())
        words = ",".join(f"{name.upper()}={value}" for name, value in given.items())
        rule = f"all layouts with these settings are rejected: {reasons}"
        problems = [problem("layout", words, rule, "omit some of these settings")]
    return Explanation(wanted, None, False, 0, {}, problems)


def memory_line(candidate: Candidate) -> str:
    """Returns the error for a valid layout that does not fit in memory."""
    prediction, config = candidate.prediction, candidate.config
    rule = f"needs {prediction.peak_bytes / 2**30:.1f} of {prediction.memory_bytes / 2**30:.1f} GiB"
    level = rules.recompute_level(config)
    rule += f" on stage {prediction.peak_stage} with MBSZ={config.mbsz} and recompute of {level}"
    return problem("layout", layout_words(config), rule, "raise TP, PP or EP, or use more or larger GPUs")


def layout_words(config: Config) -> str:
    """Formats the parallel sizes like TP4,PP12,DP8."""
    sizes = {name: getattr(config, name) or 1 for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
    words = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1 or name in ("tp", "pp")]
    return ",".join([*words, f"DP{config.data_parallel_size}"])
