"""Time and memory on a device: CUDA events and the allocator's counters on a GPU, the wall clock on a CPU."""

import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from gpu_attempts import LeftOut
from torch import Tensor

from moe_exp.engine.graphs import CudaGraph


class Again:
    """In place of a CUDA graph without CUDA: runs the region again."""

    def capture(self, region: Callable[[], Tensor]) -> Tensor:
        self.region, self.result = region, torch.zeros(0)
        return self.result

    def replay(self) -> None:
        found = self.region().detach()
        self.result.resize_(found.shape).copy_(found)


def make_graph() -> CudaGraph | Again:
    return CudaGraph() if torch.cuda.is_available() else Again()


def elapsed_ms(calls: Iterable[Callable[[], object]], device: torch.device) -> float:
    """Milliseconds from the first call to the end of the last, over their number."""
    calls = list(calls)
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e3 / len(calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / len(calls)


def matmul_ceiling(
    device: torch.device, dtype: torch.dtype, *, size: int | None = None, rounds: int = 10
) -> float:
    """FLOP/s of a large square matrix product of random values: the median of several."""
    size = size or (8192 if device.type == "cuda" else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / (statistics.median(elapsed_ms([lambda: a @ b], device) for _ in range(rounds)) / 1e3)


def num_input_sets(set_bytes: int, device: torch.device) -> int:
    """How many sets of inputs it takes for one to have left the L2 when its turn comes again; two at
    least.
    """
    if device.type == "cpu":
        return 2
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(8, -(-2 * cache_bytes // set_bytes) + 1))


def poison(device: torch.device) -> None:
    """Leaves NaN in the memory that the allocator hands out next: what a kernel forgets to write is seen."""
    if device.type == "cuda":
        torch.full((2**30,), float("nan"), dtype=torch.bfloat16, device=device)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """What the call allocates at its highest beyond what is allocated before it; None on a CPU, whose
    allocator does not count.
    """
    if device.type == "cpu":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor], tokens: Tensor) -> int:
    """What autograd keeps between forward and backward besides the parameters, every storage counted once.

    The tokens count in any case: the router's product keeps them.
    """
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept = {tokens.untyped_storage().data_ptr(): tokens.untyped_storage().nbytes()}
    held = []  # so that no storage is freed and its address used again while we count

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = forward()
    del output
    return sum(kept.values())


class TooSlow(LeftOut):
    """Something took longer than it may."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside when the time is over, as soon as this thread is back in Python: tuning and
    compiling often are.

    What never comes back from C++ is not stopped. The backward of a CUDA tensor would be such: autograd
    computes it in a thread of its own, for which this one waits in C++. Callers have it computed in this
    thread (`backward_in_this_thread`).
    """

    def stop(number: int, frame: object) -> None:
        raise TooSlow(f"took over {max(seconds, 0):.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def backward_in_this_thread() -> AbstractContextManager[None]:
    """Inside, autograd has no threads: `at_most` can stop a backward. The kernels and their order are the
    same.
    """
    return torch.autograd.set_multithreading_enabled(False)
