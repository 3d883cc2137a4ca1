"""Verdicts on slow or broken nodes; every node derives the same verdicts from all measurements.

Needs no torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from moe_exp.host.files import bytes_text
from moe_exp.host.progress import table_console
from moe_exp.launch.preflight.host_facts import gpu_findings
from moe_exp.watch.excluded_nodes import exclude

_COLOURS = {"ok": "green", "warning": "yellow", "slow": "yellow", "failed": "red"}
GRADES = tuple(_COLOURS)  # from best to worst

# A number is compared with the median of the other nodes (a bad node must not affect its own reference). A
# speed is slow below PREFLIGHT_SLOW times that median, if it is also more than _SPREADS times the others'
# spread away (median absolute deviation times 1.4826, which estimates the standard deviation of a normal
# distribution) or below PREFLIGHT_SLOW times the slowest of them. If all numbers scatter, none is slow.
_SPREADS = 5.0
# Latency scatters more than the rates.
_LATENCY_FACTOR = 3.0
_LATENCY_SLACK_US = 200.0
CLOCK_SECONDS = 1.0  # clocks may differ by this
_TEMPORARY_BYTES = 1 << 30
_SHM_BYTES_PER_GPU = 32 << 20  # NCCL needs it for connections inside a node


@dataclass(frozen=True)
class Finding:
    grade: str  # one of GRADES
    text: str  # one line, with rank and device if it concerns one rank
    is_its_fault: bool = True  # jobs should avoid the node; False, for instance, if a shared disk is full


def worst(findings: Iterable[Finding]) -> str:
    """Worst grade of the findings, or `ok` if there are no findings."""
    return max((finding.grade for finding in findings), key=GRADES.index, default="ok")


@dataclass
class NodeVerdict:
    """Findings on one node, and its speeds by name in `SPEEDS`."""

    node: int
    host: str
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float | None] = field(default_factory=dict)

    @property
    def grade(self) -> str:
        return worst(self.findings)

    @property
    def own_grade(self) -> str:
        """Worst grade of the node's own faults; if it is `slow` or `failed`, jobs should avoid the node."""
        return worst(finding for finding in self.findings if finding.is_its_fault)

    @property
    def reason(self) -> str:
        """The node's own faults that have the worst grade, in one line."""
        own, grade = (finding for finding in self.findings if finding.is_its_fault), self.own_grade
        return "; ".join(finding.text for finding in own if finding.grade == grade)


@dataclass
class Verdict:
    """Verdicts on all nodes, and findings on links for which no single node can be blamed."""

    nodes: list[NodeVerdict]
    links: list[Finding] = field(default_factory=list)
    all_ranks: dict[str, float] = field(default_factory=dict)

    @classmethod
    def on(cls, reports: Mapping[int, Mapping[str, Any]]) -> Verdict:
        """Creates a verdict without findings; takes the nodes and their host names from `reports`."""
        return cls([NodeVerdict(node, str(report["host"])) for node, report in sorted(reports.items())])

    @property
    def grade(self) -> str:
        return worst([*(one for node in self.nodes for one in node.findings), *self.links])

    def to_exclude(self) -> list[NodeVerdict]:
        """Nodes that jobs should avoid."""
        # a slow rank of a single node proves little
        if len(self.nodes) == 1:
            return [node for node in self.nodes if node.own_grade == "failed"]
        # a problem that most nodes have in common is not the fault of a node
        found = [node for node in self.nodes if node.own_grade in ("slow", "failed")]
        return found if 2 * len(found) <= len(self.nodes) else []

    def as_json(self) -> dict[str, Any]:
        """The verdict and its grades in JSON types, for --json."""
        nodes = [asdict(node) | {"grade": node.grade} for node in self.nodes]
        excluded = [node.host for node in self.to_exclude()]
        return {"grade": self.grade} | asdict(self) | {"nodes": nodes, "exclude": excluded}


def judge(reports: Mapping[int, Mapping[str, Any]], *, slow: float, needed_bytes: int) -> Verdict:
    """Judges the nodes' reports (see `node.preflight`). `slow` is PREFLIGHT_SLOW. A checkpoint needs
    `needed_bytes` of space in RUN_DIR.
    """
    verdict = Verdict.on(reports)
    all_ranks = [rank for report in reports.values() for rank in report["ranks"]]
    has_gpus = any(rank["device"].startswith("cuda") for rank in all_ranks)
    for named in verdict.nodes:
        report = reports[named.node]
        named.findings += [*_host(report, needed_bytes, has_gpus), *_ranks(report)]
    for name in sorted({name for report in reports.values() for name in report["versions"]}):
        versions = {node: report["versions"].get(name, "missing") for node, report in reports.items()}
        usual = Counter(versions.values()).most_common(1)[0][0]
        for named in verdict.nodes:
            if (found := versions[named.node]) != usual:
                named.findings.append(Finding("warning", f"{name} {found}, most nodes have {usual}", False))
    # A collective of all nodes is as slow as the slowest one but does not show which: hence pairs of nodes.
    _links(verdict, reports)
    _speeds(verdict, reports, slow)
    together = [rank["all_ranks"] for rank in all_ranks if "all_ranks" in rank]
    verdict.all_ranks = dict(next((found for found in together if "latency_us" in found), {}))
    problems = [text for found in together if (text := found.get("wrong") or found.get("error"))]
    if problems:  # only the first: when one rank fails, the others time out
        verdict.links.append(Finding("failed", f"all ranks together: {problems[0]}", False))
    return verdict


def _host(report: Mapping[str, Any], needed_bytes: int, has_gpus: bool) -> Iterator[Finding]:
    disks, ranks = report["disks"], len(report["ranks"])
    rules = {
        "RUN_DIR": needed_bytes,
        "temporary folder": _TEMPORARY_BYTES,
        "/dev/shm": _SHM_BYTES_PER_GPU * ranks if has_gpus else 0,
    }
    for name, needed in rules.items():
        place, free_bytes = disks[name], disks[name]["free_bytes"]
        where = name if name == "/dev/shm" else f"{name} {place['path']}"
        if place["problem"]:
            grade = "failed" if free_bytes is not None else "warning"
            yield Finding(grade, f"{where}: {place['problem']}", name != "RUN_DIR")
        elif free_bytes < needed:
            grade = "failed" if name != "temporary folder" else "warning"
            text = f"{where}: {bytes_text(free_bytes)} free, but {bytes_text(needed)} needed"
            yield Finding(grade, text, name == "/dev/shm")
    offset, error = report["clock"]
    if abs(offset) - error > CLOCK_SECONDS:
        lag = "behind" if offset > 0 else "ahead of"
        yield Finding("warning", f"clock is {abs(offset):.1f} s {lag} node 0's", False)
    for grade, text in gpu_findings(report["gpus"]):
        yield Finding(grade, text)
    if 0 < len(report["gpus"]) < ranks:
        yield Finding("failed", f"nvidia-smi lists {len(report['gpus'])} GPUs, but GPUS_PER_NODE={ranks}")
    if has_gpus and any(rank["device"] == "cpu" for rank in report["ranks"]):
        yield Finding("failed", "has no usable GPU, unlike other nodes")
    if report["gpu_problem"]:
        yield Finding("failed" if has_gpus else "warning", report["gpu_problem"])
    for fault in report["kernel_faults"]:
        yield Finding("warning", f"kernel: {fault}")


def _ranks(report: Mapping[str, Any]) -> Iterator[Finding]:
    texts = (
        ("matmul", "wrong", "{} wrong elements in matrix products"),
        ("memory", "wrong", "{} words of memory differ from what was written"),
        ("host_memory", "wrong", "{} words of host memory differ from what was written"),
        ("node", "wrong", "inside the node: {}"),
        ("node", "error", "ranks of the node cannot reach each other: {}"),
    )
    for rank in report["ranks"]:
        where = f"rank {rank['rank']} ({rank['device']})"
        for step, kind, text in texts:
            if value := rank.get(step, {}).get(kind):
                yield Finding("failed", f"{where}: {text.format(value)}")
        if rank.get("error"):
            is_its_fault = rank["step"] in ("start", "matmul", "memory")
            yield Finding("failed", f"{where}: step {rank['step']}: {rank['error']}", is_its_fault)


def _links(verdict: Verdict, reports: Mapping[int, Mapping[str, Any]]) -> None:
    """Blames nodes for failed exchanges between nodes; with only one node, reports failed pairs of ranks."""
    failed: dict[tuple[int, int], str] = {}
    for node, report in reports.items():
        for rank in report["ranks"]:
            unit = node if len(reports) > 1 else rank["rank"]
            for pair in rank["pairs"]:
                between = (min(unit, pair["partner"]), max(unit, pair["partner"]))
                if "wrong" in pair:
                    failed[between] = pair["wrong"]
                elif "error" in pair:  # a consequence, if the other end reports wrong data
                    failed.setdefault(between, pair["error"])
    if len(reports) == 1:
        for (a, b), reason in sorted(failed.items()):
            verdict.nodes[0].findings.append(Finding("failed", f"ranks {a} and {b}: {reason}"))
    else:
        blame_pairs(verdict, failed, "cannot exchange correct data")


def blame_pairs(verdict: Verdict, failed: Mapping[tuple[int, int], str], what: str) -> None:
    """Blames nodes that are in several failed pairs; for each other failed pair, blames its link."""
    hosts = {named.node: named.host for named in verdict.nodes}
    # a broken node fails with every partner; in the remaining pairs, either end may be at fault
    blamed, left = culprits(failed)
    for named in verdict.nodes:
        if named.node in blamed:
            mine = {pair: reason for pair, reason in failed.items() if named.node in pair}
            partners = sorted(sum(pair) - named.node for pair in mine)
            with_whom = ", ".join(hosts.get(partner, f"node {partner}") for partner in partners)
            text = f"{what} with {with_whom} ({next(iter(mine.values()))})"
            named.findings.append(Finding("failed", text))
    for a, b in left:
        text = f"{hosts.get(a, a)} {what} with {hosts.get(b, b)} ({failed[a, b]})"
        verdict.links.append(Finding("failed", text, False))


@dataclass(frozen=True)
class _Speed:
    name: str
    unit: str
    of: Callable[[Mapping[str, Any]], float | None]
    is_time: bool = False


# The best over a node's partners, since a slow partner is not its fault.
def _best(key: str, best: Callable[..., float]) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda rank: best((pair[key] for pair in rank["pairs"] if key in pair), default=None)


SPEEDS = (
    _Speed("matmul", "TFLOP/s", lambda rank: rank.get("matmul", {}).get("teraflops")),
    _Speed("memory", "GB/s", lambda rank: rank.get("memory", {}).get("gigabytes_per_second") or None),
    _Speed("all-reduce inside the node", "GB/s", lambda rank: rank.get("node", {}).get("all_reduce")),
    _Speed("all-to-all inside the node", "GB/s", lambda rank: rank.get("node", {}).get("all_to_all")),
    _Speed("point-to-point", "GB/s", _best("point_to_point", max)),
    _Speed("all-reduce", "GB/s", _best("all_reduce", max)),
    _Speed("all-to-all", "GB/s", _best("all_to_all", max)),
    _Speed("latency", "us", _best("latency_us", min), is_time=True),
)


def _speeds(verdict: Verdict, reports: Mapping[int, Mapping[str, Any]], slow: float) -> None:
    """Compares each rank with other nodes' ranks. In a single-node job, compares ranks with each other."""
    for speed in SPEEDS:
        values = {
            (node, rank["rank"], rank["device"]): value
            for node, report in reports.items()
            for rank in report["ranks"]
            if (value := speed.of(rank)) is not None
        }
        for named in verdict.nodes:
            mine = {place: value for place, value in values.items() if place[0] == named.node}
            named.numbers[speed.name] = (max if speed.is_time else min)(mine.values(), default=None)
            for place, value in sorted(mine.items()):
                skipped = slice(0, 1) if len(reports) > 1 else slice(None)  # its own node, or only itself
                others = [found for other, found in values.items() if other[skipped] != place[skipped]]
                if text := _slowness(speed, value, others, slow):
                    is_note = len(reports) == 1 and place[2] == "cpu"  # CPU ranks compete for the same cores
                    grade = "warning" if is_note else "slow"
                    named.findings.append(Finding(grade, f"rank {place[1]} ({place[2]}): {text}"))
    # merge findings of the same rank and grade into one line
    for named in verdict.nodes:
        kept: dict[tuple[str, str], Finding] = {}
        for finding in named.findings:
            where, separator, text = finding.text.partition("): ")
            key = (finding.grade, where if separator and where.startswith("rank ") else finding.text)
            if before := kept.get(key):
                is_its_fault = before.is_its_fault or finding.is_its_fault
                finding = Finding(finding.grade, f"{before.text}, {text}", is_its_fault)
            kept[key] = finding
        named.findings = list(kept.values())


def _slowness(speed: _Speed, value: float, others: Sequence[float], slow: float) -> str:
    if not others:
        return ""
    usual = statistics.median(others)
    spread = 1.4826 * statistics.median(abs(other - usual) for other in others)
    if speed.is_time:
        slack = max(_LATENCY_SLACK_US, _SPREADS * spread)
        is_slow = value > usual * _LATENCY_FACTOR / slow and value - usual > slack
        return f"{speed.name} {value:.0f} {speed.unit}, median of the others {usual:.0f}" if is_slow else ""
    is_slow = value < slow * usual and (usual - value > _SPREADS * spread or value < slow * min(others))
    if not is_slow:
        return ""
    return f"{speed.name} {value:.3g} {speed.unit}, {value / usual:.0%} of the others' {usual:.3g}"


Pair = tuple[int, int]


def rounds_of_pairs(count: int) -> list[dict[int, int]]:
    """Forms pairs of the numbers below `count`, in at most 6 rounds. Each round maps numbers to their
    partners. If count > 2, each number has at least 2 partners over all rounds.
    """
    strides = [] if count < 2 else [1] if count < 4 else [1, max(2, count // 2)]
    edges = {tuple(sorted((i, (i + stride) % count))) for stride in strides for i in range(count)}
    rounds: list[dict[int, int]] = []
    for a, b in sorted(edges, key=lambda edge: ((edge[1] - edge[0]) % count not in (1, count - 1), edge)):
        free = next((found for found in rounds if a not in found and b not in found), None)
        if free is None:
            rounds.append(free := {})
        free |= {a: b, b: a}
    return rounds


def culprits(pairs: Iterable[Pair]) -> tuple[list[int], list[Pair]]:
    """Blames the node that is in the most pairs, removes its pairs, and repeats this until each node is in at
    most one pair. Returns the blamed nodes and the remaining pairs.
    """
    left = {(min(pair), max(pair)) for pair in pairs}
    blamed = []
    while left:
        counts = Counter(node for pair in left for node in pair)
        node, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
        if times == 1:  # a single failed connection does not show which end is at fault
            break
        blamed.append(node)
        left = {pair for pair in left if node not in pair}
    return sorted(blamed), sorted(left)


def print_report(verdict: Verdict, *, num_ranks: int) -> None:
    console = table_console()
    # columns only for numbers that were measured on some node
    shown = [one for one in SPEEDS if any(node.numbers.get(one.name) is not None for node in verdict.nodes)]
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
        what = "ranks are only compared with each other, so a uniformly slow node goes undetected"
        console.print(f"One node: {what}.", soft_wrap=True)
    if found := verdict.all_ranks:
        rates = f"all-reduce {found['all_reduce']:.3g} GB/s, all-to-all {found['all_to_all']:.3g} GB/s"
        text = f"All {num_ranks} ranks together: {rates}, latency {found['latency_us']:.3g} us"
        console.print(text, soft_wrap=True)
    for line in findings_lines(verdict):
        console.print(escape(line), soft_wrap=True, highlight=False)


def findings_lines(verdict: Verdict) -> list[str]:
    """One line per finding, worst first: grade, host, text."""
    found = [
        (finding.grade, f"{node.host or 'unknown host'} (node {node.node})", finding.text)
        for node in verdict.nodes
        for finding in node.findings
    ]
    found += [(link.grade, "link", link.text) for link in verdict.links]
    found.sort(key=lambda line: -GRADES.index(line[0]))
    return [f"{grade}: {where}: {text}" for grade, where, text in found]


def add_to_list(verdict: Verdict, path: Path) -> list[str]:
    """Adds bad nodes to a list of excluded nodes; returns the hosts that were not in the list."""
    bad = [(node.host, f"preflight: {node.reason}") for node in verdict.to_exclude() if node.host]
    return [host for host, reason in bad if exclude(path, host, reason)]
