"""What the watchdog remembers from look to look: problems that were told, so that none is told all the time.
No torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_exp.host.files import write_json

logger = logging.getLogger(__name__)

EVENT = "event "  # before the name of an event: the key of a problem that has happened, and cannot be over


@dataclass
class Told:
    """One problem.

    Attributes:
        since: when it was first seen in a row, seconds since 1970; 0 where it is not there now.
        told: when it was last told; 0 for never.
        is_open: it was told and has not been said to be over.
        text: as it was told.
    """

    since: float = 0.0
    told: float = 0.0
    is_open: bool = False
    text: str = ""


@dataclass
class Memory:
    """Of one run.

    Attributes:
        problems: by their keys.
        num_events: of metrics.jsonl that were looked at.
        untold_events: number of events of a name that wait to be told.
        disk: free bytes at earlier looks, as pairs of time and bytes.
        iteration, moved: the last iteration that was seen, and when it was seen first.
        busy: when a job was last seen to run, or the run was first looked at.
        slurm_silent: since when squeue has not answered; 0 where it has.
        failed_channels: why the last message did not get through, by channel.
    """

    problems: dict[str, Told] = field(default_factory=dict)
    num_events: int | None = None
    untold_events: dict[str, int] = field(default_factory=dict)
    disk: list[tuple[float, int]] = field(default_factory=list)
    iteration: int = -1
    moved: float = 0.0
    busy: float = 0.0
    slurm_silent: float = 0.0
    failed_channels: dict[str, str] = field(default_factory=dict)

    def to_tell(
        self, found: Mapping[str, str], now: float, again_seconds: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Which problems are to be told now, and which of those that were told are over; texts by key.

        A problem is told when it appears, and again where it is still there, or back, after `again_seconds`.
        Nothing is written down: `confirm` does, once somebody was told.
        """
        news = {}
        for key, text in found.items():
            known = self.problems.setdefault(key, Told())
            known.since = known.since or now
            if not known.told or now - known.told >= again_seconds:
                news[key] = text
        over = {key: known.text for key, known in self.problems.items() if key not in found and known.is_open}
        for key, known in self.problems.items():
            if key not in found:
                known.since = 0.0
        return news, over

    def confirm(self, news: Mapping[str, str], over: Mapping[str, str], now: float) -> None:
        """Somebody was told."""
        for key, text in news.items():
            known = self.problems[key]
            known.told, known.is_open, known.text = now, not key.startswith(EVENT), text
            self.untold_events.pop(key.removeprefix(EVENT), None)
        for key in over:
            self.problems[key].is_open = False

    def forget_old(self, now: float, again_seconds: float) -> None:
        """Problems that are over, and that may be told again."""
        self.problems = {
            key: known
            for key, known in self.problems.items()
            if known.since or known.is_open or now - known.told < again_seconds
        }


def memory_file(folder: Path, run: Path) -> Path:
    """Where the memory of a run is kept: by its name, and by its whole path, as two runs may have the same
    name.
    """
    path = os.path.abspath(run)  # noqa: PTH100  # without a look at the disk, which may hang
    return folder / f"{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:10]}.json"


def default_folder() -> Path:
    """In the home folder and not in the run's, whose disk may be the one that is full."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moe-exp" / "watch"


def read_memory(path: Path) -> Memory:
    """What a look before this one has left; nothing where there was none, or where the file is damaged."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        memory = Memory(**values)
        memory.problems = {key: Told(**told) for key, told in values["problems"].items()}
        memory.disk = [(float(at), int(amount)) for at, amount in values["disk"]]
        return memory
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): the watchdog begins anew, and may repeat itself", path, error)
        return Memory()


def write_memory(path: Path, memory: Memory) -> None:
    """OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(memory))
