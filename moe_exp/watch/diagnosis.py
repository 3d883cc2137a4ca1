"""Decides from a failed job's logs whether the job should restart. Does not import torch.

launch/agent.py diagnoses the errors of all ranks after each failure; `moe-exp watch diagnose` reads logs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe_exp.runs.records import Record
from moe_exp.watch.blame import Blame, Origin, Seen, gathered, origin_of_file, recognised_lines
from moe_exp.watch.known_errors import RECOVERIES, Fault

Action = Literal["exclude", "wait", "stop", "restart"]

# Category and action of each cause of known_errors.py. The first category whose cause is found decides:
# evidence against a node or a file system explains errors of the program, and these explain lost connections.
DECISIONS: dict[str, tuple[str, Action]] = {
    "node": ("node", "exclude"),  # any cause, if the message is evidence against the host
    "storage": ("storage", "wait"),
    "quota": ("storage", "wait"),
    "memory": ("memory", "stop"),
    "data": ("data", "stop"),
    "settings": ("settings", "stop"),
    "program": ("code", "stop"),
    "kernel": ("code", "stop"),
    "limit": ("settings", "stop"),
    "hardware": ("transient", "restart"),
    "driver": ("transient", "restart"),
    "network": ("transient", "restart"),
    "service": ("transient", "restart"),
    "crash": ("unknown", "restart"),
    "consequence": ("transient", "restart"),
}
# Memory that lasted for this many iterations is enough: a long sample or fragmentation is the likely cause.
PROVED_ITERATIONS = 1000
# Events that begin or end a start of the ranks.
_MARKS = ("start", "resume", "restart", "rank_failed", "hang", "end")
_ITERATION = re.compile(r"\biteration +(\d+) ?/ *\d")  # in our log lines and in Megatron-LM's
# Stands for the failure if the logs have no known error.
_UNKNOWN = Blame(Fault("no known error", "crash", "read the logs"), Origin(), count=1, last="", line="")
# Number of failures after the same iteration with the same message that are not taken for chance.
REPEATS = 3


@dataclass(frozen=True)
class Situation:
    """What is known about a failed start of a job."""

    iterations: int = 0  # that it trained
    trained_before: bool = False  # whether an earlier start with the same settings trained
    repeats: int = 0  # earlier failures after the same iteration with the same message

    @property
    def is_new(self) -> bool:
        """Whether these settings have never trained an iteration."""
        return not (self.iterations or self.trained_before)


@dataclass(frozen=True)
class Diagnosis:
    """Recommended action after a failure. `line`: the decisive log line. `host`: its host, if known."""

    action: Action
    category: str
    reason: str
    advice: str
    host: str = ""
    line: str = ""

    @property
    def text(self) -> str:
        """The diagnosis as one line of text."""
        where = f" on {self.host}" if self.host else ""
        return f"{self.action}: {self.reason}{where}; {self.advice}"


def diagnose(found: Sequence[Blame], situation: Situation) -> Diagnosis:
    """Decides whether to restart. `found`: the faults in all logs, as returned by `blame.gathered`."""
    found = found or [_UNKNOWN]
    kinds = {one: _kind(one, found, situation) for one in found}
    order = list(DECISIONS)
    first = min(found, key=lambda one: order.index(kinds[one]))
    (category, action), reason = DECISIONS[kinds[first]], first.fault.name
    has_trained = situation.iterations >= PROVED_ITERATIONS or situation.trained_before
    if category == "unknown" and situation.is_new:
        action, reason = "stop", f"{reason}, and these settings have never trained"
    elif category == "memory" and has_trained:
        action, reason = "restart", f"{reason}, although these settings have trained"
    elif kinds[first] in ("kernel", "limit", "quota") and situation.iterations >= PROVED_ITERATIONS:
        category, action = "unknown", "restart"
    elif action == "restart" and category != "transient" and situation.repeats + 1 >= REPEATS:
        action, reason = "stop", f"{reason}, {situation.repeats + 1} times after the same iteration"
    return Diagnosis(action, category, reason, first.fault.advice, first.where.host, first.line)


def _kind(one: Blame, found: Sequence[Blame], situation: Situation) -> str:
    """Returns a key of the table DECISIONS: the fault's cause, or `node` if the fault points to one host."""
    fault, is_new = one.fault, situation.is_new
    hosts = {other.where.host for other in found}
    affected = {other.where.host for other in found if other.fault == fault}
    if is_new and (fault.cause in ("driver", "network") or (fault.excludes and len(affected) > 1)):
        return "settings"  # what no host has ever had is missing in the image or the job's request
    if fault.excludes and fault.cause == "network" and len(affected) > 1:
        return "network"  # a switch
    # what has trained is on all hosts, unless one has lost it
    has_lost = fault.cause == "driver" or (fault.cause == "settings" and affected < hosts)
    return "node" if fault.excludes or (has_lost and not is_new and len(affected) == 1) else fault.cause


def diagnose_logs(
    files: Iterable[Path], *, iterations: int | None = None, trained_before: bool = False, repeats: int = 0
) -> Diagnosis:
    """Diagnoses log files. Other arguments: see Situation. If `iterations` is None, it is read from logs."""
    logs, seen = [], [0]
    for path in files:
        faults: list[Seen] = []
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                back = {name for name, pattern in RECOVERIES.items() if pattern.search(line)}
                faults = [one for one in faults if not (one[0] and one[0].name in back)] if back else faults
                faults += recognised_lines([line])
                seen += [int(number) for number in _ITERATION.findall(line)]
        logs.append((origin_of_file(path), faults))
    trained = max(seen) - min(seen[1:], default=0) if iterations is None else iterations
    return diagnose(gathered(logs), Situation(trained, trained_before, repeats))


def diagnose_failures(records: Sequence[Record], failures: Sequence[Mapping[str, Any]]) -> Diagnosis:
    """Diagnoses `failures` (fields of `rank_failed` events). `records`: the run's earlier records."""
    logs = []
    for one in failures:
        line = f"moe-exp: rank {one['rank']} on {one['host']} ({one['device']}) has failed: {one['cause']}"
        logs.append((Origin(), list(recognised_lines([line]))))
    return diagnose(gathered(logs), situation_of(records, failures))


def situation_of(records: Sequence[Record], failures: Sequence[Mapping[str, Any]] = ()) -> Situation:
    """Situation of the start that ended with `failures`, read from the run's records."""
    marks = [(index, one.get("event")) for index, one in enumerate(records) if one.get("event") in _MARKS]
    start, mark = marks[-1] if marks else (0, "start")
    # without the event of a start, the failed one did not get as far as training
    since = records[start:] if mark in ("start", "resume") else []
    first = since[0].get("iteration", 0) if since else 0
    last = max((one["iteration"] for one in since if one.get("kind") == "train"), default=first)
    changed = max((i for i, one in enumerate(records) if one.get("event") == "changed_settings"), default=0)
    failed = (one for one in records if one.get("event") == "rank_failed")
    before = Counter(one["cause"] for one in failed if one["iteration"] == last)
    return Situation(
        iterations=last - first,
        trained_before=any(one.get("kind") == "train" for one in records[changed:start]),
        repeats=max((before[one["cause"]] for one in failures), default=0),
    )


def situation_of_run(records: Sequence[Record]) -> Situation:
    """Situation at a run's last failure, read from the run's records."""
    failed = [number for number, one in enumerate(records) if one.get("event") == "rank_failed"]
    end = failed[-1] + 1 if failed else len(records)
    begin = next((at for at in reversed(range(end)) if records[at].get("event") != "rank_failed"), -1) + 1
    return situation_of(records[:begin], records[begin:end])
