"""Facts about this machine that are needed before torch is imported."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Exit codes of a job: it has come to TRAIN_ITERS; it failed; its settings cannot run; it has saved, and the same command goes on.
FINISHED, FAILED, BAD_INPUT, TO_BE_CONTINUED = 0, 1, 2, 75
# From ranks to their launcher: start the ranks again, which is no failure.
START_AGAIN = 76

# Variable that the launcher sets: where ranks write the exit code of the job.
EXIT_CODE_FILE = "MOE_EXP_EXIT_CODE_FILE"
# Variable that the launcher sets: the folder of this node where ranks keep their heartbeats.
HEARTBEATS = "MOE_EXP_HEARTBEATS"
# Others that it sets: the metrics.jsonl of the run; the time of the launch, of the clock that `time.monotonic` reads.
METRICS_FILE = "MOE_EXP_METRICS_FILE"
LAUNCH_TIME = "MOE_EXP_LAUNCH_TIME"

# What asks a run to save and end: a person, a scheduler, and SLURM's warning (--signal=B:USR1@300). SIGHUP counts as SIGTERM.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# What torch.distributed says on the ranks that did nothing wrong, when another rank has died.
CAUSED_BY_ANOTHER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out waiting", "ProcessGroup")

_CAPABILITY_ATTRIBUTES = (75, 76)  # cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR

# For glibc's malloc on a CPU host: keep freed memory instead of giving it back to the system and fetching it again, page by page,
# for every large tensor of every micro-batch (a third of a layer's time, docs/performance.md). A GPU has torch's caching allocator.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def tell_launcher(code: int, *, by_any_rank: bool = False) -> bool:
    """Leaves the exit code of the job for the launcher of this node, by its first rank; False where there is none to tell.

    torchrun knows 0 and failures alone: ranks that have told end with 0, whatever they have told.
    """
    told = os.environ.get(EXIT_CODE_FILE)
    if told and (by_any_rank or os.environ.get("LOCAL_RANK", "0") == "0"):
        Path(told).write_text(str(code))
    return bool(told)


def told_exit_code() -> int | None:
    """What a rank of this node has told by `tell_launcher`."""
    told = Path(os.environ.get(EXIT_CODE_FILE) or "none")
    text = told.read_text() if told.exists() else ""
    return int(text) if text else None


def complain(*lines: str) -> None:
    """Lines about the job on stderr. That may be a log on a full disk, which is no reason not to do what they are about."""
    with suppress(OSError):
        print(*(f"moe-exp: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that the block starts have the signals that ask for an end blocked, until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def count_gpus() -> int:
    """Number of CUDA devices that this process may use (CUDA_VISIBLE_DEVICES honoured), from the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@functools.cache
def compute_capability() -> tuple[int, int]:
    """That of the oldest CUDA device that this process may use, from the driver itself; (0, 0) where there is none."""
    if not count_gpus():
        return 0, 0
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    for index in range(count_gpus()):
        device, numbers = ctypes.c_int(0), (ctypes.c_int(0), ctypes.c_int(0))
        driver.cuDeviceGet(ctypes.byref(device), index)
        for number, attribute in zip(numbers, _CAPABILITY_ATTRIBUTES, strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        found.append((numbers[0].value, numbers[1].value))
    return min(found)


def rank_place(rank: int | None = None) -> str:
    """Where this rank is, for its error lines: `rank 11 on node-b (cuda:3)`, on a CPU host `rank 1 on laptop (cpu)`.

    Args:
        rank: its number; torchrun's by default.
    """
    return f"rank {os.environ.get('RANK', '0') if rank is None else rank} on {socket.gethostname()} ({device_label()})"


def device_label() -> str:
    """This rank's device as torch calls it: `cuda:3`, or `cpu`."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if count_gpus() else "cpu"


def device_name() -> str:
    """What this host computes on: the name of its first CUDA device, as the driver has it, or CPU."""
    if not count_gpus():
        return "CPU"
    driver, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0 or driver.cuDeviceGetName(name, len(name), device) != 0:
        return "GPU"
    return name.value.decode(errors="replace")


def peak_resident_bytes() -> int:
    """Largest resident size that this process has had."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def num_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Loaded here: between fork and exec only a plain call is safe.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """The system sends this process the signal when its parent dies, which cannot forward anything then (Linux only)."""
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the system gives to connections: nobody takes it by chance meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
