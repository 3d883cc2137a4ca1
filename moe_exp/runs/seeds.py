"""Runs that differ only in SEED."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_exp.config import TRAITS


def grouped_by_seed(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Groups runs whose settings differ only in SEED, in their place or in how they are monitored.

    Args:
        settings: of each run; one without any is alone.

    Returns:
        Indices of the runs of each group, in their order.
    """
    found: dict[object, list[int]] = {}
    for index, values in enumerate(settings):
        compared = {
            name: str(value)
            for name, value in values.items()
            if name != "seed" and (name not in TRAITS or TRAITS[name].compared)
        }
        found.setdefault(tuple(sorted(compared.items())) or index, []).append(index)
    return list(found.values())
