"""Output of a preflight: table of nodes, list of excluded nodes, event, and PREFLIGHT=1. No torch."""

import os
import time
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from moe_exp.config import Config
from moe_exp.host.exit_codes import complain
from moe_exp.host.progress import table_console
from moe_exp.launch.preflight.node import preflight, wait_for_port
from moe_exp.launch.preflight.verdicts import GRADES, SPEEDS, Verdict
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.excluded_nodes import EXCLUDE_NODES, exclude

_COLOURS = {"ok": "green", "warning": "yellow", "slow": "yellow", "failed": "red"}


def print_report(verdict: Verdict, *, num_ranks: int) -> None:
    console = table_console()
    names = {name for node in verdict.nodes for name, number in node.numbers.items() if number is not None}
    shown = [speed for speed in SPEEDS if speed.name in names]
    title = f"Preflight: {len(verdict.nodes)} nodes, {num_ranks} ranks"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("node", "host", "verdict", *(f"{speed.name} {speed.unit}" for speed in shown)):
        table.add_column(name)
    for node in verdict.nodes:
        numbers = [node.numbers.get(speed.name) for speed in shown]
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        grade = f"[{_COLOURS[node.grade]}]{node.grade}[/]"
        table.add_row(str(node.node), escape(node.host or "unknown"), grade, *cells)
    console.print(table)
    if len(verdict.nodes) == 1 and num_ranks > 1:
        line = (
            "One node: ranks are compared with each other, and a node that is slow as a whole does not show."
        )
        console.print(line, soft_wrap=True)
    if verdict.all_ranks:
        units = {"all_reduce": "GB/s", "all_to_all": "GB/s", "latency_us": "us"}
        found = {key: verdict.all_ranks[key] for key in units if key in verdict.all_ranks}
        words = {"all_reduce": "all-reduce", "all_to_all": "all-to-all", "latency_us": "latency"}
        rates = [f"{words[key]} {number:.3g} {units[key]}" for key, number in found.items()]
        console.print(f"All {num_ranks} ranks together: {', '.join(rates)}", soft_wrap=True)
    for line in findings_lines(verdict):
        console.print(escape(line), soft_wrap=True, highlight=False)


def findings_lines(verdict: Verdict) -> list[str]:
    """One line per finding, the worst first: grade, host, text."""
    found = [
        (finding.grade, f"{node.host or 'unknown host'} (node {node.node})", finding.text)
        for node in verdict.nodes
        for finding in node.findings
    ]
    found += [(link.grade, "link", link.text) for link in verdict.links]
    found.sort(key=lambda line: -GRADES.index(line[0]))
    return [f"{grade}: {where}: {text}" for grade, where, text in found]


def add_to_list(verdict: Verdict, path: Path) -> list[str]:
    """Adds bad nodes to a list of excluded nodes; returns those that are new."""
    bad = [(node.host, f"preflight: {node.reason}") for node in verdict.to_exclude() if node.host]
    return [host for host, reason in bad if exclude(path, host, reason)]


def passes(config: Config) -> bool:
    """PREFLIGHT=1: whether training may start; called by every node's launcher, with the same result on all.

    Node 0 prints the table, adds bad nodes to the list of the job, and writes the event `preflight`. Slow
    nodes are warnings, failing ones end the job.
    """
    start = time.monotonic()
    try:
        verdict = preflight(config)
    except ValueError as error:
        complain(str(error))
        return False
    if config.node_rank == 0:
        print_report(verdict, num_ranks=config.world_size)
        path = Path(os.environ.get("EXCLUDE_FILE") or Path(config.run_dir) / EXCLUDE_NODES).expanduser()
        if added := add_to_list(verdict, path):
            complain(f"{path}: added {', '.join(added)}")
        folder = RunFolder.of(config)
        folder.path.mkdir(parents=True, exist_ok=True)
        hosts = [node.host for node in verdict.to_exclude()]
        details = {"grade": verdict.grade, "seconds": round(time.monotonic() - start, 1)}
        details |= {"findings": findings_lines(verdict), "exclude": hosts}
        iteration = max(folder.checkpoint_iterations(), default=0)
        append_event(folder.metrics, "preflight", iteration, **details)
        wait_for_port(config)
    if verdict.grade != "failed":
        return True
    for line in findings_lines(verdict):
        if line.startswith("failed"):
            complain(f"preflight {line}")
    fix = "start the job without it, or set PREFLIGHT=0 to train all the same"
    complain(f"no training: a node has failed the preflight. Fix: {fix}.")
    return False
