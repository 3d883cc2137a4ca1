"""Dumps the state and the stacks of this node's ranks.

Stacks come from py-spy, or from faulthandler if py-spy fails. py-spy reads the memory of a process without
stopping it. In a hang, py-spy runs again to read C frames; this run stops the process for about a second.
faulthandler writes stacks on a signal, even while the GIL is held. faulthandler reads frames without a lock;
this is safe in a hung process and usually safe in a running process.
"""

import errno
import json
import linecache
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from moe_exp.host.devices import count_gpus
from moe_exp.host.exit_codes import HEARTBEATS
from moe_exp.watch.hangs import heartbeat
from moe_exp.watch.hangs.call_trace import latest_calls
from moe_exp.watch.hangs.files import parse_stacks, write_dump

STOPPED, TRACED = psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP
DISK, GONE = psutil.STATUS_DISK_SLEEP, "gone"
_PY_SPY_SECONDS, _NATIVE_SECONDS, _SIGNAL_SECONDS, _COLLECTIVES_SECONDS = 20.0, 60.0, 3.0, 3.0
_SETTLED_SECONDS = 0.2
_NUM_CALLS, _MOST_COLLECTIVES = 200, 200  # per rank
_NCCL_PREFIX = "nccl_trace_rank_"


def ranks_of_node(local: Path) -> dict[int, int]:
    """Maps rank to pid for this node's ranks whose launcher uses the heartbeat folder `local`."""
    found, parents = {}, {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            stands_by = heartbeat.standby_file(local, process.pid).exists()
            if environ.get(HEARTBEATS) == str(local) and "LOCAL_RANK" in environ and not stands_by:
                found[process.pid], parents[process.pid] = int(environ["RANK"]), process.ppid()
    # data loader workers inherit their rank's environment: keep only processes whose parent is not a rank
    return {rank: pid for pid, rank in found.items() if parents[pid] not in found}


def nccl_environment(local: Path) -> dict[str, str]:
    """Variables that let a write to a pipe trigger a dump of NCCL's flight recorder; {} without GPUs."""
    if not count_gpus():
        return {}
    size, file = "2000", str(local / _NCCL_PREFIX)
    wanted = {
        "TORCH_FR_BUFFER_SIZE": size, "TORCH_NCCL_TRACE_BUFFER_SIZE": size, "TORCH_FR_DUMP_TEMP_FILE": file,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": file,
    }  # fmt: skip
    # the user's values take precedence
    return {name: value for name, value in wanted.items() if name not in os.environ}


def dump_node(local: Path, folder: Path, *, calls: Path, is_hang: bool) -> None:
    """Writes dumps of all ranks of this node into `folder`; in a hang, also C frames and NCCL's record."""
    beats = {beat.rank: beat for beat in heartbeat.read_beats(local)}
    # a scan of processes also finds ranks that have no heartbeat yet
    pids = {rank: beat.pid for rank, beat in beats.items()} | ranks_of_node(local)

    def dump(rank: int) -> None:
        pid, beat = pids[rank], beats.get(rank)
        facts = rank_facts(pid, beat)
        is_held = facts["state"] in (STOPPED, TRACED)
        # torch's record first, before a tool stops the process; its thread needs the GIL to answer
        pipe, path = (heartbeat.rank_file(local, rank, name) for name in ("pipe", "collectives.json"))
        can_answer = beat and not is_held and facts["state"] != GONE
        collectives = path.read_bytes() if can_answer and _record(pipe, path) else b""
        has_handler = beat is not None and beat.pid == pid
        stacks, tool, reasons = _stacks(local, rank, pid, has_handler=has_handler, state=facts["state"])
        facts |= {"tool": tool} | ({"without": "; ".join(reasons)} if reasons else {})
        if threads := parse_stacks(stacks):
            innermost = threads[0].frames[0]
            facts["source"] = linecache.getline(innermost.file, innermost.line).strip()
        # C frames show the library call that a rank waits in, but py-spy has to stop the rank to read them
        native = ""
        if is_hang and tool == "py-spy" and not is_held:
            native, reason = py_spy(pid, "--native", seconds=_NATIVE_SECONDS)
            native = native or f"none: {reason}"
        latest = latest_calls(heartbeat.rank_file(calls, rank, "txt"), _NUM_CALLS)
        write_dump(folder, rank, facts, stacks, native=native, calls=latest)
        if collectives:
            text = json.dumps(last_collectives(json.loads(collectives)))
            (folder / f"rank_{rank:05d}.collectives.json").write_text(text)
        nccl = local / f"{_NCCL_PREFIX}{rank}"
        # NCCL's own record (for torchfrtrace): its C++ thread writes it even while the GIL is held
        if is_hang and count_gpus() and _record(nccl.with_name(f"{nccl.name}.pipe"), nccl):
            time.sleep(_SETTLED_SECONDS)
            shutil.copyfile(nccl, folder / nccl.name)

    with ThreadPoolExecutor(max(1, len(pids))) as pool:
        list(pool.map(dump, pids))


def rank_facts(pid: int, beat: heartbeat.Heartbeat | None) -> dict[str, Any]:
    """Host, GPU count; a rank's pid, state (psutil's status, TRACED or GONE), kernel function, heartbeat."""
    state = GONE
    with suppress(psutil.Error):
        state = str(psutil.Process(pid).status())
    if state == psutil.STATUS_ZOMBIE:  # has ended, but its launcher has not read the exit code
        state = GONE
    elif state != GONE and is_traced(pid):
        state = TRACED
    facts: dict[str, Any] = {"host": socket.gethostname(), "pid": pid, "state": state, "gpus": count_gpus()}
    with suppress(OSError):
        facts["kernel function"] = Path(f"/proc/{pid}/wchan").read_text() or "none"
    if beat is None:
        return facts | {"phase": "before its first heartbeat"}
    seconds = round(time.monotonic() - beat.since, 1)
    return facts | {"iteration": beat.iteration, "phase": beat.phase, "seconds in it": seconds}


def is_traced(pid: int) -> bool:
    # the state shows a debugger only while it has stopped the process
    with suppress(OSError):
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _stacks(local: Path, rank: int, pid: int, *, has_handler: bool, state: str) -> tuple[str, str, list[str]]:
    """Returns the stacks, the tool that produced them, and why the preferred tools failed."""
    stacks, reason = py_spy(pid)
    if stacks:
        return stacks, "py-spy", []
    reasons = [f"py-spy: {reason}"]
    if has_handler and state not in (STOPPED, TRACED, GONE):
        path = heartbeat.rank_file(local, rank, "stacks")
        start, size = path.stat().st_size, -1
        with suppress(ProcessLookupError):
            os.kill(pid, heartbeat.STACKS_SIGNAL)
            _wait_until(lambda: path.stat().st_size > start, _SIGNAL_SECONDS)
            while size != (size := path.stat().st_size):  # until the file stops growing
                time.sleep(_SETTLED_SECONDS)
        if stacks := path.read_bytes()[start:].decode(errors="replace"):
            return stacks, "faulthandler", reasons
        name = heartbeat.STACKS_SIGNAL.name
        reasons.append(f"faulthandler: no answer to {name} in {_SIGNAL_SECONDS:.0f} s")
    else:
        why = f"the process is {state}" if has_handler else "not available before the first heartbeat"
        reasons.append(f"faulthandler: {why}")
    return "", "none", reasons


def py_spy_program() -> str:
    """Path of py-spy; empty if it is not installed."""
    # also look next to this Python: its virtual environment may not be on the PATH
    return shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent) or ""


def py_spy(pid: int, *options: str, seconds: float = _PY_SPY_SECONDS) -> tuple[str, str]:
    """Returns the output of `py-spy dump` and ''. On failure, returns '' and the reason."""
    if not (program := py_spy_program()):
        return "", "not installed"
    command = [program, "dump", "--full-filenames", "--pid", str(pid), *(options or ("--nonblocking",))]
    error = ""
    for _ in range(3):  # py-spy may catch a running process in an inconsistent state
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except (OSError, subprocess.TimeoutExpired) as failure:
            return "", f"{type(failure).__name__}"
        if done.returncode == 0 and "Thread " in done.stdout:
            return done.stdout, ""
        error = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return "", error[:200]


def _record(pipe: Path, path: Path) -> bool:
    """Requests a rank's record of collectives through `pipe`; returns whether `path` was written in time."""
    path.unlink(missing_ok=True)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):  # no reader
            return False
        raise
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(b"\n")
    _wait_until(lambda: path.exists() and path.stat().st_size > 0, _COLLECTIVES_SECONDS)
    return path.exists()


def last_collectives(record: Mapping[str, Any]) -> dict[str, Any]:
    """Extracts the last collective of each process group (`last`) and the latest `entries` from `record`."""
    entries: Sequence[Mapping[str, Any]] = record.get("entries", [])
    groups = record.get("pg_config", {})
    last: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, description = entry["process_group"]
        ranks = groups.get(name, groups.get("", {})).get("ranks", "")
        last[name] = {"group": name, "description": description, "ranks": ranks, "state": entry["state"]}
        last[name] |= {"number": entry["collective_seq_id"], "name": entry["profiling_name"]}
    return {"last": list(last.values()), "entries": list(entries)[-_MOST_COLLECTIVES:]}


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
