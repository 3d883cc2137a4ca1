"""What people and programs see of a preflight: the table node by node, the list of excluded nodes, the event.
No torch.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from moe_exp.config import Config
from moe_exp.host.progress import table_console
from moe_exp.launch.preflight.verdicts import SPEEDS, Verdict
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.nodes.exclude import exclude

_COLOURS = {"ok": "green", "warning": "yellow", "slow": "yellow", "failed": "red"}


def print_report(verdict: Verdict, *, num_ranks: int) -> None:
    """The table of the nodes, and what is wrong with them in lines."""
    console = table_console()
    shown = [
        speed for speed in SPEEDS if any(node.numbers.get(speed.name) is not None for node in verdict.nodes)
    ]
    table = Table(
        title=f"Preflight: {len(verdict.nodes)} nodes, {num_ranks} ranks",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("node", "host", "verdict", *(f"{speed.name} {speed.unit}" for speed in shown)):
        table.add_column(name)
    for node in verdict.nodes:
        numbers = [node.numbers.get(speed.name) for speed in shown]
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        grade = f"[{_COLOURS[node.grade]}]{node.grade}[/]"
        table.add_row(str(node.node), escape(node.host or "unknown"), grade, *cells)
    console.print(table)
    if len(verdict.nodes) == 1 and num_ranks > 1:
        console.print(
            "One node: ranks are compared with each other, and a node that is slow as a whole does not show.",
            soft_wrap=True,
        )
    if verdict.all_ranks:
        rates = ", ".join(
            f"{name} {verdict.all_ranks[key]:.3g} {unit}"
            for key, name, unit in _ALL_RANKS
            if key in verdict.all_ranks
        )
        console.print(f"All {num_ranks} ranks together: {rates}", soft_wrap=True)
    for line in findings_lines(verdict):
        console.print(escape(line), soft_wrap=True, highlight=False)


_ALL_RANKS = (
    ("all_reduce", "all-reduce", "GB/s"),
    ("all_to_all", "all-to-all", "GB/s"),
    ("latency_us", "latency", "us"),
)


def findings_lines(verdict: Verdict) -> list[str]:
    """One line a finding, the worst first: grade, host, what."""
    found = [
        (finding.grade, f"{node.host or 'unknown host'} (node {node.node})", finding.text)
        for node in verdict.nodes
        for finding in node.findings
    ]
    found += [(link.grade, "link", link.text) for link in verdict.links]
    order = ("failed", "slow", "warning", "ok")
    return [
        f"{grade}: {where}: {text}"
        for grade, where, text in sorted(found, key=lambda line: order.index(line[0]))
    ]


def add_to_list(verdict: Verdict, path: Path) -> list[str]:
    """Adds the nodes that jobs should do without to a list of excluded nodes; returns those that were not in
    it.
    """
    return [
        node.host
        for node in verdict.to_exclude()
        if node.host and exclude(path, node.host, f"preflight: {node.reason}")
    ]


def write_event(config: Config, verdict: Verdict, seconds: float, iteration: int) -> None:
    """Adds the event `preflight` to the run's metrics.jsonl, which is made where the run has none yet."""
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    details = {"grade": verdict.grade, "seconds": round(seconds, 1), "findings": findings_lines(verdict)}
    append_event(
        folder.metrics,
        "preflight",
        iteration,
        **details,
        exclude=[node.host for node in verdict.to_exclude()],
    )
