"""`moe-exp report RUN [RUN ...]`: runs side by side, as HTML, Markdown, in the terminal or on wandb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from moe_exp.config import ConfigError, problem, setting_error

_LONGEST_NAME = 255  # of a file, in bytes
# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="compare runs in one HTML page, or in Markdown for a pull request",
        description=(
            "Reads run folders, also of runs that are still running, and writes one HTML file that opens"
            " from disk. `moe-exp report wandb RUN ... --project P` makes a report of them on wandb's site"
            " instead."
        ),
    )
    add = parser.add_argument
    about = "run folders, RUN_DIR/RUN_NAME, or patterns in quotes such as 'runs/*'"
    add("runs", nargs="+", metavar="RUN", help=about)
    add("--format", choices=("html", "md"), help="html: a page (default); md: a short table in Markdown")
    about = "default: report.html, or with --format md the standard output"
    add("--out", type=Path, metavar="FILE", help=about)
    add("--title", default="", help="heading (default: the names of the runs)")
    about = "text under the heading, or a file with it (notes.md of a run folder is shown anyway)"
    add("--notes", default="", metavar="TEXT", help=about)
    about = "loss that the costs are given for (default: the lowest that all reach)"
    add("--loss", type=float, metavar="X", help=about)
    add("--watch", action="store_true", help="follow the runs in the terminal instead")
    add("--once", action="store_true", help="with --watch: one picture")
    add("--project", default="", help="of wandb, for `report wandb`")
    add("--entity", default="", help="user or team on wandb (default: yours)")
    parser.set_defaults(run=_report)


# Options that a kind of report has no use for.
_NOT_WITH = {
    "wandb": ("out", "format", "loss", "notes", "watch", "once"),
    "--watch": ("out", "format", "title", "loss", "notes", "project", "entity"),
    "a page": ("once", "project", "entity"),
}


def _report(arguments: argparse.Namespace) -> int:
    kind = "wandb" if arguments.runs[0] == "wandb" else "--watch" if arguments.watch else "a page"
    problems = [
        problem(name, value, f"is not used for {kind}", f"leave --{name} out")
        for name in _NOT_WITH[kind]
        if (value := getattr(arguments, name)) not in (None, "", False)
    ]
    if problems:
        raise ConfigError(problems)
    return {"wandb": _wandb, "--watch": _watch, "a page": _page}[kind](arguments)


def _wandb(arguments: argparse.Namespace) -> int:
    from moe_exp.report.wandb_report import wandb_report

    if not arguments.project or not arguments.runs[1:]:
        name = "runs" if arguments.project else "project"
        fix = "call moe-exp report wandb RUN ... --project P"
        raise setting_error(name, "", "a wandb report needs it", fix)
    title = {"title": arguments.title} if arguments.title else {}
    runs = _expanded(arguments.runs[1:])
    print(wandb_report(runs, project=arguments.project, entity=arguments.entity or None, **title))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from moe_exp.report.live import watch

    watch(_expanded(arguments.runs), console=Console(), once=arguments.once)
    return 0


def _page(arguments: argparse.Namespace) -> int:
    import math

    from moe_exp.host.quantities import bytes_text
    from moe_exp.report.page import write_report

    if arguments.loss is not None and not math.isfinite(arguments.loss):
        raise setting_error("loss", arguments.loss, "must be a finite number", "give a loss such as 3.2")
    kind = arguments.format or "html"
    out = arguments.out or (Path("report.html") if kind == "html" else None)
    about = {"title": arguments.title, "notes": _notes(arguments.notes)}
    warnings = write_report(_expanded(arguments.runs), out, kind=kind, loss=arguments.loss, **about)
    for text in warnings:
        print(f"moe-exp report: warning: {text}", file=sys.stderr, flush=True)
    if out:
        shown = str(out).encode(errors="replace").decode()
        print(f"wrote {bytes_text(out.stat().st_size)}: open {shown}")
    return 0


def _expanded(texts: Sequence[str]) -> list[Path]:
    """Run folders by name, and those that match a pattern such as `runs/*`; ConfigError for one without."""
    from moe_exp.report.run_data import run_problems

    found: list[Path] = []
    problems = []
    for text in texts:
        if not has_magic(text) or Path(text).exists():
            found.append(Path(text))
            continue
        names = sorted(glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = [Path(name) for name in names if not run_problems([Path(name)])]
        if not matches:
            fix = "check the pattern; runs/* matches the runs in the folder runs"
            problems.append(problem("run", text, "matches no run folder", fix))
        found += matches
    if problems:
        raise ConfigError(problems)
    return found


def _notes(text: str) -> str:
    """The text, or the content of the file that it names."""
    if len(text) > _LONGEST_NAME or "\n" in text or not Path(text).is_file():
        return text
    try:
        return Path(text).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({' '.join(str(error).split())})"
        raise setting_error("notes", text, rule, "give a text file in UTF-8, or the text") from None
