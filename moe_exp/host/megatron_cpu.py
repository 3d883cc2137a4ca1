"""Import hook that lets Megatron-Core run without a CUDA device; does nothing if a CUDA device exists.

`moe_exp/__init__.py` passes only imports of `megatron.*` to `find_spec`. Without a CUDA device, the hook
changes Megatron's modules: the name `torch` refers to a stand-in, CUDA literals become CPU literals, and a
few functions are replaced. Other code still uses the real torch, with one change: Tensor and Module get one
private method.
"""

import builtins
import contextlib
import importlib.machinery
import logging
import queue
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_exp.host import gloo, megatron_versions

# Replaces the attribute name `cuda` in Megatron's code.
_KEYWORD = "_megatron_accelerator"
_CPU_WORDS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
# Optional packages for Megatron's timers, inference and S3 datasets, which this package does not use. Loading
# them takes a tenth of a rank's start-up time.
_LEFT_OUT = ("boto3", "torch.utils.tensorboard", "wandb")


class _Event:
    """Stand-in for torch.cuda.Event that is always complete: CPU calls return when their work is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Stream(torch.cpu.Stream):
    """torch.cpu.Stream with the methods of torch.cuda.Stream that Megatron calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any = None) -> None: ...

    wait_event = synchronize = wait_stream  # type: ignore[assignment]

    def record_event(self, event: Any = None) -> _Event:  # type: ignore[override]
        return _Event()


class _CpuAccelerator(types.ModuleType):
    """torch.cuda as Megatron sees it on a host without CUDA."""

    Stream = _Stream
    Event = _Event

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stream = _Stream()
        device = torch.device("cpu")
        answers: dict[str, Any] = {
            "is_available": False, "is_initialized": False, "is_current_stream_capturing": False,
            "current_device": device, "device_count": 0, "current_stream": stream, "default_stream": stream,
            "synchronize": None, "set_device": None, "empty_cache": None, "ipc_collect": None,
            "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
            "memory_stats": {}, "reset_peak_memory_stats": None,
        }  # fmt: skip
        for name, answer in answers.items():
            setattr(self, name, _constant(answer))
        self.stream = self.device = lambda *args, **kwargs: contextlib.nullcontext()
        self.manual_seed = self.manual_seed_all = torch.manual_seed
        self.get_rng_state = lambda device=None: torch.get_rng_state()
        self.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        self.nvtx = types.SimpleNamespace(range_push=_constant(None), range_pop=_constant(None))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(types.ModuleType):
    """torch as Megatron sees it on a host without CUDA: `torch.cuda` is replaced, `pin_memory` ignored."""

    def __init__(self) -> None:
        super().__init__("torch")
        setattr(self, _KEYWORD, _CpuAccelerator())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)


def _constant(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


# Literals are such as `device="cuda"`, `"torch.cuda.FloatTensor"` and `.cuda()`. Rewriting the byte code that
# Python has cached, instead of the source, costs no start-up time.
def _for_cpu(const: Any) -> Any:
    """A code object, or one of its constants, with CUDA literals replaced by CPU literals."""
    if isinstance(const, types.CodeType):
        names = tuple(_KEYWORD if name == "cuda" else name for name in const.co_names)
        return const.replace(co_names=names, co_consts=_for_cpu(const.co_consts))  # includes nested functions
    if isinstance(const, tuple):
        return tuple(map(_for_cpu, const))
    return _CPU_WORDS.get(const, const) if isinstance(const, str) else const


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a Megatron module with CPU literals for CUDA literals, and the stand-in for `torch`."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        code: types.CodeType | None = _for_cpu(super().get_code(fullname))
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)
        if mend := _PATCHES.get(module.__name__):
            mend(module)


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name in _LEFT_OUT:
        raise ModuleNotFoundError(f"moe_exp does not load {name} for Megatron on a host without CUDA")
    module = builtins.__import__(name, globals, locals, fromlist, level)
    # only `import torch` and `import torch.x` bind the name torch, `from torch import x` does not
    return _STAND_IN if module is torch and not fromlist else module


def find_spec(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    """Import spec by which `_Loader` loads a Megatron module; None with CUDA, so that Python loads it."""
    if not INSTALLED:
        return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
    return spec


def _patch_random(module: Any) -> None:
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_writer(module: Any) -> None:
    # Megatron writes checkpoints in forked processes. With gloo's threads a fork may hang or fail with
    # EOFError, so the rank itself writes with the same function.
    writer = module.FileSystemWriterAsync
    results: queue.Queue[Any] = queue.Queue()

    def write(
        transforms: Any, use_msc: Any, rank: int, write_buckets: Sequence[Any], results: queue.Queue[Any]
    ) -> None:
        written = {}
        for index, bucket in enumerate(write_buckets):
            outcomes, count = queue.Queue(), queue.Queue()  # type: queue.Queue[Any], queue.Queue[int]
            count.put(index)
            writer.write_preloaded_data(transforms, index, bucket, outcomes, count, use_fsync=True)
            _, written[index] = outcomes.get()
        failure = next((outcome for outcome in written.values() if isinstance(outcome, Exception)), None)
        results.put(written if failure is None else failure)

    megatron_versions.write_in_the_rank(module, write, results)


def _patch_norm(module: Any) -> None:
    # On a CPU, torch's fp32 norm of a million values is off by 1e-5, and depends on the split over ranks.
    def l2_norm(
        chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Any], per_tensor: bool, *args: Any
    ) -> tuple[torch.Tensor, None]:
        tensors = (x for of_list in tensor_lists for x in of_list)
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors]
        return torch.stack(norms).norm().float().view(1), None

    module.local_multi_tensor_l2_norm = l2_norm


def _patch_collectives(module: Any) -> None:
    module.dist_all_gather_func = gloo.all_gather
    module.dist_reduce_scatter_func = gloo.reduce_scatter


def _patch_moe(module: Any) -> None:
    # For comparisons with Megatron's router and dispatcher. All-to-all requires sizes as numbers, to which
    # Megatron converts tensors only on a GPU.
    megatron_versions.patch_router(module)
    move = module.maybe_move_tensor_to_cpu

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = as_numbers


# Modules with functions that call CUDA's C interface, or are slow or wrong on a CPU.
_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.layers": _patch_collectives,
    "megatron.core.tensor_parallel.mappings": _patch_collectives,
    "megatron.core.utils": _patch_norm,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _patch_writer,
    # torch.compile would need a C++ compiler, for fusions that gain little on a CPU
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.moe_utils": _patch_moe,
}
_STAND_IN = _TorchOnCpu()
INSTALLED = not torch.cuda.is_available()


def refuse_if_too_late() -> None:
    """Raises ImportError if the hook is needed but a program imported megatron before moe_exp."""
    if INSTALLED:
        raise ImportError("moe_exp: megatron was imported before moe_exp. Fix: import moe_exp first.")


# Several of Megatron's modules warn at import. A run's log and `moe-exp doctor` report what is used instead.
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed", UserWarning)
if INSTALLED:
    # Megatron imports this module of torch, which warns about a CUDA toolkit without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _keep: Callable[..., Any] = lambda self, *args, **kwargs: self  # noqa: E731
    setattr(torch.Tensor, _KEYWORD, _keep)
    setattr(torch.nn.Module, _KEYWORD, _keep)
