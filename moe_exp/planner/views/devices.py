"""One model on several kinds of devices: the best layout on each, and what its tokens cost. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_exp.config import Config
from moe_exp.host.progress import progress
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
    fixed: Mapping[str, Sequence[Any]] | None = None,
) -> list[OnDevice]:
    """The best layout on each of `devices`, the cheapest or fastest first.

    Args:
        configs: settings for each device, with its number of devices per node.
        devices: by name.
        constants: of the planner.
        prices: of an hour of a device, by name.
        fixed: values of layout settings, see `search`.
    """
    found = []
    with progress("devices", len(devices), unit="devices") as advance:
        for name, hardware in devices.items():
            ranked = search(configs[name], hardware, fixed=fixed, constants=constants).ranked
            found.append(_on_device(hardware, ranked[0] if ranked else None, prices.get(name)))
            advance(1)
    return sorted(found, key=lambda one: (one.price_per_trillion or float("inf"), one.hours_per_trillion))


def _on_device(hardware: Hardware, best: Candidate | None, price: float | None) -> OnDevice:
    if best is None:
        return OnDevice(hardware, None, 0.0, float("inf"), None)
    speed = speed_of(best.config, hardware, best.seconds).tokens_per_second / best.config.world_size
    hours = _TRILLION / speed / 3600
    return OnDevice(hardware, best, speed, hours, None if price is None else hours * price)
