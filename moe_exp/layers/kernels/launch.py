"""What all kernels share: whether they run, how a launch is sized and tuned, and their place in torch.compile.

A kernel's module has the kernel, its twin in plain torch (`..._torch`: the path of a CPU, and the oracle of the tests) and the public
function that takes one or the other. With TRITON_INTERPRET=1 in the environment before the first import, Triton runs on CPU tensors,
slowly, and the kernels are taken there, too.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

# As Triton 3.9 compiles where nothing is said (a * b + c as one instruction), which it warns of, as 3.10 is to do otherwise: the numbers
# of these kernels are not to change with it. It is one setting for the process, so it holds for kernels of torch.compile, too.
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


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit, where Triton is there."""
    return function if triton is None else triton.jit(function)


def tuned(
    configs: Sequence[dict[str, int]],
    key: Sequence[str],
    restored: Sequence[str] = (),
    set_blocks: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[Any], Any]:
    """triton.autotune over `configs`, of which the first is the one for deterministic algorithms and for the interpreter.

    What was measured as fastest may be another config after the next start, and other tiles add up in another order: with
    torch.use_deterministic_algorithms the first config runs, and a run has the same bits in every start.

    Args:
        configs: constants of the kernel with `num_warps` and `num_stages`; TMA=1 for what needs the tensor descriptor `w_tma`.
        key: arguments of the kernel that another shape changes; for each new set of values the configs are timed.
        restored: arguments that the kernel adds to, which timing must leave as they were.
        set_blocks: gives descriptors among the arguments the block shapes of the config, called with all arguments before each launch.
    """

    def decorate(function: Any) -> Any:
        if triton is None:
            return function
        # A driver is wanted as soon as there are two.
        chosen = [make_config(config, set_blocks) for config in (configs[:1] if INTERPRETED else configs)]
        prune = {"early_config_prune": _suited}
        return triton.autotune(chosen, key=list(key), prune_configs_by=prune, restore_value=list(restored) or None)(function)

    return decorate


def make_config(config: dict[str, int], set_blocks: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """triton.Config of constants with `num_warps` and `num_stages`; of small tiles under the interpreter."""
    constants = {name: value for name, value in config.items() if not name.startswith("num_")}
    if INTERPRETED:
        constants = {name: min(value, _INTERPRETED_TILE) if name.startswith("BLOCK_") else value for name, value in constants.items()}
    return triton.Config(constants, num_warps=config["num_warps"], num_stages=config["num_stages"], pre_hook=set_blocks)


_INTERPRETED_TILE = 32  # so that small shapes have several tiles


def _suited(configs: list[Any], named_args: dict[str, Any], **others: Any) -> list[Any]:
    if (named_args | others).get("w_tma") is None:
        configs = [config for config in configs if not config.kwargs.get("TMA")]
    return configs[:1] if torch.are_deterministic_algorithms_enabled() else configs


def descriptors(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensor descriptors, for the copy engine that GPUs have from Hopper on (TMA): whole blocks, no addresses and masks in registers.

    What lies outside a tensor is read as zero. The block shapes are set by `tuned`'s set_blocks.

    Args:
        tensors: of which None stays None.

    Returns:
        All None where the device has no TMA, or one of the tensors does not fit: 16 bytes are the unit of addresses and strides.
    """
    if not all(x is None or _fits_tma(x) for x in tensors):
        return (None,) * len(tensors)
    make = triton.tools.tensor_descriptor.TensorDescriptor
    return tuple(None if x is None else make(x, list(x.shape), list(x.stride()), [1] * x.dim()) for x in tensors)


def _fits_tma(x: Tensor) -> bool:
    *strides, last = x.stride()
    fits = last == 1 and x.numel() > 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
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
    """Constants of kernels with `tiles.dot`: TF32 only where torch may use it, and fp32 operands under the interpreter."""
    allows_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "tf32" if allows_tf32 else "ieee", "INTERPRET": INTERPRETED}


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def compilable(name: str, fake: Callable[..., Any], *, mutates: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Under torch.compile the function is one operator, `moe_exp::name`, that is not looked into; else it is called as it is.

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

    parameters = [parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
