"""Shared by all kernels: whether they run, how a launch is sized and tuned, and torch.compile.

A kernel's module has the kernel, its twin in plain torch (`..._torch`: CPU path and test oracle) and the
public function that picks one. With TRITON_INTERPRET=1 in the environment before the first import, Triton
interprets kernels on CPU tensors, slowly, and they are used there, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

# Triton 3.9's default (a * b + c as one instruction). It warns if unset because 3.10 changes it; our numbers
# must not change with it. Process-wide, so it also applies to kernels of torch.compile.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language
    import triton.runtime.autotuner
    import triton.tools.tensor_descriptor
except ImportError:  # `missing` reports it when the kernels are requested
    triton = None

tl: Any = None if triton is None else triton.language

logger = logging.getLogger(__name__)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST_GPU = (8, 0)

Function = TypeVar("Function", bound=Callable[..., Any])


def missing() -> str:
    """Why the kernels cannot run on this machine's CUDA device, in words; empty if they can."""
    if triton is None:
        return "triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"the kernels need a GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer"
    return ""


def triton_version() -> str:
    """Version of the Triton that compiles the kernels, or `missing`."""
    return "missing" if triton is None else str(triton.__version__)


def runs_kernel(x: Tensor) -> bool:
    """Whether `x` is computed by a kernel, not its twin."""
    return triton is not None and (x.is_cuda or INTERPRETED)


# Prefixes of kernel arguments that change between launches: with expert parallelism or drops, row counts
# differ in every micro-batch. By default Triton compiles separately for 1, multiples of 16 and the rest, on
# first use: for seconds, in which the other ranks wait.
VARYING = ("num_", "rows_", "is_")


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit if Triton is installed; does not specialize on arguments whose names start as in VARYING.

    Profilers show a kernel under the names of its module and function, as in `up_projection_kernel`.
    """
    if triton is None:
        return function
    name = function.__module__.rpartition(".")[2] + function.__name__
    parameters = inspect.signature(function).parameters.values()
    varying = [
        x.name for x in parameters if x.name.startswith(VARYING) and "constexpr" not in str(x.annotation)
    ]
    return triton.jit(function, do_not_specialize=varying, repr=lambda _: name)


class Tuned:
    """A kernel with several configs: `kernel[grid](...)` takes the fastest.

    With torch.use_deterministic_algorithms it takes the first: another start may measure another config as
    fastest, whose tiles sum in another order. Checked at every launch, as in torch, so also after timing.

    Args:
        first: autotuner with only the first config, which times nothing.
        timed: autotuner with all configs.
    """

    def __init__(self, first: Any, timed: Any):
        self.first, self.timed = first, timed

    def __getitem__(self, grid: Any) -> Any:
        is_first = torch.are_deterministic_algorithms_enabled() and self.timed.only is None
        return (self.first if is_first else self.timed)[grid]

    def configs(self) -> list[Any]:
        """Configs that may run now."""
        return self.timed.configs[:1] if torch.are_deterministic_algorithms_enabled() else self.timed.configs

    @contextmanager
    def only(self, config: Any) -> Iterator[None]:
        """Inside, launches take this config; UnsuitedError if the operands do not suit it."""
        self.timed.only = config
        try:
            yield
        finally:
            self.timed.only = None


def configs(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    """Configs for `tuned`, a row each, with the `names` of their values."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def tuned(
    configs: Sequence[dict[str, int]],
    key: Sequence[str],
    trial: str | None = None,
    set_blocks: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[Any], Any]:
    """Decorator for an autotuner over `configs`; see Tuned and Autotuner.

    Args:
        configs: constants of the kernel with `num_warps` and `num_stages`; TMA=1 needs tensor
            descriptors; the argument HAS_TMA says whether there are. The first is used for deterministic
            algorithms and the interpreter.
        key: kernel arguments; the configs are timed for each new set of their values.
        trial: argument of a kernel that accumulates into its output: 1 while configs are timed, when it must
            leave the output unchanged, else 0; not passed by the launch. Triton's own way is to copy the
            output, in the first backward pass of a run.
        set_blocks: sets block shapes of descriptors; called with all arguments before each launch.
    """

    def decorate(function: Any) -> Any:
        if triton is None:
            return function
        function, hooks = _counting_trials(function, trial) if trial else (function, {})
        # As soon as there are two configs, Triton needs a driver.
        chosen = [make_config(config, set_blocks) for config in (configs[:1] if INTERPRETED else configs)]
        first = triton.autotune(chosen[:1], key=[])(function)
        return Tuned(first, Autotuner(function, chosen, key, **hooks))

    return decorate


class UnsuitedError(ValueError):
    """The config does not suit these operands, such as one with tensor descriptors if there are none."""


class Autotuner(object if triton is None else triton.runtime.autotuner.Autotuner):  # type: ignore[misc]
    """Triton's autotuner, except that a config that fails in any way is skipped, with one warning.

    Triton's own skips configs that need too much shared memory or registers; any other error of compiling, of
    a tensor descriptor or of the launch would end the run. A config that fails after it was chosen (operands
    with another alignment) is dropped, too, and the others are timed again.

    Args:
        key: see `tuned`.
        pre_hook, post_hook: Triton's, called before and after each timed launch.
    """

    def __init__(
        self,
        function: Any,
        configs: Sequence[Any],
        key: Sequence[str],
        *,
        pre_hook: Any = None,
        post_hook: Any = None,
    ):
        self._error: Exception | None = None  # of the config that is timed

        def after_trial(args: dict[str, Any], exception: Exception | None) -> None:
            self._error = exception or self._error
            if post_hook is not None:
                post_hook(args, exception)

        options = {
            "pre_hook": pre_hook,
            "post_hook": after_trial,
            "prune_configs_by": {"early_config_prune": _suited},
        }
        super().__init__(function, function.arg_names, list(configs), list(key), None, None, **options)
        self._dropped: list[Any] = []
        self._warned: list[Any] = []
        self._num_left = 0
        self.only: Any = None  # see Tuned.only

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches the fastest config, or the next one if that fails."""
        if self.only is not None:
            return self._run_only(self.only, *args, **kwargs)
        while True:
            self.best_config = None
            try:
                return super().run(*args, **kwargs)
            except Exception as error:
                # Without a config it was not a launch; a single config has no alternative.
                if self.best_config is None or len(self.configs) == 1 or is_of_device(error):
                    raise
                self.drop(self.best_config, error)
                self.cache = {
                    key: config for key, config in self.cache.items() if config not in self._dropped
                }

    def _run_only(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if not _suited([config], named):
            raise UnsuitedError(f"{self._name()}: config {config} is not for these operands")
        if config.pre_hook is not None:
            config.pre_hook(named | config.all_kwargs())
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def drop(self, config: Any, error: Exception) -> None:
        """Never uses the config again."""
        self._dropped.append(config)
        self._warn(config, error)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
        """Configs that suit the operands and have not failed in a launch."""
        left = [config for config in super().prune_configs(kwargs) if config not in self._dropped]
        self._num_left = len(left)
        if not left:
            raise self._no_config_error()
        return left

    def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
        self._error = None
        try:
            timings = super()._bench(*args, config=config, **meta)
        except Exception as error:
            if is_of_device(error):
                raise
            self._error, timings = error, [math.inf] * 3
        if self._error is not None:
            self._warn(config, self._error)
            self._num_left -= 1
            if self._num_left == 0:
                raise self._no_config_error() from self._error
        return timings

    def _warn(self, config: Any, error: Exception) -> None:
        if config not in self._warned:
            self._warned.append(config)
            logger.warning("%s: config %s is not used: %s", self._name(), config, in_one_line(error))

    def _no_config_error(self) -> RuntimeError:
        return RuntimeError(f"{self._name()}: none of its {len(self.configs)} configs runs")

    def _name(self) -> str:
        return f"kernel {self.base_fn.__module__.rpartition('.')[2]}"


def in_one_line(error: BaseException) -> str:
    """Type and text of an error, shortened, as compiler errors may be long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + ' ...'}"


def is_of_device(error: Exception) -> bool:
    """Whether the config is not to blame: out of memory, or the device is unusable (illegal access)."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _counting_trials(function: Any, trial: str) -> tuple[Any, dict[str, Callable[..., None]]]:
    """The kernel with its argument `trial` supplied, and the autotuner's hooks around every timed launch."""
    is_trial = 0

    def begin(args: dict[str, Any], reset_only: bool = False) -> None:
        nonlocal is_trial
        is_trial = int(not reset_only)

    def end(args: dict[str, Any], exception: Exception | None) -> None:
        nonlocal is_trial
        is_trial = 0

    return triton.heuristics({trial: lambda args: is_trial})(function), {"pre_hook": begin, "post_hook": end}


def make_config(config: dict[str, int], set_blocks: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """triton.Config of constants with `num_warps` and `num_stages`; small tiles if interpreted."""
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
    if not (named_args | others).get("HAS_TMA"):
        configs = [config for config in configs if not config.kwargs.get("TMA")]
    return configs


def rows_class(num_rows: int, num_groups: int = 1) -> int:
    """0, 1 or 2 for less than 64, less than 512 or more rows per group, which need different tiles.

    Part of the tuning keys, so that a process that first generates a few tokens does not train with their
    config. Coarse, because every class is timed once.
    """
    return sum(num_rows >= num_groups * size for size in (64, 512))


def last_contiguous(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is strided, which kernels do not support."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Contiguous vectors, as kernels read them; None stays None."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def descriptors(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensor descriptors for the copy engine of Hopper and later (TMA): whole blocks, no masks.

    Values outside a tensor are read as zero. `tuned`'s set_blocks sets the block shapes. None stays None.

    Returns:
        All None if the device has no TMA, an address or stride is not a multiple of 16 bytes, or values have
            not two bytes: fp32 is multiplied without tensor cores, and Triton spills all of such a block.
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
        and x.element_size() == 2
        and x.numel() > 0
        and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    )
    return fits and _has_tma(x)


def _has_tma(x: Tensor) -> bool:
    return (INTERPRETED or torch.cuda.get_device_capability(x.device) >= (9, 0)) and x.data_ptr() % 16 == 0


_num_free_processors = 0  # per process, as all layers share the device


def leave_free(num_processors: int) -> None:
    """Sets how many multiprocessors the persistent grids of GEMMs leave free for others (MOE_SM_MARGIN)."""
    global _num_free_processors
    _num_free_processors = num_processors


def num_programs(x: Tensor, num_tiles: int, *, per_processor: int = 1, takes_all: bool = False) -> int:
    """Programs of a persistent grid, in which each computes one tile after another.

    Args:
        x: on the device.
        num_tiles: upper limit; under the interpreter two, so that each program has several tiles.
        per_processor: programs that fit on a streaming multiprocessor together.
        takes_all: also those that `leave_free` excludes, as sums depend on the number of programs.
    """
    num_processors = max(1, processors(x.device) - (0 if takes_all else _num_free_processors))
    return min(num_tiles, num_processors * (per_processor if x.is_cuda else 1))


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; under the interpreter two."""
    return _num_processors(device.index) if device.type == "cuda" else 2


@functools.cache
def _num_processors(device: int | None) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def dot_constants(x: Tensor) -> dict[str, Any]:
    """Constants of kernels with `tiles.dot`: TF32 only if torch may use it; fp32 if interpreted."""
    allows_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {"PRECISION": "tf32" if allows_tf32 else "ieee", "INTERPRET": INTERPRETED}


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Division, rounded up."""
    return -(-number // divisor)


def compilable(
    name: str, fake: Callable[..., Any], *, mutates: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Decorator: runs a function on its tensors' device; Triton would launch on the current one.

    Under torch.compile it is one opaque operator, `moe_exp::name`.

    Args:
        fake: returns the shapes and dtypes of the results, without values; takes the same arguments.
        mutates: names of arguments that it writes to.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)

        @functools.wraps(function)
        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            with _device_of((*args, *kwargs.values())):
                return function(*args, **kwargs)

        positional = _positional(on_its_device, signature)
        operator = torch.library.custom_op(f"moe_exp::{name}", positional, mutates_args=tuple(mutates))
        operator.register_fake(_positional(fake, signature))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else on_its_device)(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


current_device: Any = torch.cuda.device  # under which a kernel is launched


def _device_of(args: Sequence[Any]) -> Any:
    """A context in which the device of the first tensor is the current one; no-op on a CPU."""
    x = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return current_device(x.device) if x is not None and x.is_cuda else nullcontext()


def _positional(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The function without keyword-only arguments: an operator of torch accepts no tensor there."""
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
