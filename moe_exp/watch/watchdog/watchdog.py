"""Watchdog for unattended runs, called from cron or running as a daemon. Does not import torch.

A check reads the run folders, queries SLURM, and sends at most one message about new problems, ended problems
and problems last reported long ago. A small state file per run (rules.Memory) records what was reported, so
repeated checks from cron do not repeat messages.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from moe_exp.config import ConfigError, raise_for
from moe_exp.host.files import expanded, write_json
from moe_exp.host.slurm_queue import NoSqueue, Queue, QueueError, read_queue
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.watchdog import rules
from moe_exp.watch.watchdog.alerts import Channel, channels_of, send_to_all
from moe_exp.watch.watchdog.rules import EVENT, Limits, Memory, Sight, all_texts
from moe_exp.watch.watchdog.run import disk_of, no_folder, view_run, with_sample, within

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LOCK_SECONDS = 60.0
_READ_SECONDS = 60.0  # timeout for a file system


@dataclass
class Watchdog:
    runs: Sequence[tuple[Path, str]]  # folder, and name of the SLURM jobs (empty: SLURM is not queried)
    channels: Sequence[Channel]
    limits: Limits = field(default_factory=Limits)
    again_seconds: float = 6 * 3600.0  # interval between reports of an ongoing problem
    user: str = ""  # owner of the jobs; empty: the current user
    folder: Path = field(default_factory=rules.default_folder)  # for state files
    _kept: dict[Path, Memory] = field(default_factory=dict)  # lets a daemon survive a full disk

    def check(self, *, now: float | None = None) -> list[RunCheck]:
        """Checks all runs and sends any due message; raises ValueError if another check takes too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS):
                return self._check_all(time.time() if now is None else now)
        except Timeout:
            rule = f"another check did not finish in {_LOCK_SECONDS:.0f} s"
            raise ValueError(f"{self.folder}: {rule}. Fix: start the watchdog less often.") from None

    def _check_all(self, now: float) -> list[RunCheck]:
        checks = [self._check_run(path, name, now) for path, name in self.runs]
        # channels do not belong to a run: their problems are reported with the first one
        for channel, reason in checks[0].memory.failed_channels.items():
            checks[0].found[f"channel {channel}"] = f"the last message via {channel} failed: {reason}"
        for check in checks:
            check.news, check.over = check.memory.to_report(check.found, now, self.again_seconds)
        self._send(checks, now)
        for check in checks:
            # saved after sending: a crash in between repeats a message rather than losing it
            check.memory.forget_old(now, self.again_seconds)
            self._kept[check.memory_path] = check.memory
            try:
                write_json(check.memory_path, asdict(check.memory))
            except OSError as error:
                _warn(f"cannot write {check.memory_path} ({error.strerror}): reports may be repeated")
        return checks

    def _check_run(self, path: Path, slurm_name: str, now: float) -> RunCheck:
        memory_path = rules.memory_file(self.folder, path)
        memory = self._kept.get(memory_path) or rules.read_memory(memory_path)
        check = RunCheck(path, slurm_name, memory_path, memory)
        try:
            # once the folder has been seen, its absence is an error
            if memory.iteration < 0 and not within(_READ_SECONDS, RunFolder(path).config.exists):
                self._check_queued(check, now)
            else:
                self._check_started(check, now)
        # any error, such as a missing file system or unexpected records: silence would look healthy
        except Exception as error:
            is_plain = isinstance(error, OSError | ValueError)
            what = str(error) if is_plain else f"{type(error).__name__}: {error}"
            # assume that open problems persist, so they are not reported as over
            check.found = {key: known.text for key, known in memory.problems.items() if known.is_open}
            check.found["unreadable"] = f"cannot be read: {what}"
            check.state = "unknown"
        return check

    def _check_started(self, check: RunCheck, now: float) -> None:
        path, memory = check.path, check.memory
        # a hanging file system must not block the checks of other runs
        view = within(_READ_SECONDS, lambda: view_run(path, now=now))
        free = within(_READ_SECONDS, lambda: shutil.disk_usage(path).free)
        memory.disk = with_sample(memory.disk, now, free)
        queue, silent = self._queue(check) if view.status != "finished" else (None, "")
        sight = Sight(view, disk_of(view, memory.disk), queue, silent)
        check.found |= rules.problems_of(sight, memory, self.limits, check.slurm_name)
        before = dict(memory.untold_events)
        check.found |= rules.count_events(view, memory, check.found)
        check.has_new_events = memory.untold_events != before
        check.state = rules.state_line(sight)

    def _check_queued(self, check: RunCheck, now: float) -> None:
        """Checks the SLURM jobs of a run that has no run folder yet."""
        name, submitted = check.slurm_name, RunFolder(check.path).submitted
        job_ids = [] if name or not submitted.exists() else submitted.read_text().split()
        queue, silent = self._queue(check, job_ids)
        if job_ids:  # submitted by `moe-exp slurm`, so the path is right
            check.memory.busy = check.memory.busy or now
        jobs = f"from {submitted}" if job_ids else f"named {name}" if name else ""
        check.found |= rules.problems_before_start(
            queue, silent, check.memory, self.limits, now, jobs=jobs, missing=no_folder(check.path)
        )
        parts = ["no run folder yet"]
        if queue is not None and queue.all_jobs:
            state = "" if queue.running else "queued: "
            parts = [f"{state}{queue.all_jobs[0].text}, no run folder yet"]
        if queue is not None and queue.next_start:
            parts.append(f"starts at about {queue.next_start:%Y-%m-%d %H:%M}")
        check.state = "; ".join([*parts, *(["SLURM does not respond"] if silent else [])])

    def _queue(self, check: RunCheck, job_ids: Sequence[str] = ()) -> tuple[Queue | None, str]:
        """Returns the run's jobs and SLURM's error (or ''); reports a missing squeue as a problem."""
        name = check.slurm_name
        try:
            return read_queue(name, self.user, job_ids=job_ids) if name or job_ids else None, ""
        except NoSqueue as error:
            check.found["no_squeue"] = str(error)
            return None, ""
        except QueueError as error:
            return None, str(error)

    def _send(self, checks: Sequence[RunCheck], now: float) -> None:
        """Sends one message for all runs if needed; the next check reports the channels that failed."""
        to_send = [check for check in checks if check.news or check.over]
        if not to_send or not self.channels:
            return
        num_new = sum(len(check.news) for check in to_send)
        num_over = sum(len(check.over) for check in to_send)
        parts = [f"{num_new} problem{'s' if num_new > 1 else ''}"] if num_new else []
        parts += [f"{num_over} over"] if num_over else []
        subject = f"moe-exp: {', '.join(parts)} in {', '.join(check.path.name for check in to_send)}"
        failed = send_to_all(self.channels, subject, "\n\n".join(check.text() for check in to_send))
        for channel, reason in failed.items():
            _warn(f"the message via {channel} failed: {reason}")
        checks[0].memory.failed_channels = failed
        # one working channel is enough; without any, the next check sends everything again
        if any(channel.name not in failed for channel in self.channels):
            for check in to_send:
                check.memory.confirm(check.news, check.over, now)

    def unknown_runs(self) -> list[str]:
        """Returns a line for each path without a started or queued run; sends no alerts."""
        checks = [self._check_run(path, name, time.time()) for path, name in self.runs]
        return [check.found["unknown"] for check in checks if check.is_unknown]

    def test_channels(self) -> dict[str, str]:
        """Sends a test message to every channel; returns the failures."""
        text = f"Alerts for these runs will arrive here: {', '.join(str(path) for path, _ in self.runs)}"
        return send_to_all(self.channels, "moe-exp watch: test", text)


@dataclass
class RunCheck:
    """Result for one run: problems (`found`), problems to report (`news`), ended problems (`over`)."""

    path: Path
    slurm_name: str
    memory_path: Path
    memory: Memory
    found: dict[str, str] = field(default_factory=dict)
    news: dict[str, str] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)
    state: str = ""
    has_new_events: bool = False

    @property
    def is_well(self) -> bool:
        """Whether there are no problems and no new events since the last check."""
        return not self.has_new_events and all(key.startswith(EVENT) for key in self.found)

    @property
    def is_unknown(self) -> bool:
        """Whether the path has never been the folder of a started or queued run."""
        return "unknown" in self.found

    def text(self) -> str:
        """This run's section of a message to the channels."""
        lines = [f"{self.path}"]
        lines += [f"  PROBLEM: {text}" for text in all_texts(self.news)]
        lines += [f"  over: {text}" for text in all_texts(self.over)]
        return "\n".join([*lines, f"  {self.state}"])

    def report(self) -> str:
        """Report for the terminal: all current problems, even if a message has already reported them."""
        head = f"{self.path.name}: {'well' if self.is_well else 'PROBLEMS'}; {self.state}"
        return "\n".join([head, *(f"  {text}" for text in all_texts(self.found))])


def _warn(text: str) -> None:
    print(f"moe-exp watch: {text}", file=sys.stderr, flush=True)


def watch_forever(watchdog: Watchdog, every_seconds: float, *, quiet: bool) -> None:
    """Runs a check every `every_seconds` until a signal ends this process; waits before the first check."""
    start = time.monotonic()
    while True:
        time.sleep(max(1.0, every_seconds - (time.monotonic() - start)))
        start = time.monotonic()
        try:
            # a full disk or a locked folder may have recovered by the next check
            print_checks(watchdog.check(), quiet=quiet)
        except (OSError, ValueError) as error:
            _warn(str(error))


def print_checks(checks: Sequence[RunCheck], *, quiet: bool) -> None:
    """Prints a report on each run; with `quiet`, only on runs with problems."""
    for check in checks:
        if check.is_unknown:
            for text in all_texts(check.found):
                _warn(text)
        elif not (quiet and check.is_well):
            print(check.report(), flush=True)


def watchdog_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> Watchdog:
    """Creates the watchdog from the options of `moe-exp watch run`; raises ConfigError with all problems."""
    problems: list[str] = []
    kinds = ("again", "stuck", "ahead", "wait")
    times = dict.fromkeys(kinds, 0.0)
    for name in filter(options.get, kinds):
        text = options[name]
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
            times[name] = float(found[1]) * _UNITS[found[2]]
        else:
            fix = "write a number and a unit, such as 90s, 10m, 6h or 2d"
            problems.append(f"--{name}={text}: must be a time. Fix: {fix}.")
    names, run_dirs = list(options["slurm_name"]), list(options["run_dirs"])
    if names and len(names) != len(run_dirs):
        rule = f"{len(names)} names for {len(run_dirs)} runs. Fix: set a name per RUN_DIR, in the same order"
        problems.append(f"--slurm-name={' '.join(names)}: {rule}.")
        names = []
    for name in (name for name in names if re.search(r"[,\s]", name)):
        rule = "must not contain commas or spaces. Fix: set it to the --job-name of the jobs"
        problems.append(f"--slurm-name={name}: {rule}.")
    if options.get("every") is not None and not options["every"] > 0:
        rule = "must be more than 0 seconds. Fix: set it to, for instance, 300"
        problems.append(f"--every={options['every']:g}: {rule}.")
    folder = expanded(options.get("state") or rules.default_folder())
    try:
        channels = channels_of(options, environ)
    except ConfigError as error:
        problems += error.problems
    if options.get("test_alert") and not problems and not channels:
        fix = "set --mail-to, --webhook-file or --alert-file"
        problems.append(f"--test-alert: requires a channel. Fix: {fix}.")
    raise_for(problems)
    limits = Limits(times["stuck"] or None, times["ahead"], times["wait"])
    named = zip(run_dirs, names or [""] * len(run_dirs), strict=True)
    runs = [(Path(path).absolute(), name) for path, name in named]
    return Watchdog(runs, channels, limits, times["again"], options.get("slurm_user") or "", folder)
