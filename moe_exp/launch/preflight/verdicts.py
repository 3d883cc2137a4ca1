"""From what the nodes have measured to which of them are slow or broken, and why. No torch, and the same
result on every node.

A number is compared with the median of the other nodes' (leave one out: one bad node does not move its own
yardstick). A speed counts as slow below PREFLIGHT_SLOW times that median, if it is also further away than
five times the spread of the others (their median absolute deviation times 1.4826, the standard deviation of a
normal distribution) or below PREFLIGHT_SLOW times the slowest of them: where all scatter, nobody is named.
Latency, which scatters more, counts from three times as much. Rates between nodes are the best over a node's
partners, since a slow partner is not its fault.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_exp.host.files import bytes_text
from moe_exp.launch.preflight.gpu_health import gpu_findings, missing_gpus
from moe_exp.launch.preflight.pairing import culprits

GRADES = ("ok", "warning", "slow", "failed")

_SPREADS = 5.0
_LATENCY_FACTOR = 3.0
_LATENCY_SLACK_US = 200.0
CLOCK_SECONDS = 1.0  # from which on clocks count as apart
_TEMPORARY_BYTES = 1 << 30
_SHM_BYTES_PER_GPU = 32 << 20  # that NCCL wants for connections inside a node


@dataclass(frozen=True)
class Finding:
    """Something about a node.

    Args:
        grade: of GRADES.
        text: in a line, with rank and device where it is one rank's.
        is_its_fault: the node is at fault, and jobs should do without it; not so for a full disk that all
            share.
    """

    grade: str
    text: str
    is_its_fault: bool = True


@dataclass
class NodeVerdict:
    """What is said of one node."""

    node: int
    host: str
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float | None] = field(default_factory=dict)

    @property
    def grade(self) -> str:
        """The worst of its findings."""
        return max((finding.grade for finding in self.findings), key=GRADES.index, default="ok")

    def is_excluded(self) -> bool:
        """Whether jobs should do without it."""
        return any(finding.is_its_fault and finding.grade in ("slow", "failed") for finding in self.findings)

    @property
    def reason(self) -> str:
        """Why jobs should do without it: the worst of its own faults, in a line."""
        own = [finding for finding in self.findings if finding.is_its_fault]
        worst = max((finding.grade for finding in own), key=GRADES.index, default="ok")
        return "; ".join(finding.text for finding in own if finding.grade == worst)


@dataclass
class Verdict:
    """What is said of all nodes, and of connections that no node alone can be blamed for."""

    nodes: list[NodeVerdict]
    links: list[Finding] = field(default_factory=list)
    all_ranks: dict[str, float] = field(default_factory=dict)

    @property
    def grade(self) -> str:
        """The worst of all."""
        return max(
            [*(node.grade for node in self.nodes), *(link.grade for link in self.links)],
            key=GRADES.index,
            default="ok",
        )

    def to_exclude(self) -> list[NodeVerdict]:
        """Nodes that jobs should do without.

        None where that were more than half of several: what all have is no node's fault. A node alone has to
        fail: that one of its ranks is slower than the others says little.
        """
        found = [node for node in self.nodes if node.is_excluded()]
        if len(self.nodes) == 1:
            return [
                node
                for node in found
                if any(own.grade == "failed" and own.is_its_fault for own in node.findings)
            ]
        return found if 2 * len(found) <= len(self.nodes) else []

    def as_json(self) -> dict[str, Any]:
        """With grades, for --json and the event."""
        nodes = [asdict(node) | {"grade": node.grade} for node in self.nodes]
        links = [asdict(link) for link in self.links]
        excluded = [node.host for node in self.to_exclude()]
        return {
            "grade": self.grade,
            "nodes": nodes,
            "links": links,
            "all_ranks": self.all_ranks,
            "exclude": excluded,
        }


def judge(reports: Mapping[int, Mapping[str, Any]], *, slow: float, needed_bytes: int) -> Verdict:
    """What the reports of the nodes say.

    Args:
        reports: by node, as `node.report` makes them; each with `host` and `ranks`.
        slow: PREFLIGHT_SLOW.
        needed_bytes: that a checkpoint takes in RUN_DIR.
    """
    verdict = Verdict([NodeVerdict(node, str(report["host"])) for node, report in sorted(reports.items())])
    has_gpus = any(
        rank["device"].startswith("cuda") for report in reports.values() for rank in report["ranks"]
    )
    for named in verdict.nodes:
        report = reports[named.node]
        named.findings += [*_host(report, needed_bytes, has_gpus), *_ranks(report)]
    _versions(verdict, reports)
    _links(verdict, reports)
    _speeds(verdict, reports, slow)
    together = [
        rank["all_ranks"]
        for report in reports.values()
        for rank in report["ranks"]
        if "latency_us" in rank.get("all_ranks", {})
    ]
    verdict.all_ranks = dict(together[0]) if together else {}
    return verdict


def _host(report: Mapping[str, Any], needed_bytes: int, has_gpus: bool) -> Iterator[Finding]:
    disks, ranks = report["disks"], len(report["ranks"])
    rules = {
        "RUN_DIR": needed_bytes,
        "temporary folder": _TEMPORARY_BYTES,
        "/dev/shm": _SHM_BYTES_PER_GPU * ranks if has_gpus else 0,
    }
    for name, needed in rules.items():
        place = disks[name]
        grade = "failed" if name != "temporary folder" else "warning"
        where = name if name == "/dev/shm" else f"{name} {place['path']}"
        if place["problem"]:
            yield Finding(
                "failed" if place["free_bytes"] is not None else "warning",
                f"{where}: {place['problem']}",
                name != "RUN_DIR",
            )
        elif place["free_bytes"] < needed:
            text = f"{where}: {bytes_text(place['free_bytes'])} free, {bytes_text(needed)} are needed"
            yield Finding(grade, text, name == "/dev/shm")
    offset, error = report["clock"]
    if abs(offset) - error > CLOCK_SECONDS:
        yield Finding(
            "warning",
            f"clock is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} node 0's",
            False,
        )
    for grade, text in [*gpu_findings(report["gpus"]), *missing_gpus(report["gpus"], ranks)]:
        yield Finding(grade, text)
    if has_gpus and any(rank["device"] == "cpu" for rank in report["ranks"]):
        yield Finding("failed", "has no GPU that can be used, other nodes have")
    if report["gpu_problem"]:
        yield Finding("failed" if has_gpus else "warning", report["gpu_problem"])
    for fault in report["kernel_faults"]:
        yield Finding("warning", f"kernel: {fault}")


def _ranks(report: Mapping[str, Any]) -> Iterator[Finding]:
    for rank in report["ranks"]:
        where = f"rank {rank['rank']} ({rank['device']})"
        if wrong := rank.get("matmul", {}).get("wrong"):
            yield Finding("failed", f"{where}: {wrong} elements of matrix products are wrong")
        for name, what in (("memory", "memory"), ("host_memory", "the host's memory")):
            if wrong := rank.get(name, {}).get("wrong"):
                yield Finding("failed", f"{where}: {wrong} words of {what} are not what was written")
        if rank.get("error"):
            yield Finding(
                "failed",
                f"{where}: step {rank['step']}: {rank['error']}",
                rank["step"] in ("start", "matmul", "memory"),
            )
        if wrong := rank.get("node", {}).get("wrong"):
            yield Finding("failed", f"{where}: inside the node: {wrong}")
        if error := rank.get("node", {}).get("error"):
            yield Finding("failed", f"{where}: ranks of the node do not reach each other: {error}")


def _versions(verdict: Verdict, reports: Mapping[int, Mapping[str, Any]]) -> None:
    names = {name for report in reports.values() for name in report["versions"]}
    for name in sorted(names):
        counts = Counter(report["versions"].get(name, "missing") for report in reports.values())
        usual = counts.most_common(1)[0][0]
        for named in verdict.nodes:
            found = reports[named.node]["versions"].get(name, "missing")
            if found != usual:
                named.findings.append(Finding("warning", f"{name} {found}, most nodes have {usual}", False))


def _links(verdict: Verdict, reports: Mapping[int, Mapping[str, Any]]) -> None:
    """Pairs that failed, and who is in all of them. With one node the units of the pairs are its ranks, and
    it is the node's fault.
    """
    failed: dict[tuple[int, int], str] = {}
    for node, report in reports.items():
        for rank in report["ranks"]:
            unit = node if len(reports) > 1 else rank["rank"]
            for pair in rank["pairs"]:
                between = (min(unit, pair["partner"]), max(unit, pair["partner"]))
                if "wrong" in pair:
                    failed[between] = pair["wrong"]
                elif "error" in pair:  # of the other end it may be no more than that this one has left
                    failed.setdefault(between, pair["error"])
    if len(reports) == 1:
        verdict.nodes[0].findings += [
            Finding("failed", f"ranks {a} and {b}: {reason}") for (a, b), reason in sorted(failed.items())
        ]
    else:
        blame_pairs(verdict, failed, "does not exchange sound data")


def blame_pairs(verdict: Verdict, failed: Mapping[tuple[int, int], str], what: str) -> None:
    """Adds the findings on pairs of nodes that failed: on the nodes that are in all of them, else on the
    link.
    """
    hosts = {named.node: named.host for named in verdict.nodes}
    blamed, left = culprits(failed)
    for named in verdict.nodes:
        if named.node in blamed:
            partners = {
                sum(pair) - named.node: reason for pair, reason in failed.items() if named.node in pair
            }
            with_whom = ", ".join(hosts.get(partner, f"node {partner}") for partner in sorted(partners))
            named.findings.append(
                Finding("failed", f"{what} with {with_whom} ({next(iter(partners.values()))})")
            )
    for a, b in left:
        verdict.links.append(
            Finding("failed", f"{hosts.get(a, a)} {what} with {hosts.get(b, b)} ({failed[a, b]})", False)
        )


@dataclass(frozen=True)
class _Speed:
    """A number of each rank."""

    name: str
    unit: str
    of: Callable[[Mapping[str, Any]], float | None]
    is_time: bool = False


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
    """Each node's slowest rank against the ranks of the other nodes; with one node against its other
    ranks.
    """
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
                others = [
                    found
                    for other, found in values.items()
                    if (other[0] != place[0] if len(reports) > 1 else other != place)
                ]
                if text := _slowness(speed, value, others, slow):
                    is_note = len(reports) == 1 and place[2] == "cpu"  # ranks that share the cores of a node
                    named.findings.append(
                        Finding("warning" if is_note else "slow", f"rank {place[1]} ({place[2]}): {text}")
                    )
    for named in verdict.nodes:
        named.findings = _gathered(named.findings)


def _slowness(speed: _Speed, value: float, others: Sequence[float], slow: float) -> str:
    if not others:
        return ""
    usual = statistics.median(others)
    spread = 1.4826 * statistics.median(abs(other - usual) for other in others)
    if speed.is_time:
        is_slow = value > usual * _LATENCY_FACTOR / slow and value - usual > max(
            _LATENCY_SLACK_US, _SPREADS * spread
        )
        return f"{speed.name} {value:.0f} {speed.unit}, the others have {usual:.0f}" if is_slow else ""
    is_slow = value < slow * usual and (usual - value > _SPREADS * spread or value < slow * min(others))
    return (
        f"{speed.name} {value:.3g} {speed.unit}, {value / usual:.0%} of the others' {usual:.3g}"
        if is_slow
        else ""
    )


def _gathered(findings: Sequence[Finding]) -> list[Finding]:
    """Those of the same rank and grade as one, so that a line of the table is a rank."""
    kept: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        where, separator, text = finding.text.partition("): ")
        key = (finding.grade, where if separator and where.startswith("rank ") else finding.text)
        if key in kept:
            kept[key] = Finding(
                finding.grade, f"{kept[key].text}, {text}", kept[key].is_its_fault or finding.is_its_fault
            )
        else:
            kept[key] = finding
    return list(kept.values())
