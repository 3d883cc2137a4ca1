"""`moe-exp plan explain`, `roofline`, `compare-hardware`, `nearest` and `hardware`: views of a plan."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands import plan
from moe_exp.commands.parsers import JSON, arg, command, print_json, string, takes
from moe_exp.commands.plan import PLANNED
from moe_exp.config import Config, raise_for, setting_error
from moe_exp.config.parsers import number_in
from moe_exp.planner.hardware import Hardware, hardware_profiles, load_hardware

if TYPE_CHECKING:
    from moe_exp.planner.prediction import Constants
    from moe_exp.planner.search.topology import Candidate

_OF_COST = ("tokens", "price", *plan.FAILURE_FLAGS)
_COMPARED = ("H100-80GB", "H200-141GB", "B200-180GB", "B300-288GB", "GB200-186GB", "GB300-288GB")


def _one_layout(arguments: argparse.Namespace) -> tuple[Config, Hardware, Constants]:
    """A layout's settings, device and planner constants. Raises ConfigError if the layout cannot run."""
    plan.refuse(arguments, *_OF_COST)
    planned = plan.loaded(arguments)
    raise_for(planned[0].problems())
    return planned


@command("plan explain", "draw the timeline of an iteration on every pipeline stage")
@takes(*PLANNED, arg("--svg FILE", "draw the timeline in this SVG file", Path, default=None))
def run_explain(arguments: argparse.Namespace) -> None:
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.costs.job import PlannedJob
    from moe_exp.planner.costs.timing import time_of
    from moe_exp.planner.views import as_svg, as_text, timeline

    config, hardware, constants = _one_layout(arguments)
    if arguments.svg:
        plan.check_new_file("svg", arguments.svg)
    job = PlannedJob.of(config)
    of, whole = timeline(job, hardware, constants.time), job.num_microbatches
    shown = 1 + max(event.microbatch for event in of.events)
    if arguments.json:
        total = time_of(job, hardware, constants.time).total
        head = {"seconds": total, "microbatches": whole, "microbatches_shown": shown}
        print_json(head | {"events": [asdict(event) for event in of.events]})
    else:
        print("\n".join(as_text(of)))
        if shown < whole:
            print(f"the timeline shows an iteration with only the first {shown} of {whole} micro-batches")
    if arguments.svg:
        write_atomically(arguments.svg, as_svg(of))


@command(
    "plan roofline", "list operations, arithmetic intensity, time and bottleneck of each part of a layer"
)
@takes(*PLANNED)
def run_roofline(arguments: argparse.Namespace) -> None:
    from moe_exp.host.progress import print_table
    from moe_exp.planner.costs.job import PlannedJob
    from moe_exp.planner.costs.layer_time import roofline

    config, hardware, constants = _one_layout(arguments)
    parts = roofline(PlannedJob.of(config), hardware, constants.time)
    if arguments.json:
        print_json([asdict(part) | {"peak_share": part.peak_share} for part in parts])
        return
    columns = ("part", "TFLOP", "FLOP per byte", "ms", "of peak", "bound by")
    rows = (
        (
            part.name.replace("_", " "),
            f"{part.flops / 1e12:.2f}" if part.flops else "",
            f"{part.intensity:,.0f}" if part.num_bytes else "",
            f"{1e3 * part.seconds:.3f}",
            f"{part.peak_share:.0%}" if part.flops else "",
            part.bound,
        )
        for part in parts
    )
    of = "an MoE layer" if config.use_moe else "a layer"
    print_table(
        f"{of} and the output layer, forward and backward of one micro-batch on one rank", columns, rows
    )


@command("plan compare-hardware", "find the best layout and its price on several kinds of devices")
@takes(
    *PLANNED,
    arg("--devices A,B", "devices to compare", default=",".join(_COMPARED)),
    string("--prices A=X,B=Y", "prices per device-hour in any currency, for example H100=2.1,B200=4"),
)
def run_compare_hardware(arguments: argparse.Namespace) -> None:
    from moe_exp.host.progress import print_table, progress
    from moe_exp.planner.estimate import speed_of
    from moe_exp.planner.prediction import CONSTANTS, load_constants
    from moe_exp.planner.search.layout_text import parse_fixed, world_of
    from moe_exp.planner.search.topology import layout_words, search
    from moe_exp.planner.tables import error_words

    plan.refuse(arguments, "gpu", *_OF_COST)
    named = [load_hardware(name.strip()) for name in arguments.devices.split(",")]
    devices = {hardware.name: hardware for hardware in named}
    prices = {}
    for part in filter(None, arguments.prices.split(",")):
        name, _, value = part.partition("=")
        if not 0 < number_in(value) < float("inf"):
            fix = "write for example H100=2.1,B200=4"
            raise setting_error("prices", part, "must be DEVICE=PRICE with a positive price", fix)
        prices[load_hardware(name.strip()).name] = number_in(value)
    if others := set(prices) - set(devices):
        rule, fix = f"{min(others)} is not among --devices", "add the device to --devices, or omit its price"
        raise setting_error("prices", arguments.prices, rule, fix)
    config, fixed = plan.searched(arguments, named[0])
    constants, fixed_values = load_constants(arguments.profile or CONSTANTS), parse_fixed(fixed)
    found: list[tuple[dict[str, Any], Candidate | None]] = []
    with progress("devices", len(devices), unit="devices") as advance:
        for name, hardware in devices.items():
            # the same number of devices, in nodes of this kind's usual size
            world = world_of(config.world_size, min(hardware.gpus_per_node, config.world_size))
            on_it = config.model_copy(update=world)
            best = next(iter(search(on_it, hardware, fixed=fixed_values, constants=constants).ranked), None)
            speed = speed_of(best.config, hardware, best.seconds).tokens_per_second if best else 0.0
            speed /= config.world_size
            hours = 1e12 / speed / 3600 if best else None
            row = {
                "gpu": name,
                "layout": layout_words(best.config) if best else None,
                "tokens_per_second": speed if best else None,
                "hours_per_trillion": hours,
                "price_per_trillion": hours * prices[name] if hours and name in prices else None,
            }
            found.append((row, best))
            advance(1)
    last = float("inf")
    # by price if known, else by time; devices without a fitting layout last
    found.sort(key=lambda one: (one[0]["price_per_trillion"] or last, one[0]["hours_per_trillion"] or last))
    if arguments.json:
        print_json([row for row, _ in found])
        return
    columns = ("device", "layout", "tokens/s each", "hours per 10^12 tokens", "price", "error to expect")
    rows = (
        (
            row["gpu"],
            f"{row['layout']}, MBSZ={best.config.mbsz}" if best else "nothing fits",
            *("" if row[name] is None else f"{row[name]:,.0f}" for name in list(row)[2:]),
            error_words(best.prediction).strip("()") if best else "",
        )
        for row, best in found
    )
    print_table(f"PRESET={config.preset} on {config.world_size} devices, GBSZ={config.gbsz}", columns, rows)


@command("plan nearest", "list the published runs most similar to these settings")
@takes(*PLANNED, arg("--top N", "number of runs to show", default=10))
def run_nearest(arguments: argparse.Namespace) -> None:
    from moe_exp.host.progress import print_table
    from moe_exp.planner.search.topology import layout_words
    from moe_exp.planner.views import nearest_runs

    planned = _one_layout(arguments)
    if arguments.top < 1:
        raise setting_error("top", arguments.top, "must be at least 1", "omit --top")
    found = nearest_runs(*planned, arguments.top)
    if arguments.json:
        print_json(
            [
                {name: one.row[name] for name in ("row_id", "model", "precision")}
                | {"dispatcher": one.dispatcher, "source": one.source, "date": one.row["date"]}
                | {"seconds": one.seconds, "gpu": one.hardware.name, "layout": layout_words(one.job.config)}
                | {"planned_seconds": one.planned_seconds, "distance": one.distance}
                for one in found
            ]
        )
        return
    columns = ("run", "model", "devices", "layout", "measured s", "planned s", "error", "source")
    rows = (
        (
            one.row["row_id"],
            f"{one.row['model']} {one.row['precision']} {one.dispatcher}".strip(),
            f"{one.job.config.world_size} {one.hardware.name}",
            f"{layout_words(one.job.config)}, MBSZ={one.job.config.mbsz}",
            f"{one.seconds:.4g}",
            f"{one.planned_seconds:.4g}",
            f"{one.planned_seconds / one.seconds - 1:+.0%}",
            f"{one.source} ({one.row['date']})",
        )
        for one in found
    )
    print_table("published runs, most similar first; planned with the constants of this plan", columns, rows)


@command("plan hardware", "list known devices with their specifications and sources")
@takes(arg("name", "name of a device (default: all)", nargs="?", default=""), JSON)
def run_hardware(arguments: argparse.Namespace) -> None:
    from moe_exp.planner.tables import PlanPrinter

    plan.refuse_settings(arguments)
    profiles = hardware_profiles(arguments.name)
    if arguments.json:
        print_json(profiles)
    else:
        PlanPrinter(sys.stdout).hardware(profiles)
