"""Agent for long-running jobs. It takes torchrun's arguments but handles restarts and signals differently.

    python -m moe_exp.launch.agent --nproc-per-node 2 --master-port 29500 --max-restarts 3 \\
        -m moe_exp.train --num-experts 16

Unlike torchrun's agent, it forwards signals without terminating the ranks. It restarts the ranks of all nodes
if a rank fails or requests a restart, and records each restart in the run's metrics.jsonl. After more than
--max-restarts failures, the job ends. docs/architecture.md lists the private torchrun names used here.
"""

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_exp.host.processes import QuickExit

if __name__ == "__main__":
    gc.disable()  # as in moe_exp.train
    ending = QuickExit()

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import config_from_args, parse_args

from moe_exp.host import exit_codes
from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import complain, report_exit_code, reported_exit_code, show_alive
from moe_exp.host.processes import STOP_SIGNALS, send_signal, signals_blocked
from moe_exp.launch.rendezvous import RestartRendezvous
from moe_exp.runs.records import Record, append, event_record, last_records
from moe_exp.watch.hangs.heartbeat import FAILURES, HUNG, read_beats, standby_file

# Time for the ranks of a failed job to exit: they have nothing to save, and their peers are gone.
_END_SECONDS = 5
# Time for ranks to save if their launcher died.
_SAVE_SECONDS = 600.0
# Delay before a restart if no rank has trained since the last one; doubles each time, up to the longest.
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 5.0, 300.0
_STORAGE_DELAY_SECONDS = 60.0  # at least, after a storage fault
_CLOSING_SECONDS = 0.5  # a few times the interval at which other nodes read the store
_HUNG = "killed by its launcher because the run hung"


class StandBys:
    """Standby processes, one per rank of this node. They have done all imports, which dominate restart time.
    Each waits for the environment variables of its rank, and ends if the agent ends.
    """

    def __init__(self) -> None:
        self._commands: dict[str, tuple[Any, dict[str, str]]] = {}  # command, environment, by local rank
        self.waiting: dict[str, tuple[subprocess.Popen[bytes], int]] = {}  # process, pipe

    def start(self, folder: Path) -> None:
        """Starts the standby processes. Also imports the modules that this agent needs after failures.
        `folder`: heartbeat folder.
        """
        import moe_exp.watch.diagnosis  # noqa: F401

        for local_rank, (command, environ) in self._commands.items():
            reader, writer = os.pipe()
            environ = environ | {exit_codes.STANDS_BY: str(reader)}
            process = subprocess.Popen(command, env=environ, pass_fds=(reader,), start_new_session=True)
            os.close(reader)
            self.waiting[local_rank] = process, writer
            standby_file(folder, process.pid).touch()

    def start_rank(self, command: Any, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts a rank, in its standby process if there is one."""
        self._commands[environ["LOCAL_RANK"]] = command, environ
        if standby := self.waiting.pop(environ["LOCAL_RANK"], None):
            process, writer = standby
            standby_file(Path(environ[exit_codes.HEARTBEATS]), process.pid).unlink(missing_ok=True)
            with suppress(BrokenPipeError):  # it has ended
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(json.dumps(environ).encode())
                return process
        return subprocess.Popen(command, env=environ, start_new_session=True)

    def end(self) -> None:
        for process, _ in self.waiting.values():
            process.kill()


class Agent(LocalElasticAgent):
    """Runs the ranks of one node in rounds (see rendezvous.py). The caller appends each signal that it
    receives to `received`.
    """

    def __init__(self, spec: WorkerSpec, rounds: RestartRendezvous, received: Sequence[int], **options: Any):
        super().__init__(spec, **options)
        self._spec, self._rounds, self._received, self.standbys = spec, rounds, received, StandBys()
        self._stands_by = spec.max_restarts > 0
        self._signalled: set[tuple[int, int]] = set()  # pid and signal
        self._num_idle = 0  # consecutive rounds without a train record
        self._is_parted = False  # whether the connection to node 0 is lost
        self._parent = os.getppid()
        self._orphaned_at: float | None = None
        metrics = os.environ.get(exit_codes.METRICS_FILE)
        self._metrics = Path(metrics) if metrics else None
        self._unwritten: list[Record] = []  # events, while the disk is full

    def _invoke_run(self, role: str = "default") -> RunResult:
        failed = RunResult(WorkerState.FAILED)
        try:
            self._initialize_workers(self.get_worker_group())
            while True:
                time.sleep(self._spec.monitor_interval)
                show_alive()
                self._pass_signals_on()
                self._stand_by()
                result = self._check()
                if result is not None and (not result.is_failed() or not self._may_start_again()):
                    return result
                if self._has_moved() and not self._start_again():
                    return result or failed
        except RendezvousError as error:
            if not self._received:
                complain(f"the ranks cannot start: {error or 'the job has ended on another node'}")
        except (DistError, ConnectionError) as error:
            complain(f"lost node 0: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}")
        self._stop_workers(self.get_worker_group())
        return failed

    def _stand_by(self) -> None:
        """Starts standby processes once all ranks have trained a step; until then, ranks need the CPUs."""
        folder = os.environ.get(exit_codes.HEARTBEATS)
        if self._pcontext is None or self.standbys.waiting or not folder or not self._stands_by:
            return
        trained = {beat.pid for beat in read_beats(Path(folder)) if beat.iteration > 1}
        if trained.issuperset(self._pcontext.pids().values()):
            try:
                with signals_blocked():
                    self.standbys.start(Path(folder))
            except OSError as error:  # for instance no more processes, or a full disk; the ranks go on
                complain(f"warning: cannot start standby processes ({error.strerror}); restarts take longer")
                self._stands_by = False

    def _has_moved(self) -> bool:
        """Whether another node has ended the round; False while node 0 is unreachable."""
        try:
            return self._rounds.has_moved
        except DistError as error:
            # the ranks may use another network: let them continue
            is_back = self._rounds.reconnect()
            if not is_back and not self._is_parted:
                reason = str(error).splitlines()[0]
                complain(f"warning: node 0 does not respond ({reason}); the ranks continue")
            elif is_back:
                complain("node 0 responds again")
            self._is_parted = not is_back
            return False

    def _check(self) -> RunResult | None:
        """Result of this node's ranks. It is None while they run or if a rank requests a restart."""
        assert self._pcontext is not None
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        workers = self.get_worker_group().workers
        codes = {workers[number].global_rank: one.proc.poll() for number, one in handlers.items()}
        dead = [rank for rank, code in codes.items() if code not in (None, 0)]
        if dead:
            # Report first: terminating its neighbors takes time, in which ranks of other nodes may fail as a
            # consequence, and would be taken for the cause.
            self._rounds.say([self._described(rank) for rank in dead])
            with _quiet_if_explained():
                self._pcontext.close(signal.SIGTERM, _END_SECONDS)
        elif None in codes.values():
            # do not call torch's agent: its result would mix a rank that dies now with those it terminates
            return None
        with _quiet_if_explained():
            result = self._monitor_workers(self.get_worker_group())
        if result.state is WorkerState.SUCCEEDED:
            if reported_exit_code() == exit_codes.START_AGAIN:
                self._rounds.move_on()
                return None
            self._rounds.finish()
            return result
        # without the ranks that this agent terminated as a consequence
        own = {rank: result.failures[rank] for rank in dead if rank in result.failures}
        return RunResult(WorkerState.FAILED, failures=own)

    def _may_start_again(self) -> bool:
        """Reports a failure to the other nodes; returns False if the ranks must not restart."""
        reported = reported_exit_code()
        if reported == exit_codes.START_AGAIN:
            self._rounds.move_on()
        elif reported == exit_codes.BAD_INPUT:  # a restart would fail the same way
            if self.get_worker_group().group_rank == 0:
                self._record_failures(self._rounds.round)  # the rank has printed its error
            self._rounds.set_closed()
            return False
        elif reported is not None or self._rounds.num_done:
            self._rounds.finish()
            return False
        else:
            self._rounds.fail()
        return True

    def _described(self, rank: int) -> dict[str, Any]:
        """Describes a failed rank for node 0."""
        pcontext: Any = self._pcontext
        number = [worker.global_rank for worker in self.get_worker_group().workers].index(rank)
        process = pcontext.subprocess_handlers[number].proc
        failure = ProcessFailure(number, process.pid, process.poll(), pcontext.error_files[number])
        device = f"cuda:{number}" if count_gpus() else "cpu"
        return {"rank": rank, "host": socket.gethostname(), "device": device, "cause": cause(failure)}

    def _start_again(self) -> bool:
        """Ends the round and starts the next round; returns False if the job is over."""
        ended = self._rounds.round
        if self._received:  # new ranks would be stopped right away
            self._rounds.set_closed()
        was_asked = reported_exit_code() == exit_codes.START_AGAIN
        if was_asked or (self._received and not self._rounds.has_failed(ended)):
            report_exit_code(exit_codes.TO_BE_CONTINUED)  # in case no round follows
        self._stop_workers(self.get_worker_group())
        delay = self._report(ended) if self.get_worker_group().group_rank == 0 else 0.0
        if self._rounds.is_over:
            time.sleep(_CLOSING_SECONDS)  # node 0 serves the store in which the others read that
            return False
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline and not self._received and not self._rounds.is_over:
            show_alive()
            time.sleep(0.1)
        self._initialize_workers(self.get_worker_group())
        return True

    def _record_failures(self, ended: int) -> tuple[list[Record], int, list[dict[str, Any]]]:
        """Writes an event per failed rank. Returns recent records, the last logged iteration and failures."""
        records: list[Record] = []
        with suppress(OSError):  # no file yet, or the file system is unavailable
            records = last_records(self._metrics) if self._metrics else []
        trained = (record.get("iteration", 0) for record in records if record.get("kind") == "train")
        iteration = max(trained, default=0)
        # not those caused by a lost peer or a hang, which has its own event
        said = self._rounds.said(ended)
        own = [one for one in said if not any(text in one["cause"] for text in exit_codes.CAUSED_BY_ANOTHER)]
        failures = [one for one in own or said if one["cause"] != _HUNG]
        for failure in failures:
            self._event("rank_failed", iteration, **failure)
        return records, iteration, failures

    def _report(self, ended: int) -> float:
        """Writes the events of an ended round; returns the delay in seconds before the next round."""
        records, iteration, failures = self._record_failures(ended)
        for failure in failures:
            where = f"rank {failure['rank']} on {failure['host']} ({failure['device']})"
            complain(f"{where} has failed after iteration {iteration}: {failure['cause']}")
        action = self._diagnosed(records, iteration, failures) if failures and not self._received else ""
        num_failures, most = self._rounds.num_failures, self._spec.max_restarts
        if self._rounds.is_over:
            if action not in ("stop", "exclude") and num_failures > most > 0 and not self._received:
                complain(f"the ranks are not restarted: failure {num_failures} exceeds MAX_RESTARTS={most}")
            return 0.0
        starts = ("start", "resume", "restart")
        kinds = [r.get("kind") for r in records if r.get("kind") == "train" or r.get("event") in starts]
        self._num_idle = 0 if kinds[-1:] == ["train"] else self._num_idle + 1
        delay = _STORAGE_DELAY_SECONDS if action == "wait" else 0.0
        if self._num_idle:
            # no rank has trained since the last start: the next one may fail too, so avoid a tight loop
            delay = max(delay, min(_FIRST_DELAY_SECONDS * 2 ** (self._num_idle - 1), _LONGEST_DELAY_SECONDS))
        reason = "failure" if self._rounds.has_failed(ended) else "asked"
        details = {"number": ended + 1, "reason": reason, "failures": num_failures, "delay_seconds": delay}
        self._event("restart", iteration, **details)
        why = f"failure {num_failures} of at most {most}" if reason == "failure" else "requested by a rank"
        why_late = "because no rank has trained since the last start"
        why_late = "for the storage to recover" if action == "wait" else why_late
        when = f", in {delay:.0f} s {why_late}" if delay else ""
        complain(f"the ranks are restarting ({why}){when}")
        return delay

    def _diagnosed(self, records: Sequence[Record], iteration: int, failures: Sequence[Record]) -> str:
        """Returns the action advised for failures. If advised, first excludes a bad node or ends the job."""
        # imported here, because only failures need the tables and their packages
        from moe_exp.watch.diagnosis import diagnose_failures
        from moe_exp.watch.excluded_nodes import exclude_if_possible

        found = diagnose_failures(records, failures)
        self._event("diagnosis", iteration, **vars(found))
        complain(f"diagnosis: {found.text}")
        if found.action == "stop":
            report_exit_code(exit_codes.WOULD_REPEAT, by_any_rank=True)
            self._rounds.set_closed()
        elif found.action == "exclude" and found.host:
            if (path := os.environ.get(exit_codes.EXCLUDE_FILE)) is not None:
                exclude_if_possible(Path(path), found.host, f"diagnosis: {found.reason}")
            if "SLURM_JOB_ID" in os.environ and (self.get_worker_group().group_world_size or 1) > 1:
                self._rounds.set_closed()  # only another job has other nodes
        return found.action

    def _event(self, name: str, iteration: int, /, **details: Any) -> None:
        """Writes an event. If the disk is full, keeps it for the next write and raises no error."""
        if self._metrics is None or not self._metrics.parent.is_dir():
            return
        self._unwritten.append(event_record(name, iteration, **details))
        try:
            append(self._metrics, *self._unwritten)
        except OSError as error:
            what = f"cannot write the event {name} to {self._metrics} ({error.strerror or error})"
            complain(f"warning: {what}; it will be written with the next event")
        else:
            self._unwritten = []

    def _pass_signals_on(self) -> None:
        """Forwards every received signal once to every rank, including ranks that start later."""
        if self._pcontext is None:
            return
        # instead of torchrun, which would terminate the ranks after 30 s, too short for a checkpoint
        for number in dict.fromkeys(self._received):
            for pid in self._pcontext.pids().values():
                if (pid, number) not in self._signalled:
                    self._signalled.add((pid, number))
                    send_signal(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if os.getppid() != self._parent:
            # the launcher was killed (which sent SIGTERM): now only the agent can terminate hung ranks
            self._orphaned_at = self._orphaned_at or time.monotonic()
            if time.monotonic() - self._orphaned_at > _SAVE_SECONDS:
                self._rounds.set_closed()

    # Overrides of torchrun's agent

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torchrun derives TORCHELASTIC_RESTART_COUNT from this: make it the round
        self._remaining_restarts = self._spec.max_restarts - self._rounds.round
        if code_file := os.environ.get(exit_codes.EXIT_CODE_FILE):
            Path(code_file).unlink(missing_ok=True)
        if heartbeats := os.environ.get(exit_codes.HEARTBEATS):
            Path(heartbeats, HUNG).unlink(missing_ok=True)
            with suppress(OSError):  # a full disk
                Path(heartbeats, FAILURES).write_text(str(self._rounds.num_failures))
        # a signal during a rank's imports stays pending until the rank has a handler (`faults.stop_signal`)
        with signals_blocked():
            handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
            ids = super()._start_workers(worker_group)
            for number, handler in handlers.items():
                signal.signal(number, handler)  # torch before 2.9 installs its own, which raise
            return ids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _END_SECONDS) -> None:
        # without torch's timeout argument, which older versions such as 2.11 lack: they wait 30 s
        if self._pcontext is not None:
            self._pcontext.close(death_sig, _END_SECONDS)
        super()._shutdown(death_sig)


def cause(failure: ProcessFailure) -> str:
    """One-line error of a rank: its signal, else the message in its error file, else its exit code."""
    if failure.exitcode == -signal.SIGKILL and _has_hung():
        return _HUNG
    if failure.exitcode < 0:
        return str(failure.signal_name())
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return str(message.get("message", "")).splitlines()[0]
    return f"exit code {failure.exitcode}"


def _has_hung() -> bool:
    """Whether this node's launcher killed the ranks because of a hang."""
    return Path(os.environ.get(exit_codes.HEARTBEATS, "none"), HUNG).exists()


@contextmanager
def _quiet_if_explained() -> Iterator[None]:
    """Silences torchrun's messages about ended ranks if a hang or a reported exit code explains the exits."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before = logger.disabled
    logger.disabled = before or _has_hung() or reported_exit_code() is not None
    try:
        yield
    finally:
        logger.disabled = before


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this node's ranks; returns the exit code. `argv`: torchrun's options for a static rendezvous."""
    received: list[int] = []

    def is_stopping() -> bool:  # polled while the agent waits for other nodes
        show_alive()
        return bool(received)

    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    # QuickExit blocked them during the imports: deliver those that arrived
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    args = parse_args(argv)
    config, command, arguments = config_from_args(args)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # this file handles the others
    rounds = RestartRendezvous(
        args.master_addr, int(args.master_port), node_rank=args.node_rank, num_nodes=config.max_nodes,
        max_restarts=config.max_restarts, is_stopping=is_stopping,
        key=os.environ.get(exit_codes.RENDEZVOUS_KEY, ""),
    )  # fmt: skip
    spec = WorkerSpec(
        role=config.role, local_world_size=config.nproc_per_node, entrypoint=command, args=tuple(arguments),
        rdzv_handler=rounds, max_restarts=config.max_restarts, monitor_interval=config.monitor_interval,
    )  # fmt: skip
    assert config.logs_specs is not None
    agent = Agent(spec, rounds, received, logs_specs=config.logs_specs, start_method=config.start_method)
    SubprocessHandler._popen = lambda _, *args: agent.standbys.start_rank(*args)  # type: ignore[method-assign]
    result = agent.run()
    agent.standbys.end()
    if not result.is_failed():
        return exit_codes.FINISHED
    if result.failures and reported_exit_code() is None and not _has_hung():
        print(ChildFailedError(args.training_script, result.failures), file=sys.stderr, flush=True)
    return exit_codes.FAILED


if __name__ == "__main__":
    gc.enable()
    ending.code = main()
