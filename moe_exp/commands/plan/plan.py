"""`moe-exp plan ...`: what a run costs, the best layout for it, and predictions for runs in a CSV."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_exp.commands.guard import ExactParser, add_json, print_json
from moe_exp.commands.plan.views import add_views, check_new_file
from moe_exp.config import Config, add_arguments, problem, setting_error
from moe_exp.planner.hardware import DEFAULT_GPU

if TYPE_CHECKING:
    from moe_exp.planner.hardware import Hardware
    from moe_exp.planner.prediction import Constants
    from moe_exp.planner.search.explanation import Explanation
    from moe_exp.planner.search.topology import Candidate, Search

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp plan` and its commands."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate memory, time and cost of a run, and search for the best layout",
        description=(
            "Without a command: what the run costs that moe-exp train would start with the same variables and"
            " flags."
        ),
        usage="moe-exp plan [command] [flags] [settings as moe-exp train has them]",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    commands = parser.add_subparsers(
        dest="plan_command", metavar="command", parser_class=ExactParser, prog="moe-exp plan"
    )
    _add_goodput(parser)
    _add_settings(parser)
    # What is not given leaves alone what was given before the command: `moe-exp plan --tp 4 run`.
    run = commands.add_parser(
        "run",
        help="estimate memory, time and cost of a run (the default command)",
        argument_default=argparse.SUPPRESS,
    )
    _add_goodput(run)
    _add_settings(run)
    run.set_defaults(run=_run)
    _add_search(commands)  # type: ignore[arg-type]  # an action of parsers of a subclass is one of parsers
    _add_calibrate(commands)  # type: ignore[arg-type]
    _add_predict(commands)  # type: ignore[arg-type]
    add_views(commands, _add_settings, _loaded, _searched, _refuse_settings)  # type: ignore[arg-type]


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "mean time between failures of one node: also estimate goodput and the best SAVE_INTERVAL"
    add("--mtbf-hours", type=float, metavar="H", help=about)
    about = "from a failure to the next iteration, with --mtbf-hours (default: 15)"
    add("--restart-minutes", type=float, metavar="M", help=about)
    about = "of a save, with --mtbf-hours (default: the checkpoint at 1 GB/s per node)"
    add("--save-seconds", type=float, metavar="S", help=about)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="devices in all, instead of NNODES")
    about = f"kind of device, or its JSON file (default: {DEFAULT_GPU}); see moe-exp plan hardware"
    add("--gpu", metavar="NAME", help=about)
    add("--profile", type=Path, metavar="FILE", help="constants that moe-exp plan calibrate wrote")
    add("--tokens", metavar="N", help="token budget such as 300B, instead of TRAIN_ITERS")
    add("--price", metavar="X", help="of a GPU-hour, in any currency")
    add_json(parser)
    add_arguments(parser)


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
    _add_settings(parser)
    parser.set_defaults(run=_search)


def _add_calibrate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "fit the constants of predictions to measured runs"
    parser = subparsers.add_parser("calibrate", help=about, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--runs", type=Path, required=True, metavar="CSV", help="measured runs")
    add("--out", type=Path, required=True, metavar="FILE", help="profile to write, for --profile")
    about = "profile that the fit starts from: with a few runs of a new device"
    add("--prior", type=Path, metavar="FILE", default=None, help=about)
    parser.set_defaults(run=_calibrate)


def _add_predict(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "predict", help="predict memory and time of the runs in a CSV", argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    about = "runs; columns of results may be absent or empty"
    add("--runs", type=Path, required=True, metavar="CSV", help=about)
    about = "predictions to write: row_id,mem_gb,sec_per_it,oom"
    add("--out", type=Path, required=True, metavar="CSV", help=about)
    add("--profile", type=Path, metavar="FILE", help="constants that moe-exp plan calibrate wrote")
    parser.set_defaults(run=_predict)


def _run(arguments: argparse.Namespace) -> None:
    from moe_exp.planner.run_plan import plan_run

    failures = _failures(arguments)
    config, hardware, constants = _loaded(arguments)
    plan = plan_run(config, hardware, constants, **_budget(arguments), failures=failures)
    if arguments.json:
        print_json(plan.report)
    else:
        plan.print(sys.stdout)


def _loaded(arguments: argparse.Namespace) -> tuple[Config, Hardware, Constants]:
    """Settings, device and constants of a plan of one layout."""
    from moe_exp.config import load_config

    hardware, constants = _hardware_and_constants(arguments)
    flags = _settings(arguments, hardware)
    return _as_of_data(load_config(flags, nodes=hardware.nodes), flags), hardware, constants


_FAILURE_FLAGS = ("mtbf_hours", "restart_minutes", "save_seconds")
_RESTART_MINUTES = 15.0


def _failures(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `goodput_of` takes from the flags; empty without --mtbf-hours."""
    given = {name: value for name in _FAILURE_FLAGS if (value := getattr(arguments, name)) is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise setting_error(name, f"{value:g}", "must be a positive number", "give one, or leave it out")
        if "mtbf_hours" not in given:
            raise setting_error(name, f"{value:g}", "has no effect without --mtbf-hours", "give that, too")
    if not given:
        return {}
    restart = given.get("restart_minutes", _RESTART_MINUTES)
    failures = {"node_mtbf_hours": given["mtbf_hours"], "restart_minutes": restart}
    return failures | {"save_seconds": given.get("save_seconds")}


def _search(arguments: argparse.Namespace) -> int:
    from moe_exp.planner.estimate import cost_of
    from moe_exp.planner.reports import describe_cost, describe_explanation, describe_search
    from moe_exp.planner.search.explanation import explain
    from moe_exp.planner.search.layout_text import parse_fixed, parse_wanted
    from moe_exp.planner.search.topology import search
    from moe_exp.planner.tables import PlanPrinter

    if arguments.top < 1 or arguments.rank < 1:
        name = "top" if arguments.top < 1 else "rank"
        raise setting_error(name, getattr(arguments, name), "must be at least 1", "give a number of layouts")
    to_stdout = arguments.export == "env"
    if to_stdout and arguments.json:
        rule = "does not go with --json, standard output is one of the two"
        raise setting_error("export", arguments.export, rule, "give one of them, or --export FILE")
    if arguments.export and not to_stdout:
        check_new_file("export", Path(arguments.export))
    if given := _failures(arguments):
        fix = "give it to moe-exp plan for the layout that is found"
        raise setting_error("mtbf_hours", given["node_mtbf_hours"], "has no effect in a search", fix)
    hardware, constants = _hardware_and_constants(arguments)
    budget = _budget(arguments)
    config, fixed = _searched(arguments, hardware)
    fixed_values = parse_fixed(fixed)
    wanted = parse_wanted(arguments.explain, config) if arguments.explain else {}
    found = search(config, hardware, fixed=fixed_values, constants=constants)
    explained = (
        explain(found, config, hardware, wanted, fixed=fixed_values, constants=constants) if wanted else None
    )
    best = found.ranked[0] if found.ranked else None
    cost = cost_of(best.config, hardware, constants=constants, **budget) if best else None
    printer = PlanPrinter(sys.stderr if to_stdout else sys.stdout)
    if arguments.json:
        report = describe_search(found, hardware, arguments.top) | {
            "cost": describe_cost(cost) if cost else None
        }
        print_json(
            report | ({"explained": describe_explanation(explained, found, hardware)} if explained else {})
        )
    elif explained:
        printer.explanation(explained, found)
    else:
        printer.search(found, hardware, arguments.top)
        if best and cost:
            printer.best(best, cost)
    if arguments.export:
        chosen = _chosen(found, explained, arguments.rank)
        lines = _exported_lines(chosen, hardware, budget["num_tokens"], overrides=to_stdout)
        if doubt := _doubt(chosen, found):
            print(f"moe-exp plan: warning: {doubt}", file=sys.stderr)
            lines = f"# {doubt}\n{lines}"
        if to_stdout:
            print(lines, end="")
        else:
            _write_export(Path(arguments.export), lines, quiet=arguments.json)
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


def _exported_lines(
    candidate: Candidate, hardware: Hardware, num_tokens: int | None, *, overrides: bool
) -> str:
    from moe_exp.config import load_config
    from moe_exp.planner.estimate import with_budget
    from moe_exp.planner.search.layout_text import exported_settings

    defaults = load_config({"preset": candidate.config.preset}, {}, nodes=hardware.nodes)
    settings = exported_settings(with_budget(candidate.config, num_tokens), defaults, overrides=overrides)
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings)


def _write_export(path: Path, lines: str, *, quiet: bool) -> None:
    from moe_exp.host.files import write_atomically
    from moe_exp.host.processes import own_command

    write_atomically(path, "# Written by moe-exp plan search, for moe-exp train --config\n" + lines)
    if not quiet:
        command = shlex.join([*own_command(), "train", "--config", str(path)])
        print(f"{path}: written, for\n  {command}")


def _calibrate(arguments: argparse.Namespace) -> None:
    _refuse_settings(arguments)
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.fit.calibration import calibrate, doubts, profile_text
    from moe_exp.planner.fit.measured import run_of_row
    from moe_exp.planner.prediction import load_constants
    from moe_exp.planner.tables import PlanPrinter

    _check_out(arguments.out, arguments.runs)
    prior = load_constants(arguments.prior) if arguments.prior else None
    calibration = calibrate(
        [run_of_row(row) for row in _read(arguments.runs)], prior, prior or load_constants()
    )
    write_atomically(arguments.out, profile_text(calibration, arguments.runs))
    PlanPrinter(sys.stdout).calibration(calibration)
    for line in doubts(calibration):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    print(f"{arguments.out}: written, for moe-exp plan ... --profile {shlex.quote(str(arguments.out))}")


def _read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV of runs, with a warning about each that contradicts itself."""
    from moe_exp.planner.fit.measured import contradictions, read_rows

    rows = read_rows(path)
    for line in contradictions(rows, path):
        print(f"moe-exp plan: warning: {line}", file=sys.stderr)
    return rows


def _predict(arguments: argparse.Namespace) -> None:
    _refuse_settings(arguments)
    from moe_exp.host.files import write_atomically
    from moe_exp.planner.fit.calibration import predicted_csv
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    _check_out(arguments.out, arguments.runs)
    text = predicted_csv(_read(arguments.runs), load_constants(arguments.profile or CONSTANTS))
    write_atomically(arguments.out, text)
    print(f"{arguments.out}: {text.count(chr(10)) - 1} rows")


def _check_out(out: Path, runs: Path) -> None:
    """Refuses, before any work, a file that cannot be written, or whose place a new file must not take.

    Raises:
        ValueError: with the line.
    """
    if out.exists() and out.samefile(runs):
        raise setting_error("out", out, "is the file of the runs", "name another file")
    check_new_file("out", out)


def _refuse_settings(arguments: argparse.Namespace) -> None:
    """Settings given before a command that has none would have no effect."""
    names = ("config", *Config.model_fields, "gpus", "gpu", "tokens", "price", *_FAILURE_FLAGS)
    if given := [name for name in names if getattr(arguments, name) is not None]:
        fix = f"leave it out of moe-exp plan {arguments.plan_command}"
        lines = (problem(name, getattr(arguments, name), "has no effect here", fix) for name in given)
        raise ValueError("\n".join(lines))


def _hardware_and_constants(arguments: argparse.Namespace) -> tuple[Hardware, Constants]:
    from moe_exp.planner.hardware import load_hardware
    from moe_exp.planner.prediction import CONSTANTS, load_constants

    return load_hardware(arguments.gpu or DEFAULT_GPU), load_constants(arguments.profile or CONSTANTS)


def _settings(arguments: argparse.Namespace, hardware: Hardware) -> dict[str, Any]:
    """Flags and --config by field name; --gpus as NNODES and GPUS_PER_NODE."""
    from moe_exp.config.loading import with_file
    from moe_exp.config.misspelt import warn_of_misspelt
    from moe_exp.planner.run_plan import settings_for

    warn_of_misspelt()
    given = {name: getattr(arguments, name) for name in ("config", *Config.model_fields)}
    return settings_for(hardware, with_file(given, os.environ), arguments.gpus)


def _searched(arguments: argparse.Namespace, hardware: Hardware) -> tuple[Config, dict[str, str]]:
    """The settings without a layout, and the flags that fix one."""
    from moe_exp.config import load_config
    from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS

    flags = _settings(arguments, hardware)
    asked = {name: flags.pop(name) for name in LAYOUT_SETTINGS if name in flags}
    fixed = {name: str(value) for name, value in asked.items() if getattr(arguments, name) is not None}
    from_environ = {name: os.environ.get(name.upper(), "") for name in LAYOUT_SETTINGS if name not in fixed}
    from_file = {name: value for name, value in asked.items() if name not in fixed}
    for values, place in ((from_environ, "the environment"), (from_file, arguments.config)):
        if ignored := [f"{name.upper()}={value}" for name, value in values.items() if value]:
            rule = "searched all the same, a flag would fix it"
            print(f"moe-exp plan: {', '.join(ignored)} of {place}: {rule}", file=sys.stderr)
    environ = {name: value for name, value in os.environ.items() if name.lower() not in LAYOUT_SETTINGS}
    if "gpus_per_node" not in flags and not environ.get("GPUS_PER_NODE"):
        flags["gpus_per_node"] = hardware.gpus_per_node  # also with PRESET=cpu
    return _as_of_data(load_config(flags, environ, nodes=hardware.nodes), flags), fixed


def _as_of_data(config: Config, flags: dict[str, Any]) -> Config:
    """The settings with VOCAB_SIZE and DOCUMENT_TOKENS of the data, as training would have them."""
    if not config.train_data and not config.tokenizer:
        return config  # without loading numpy
    from moe_exp.config.loading import given_values
    from moe_exp.config.setting_types import blend_members
    from moe_exp.data.tokens.vocabulary import with_vocab_size

    config, reason = with_vocab_size(config, given_values(flags, os.environ))
    if reason:
        print(f"moe-exp plan: VOCAB_SIZE={config.vocab_size}: {reason}", file=sys.stderr)
    members = [prefix for _, prefix in blend_members(config.train_data)]
    if not all(Path(f"{prefix}.idx").is_file() for prefix in members):
        return config  # text that is not prepared, or data of another machine
    from moe_exp.data.tokens.document_ends import with_document_tokens

    return with_document_tokens(config, config.train_data)


def _budget(arguments: argparse.Namespace) -> dict[str, Any]:
    """Token budget and price, as `estimate.cost_of` takes them."""
    from moe_exp.planner.search.layout_text import parse_budget

    return parse_budget(arguments.tokens, arguments.price)
