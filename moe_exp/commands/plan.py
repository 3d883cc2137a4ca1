"""`moe-exp plan run`, `search`, `calibrate` and `predict`, and arguments shared with plan_views.py."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands.parsers import JSON, arg, command, positive_options, print_json, string, takes
from moe_exp.config import Config, add_arguments, problem, raise_for, setting_error
from moe_exp.planner.hardware import DEFAULT_GPU, Hardware, load_hardware

if TYPE_CHECKING:
    from moe_exp.planner.prediction import Constants
    from moe_exp.planner.search.topology import Candidate, Explanation, Search

FAILURE_FLAGS = ("mtbf_hours", "restart_minutes", "save_seconds")
_PROFILE = arg("--profile FILE", "file with the planner's constants, written by moe-exp plan calibrate", Path)
PLANNED = (  # arguments that describe the planned run
    arg("--gpus N", "total number of devices; sets NNODES and GPUS_PER_NODE", int),
    arg("--gpu NAME", f"device name (see moe-exp plan hardware) or JSON file (default: {DEFAULT_GPU})"),
    _PROFILE,
    arg("--tokens N", "token budget such as 300B, instead of TRAIN_ITERS"),
    arg("--price X", "price of a GPU-hour, in any currency"),
    JSON,
    add_arguments,
)
_GOODPUT = (
    arg("--mtbf-hours H",
        "mean time between failures of one node (hours); used to estimate goodput and the best "
        "SAVE_INTERVAL",
        float),
    arg("--restart-minutes M",
        "time from a failure to the next iteration (minutes; with --mtbf-hours; default: 15)", float),
    arg("--save-seconds S",
        "duration of one save (seconds; requires --mtbf-hours; default: estimated at 1 GB/s per node)",
        float),
)  # fmt: skip


@command(
    "plan",
    "estimate memory, time and cost of a run, and search for the best layout",
    description="Without a command, estimates the run that moe-exp train would start with the same variables"
    " and flags.",
    usage="moe-exp plan [command] [flags] [settings as in moe-exp train]",
)
@command("plan run", "estimate memory, time and cost of a run (the default command)")
@takes(*_GOODPUT, *PLANNED)
def run_plan(arguments: argparse.Namespace) -> None:
    from moe_exp.planner.search.layout_text import parse_budget
    from moe_exp.planner.tables import plan_run

    failures = positive_options(arguments, *FAILURE_FLAGS)
    if failures and "mtbf_hours" not in failures:
        name, value = next(iter(failures.items()))
        raise setting_error(name, f"{value:g}", "has no effect without --mtbf-hours", "set --mtbf-hours")
    if failures:  # names and defaults of `goodput_of`
        failures = {"node_mtbf_hours": failures.pop("mtbf_hours"), "restart_minutes": 15.0} | failures
    config, hardware, constants = loaded(arguments)
    budget = parse_budget(arguments.tokens, arguments.price)
    plan = plan_run(config, hardware, constants, **budget, failures=failures)
    if arguments.json:
        print_json(plan.report)
    else:
        plan.print(sys.stdout)


@command(
    "plan search",
    "rank the layouts of a model on a number of GPUs",
    usage="moe-exp plan search [flags] [settings as in moe-exp train]",
)
@takes(
    arg("--top N", "number of layouts to show", default=10),
    string(
        "--explain TP=4,PP=12",
        "explain why this layout is rejected, or how its time compares to that of the best layout",
    ),
    string(
        "--export FILE",
        "write the best layout to FILE as settings for --config; --export env: write to stdout instead",
    ),
    arg("--rank N", "export the N-th best layout (default: 1; with --explain: that layout)", default=1),
    *PLANNED,
)
def run_search(arguments: argparse.Namespace) -> int:
    """Searches for the best TP, PP, VPP, EP, ETP, CP, MBSZ and RECOMPUTE. Flags such as --tp 4 or --mbsz 1,2
    restrict a setting to the given values.
    """
    from moe_exp.planner.estimate import cost_of
    from moe_exp.planner.search.layout_text import parse_budget, parse_fixed, parse_wanted
    from moe_exp.planner.search.topology import explain, search, search_smaller
    from moe_exp.planner.tables import PlanPrinter, describe_explanation, describe_search

    if arguments.top < 1 or arguments.rank < 1:
        name = "top" if arguments.top < 1 else "rank"
        raise setting_error(name, getattr(arguments, name), "must be at least 1", f"omit --{name}")
    to_stdout = arguments.export == "env"
    if to_stdout and arguments.json:
        rule = "cannot be combined with --json, since both write to standard output"
        raise setting_error("export", arguments.export, rule, "omit --json, or set --export to a file")
    if arguments.export and not to_stdout:
        check_new_file("export", Path(arguments.export))
    refuse(arguments, *FAILURE_FLAGS)
    hardware, constants = hardware_and_constants(arguments)
    cost_flags = parse_budget(arguments.tokens, arguments.price)
    config, fixed = searched(arguments, hardware)
    fixed_values = parse_fixed(fixed)
    wanted = parse_wanted(arguments.explain, config) if arguments.explain else {}
    explained, changes = None, dict[str, str]()
    if not wanted:
        found, changes = search_smaller(config, hardware, fixed=fixed_values, constants=constants)
    else:
        found = search(config, hardware, fixed=fixed_values, constants=constants)
        explained = explain(found, wanted)
    best = found.ranked[0] if found.ranked else None
    cost = cost_of(best.config, hardware, constants=constants, **cost_flags) if best else None
    printer = PlanPrinter(sys.stderr if to_stdout else sys.stdout)
    if arguments.json:
        report = describe_search(found, arguments.top) | {"changed": changes}
        report["cost"] = asdict(cost) | {"days": cost.days} if cost else None
        if explained:
            report["explained"] = describe_explanation(explained, found)
        print_json(report)
    elif explained:
        printer.explanation(explained, found)
    else:
        printer.search(found, arguments.top, changes)
        if best and cost:
            printer.best(best, cost)
    if arguments.export:
        _export(arguments, found, explained, cost_flags["num_tokens"])
    return int(best is None)


def _export(
    arguments: argparse.Namespace, found: Search, explained: Explanation | None, num_tokens: int | None
) -> None:
    """Writes the chosen layout to a settings file or to standard output."""
    from moe_exp.config import load_config
    from moe_exp.host.files import write_atomically
    from moe_exp.host.processes import own_command
    from moe_exp.planner.estimate import with_budget
    from moe_exp.planner.search.layout_text import exported_settings

    if explained and not (explained.fits and explained.candidate):
        words = ",".join(f"{name.upper()}={value}" for name, value in explained.wanted.items())
        rule = "this layout cannot run, so it is not exported"
        raise setting_error("explain", words, rule, "choose another layout")
    if not explained and arguments.rank > len(found.ranked):
        fits = len(found.ranked)
        rule = f"must be at most {fits}, the number of layouts that fit" if fits else "no layout fits"
        fix = "choose a lower rank" if fits else "use more GPUs or a smaller model"
        raise setting_error("rank", arguments.rank, rule, fix)
    chosen = (explained and explained.candidate) or found.ranked[arguments.rank - 1]
    to_stdout = arguments.export == "env"
    defaults = load_config({"preset": chosen.config.preset}, {}, nodes=found.hardware.nodes)
    pairs = exported_settings(with_budget(chosen.config, num_tokens), defaults, overrides=to_stdout)
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in pairs)
    if doubt := _doubt(chosen, found):
        print(f"moe-exp plan: warning: {doubt}", file=sys.stderr)
        lines = f"# {doubt}\n{lines}"
    if to_stdout:
        print(lines, end="")
        return
    path = Path(arguments.export)
    write_atomically(path, "# Written by moe-exp plan search, for moe-exp train --config\n" + lines)
    if not arguments.json:
        command = shlex.join([*own_command(), "train", "--config", str(path)])
        print(f"wrote {path}; train with\n  {command}")


def _doubt(chosen: Candidate, found: Search) -> str:
    """Returns a warning if a layout leaves less free memory than the planner's margin of error, else ""."""
    prediction = chosen.prediction
    if not prediction.is_close:
        return ""
    left, error = prediction.margin_bytes / 2**30, prediction.memory_error * prediction.peak_bytes / 2**30
    rule = f"the exported layout leaves {left:.1f} GiB free, less than the expected error ({error:.1f} GiB)"
    # suggest the best layout that fits by more than the planner's margin of error
    safe = (place for place, one in enumerate(found.ranked, 1) if not one.prediction.is_close)
    other = f", or choose --rank {place}" if (place := next(safe, 0)) else ""
    return f"{rule}: training may run out of memory. Fix: try the layout for a few iterations{other}."


@command("plan calibrate", "fit the planner's constants to measured runs")
@takes(
    arg("--runs CSV", "table of measured runs", Path, required=True),
    arg("--out FILE", "output file for the fitted constants, for use with --profile", Path, required=True),
    arg("--prior FILE", "profile (fitted constants) to use as the fit's priors, useful for a new device "
        "with few measured runs", Path, default=None),
)  # fmt: skip
def run_calibrate(arguments: argparse.Namespace) -> None:
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.calibration import calibrate, doubts, profile_text
    from moe_exp.planner.measured import run_of_row
    from moe_exp.planner.prediction import load_constants
    from moe_exp.planner.tables import PlanPrinter

    prior = load_constants(arguments.prior) if arguments.prior else None
    runs = [run_of_row(row) for row in _read(arguments)]
    calibration = calibrate(runs, prior, prior or load_constants())
    write_atomically(arguments.out, profile_text(calibration, arguments.runs))
    PlanPrinter(sys.stdout).calibration(calibration)
    for line in doubts(calibration):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    print(f"wrote {arguments.out}; use it with moe-exp plan ... --profile {shlex.quote(str(arguments.out))}")


@command("plan predict", "predict memory and time of the runs in a CSV")
@takes(
    arg(
        "--runs CSV",
        "runs to predict; columns of measured results may be missing or empty",
        Path,
        required=True,
    ),
    arg("--out CSV", "file for the predictions (row_id,mem_gb,sec_per_it,oom)", Path, required=True),
    _PROFILE,
)
def run_predict(arguments: argparse.Namespace) -> None:
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.calibration import predicted_csv
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    text = predicted_csv(_read(arguments), load_constants(arguments.profile or CONSTANTS))
    write_atomically(arguments.out, text)
    print(f"{arguments.out}: {text.count(chr(10)) - 1} rows")


def _read(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """Checks that --out can be written, returns the rows of --runs and warns of contradictory rows."""
    from moe_exp.planner.measured import contradictions, read_rows

    refuse_settings(arguments)
    out, runs = arguments.out, arguments.runs
    if out.exists() and out.samefile(runs):
        raise setting_error("out", out, "must not be the --runs file", "specify another file")
    check_new_file("out", out)
    rows = read_rows(runs)
    for line in contradictions(rows, runs):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    return rows


# Shared with plan_views.py.


def loaded(arguments: argparse.Namespace) -> tuple[Config, Hardware, Constants]:
    """Returns the settings, device and planner constants used to plan a single layout."""
    from moe_exp.config import load_config

    hardware, constants = hardware_and_constants(arguments)
    flags = _settings(arguments, hardware)
    return _as_of_data(load_config(flags, nodes=hardware.nodes), flags), hardware, constants


def hardware_and_constants(arguments: argparse.Namespace) -> tuple[Hardware, Constants]:
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    return load_hardware(arguments.gpu or DEFAULT_GPU), load_constants(arguments.profile or CONSTANTS)


def _settings(arguments: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Returns settings from flags and --config, by field name; --gpus sets NNODES and GPUS_PER_NODE."""
    from moe_exp.config.loading import with_file
    from moe_exp.config.settings_file import warn_of_misspelt
    from moe_exp.planner.search.layout_text import settings_for

    warn_of_misspelt()
    given = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    return settings_for(hardware, with_file(given, os.environ), arguments.gpus)


def searched(arguments: argparse.Namespace, hardware: Hardware) -> tuple[Config, dict[str, str]]:
    """Returns the non-layout settings, and the layout settings that are fixed by flags."""
    from moe_exp.config import load_config
    from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS

    flags = _settings(arguments, hardware)
    # the search replaces a layout from the environment or the file; only a flag fixes it
    asked = {name: flags.pop(name) for name in LAYOUT_SETTINGS if name in flags}
    fixed = {name: str(value) for name, value in asked.items() if getattr(arguments, name) is not None}
    from_environ = {name: os.environ.get(name.upper(), "") for name in LAYOUT_SETTINGS if name not in fixed}
    from_file = {name: value for name, value in asked.items() if name not in fixed}
    for values, place in ((from_environ, "the environment"), (from_file, arguments.config)):
        if ignored := [f"{name.upper()}={value}" for name, value in values.items() if value]:
            rule = "ignored by the search; to keep these values, set them with flags"
            print(f"moe-exp plan: {', '.join(ignored)} of {place}: {rule}", file=sys.stderr)
    # a layout in the environment must not narrow the search
    environ = {name: value for name, value in os.environ.items() if name.lower() not in LAYOUT_SETTINGS}
    if "gpus_per_node" not in flags and not environ.get("GPUS_PER_NODE"):
        flags["gpus_per_node"] = hardware.gpus_per_node  # also with PRESET=cpu
    return _as_of_data(load_config(flags, environ, nodes=hardware.nodes), flags), fixed


def _as_of_data(config: Config, flags: dict[str, Any]) -> Config:
    """Returns `config` with VOCAB_SIZE and DOCUMENT_TOKENS taken from the data, as in training."""
    if not config.train_data and not config.tokenizer:
        return config  # avoids importing numpy
    from moe_exp.config.loading import given_values
    from moe_exp.config.setting_types import blend_members
    from moe_exp.data.tokens.manifests import with_document_tokens, with_vocab_size

    config, reason = with_vocab_size(config, given_values(flags, os.environ))
    if reason:
        print(f"moe-exp plan: VOCAB_SIZE={config.vocab_size}: {reason}", file=sys.stderr)
    members = [prefix for _, prefix in blend_members(config.train_data)]
    if not all(Path(f"{prefix}.idx").is_file() for prefix in members):
        return config  # unprepared text, or data on another machine
    return with_document_tokens(config, config.train_data)


def refuse_settings(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for settings given before a subcommand that takes no settings."""
    refuse(arguments, "config", *Config.model_fields, "gpus", "gpu", "tokens", "price", *FAILURE_FLAGS)


def refuse(arguments: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError if any flag in `names` is given, because the subcommand does not use these flags."""
    fix = f"omit it from moe-exp plan {arguments.plan_command}"
    given = ((name, value) for name in names if (value := getattr(arguments, name)) is not None)
    raise_for(problem(name, value, "has no effect here", fix) for name, value in given)


def check_new_file(name: str, path: Path) -> None:
    """Raises ValueError if `path` exists but is not a regular file, or if its folder does not exist."""
    # a folder, or a device such as /dev/stdout, which a file would replace
    if path.exists() and not path.is_file():
        raise setting_error(name, path, "exists and is not a regular file", "choose another path")
    if not path.parent.is_dir():
        raise setting_error(name, path, f"{path.parent} is not a folder", "create it, or choose another file")
