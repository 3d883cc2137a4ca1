"""`moe-exp plan ...`: what a run costs, the best layout for it, and predictions for runs in a CSV."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands.guard import add_command, positive_options, print_json
from moe_exp.commands.plan.settings import (
    FAILURE_FLAGS,
    add_settings,
    budget,
    check_new_file,
    hardware_and_constants,
    loaded,
    refuse,
    refuse_settings,
    searched,
)
from moe_exp.commands.plan.views import add_views
from moe_exp.config import setting_error
from moe_exp.planner.hardware import Hardware

if TYPE_CHECKING:
    from moe_exp.planner.search.topology import Candidate, Explanation, Search

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="estimate memory, time and cost of a run, and search for the best layout",
        description=(
            "Without a command: what the run costs that moe-exp train would start with the same variables and"
            " flags."
        ),
        usage="moe-exp plan [command] [flags] [settings as moe-exp train has them]",
    )
    parser.set_defaults(run=_run)
    commands = parser.add_subparsers(dest="plan_command", metavar="command", prog="moe-exp plan")
    _add_goodput(parser)
    add_settings(parser)
    # What is not given leaves alone what was given before the command: `moe-exp plan --tp 4 run`.
    about = "estimate memory, time and cost of a run (the default command)"
    run = add_command(commands, "run", _run, about, argument_default=argparse.SUPPRESS)
    _add_goodput(run)
    add_settings(run)
    _add_search(commands)
    _add_of_files(commands)
    add_views(commands)


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "mean time between failures of one node: also estimate goodput and the best SAVE_INTERVAL"
    add("--mtbf-hours", type=float, metavar="H", help=about)
    about = "from a failure to the next iteration, with --mtbf-hours (default: 15)"
    add("--restart-minutes", type=float, metavar="M", help=about)
    about = "of a save, with --mtbf-hours (default: the checkpoint at 1 GB/s per node)"
    add("--save-seconds", type=float, metavar="S", help=about)


def _add_search(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "search",
        help="rank the layouts of a model on a number of GPUs",
        description=(
            "TP, PP, VPP, EP, ETP, CP, MBSZ and RECOMPUTE are searched unless a flag fixes them: --tp 4,"
            " --mbsz 1,2."
        ),
        usage="moe-exp plan search [flags] [settings as moe-exp train has them]",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--top", type=int, metavar="N", default=10, help="layouts to show (default: 10)")
    add("--explain", metavar="TP=4,PP=12", default="", help="why this layout is rejected, or what it loses")
    about = "write the best layout to this settings file, for --config; env: to standard output"
    add("--export", metavar="FILE", default="", help=about)
    about = "place of the layout to export (default: 1); with --explain that one"
    add("--rank", type=int, metavar="N", default=1, help=about)
    add_settings(parser)
    parser.set_defaults(run=_search)


def _add_of_files(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    own: dict[str, Any] = {"argument_default": argparse.SUPPRESS}
    about = "fit the constants of predictions to measured runs"
    add = add_command(subparsers, "calibrate", _calibrate, about, **own).add_argument
    add("--runs", type=Path, required=True, metavar="CSV", help="measured runs")
    add("--out", type=Path, required=True, metavar="FILE", help="profile to write, for --profile")
    about = "profile that the fit starts from: with a few runs of a new device"
    add("--prior", type=Path, metavar="FILE", default=None, help=about)
    about = "predict memory and time of the runs in a CSV"
    add = add_command(subparsers, "predict", _predict, about, **own).add_argument
    about = "runs; columns of results may be absent or empty"
    add("--runs", type=Path, required=True, metavar="CSV", help=about)
    about = "predictions to write: row_id,mem_gb,sec_per_it,oom"
    add("--out", type=Path, required=True, metavar="CSV", help=about)
    add("--profile", type=Path, metavar="FILE", help="constants that moe-exp plan calibrate wrote")


def _run(arguments: argparse.Namespace) -> None:
    from moe_exp.planner.run_plan import plan_run

    failures = _failures(arguments)
    config, hardware, constants = loaded(arguments)
    plan = plan_run(config, hardware, constants, **budget(arguments), failures=failures)
    if arguments.json:
        print_json(plan.report)
    else:
        plan.print(sys.stdout)


def _failures(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `goodput_of` takes from the flags; empty without --mtbf-hours."""
    given = positive_options(arguments, *FAILURE_FLAGS)
    if not given:
        return {}
    if "mtbf_hours" not in given:
        name, value = next(iter(given.items()))
        raise setting_error(name, f"{value:g}", "has no effect without --mtbf-hours", "give that, too")
    failures = {"node_mtbf_hours": given.pop("mtbf_hours"), "restart_minutes": 15.0}
    return failures | given


def _search(arguments: argparse.Namespace) -> int:
    from moe_exp.planner.estimate import cost_of
    from moe_exp.planner.search.layout_text import parse_fixed, parse_wanted
    from moe_exp.planner.search.topology import explain, search
    from moe_exp.planner.tables import PlanPrinter, describe_explanation, describe_search

    if arguments.top < 1 or arguments.rank < 1:
        name = "top" if arguments.top < 1 else "rank"
        raise setting_error(name, getattr(arguments, name), "must be at least 1", "give a number of layouts")
    to_stdout = arguments.export == "env"
    if to_stdout and arguments.json:
        rule = "does not go with --json, standard output is one of the two"
        raise setting_error("export", arguments.export, rule, "give one of them, or --export FILE")
    if arguments.export and not to_stdout:
        check_new_file("export", Path(arguments.export))
    refuse(arguments, *FAILURE_FLAGS)
    hardware, constants = hardware_and_constants(arguments)
    cost_flags = budget(arguments)
    config, fixed = searched(arguments, hardware)
    fixed_values = parse_fixed(fixed)
    wanted = parse_wanted(arguments.explain, config) if arguments.explain else {}
    found = search(config, hardware, fixed=fixed_values, constants=constants)
    explained = None
    if wanted:
        explained = explain(found, config, hardware, wanted, fixed=fixed_values, constants=constants)
    best = found.ranked[0] if found.ranked else None
    cost = cost_of(best.config, hardware, constants=constants, **cost_flags) if best else None
    printer = PlanPrinter(sys.stderr if to_stdout else sys.stdout)
    if arguments.json:
        report = describe_search(found, hardware, arguments.top)
        report["cost"] = asdict(cost) | {"days": cost.days} if cost else None
        if explained:
            report["explained"] = describe_explanation(explained, found, hardware)
        print_json(report)
    elif explained:
        printer.explanation(explained, found)
    else:
        printer.search(found, hardware, arguments.top)
        if best and cost:
            printer.best(best, cost)
    if arguments.export:
        chosen = _chosen(found, explained, arguments.rank)
        _export(arguments, chosen, _doubt(chosen, found), hardware, cost_flags["num_tokens"])
    return int(best is None)


def _chosen(found: Search, explained: Explanation | None, rank: int) -> Candidate:
    if explained and not (explained.fits and explained.candidate):
        words = ",".join(f"{name.upper()}={value}" for name, value in explained.wanted.items())
        raise setting_error("explain", words, "cannot run, so nothing is exported", "choose another layout")
    if explained and explained.candidate:
        return explained.candidate
    if rank > len(found.ranked):
        raise setting_error("rank", rank, f"{len(found.ranked)} layouts fit", "choose one of them")
    return found.ranked[rank - 1]


def _doubt(chosen: Candidate, found: Search) -> str:
    """Warning about a layout that fits by less than the planner's error; empty for others."""
    prediction = chosen.prediction
    if not prediction.is_close:
        return ""
    left, error = prediction.margin_bytes / 2**30, prediction.memory_error * prediction.peak_bytes / 2**30
    rule = f"the exported layout leaves {left:.1f} GiB, less than the error to expect ({error:.1f} GiB)"
    safe = (place for place, one in enumerate(found.ranked, 1) if not one.prediction.is_close)
    other = f", or choose --rank {place}" if (place := next(safe, 0)) else ""
    return f"{rule}: it may run out of memory. Fix: try it for a few iterations{other}."


def _export(
    arguments: argparse.Namespace, chosen: Candidate, doubt: str, hardware: Hardware, num_tokens: int | None
) -> None:
    """Writes a layout as a settings file, or to standard output."""
    from moe_exp.config import load_config
    from moe_exp.host.files import write_atomically
    from moe_exp.host.processes import own_command
    from moe_exp.planner.estimate import with_budget
    from moe_exp.planner.search.layout_text import exported_settings

    to_stdout = arguments.export == "env"
    defaults = load_config({"preset": chosen.config.preset}, {}, nodes=hardware.nodes)
    pairs = exported_settings(with_budget(chosen.config, num_tokens), defaults, overrides=to_stdout)
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in pairs)
    if doubt:
        print(f"moe-exp plan: warning: {doubt}", file=sys.stderr)
        lines = f"# {doubt}\n{lines}"
    if to_stdout:
        print(lines, end="")
        return
    path = Path(arguments.export)
    write_atomically(path, "# Written by moe-exp plan search, for moe-exp train --config\n" + lines)
    if not arguments.json:
        command = shlex.join([*own_command(), "train", "--config", str(path)])
        print(f"{path}: written, for\n  {command}")


def _calibrate(arguments: argparse.Namespace) -> None:
    refuse_settings(arguments)
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.calibration import calibrate, doubts, profile_text
    from moe_exp.planner.measured import run_of_row
    from moe_exp.planner.prediction import load_constants
    from moe_exp.planner.tables import PlanPrinter

    _check_out(arguments.out, arguments.runs)
    prior = load_constants(arguments.prior) if arguments.prior else None
    runs = [run_of_row(row) for row in _read(arguments.runs)]
    calibration = calibrate(runs, prior, prior or load_constants())
    write_atomically(arguments.out, profile_text(calibration, arguments.runs))
    PlanPrinter(sys.stdout).calibration(calibration)
    for line in doubts(calibration):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    print(f"{arguments.out}: written, for moe-exp plan ... --profile {shlex.quote(str(arguments.out))}")


def _read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV of runs, with a warning about each that contradicts itself."""
    from moe_exp.planner.measured import contradictions, read_rows

    rows = read_rows(path)
    for line in contradictions(rows, path):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    return rows


def _predict(arguments: argparse.Namespace) -> None:
    refuse_settings(arguments)
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.calibration import predicted_csv
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    _check_out(arguments.out, arguments.runs)
    text = predicted_csv(_read(arguments.runs), load_constants(arguments.profile or CONSTANTS))
    write_atomically(arguments.out, text)
    print(f"{arguments.out}: {text.count(chr(10)) - 1} rows")


def _check_out(out: Path, runs: Path) -> None:
    """Refuses, before any work, a file that cannot be written, or whose place a new file must not take."""
    if out.exists() and out.samefile(runs):
        raise setting_error("out", out, "is the file of the runs", "name another file")
    check_new_file("out", out)
