"""What the files of a run say about it: how far it is, how fast, when it last moved, and what has happened.
No torch.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml

from moe_exp.config import Config
from moe_exp.runs.records import Record, parsed_record, time_of
from moe_exp.runs.run_folder import RunFolder

_LAST_RECORDS = 50  # of training, for the pace
_EVENT = b'{"kind": "event"'  # as records.append writes them
_STARTS = ("start", "resume")
# of a start, where no `restart` follows
_ENDS = ("too_many_bad_steps", "replicas_differ", "restore_failed", "rank_failed")
_HANG_SECONDS = 300.0  # after a hang, in which its ranks are ended and start again
_Result = TypeVar("_Result")
# Silence that is none yet, whatever the pace: a file system that lags, a slow checkpoint, NCCL's first
# connections.
_PATIENCE_SECONDS = 600.0
START_SECONDS = 1800.0  # more of it, from the start of a job to its first record: imports, loading, compiling


@dataclass(frozen=True)
class RunView:
    """A run at one moment. Times are seconds since 1970.

    Attributes:
        folder: of the run.
        settings: config.yaml, with the defaults for what is not in it.
        events: of metrics.jsonl, all.
        train: its last records of training.
        moved: when metrics.jsonl was last written; None without one.
        now: the moment.
        launched: when ranks last opened the folder; 0 where that is not known.
        summed_up: when the launcher wrote summary.json, and the status in it; None without one.
    """

    folder: RunFolder
    settings: dict[str, Any]
    events: list[Record]
    train: list[Record]
    moved: float | None
    now: float
    launched: float = 0.0
    summed_up: tuple[float, str] | None = None

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def iteration(self) -> int:
        """Of the last record of training, or where the latest start began or has ended."""
        begun = [int(event["iteration"]) for event in self.events if event["event"] in _STARTS]
        known = int(self.train[-1]["iteration"]) if self.train else (begun[-1] if begun else 0)
        has_ended = self.events and self.events[-1]["event"] == "end"  # between two log lines
        return max(known, int(self.events[-1]["iteration"])) if has_ended else known

    @property
    def train_iters(self) -> int:
        return int(self.settings["train_iters"])

    @property
    def status(self) -> str:
        """Of the latest start: new, running (or died without a word), or what its end was, finished, stopped
        or failed.
        """
        status = "new"
        for event in self.events:
            if event["event"] in (*_STARTS, "restart"):
                status = "running"
            elif event["event"] == "end":
                status = str(event.get("status", "stopped"))
        if status in ("new", "running") and self.failure:
            return "failed"
        # A run that has more to do than at its last start.
        return "stopped" if status == "finished" and self.iteration < self.train_iters else status

    @property
    def failure(self) -> tuple[float, str] | None:
        """When the latest start has failed, and by what; None where it has not, or where another has begun
        since.
        """
        found: tuple[float, str] | None = None
        why = ""
        for event in self.events:
            name, at = event["event"], event_time(event)
            text = f"{name} at iteration {event['iteration']:,}"
            if name in (*_STARTS, "restart", "end"):
                found, why = None, ""
            elif (
                name in _ENDS
                or (name == "hang" and self.now - at > _HANG_SECONDS)
                or event.get("grade") == "failed"
            ):
                found = at, text
            why = text if name == "hang" else why
        at, status = self.summed_up or (0.0, "")
        if found is None and status == "failed" and at >= (self.moved or 0.0):
            found = at, why or "summary.json says so, train.log may say why"
        return None if found is None or self.launched > found[0] else found

    @property
    def seconds_per_iteration(self) -> float | None:
        """Median over the last records of training."""
        times = [record.get("elapsed_time_per_iteration_ms") for record in self.train]
        known = [float(one) / 1e3 for one in times if one]
        return statistics.median(known) if known else None

    @property
    def real_seconds_per_iteration(self) -> float | None:
        """With what evaluations and saves add: a forward pass is a third of an iteration, a save what saves
        have taken.
        """
        pace = self.seconds_per_iteration
        if pace is None:
            return None
        evaluate, save = int(self.settings["eval_interval"]), int(self.settings["save_interval"])
        added = pace / 3 * int(self.settings["eval_iters"]) / evaluate if evaluate else 0.0
        return (
            pace + added + (statistics.fmean(self.save_seconds) / save if save and self.save_seconds else 0.0)
        )

    @property
    def save_seconds(self) -> list[float]:
        """Of every checkpoint so far."""
        return [
            float(event["seconds"])
            for event in self.events
            if event["event"] == "checkpoint" and event.get("seconds")
        ]

    @property
    def left_seconds(self) -> float | None:
        """To TRAIN_ITERS, if nothing came in between."""
        pace = self.real_seconds_per_iteration
        return None if pace is None else max(0, self.train_iters - self.iteration) * pace

    @property
    def gap_seconds(self) -> float | None:
        """Median time from the end of a job to the first words of the next; None where no job has followed
        another.
        """
        ended, gaps = None, []
        for event in self.events:
            if event["event"] == "end":
                ended = event_time(event)
            elif event["event"] in _STARTS and ended is not None:
                gaps.append(max(0.0, event_time(event) - ended))
                ended = None
        return statistics.median(gaps) if gaps else None

    @property
    def patience_seconds(self) -> float:
        """How long metrics.jsonl may be silent: thrice a log interval, an evaluation, two of the longest
        save, and ten minutes.
        """
        pace = self.seconds_per_iteration or 0.0
        return (
            3 * pace * int(self.settings["log_interval"])
            + (pace * int(self.settings["eval_iters"]) if self.settings["eval_interval"] else 0.0)
            + 2 * max(self.save_seconds, default=0.0)
            + _PATIENCE_SECONDS
        )

    @property
    def same_starts(self) -> int:
        """How many of the latest starts in a row have begun at the same iteration, with nothing saved in
        between.
        """
        begun = [int(event["iteration"]) for event in self.events if event["event"] in _STARTS]
        count = 0
        while count < len(begun) and begun[-1 - count] == begun[-1]:
            count += 1
        return count

    @property
    def checkpoint_bytes(self) -> int | None:
        """Size of the newest checkpoint that an event tells of."""
        sizes = [
            int(event["bytes"])
            for event in self.events
            if event["event"] == "checkpoint" and event.get("bytes")
        ]
        return sizes[-1] if sizes else None


def view_run(path: Path, *, now: float | None = None) -> RunView:
    """Reads a run folder.

    Raises:
        ValueError: it is none.
    """
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ValueError(
            f"RUN_DIR={path}: is no run folder, as it has no config.yaml. Fix: name the folder"
            " $RUN_DIR/$RUN_NAME of a run."
        )
    events, train = read_tail(folder.metrics)
    moved = folder.metrics.stat().st_mtime if folder.metrics.exists() else None
    now = time.time() if now is None else now
    return RunView(
        folder,
        _settings(folder.config),
        events,
        train,
        moved,
        now,
        _launched(folder.provenance),
        _summed_up(folder.summary),
    )


def within(seconds: float, action: Callable[[], _Result]) -> _Result:
    """What `action` returns. A file system that is away answers nothing at all: the thread that waits for it
    is left behind.

    Raises:
        TimeoutError: it takes longer.
    """
    results: list[_Result] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="watchdog reader", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"its file system has not answered in {seconds:.0f} s")
    return results[0]


def _settings(path: Path) -> dict[str, Any]:
    defaults = {
        name: Config.model_fields[name].default
        for name in ("train_iters", "log_interval", "eval_interval", "eval_iters")
    }
    defaults |= {
        name: Config.model_fields[name].default for name in ("save_interval", "keep_last", "keep_best")
    }
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # it is written anew at every start
        read = {}
    return defaults | {
        name: value for name, value in (read if isinstance(read, dict) else {}).items() if name in defaults
    }


def _launched(provenance: Path) -> float:
    try:
        return datetime.fromisoformat(
            json.loads(provenance.read_text(encoding="utf-8"))["starts"][-1]["time"]
        ).timestamp()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # of a run that has not come so far
        return 0.0


def _summed_up(summary: Path) -> tuple[float, str] | None:
    try:
        return summary.stat().st_mtime, str(json.loads(summary.read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def read_tail(path: Path) -> tuple[list[Record], list[Record]]:
    """All events of a metrics.jsonl and the last records of training; both empty where there is no file.

    After weeks the file has gigabytes of records of training: only what is needed is taken apart.
    """
    events: list[Record] = []
    last: deque[bytes] = deque(maxlen=_LAST_RECORDS)
    try:
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_EVENT):
                    events += _parsed([line])
                elif line.startswith(b'{"kind": "train"') and line.endswith(b"\n"):
                    last.append(line)
    except FileNotFoundError:
        pass
    return [event for event in events if "event" in event and time_of(event) is not None], _parsed(last)


def _parsed(lines: Sequence[bytes] | deque[bytes]) -> list[Record]:
    found = (parsed_record(line) for line in lines)  # none: cut off by a crash, or being written
    return [record for record in found if record and isinstance(record.get("iteration"), int)]


def event_time(event: Record) -> float:
    """When it was, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def num_switches(left_seconds: float, in_this_job: float, limit_seconds: float | None) -> int:
    """How many more jobs a run needs after the one that is there.

    Args:
        left_seconds: of training.
        in_this_job: seconds until the limit of the job that runs; 0 without one.
        limit_seconds: of every further job; None for no limit.
    """
    beyond = left_seconds - in_this_job
    if beyond <= 0:
        return 0
    return 1 if not limit_seconds else math.ceil(beyond / limit_seconds)
