"""Facts about this machine, available before torch is imported."""

import ctypes
import functools
import importlib.util
import os
import re
import resource
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CAPABILITY_ATTRIBUTES = (75, 76)  # cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR

# Makes glibc's malloc keep freed memory on a CPU host. Returning it to the system and faulting it in again
# for every large tensor costs a third of a layer's time (docs/performance.md). GPUs have a caching allocator.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26),
}  # fmt: skip


@dataclass(frozen=True)
class Nodes:
    """Machines other than this one on which a run will execute."""

    gpus: int | None = None  # of each machine; 0: CPU nodes, None: unknown


@functools.cache
def count_gpus() -> int:
    """Number of CUDA devices visible to this process (honors CUDA_VISIBLE_DEVICES), read from the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def driver_version() -> str:
    """Newest CUDA version that the driver supports, such as 13.0; empty without NVIDIA's driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return "" if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA; does not import torch."""
    return re.search(r"^cuda\b.*= *None$", _torch_version_file(), re.MULTILINE) is None


def _torch_version_file() -> str:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""


def cuda_problem() -> str:
    """Known reason why torch's CUDA version cannot use this host's driver or GPUs; empty if none is known."""
    found = re.search(r"^cuda\b.*= *'((\d+)\.[\d.]+)'$", _torch_version_file(), re.MULTILINE)
    if found is None or not (driver := driver_version()):
        return ""
    if int(driver.partition(".")[0]) < int(found[2]):
        return f"is built for CUDA {found[1]}, but this host's driver supports only CUDA {driver}"
    major, minor = compute_capability()
    # CUDA 13 dropped GPUs older than Turing
    if int(found[2]) >= 13 and (major, minor) < (7, 5):
        return f"is built for CUDA {found[1]}, which does not support compute capability {major}.{minor}"
    return ""


@functools.cache
def compute_capability() -> tuple[int, int]:
    """Lowest compute capability of this process's CUDA devices; (0, 0) without a CUDA device."""
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
    """Text for error lines, such as `rank 11 on node-b (cuda:3)`; default rank: torchrun's."""
    number = os.environ.get("RANK", "0") if rank is None else rank
    return f"rank {number} on {socket.gethostname()} ({device_label()})"


def device_label() -> str:
    """This rank's device in torch's notation, such as `cuda:3` or `cpu`."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if count_gpus() else "cpu"


def device_name() -> str:
    """Name of this host's first CUDA device, or CPU."""
    if not count_gpus():
        return "CPU"
    driver, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(256)
    failed = driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, len(name), device)
    return "GPU" if failed else name.value.decode(errors="replace")


def peak_resident_bytes() -> int:
    """Peak resident set size of this process."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024  # Linux counts in KiB, macOS in bytes


def num_cores() -> int:
    """CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory still available to this process, limited by the machine and by the process's cgroups."""
    lines = (line for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:"))
    found = [int(line.split()[1]) * 1024 for line in lines]
    for line in _lines(proc / "self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root, names = cgroup, ("memory.max", "memory.current")
        if controllers:
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / name.lstrip("/")
        # Any group from the process's own up to the root may have the limit. In a container the name may
        # refer to the host's hierarchy, which is hidden; the visible root is then the container's group.
        groups = [group for group in (folder, *folder.parents) if group == root or root in group.parents]
        for group in groups:
            with suppress(OSError, ValueError):  # "max" (no limit) is not a number
                limit, used = (int((group / one).read_text()) for one in names)
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # cache counts as used, but the kernel drops it on demand
                found.append(limit - used + int(statistics.get("inactive_file", 0)))
    # macOS has neither file: assume 2 GiB
    return max(0, min(found, default=2 * 2**30))


def _lines(path: Path) -> list[str]:
    """Lines of a file; [] if the file cannot be read."""
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
