"""The faults of bench/drill/fault_drill.py: how each is caused from outside, which event has to name it, and
what an operator does about it.
"""

import json
import os
import random
import resource
import shutil
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from drill_run import GBSZ, ITERATIONS, SAVE_INTERVAL, Run
from injected import BAD_SAMPLES, CONTROL

from moe_exp.checkpoint.format.folders import PARTIAL, usable

Event = dict[str, Any]


class Fault(ABC):
    """One fault of a drill.

    Args:
        draw: the drill's random numbers.
        iteration: after which it is caused.
    """

    name: ClassVar[str]
    share: ClassVar[int]  # of all, 25
    latest: ClassVar[int] = ITERATIONS  # to be caused, as others need iterations, too
    patience: ClassVar[int] = ITERATIONS  # iterations in which an event has to come
    comes_by_itself: ClassVar[bool] = False  # and may be there already when the drill looks

    def __init__(self, draw: random.Random, iteration: int):
        self.draw, self.iteration = draw, min(iteration, self.latest)

    @abstractmethod
    def cause(self, run: Run) -> str:
        """Does it; returns what was done, in words."""

    @abstractmethod
    def is_named(self, event: Event) -> bool:
        """Whether an event of after the fault is about it."""

    def mend(self, run: Run) -> None:
        """What an operator does once it is named; nothing, for most."""
        del run

    def rank(self, run: Run) -> tuple[int, psutil.Process]:
        """One of the ranks at work."""
        ranks = run.ranks()
        number = self.draw.choice(sorted(ranks))
        return number, ranks[number]


class Killed(Fault):
    name, share = "a rank is killed", 4

    def cause(self, run: Run) -> str:
        self.number, process = self.rank(run)
        process.kill()
        return f"kill -9 of rank {self.number}"

    def is_named(self, event: Event) -> bool:
        return (
            event["event"] == "rank_failed" and event["cause"] == "SIGKILL" and event["rank"] == self.number
        )


class KilledInSave(Killed):
    name, share = "killed in a save", 2

    def cause(self, run: Run) -> str:
        self.number, process = self.rank(run)
        while process.is_running():  # the next save comes by itself
            if any(run.checkpoints.glob(f"*{PARTIAL}")):
                process.kill()
                return f"kill -9 of rank {self.number} while a checkpoint is written"
            time.sleep(0.0005)
        return super().cause(run)


class Terminated(Fault):
    name, share = "SIGTERM", 3

    def cause(self, run: Run) -> str:
        run.stop()
        return "SIGTERM to the launcher; the chain continues"

    def is_named(self, event: Event) -> bool:
        return event["event"] == "stop" and event["reason"] == "SIGTERM"


class FullDisk(Fault):
    """Full until a save has failed: the event is there as soon as there is room for it."""

    name, share = "a full disk", 2

    def cause(self, run: Run) -> str:
        filler, num_lines = run.folder / "filler", self._num_lines(run)
        if shutil.disk_usage(run.folder).free < 2**30:  # the drill's own small disk
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            what = "the disk is filled to the last byte, and emptied after a failed save"
        else:
            self._limit(run, 50_000)
            what = "no file may be over 50 kB, until a save has failed"
        run.wait_until(lambda: self._num_lines(run) > num_lines, "a failed save")
        filler.unlink(missing_ok=True)
        self._limit(run, resource.RLIM_INFINITY)
        return what

    def is_named(self, event: Event) -> bool:
        return event["event"] == "checkpoint_failed"

    def _num_lines(self, run: Run) -> int:
        return run.log.read_text(errors="replace").count("no checkpoint at iteration")

    def _limit(self, run: Run, num_bytes: int) -> None:
        for process in run.ranks().values():
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class DamagedCheckpoint(Fault):
    """The newest checkpoint is damaged, and a rank killed, so that somebody reads it."""

    def cause(self, run: Run) -> str:
        run.wait_until(
            lambda: self._is_between_saves(run), "two checkpoints, and some iterations before the next"
        )
        _, process = self.rank(run)
        process.suspend()  # without it no newer checkpoint is finished
        newest = usable(run.checkpoints)[0]
        file = self.draw.choice(sorted(newest.glob("*.distcp")))
        what = self.damage(file)
        process.kill()
        return f"{newest.name}/{file.name} {what}, and a rank is killed"

    def _is_between_saves(self, run: Run) -> bool:
        has_two = len(usable(run.checkpoints)) > 1  # of those that are damaged already no event tells again
        return (
            has_two
            and 1 <= run.iteration() % SAVE_INTERVAL <= 5
            and not any(run.checkpoints.glob(f"*{PARTIAL}"))
        )

    @abstractmethod
    def damage(self, file: Path) -> str:
        """Damages a file; returns how, in words."""

    def is_named(self, event: Event) -> bool:
        return event["event"] == "damaged_checkpoint"


class Truncated(DamagedCheckpoint):
    name, share = "a truncated checkpoint", 2

    def damage(self, file: Path) -> str:
        size = file.stat().st_size
        os.truncate(file, self.draw.randrange(size))
        return f"is cut from {size} to {file.stat().st_size} bytes"


class BitFlip(DamagedCheckpoint):
    name, share = "a flipped bit in a checkpoint", 2

    def damage(self, file: Path) -> str:
        content = bytearray(file.read_bytes())
        place = self.draw.randrange(len(content))
        content[place] ^= 1 << self.draw.randrange(8)
        file.write_bytes(content)
        return f"has another bit in byte {place}"


class CorruptShard(Fault):
    name, share = "a corrupt shard of data", 1

    def cause(self, run: Run) -> str:
        (self.path,) = run.folder.glob("data/*/train*.bin")
        self.sound = self.path.read_bytes()
        with self.path.open("r+b") as file:
            file.write(np.full(len(self.sound) // 2, 0xFFFF, dtype=np.uint16).tobytes())
        return f"{self.path.name} is overwritten, and restored once it is named"

    def is_named(self, event: Event) -> bool:
        return event["event"] == "rank_failed" and "has the token 65535" in event["cause"]

    def mend(self, run: Run) -> None:
        with self.path.open("r+b") as file:
            file.write(self.sound)


class Stopped(Fault):
    name, share = "a sleeping rank", 2

    def cause(self, run: Run) -> str:
        self.number, process = self.rank(run)
        process.suspend()
        return f"SIGSTOP to rank {self.number}"

    def is_named(self, event: Event) -> bool:
        return event["event"] == "hang" and self.number in event["ranks"]


class BadBatch(Fault):
    """The samples are bad by themselves; the fault comes where the run comes to them."""

    name, share, comes_by_itself = "a NaN in a batch", len(BAD_SAMPLES), True

    def at(self, sample: int) -> None:
        """Which one it is; the fault is caused by the iteration before."""
        self.sample, self.iteration = sample, sample // GBSZ - 1

    def cause(self, run: Run) -> str:
        del run
        return f"the loss of sample {self.sample} is NaN"

    def is_named(self, event: Event) -> bool:
        return event["event"] == "bad_step" and any(
            first <= self.sample < end for first, end in event["samples"]
        )


class Injected(Fault):
    """One process computes or reads otherwise, see injected.py, until an event names it."""

    share, does, what = 1, "", ""

    def cause(self, run: Run) -> str:
        self.number, process = self.rank(run)
        new = run.folder / f"{CONTROL}.new"
        new.write_text(json.dumps({"kind": self.does, "pid": process.pid}))
        new.rename(run.folder / CONTROL)
        return self.what.format(self.number)

    def mend(self, run: Run) -> None:
        (run.folder / CONTROL).unlink()


class Slow(Injected):
    name, does = "a slow rank", "slow"
    # 20 samples of SLOW_RANK_EVERY, the most that are tested together, once the processes that stand by have
    # started, which slows ranks, too
    latest, patience = ITERATIONS // 4, 200
    what = "rank {} is busy for a quarter of its time after each forward pass"

    def rank(self, run: Run) -> tuple[int, psutil.Process]:
        events = [event for event in run.events() if event["event"] in ("slow_rank", "slow_rank_end")]
        is_slow = {event["rank"]: event["event"] == "slow_rank" for event in events}  # not named twice
        ranks = run.ranks()
        number = self.draw.choice([rank for rank in sorted(ranks) if not is_slow.get(rank)] or [0])
        return number, ranks[number]

    def is_named(self, event: Event) -> bool:
        return event["event"] == "slow_rank" and event["rank"] == self.number


class SlowDisk(Slow):
    name, does = "a slow disk of one rank", "slow disk"
    what = "rank {} sleeps for a quarter of its time at each read"

    def is_named(self, event: Event) -> bool:
        return super().is_named(event) and event["phase"] == "data"


class Flipped(Injected):
    """Of two replicas a comparison names both; only a repetition names one rank."""

    def is_named(self, event: Event) -> bool:
        return event["event"] == "sdc" and self.number in event["ranks"]


class FlippedActivation(Flipped):
    name, does = "a flipped bit in an activation", "activation"
    what = "rank {}: bit 21 of another activation in each forward pass"


class FlippedGradient(Flipped):
    name, does = "a flipped bit in a gradient", "gradient"
    what = "rank {}: bit 21 of another gradient in each backward pass"


class FlippedWeight(Flipped):
    name, does = "a flipped bit in a weight", "weight"
    what = "rank {}: bit 21 of a weight, each time that it is written"


FLIPS = (FlippedWeight, FlippedGradient, FlippedActivation)
KINDS: tuple[type[Any], ...] = (
    Killed,
    Stopped,
    FullDisk,
    Terminated,
    BitFlip,
    KilledInSave,
    CorruptShard,
    Truncated,
    BadBatch,
    Slow,
    *FLIPS,
    SlowDisk,
)


def wait_for_event(run: Run, num_before: int, fault: Any, *, seconds: float = 240.0) -> Event | None:
    """The first event after `num_before` that names a fault; None if none comes, also because the run is at
    its end.
    """
    deadline, last = time.monotonic() + seconds, run.iteration() + fault.patience
    while time.monotonic() < deadline and run.iteration() <= last:
        run.tend()
        has_ended = run.exit_code == 0
        if found := [event for event in run.events()[num_before:] if fault.is_named(event)]:
            return found[0]
        if has_ended:
            return None
        time.sleep(0.2)
    return None
