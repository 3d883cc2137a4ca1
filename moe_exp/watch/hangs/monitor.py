"""The launcher's look at the heartbeats of its ranks: it finds a hang, has all stacks written, and ends the
ranks for a restart.

`HangWatch.poll` is called by the launcher's loop and costs a few small reads a second; what takes longer runs
in a thread. A false alarm costs a restart and is worse than a late one, so a run hangs only when

- every rank of the node is over its limit (`limit_seconds`), and none on whatever node is far from it, paused
  or under a debugger, and
- no rank has gone on when all stacks are written.

Limits are counted on the host's monotonic clock, which stands still while the host is suspended; and only
while this process runs itself, as what stops the launcher (a frozen container, a job that SLURM has
suspended) has stopped the ranks, too.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

import psutil

from moe_exp.config import Config
from moe_exp.host.exit_codes import HEARTBEATS, complain
from moe_exp.host.files import write_atomically
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs.dump import dump_node, is_traced, nccl_environment, ranks_of_node
from moe_exp.watch.hangs.heartbeat import ITERATION_PHASES, PAUSED, Beat, failures_file, hung_file, read_beats
from moe_exp.watch.hangs.requests import (
    Answer,
    Request,
    ask,
    give_verdict,
    latest_request,
    wait_for_answers,
    wait_for_verdict,
    write_answer,
)
from moe_exp.watch.hangs.stacks import summarize

# of HANG_TIMEOUT=auto: a shared file system stands still for a minute or two, and the run goes on
LEAST_SECONDS = 180.0
_FACTOR = 10
_LEAST_ITERATIONS = 3  # whose median HANG_TIMEOUT=auto goes by
_LOOK_SECONDS = 1.0
_OWN_PAUSE_SECONDS = 10.0  # between two looks: this process did not run
_NAMING_SECONDS = 10.0  # that a node waits for node 0 to name the folder
_ANSWER_SECONDS = 120.0  # that the others have to write their stacks


def limit_seconds(beat: Beat, hang_timeout: str, other_seconds: int | None) -> float:
    """How long a rank may be in its iteration, or in its phase where that is no part of an iteration.

    Args:
        beat: where it is.
        hang_timeout: auto, none or seconds.
        other_seconds: of everything that is no iteration with others before it; None: any time.
    """
    other = math.inf if other_seconds is None else float(other_seconds)
    if hang_timeout == "none" or beat.phase == PAUSED:
        return math.inf
    is_auto = hang_timeout == "auto"
    if beat.phase not in ITERATION_PHASES or len(beat.durations) < (_LEAST_ITERATIONS if is_auto else 1):
        return other
    # By micro-batch: a batch that ramps up makes iterations longer in steps.
    usual = statistics.median(beat.durations) * beat.num_microbatches
    return max(LEAST_SECONDS, _FACTOR * usual) if is_auto else float(hang_timeout)


def elapsed_seconds(beat: Beat, now: float, running_since: float) -> float:
    """How long a rank has been in its iteration or phase, as far as this process was running, too. Times of
    the monotonic clock.
    """
    spent = beat.spent if beat.phase in ITERATION_PHASES else 0.0
    return spent + now - max(beat.since, running_since)


class HangWatch:
    """Watches the ranks of this node. Use it in a `with` block around their run, with `environment` in
    theirs.

    Args:
        config: HANG_TIMEOUT, HANG_TIMEOUT_OTHER and the size of the job.
        run: its folder.
    """

    def __init__(self, config: Config, run: RunFolder):
        self._config, self._run, self._hang = config, run, run.path / "hang"
        self._local = Path(tempfile.mkdtemp(prefix="moe_exp_heartbeats_"))
        self._looked = self._running_since = time.monotonic()
        self._missing_since: float | None = None
        self._judged = -math.inf  # the newest beat that a verdict was given on
        self._answered = latest_request(self._hang)
        self._thread: threading.Thread | None = None
        self._hung = ""
        self._hung_at = math.inf

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()
        if self._hung:  # again below what torchrun says of ranks that were ended
            complain(self._hung)
        shutil.rmtree(self._local, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks need to know."""
        return {HEARTBEATS: str(self._local), **nccl_environment(self._local)}

    def wait(self, seconds: float = 5.0) -> None:
        """Returns when what a `poll` has begun is done."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self) -> None:
        """Looks once a second; begins to answer a request for stacks, or to write those of a hang."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or (self._thread is not None and self._thread.is_alive()):
            return
        if now - self._looked > _OWN_PAUSE_SECONDS and self._thread is None:
            self._running_since = now
        self._looked, self._thread = now, None
        if (request := self._new_request()) is not None:
            self._begin(lambda: self._answer(request))
        elif reason := self._hang_reason(now):
            self._begin(lambda: self._end_hang(reason))

    def _begin(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=_reported, args=(work,), name="hang", daemon=True)
        self._thread.start()

    def _new_request(self) -> Request | None:
        request = latest_request(self._hang)
        if request is None or request == self._answered:
            return None
        self._answered = request
        return request

    def _hang_reason(self, now: float) -> str:
        """Why the ranks of this node are taken to hang; empty: they are not."""
        if self._config.hang_timeout == "none":
            return ""
        beats = [beat for beat in read_beats(self._local) if _is_there(beat.pid)]
        # started again: what comes now has other reasons
        if any(beat.since > self._hung_at for beat in beats):
            self._hung, self._hung_at = "", math.inf
        if self._waits_for_beats(beats, now) or (
            beats and not any(beat.since > self._judged for beat in beats)
        ):
            return ""
        limits = {beat: self._limit(beat) for beat in beats}
        over = [
            beat for beat, limit in limits.items() if elapsed_seconds(beat, now, self._running_since) > limit
        ]
        if len(over) < len(beats) or self._paused(beats):
            return ""
        if not beats:
            return f"start: no rank has come to its first heartbeat in {self._config.hang_timeout_other} s"
        first = min(over, key=lambda beat: (beat.iteration, beat.since))
        seconds = elapsed_seconds(first, now, self._running_since)
        return (
            f"iteration {first.iteration}, {first.phase}: no rank has gone on for {seconds:.1f} s, the limit"
            f" is {limits[first]:.1f} s"
        )

    def _limit(self, beat: Beat) -> float:
        return limit_seconds(beat, self._config.hang_timeout, self._config.hang_timeout_other)

    def _waits_for_beats(self, beats: Sequence[Beat], now: float) -> bool:
        """Whether ranks of the node have no beats and may still come to them, or are not there yet: torchrun
        waits for other nodes.
        """
        if len(beats) == self._config.gpus_per_node:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
        allowed = self._config.hang_timeout_other or math.inf
        if now - max(self._missing_since, self._running_since) <= allowed:
            return True
        without = set(ranks_of_node(self._local).values()) - {beat.pid for beat in beats}
        self._missing_since = now  # the next look at all processes is as far away
        if beats and not without:  # the others have come to their end, and these do not
            return False
        return not any(_age_seconds(pid) > allowed for pid in without)

    @staticmethod
    def _paused(beats: Sequence[Beat]) -> list[int]:
        return [beat.rank for beat in beats if beat.phase == PAUSED or is_traced(beat.pid)]

    def _busy(self) -> list[str]:
        """What speaks against a hang: a rank that may be where it is, for instance one that writes a trace
        for all.
        """
        now, beats = time.monotonic(), [beat for beat in read_beats(self._local) if _is_there(beat.pid)]
        found = [f"rank {rank} is paused, or a debugger holds it" for rank in self._paused(beats)]
        for beat in beats:
            seconds, limit = elapsed_seconds(beat, now, self._running_since), self._limit(beat)
            # nodes do not begin an iteration at the same moment
            if seconds < limit / 2 and beat.phase != PAUSED:
                found.append(
                    f"rank {beat.rank} is in {beat.phase} for {seconds:.1f} s, its limit is {limit:.0f} s"
                )
        return found

    def _answer(self, request: Request) -> bool | None:
        """Writes the stacks of this node for a request; for a hang, waits for the verdict and follows it.
        Returns that, None for none.
        """
        folder = self._hang / request.folder
        self._dump(folder, is_hang=request.kind == "hang")
        verdict = wait_for_verdict(folder, 2 * _ANSWER_SECONDS) if request.kind == "hang" else None
        if verdict:
            self._end_ranks()
        return verdict

    def _dump(self, folder: Path, *, is_hang: bool) -> None:
        config, host = self._config, os.uname().nodename
        ranks, busy = sorted(ranks_of_node(self._local)), self._busy()
        for done in (False, True):
            if done:
                dump_node(self._local, folder, calls=self._hang / "calls", is_hang=is_hang)
            write_answer(
                folder, Answer(config.node_rank, config.nnodes, config.world_size, host, ranks, busy, done)
            )

    def _end_hang(self, reason: str) -> None:
        """Has the stacks of all nodes written, and ends the ranks where it stays a hang."""
        before = {beat.rank: beat.since for beat in read_beats(self._local)}
        self._judged = max(before.values(), default=-math.inf)
        try:
            if (request := self._named_by_another()) is not None:
                is_hang = self._answer(request) is None  # that node has died over it
            else:
                is_hang = self._look_into(reason, before)
        except Exception:  # a full disk, for instance: the ranks hang all the same
            complain(
                f"the run hangs: {reason}; its stacks could not be written:",
                *traceback.format_exc().splitlines(),
            )
            is_hang = not self._doubt(before, [])
        if is_hang:
            self._end_ranks()

    def _look_into(self, reason: str, before: dict[int, float]) -> bool:
        """Asks all nodes for stacks, and says what they show; returns whether it is a hang."""
        request = ask(self._hang, "hang", reason)
        self._answered, folder = request, self._hang / request.folder
        self._dump(folder, is_hang=True)
        answers = wait_for_answers(folder, first_seconds=0, all_seconds=_ANSWER_SECONDS)
        summary = summarize(folder)
        write_atomically(folder / "summary.txt", summary.whole + "\n")
        doubt = self._doubt(before, answers)
        give_verdict(folder, is_hang=not doubt, reason=doubt)
        if doubt:
            self._say([f"no hang, though it looked like one: {doubt}; stacks in {folder}"])
            return False
        self._hung = f"the run hangs: {summary.line}; see {folder}"
        self._say(
            [self._hung, *summary.short.splitlines(), f"the ranks of the job are ended{self._what_comes()}"]
        )
        last = max(0, min((beat.iteration for beat in read_beats(self._local)), default=1) - 1)
        hosts = sorted({answer.host for answer in answers if set(answer.ranks) & set(summary.named)})
        details = {"ranks": sorted(summary.named), "hosts": hosts, "why": list(summary.named.values())}
        append_event(
            self._run.metrics,
            "hang",
            last,
            reason=reason,
            **details,
            folder=str(folder.relative_to(self._run.path)),
        )
        return True

    def _what_comes(self) -> str:
        """After the end of the ranks: another start, or none."""
        most = self._config.max_restarts
        try:
            number = int(failures_file(self._local).read_text()) + 1
        except (OSError, ValueError):  # the agent could not write it
            number = 1
        if number <= most:
            return f", and start again (failure {number} of at most {most})"
        return f", and the run with them: this is failure {number}, and MAX_RESTARTS={most}"

    def _named_by_another(self) -> Request | None:
        """Another node's request about the same hang; node 0 does not wait for one."""
        deadline = time.monotonic() + (_NAMING_SECONDS if self._config.node_rank else 0.0)
        while True:
            request = self._new_request()
            if request is not None and request.kind == "hang":
                return request
            if request is not None:
                self._answer(request)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_SECONDS / 2)

    def _doubt(self, before: dict[int, float], answers: Sequence[Answer]) -> str:
        """Why it is no hang after all; empty: it is one."""
        if busy := [reason for answer in answers for reason in answer.busy]:
            return busy[0]
        moved = [beat.rank for beat in read_beats(self._local) if before.get(beat.rank) != beat.since]
        return f"rank {moved[0]} has gone on meanwhile" if moved else ""

    def _end_ranks(self) -> None:
        self._hung_at = time.monotonic()
        with suppress(OSError):
            hung_file(self._local).touch()
        for pid in ranks_of_node(self._local).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # also one that is stopped, or holds the GIL

    def _say(self, lines: Sequence[str]) -> None:
        """To the screen and to train.log."""
        complain(*lines)
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), self._run.log.open("a", encoding="utf-8") as file:
            file.writelines(f"{stamp} {os.uname().nodename} {line}\n" for line in lines)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _age_seconds(pid: int) -> float:
    try:
        return time.time() - float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _reported(work: Callable[[], object]) -> None:
    """The job goes on, whatever the disk does to a look at it."""
    try:
        work()
    except Exception:
        print("moe-exp: warning: the stacks of this node could not be written:", file=sys.stderr)
        traceback.print_exc()
