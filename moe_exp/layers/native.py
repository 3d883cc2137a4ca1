"""CPU functions of the MoE layer, compiled from native.cpp with this machine's C++ compiler.

Each function makes one pass over its data, where plain torch makes several. Plain torch is used for tensors
that `takes` rejects. For bf16 tensors, plain torch rounds after each step, but these functions round only
their results. They keep router weights in fp32. Shape suffixes: see `moe_exp.layers`.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from torch import Tensor

from moe_exp.layers import activations

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
    "-shared",
)  # fmt: skip
_MOST_SECONDS = 120  # limit for compiling, here or in another process; it usually takes 2
_FLOATS = (torch.float32, torch.bfloat16)


def takes(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether this module supports `x`, whose dtype must be in `dtypes` (default: fp32 and bf16)."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)  # subclasses such as DTensor have no usable data pointer
        and x.device.type == "cpu"
        and x.dtype in (dtypes or _FLOATS)
        and library()[0] is not None
    )


def weighted_activation(hidden_RW: Tensor, weights_R: Tensor, name: str) -> Tensor:
    """`activations.weighted_activation` for weights of any dtype. Uses plain torch if `takes` is False."""
    if not takes(hidden_RW):
        return activations.weighted_activation(hidden_RW, weights_R.to(hidden_RW.dtype).unsqueeze(1), name)
    hidden_RW, weights_R = hidden_RW.contiguous(), weights_R.float().contiguous()
    width = hidden_RW.size(1) // (1 + activations.ACTIVATIONS[name].gated)
    active_RF = hidden_RW.new_empty(hidden_RW.size(0), width)
    _call(name, hidden_RW.dtype, *active_RF.shape, hidden_RW, weights_R, active_RF)
    return active_RF


def weighted_activation_backward(
    grad_RF: Tensor, hidden_RW: Tensor, weights_R: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `weighted_activation`; overwrites `grad_RF`, which must be contiguous.

    Returns:
        Gradient of `hidden_RW`, gradient of the weights [R], and the result of `weighted_activation`.
    """
    if not takes(hidden_RW):
        weights_R1 = weights_R.to(hidden_RW.dtype).unsqueeze(1)
        dhidden_RW, dweights_R, product_RF = activations.weighted_activation_backward(
            grad_RF, hidden_RW, weights_R1, name
        )
        return dhidden_RW, dweights_R, product_RF.mul_(weights_R1)
    hidden_RW, weights_R = hidden_RW.contiguous(), weights_R.float().contiguous()
    dhidden_RW, dweights_R = torch.empty_like(hidden_RW), torch.empty_like(weights_R)
    tensors = grad_RF, hidden_RW, weights_R, dhidden_RW, dweights_R
    _call(f"{name}_backward", hidden_RW.dtype, *grad_RF.shape, *tensors)
    return dhidden_RW, dweights_R, grad_RF


def sort_slots(expert_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots sorted by expert, and each slot's position in the sorted order, both [N].

    Args:
        expert_N: int64, in [0, E]; slots with value E come last.
    """
    slot_N, row_N = torch.empty_like(expert_N), torch.empty_like(expert_N)
    ends_E = expert_N.new_empty(num_experts + 1)
    _call("sort_slots", None, expert_N.numel(), num_experts + 1, expert_N.contiguous(), ends_E, slot_N, row_N)
    return slot_N, row_N


def _call(name: str, dtype: torch.dtype | None, *arguments: int | Tensor) -> None:
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    _function(name, dtype, len(values))(*values)


@functools.cache
def _function(name: str, dtype: torch.dtype | None, num_arguments: int) -> Callable[..., None]:
    loaded, _ = library()
    assert loaded is not None
    function = loaded[name if dtype is None else f"{name}_{str(dtype).removeprefix('torch.')}"]
    # All arguments are sizes or addresses, both of 64 bits.
    function.restype, function.argtypes = None, [ctypes.c_int64] * num_arguments
    return function


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """Returns the compiled library and the compiler's version, or None and why there is no library."""
    # CXX overrides the compiler; CXX=false disables compiling.
    named = shlex.split(os.environ.get("CXX", ""))
    commands = [named] if named else [["g++"], ["clang++"], ["c++"]]
    compiler = next((command for command in commands if shutil.which(command[0])), None)
    if compiler is None:
        return None, f"no C++ compiler in PATH ({', '.join(command[0] for command in commands)})"
    try:
        version, about = _run(*compiler, "--version"), set[str]()
        with suppress(OSError):  # identifies the CPU for which -march=native compiles
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            about = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
        cpu = (platform.system(), platform.machine(), platform.processor(), *sorted(about))
        facts = (*_FLAGS, *compiler, version, "\n".join(cpu), _SOURCE.read_text())
        key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
        # The name contains a hash of everything the binary depends on: machines may share a home folder.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-exp"
        path = folder / f"layer-{key}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # one process compiles while others wait for it; the file appears whole
            with FileLock(f"{path}.lock", timeout=_MOST_SECONDS), TemporaryDirectory(dir=folder) as building:
                if not path.exists():
                    made = Path(building) / path.name
                    _run(*compiler, *_FLAGS, "-o", str(made), str(_SOURCE))
                    made.replace(path)
        return ctypes.CDLL(str(path)), f"compiled by {version.splitlines()[0]}"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        logger.warning("native.cpp is not used; the layer computes in plain torch instead: %s", reason)
        return None, reason


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=_MOST_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}: {done.stderr[-300:]}")
    return done.stdout
