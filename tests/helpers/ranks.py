"""Runs a function on several gloo ranks of this machine, for tests of parallel code.

    def total(x):
        y = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(y)
        return y.item()

    assert run_on_ranks(4, total, 10) == [46] * 4

The function has to be one that pickle finds by its name: of a module, not inside another function. Every call
starts new processes, so that no group or state of one test reaches another; they are forked from one process
that has imported torch and this package, so that a call takes a fraction of a second.
"""

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moe_exp.host.processes import free_port as free_port

# Importing this package asks whether there is a CUDA device; asked of the driver's library, CUDA would not
# work in forks any more.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_FORK_SERVER = "MOE_EXP_TESTS_FORK_SERVER"  # address


class RankError(RuntimeError):
    """The message has the rank's number and traceback; `error` is what it raised, if that pickles."""

    error: BaseException | None = None


def run_on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, join: bool = True, timeout: float = 120.0
) -> list[Any]:
    """Calls `function(*args)` on each of `num_ranks` processes with one torch thread; returns what the ranks
    returned, in order of rank.

    `join` starts the default process group (gloo). Torchrun's variables (RANK, WORLD_SIZE, MASTER_PORT, ...)
    are in the environment either way. RankError is raised at the first rank that raises or dies, or after
    `timeout` seconds; the other ranks are killed.
    """
    task, port = pickle.dumps((function, args)), free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(num_ranks):
            mine, theirs = multiprocessing.Pipe()
            variables = rank_variables(rank, num_ranks, port)
            store = str(Path(folder) / "store") if join else None
            ranks.append(start_process(_rank_main, theirs, task, variables, store, daemon=True))
            theirs.close()
            pipes.append(mine)
        try:
            return _collect(ranks, pipes, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def run_jobs(
    num_ranks: int, function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], *, timeout: float = 240.0
) -> list[list[Any]]:
    """Calls `function(*job, port)` of every job on each of `num_ranks` processes, one after the other, see
    `in_turn`; returns for each job what the ranks returned. A process group of the function is at the port.
    """
    given = [(*job, free_port()) for job in jobs]
    by_rank = run_on_ranks(num_ranks, in_turn, function, given, join=False, timeout=timeout)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def run_script_on_ranks(
    num_ranks: int, main: Callable[..., int], *args: Any, **environment: object
) -> tuple[list[int], str]:
    """Runs `main(*args)` of a script for torchrun on forked ranks: exit codes, and what rank 0 prints."""
    variables = {name: str(value) for name, value in environment.items()}
    found = run_on_ranks(num_ranks, _captured, main, args, variables, join=False)
    return [code for code, _ in found], found[0][1]


def _captured(main: Callable[..., int], args: tuple[Any, ...], variables: dict[str, str]) -> tuple[int, str]:
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(*args)
    return code, printed.getvalue()


def program(path: str, *arguments: str) -> int:
    """On a rank: runs the program as `python path *arguments` does; returns its exit code."""
    sys.argv, os._exit = [path, *arguments], sys.exit  # type: ignore[assignment]  # the process has to report
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def in_turn(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """On a rank: `function(*job)` of every job. Those of one layout that follow one another have the same
    process groups, which take half a second to make.

    Groups are parts of cycles. Until those are collected they keep fifty threads and eighty open files a job.
    """
    from moe_exp.engine import runtime

    groups, found = _SharedGroups(), []
    gc.freeze()  # all that was imported
    with patch.multiple(runtime, start=groups.start, stop=groups.leave):
        for job in jobs:
            found.append(function(*job))
            gc.collect()
    groups.stop()
    return found


class _SharedGroups:
    """`start` of `engine.runtime`, with the groups of the job before if it has the same layout."""

    def __init__(self) -> None:
        from moe_exp.engine import runtime

        self._start, self._stop, self._seed = runtime.start, runtime.stop, runtime.seed_everything
        self._layout: tuple[int | None, ...] | None = None
        self._runtime: Any = None

    def start(self, config: Any) -> Any:
        experts = (config.ep, config.etp) if config.use_moe else (1, 1)
        layout = (config.tp, config.pp, config.vpp, config.cp, *experts)
        if self._layout == layout:
            self._seed(config)
            return self._runtime
        self.stop()
        self._runtime, self._layout = self._start(config), layout
        return self._runtime

    def leave(self) -> None:
        """In place of `runtime.stop`: groups of `runtime.start_alone` are not shared."""
        if not self._layout:
            self._stop()

    def stop(self) -> None:
        if self._layout:
            self._stop()
            self._layout = self._runtime = None
            gc.collect()


def start_process(target: Callable[..., object], *args: Any, daemon: bool = False) -> Any:
    """Starts `target(*args)` in a process forked from one that has imported helpers/preloaded.py."""
    have_fork_server()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def share_fork_server() -> None:
    """For all workers of pytest: they fork from one process, which imports once and prints nowhere."""
    printing, null = {stream: os.dup(stream) for stream in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in printing:
            os.dup2(null, stream)
        os.environ[_FORK_SERVER] = have_fork_server()
    finally:
        for stream, before in printing.items():
            os.dup2(before, stream)
            os.close(before)
        os.close(null)


def have_fork_server() -> str:
    """Its address; started if no process above this one shares its own."""
    server, shared = forkserver._forkserver, os.environ.get(_FORK_SERVER, "")
    if shared and server._forkserver_address is None:
        server._forkserver_address = shared
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # the other process keeps it alive
        server.ensure_running = resource_tracker.ensure_running
    server.set_forkserver_preload(["helpers.preloaded"])
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        server.ensure_running()
    return str(server._forkserver_address)


def _collect(ranks: list[Any], pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        left = [rank for rank in range(len(ranks)) if rank not in results]
        ready = wait([pipes[rank] for rank in left], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {left} of {len(ranks)} are not done in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            results[rank] = _receive(rank, ranks, pipe)
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: int, ranks: list[Any], pipe: Connection) -> Any:
    try:
        text, payload = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        ranks[rank].join(5)
        raise RankError(f"rank {rank} of {len(ranks)} died with exit code {ranks[rank].exitcode}") from None
    if text is None:
        return pickle.loads(payload)
    failure = RankError(f"rank {rank} of {len(ranks)}: {text}")
    failure.error = pickle.loads(payload)
    raise failure


def _rank_main(pipe: Connection, task: bytes, variables: dict[str, str], store: str | None) -> None:
    os.environ.update(variables)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if store is not None:
            # A file, not a port: nobody else can take it.
            rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        function, args = pickle.loads(task)
        report = (None, pickle.dumps(function(*args)))
    except BaseException as error:
        report = (traceback.format_exc(), _pickled(error))
    pipe.send_bytes(pickle.dumps(report))
    # Without destroy_process_group: it would wait for a rank that has failed. The parent ends the process.
    pipe.poll(60)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(None)
    return data


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
