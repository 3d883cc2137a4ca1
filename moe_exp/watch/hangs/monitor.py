"""The launcher's hang detection: monitors ranks by heartbeats; kills hung ranks after saving their stacks.

The launcher's loop calls `HangWatch.poll`, which costs a few small reads a second; slower work runs in a
thread. A false alarm costs a restart, which is worse than a late alarm. So a run counts as hung only if

- every rank of the node is over its limit (`limit_seconds`),
- on every node, each rank has reached half of its limit and is neither paused nor under a debugger, and
- no rank of the node makes progress before all stacks are written.

Limits use the host's monotonic clock, which stops during suspend. Time does not count
while the launcher is stopped (frozen container, suspended SLURM job), because the ranks are stopped too.
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
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil

from moe_exp.config import Config
from moe_exp.host.exit_codes import HEARTBEATS, complain
from moe_exp.host.files import write_atomically, write_json
from moe_exp.host.processes import send_signal
from moe_exp.runs.records import append_event
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs import files, heartbeat
from moe_exp.watch.hangs.dump import dump_node, is_traced, nccl_environment, ranks_of_node
from moe_exp.watch.hangs.files import Answer, Request
from moe_exp.watch.hangs.heartbeat import ITERATION_PHASES, PAUSED, Heartbeat, read_beats
from moe_exp.watch.hangs.stacks import summarize

# for HANG_TIMEOUT=auto: a shared file system can stall for a minute or two without harm
LEAST_SECONDS = 180.0
_FACTOR = 10
_LEAST_ITERATIONS = 3  # needed for the median of HANG_TIMEOUT=auto
_LOOK_SECONDS = 1.0
# after a stop request, hung ranks cannot save, so there is no point in waiting for HANG_TIMEOUT
_STOP_SECONDS, _STOP_FACTOR = 30.0, 3
_OWN_PAUSE_SECONDS = 10.0  # a longer gap between two checks means that this process was stopped
_NAMING_SECONDS = 10.0  # how long other nodes wait for node 0 to create the folder
_ANSWER_SECONDS = 120.0  # time for the other nodes to write their stacks


def limit_seconds(beat: Heartbeat, hang_timeout: str, other_seconds: int | None) -> float:
    """Time limit of a rank's iteration, or of its phase outside of iterations.

    `hang_timeout`: auto, none or seconds. `other_seconds`: limit outside of iterations; None: no
    limit. Until enough iterations have been timed, `other_seconds` also limits iterations.
    """
    other = math.inf if other_seconds is None else float(other_seconds)
    if hang_timeout == "none" or beat.phase == PAUSED:
        return math.inf
    is_auto = hang_timeout == "auto"
    if beat.phase not in ITERATION_PHASES or len(beat.durations) < (_LEAST_ITERATIONS if is_auto else 1):
        return other
    # durations are per micro-batch, since a batch size ramp makes iterations longer
    usual = statistics.median(beat.durations) * beat.num_microbatches
    return max(LEAST_SECONDS, _FACTOR * usual) if is_auto else float(hang_timeout)


def elapsed_seconds(beat: Heartbeat, now: float, running_since: float) -> float:
    """Seconds that a rank has spent in its iteration or phase. Pauses of this process do not count."""
    spent = beat.spent if beat.phase in ITERATION_PHASES else 0.0
    return spent + now - max(beat.since, running_since)


class HangWatch(AbstractContextManager["HangWatch"]):
    """Context manager that monitors this node's ranks; start them with the variables in `environment`."""

    def __init__(self, config: Config, run: RunFolder):
        self._config, self._run, self._hang = config, run, run.path / "hang"
        self._local = Path(tempfile.mkdtemp(prefix="moe_exp_heartbeats_"))
        self._looked = self._running_since = time.monotonic()
        self._missing_since: float | None = None
        self._judged = -math.inf  # start of the newest phase that was already examined
        self._answered = files.latest_request(self._hang)
        self._thread: threading.Thread | None = None
        self._hung, self._hung_at, self._stopping_since = "", math.inf, math.inf

    def __exit__(self, *_: object) -> None:
        self.wait()
        if self._hung:  # repeated after torchrun's report on the killed ranks, which hides the cause
            complain(self._hung)
        shutil.rmtree(self._local, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        return {HEARTBEATS: str(self._local), **nccl_environment(self._local)}

    def wait(self, seconds: float = 5.0) -> None:
        """Waits at most `seconds` for the work that `poll` started."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self, is_stopping: bool = False) -> bool:
        """Checks the ranks at most once a second. A thread handles hangs and requests for stacks.
        Returns whether the ranks were killed and have not restarted yet. `is_stopping`: a stop was requested.
        """
        now = time.monotonic()
        self._stopping_since = min(self._stopping_since, now) if is_stopping else math.inf
        if now - self._looked < _LOOK_SECONDS or (self._thread and self._thread.is_alive()):
            return self._hung_at < math.inf
        # if a thread was running, its work may explain the gap
        if now - self._looked > _OWN_PAUSE_SECONDS and self._thread is None:
            self._running_since = now
        self._looked, self._thread = now, None
        watches = self._config.hang_timeout != "none"
        if (request := self._new_request()) is not None:
            self._begin(lambda: self._answer(request))
        elif watches and (reason := self._hang_reason(now)):
            self._begin(lambda: self._end_hang(reason))
        elif watches and self._hangs_at_stop(now):
            complain("no rank has made progress since the stop request; killing ranks without a checkpoint")
            self._end_ranks()
        return self._hung_at < math.inf

    def _begin(self, work: Callable[[], object]) -> None:
        """Runs `work` in a thread; its errors, such as a full disk, do not end the job."""

        def reported() -> None:
            try:
                work()
            except Exception:
                print("moe-exp: warning: cannot write the stacks of this node:", file=sys.stderr)
                traceback.print_exc()

        self._thread = threading.Thread(target=reported, name="hang", daemon=True)
        self._thread.start()

    def _new_request(self) -> Request | None:
        before, self._answered = self._answered, files.latest_request(self._hang) or self._answered
        return self._answered if self._answered != before else None

    def _hang_reason(self, now: float) -> str:
        """Reason to suspect that this node's ranks hang; '' if there is no reason."""
        beats = self._live_beats()
        # new heartbeats: the ranks were restarted
        if any(beat.since > self._hung_at for beat in beats):
            self._hung, self._hung_at = "", math.inf
        # examine the same standstill only once
        was_judged = beats and not any(beat.since > self._judged for beat in beats)
        if self._waits_for_beats(beats, now) or was_judged:
            return ""
        limits = {beat: self._limit(beat) for beat in beats}
        over = [beat for beat in beats if elapsed_seconds(beat, now, self._running_since) > limits[beat]]
        if len(over) < len(beats) or self._paused(beats):
            return ""
        if not beats:
            return f"start: no heartbeat from any rank in {self._config.hang_timeout_other} s"
        first = min(over, key=lambda beat: (beat.iteration, beat.since))
        seconds = elapsed_seconds(first, now, self._running_since)
        place = f"iteration {first.iteration}, {first.phase}"
        return f"{place}: no progress on any rank for {seconds:.1f} s (limit {limits[first]:.1f} s)"

    def _hangs_at_stop(self, now: float) -> bool:
        """Whether all ranks of this node are stuck after a stop request. Other nodes are not checked."""
        since = max(self._stopping_since, self._running_since)
        if now - since < _STOP_SECONDS or self._hung_at < math.inf:
            return False
        beats = self._live_beats()
        # saving and loading may take a long time without a heartbeat
        are_training = all(beat.phase in ITERATION_PHASES and beat.durations for beat in beats)
        if len(beats) != self._config.gpus_per_node or self._paused(beats) or not are_training:
            return False
        usual = (statistics.median(beat.durations) * beat.num_microbatches for beat in beats)
        limits = (max(_STOP_SECONDS, _STOP_FACTOR * seconds) for seconds in usual)
        return all(now - max(since, beat.since) > limit for beat, limit in zip(beats, limits, strict=True))

    def _live_beats(self) -> list[Heartbeat]:
        return [beat for beat in read_beats(self._local) if psutil.pid_exists(beat.pid)]

    def _limit(self, beat: Heartbeat) -> float:
        return limit_seconds(beat, self._config.hang_timeout, self._config.hang_timeout_other)

    def _waits_for_beats(self, beats: Sequence[Heartbeat], now: float) -> bool:
        """Whether missing heartbeats may still arrive, for instance while torchrun waits for other nodes."""
        if len(beats) == self._config.gpus_per_node:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
        allowed = self._config.hang_timeout_other or math.inf
        if now - max(self._missing_since, self._running_since) <= allowed:
            return True
        without = set(ranks_of_node(self._local).values()) - {beat.pid for beat in beats}
        self._missing_since = now  # a scan of all processes is slow: the next one only after the same time
        if beats and not without:  # the other ranks have finished
            return False
        for pid in without:
            with suppress(psutil.Error):
                if time.time() - float(psutil.Process(pid).create_time()) > allowed:
                    return False
        return True

    @staticmethod
    def _paused(beats: Sequence[Heartbeat]) -> list[int]:
        return [beat.rank for beat in beats if beat.phase == PAUSED or is_traced(beat.pid)]

    def _answer(self, request: Request) -> bool | None:
        """Writes this node's stacks. Returns a hang's verdict (or None); a True verdict ends the ranks."""
        folder = self._hang / request.folder
        self._dump(folder, is_hang=request.kind == "hang")
        # the requesting launcher decides for all nodes, since it reads the answers of all
        verdict = files.wait_for_verdict(folder, 2 * _ANSWER_SECONDS) if request.kind == "hang" else None
        if verdict:
            self._end_ranks()
        return verdict

    def _dump(self, folder: Path, *, is_hang: bool) -> None:
        config, ranks = self._config, sorted(ranks_of_node(self._local))
        now, beats = time.monotonic(), self._live_beats()
        # evidence against a hang: ranks far from their limits, for instance one that writes a trace
        busy = [f"rank {rank} is paused or under a debugger" for rank in self._paused(beats)]
        for beat in beats:
            seconds, limit = elapsed_seconds(beat, now, self._running_since), self._limit(beat)
            # half the limit, since nodes do not start an iteration at the same moment
            if seconds < limit / 2 and beat.phase != PAUSED:
                where = f"rank {beat.rank} has been in {beat.phase} for {seconds:.1f} s"
                busy.append(f"{where} (limit {limit:.0f} s)")
        place = config.node_rank, config.nnodes, config.world_size, os.uname().nodename
        answer = Answer(*place, ranks, busy, done=False)
        files.write_answer(folder, answer)
        dump_node(self._local, folder, calls=self._hang / "calls", is_hang=is_hang)
        files.write_answer(folder, replace(answer, done=True))

    def _end_hang(self, reason: str) -> None:
        """Collects the stacks of all nodes, and kills the ranks if the hang is confirmed."""
        before = {beat.rank: beat.since for beat in read_beats(self._local)}
        self._judged = max(before.values(), default=-math.inf)
        try:
            if (request := self._named_by_another()) is not None:
                is_hang = self._answer(request) is None  # the other node died while handling it
            else:
                is_hang = self._investigate(reason, before)
        except Exception:  # for instance on a full disk, the ranks must still be restarted
            what = f"the run hangs: {reason}; its stacks could not be written:"
            complain(what, *traceback.format_exc().splitlines())
            is_hang = not self._doubt(before, [])
        if is_hang:
            self._end_ranks()

    def _investigate(self, reason: str, before: dict[int, float]) -> bool:
        """Requests the stacks of all nodes, reports a summary, and returns whether the run hangs."""
        request = files.ask(self._hang, "hang", reason)
        self._answered, folder = request, self._hang / request.folder
        self._dump(folder, is_hang=True)
        answers = files.wait_for_answers(folder, first_seconds=0, all_seconds=_ANSWER_SECONDS)
        summary = summarize(folder)
        write_atomically(folder / "summary.txt", summary.whole + "\n")
        doubt = self._doubt(before, answers)
        write_json(folder / "verdict.json", {"is_hang": not doubt, "reason": doubt})
        if doubt:
            self._say([f"suspected a hang, but {doubt}; stacks in {folder}"])
            return False
        self._hung = f"the run hangs: {summary.line}; see {folder}"
        most, failure = self._config.max_restarts, 1
        with suppress(OSError, ValueError):  # the agent could not write it
            failure = int((self._local / heartbeat.FAILURES).read_text()) + 1
        end = f"the ranks are killed and restarted (failure {failure} of at most {most})"
        if failure > most:
            end = f"the ranks are killed and not restarted: failure {failure} exceeds MAX_RESTARTS={most}"
        self._say([self._hung, *summary.short.splitlines(), end])
        last = max(0, min((beat.iteration for beat in read_beats(self._local)), default=1) - 1)
        hosts = sorted({answer.host for answer in answers if set(answer.ranks) & set(summary.named)})
        named, place = summary.named, str(folder.relative_to(self._run.path))
        details = {"ranks": sorted(named), "hosts": hosts, "why": list(named.values()), "folder": place}
        append_event(self._run.metrics, "hang", last, reason=reason, **details)
        return True

    def _named_by_another(self) -> Request | None:
        """Another node's request for this hang, or None. All nodes but node 0 wait a while for a request."""
        # all nodes detect the hang at about the same time, and their stacks belong in one folder
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
        """Evidence that the run does not hang, or ''."""
        if busy := [reason for answer in answers for reason in answer.busy]:
            return busy[0]
        moved = [beat.rank for beat in read_beats(self._local) if before.get(beat.rank) != beat.since]
        return f"rank {moved[0]} has made progress" if moved else ""

    def _end_ranks(self) -> None:
        self._hung_at = time.monotonic()
        # before the signals: by this file, the agent tells a hang from an ordinary SIGKILL
        with suppress(OSError):
            (self._local / heartbeat.HUNG).touch()
        for pid in ranks_of_node(self._local).values():
            send_signal(pid, signal.SIGKILL)  # works even if the process is stopped or holds the GIL

    def _say(self, lines: Sequence[str]) -> None:
        """Prints lines to stderr and train.log."""
        complain(*lines)
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), self._run.log.open("a", encoding="utf-8") as file:
            file.writelines(f"{stamp} {os.uname().nodename} {line}\n" for line in lines)
