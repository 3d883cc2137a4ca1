"""`moe-exp report RUN [RUN ...]`: compares runs in HTML, in Markdown, in the terminal or on wandb."""

import argparse
import sys
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from moe_exp.commands.parsers import arg, command, flag, string, takes
from moe_exp.config import problem, raise_for, setting_error

_LONGEST_NAME = 255  # of a file, in bytes
# Options that do not apply to a kind of report.
_NOT_WITH = {
    "wandb": ("out", "format", "loss", "notes", "watch", "once"),
    "--watch": ("out", "format", "title", "loss", "notes", "project", "entity"),
    "a page": ("once", "project", "entity"),
}


@command("report", "compare runs in one HTML page, or in Markdown for a pull request")
@takes(
    arg("runs RUN", "run folders (RUN_DIR/RUN_NAME), or quoted patterns such as 'runs/*'", nargs="+"),
    arg("--format", "output format: html, or md for Markdown (default: html)", choices=("html", "md")),
    arg("--out FILE", "output file (default: report.html, or standard output with --format md)", Path),
    string("--title", "heading of the report (default: names of the runs)"),
    string(
        "--notes TEXT",
        "text to show under the heading, or path of a text file (HTML pages also show each run's notes.md)",
    ),
    arg("--loss X", "loss at which to compare costs (default: lowest loss that all runs reach)", float),
    flag("--watch", "show the runs live in the terminal instead of writing a page"),
    flag("--once", "print the current state of the runs once and exit (with --watch)"),
    string("--project", "wandb project (for `report wandb`)"),
    string("--entity", "wandb user or team (default: your default entity)"),
)
def run_report(arguments: argparse.Namespace) -> None:
    """Reads the folders of finished or active runs and writes a self-contained HTML page or Markdown.
    `moe-exp report wandb RUN ... --project P` creates a report on wandb's site instead.
    """
    to_wandb = arguments.runs[0] == "wandb"
    kind = "wandb" if to_wandb else "--watch" if arguments.watch else "a page"
    raise_for(
        problem(name, value, f"has no effect for {kind}", f"omit --{name}")
        for name in _NOT_WITH[kind]
        if (value := getattr(arguments, name)) not in (None, "", False)
    )
    if to_wandb:
        from moe_exp.report.wandb_report import wandb_report

        if not arguments.project or not arguments.runs[1:]:
            name = "runs" if arguments.project else "project"
            fix = "run moe-exp report wandb RUN ... --project P"
            raise setting_error(name, "", "must be given for a wandb report", fix)
        title = {"title": arguments.title} if arguments.title else {}
        runs = _expanded(arguments.runs[1:])
        print(wandb_report(runs, project=arguments.project, entity=arguments.entity or None, **title))
    elif arguments.watch:
        from rich.console import Console

        from moe_exp.report.live import watch

        watch(_expanded(arguments.runs), console=Console(), once=arguments.once)
    else:
        _write_page(arguments)


def _write_page(arguments: argparse.Namespace) -> None:
    import math

    from moe_exp.host.quantities import bytes_text
    from moe_exp.report.page import write_report

    if arguments.loss is not None and not math.isfinite(arguments.loss):
        raise setting_error("loss", arguments.loss, "must be a finite number", "set a loss such as 3.2")
    kind = arguments.format or "html"
    out = arguments.out or (Path("report.html") if kind == "html" else None)
    notes = arguments.notes
    # text or the name of a file; a name longer than this would raise an OSError
    if len(notes) <= _LONGEST_NAME and "\n" not in notes and Path(notes).is_file():
        try:
            notes = Path(notes).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            rule = f"cannot be read ({' '.join(str(error).split())})"
            raise setting_error("notes", notes, rule, "specify a UTF-8 text file or pass the text") from None
    about = {"title": arguments.title, "notes": notes}
    for text in write_report(_expanded(arguments.runs), out, kind=kind, loss=arguments.loss, **about):
        print(f"moe-exp report: warning: {text}", file=sys.stderr, flush=True)
    if out:
        shown = str(out).encode(errors="replace").decode()
        print(f"wrote {bytes_text(out.stat().st_size)}: open {shown}")


def _expanded(texts: Sequence[str]) -> list[Path]:
    """Expands patterns such as `runs/*` to run folders; raises ConfigError if a pattern has no match."""
    from moe_exp.report.run_data import run_problems

    found: list[Path] = []
    problems = []
    for text in texts:
        # a folder may have a bracket in its name
        if not has_magic(text) or Path(text).exists():
            found.append(Path(text))
            continue
        names = sorted(glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = [Path(name) for name in names if not run_problems([Path(name)])]
        if not matches:
            fix = "check the pattern; runs/* matches the runs in the folder runs"
            problems.append(problem("run", text, "matches no run folder", fix))
        found += matches
    raise_for(problems)
    return found
