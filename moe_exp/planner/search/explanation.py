"""What is the matter with a layout: the rules that it breaks, the memory that it lacks, or the seconds that
it loses. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.planner.costs.timing import IterationTime
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants
from moe_exp.planner.search.layout_rules import SPLIT_SETTINGS, layout_problems, stage_splits, with_layout
from moe_exp.planner.search.topology import Candidate, Search, search


@dataclass(frozen=True)
class Explanation:
    """What is to be said of one layout.

    Attributes:
        wanted: what was asked for.
        candidate: the fastest layout that has it and keeps every rule, or None.
        fits: whether that fits in memory.
        place: its place among all, from 1; 0 without one.
        losses: part of the iteration to the seconds that it takes longer than the best layout; empty without
            one.
        problems: lines on why there is no such layout.
    """

    wanted: Mapping[str, Any]
    candidate: Candidate | None
    fits: bool
    place: int
    losses: dict[str, float]
    problems: list[str]


def explain(
    found: Search,
    config: Config,
    hardware: Hardware,
    wanted: Mapping[str, Any],
    *,
    fixed: Mapping[str, Sequence[Any]] | None = None,
    constants: Constants | None = None,
) -> Explanation:
    """Why a layout is refused, or where it stands and what it loses.

    Args:
        found: the search that it is compared with.
        config: the settings of that search.
        hardware: as there.
        wanted: layout settings with a value each; the fastest values are taken for the others.
        fixed: as there.
        constants: as there.
    """
    inner = search(
        config,
        hardware,
        fixed={**(fixed or {}), **{name: (value,) for name, value in wanted.items()}},
        constants=constants,
    )
    if inner.ranked:
        candidate = inner.ranked[0]
        best = found.ranked[0] if found.ranked else candidate
        return Explanation(
            wanted, candidate, True, found.place_of(candidate.seconds), time_losses(candidate, best), []
        )
    if inner.smallest is not None:
        return Explanation(wanted, inner.smallest, False, 0, {}, [memory_line(inner.smallest)])
    given = {name: values[0] for name, values in (fixed or {}).items() if len(values) == 1} | dict(wanted)
    return Explanation(wanted, None, False, 0, {}, _problems_of(config, given, inner))


def time_losses(candidate: Candidate, best: Candidate) -> dict[str, float]:
    """Part of the iteration to the seconds that a layout spends on it more than another; the largest
    first.
    """
    mine, other = candidate.prediction.time.parts(), best.prediction.time.parts()
    return dict(sorted(((name, mine[name] - other[name]) for name in mine), key=lambda item: -item[1]))


def bound_by(time: IterationTime) -> str:
    """What to look at first: see `IterationTime.bound`, with its share."""
    return f"{time.bound.replace('_', ' ')} {time.parts()[time.bound] / time.total:.0%}"


def memory_line(candidate: Candidate) -> str:
    """Why a layout cannot run that breaks no rule."""
    prediction, config = candidate.prediction, candidate.config
    rule = (
        f"needs {prediction.peak_bytes / 2**30:.1f} of {prediction.memory_bytes / 2**30:.1f} GiB on stage"
        f" {prediction.peak_stage} with MBSZ={config.mbsz} and RECOMPUTE={config.recompute}"
    )
    return problem("layout", layout_words(config), rule, "raise TP, PP or EP, or use more or larger GPUs")


def _problems_of(config: Config, given: Mapping[str, Any], inner: Search) -> list[str]:
    """Lines on a layout that no rule allows, whatever is chosen for the settings that are not given."""
    layout = dict(given)
    if "pp" in layout and not layout.keys() & set(SPLIT_SETTINGS):
        layout |= stage_splits(config, layout["pp"])[0]
    lines = layout_problems(with_layout(config, **layout))
    # the rest, at 1 here, may be what is wrong with the number of ranks or the batch
    if not {"tp", "pp"} <= given.keys():
        lines = [line for line in lines if line.partition("=")[0].lower() in given]
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in inner.rejected.most_common())
    words = ",".join(f"{name.upper()}={value}" for name, value in given.items())
    return lines or [
        problem("layout", words, f"no layout is left, these are refused: {reasons}", "leave some of it open")
    ]


def layout_words(config: Config) -> str:
    """The parallel sizes in a word: TP4,PP12,DP8."""
    sizes = {
        "TP": config.tp,
        "PP": config.pp,
        "VPP": config.vpp or 1,
        "EP": config.ep,
        "ETP": config.etp,
        "CP": config.cp,
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP")]
    return ",".join([*words, f"DP{config.data_parallel_size}"])
