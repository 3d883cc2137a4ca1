"""Runs that differ only in SEED: groups of them, their names, and where their curves overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_exp.config import TRAITS, Config
from moe_exp.config.setting_types import as_given

Floats = npt.NDArray[np.float64]
_FOLLOW = ("decay_iters", "warmup_iters")  # TRAIN_ITERS, so that they say nothing beside it
_LONGEST_NAME = 48


def grouped_by_seed(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Groups of indices of runs whose settings differ only in SEED, in their place or in how they are
    monitored. A run without settings is alone.
    """
    found: dict[object, list[int]] = {}
    for index, values in enumerate(settings):
        names = (name for name in values if name not in TRAITS or TRAITS[name].compared)
        compared = sorted((name, str(values[name])) for name in names if name != "seed")
        found.setdefault(tuple(compared) or index, []).append(index)
    return list(found.values())


def names_by_difference(settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Names that say what differs between runs, such as `dense` and `dmoe, TOPK=2`; `names` if settings are
    unknown, or say too much or nothing.
    """
    found = [", ".join(_differences(one, settings)) for one in settings]
    is_clear = len(set(found)) == len(found) and all(0 < len(name) <= _LONGEST_NAME for name in found)
    return found if is_clear and all(settings) else list(names)


def _differences(one: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The kind of model, and the settings that not all runs with this kind of setting have alike."""

    def value(of: Mapping[str, Any], name: str) -> str:
        return as_given(of.get(name, Config.model_fields[name].default))

    def kind(of: Mapping[str, Any]) -> str:
        return value(of, "moe_type") if of.get("use_moe") else "dense"

    parts = [kind(one)] if len({kind(other) for other in settings}) > 1 else []
    for name, traits in TRAITS.items():
        follows = name in _FOLLOW and any("TRAIN_ITERS=" in part for part in parts)
        if follows or not traits.compared or name in ("seed", "use_moe", "moe_type"):
            continue
        others = [other for other in settings if other.get("use_moe") or traits.part != "experts"]
        if one in others and len({value(other, name) for other in others}) > 1:
            parts.append(f"{name.upper()}={value(one, name)}")
    return parts


def shared_points(xs: Sequence[Floats]) -> Floats:
    """The points of all curves (increasing), from where the last of them begins to where the first ends."""
    points = np.unique(np.concatenate(xs))
    return points[(max(x[0] for x in xs) <= points) & (points <= min(x[-1] for x in xs))]
