"""One model on several kinds of devices: the best layout on each, and what its tokens cost. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.estimate import speed_of
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants
from moe_exp.planner.search.topology import Candidate, search

_TRILLION = 1e12


@dataclass(frozen=True)
class OnDevice:
    """The best layout of a model on a number of devices of one kind."""

    hardware: Hardware
    best: Candidate | None  # None: nothing fits
    tokens_per_second: float  # of one device; 0 if nothing fits
    hours_per_trillion: float  # device hours for 10^12 tokens
    price_per_trillion: float | None  # None: no price was given


def compare_devices(
    configs: Mapping[str, Config],
    devices: Mapping[str, Hardware],
    constants: Constants,
    prices: Mapping[str, float],
) -> list[OnDevice]:
    """The best layout on each of `devices`, the cheapest or fastest first.

    Args:
        configs: settings for each device, with its number of devices per node.
        devices: by name.
        constants: of the planner.
        prices: of an hour of a device, by name.
    """
    found = []
    for name, hardware in devices.items():
        ranked = search(configs[name], hardware, constants=constants).ranked
        if not ranked:
            found.append(OnDevice(hardware, None, 0.0, float("inf"), None))
            continue
        best = ranked[0]
        speed = speed_of(best.config, hardware, best.seconds).tokens_per_second / best.config.world_size
        hours = _TRILLION / speed / 3600
        price = hours * prices[name] if name in prices else None
        found.append(OnDevice(hardware, best, speed, hours, price))
    return sorted(found, key=lambda one: (one.price_per_trillion or float("inf"), one.hours_per_trillion))
