"""Memory of the watchdog between checks, so that it does not repeat its reports. No torch."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_exp.host.files import read_json, write_json

logger = logging.getLogger(__name__)

_BACK_SECONDS = 1800.0
_RENAMED = {"told": "reported"}
EVENT = "event "  # before an event's name: key of a problem that has happened, and cannot end


@dataclass
class Reported:
    """One problem. Times are seconds since 1970."""

    since: float = 0.0  # when the current streak was first seen; 0 if it is absent now
    reported: float = 0.0  # the last report; 0 for never
    is_open: bool = False  # it was reported, and its end was not
    text: str = ""


@dataclass
class Memory:
    """Memory of one run."""

    problems: dict[str, Reported] = field(default_factory=dict)  # by key
    num_events: int | None = None  # of metrics.jsonl that were checked
    untold_events: dict[str, int] = field(default_factory=dict)  # number of unreported events by name
    disk: list[tuple[float, int]] = field(default_factory=list)  # time and free bytes at earlier checks
    iteration: int = -1
    moved: float = 0.0  # when that iteration was first seen
    busy: float = 0.0  # when a job was last seen running, or the run was first checked
    slurm_silent: float = 0.0  # since when squeue has not answered; 0 if it has
    failed_channels: dict[str, str] = field(default_factory=dict)  # why the last message failed

    def to_report(
        self, found: Mapping[str, str], now: float, again_seconds: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Problems to report now, and reported problems that are over; texts by key.

        A problem is reported when it appears, and again after `again_seconds` if it is still there. One that
        was over and is back, or an event that has happened again, waits for `_BACK_SECONDS` at most.
        `confirm` records that they were sent.
        """
        news = {}
        for key, text in found.items():
            known = self.problems.setdefault(key, Reported())
            known.since = known.since or now
            limit = again_seconds if known.is_open else min(again_seconds, _BACK_SECONDS)
            if not known.reported or now - known.reported >= limit:
                news[key] = text
        absent = {key: known for key, known in self.problems.items() if key not in found}
        for known in absent.values():
            known.since = 0.0
        return news, {key: known.text for key, known in absent.items() if known.is_open}

    def confirm(self, news: Mapping[str, str], over: Mapping[str, str], now: float) -> None:
        """Records that a message was sent."""
        for key, text in news.items():
            known = self.problems[key]
            known.reported, known.is_open, known.text = now, not key.startswith(EVENT), text
            self.untold_events.pop(key.removeprefix(EVENT), None)
        for key in over:
            self.problems[key].is_open = False

    def forget_old(self, now: float, again_seconds: float) -> None:
        """Drops problems that are over and may be reported again."""
        for key, known in list(self.problems.items()):
            if not (known.since or known.is_open or now - known.reported < again_seconds):
                del self.problems[key]


def memory_file(folder: Path, run: Path) -> Path:
    """File with the memory of a run: its name and a hash of its path, as two runs may share a name."""
    path = os.path.abspath(run)  # noqa: PTH100  # does not touch the disk, which may hang
    return folder / f"{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:10]}.json"


def default_folder() -> Path:
    """In the home folder rather than the run's, whose disk may be the full one."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moe-exp" / "watch"


def read_memory(path: Path) -> Memory:
    """The memory of earlier checks; empty if the file is missing or damaged."""
    try:
        values: dict[str, Any] = read_json(path)
        memory = Memory(**values)
        for key, known in values["problems"].items():
            # state files of 0.1.0 have the time under another name
            memory.problems[key] = Reported(**{_RENAMED.get(name, name): one for name, one in known.items()})
        memory.disk = [(float(at), int(amount)) for at, amount in values["disk"]]
        return memory
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): starting over, and may repeat reports", path, error)
        return Memory()


def write_memory(path: Path, memory: Memory) -> None:
    """Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(memory))
