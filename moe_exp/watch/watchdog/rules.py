"""Rules that detect problems of a run from its files, its disk and SLURM's queue. No torch."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.host.files import bytes_text, read_json
from moe_exp.host.slurm_queue import Queue
from moe_exp.runs.records import Record
from moe_exp.watch.watchdog.run import START_SECONDS, Disk, RunView, event_time, num_switches

# Events of a healthy run, unless status or grade is `failed`. All others are reported, including those that
# users add to records.EVENTS.
QUIET_EVENTS = (
    "start", "resume", "checkpoint", "end", "stop", "restart", "other_data", "changed_settings", "spike_end",
    "preflight", "slow_rank_end",
)  # fmt: skip
_NAME_IT = "specify a run folder ($RUN_DIR/$RUN_NAME)"
_NO_OTHER = "no other job has started since"
_MANY_STARTS = 3  # at the same iteration
_ENDING_SECONDS = 1800.0  # after a job, while SLURM may still clean up
_VICTIM_SECONDS = 120.0  # after a hang, while its ranks are killed
_SLURM_SILENT_SECONDS = 900.0  # tolerates a restart of the controller
_NO_END_SECONDS = 3 * 86400.0  # how far ahead the disk is checked if the end of the run is unknown
_BACK_SECONDS = 1800.0  # longest silence about a problem that is back
_RENAMED = {"told": "reported"}
EVENT = "event "  # prefix of the keys of events, which are problems that cannot end

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    stuck_seconds: float | None = None  # without a new record while a job runs; None: derived from the speed
    ahead_seconds: float = 86400.0  # a chain of jobs that is too short is reported this long before its end
    wait_seconds: float = 86400.0  # without a running job, although jobs are queued


@dataclass(frozen=True)
class Sight:
    view: RunView
    disk: Disk
    queue: Queue | None = None  # the run's jobs; None without a query to SLURM
    silent: str = ""  # why SLURM does not respond


def problems_of(sight: Sight, memory: Memory, limits: Limits, slurm_name: str) -> dict[str, str]:
    """Returns all current problems (key to text); records the run's progress in `memory`."""
    view = sight.view
    if view.iteration != memory.iteration:
        memory.iteration, memory.moved = view.iteration, view.moved or view.now
    # the first check counts as a running job, so rules on missing jobs start from there
    memory.busy = view.now if not memory.busy or (sight.queue and sight.queue.running) else memory.busy
    silence = memory.slurm_silence(sight.silent, view.now)
    if view.status == "finished":
        return {}
    found = dict[str, str]()
    disk, size, free = sight.disk, view.checkpoint_bytes, bytes_text(sight.disk.free_bytes)
    # a separate rule: a save fails before the disk is full
    if size and size > disk.free_bytes:
        found["checkpoint_does_not_fit"] = f"the disk has {free} free, a checkpoint needs {bytes_text(size)}"
    full, left = disk.full_in_seconds, wall_seconds_left(sight)
    if full is not None and full < (_NO_END_SECONDS if left is None else left):
        how = "at the rate of the last hours" if disk.measured else "because all checkpoints are kept"
        end = "" if left is None else f"; the run needs another {span(left)}"
        found["disk_filling"] = f"the disk will be full in {span(full)} {how} ({free} free){end}"
    if sight.silent:
        found |= silence | _failed(view)
    elif sight.queue is not None:
        queue, jobs = sight.queue, f"named {slurm_name}"
        found |= _scheduling(queue, memory, limits, view.now, jobs, f"at {view.progress}")
        begun = max((job.start.timestamp() for job in queue.running if job.start), default=0.0)
        since = f"no job {jobs} is running or queued" if "not_scheduled" in found else _NO_OTHER
        if failed := _failed(view, begun, since):  # explains why no job is left
            found.pop("not_scheduled", None)
            found |= failed
        elif queue.running:
            found |= _stuck(view, memory, limits, since=begun)
        # whether the chain of jobs ends before the run
        scheduled, needed = queue.scheduled_seconds, view.left_seconds
        if (queue.running or queue.coming) and scheduled is not None and needed is not None:
            more = f"submit {num_switches(needed, scheduled, queue.limit_seconds)} more"
            if scheduled < min(needed, limits.ahead_seconds):
                ends = f"its jobs end in {span(scheduled)}"
                found["chain_short"] = f"{ends}, but the run needs {span(needed)}: {more}"
    elif view.status == "stopped":
        found["stopped"] = f"it stopped at {view.progress}, and nothing resumes it"
    elif view.status == "failed":
        found |= _failed(view)
    else:
        found |= _stuck(view, memory, limits, since=0.0)
    if view.same_starts >= _MANY_STARTS:
        found["circles"] = f"it started {view.same_starts} times in a row without saving a checkpoint"
    return found


def _scheduling(
    queue: Queue, memory: Memory, limits: Limits, now: float, jobs: str, at: str
) -> dict[str, str]:
    """Reports jobs that are missing, cannot start or wait too long; `at`: the run's progress as text."""
    found = {}
    if queue.stuck:
        found["never_starts"] = "will not start on its own: " + ", ".join(job.text for job in queue.stuck)
    is_ending = queue.ending and now - memory.busy < _ENDING_SECONDS
    if not (queue.running or queue.coming or queue.stuck or is_ending):
        found["not_scheduled"] = f"no job {jobs} is running or queued, {at}"
    if not queue.running and queue.coming and now - memory.busy >= limits.wait_seconds:
        found["waiting"] = f"no job has run for {span(now - memory.busy)}: {queue.coming[0].text}"
    return found


def problems_before_start(
    queue: Queue | None, silent: str, memory: Memory, limits: Limits, now: float, *, jobs: str, missing: str
) -> dict[str, str]:
    """Problems (key to text) of a run without a folder. `jobs` names its jobs; `missing`: see `no_folder`."""
    silence = memory.slurm_silence(silent, now)
    if silent:
        return silence
    if queue is None:  # no jobs to query, or no squeue, which is reported separately
        add = "" if jobs else "; before the first job starts, add --slurm-name"
        return {} if memory.busy else {"unknown": f"{missing}. Fix: {_NAME_IT}{add}."}
    if not (queue.all_jobs or memory.busy):
        # the path or the name of the jobs may be misspelled
        queued = f"and no job {jobs} is queued"
        return {"unknown": f"{missing}, {queued}. Fix: {_NAME_IT}, and check --slurm-name."}
    memory.busy = now if not memory.busy or queue.running else memory.busy
    found = _scheduling(queue, memory, limits, now, jobs, "and the run folder was never created")
    # the job that has run longest should have created the folder
    begun = min((job.start.timestamp() for job in queue.running if job.start), default=now)
    if now - begun > (limits.stuck_seconds or START_SECONDS):
        job = f"job {queue.running[0].name} has been running for {span(now - begun)}"
        found["no_folder"] = f"{job}, but {missing}. Fix: {_NAME_IT}, or read the job's log."
    return found


def _failed(view: RunView, begun: float = 0.0, since: str = _NO_OTHER) -> dict[str, str]:
    """Reports that the latest start failed, unless a job began afterwards. `since`: text on other jobs."""
    if view.status != "failed" or view.failure is None or begun > view.failure[0]:
        return {}
    at, events = view.failure
    what = "according to summary.json; train.log may show why"
    if events:
        same = [event for event in events if event["event"] == events[0]["event"]]
        what = _event_text(events[0], len(same))
    hint = ""
    # only these failures can be cured by the launcher's own restarts
    if events and events[0]["event"] in ("rank_failed", "hang") and not int(view.settings["max_restarts"]):
        hint = "; MAX_RESTARTS=3 restarts the ranks without a new job"
    return {"failed": f"its last start failed {span(view.now - at)} ago ({what}), and {since}{hint}"}


def _stuck(view: RunView, memory: Memory, limits: Limits, since: float) -> dict[str, str]:
    """Reports a run that has stopped writing records; `since`: start time of the running job."""
    begun = [event_time(event) for event in view.events if event["event"] in ("start", "resume")]
    first = max(since, view.launched, begun[-1] if begun else 0.0)
    moved = max(memory.moved, first)
    patience = view.patience_seconds if limits.stuck_seconds is None else limits.stuck_seconds
    # no record since the start: allow for imports, loading and compiling
    if limits.stuck_seconds is None and (first >= memory.moved or not view.train):
        patience += START_SECONDS
    if view.now - moved <= patience:
        return {}
    pace = view.seconds_per_iteration
    usual = f" (usually {span(pace * int(view.settings['log_interval']))})" if pace else ""
    return {"stuck": f"no new iteration after {view.iteration:,} for {span(view.now - moved)}{usual}"}


def wall_seconds_left(sight: Sight) -> float | None:
    """Seconds until the run ends, including gaps between its jobs; None if the run's speed is unknown."""
    view, queue = sight.view, sight.queue
    left = view.left_seconds
    if left is None or queue is None:
        return left
    in_this_job = float(sum(job.left_seconds or 0 for job in queue.running))
    if queue.running and any(job.left_seconds is None for job in queue.running):
        return left
    switches = num_switches(left, in_this_job, queue.limit_seconds)
    wait = 0.0
    if not queue.running and queue.next_start:
        # SLURM estimates the first gap; the others are taken to be the median of earlier ones
        wait = max(0.0, queue.next_start.timestamp() - view.now)
        switches = max(0, switches - 1)
    return left + wait + switches * (view.gap_seconds or 0.0)


def count_events(view: RunView, memory: Memory, found: Mapping[str, str]) -> dict[str, str]:
    """Unreported events (key to text), except those that explain a "failed" in `found`; updates `memory`."""
    seen = memory.num_events
    # fewer than before: another run uses the folder now, so all are new
    new = view.events if seen is None or seen > len(view.events) else view.events[seen:]
    # the first check of a run reports only the last day
    if seen is None:
        new = [event for event in new if view.now - event_time(event) < 86400]
    memory.num_events = len(view.events)
    causes: list[Record] = []  # without ranks killed because of a hang, whose own event names the culprits
    hung = -math.inf
    for event in view.events:
        hung = event_time(event) if event["event"] == "hang" else hung
        was_killed = event["event"] == "rank_failed" and event.get("cause") == "SIGKILL"
        if not (was_killed and 0 <= event_time(event) - hung < _VICTIM_SECONDS):
            causes.append(event)
    is_new = {id(event) for event in new}
    if "failed" in found and view.failure is not None:
        is_new -= {id(event) for event in view.failure[1]}
    for event in causes:
        is_bad = event["event"] not in QUIET_EVENTS or "failed" in (event.get("status"), event.get("grade"))
        if is_bad and event.get("action") != "restart" and id(event) in is_new:
            memory.untold_events[event["event"]] = memory.untold_events.get(event["event"], 0) + 1
    latest = {event["event"]: event for event in causes}
    known = {name: count for name, count in memory.untold_events.items() if name in latest}
    return {EVENT + name: _event_text(latest[name], count) for name, count in known.items()}


def _event_text(event: Record, count: int) -> str:
    said = []
    for name, given in event.items():
        if name not in ("kind", "event", "iteration", "time"):
            # rounds numbers to five digits, even inside lists and dictionaries
            value = json.loads(json.dumps(given), parse_float=lambda text: float(f"{float(text):.5g}"))
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            text = " ".join(text.split())
            # an event may contain a traceback, but a message is limited to 3,500 characters
            said.append(f"{name}: {text if len(text) <= 200 else text[:197] + '...'}")
    times = f" ({count} times)" if count > 1 else ""
    where = f"{event['event']} at iteration {event['iteration']:,}, {event['time']}{times}"
    return where + (f": {', '.join(said)}" if said else "")


def state_line(sight: Sight) -> str:
    view, queue = sight.view, sight.queue
    if view.status == "finished":
        return f"finished, {view.iteration:,} of {view.train_iters:,} iterations"
    parts = [view.progress]
    if view.seconds_per_iteration:
        parts.append(f"{view.seconds_per_iteration:.3g} s each")
    if view.moved:
        parts.append(f"last record {span(view.now - view.moved)} ago")
    if queue is not None:
        running = ", ".join(job.name for job in queue.running)
        waiting = sum(job.num_tasks for job in queue.coming)
        parts.append(f"{f'job {running} is running' if running else 'no job is running'}, {waiting} queued")
        if queue.next_start:
            parts.append(f"next start at about {queue.next_start:%Y-%m-%d %H:%M}")
    elif sight.silent:
        parts.append("SLURM does not respond")
    left = wall_seconds_left(sight)
    if left is not None and (queue is not None or view.status in ("new", "running")):
        gap = view.gap_seconds if queue is not None else None
        gaps = f", with {span(gap)} between jobs" if gap else ""
        end = f"{datetime.fromtimestamp(view.now + left).astimezone():%Y-%m-%d %H:%M}"
        parts.append(f"ends at about {end} (in {span(left)}{gaps})")
    full = sight.disk.full_in_seconds
    filling = f", full in {span(full)}" if full is not None else ""
    parts.append(f"{bytes_text(sight.disk.free_bytes)} free{filling}")
    return "; ".join(parts)


def span(seconds: float) -> str:
    """Formats a time span in one or two units: 40 s, 5 min, 3 h 10 min, 2 d 3 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(0, seconds):.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{hours // 24} d" + (f" {hours % 24} h" if hours % 24 else "")


def all_texts(found: Mapping[str, str]) -> list[str]:
    """Problem texts, worst first: problems that stopped the run, then problems that may stop it."""
    order = (
        "unknown", "no_folder", "not_scheduled", "never_starts", "failed", "stopped", "no_squeue", "stuck",
        "circles", "checkpoint_does_not_fit",
    )  # fmt: skip
    keys = sorted(found, key=lambda key: (order.index(key) if key in order else len(order), key))
    return [found[key] for key in keys]


@dataclass
class Reported:
    """History of one problem. Times are seconds since 1970."""

    since: float = 0.0  # when it appeared; 0 if it is absent now
    reported: float = 0.0  # time of the last report; 0: never
    is_open: bool = False  # its start was reported, its end was not
    text: str = ""


@dataclass
class Memory:
    """State of one run, kept in a file from one check to the next."""

    problems: dict[str, Reported] = field(default_factory=dict)  # by key
    num_events: int | None = None  # of metrics.jsonl that were checked
    untold_events: dict[str, int] = field(default_factory=dict)  # number of unreported events by name
    disk: list[tuple[float, int]] = field(default_factory=list)  # time and free bytes of earlier checks
    iteration: int = -1
    moved: float = 0.0  # when that iteration was first seen
    busy: float = 0.0  # when a job was last seen running, or the run was first checked
    slurm_silent: float = 0.0  # since when squeue has not responded; 0 if it does
    failed_channels: dict[str, str] = field(default_factory=dict)  # why the last message failed

    def slurm_silence(self, silent: str, now: float) -> dict[str, str]:
        """Records SLURM's error `silent` ('' if SLURM responds); returns a problem after a long silence."""
        self.slurm_silent = (self.slurm_silent or now) if silent else 0.0
        if not silent or now - self.slurm_silent < _SLURM_SILENT_SECONDS:
            return {}
        return {"slurm_silent": f"SLURM has not responded for {span(now - self.slurm_silent)}: {silent}"}

    def to_report(
        self, found: Mapping[str, str], now: float, again_seconds: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Two dicts from key to text: problems to report now, and reported problems that are over."""
        news = {}
        for key, text in found.items():
            known = self.problems.setdefault(key, Reported())
            known.since = known.since or now
            # a problem that returns, or an event that recurs, is news sooner than one that merely lasts
            limit = again_seconds if known.is_open else min(again_seconds, _BACK_SECONDS)
            if not known.reported or now - known.reported >= limit:
                news[key] = text
        absent = {key: known for key, known in self.problems.items() if key not in found}
        for known in absent.values():
            known.since = 0.0
        return news, {key: known.text for key, known in absent.items() if known.is_open}

    def confirm(self, news: Mapping[str, str], over: Mapping[str, str], now: float) -> None:
        """Records that a message about `news` and `over` was sent."""
        for key, text in news.items():
            known = self.problems[key]
            known.reported, known.is_open, known.text = now, not key.startswith(EVENT), text
            self.untold_events.pop(key.removeprefix(EVENT), None)
        for key in over:
            self.problems[key].is_open = False

    def forget_old(self, now: float, again_seconds: float) -> None:
        """Drops problems that are over and were last reported at least `again_seconds` ago."""
        for key, known in list(self.problems.items()):
            if not (known.since or known.is_open or now - known.reported < again_seconds):
                del self.problems[key]


def memory_file(folder: Path, run: Path) -> Path:
    """Path of a run's state file; a hash of the run's path distinguishes runs that share a name."""
    path = os.path.abspath(run)  # noqa: PTH100  # does not access the disk, which may hang
    return folder / f"{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:10]}.json"


def default_folder() -> Path:
    """Folder for state files: in the home folder, since the run's disk may be full."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moe-exp" / "watch"


def read_memory(path: Path) -> Memory:
    """Reads the state stored by earlier checks; returns an empty state if the file is missing or damaged."""
    try:
        values: dict[str, Any] = read_json(path)
        memory = Memory(**values)
        for key, known in values["problems"].items():
            # state files of 0.1.0 use another name for the time
            memory.problems[key] = Reported(**{_RENAMED.get(name, name): one for name, one in known.items()})
        memory.disk = [(float(at), int(amount)) for at, amount in values["disk"]]
        return memory
    except FileNotFoundError:
        return Memory()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("cannot read %s (%s): starting over, reports may be repeated", path, error)
        return Memory()
