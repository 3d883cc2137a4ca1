"""What Triton makes of a launch for a GPU that is not there: shared memory, registers, spills, the kinds of
instructions and the length of the loop.

    def launch() -> None:
        grouped_matmul(on_gpu(4096, 1024), on_gpu(8, 1024, 2048), on_gpu(9, dtype=torch.int32))

    (kernel,) = compiled(launch, capability=90)

The launch is a function of a module (or a functools.partial of one) that calls a public function of the
package on tensors from `on_gpu`. It runs in another process, as in this one Triton may be an interpreter, and
its kernels are compiled instead of started: so it is tested as it is launched, with the constants, the
strides and what Triton knows of them.
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Bytes that one program may have, CUDA C++ programming guide, "Technical specifications per compute
# capability".
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"\bmma\.sync",
    "cp.async": r"cp\.async\.c[ag]",
    "tma": r"cp\.async\.bulk\.tensor",
    "fma": r"\bfma\.rn\.f32",
    "atomic": r"\b(?:atom|red)\.(?!async)",
}


# In the machine code: products of matrices, and copies to shared memory beside them, by threads and by TMA.
_MACHINE = {"products": r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b", "copies": r"\bLDGSTS\b", "tma": r"\bUTMALDG\b"}


@dataclass(frozen=True)
class Compiled:
    """One kernel of a launch."""

    name: str  # of the kernel's module
    function: str  # name of the kernel, which begins with that of the module
    config: dict[str, int]  # constants it was compiled with, `num_warps` and `num_stages` among them
    shared_bytes: int  # of one program
    registers: int  # per thread
    stack_bytes: int  # per thread, where registers are spilled to
    instructions: dict[str, int]  # how often each kind of _INSTRUCTIONS is in the code
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)  # the machine code

    @functools.cached_property
    def machine(self) -> dict[str, int]:
        """How often each kind of _MACHINE is in the machine code, and as `loop` the number of instructions of
        the loop that copies and multiplies, 0 without one.
        """
        return _read(_on_file("nvdisasm", "-c", self.cubin))


def on_gpu(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without values that says it is on GPU 1, while 0 is the current one; inside a launch only."""
    return torch.empty(sizes, dtype=dtype, device="cuda:1")


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare)


_is_compiler = False  # whether this is that process


def _in_the_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in that process."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiler:
            return function(*args, **kwargs)
        return _compiler().submit(call, *args, **kwargs).result()

    return call


def _prepare() -> None:
    global _is_compiler
    _is_compiler = True
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton
    warnings.filterwarnings("error", message="TRITON_DEFAULT_FP_FUSION is unset")  # kernels/launch.py says it
    torch.set_num_threads(1)


@_in_the_compiler
def compiled(launch: Callable[[], Any], capability: int, config: int = 0) -> list[Compiled]:
    """The kernels that `launch` starts, in order.

    Args:
        launch: see above.
        capability: 80 for sm_80, and so on.
        config: which of each kernel's configs, where it has several.
    """
    found: list[Compiled] = []
    for name, kernel, args, kwargs, _ in _started(launch, capability):
        kernel, constants, args, kwargs = _with_config(kernel, args, kwargs, config)
        binary = kernel.run(*args, grid=(1,), warmup=True, **kwargs)
        found.append(_described(name, constants, binary))
    return found


@_in_the_compiler
def triton_code(launch: Callable[[], Any], capability: int, config: int = 0) -> list[str]:
    """Triton's own code of the kernels that `launch` starts, before anything is decided for a GPU: quick."""
    from triton.backends.nvidia.compiler import CUDABackend

    found: list[str] = []
    for _, kernel, args, kwargs, _ in _started(launch, capability):
        kernel, _, args, kwargs = _with_config(kernel, args, kwargs, config)
        with _replaced(CUDABackend, "make_ttgir", staticmethod(_stop)):  # the next step
            try:
                binary = kernel.run(*args, grid=(1,), warmup=True, **kwargs)
                found.append(binary.asm["ttir"])  # it had been compiled
            except _Stopped as stopped:
                found.append(str(stopped))
    return found


class _Stopped(Exception):
    """Its text is the code so far."""


def _stop(module: Any, *args: Any) -> None:
    raise _Stopped(str(module))


def _with_config(kernel: Any, args: Any, kwargs: Any, config: int) -> tuple[Any, dict[str, int], Any, Any]:
    """The kernel without its configs, the constants of one of them, and the arguments of a launch with it."""
    configs = _configs(kernel, kwargs)
    if not configs:
        return kernel, {}, args, kwargs
    chosen = configs[min(config, len(configs) - 1)]
    return kernel.fn, chosen.constants, *kernel.prepared(chosen, args, kwargs)


@_in_the_compiler
def specializations(launch: Callable[[], Any], capability: int) -> list[tuple[str, str]]:
    """Kernel and what Triton compiles it for, of each that `launch` starts: what kinds of values the
    arguments have. Compiles nothing.
    """
    found: list[tuple[str, str]] = []
    for name, kernel, args, kwargs, _ in _started(launch, capability):
        kernel, _, args, kwargs = _with_config(kernel, args, kwargs, 0)
        *_, binder = kernel.device_caches[capability]
        found.append((name, str(binder(*args, **kwargs)[1])))
    return found


@_in_the_compiler
def launched(launch: Callable[[], Any], capability: int, config: int = 0) -> list[list[tuple[Any, ...]]]:
    """What the driver is asked to launch by each of three calls of `launch` on the same operands: function,
    grid, constants and arguments, of each kernel. Results, which are new each time, by size and dtype.
    """
    from triton.runtime.driver import driver

    from helpers.layers import kernel_launches
    from moe_exp.layers.kernels import launch as package
    from moe_exp.layers.kernels import tuning

    driver.set_active(stub := _LaunchingDriver(capability))
    package.processors, package.has_grouped_mm = lambda device: 132, lambda x: False
    package.runs_kernel, package.has_tma = lambda x: True, lambda x: capability >= 90
    operands: list[torch.Tensor] = []

    def operand(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        if next_one[0] == len(operands):
            operands.append(torch.zeros(sizes, dtype=dtype))
        next_one[0] += 1
        return operands[next_one[0] - 1]

    def described(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            same = [number for number, one in enumerate(operands) if one.data_ptr() == x.data_ptr()]
            return same, x.dtype, tuple(x.shape), x.stride()
        if hasattr(x, "block_shape"):
            return described(x.base), x.shape, x.strides
        return getattr(x, "__name__", x)

    found = []
    for kernel in tuning.TUNED.values():
        kernel.choices, kernel._launchers = {}, {}
        kernel._choose = lambda *_, kernel=kernel: _configs(kernel, {"HAS_TMA": capability >= 90})[config]
    with _replaced(kernel_launches, "on_gpu", operand):
        for _ in range(3):
            next_one, stub.calls = [0], []
            launch()
            # without what only hooks of profilers read
            found.append([tuple(described(x) for x in (*call[:6], *call[9:])) for call in stub.calls])
    return found


@_in_the_compiler
def devices(launch: Callable[[], Any], capability: int) -> list[tuple[str, int]]:
    """Kernel and the number of the device that is the current one, of each that `launch` starts."""
    return [(name, device) for name, *_, device in _started(launch, capability)]


@_in_the_compiler
def num_configs(launch: Callable[[], Any], capability: int) -> int:
    """The most configs that a kernel of the launch has on this GPU."""
    return max(len(_configs(kernel, kwargs)) or 1 for _, kernel, _, kwargs, _ in _started(launch, capability))


def _configs(kernel: Any, kwargs: Any) -> list[Any]:
    """Those that would be timed."""
    return kernel.suited(kwargs) if hasattr(kernel, "suited") else []


def _started(launch: Callable[[], Any], capability: int) -> list[tuple[str, Any, Any, Any, int]]:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from moe_exp.layers.kernels import launch as package
    from moe_exp.layers.kernels import tuning

    driver.set_active(_Driver(capability))
    package.processors = lambda device: 132
    package.has_tma, package.has_grouped_mm = lambda x: capability >= 90, lambda x: False
    current, started = [0], []

    @contextlib.contextmanager
    def make_current(device: torch.device) -> Any:
        current.append(device.index)
        yield
        current.pop()

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        name = kernel.fn.__module__.rpartition(".")[2]
        mocks = [_mock(arg) for arg in args], {key: _mock(arg) for key, arg in kwargs.items()}
        started.append((name, kernel, *mocks, current[-1]))

    package.current_device = make_current
    with (
        FakeTensorMode(),
        _replaced(fake_tensor, "init_gpu_context", lambda device: None),  # it would need the GPU
        _replaced(tuning.Tuned, "run", record),
        _replaced(JITFunction, "run", record),
    ):
        launch()
    return started


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Any:
    before = inspect.getattr_static(owner, name)  # a static method as such
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _mock(arg: Any) -> Any:
    from triton.runtime.jit import MockTensor

    if not isinstance(arg, torch.Tensor):
        return arg
    mock = MockTensor(arg.dtype)
    mock.element_size = arg.element_size
    return mock


def _on_file(tool: str, option: str, cubin: bytes) -> str:
    """What a program of Triton's prints about machine code."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


def _read(listing: str) -> dict[str, int]:
    """See Compiled.machine. A loop ends with a jump back; what is around another loop does not count."""
    labels: dict[str, int] = {}
    places: dict[str, list[int]] = {kind: [] for kind in _MACHINE}
    loops, number = [], 0
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = number
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            for kind, pattern in _MACHINE.items():
                if re.search(pattern, line):
                    places[kind].append(number)
            jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
            if jump and jump[1] in labels:
                loops.append(range(labels[jump[1]], number + 1))
            number += 1
    copies = [*places["copies"], *places["tma"]]
    main = [
        loop
        for loop in loops
        if any(place in loop for place in places["products"]) and any(place in loop for place in copies)
    ]
    return {kind: len(found) for kind, found in places.items()} | {"loop": min(map(len, main), default=0)}


def _described(name: str, constants: dict[str, Any], binary: Any) -> Compiled:
    ptx, cubin = binary.asm["ptx"], binary.asm["cubin"]
    usage = _on_file("cuobjdump", "--dump-resource-usage", cubin)
    registers, stack = (int(re.search(rf"{kind}:(\d+)", usage)[1]) for kind in ("REG", "STACK"))
    instructions = {kind: len(re.findall(pattern, ptx)) for kind, pattern in _INSTRUCTIONS.items()}
    numbers = {key: value for key, value in constants.items() if isinstance(value, int)}
    return Compiled(
        name, binary.metadata.name, numbers, binary.metadata.shared, registers, stack, instructions, ptx,
        cubin,
    )  # fmt: skip


class _Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class _LaunchingDriver(_Driver):
    """Records what it is asked to launch."""

    def __init__(self, capability: int):
        super().__init__(capability)
        self.calls: list[tuple[Any, ...]] = []
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args: self.calls.append(args)

    def load_binary(self, name: str, *_: Any) -> tuple[str, str, int, int, int]:
        return name, name, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}
