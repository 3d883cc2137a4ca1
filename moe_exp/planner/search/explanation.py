"""Explains a layout: the rules it breaks, the memory it lacks, the seconds it loses. No torch."""

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
    """How the wanted settings compare with the best layout, or why they are refused."""

    wanted: Mapping[str, Any]  # requested layout settings
    candidate: Candidate | None  # fastest valid layout with them, if any
    fits: bool  # whether it fits in memory
    place: int  # its rank among all layouts, from 1; 0 if there is none
    losses: dict[str, float]  # part of the iteration to seconds lost against the best layout
    problems: list[str]  # lines on why no layout is valid


def explain(
    found: Search,
    config: Config,
    hardware: Hardware,
    wanted: Mapping[str, Any],
    *,
    fixed: Mapping[str, Sequence[Any]] | None = None,
    constants: Constants | None = None,
) -> Explanation:
    """Why the settings `wanted` are refused, or the rank and losses of the fastest layout with them. The
    other arguments are those of the search that returned `found`.
    """
    narrowed = {**(fixed or {}), **{name: (value,) for name, value in wanted.items()}}
    inner = search(config, hardware, fixed=narrowed, constants=constants)
    if inner.ranked:
        candidate = inner.ranked[0]
        best = found.ranked[0] if found.ranked else candidate
        place = found.place_of(candidate.seconds)
        mine, other = candidate.prediction.time.parts(), best.prediction.time.parts()
        losses = sorted(((name, mine[name] - other[name]) for name in mine), key=lambda item: -item[1])
        return Explanation(wanted, candidate, True, place, dict(losses), [])
    if inner.smallest is not None:
        return Explanation(wanted, inner.smallest, False, 0, {}, [memory_line(inner.smallest)])
    given = {name: values[0] for name, values in (fixed or {}).items() if len(values) == 1} | dict(wanted)
    return Explanation(wanted, None, False, 0, {}, _problems_of(config, given, inner))


def bound_by(time: IterationTime) -> str:
    """`IterationTime.bound` with its share of the iteration."""
    return f"{time.bound.replace('_', ' ')} {time.parts()[time.bound] / time.total:.0%}"


def memory_line(candidate: Candidate) -> str:
    """Line on a layout that breaks no rule but does not fit in memory."""
    prediction, config = candidate.prediction, candidate.config
    rule = f"needs {prediction.peak_bytes / 2**30:.1f} of {prediction.memory_bytes / 2**30:.1f} GiB"
    rule += f" on stage {prediction.peak_stage} with MBSZ={config.mbsz} and RECOMPUTE={config.recompute}"
    return problem("layout", layout_words(config), rule, "raise TP, PP or EP, or use more or larger GPUs")


def _problems_of(config: Config, given: Mapping[str, Any], inner: Search) -> list[str]:
    """Lines on given settings that are invalid regardless of the others."""
    layout = dict(given)
    if "pp" in layout and not layout.keys() & set(SPLIT_SETTINGS):
        layout |= stage_splits(config, layout["pp"])[0]
    lines = layout_problems(with_layout(config, **layout))
    # problems with the number of ranks or the batch may come from other sizes, which are 1 here
    if not {"tp", "pp"} <= given.keys():
        lines = [line for line in lines if line.partition("=")[0].lower() in given]
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in inner.rejected.most_common())
    words = ",".join(f"{name.upper()}={value}" for name, value in given.items())
    rule = f"no layout is left, these are refused: {reasons}"
    return lines or [problem("layout", words, rule, "leave some of it open")]


def layout_words(config: Config) -> str:
    """The parallel sizes as text: TP4,PP12,DP8."""
    sizes = {name: getattr(config, name) or 1 for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
    words = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1 or name in ("tp", "pp")]
    return ",".join([*words, f"DP{config.data_parallel_size}"])
