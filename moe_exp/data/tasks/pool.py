"""Worker processes that get calls one by one, so that the call of one that is killed is known at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from moe_exp.host.processes import worker_context

AGAIN = "call the same command again, it continues with the tasks that are left"
T = TypeVar("T")


class WorkerPool:
    """Processes that call a function, or this one if one is enough; for a `with` statement.

    Args:
        function: takes one argument, a call; travels to the processes by pickle.
        number: of processes.
        preload: module that they have imported, see `worker_context`.
        describe: names a call in an error, and adds a sentence to its fix.
    """

    def __init__(
        self,
        function: Callable[[Any], object],
        number: int,
        *,
        preload: str,
        describe: Callable[[Any], tuple[str, str]],
    ):
        self._function, self._describe = function, describe
        self._workers = [_Worker(function, preload) for _ in range(number)] if number > 1 else []

    def run(self, calls: Sequence[T]) -> Iterator[T]:
        """Runs the calls, and yields each when it is done. Raises what one raises, and ChildProcessError if a
        process was killed.
        """
        if not self._workers:
            for call in calls:
                self._function(call)
                yield call
            return
        left, free = iter(calls), list(self._workers)
        busy: dict[Any, _Worker] = {}
        done: list[T] = []
        while True:
            for call in islice(left, len(free)):
                worker = free.pop()
                worker.begin(call)
                busy[worker.pipe] = worker
            yield from done
            if not busy:
                return
            ended = [busy.pop(pipe) for pipe in wait(list(busy))]
            done = [worker.end(self._describe) for worker in ended]
            free += ended

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for worker in self._workers:
            worker.process.terminate() if kind else worker.send(None)
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()


class _Worker:
    def __init__(self, function: Callable[[Any], object], preload: str):
        context = worker_context(preload)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else its end would not be seen
        self.call: Any = None

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died since it answered: `end` finds out
            self.pipe.send(message)

    def begin(self, call: Any) -> None:
        self.call = call
        self.send((call,))

    def end(self, describe: Callable[[Any], tuple[str, str]]) -> Any:
        try:
            error = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by exit code {code}"
            name, hint = describe(self.call)
            rule = f"{name} was {how}; SIGKILL may be the kernel's, when memory is short"
            fix = f"{AGAIN}; fewer --workers need less memory{hint}"
            raise ChildProcessError(f"{rule}. Fix: {fix}.") from None
        if error is not None:
            raise error
        return self.call


def _work(function: Callable[[Any], object], pipe: Connection) -> None:
    """A worker process: answers each call with None or what it raised."""

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    while (message := pipe.recv()) is not None:
        try:
            function(*message)
            pipe.send(None)
        except BaseException as error:
            try:
                pipe.send(error)
            except Exception:  # what cannot be pickled
                pipe.send(RuntimeError(repr(error)))
