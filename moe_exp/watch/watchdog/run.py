"""Reads a run's progress, speed, last activity, events and disk space from its files. Imports no torch."""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar

from moe_exp.config import Config
from moe_exp.config.loading import known_settings, recorded_settings
from moe_exp.host.files import read_json, regular
from moe_exp.runs.records import Record, parsed_record, time_of
from moe_exp.runs.run_folder import RunFolder

_LAST_RECORDS = 50  # train records, to estimate the speed
_EVENT = b'{"kind": "event"'  # as records.append writes them
_STARTS = ("start", "resume")
# These end a start, unless a `restart` follows.
_ENDS = ("too_many_bad_steps", "replicas_differ", "restore_failed", "rank_failed")
_HANG_SECONDS = 300.0  # after a hang, while its ranks are killed and restarted
_Result = TypeVar("_Result")
# Allowed silence at any speed: file system lag, a slow checkpoint, NCCL's first connections.
_PATIENCE_SECONDS = 600.0
START_SECONDS = 1800.0  # additional silence before a job's first record: imports, loading, compiling
# Window for the disk's fill rate, long enough for the bursts of checkpoints and of other users.
_WINDOW_SECONDS = 24 * 3600.0
_SHORTEST_SECONDS = 3600.0
_LARGEST_SAMPLES = 150

Sample = tuple[float, int]  # seconds since 1970, free bytes


@dataclass(frozen=True)
class RunView:
    """A snapshot of a run. Times are seconds since 1970."""

    settings: dict[str, Any]  # from config.yaml, with defaults for missing ones
    events: list[Record]
    train: list[Record]  # latest train records
    moved: float | None  # when metrics.jsonl was last written; None without one
    now: float
    launched: float = 0.0  # when ranks last opened the folder; 0 if unknown
    summed_up: tuple[float, str] | None = None  # time and status of the launcher's summary.json

    @property
    def iteration(self) -> int:
        """Latest known iteration, from the last train record or the latest start or end event."""
        begun = [int(event["iteration"]) for event in self.events if event["event"] in _STARTS]
        known = int(self.train[-1]["iteration"]) if self.train else (begun[-1] if begun else 0)
        has_ended = self.events and self.events[-1]["event"] == "end"  # between two log lines
        return max(known, int(self.events[-1]["iteration"])) if has_ended else known

    @property
    def train_iters(self) -> int:
        return int(self.settings["train_iters"])

    @property
    def progress(self) -> str:
        return f"iteration {self.iteration:,} of {self.train_iters:,}"

    @property
    def status(self) -> str:
        """Status of the latest start: new, running (or died silently), finished, stopped or failed."""
        status = "new"
        for event in self.events:
            if event["event"] in (*_STARTS, "restart"):
                status = "running"
            elif event["event"] == "end":
                status = str(event.get("status", "stopped"))
        if status in ("new", "running") and self.failure:
            return "failed"
        # TRAIN_ITERS was raised after the run had finished
        return "stopped" if status == "finished" and self.iteration < self.train_iters else status

    @property
    def failure(self) -> tuple[float, list[Record]] | None:
        """Time and events of the latest start's failure; None if the latest start has not failed."""
        ends, hung = list[Record](), list[Record]()
        for event in self.events:
            name = event["event"]
            # after a recent hang, the ranks may still restart
            has_hung = name == "hang" and self.now - event_time(event) > _HANG_SECONDS
            if name in (*_STARTS, "restart", "end"):
                ends, hung = [], []
            elif name in _ENDS or has_hung or event.get("grade") == "failed":
                ends.append(event)
            hung += [event] if name == "hang" else []
        # without such an event, a summary.json newer than the last record decides
        at, status = self.summed_up or (0.0, "")
        if ends:
            at, hung = event_time(ends[-1]), ends
        elif status != "failed" or at < (self.moved or 0.0):
            return None
        return None if self.launched > at else (at, hung)

    @property
    def seconds_per_iteration(self) -> float | None:
        """Median iteration time in the latest train records."""
        times = (record.get("elapsed_time_per_iteration_ms") for record in self.train)
        known = [float(one) / 1e3 for one in times if one]
        return statistics.median(known) if known else None

    @property
    def real_seconds_per_iteration(self) -> float | None:
        """Seconds per iteration with saves and evaluation. Evaluating a batch counts as 1/3 iteration."""
        if (pace := self.seconds_per_iteration) is None:
            return None
        evaluate, save = int(self.settings["eval_interval"]), int(self.settings["save_interval"])
        added = pace / 3 * int(self.settings["eval_iters"]) / evaluate if evaluate else 0.0
        saved = statistics.fmean(self.save_seconds) / save if save and self.save_seconds else 0.0
        return pace + added + saved

    @property
    def saves(self) -> list[Record]:
        return [event for event in self.events if event["event"] == "checkpoint"]

    @property
    def save_seconds(self) -> list[float]:
        """Durations of all saves so far."""
        return [float(event["seconds"]) for event in self.saves if event.get("seconds")]

    @property
    def left_seconds(self) -> float | None:
        """Seconds until iteration TRAIN_ITERS if nothing interrupts the run; None if the speed is unknown."""
        pace = self.real_seconds_per_iteration
        return None if pace is None else max(0, self.train_iters - self.iteration) * pace

    @property
    def gap_seconds(self) -> float | None:
        """Median time from the end of a job to the start of the next job; None before the second job."""
        changes = [event for event in self.events if event["event"] in ("end", *_STARTS)]
        gaps = [
            max(0.0, event_time(after) - event_time(before))
            for before, after in pairwise(changes)
            if before["event"] == "end" and after["event"] != "end"
        ]
        return statistics.median(gaps) if gaps else None

    @property
    def patience_seconds(self) -> float:
        """Allowed inactivity: 3 log intervals + one evaluation + twice the longest save + ten minutes."""
        pace = self.seconds_per_iteration or 0.0
        evaluated = int(self.settings["eval_iters"]) if self.settings["eval_interval"] else 0
        iterations = 3 * int(self.settings["log_interval"]) + evaluated
        return pace * iterations + 2 * max(self.save_seconds, default=0.0) + _PATIENCE_SECONDS

    @property
    def same_starts(self) -> int:
        """Counts back from the latest start: starts at the same iteration, with no save between them."""
        begun: list[int] = []
        for event in self.events:
            if event["event"] == "checkpoint":
                begun.clear()
            elif event["event"] in _STARTS:
                begun.append(int(event["iteration"]))
        return len(list(takewhile(lambda iteration: iteration == begun[-1], reversed(begun))))

    @property
    def checkpoint_bytes(self) -> int | None:
        """Size of the newest checkpoint whose size was recorded."""
        return next((int(event["bytes"]) for event in reversed(self.saves) if event.get("bytes")), None)


def no_folder(path: Path) -> str:
    """Error text (without `Fix: ...`) for a path that is not a run folder."""
    return f"RUN_DIR={path}: is not a run folder (config.yaml not found)"


def view_run(path: Path, *, now: float | None = None) -> RunView:
    """Reads a run folder; raises ValueError if `path` is not a run folder."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ValueError(f"{no_folder(path)}. Fix: specify a run folder ($RUN_DIR/$RUN_NAME).")
    settings = {name: declared.default for name, declared in Config.model_fields.items()}
    with suppress(ValueError):  # every start rewrites it: this may be the middle of a write
        settings |= known_settings(recorded_settings(folder.config))
    events, train = read_tail(folder.metrics)
    moved = folder.metrics.stat().st_mtime if folder.metrics.exists() else None
    now = time.time() if now is None else now
    launched, summed_up = 0.0, None
    unwritten = (OSError, ValueError, LookupError, TypeError)  # or damaged
    with suppress(*unwritten):
        launched = datetime.fromisoformat(read_json(folder.provenance)["starts"][-1]["time"]).timestamp()
    with suppress(*unwritten):
        summed_up = folder.summary.stat().st_mtime, str(read_json(folder.summary)["status"])
    return RunView(settings, events, train, moved, now, launched, summed_up)


def within(seconds: float, action: Callable[[], _Result]) -> _Result:
    """Runs `action` in a thread and returns its result; raises TimeoutError after `seconds`."""
    result: Future[_Result] = Future()

    def work() -> None:
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    # a daemon thread: blocked on a dead file system, it must not keep the process alive
    thread = threading.Thread(target=work, name="watchdog reader", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TimeoutError(f"the file system did not respond in {seconds:.0f} s")
    return result.result()


def read_tail(path: Path) -> tuple[list[Record], list[Record]]:
    """Reads all events and the latest train records of a metrics.jsonl. Both are [] if there is no file."""
    # long runs have gigabytes of train records: parse only the needed lines
    events: list[Record] = []
    last: deque[bytes] = deque(maxlen=_LAST_RECORDS)
    with suppress(FileNotFoundError), regular(path).open("rb") as file:
        for line in file:
            if line.startswith(_EVENT):
                events += _parsed([line])
            elif line.startswith(b'{"kind": "train"') and line.endswith(b"\n"):
                last.append(line)
    return [event for event in events if "event" in event and time_of(event) is not None], _parsed(last)


def _parsed(lines: Sequence[bytes] | deque[bytes]) -> list[Record]:
    found = (parsed_record(line) for line in lines)  # None: cut off by a crash or still being written
    return [record for record in found if record and isinstance(record.get("iteration"), int)]


def event_time(event: Record) -> float:
    """Time of an event, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def num_switches(left_seconds: float, in_this_job: float, limit_seconds: float | None) -> int:
    """Number of jobs that a run needs after the running job, whose time limit is `in_this_job` s away."""
    if (beyond := left_seconds - in_this_job) <= 0:
        return 0
    return 1 if not limit_seconds else math.ceil(beyond / limit_seconds)


@dataclass(frozen=True)
class Disk:
    free_bytes: int  # available to users, ignoring quotas
    bytes_per_second: float | None  # fill rate; None if unknown
    measured: bool  # fill rate is measured over the last hours, not estimated from future checkpoints

    @property
    def full_in_seconds(self) -> float | None:
        """Time until the disk is full at the current fill rate; None if it is not filling up."""
        rate = self.bytes_per_second
        return self.free_bytes / rate if rate and rate > 0 else None


def with_sample(samples: Sequence[Sample], now: float, free: int) -> list[Sample]:
    """Adds a sample to the last day's samples. If the two before it are close in time, drops the second."""
    kept = [(at, amount) for at, amount in samples if now - _WINDOW_SECONDS <= at < now]
    closest = _WINDOW_SECONDS / _LARGEST_SAMPLES
    if len(kept) > 1 and kept[-1][0] - kept[-2][0] < closest:
        kept.pop()
    return [*kept, (now, free)]


def disk_of(view: RunView, samples: Sequence[Sample]) -> Disk:
    """Fill rate: measured if `samples` span an hour and a few saves, else based on checkpoint sizes."""
    settings, free, begin = view.settings, samples[-1][1], 0.0
    if settings["keep_last"]:
        # until the run has as many checkpoints as it keeps, the disk fills faster than afterwards
        number = int(settings["keep_last"]) + int(settings["keep_best"]) + 1
        begin = event_time(view.saves[number - 1]) if len(view.saves) >= number else math.inf
    samples = [sample for sample in samples if sample[0] >= begin] or samples[-1:]
    seconds = samples[-1][0] - samples[0][0]
    save_seconds = int(settings["save_interval"]) * (view.seconds_per_iteration or 0.0)
    if seconds >= max(_SHORTEST_SECONDS, min(2 * save_seconds, _WINDOW_SECONDS / 2)):
        return Disk(free, (samples[0][1] - free) / seconds, True)
    if settings["keep_last"]:  # old checkpoints are deleted: the disk does not fill up
        return Disk(free, 0.0, False)
    pace, size, interval = view.real_seconds_per_iteration, view.checkpoint_bytes, settings["save_interval"]
    return Disk(free, size / (int(interval) * pace) if pace and size and interval else None, False)
