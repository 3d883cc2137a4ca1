"""Monitors unattended runs, from cron or as a daemon. No torch.

A check reads the run folders, asks SLURM, and sends at most one message with new problems, those last
reported long ago, and those that are over. A small file per run (memory.py) records what was reported, so
that checks from cron know of each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from moe_exp.host.slurm_queue import NoSqueue, Queue, QueueError, read_queue
from moe_exp.watch.watchdog.alerts import Channel, send_to_all
from moe_exp.watch.watchdog.disk import disk_of, free_bytes, with_sample
from moe_exp.watch.watchdog.memory import (
    EVENT,
    Memory,
    default_folder,
    memory_file,
    read_memory,
    write_memory,
)
from moe_exp.watch.watchdog.rules import Limits, Sight, all_texts, count_events, problems_of, state_line
from moe_exp.watch.watchdog.run import view_run, within

_LOCK_SECONDS = 60.0
_READ_SECONDS = 60.0  # timeout of a file system


@dataclass(frozen=True)
class Watched:
    """A run, and the name of its jobs; empty: SLURM is not asked."""

    path: Path
    slurm_name: str = ""


@dataclass
class Watchdog:
    """Checks runs and sends alerts.

    Attributes:
        again_seconds: before an ongoing problem is reported again.
        user: owner of the jobs; empty: the current user.
        folder: for memory files.
    """

    runs: Sequence[Watched]
    channels: Sequence[Channel]
    limits: Limits = field(default_factory=Limits)
    again_seconds: float = 6 * 3600.0
    user: str = ""
    folder: Path = field(default_factory=default_folder)
    _kept: dict[Path, Memory] = field(default_factory=dict)  # for a daemon with a full disk

    def look(self, *, now: float | None = None) -> list[RunLook]:
        """Checks all runs, and sends a message if needed; raises ValueError if another check hangs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS):
                return self._look(time.time() if now is None else now)
        except Timeout:
            rule = f"another look has not ended in {_LOCK_SECONDS:.0f} s"
            raise ValueError(f"{self.folder}: {rule}. Fix: call it less often.") from None

    def _look(self, now: float) -> list[RunLook]:
        looks = []
        for index, run in enumerate(self.runs):
            look = self._look_at(run, now)
            if index == 0:  # channel problems are reported with the first run
                for channel, reason in look.memory.failed_channels.items():
                    text = f"the last message did not get through by {channel}: {reason}"
                    look.found[f"channel {channel}"] = text
            look.news, look.over = look.memory.to_tell(look.found, now, self.again_seconds)
            looks.append(look)
        self._tell(looks, now)
        for look in looks:
            look.memory.forget_old(now, self.again_seconds)
            self._remember(look)
        return looks

    def _look_at(self, run: Watched, now: float) -> RunLook:
        path = memory_file(self.folder, run.path)
        memory = self._kept.get(path) or read_memory(path)
        look = RunLook(run, path, memory)
        try:
            view = within(_READ_SECONDS, lambda: view_run(run.path, now=now))
            memory.disk = with_sample(memory.disk, now, within(_READ_SECONDS, lambda: free_bytes(run.path)))
            queue, silent, missing = self._queue(run) if view.status != "finished" else (None, "", "")
            sight = Sight(view, disk_of(view, memory.disk), queue, silent)
            look.found = problems_of(sight, memory, self.limits, run.slurm_name)
            look.found |= {"no_squeue": missing} if missing else {}
            told_before = dict(memory.untold_events)
            look.found |= count_events(view, memory)
            look.has_new_events = memory.untold_events != told_before
            look.state = state_line(sight)
        # missing file system, unexpected records: silence would look healthy
        except Exception as error:
            is_plain = isinstance(error, OSError | ValueError)
            what = str(error) if is_plain else f"{type(error).__name__}: {error}"
            # these are unlikely to be over
            look.found = {key: known.text for key, known in memory.problems.items() if known.is_open}
            look.found["unreadable"] = f"cannot be read: {what}"
            look.state = "unknown"
        return look

    def _queue(self, run: Watched) -> tuple[Queue | None, str, str]:
        """A run's jobs, why SLURM does not answer, why it cannot be asked (then it is ignored)."""
        if not run.slurm_name:
            return None, "", ""
        try:
            return read_queue(run.slurm_name, self.user), "", ""
        except NoSqueue as error:
            return None, "", str(error)
        except QueueError as error:
            return None, str(error), ""

    def _tell(self, looks: Sequence[RunLook], now: float) -> None:
        """Sends one message for all runs, if needed; the next check reports failed channels to the others."""
        told = [look for look in looks if look.news or look.over]
        if not told or not self.channels:
            return
        failed = send_to_all(self.channels, _subject(told), "\n\n".join(look.text() for look in told))
        for channel, reason in failed.items():
            _warn(f"the message did not get through by {channel}: {reason}")
        looks[0].memory.failed_channels = failed
        if any(channel.name not in failed for channel in self.channels):
            for look in told:
                look.memory.confirm(look.news, look.over, now)

    def _remember(self, look: RunLook) -> None:
        self._kept[look.memory_path] = look.memory
        try:
            write_memory(look.memory_path, look.memory)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            _warn(f"{look.memory_path} {reason}: a later call may repeat itself")

    def test_channels(self) -> dict[str, str]:
        """Sends a test message to every channel; returns the reasons of failures."""
        names = ", ".join(str(run.path) for run in self.runs)
        text = f"Messages about these runs will come this way: {names}"
        return send_to_all(self.channels, "moe-exp watch: a test", text)


@dataclass
class RunLook:
    """Findings on one run: all problems, those to report now, and those that are over; texts by key."""

    run: Watched
    memory_path: Path
    memory: Memory
    found: dict[str, str] = field(default_factory=dict)
    news: dict[str, str] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)
    state: str = ""
    has_new_events: bool = False

    @property
    def is_well(self) -> bool:
        """No problem is there, and nothing has happened since the last check."""
        return not self.has_new_events and all(key.startswith(EVENT) for key in self.found)

    def text(self) -> str:
        """Text for a message."""
        lines = [f"{self.run.path}"]
        lines += [f"  PROBLEM: {text}" for text in all_texts(self.news)]
        lines += [f"  over: {text}" for text in all_texts(self.over)]
        return "\n".join([*lines, f"  {self.state}"])

    def report(self) -> str:
        """Text for the terminal: all current problems, reported or not."""
        head = f"{self.run.path.name}: {'well' if self.is_well else 'PROBLEMS'}; {self.state}"
        return "\n".join([head, *(f"  {text}" for text in all_texts(self.found))])


def _subject(looks: Sequence[RunLook]) -> str:
    num_new, num_over = sum(len(look.news) for look in looks), sum(len(look.over) for look in looks)
    parts = [f"{num_new} problem{'s' if num_new > 1 else ''}"] if num_new else []
    parts += [f"{num_over} over"] if num_over else []
    return f"moe-exp: {', '.join(parts)} in {', '.join(look.run.path.name for look in looks)}"


def _warn(text: str) -> None:
    print(f"moe-exp watch: {text}", file=sys.stderr, flush=True)


def watch_forever(watchdog: Watchdog, every_seconds: float, *, quiet: bool) -> None:
    """Checks every `every_seconds` until a signal ends this process."""
    while True:
        start = time.monotonic()
        try:
            print_looks(watchdog.look(), quiet=quiet)
        except (OSError, ValueError) as error:
            _warn(str(error))
        time.sleep(max(1.0, every_seconds - (time.monotonic() - start)))


def print_looks(looks: Sequence[RunLook], *, quiet: bool) -> None:
    """Prints reports of all runs, or with `quiet` only of those with problems."""
    for look in looks:
        if not (quiet and look.is_well):
            print(look.report(), flush=True)
