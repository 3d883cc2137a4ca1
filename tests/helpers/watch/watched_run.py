"""A run folder, and a squeue, as tests of the watchdog want them to look; and one look, as cron makes it."""

import os
import time
from datetime import datetime
from pathlib import Path

import yaml

from moe_exp.runs.records import append
from moe_exp.watch.watchdog.watchdog import Watchdog

HOUR, DAY = 3600.0, 86400.0
SETTINGS = {"train_iters": 40000, "log_interval": 20, "eval_interval": 1000, "eval_iters": 10}
SETTINGS |= {"save_interval": 1000, "keep_last": 0}


class Run:
    """A run folder whose events have the times that a test wants: `at` seconds after a moment of the past."""

    def __init__(self, path: Path, **settings: object):
        self.path = path
        path.mkdir(exist_ok=True)
        self.begin = int(time.time()) - 10 * DAY
        (path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
        self.metrics = path / "metrics.jsonl"

    def time(self, at: float) -> str:
        return datetime.fromtimestamp(self.begin + at).astimezone().isoformat(timespec="seconds")

    def event(self, name: str, iteration: int, at: float, **details: object) -> None:
        head = {"kind": "event", "iteration": iteration, "event": name, "time": self.time(at)}
        append(self.metrics, head | details)

    def train(self, first: int, last: int, at: float, *, ms: float = 2000.0) -> None:
        """Records of iterations `first`, `first + 20`, ...; the file was written `at` then."""
        for iteration in range(first, last + 1, 20):
            record = {"kind": "train", "iteration": iteration, "elapsed_time_per_iteration_ms": ms}
            append(self.metrics, record)
        os.utime(self.metrics, (self.begin + at, self.begin + at))


class Queue:
    """squeue: prints what is set, or fails."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.lines = folder / "lines"
        self.set("")
        program = folder / "squeue"
        program.write_text(
            f'#!/bin/sh\n[ -e "{self.lines}" ] || {{ echo "slurm_load_jobs error: Socket timed out" >&2; exit'
            f' 1; }}\necho "$@" >"{folder}/called"\ncat "{self.lines}"\n'
        )
        program.chmod(0o755)

    def set(self, text: str) -> None:
        self.lines.write_text(text)


def found(dog, run, at):
    """Keys of the problems at one look; every look is made by a new watchdog, as cron's are."""
    again = Watchdog(dog.runs, dog.channels, dog.limits, dog.again_seconds, folder=dog.folder)
    (look,) = again.check(now=run.begin + at)
    return set(look.found), set(look.news), set(look.over)


def running(run, *, since=0.0, left="23:00:00", name="101_1"):
    start = f"{datetime.fromtimestamp(run.begin + since):%Y-%m-%dT%H:%M:%S}"
    return f"{name}|RUNNING|{start}|1-00:00:00|{left}|None\n"


PENDING = "102|PENDING|N/A|1-00:00:00|INVALID|Priority\n"
WAITING = "101_[2-30%1]|PENDING|N/A|1-00:00:00|INVALID|JobArrayTaskLimit\n"
