"""Chooses a kernel's config: times all configs, reads a stored choice, or takes over rank 0's choice."""

import functools
import hashlib
import json
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.host.devices import driver_version
from moe_exp.host.files import read_json, write_json
from moe_exp.layers.kernels.launch import (
    INTERPRETED,
    VARYING,
    free_processors,
    in_one_line,
    is_of_device,
    triton,
)

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class KernelConfig:
    """Constants, `num_warps` and `num_stages` of a launch; the constant TMA=1 requires tensor descriptors.

    A config that contains only LIBRARY=1 selects a PyTorch function instead of the kernel, see `tuned`.
    """

    constants: dict[str, int]

    def suits(self, kwargs: dict[str, Any]) -> bool:
        """Whether the config supports these operands."""
        return all(kwargs.get(f"HAS_{name}") or not self.constants.get(name) for name in ("TMA", "LIBRARY"))

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.constants.items())


def _without_descriptors(args: Sequence[Any]) -> list[Any]:
    descriptor = triton.tools.tensor_descriptor.TensorDescriptor
    return [None if isinstance(x, descriptor) else x for x in args]


@dataclass(frozen=True, eq=False)
class _Launcher:
    """Launches a compiled kernel without Triton's cache lookup: the lookup takes longer than the launch."""

    config: KernelConfig
    compiled: Any  # triton.compiler.CompiledKernel
    constants: tuple[Any, ...]  # values of the arguments after the positional ones

    def launch(self, args: Sequence[Any], grid: Any) -> None:
        if not self.config.constants.get("TMA"):
            args = _without_descriptors(args)
        sizes = grid(self.config.constants) if callable(grid) else grid
        self.compiled[(*sizes, 1, 1)[:3]](*args, *self.constants)


class Tuned:
    """A kernel with several configs: `kernel[grid](...)` launches the fastest. Arguments: see `tuned`.

    The configs are timed at the first launch with a new key. A launch's key consists of the dtypes of all
    tensors and the values of the arguments that `key` names. A config that fails is dropped with one warning,
    and another config is used. After `take_choices`, no config is timed. A new key then uses the config of
    the most similar key.
    """

    def __init__(
        self, function: Any, configs: Sequence[KernelConfig], key: Sequence[str],
        blocks: Callable[[dict[str, Any]], dict[str, list[int]]] | None = None,
        library: Callable[[dict[str, Any]], None] | None = None,
    ):  # fmt: skip
        self.fn, self.configs, self._blocks, self.library = function, list(configs), blocks, library
        self.name = function.fn.__module__.rpartition(".")[2]
        self._of_key = [(name, function.arg_names.index(name)) for name in key]
        self._varies = [name.startswith(VARYING) and name not in key for name in function.arg_names]
        self._launchers: dict[Key, _Launcher] = {}
        self.choices: dict[Key, KernelConfig] = {}
        self.is_decided = False
        self._dropped: list[KernelConfig] = []
        self._warned: list[KernelConfig] = []
        self._only: KernelConfig | None = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid, warmup=False)

    def candidates(self) -> list[KernelConfig]:
        """Configs that may run: only the first if deterministic algorithms are enabled."""
        return self.configs[:1] if torch.are_deterministic_algorithms_enabled() else self.configs

    @contextmanager
    def only(self, config: KernelConfig) -> Iterator[None]:
        """Launches use `config` in this context. UnsuitedError if `config` does not support the operands."""
        self._only = config
        try:
            yield
        finally:
            self._only = None

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Launches the fastest config or, if the launch fails, another config."""
        options = kwargs | {"grid": grid, "warmup": warmup}
        if self._only is not None:
            if not self._only.suits(kwargs):
                raise UnsuitedError(f"kernel {self.name}: config {self._only} does not support the operands")
            self._launch(self._only, args, options)
            return
        # Another start may measure another config as fastest, which sums in another order. Checked at every
        # launch, because PyTorch allows changing this setting at any time.
        if torch.are_deterministic_algorithms_enabled():
            self._launch(self.configs[0], args, options)
            return
        signature = self._signature(args, kwargs)
        while True:
            known = self._launchers.get(signature)
            if known is None:
                key = self.key(args, options)
                config = self.choices.get(key) or self._choose(key, args, options)
            else:
                config = known.config
            try:
                if known is not None:
                    known.launch(args, grid)
                elif (compiled := self._launch(config, args, options)) is not None:
                    _, given = self.prepared(config, args, options)
                    constants = tuple(given[name] for name in self.fn.arg_names[len(args) :])
                    self._launchers[signature] = _Launcher(config, compiled, constants)
                return
            except Exception as error:  # a chosen config can fail later, for example on other alignments
                if len(self.configs) == 1 or is_of_device(error):
                    raise
                self.drop(config, error)

    def _signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Key:
        """Key of a launcher: all inputs on which the config and the compiled code depend."""
        found: list[Any] = [args[0].device.index]
        for x, varies in zip(args, self._varies, strict=False):
            if isinstance(x, Tensor):
                found += x.dtype, x.data_ptr() % 16 == 0
            elif varies:
                found.append(x < 2**31)
            else:
                found.append(type(x) if hasattr(x, "block_shape") else x)  # a descriptor has no hash
        return *found, *kwargs.values()

    def key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Key:
        """Returns the values of the `key` arguments, and the dtypes of all tensors."""
        given = len(args)
        values = [args[place] if place < given else kwargs[name] for name, place in self._of_key]
        return *values, *[x.dtype for x in args if isinstance(x, Tensor)]

    def prepared(
        self, config: KernelConfig, args: Sequence[Any], kwargs: dict[str, Any], *, is_trial: int = 0
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Positional and keyword arguments for a launch with `config`."""
        kwargs = kwargs | config.constants
        if "is_trial" in self.fn.arg_names:
            kwargs["is_trial"] = is_trial
        if kwargs.get("HAS_TMA"):
            if config.constants["TMA"]:
                assert self._blocks is not None
                given = {**dict(zip(self.fn.arg_names, args, strict=False)), **kwargs}
                for name, shape in self._blocks(given).items():
                    if given[name] is not None:
                        given[name].block_shape = shape
            else:  # saves encoding them, and configs without TMA still run if the driver cannot encode them
                args = _without_descriptors(args)
        return args, kwargs

    def suited(self, kwargs: dict[str, Any]) -> list[KernelConfig]:
        """Configs that support the operands and have not failed."""
        return [x for x in self.configs if x not in self._dropped and x.suits(kwargs)]

    def take(self, choices: dict[Key, KernelConfig]) -> None:
        """Replaces the choices (see `take_choices`). Configs that failed in this process are left out."""
        self.choices = {key: config for key, config in choices.items() if config not in self._dropped}
        self._launchers.clear()
        self.is_decided = True

    def drop(self, config: KernelConfig, error: Exception) -> None:
        """Excludes a config that failed."""
        self._dropped.append(config)
        self.choices = {key: chosen for key, chosen in self.choices.items() if chosen is not config}
        self._launchers.clear()
        self._warn(config, error)

    def _launch(
        self, config: KernelConfig, args: Sequence[Any], kwargs: dict[str, Any], *, is_trial: int = 0
    ) -> Any:
        """Launches a config; returns the compiled kernel (None for an interpreted or PyTorch function)."""
        if config.constants.get("LIBRARY"):
            assert self.library is not None
            return self.library(dict(zip(self.fn.arg_names, args, strict=False)))
        args, kwargs = self.prepared(config, args, kwargs, is_trial=is_trial)
        return self.fn.run(*args, **kwargs)

    def _choose(self, key: Key, args: Sequence[Any], kwargs: dict[str, Any]) -> KernelConfig:
        left = self.suited(kwargs) if len(self.configs) > 1 else self.configs
        if not left:
            raise self._no_config_error()
        if len(left) == 1:
            config = left[0]
        elif self.is_decided:
            # Other ranks would wait for timing. Use the choice for the key that matches in most positions, or
            # else the first config.
            known = [other for other, config in self.choices.items() if config in left]
            similar = max(known, key=lambda other: sum(map(operator.eq, other, key)), default=None)
            config = left[0] if similar is None else self.choices[similar]
            line = "kernel %s: not timed at the start for %s, using config %s"
            logger.warning(line, self.name, self._in_words(key), config)
        else:
            config = self._fastest(left, key, args, kwargs)
        self.choices[key] = config
        return config

    def _in_words(self, key: Key) -> str:
        of_key = ", ".join(f"{name}={value}" for (name, _), value in zip(self._of_key, key, strict=False))
        return f"{of_key}, {' '.join(str(x).removeprefix('torch.') for x in key[len(self._of_key) :])}"

    def _fastest(
        self, configs: Sequence[KernelConfig], key: Key, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> KernelConfig:
        file = self._file(key)
        stored = None
        if file is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):  # missing, or damaged
                stored = str(read_json(file)["config"])
        if known := next((config for config in configs if str(config) == stored), None):
            return known
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            operands, rule = self._in_words(key), "configs cannot be timed during CUDA graph capture"
            fix = "call the kernel once with operands of these sizes before the capture"
            raise RuntimeError(f"kernel {self.name}: {operands}: {rule}. Fix: {fix}.")
        found: dict[KernelConfig, float] = {}
        error: Exception | None = None
        for config in configs:
            launch = functools.partial(self._launch, config, args, kwargs, is_trial=1)
            try:
                found[config] = milliseconds(launch)
            except torch.OutOfMemoryError as full:
                line = "kernel %s: out of memory while timing configs, using config %s: %s"
                logger.warning(line, self.name, configs[0], in_one_line(full))
                return configs[0]
            except Exception as caught:
                if is_of_device(caught):
                    raise
                error = caught
                self._warn(config, caught)
        if not found:
            raise self._no_config_error() from error
        times = {str(config): round(ms, 4) for config, ms in found.items()}
        logger.debug("kernel %s, %s, milliseconds: %s", self.name, self._in_words(key), times)
        fastest = min(found, key=lambda config: found[config])
        if file is not None:
            choice = {"kernel": self.name, "operands": self._in_words(key), "config": str(fastest)}
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, choice)
            except OSError as failed:  # a full disk, or a read-only home folder
                logger.debug("cannot write %s: %s", file, in_one_line(failed))
        return fastest

    def _file(self, key: Key) -> Path | None:
        """File in which processes share a choice. Its name has a hash of all facts that decide the choice."""
        on = device_facts()
        if not on:
            return None
        facts = [self.fn.cache_key, triton.__version__, *on, free_processors(), self._in_words(key)]
        facts.append([str(config) for config in self.configs])
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        return Path(folder, "moe_exp", f"{self.name}-{digest[:32]}.json")

    def _warn(self, config: KernelConfig, error: Exception) -> None:
        if config not in self._warned:
            self._warned.append(config)
            logger.warning("kernel %s: config %s is not used: %s", self.name, config, in_one_line(error))

    def _no_config_error(self) -> RuntimeError:
        return RuntimeError(f"kernel {self.name}: all of its {len(self.configs)} configs failed")


TUNED: dict[str, Tuned] = {}  # all tuned kernels, by name


def choices() -> dict[str, dict[Key, int]]:
    """Returns the index of the chosen config for each key of each kernel."""
    return {
        name: {key: kernel.configs.index(config) for key, config in kernel.choices.items()}
        for name, kernel in TUNED.items()
    }


def take_choices(found: dict[str, dict[Key, int]]) -> None:
    """Replaces this process's choices with those of another process; no config is timed afterwards."""
    for name, kernel in TUNED.items():
        kernel.take({key: kernel.configs[number] for key, number in found.get(name, {}).items()})


def device_facts() -> tuple[str, ...]:
    """Name and driver version of the current device; empty if there is no device."""
    if not torch.cuda.is_available():
        return ()
    return torch.cuda.get_device_name(), driver_version()


class UnsuitedError(ValueError):
    """The config does not support the operands, for example because there are no tensor descriptors."""


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a launch on the device."""
    # A third of the benchmark's default duration: a run does about 200 before its first iteration.
    benchmark = triton.runtime.driver.active.get_benchmarker()
    return float(benchmark(run, warmup=8, rep=32, quantiles=(0.5, 0.2, 0.8))[0])


def configs(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    """Configs for `tuned`, one per row. `names` has a name for each value in a row, separated by spaces."""
    # The kernels' configs are predicted, not measured: see docs/kernels.md.
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def tuned(
    configs: Sequence[dict[str, int]],
    key: Sequence[str],
    blocks: Callable[[dict[str, Any]], dict[str, list[int]]] | None = None,
    library: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[[Any], Any]:
    """Decorator for a kernel that is launched with the fastest of `configs`; see Tuned.

    A kernel that accumulates into its output has an argument `is_trial`: 1 while the kernel is timed, else 0.
    If `is_trial` is 1, the kernel must leave the output unchanged.

    Args:
        configs: see KernelConfig. Callers set the kernel argument HAS_TMA if they pass tensor descriptors.
            With deterministic algorithms, and in the interpreter, only the first config is used.
        key: names of kernel arguments; configs are timed again for each new combination of argument values.
        blocks: function that is called with a dict of all arguments before each launch with TMA=1. It
            returns a dict of block shapes; the keys are the names of the descriptor arguments. TMA=1
            requires 2-byte values.
        library: PyTorch function that computes the same result from a dict of the positional arguments.
            A last config, LIBRARY=1, selects this function. Callers set the kernel argument HAS_LIBRARY if
            `library` supports the operands.
    """
    # Without `is_trial`, Triton's autotuner copies the output, which needs memory in the first backward pass.

    def decorate(function: Any) -> Any:
        if triton is None:
            return function
        chosen = [make_config(config) for config in (configs[:1] if INTERPRETED else configs)]
        if library is not None and not INTERPRETED:
            chosen.append(KernelConfig({"LIBRARY": 1}))
        kernel = Tuned(function, chosen, key, blocks, library)
        TUNED[kernel.name] = kernel
        return kernel

    return decorate


def make_config(config: dict[str, int]) -> KernelConfig:
    """Makes a config for `tuned`, with small tiles if kernels are interpreted."""
    if INTERPRETED:
        blocks = {name: size for name, size in config.items() if name.startswith("BLOCK_")}
        config = config | {name: min(size, _INTERPRETED_TILE) for name, size in blocks.items()}
    # PROGRAMS programs share a processor's registers. Without a limit, Triton may use more than their part.
    num_registers = _REGISTERS // (32 * config["num_warps"] * config.get("PROGRAMS", 1))
    return KernelConfig(config | ({"maxnreg": num_registers} if num_registers < _MOST_REGISTERS else {}))


_REGISTERS, _MOST_REGISTERS = 2**16, 255  # per multiprocessor, and per thread
_INTERPRETED_TILE = 32  # so that small shapes have several tiles


def rows_class(num_rows: int, num_groups: int = 1) -> int:
    """Size class of the rows per group: 0 (below 64), 1 (below 512) or 2. Each class is tuned separately."""
    # Part of the tuning keys, so that a process that first generates a few tokens does not use their config
    # for training. Coarse, because every class is timed.
    return sum(num_rows >= num_groups * size for size in (64, 512))
