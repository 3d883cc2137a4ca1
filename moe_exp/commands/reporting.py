"""`moe-exp report RUN [RUN ...]`: runs side by side, as one HTML page, as Markdown, in the terminal, or as a report on wandb's site."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `moe-exp report`."""
    parser = subparsers.add_parser(
        "report",
        help="runs side by side, dense against MoE: one HTML page, or Markdown for a pull request",
        description="Reads run folders, also of runs that are still going on, and writes one HTML file that opens from disk. "
        "`moe-exp report wandb RUN ... --project P` makes a report of them on wandb's site instead.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, RUN_DIR/RUN_NAME")
    parser.add_argument("--format", choices=("html", "md"), default="html", help="html: a page (default); md: a short table in Markdown")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html, or with --format md the standard output")
    parser.add_argument("--title", default="", help="heading (default: the names of the runs)")
    parser.add_argument("--loss", type=float, metavar="X", help="loss that the costs are given for (default: the lowest that all reach)")
    parser.add_argument("--watch", action="store_true", help="follow the runs in the terminal instead")
    parser.add_argument("--once", action="store_true", help="with --watch: one picture")
    parser.add_argument("--project", default="", help="of wandb, for `report wandb`")
    parser.add_argument("--entity", default="", help="user or team on wandb (default: yours)")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    if arguments.runs[0] == "wandb":
        return _wandb(arguments)
    return _watch(arguments) if arguments.watch else _page(arguments)


def _wandb(arguments: argparse.Namespace) -> int:
    from moe_exp.config import problem
    from moe_exp.report.wandb_report import wandb_report

    if not arguments.project or not arguments.runs[1:]:
        name = "project" if not arguments.project else "runs"
        raise ValueError(problem(name, "", "a wandb report needs it", "call moe-exp report wandb RUN ... --project P"))
    print(wandb_report([Path(run) for run in arguments.runs[1:]], project=arguments.project, entity=arguments.entity or None))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from moe_exp.report.live import watch

    watch([Path(run) for run in arguments.runs], console=Console(), once=arguments.once)
    return 0


def _page(arguments: argparse.Namespace) -> int:
    import math

    from moe_exp.config import problem
    from moe_exp.report.page import write_report

    if arguments.loss is not None and not math.isfinite(arguments.loss):
        raise ValueError(problem("loss", arguments.loss, "must be a finite number", "give a loss such as 3.2"))
    out = arguments.out or (Path("report.html") if arguments.format == "html" else None)
    warnings = write_report([Path(run) for run in arguments.runs], out, kind=arguments.format, title=arguments.title, loss=arguments.loss)
    for text in warnings:
        print(f"moe-exp report: warning: {text}", file=sys.stderr, flush=True)
    if out:
        print(f"{out}: {out.stat().st_size:,} bytes")
    return 0
