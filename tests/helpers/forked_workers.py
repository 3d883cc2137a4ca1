"""Workers of pytest -n as forks of a process that has imported torch, Megatron and this package."""

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from helpers.ranks import start_process


def fork_workers() -> None:
    gateway_io.Popen2IOMaster = _ForkedWorker  # type: ignore[misc]


class _ForkedWorker(Popen2IO):  # type: ignore[misc]
    """A fork in place of the Python that execnet starts with its first line for it."""

    def __init__(self, args: object, execmodel: Any):
        (read, told), (heard, write) = Pipe(duplex=False), Pipe(duplex=False)
        errors = Connection(os.dup(2), readable=False)
        self._process = start_process(_worker, read, write, errors, dict(os.environ))
        for connection in (read, write, errors):
            connection.close()
        outgoing, incoming = (os.dup(connection.fileno()) for connection in (told, heard))
        super().__init__(os.fdopen(outgoing, "wb"), os.fdopen(incoming, "rb"), execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _worker(read: Connection, write: Connection, errors: Connection, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    # Its own is that of the process above it, which ranks.py finds by the environment.
    forkserver._forkserver._forkserver_address = None
    for number, connection in enumerate((read, write, errors)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin = os.fdopen(0)  # multiprocessing closes it; the other two are there
    sys.argv = ["pytest"]
    exec(eval(sys.stdin.readline()))
    threading._shutdown()  # as at the end of a program: pools end their processes
    atexit._run_exitfuncs()
