"""torchrun for runs of weeks: the same command line and the same agent, which starts ranks again and leaves
signals to them.

    python -m moe_exp.launch.agent --nproc-per-node 2 --master-port 29500 --max-restarts 3 \\
        -m moe_exp.train --num-experts 16

What is other than in torchrun:

- SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the ranks, and nothing else: torchrun would end them
  within 30 seconds, which is too short for a checkpoint. So a signal may reach every process of a job. Ranks
  are born with these signals blocked, so that one that comes while they still import waits until they answer
  it (`faults.stop_signal`).
- After a failure the ranks start again on every node, up to --max-restarts times in the whole job, by
  `rendezvous.Rounds`.
- Ranks that ask for it (exit code START_AGAIN, see host/devices.py) start again too, which is no failure.
- What has failed is in the run's metrics.jsonl, as the events `rank_failed` and `restart`, written by node 0.

It rests on the methods of torchrun's agent that are made to be overridden, and on `_pcontext`, which has its
processes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import config_from_args, parse_args

from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import (
    CAUSED_BY_ANOTHER,
    EXIT_CODE_FILE,
    FAILED,
    FINISHED,
    HEARTBEATS,
    METRICS_FILE,
    START_AGAIN,
    TO_BE_CONTINUED,
    complain,
    tell_launcher,
    told_exit_code,
)
from moe_exp.host.processes import STOP_SIGNALS, signals_blocked
from moe_exp.launch.rendezvous import Rounds
from moe_exp.runs.records import Record, append, event_record, last_records
from moe_exp.watch.hangs.heartbeat import failures_file, hung_file

# What ranks of a job that has failed get to end by themselves: they have nothing to save, and their peers are
# gone.
_END_SECONDS = 5
# What they get where their launcher has died: they save, if they can.
_SAVE_SECONDS = 600.0
# Before ranks that have failed without a single record start again, doubled each time, at most.
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 5.0, 300.0
_HUNG = "ended by its launcher, as the run hung"


class Agent(LocalElasticAgent):
    """Runs the ranks of one node, round after round.

    Args:
        spec: what torchrun's agent runs.
        rounds: the spec's rendezvous.
        received: signals that this process got, in order; they are added while it runs.
        options: of torchrun's agent.
    """

    def __init__(self, spec: WorkerSpec, rounds: Rounds, received: Sequence[int], **options: Any):
        super().__init__(spec, shutdown_timeout=_END_SECONDS, **options)
        self._spec, self._rounds, self._received = spec, rounds, received
        self._told: set[tuple[int, int]] = set()  # process id and signal
        self._num_idle = 0  # rounds in a row without a train record
        self._parent = os.getppid()
        self._orphaned_at: float | None = None
        self._metrics = Path(os.environ[METRICS_FILE]) if os.environ.get(METRICS_FILE) else None
        self._unwritten: list[Record] = []  # events, while the disk is full

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Starts the ranks, and looks after them until the job ends."""
        failed = RunResult(WorkerState.FAILED)
        try:
            self._initialize_workers(self._worker_group)
            while True:
                time.sleep(self._spec.monitor_interval)
                self._pass_signals_on()
                result = self._look()
                if result is not None and (
                    result.state is WorkerState.SUCCEEDED or not self._may_start_again(result)
                ):
                    return result
                if self._rounds.has_moved and not self._start_again():
                    return result or failed
        except RendezvousError as error:
            if not self._received:
                complain(f"the ranks do not start: {error or 'the job has ended on another node'}")
        except DistError as error:
            complain(f"node 0 is gone: {str(error).splitlines()[0]}")
        self._stop_workers(self._worker_group)
        return failed

    def _look(self) -> RunResult | None:
        """How the ranks of this node have ended; None: they have not, or they want to start again."""
        assert self._pcontext is not None
        codes = self._exit_codes()
        dead = [rank for rank, code in codes.items() if code not in (None, 0)]
        if dead:
            # Before its neighbours are ended, which may take as long as ranks of other nodes need to end
            # because of it.
            self._rounds.say([self._described(self._failure(rank)) for rank in dead])
            self._pcontext.close(signal.SIGTERM, _END_SECONDS)
        elif None in codes.values():
            # without a look by torch's agent, in whose result one that dies just now could not be told from
            # those it ends
            return None
        with _quiet_if_hung():
            result = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.SUCCEEDED:
            if told_exit_code() == START_AGAIN:
                self._rounds.move_on()
                return None
            self._rounds.mark_done()
            self._exit_barrier()
            return result
        # Without those that this agent has ended because of them.
        return RunResult(
            WorkerState.FAILED,
            failures={rank: result.failures[rank] for rank in dead if rank in result.failures},
        )

    def _exit_codes(self) -> dict[int, int | None]:
        """Of the ranks of this node; None: it runs."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {
            self._worker_group.workers[number].global_rank: handler.proc.poll()
            for number, handler in handlers.items()
        }

    def _may_start_again(self, result: RunResult) -> bool:
        """Tells the other nodes that ranks have failed. False: the job had come to its end, and its last
        steps are all that failed.
        """
        told = told_exit_code()
        if told == START_AGAIN:
            self._rounds.move_on()
        elif told is not None or self._rounds.is_done:
            self._rounds.mark_done()
            self._exit_barrier()
            return False
        else:
            self._rounds.fail()
        return True

    def _failure(self, rank: int) -> ProcessFailure:
        """Of a rank that has died."""
        pcontext: Any = self._pcontext
        number = next(
            number for number, worker in enumerate(self._worker_group.workers) if worker.global_rank == rank
        )
        process = pcontext.subprocess_handlers[number].proc
        return ProcessFailure(number, process.pid, process.poll(), pcontext.error_files[number])

    def _described(self, failure: ProcessFailure) -> dict[str, Any]:
        device = f"cuda:{failure.local_rank}" if count_gpus() else "cpu"
        rank = self._worker_group.workers[failure.local_rank].global_rank
        return {"rank": rank, "host": socket.gethostname(), "device": device, "cause": cause(failure)}

    def _start_again(self) -> bool:
        """Ends the round, and begins the next one; False: the job is over."""
        ended = self._rounds.round
        if self._received:  # they would only start to be stopped
            self._rounds.set_closed()
        if told_exit_code() == START_AGAIN or (self._received and not self._rounds.has_failed(ended)):
            tell_launcher(TO_BE_CONTINUED)  # counts where no other round comes
        self._stop_workers(self._worker_group)
        delay = self._tell(ended) if self._worker_group.group_rank == 0 else 0.0
        if self._rounds.is_over:
            return False
        self._sleep(delay)
        self._initialize_workers(self._worker_group)
        return True

    def _tell(self, ended: int) -> float:
        """Writes the events of a round that has ended; returns the seconds to wait before the next one."""
        records = self._last_records()
        iteration = max(
            (record.get("iteration", 0) for record in records if record.get("kind") == "train"), default=0
        )
        for failure in _blamed(self._rounds.said(ended)):
            self._event("rank_failed", iteration, **failure)
            where = f"rank {failure['rank']} on {failure['host']} ({failure['device']})"
            complain(f"{where} has failed after iteration {iteration}: {failure['cause']}")
        num_failures, most = self._rounds.num_failures, self._spec.max_restarts
        if self._rounds.is_over:
            if most and not self._received:
                complain(
                    f"the ranks do not start again: that was failure {num_failures}, and MAX_RESTARTS={most}"
                )
            return 0.0
        self._num_idle = 0 if _has_trained(records) else self._num_idle + 1
        delay = (
            min(_FIRST_DELAY_SECONDS * 2 ** (self._num_idle - 1), _LONGEST_DELAY_SECONDS)
            if self._num_idle
            else 0.0
        )
        reason = "failure" if self._rounds.has_failed(ended) else "asked"
        self._event(
            "restart", iteration, number=ended + 1, reason=reason, failures=num_failures, delay_seconds=delay
        )
        why = f"failure {num_failures} of at most {most}" if reason == "failure" else "as they have asked to"
        complain(
            f"the ranks start again ({why})" + (f", in {delay:.0f} s as none has trained" if delay else "")
        )
        return delay

    def _event(self, name: str, iteration: int, /, **details: Any) -> None:
        """On a full disk it waits for the next one, and the ranks start again all the same."""
        if self._metrics is None or not self._metrics.parent.is_dir():
            return
        self._unwritten.append(event_record(name, iteration, **details))
        try:
            append(self._metrics, *self._unwritten)
        except OSError as error:
            complain(
                f"warning: {self._metrics} has no event {name} ({error.strerror or error}): it is kept until"
                " the next one"
            )
        else:
            self._unwritten = []

    def _last_records(self) -> list[Record]:
        try:
            return last_records(self._metrics) if self._metrics else []
        except OSError:  # none is there yet, or the file system is gone
            return []

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._received:
            time.sleep(0.1)

    def _pass_signals_on(self) -> None:
        """Every signal once to every rank, those that start after it too."""
        if self._pcontext is None:
            return
        for number in dict.fromkeys(self._received):
            for pid in self._pcontext.pids().values():
                if (pid, number) not in self._told:
                    self._told.add((pid, number))
                    _send(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if os.getppid() != self._parent:
            self._end_orphaned()

    def _end_orphaned(self) -> None:
        """The launcher was killed, of which the system tells by SIGTERM: nobody else would end ranks that
        hang.
        """
        self._orphaned_at = self._orphaned_at or time.monotonic()
        if time.monotonic() - self._orphaned_at > _SAVE_SECONDS:
            self._rounds.set_closed()

    # Overridden: torchrun's own

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # so that TORCHELASTIC_RESTART_COUNT is the round
        self._remaining_restarts = self._spec.max_restarts - self._rounds.round
        if os.environ.get(EXIT_CODE_FILE):
            Path(os.environ[EXIT_CODE_FILE]).unlink(missing_ok=True)
        if os.environ.get(HEARTBEATS):
            hung_file(Path(os.environ[HEARTBEATS])).unlink(missing_ok=True)
            with suppress(OSError):  # a full disk
                failures_file(Path(os.environ[HEARTBEATS])).write_text(str(self._rounds.num_failures))
        with signals_blocked():
            return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=_END_SECONDS)


def cause(failure: ProcessFailure) -> str:
    """The error of a rank in a line as `faults` has left it, or the signal that ended it, or its exit
    code.
    """
    if failure.exitcode == -signal.SIGKILL and _has_hung():
        return _HUNG
    if failure.exitcode < 0:
        return str(failure.signal_name())
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message.get("message", "")).splitlines()[0]
    return f"exit code {failure.exitcode}"


def _has_hung() -> bool:
    """Whether the launcher of this node has ended its ranks, as the run hung."""
    return hung_file(Path(os.environ.get(HEARTBEATS, "none"))).exists()


@contextmanager
def _quiet_if_hung() -> Iterator[None]:
    """torchrun would name the first rank that the launcher has ended as the one that failed; the hang's lines
    name the cause.
    """
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before = logger.disabled
    logger.disabled = before or _has_hung()
    try:
        yield
    finally:
        logger.disabled = before


def _blamed(failures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that have failed by themselves: not those that lost a peer, and of a run that hung none, which
    has an event of its own.
    """
    own = [failure for failure in failures if not any(text in failure["cause"] for text in CAUSED_BY_ANOTHER)]
    return [failure for failure in own or failures if failure["cause"] != _HUNG]


def _has_trained(records: Sequence[dict[str, Any]]) -> bool:
    """Whether there is a train record since the last start."""
    for record in reversed(records):
        if record.get("kind") == "train":
            return True
        if record.get("event") in ("start", "resume", "restart"):
            return False
    return False


def _send(pid: int, number: int) -> None:
    # It may have ended meanwhile.
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks of this node by a command line of torchrun's with a static rendezvous; returns an exit
    code.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, receive)
    # now comes what was sent while this process imported
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    args = parse_args(argv)
    config, command, arguments = config_from_args(args)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are ours
    rounds = Rounds(
        args.master_addr,
        int(args.master_port),
        node_rank=args.node_rank,
        num_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        is_stopping=lambda: bool(received),
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=rounds,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
    )
    assert config.logs_specs is not None
    result = Agent(
        spec, rounds, received, logs_specs=config.logs_specs, start_method=config.start_method
    ).run()
    if not result.is_failed():
        return FINISHED
    if result.failures and told_exit_code() is None and not _has_hung():
        print(ChildFailedError(args.training_script, result.failures), file=sys.stderr, flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
