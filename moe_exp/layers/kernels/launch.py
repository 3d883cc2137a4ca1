"""Functions shared by all kernels: selection, launch sizes and torch.compile support.

A kernel's module contains the kernel, a plain-torch reference for CPUs and tests (`..._torch`, also called
the twin), and the public function that calls the kernel. Where no kernel can run, the decorator
`compilable` makes the public function call the reference. If TRITON_INTERPRET=1 is set before moe_exp is
imported, Triton interprets the kernels (slowly) on CPU tensors, in place of the references.
"""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

# Triton 3.9's default (a * b + c as one instruction), set explicitly because 3.10 changes it and our numbers
# must not change. It is process-wide, so it also applies to kernels of torch.compile.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton as triton
    import triton.language
    import triton.runtime
    import triton.tools.tensor_descriptor
except ImportError:  # or older than 3.4, without descriptors; `missing` reports the problem
    triton = None

tl: Any = None if triton is None else triton.language

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Ampere, the first architecture with asynchronous copies and bf16 tensor cores.
OLDEST_GPU = (8, 0)

Function = TypeVar("Function", bound=Callable[..., Any])


def missing() -> str:
    """Why the kernels cannot run on this machine's CUDA device; empty if they can run."""
    if triton is None:
        installed = importlib.util.find_spec("triton") is not None
        return "the kernels require triton 3.4 or newer" if installed else "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"the kernels require a GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer"
    return ""


def runs_kernel(x: Tensor) -> bool:
    """Whether operations on `x` use the kernels instead of their plain-torch references."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def multiplies_16_bits(a: Tensor, b: Tensor) -> bool:
    """Whether torch.mm can multiply these 16-bit tensors, sum in fp32 and return an fp32 result."""
    # on NVIDIA GPUs in PyTorch 2.8 and newer; torch.compile supports it only in later versions
    is_known = a.is_cuda and not torch.version.hip and hasattr(torch.ops.aten.mm, "dtype")
    is_16_bit = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    return is_known and is_16_bit and not torch.compiler.is_compiling()


@dataclass(frozen=True)
class KernelFailure:
    """A part of the model whose kernels are not used because they failed their self-test."""

    part: str  # `experts`, `routing`, `cross entropy`, `optimizer`, `rotary embedding` or `norm`
    problems: list[str]  # one line per kernel, with the first rank and host that found it
    backend: str  # the replacement


def failure_of(part: str, failures: Sequence[KernelFailure]) -> str:
    """Why the kernels of `part` are not used; empty if they did not fail."""
    problems = next((failure.problems for failure in failures if failure.part == part), [])
    return f"the self-test failed: {and_more(problems)}" if problems else ""


def and_more(problems: Sequence[str]) -> str:
    """The first problem and the number of further problems."""
    return problems[0] + (f"; and {len(problems) - 1} more" if len(problems) > 1 else "")


def choose_routing(
    name: str, *, device_type: str, router_problem: str = "", failure: str = ""
) -> tuple[str, str]:
    """Chooses `triton` or `torch` for the router, row order and drops; returns the choice and the reason.

    Args:
        name: `auto`: kernels on a GPU that can run them; `off`: always plain torch.
        router_problem: why the router cannot use its kernel, see `router.kernel_problem`.
        failure: why the kernels must not run, see `failure_of`.
    """
    if name == "off":
        return "torch", "set by ROUTING_KERNELS"
    if device_type == "cpu":
        return "torch", "the Triton kernels are for GPUs"
    if rule := failure or missing():
        return "torch", f"not triton: {rule}"
    if router_problem:
        return "triton", f"Triton kernels for row order and drops; the router in torch: {router_problem}"
    return "triton", "Triton kernels for the router, row order and drops"


def takes_kernels(x: Tensor, use_kernels: bool | None) -> bool:
    """Whether routing and row order use kernels for `x`; RouterConfig explains `use_kernels`."""
    if use_kernels is None:
        return x.is_cuda and not _missing()
    return use_kernels


_missing = functools.cache(missing)


# Prefixes of kernel arguments that change between launches: with expert parallelism or drops, row counts
# differ in every micro-batch. By default Triton compiles variants for 1, multiples of 16 and other values on
# first use, which takes seconds while other ranks wait.
VARYING = ("num_", "rows_", "is_")


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit without specialization on arguments named with a VARYING prefix; no-op without Triton."""
    if triton is None:
        return function
    # The name in profilers consists of module and function, such as `up_projection_kernel`.
    name = function.__module__.rpartition(".")[2] + function.__name__
    parameters = inspect.signature(function).parameters.values()
    varying = [
        x.name for x in parameters if x.name.startswith(VARYING) and "constexpr" not in str(x.annotation)
    ]
    return triton.jit(function, do_not_specialize=varying, repr=lambda _: name)


def in_one_line(error: BaseException) -> str:
    """Type and text of an error, shortened because compiler errors can be long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + ' ...'}"


def is_of_device(error: Exception) -> bool:
    """Whether the device caused the error (out of memory, illegal access), and not a kernel config."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def last_contiguous(x: Tensor) -> Tensor:
    """Returns `x` if its last dimension is contiguous, as kernels require, or else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Contiguous tensors for kernels; None stays None."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def descriptors(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensor descriptors for TMA (Hopper and newer), which loads whole blocks without masks.

    Values outside a tensor are read as zero. The kernel's decorator `tuned` sets the block shapes.

    Returns:
        One descriptor per tensor (None for None). All descriptors are None if the device has no TMA, an
        address or stride is not a multiple of 16 bytes, or the dtype is not 2 bytes wide.
    """
    for x in [x for x in tensors if x is not None]:
        # Not fp32: without tensor cores, Triton spills all registers of such a block.
        *strides, last = x.stride()
        fits = last == 1 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
        if not (fits and x.element_size() == 2 and x.numel() > 0 and has_tma(x)):
            return (None,) * len(tensors)
    make = triton.tools.tensor_descriptor.TensorDescriptor
    return tuple(
        None if x is None else make(x, list(x.shape), list(x.stride()), [1] * x.dim()) for x in tensors
    )


def has_tma(x: Tensor) -> bool:
    """Whether the device has TMA and `x` is aligned as TMA requires."""
    return (INTERPRETED or _capability(x.device.index) >= (9, 0)) and x.data_ptr() % 16 == 0


def has_grouped_mm(x: Tensor) -> bool:
    """Whether torch._grouped_mm can multiply `x` without reading the offsets on the host."""
    # Only Hopper: on most other GPUs PyTorch loops over the experts, and torch 2.10's kernel for Blackwell
    # fails. The kernel uses all multiprocessors.
    suits = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
    return suits and not _num_free_processors and _capability(x.device.index)[0] == 9


_capability = functools.cache(torch.cuda.get_device_capability)


_num_free_processors = 0  # per process, because all layers share the device


def free_processors() -> int:
    """Number of multiprocessors that kernels leave free, set by `leave_free`."""
    return _num_free_processors


def leave_free(num_processors: int) -> None:
    """Sets the number of multiprocessors that persistent GEMMs leave to other kernels (MOE_SM_MARGIN)."""
    global _num_free_processors
    _num_free_processors = num_processors


def num_programs(x: Tensor, num_tiles: int, *, per_processor: int = 1, takes_all: bool = False) -> int:
    """Number of programs in a persistent grid, where each program computes several tiles.

    Args:
        num_tiles: upper limit on the number of programs.
        per_processor: number of programs that a streaming multiprocessor runs at once.
        takes_all: whether to ignore `leave_free`, for kernels whose sums depend on the number of programs.
    """
    num_processors = max(1, processors(x.device) - (0 if takes_all else _num_free_processors))
    return min(num_tiles, num_processors * (per_processor if x.is_cuda else 1))


def grid_of_tiles(x: Tensor, num_experts: int, num_rows: int, width: int) -> Callable[[dict[str, int]], Any]:
    """Persistent grid over tiles, each with BLOCK_M rows of one expert and BLOCK_N columns."""

    def grid(constants: dict[str, int]) -> tuple[int]:
        num_tiles = (cdiv(num_rows, constants["BLOCK_M"]) + num_experts) * cdiv(width, constants["BLOCK_N"])
        return (num_programs(x, num_tiles, per_processor=constants["PROGRAMS"]),)

    return grid


@functools.cache
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors of the device."""
    # Two for the interpreter, so that tests also cover programs with several tiles.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def dot_constants(x: Tensor) -> dict[str, Any]:
    """Constants for kernels that call `tiles.dot`: PRECISION (TF32 if PyTorch may use it) and INTERPRET."""
    allows_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "tf32" if allows_tf32 else "ieee", "INTERPRET": INTERPRETED}


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Quotient, rounded up."""
    return -(-number // divisor)


def compilable(
    name: str, fake: Callable[..., Any], *, twin: Callable[..., Any] | None = None, takes_fp64: bool = True,
    mutates: Sequence[str] = (),
) -> Callable[[Function], Function]:  # fmt: skip
    """Decorator: runs a function on its first tensor's device; torch.compile sees an opaque operator.

    Args:
        fake: function with the same arguments that returns uninitialized results.
        twin: plain-torch reference with the same arguments, used where no kernel can run. None if the
            function has no kernel, or itself decides when to use its kernel.
        takes_fp64: if False, fp64 tensors use the twin because the kernel computes in fp32.
        mutates: names of the arguments that the function writes to.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            # Triton launches on the current device, which may differ from the device of the tensors.
            x = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
            takes_x = runs_kernel(x) and not _by_twins and (takes_fp64 or x.dtype != torch.float64)
            with current_device(x.device) if x.is_cuda else nullcontext():
                return (function if twin is None or takes_x else twin)(*args, **kwargs)

        positional = _positional(on_its_device, signature)
        operator = torch.library.custom_op(f"moe_exp::{name}", positional, mutates_args=tuple(mutates))
        operator.register_fake(_positional(fake, signature))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else on_its_device)(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


current_device: Any = torch.cuda.device  # context manager for launches
_by_twins = False


def by_twins(function: Function) -> Function:
    """Wraps a function so that it calls the twins of all kernels instead of the kernels."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _by_twins
        _by_twins = True
        try:
            return function(*args, **kwargs)
        finally:
            _by_twins = False

    return call  # type: ignore[return-value]


def _positional(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Makes all arguments positional, because PyTorch operators reject keyword-only tensor arguments."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_keyword = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    first = len(kinds) - len(by_keyword)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:first], **dict(zip(by_keyword, args[first:], strict=False)), **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [parameter.replace(kind=kind) for parameter in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
