"""What all kernels share: whether they run, how a launch is sized and tuned, and their place in
torch.compile.

A kernel's module has the kernel, its twin in plain torch (`..._torch`: the path of a CPU, and the oracle of
the tests) and the public function that takes one or the other. With TRITON_INTERPRET=1 in the environment
before the first import, Triton runs on CPU tensors, slowly, and the kernels are taken there, too.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

# As Triton 3.9 compiles where nothing is said (a * b + c as one instruction), which it warns of, as 3.10 is
# to do otherwise: the numbers of these kernels are not to change with it. It is one setting for the process,
# so it holds for kernels of torch.compile, too.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language
    import triton.tools.tensor_descriptor
except ImportError:  # its absence is said by `missing`, where somebody asks for the kernels
    triton = None

tl: Any = None if triton is None else triton.language

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST_GPU = (8, 0)

Function = TypeVar("Function", bound=Callable[..., Any])


def missing() -> str:
    """Why the kernels cannot run on this machine's CUDA device, in words; empty: they can."""
    if triton is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"the kernels need a GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer"
    return ""


def runs_kernel(x: Tensor) -> bool:
    """Whether a kernel computes on `x`, and not its twin."""
    return triton is not None and (x.is_cuda or INTERPRETED)


# How the arguments of kernels begin that may be others at every launch: with expert parallelism or drops a
# rank has other numbers of rows in every micro-batch. Left to itself Triton compiles a kernel for 1, one for
# multiples of 16 and one for the rest, when they first come: seconds in which the other ranks wait.
VARYING = ("num_", "rows_", "is_")


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, where Triton is there; one kernel for all values of the arguments that begin as in
    VARYING.
    """
    if triton is None:
        return function
    parameters = inspect.signature(function).parameters.values()
    varying = [
        x.name for x in parameters if x.name.startswith(VARYING) and "constexpr" not in str(x.annotation)
    ]
    return triton.jit(function, do_not_specialize=varying)


class Tuned:
    """A kernel with several configs: `kernel[grid](...)` takes the fastest, and with
    torch.use_deterministic_algorithms the first.

    What was measured as fastest may be another config after the next start, and other tiles add up in another
    order; with the first a run has the same bits in every start. Asked at every launch, as torch does: also a
    process that has timed the configs.

    Args:
        first: the autotuner with the first config alone, which times nothing.
        timed: the one with all.
    """

    def __init__(self, first: Any, timed: Any):
        self.first, self.timed = first, timed

    def __getitem__(self, grid: Any) -> Any:
        return (self.first if torch.are_deterministic_algorithms_enabled() else self.timed)[grid]


def tuned(
    configs: Sequence[dict[str, int]],
    key: Sequence[str],
    trial: str | None = None,
    set_blocks: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[Any], Any]:
    """triton.autotune over `configs`, of which the first is the one for deterministic algorithms and for the
    interpreter; see Tuned.

    Args:
        configs: constants of the kernel with `num_warps` and `num_stages`; TMA=1 for what needs the tensor
            descriptor `w_tma`.
        key: arguments of the kernel that another shape changes; for each new set of values the configs are
            timed.
        trial: argument of a kernel that adds to what is there: 1 while the configs are timed, for which it
            must leave its output as it was, else 0. The launch does not give it. Triton's own way is a copy
            of the output, in the first backward pass of a run.
        set_blocks: gives descriptors among the arguments the block shapes of the config, called with all
            arguments before each launch.
    """

    def decorate(function: Any) -> Any:
        if triton is None:
            return function
        function, hooks = _told_of_trials(function, trial) if trial else (function, {})
        # A driver is wanted as soon as there are two.
        chosen = [make_config(config, set_blocks) for config in (configs[:1] if INTERPRETED else configs)]
        first = triton.autotune(chosen[:1], key=[])(function)
        return Tuned(
            first,
            triton.autotune(chosen, key=list(key), prune_configs_by={"early_config_prune": _suited}, **hooks)(
                function
            ),
        )

    return decorate


def _told_of_trials(function: Any, trial: str) -> tuple[Any, dict[str, Callable[..., None]]]:
    """The kernel with its argument `trial` given, and the autotuner's hooks, which stand round every launch
    that is timed.
    """
    is_trial = 0

    def begin(args: dict[str, Any], reset_only: bool = False) -> None:
        nonlocal is_trial
        is_trial = int(not reset_only)

    def end(args: dict[str, Any], exception: Exception | None) -> None:
        nonlocal is_trial
        is_trial = 0

    return triton.heuristics({trial: lambda args: is_trial})(function), {"pre_hook": begin, "post_hook": end}


def make_config(config: dict[str, int], set_blocks: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """triton.Config of constants with `num_warps` and `num_stages`; of small tiles under the interpreter."""
    constants = {name: value for name, value in config.items() if not name.startswith("num_")}
    if INTERPRETED:
        constants = {
            name: min(value, _INTERPRETED_TILE) if name.startswith("BLOCK_") else value
            for name, value in constants.items()
        }
    return triton.Config(
        constants, num_warps=config["num_warps"], num_stages=config["num_stages"], pre_hook=set_blocks
    )


_INTERPRETED_TILE = 32  # so that small shapes have several tiles


def _suited(configs: list[Any], named_args: dict[str, Any], **others: Any) -> list[Any]:
    if (named_args | others).get("w_tma") is None:
        configs = [config for config in configs if not config.kwargs.get("TMA")]
    return configs


def rows_class(num_rows: int, num_groups: int = 1) -> int:
    """Part of the keys of tuning: 0, 1 or 2 for less than 64, less than 512 or more rows per group, which
    want other tiles.

    So a process that first generates a few tokens does not train with their config. Coarse, because every
    class is timed once.
    """
    return sum(num_rows >= num_groups * size for size in (64, 512))


def last_contiguous(x: Tensor) -> Tensor:
    """`x`, or a copy where its last dimension has gaps, of whose stride the kernels know nothing."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Vectors as kernels read them, one value after the other; None stays None."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def descriptors(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensor descriptors, for the copy engine that GPUs have from Hopper on (TMA): whole blocks, no addresses
    and masks in registers.

    What lies outside a tensor is read as zero. The block shapes are set by `tuned`'s set_blocks.

    Args:
        tensors: of which None stays None.

    Returns:
        All None where the device has no TMA, or one of the tensors does not fit: 16 bytes are the unit of
            addresses and strides.
    """
    if not all(x is None or _fits_tma(x) for x in tensors):
        return (None,) * len(tensors)
    make = triton.tools.tensor_descriptor.TensorDescriptor
    return tuple(
        None if x is None else make(x, list(x.shape), list(x.stride()), [1] * x.dim()) for x in tensors
    )


def _fits_tma(x: Tensor) -> bool:
    *strides, last = x.stride()
    fits = (
        last == 1
        and x.numel() > 0
        and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    )
    return fits and _has_tma(x)


def _has_tma(x: Tensor) -> bool:
    return (INTERPRETED or torch.cuda.get_device_capability(x.device) >= (9, 0)) and x.data_ptr() % 16 == 0


def num_programs(x: Tensor, num_tiles: int, *, per_processor: int = 1) -> int:
    """Programs of a persistent grid: each takes one tile after the other.

    Args:
        x: on the device.
        num_tiles: at most so many; under the interpreter two, so that each has several.
        per_processor: that fit on a streaming multiprocessor together.
    """
    if not x.is_cuda:
        return min(2, num_tiles)
    return min(num_tiles, per_processor * _num_processors(x.device.index))


@functools.cache
def _num_processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def dot_constants(x: Tensor) -> dict[str, Any]:
    """Constants of kernels with `tiles.dot`: TF32 only where torch may use it, and fp32 operands under the
    interpreter.
    """
    allows_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "tf32" if allows_tf32 else "ieee", "INTERPRET": INTERPRETED}


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def compilable(
    name: str, fake: Callable[..., Any], *, mutates: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Under torch.compile the function is one operator, `moe_exp::name`, that is not looked into; else it is
    called as it is.

    Args:
        name: of the operator.
        fake: what the function returns by shape and dtype, without values; called with the same arguments.
        mutates: arguments that it writes to.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        positional = _positional(function, signature)
        operator = torch.library.custom_op(f"moe_exp::{name}", positional, mutates_args=tuple(mutates))
        operator.register_fake(_positional(fake, signature))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return operator(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _positional(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The function with no argument by keyword only: an operator of torch takes no tensor in that way."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_keyword = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    first = len(kinds) - len(by_keyword)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:first], **dict(zip(by_keyword, args[first:], strict=False)), **kwargs)

    parameters = [
        parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for parameter in signature.parameters.values()
    ]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
