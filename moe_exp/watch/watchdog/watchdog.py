"""Looks after runs that nobody looks at: from cron, or as a daemon. No torch.

A look reads the run folders, asks SLURM, and sends at most one message: problems that are new, or that were
told long ago, and those that are over. What was told is kept in a small file per run (memory.py), so that
looks from cron know of each other.
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
_READ_SECONDS = 60.0  # that a file system may take


@dataclass(frozen=True)
class Watched:
    """A run, and the name of its jobs; empty: SLURM is not asked."""

    path: Path
    slurm_name: str = ""


@dataclass
class Watchdog:
    """What looks, and where to.

    Attributes:
        runs: that are looked after.
        channels: who is told.
        limits: when something counts as a problem.
        again_seconds: before a problem that goes on is told again.
        user: whose jobs; empty: ours.
        folder: of what is remembered.
    """

    runs: Sequence[Watched]
    channels: Sequence[Channel]
    limits: Limits = field(default_factory=Limits)
    again_seconds: float = 6 * 3600.0
    user: str = ""
    folder: Path = field(default_factory=default_folder)
    _kept: dict[Path, Memory] = field(default_factory=dict)  # for a daemon whose disk is full

    def look(self, *, now: float | None = None) -> list[RunLook]:
        """Looks at all runs, and tells who is to be told.

        Raises:
            ValueError: another look has not ended in a minute.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS):
                return self._look(time.time() if now is None else now)
        except Timeout:
            raise ValueError(
                f"{self.folder}: another look has not ended in {_LOCK_SECONDS:.0f} s. Fix: call it less"
                " often."
            ) from None

    def _look(self, now: float) -> list[RunLook]:
        looks = []
        for index, run in enumerate(self.runs):
            look = self._look_at(run, now)
            if index == 0:  # what is not about one run is told with the first
                for channel, reason in look.memory.failed_channels.items():
                    look.found[f"channel {channel}"] = (
                        f"the last message did not get through by {channel}: {reason}"
                    )
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
            look.found = problems_of(sight, memory, self.limits, run.slurm_name) | (
                {"no_squeue": missing} if missing else {}
            )
            told_before = dict(memory.untold_events)
            events = count_events(view, memory)
            look.has_new_events = memory.untold_events != told_before
            look.found |= events
            look.state = state_line(sight)
        # a file system that is away, records that nobody has thought of: silence would look like health
        except Exception as error:
            what = (
                str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
            )
            # which are hardly over
            look.found = {key: known.text for key, known in memory.problems.items() if known.is_open}
            look.found["unreadable"] = f"cannot be looked at: {what}"
            look.state = "unknown"
        return look

    def _queue(self, run: Watched) -> tuple[Queue | None, str, str]:
        """The jobs of a run, why SLURM does not answer, and why it cannot be asked: then the run is judged as
        one without SLURM.
        """
        if not run.slurm_name:
            return None, "", ""
        try:
            return read_queue(run.slurm_name, self.user), "", ""
        except NoSqueue as error:
            return None, "", str(error)
        except QueueError as error:
            return None, str(error), ""

    def _tell(self, looks: Sequence[RunLook], now: float) -> None:
        """One message for all runs, if there is anything to say; whoever is not reached is told of at the
        next look, by the others.
        """
        told = [look for look in looks if look.news or look.over]
        if not told or not self.channels:
            return
        failed = send_to_all(self.channels, _subject(told), "\n\n".join(look.text() for look in told))
        for channel, reason in failed.items():
            print(
                f"moe-exp watch: the message did not get through by {channel}: {reason}",
                file=sys.stderr,
                flush=True,
            )
        looks[0].memory.failed_channels = failed
        if any(channel.name not in failed for channel in self.channels):
            for look in told:
                look.memory.confirm(look.news, look.over, now)

    def _remember(self, look: RunLook) -> None:
        self._kept[look.memory_path] = look.memory
        try:
            write_memory(look.memory_path, look.memory)
        except OSError as error:
            line = (
                f"moe-exp watch: {look.memory_path} cannot be written ({error.strerror}): a later call may"
                " repeat itself"
            )
            print(line, file=sys.stderr, flush=True)

    def test_channels(self) -> dict[str, str]:
        """Sends a message that says so by every channel; why those failed that have."""
        names = ", ".join(str(run.path) for run in self.runs)
        return send_to_all(
            self.channels, "moe-exp watch: a test", f"Messages about these runs will come this way: {names}"
        )


@dataclass
class RunLook:
    """What a look has found at one run: problems, those of them that are to be told now, and those that are
    over; texts by key.
    """

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
        """No problem is there, and nothing has happened since the last look."""
        return not self.has_new_events and all(key.startswith(EVENT) for key in self.found)

    def text(self) -> str:
        """For a message."""
        lines = [f"{self.run.path}"]
        lines += [f"  PROBLEM: {text}" for text in all_texts(self.news)]
        lines += [f"  over: {text}" for text in all_texts(self.over)]
        return "\n".join([*lines, f"  {self.state}"])

    def report(self) -> str:
        """For the terminal: all problems that are there, told or not."""
        head = f"{self.run.path.name}: {'well' if self.is_well else 'PROBLEMS'}; {self.state}"
        return "\n".join([head, *(f"  {text}" for text in all_texts(self.found))])


def _subject(looks: Sequence[RunLook]) -> str:
    num_new, num_over = sum(len(look.news) for look in looks), sum(len(look.over) for look in looks)
    parts = [f"{num_new} problem{'s' if num_new > 1 else ''}"] if num_new else []
    parts += [f"{num_over} over"] if num_over else []
    return f"moe-exp: {', '.join(parts)} in {', '.join(look.run.path.name for look in looks)}"


def watch_forever(watchdog: Watchdog, every_seconds: float, *, quiet: bool) -> None:
    """Looks every so many seconds, until a signal ends this process."""
    while True:
        start = time.monotonic()
        try:
            print_looks(watchdog.look(), quiet=quiet)
        except (OSError, ValueError) as error:
            print(f"moe-exp watch: {error}", file=sys.stderr, flush=True)
        time.sleep(max(1.0, every_seconds - (time.monotonic() - start)))


def print_looks(looks: Sequence[RunLook], *, quiet: bool) -> None:
    """Reports of all runs, or with `quiet` of those that are not well."""
    for look in looks:
        if not (quiet and look.is_well):
            print(look.report(), flush=True)
