"""Grouped GEMM: a matrix product per expert, for rows sorted by expert. Shape suffixes: see `moe_exp.layers`.

Backends have the signature `(x_RD, w_LDF, tokens_per_expert_L, splits) -> y_RF`. The backends in FUSED
differ: each computes whole experts in one function. `splits` lists the number of rows of each expert; it is
None if the host does not know these numbers. `choose_backend` selects a backend. The backends in PACKAGES
have not been run yet. They follow the source code of megablocks, Transformer Engine 2.x,
github.com/tgale96/grouped_gemm and nv-grouped-gemm (github.com/fanshiqing/grouped_gemm). The last two are
both imported as grouped_gemm.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_exp.config.choices import EXPERT_BACKENDS
from moe_exp.layers.kernels import launch

Splits = Sequence[int] | None  # rows per expert, if known on the host
GroupedGemm = Callable[[Tensor, Tensor, Tensor, Splits], Tensor]
PACKAGES = {name: backend for name, backend in EXPERT_BACKENDS.items() if backend.modules}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class _Loop(torch.autograd.Function):
    """Computes one matrix product per expert and writes it directly into the result."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_LDF: Tensor, splits: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_RD, w_LDF)
        ctx.splits = splits
        y_RF = x_RD.new_empty(x_RD.size(0), w_LDF.size(2))
        for x, w, y in zip(x_RD.split(splits), w_LDF.unbind(0), y_RF.split(splits), strict=True):
            torch.mm(x, w, out=y)
        return y_RF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RD, w_LDF = ctx.saved_tensors
        grad_L = grads[0].contiguous().split(ctx.splits)
        dx_RD = torch.empty_like(x_RD) if ctx.needs_input_grad[0] else None
        dw_LDF = torch.empty_like(w_LDF) if ctx.needs_input_grad[1] else None
        if dx_RD is not None:
            for dx, w, dy in zip(dx_RD.split(ctx.splits), w_LDF.unbind(0), grad_L, strict=True):
                torch.mm(dy, w.t(), out=dx)
        if dw_LDF is not None:
            for dw, x, dy in zip(dw_LDF.unbind(0), x_RD.split(ctx.splits), grad_L, strict=True):
                torch.mm(x.t(), dy, out=dw)
        return dx_RD, dw_LDF, None


def loop_backend(x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits) -> Tensor:
    """Computes one matrix product per expert, for any device and dtype. Synchronizes if `splits` is None."""
    return _Loop.apply(x_RD, w_LDF, list(splits) if splits is not None else tokens_per_expert_L.tolist())


def torch_backend(x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits) -> Tensor:
    """Calls torch.nn.functional.grouped_mm, which never synchronizes.

    On Hopper and newer GPUs, grouped_mm runs as one kernel.
    Rows must be aligned to 16 bytes; fp64 is not supported.
    """
    if x_RD.size(0) == 0:  # no tokens for this rank's experts
        return loop_backend(x_RD, w_LDF, tokens_per_expert_L, splits)
    offsets_L = tokens_per_expert_L.cumsum(0, dtype=torch.int32)
    if torch.compiler.is_compiling() and x_RD.device.type == "cpu":
        return _GroupedProduct.apply(x_RD, w_LDF, offsets_L)
    return torch.nn.functional.grouped_mm(x_RD, w_LDF, offs=offsets_L)


@launch.compilable(
    "grouped_mm",
    lambda a, b, offsets_L: a.new_empty(
        (a.size(0), b.size(2)) if b.dim() == 3 else (offsets_L.size(0), a.size(0), b.size(1))
    ),
)
def _grouped_product(a: Tensor, b: Tensor, offsets_L: Tensor) -> Tensor:
    """Multiplies [R, D] by [L, D, F] to get [R, F], or [D, R] by [R, F] to get [L, D, F]."""
    return torch.nn.functional.grouped_mm(a, b, offs=offsets_L)


class _GroupedProduct(torch.autograd.Function):
    """grouped_mm for torch.compile on a CPU, where PyTorch 2.13 can trace grouped_mm only in bf16."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_LDF: Tensor, offsets_L: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, w_LDF, offsets_L)
        return _grouped_product(x_RD, w_LDF, offsets_L)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, w_LDF, offsets_L = ctx.saved_tensors
        dx_RD = _grouped_product(grads[0], w_LDF.transpose(1, 2), offsets_L)
        return dx_RD, _grouped_product(x_RD.t(), grads[0], offsets_L), None


def check_package(name: str, *, device_type: str, dtype: torch.dtype) -> None:
    """Raises a ValueError if the package is missing or does not support the device or dtype."""
    check_installed(name)
    if device_type != "cuda":
        raise ValueError(f"expert_backend={name}: requires a CUDA device, not {device_type}. Fix: use auto.")
    dtypes = [_DTYPES[one] for one in PACKAGES[name].dtypes]
    if dtype not in dtypes:
        *names, name_given = (str(one).removeprefix("torch.") for one in (*dtypes, dtype))
        rule = f"supports {', '.join(names)}, not {name_given}"
        raise ValueError(f"expert_backend={name}: {rule}. Fix: use auto, or a supported dtype.")


def check_installed(name: str) -> None:
    """Raises a ValueError if a package that the backend needs is missing."""
    if missing := PACKAGES[name].missing():
        rule = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise ValueError(f"expert_backend={name}: {rule}. Fix: {PACKAGES[name].install}, or use auto.")


def grouped_gemm_backend(x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits) -> Tensor:
    """grouped_gemm.ops.gmm: one CUTLASS kernel, or one cuBLAS call per expert, depending on the build."""
    from grouped_gemm import ops

    return _gmm(ops.gmm, x_RD, w_LDF, tokens_per_expert_L, splits)


def megablocks_backend(x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits) -> Tensor:
    """megablocks.grouped_gemm_util.ops.gmm, as used by the grouped MLP of megablocks' dMoE."""
    from megablocks import grouped_gemm_util

    return _gmm(grouped_gemm_util.ops.gmm, x_RD, w_LDF, tokens_per_expert_L, splits)


def _gmm(
    gmm: Callable[..., Tensor], x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits
) -> Tensor:
    if x_RD.size(0) == 0:  # gmm rejects empty inputs; this product gives the weights a gradient of zero
        return x_RD @ w_LDF.sum(dim=0)
    # Counts on the host are accepted by both cuBLAS and CUTLASS builds.
    counts_L = tokens_per_expert_L.cpu() if splits is None else torch.tensor(splits)
    w_LFD = w_LDF.transpose(1, 2)
    if w_LFD.is_contiguous():  # gmm requires contiguous weights; our weights are stored this way
        return gmm(x_RD.contiguous(), w_LFD, counts_L.to(torch.int64), trans_b=True)
    return gmm(x_RD.contiguous(), w_LDF.contiguous(), counts_L.to(torch.int64), trans_b=False)


def te_backend(x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Splits) -> Tensor:
    """transformer_engine.pytorch.GroupedLinear with our weights. Inside an FP8 autocast, rows are padded."""
    if x_RD.size(0) == 0:
        return x_RD @ w_LDF.sum(dim=0)
    sizes = tokens_per_expert_L.tolist() if splits is None else list(splits)
    module = _te_module(*w_LDF.shape, x_RD.dtype)
    # Our weights are views of one parameter, so autograd concatenates the experts' gradients. With one
    # parameter per expert, autograd would save one read and write of all gradients.
    weights = {f"weight{expert}": w for expert, w in enumerate(w_LDF.transpose(1, 2).unbind(0))}
    if (multiple := te_row_multiple()) == 1:
        return torch.func.functional_call(module, weights, (x_RD, sizes))
    rows = (pad_rows(x_RD, sizes, multiple), padded_splits(sizes, multiple))
    return unpad_rows(torch.func.functional_call(module, weights, rows), sizes, multiple)


@functools.cache
def _te_module(num_experts: int, dim_in: int, dim_out: int, dtype: torch.dtype) -> Any:
    """A GroupedLinear without allocated weights; `functional_call` passes in our weights."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(num_experts, dim_in, dim_out, bias=False, params_dtype=dtype, device="meta")


BACKENDS: dict[str, GroupedGemm] = {
    "loop": loop_backend,
    "torch": torch_backend,
    "grouped_gemm": grouped_gemm_backend,
    "te": te_backend,
    "megablocks": megablocks_backend,
}
# Backends that need `splits` on the host; without `splits`, each product synchronizes.
BY_SPLITS = frozenset(BACKENDS) - {"torch"}

# Backends of fused.py: Triton kernels, or plain torch on a CPU.
FUSED = ("triton",)


def fused_problem(*, dtype: torch.dtype, device_type: str = "cpu", failure: str = "") -> str:
    """Reason why the `triton` backend cannot run; empty if it can run."""
    if dtype == torch.float64:
        return "its kernels do not support float64"
    return failure or ("" if device_type == "cpu" else launch.missing())


def choose_backend(name: str, *, device_type: str, dtype: torch.dtype, failure: str = "") -> tuple[str, str]:
    """Chooses the expert backend; returns its name and the reason for the choice.

    Args:
        name: `auto`, or a name in BACKENDS or FUSED.
        failure: reason why Triton kernels must not run, see `launch.failure_of`.

    Raises:
        ValueError: if the named backend is unknown or cannot run here.
    """
    has_grouped_mm = hasattr(torch.nn.functional, "grouped_mm")
    if name == "torch" and not has_grouped_mm:
        rule = f"torch {torch.__version__} has no grouped_mm"
        raise ValueError(f"expert_backend=torch: {rule}. Fix: use loop, or install torch>=2.10.")
    if name == "torch" and dtype == torch.float64:
        raise ValueError("expert_backend=torch: grouped_mm does not support float64. Fix: use loop.")
    if name in PACKAGES:
        check_package(name, device_type=device_type, dtype=dtype)
    if name in FUSED and (rule := fused_problem(dtype=dtype, device_type=device_type, failure=failure)):
        fix = "pip install triton, or use auto" if "installed" in rule else "use auto"
        raise ValueError(f"expert_backend={name}: {rule}. Fix: {fix}.")
    if name in BACKENDS or name in FUSED:
        on_cpu = name in FUSED and device_type == "cpu"
        return name, "set by EXPERT_BACKEND" + ("; on a CPU in plain torch" if on_cpu else "")
    if name != "auto":
        fix = f"use auto or one of {', '.join((*FUSED, *BACKENDS))}"
        raise ValueError(f"expert_backend={name}: unknown backend. Fix: {fix}.")
    if device_type == "cpu":
        return "loop", "on a CPU, grouped_mm is also a loop over experts"
    if dtype not in (torch.bfloat16, torch.float16):
        found = str(dtype).removeprefix("torch.")
        return "loop", f"grouped GEMMs run as a single kernel only in bf16 and fp16, not in {found}"
    if not (rule := fused_problem(dtype=dtype, device_type=device_type, failure=failure)):
        return "triton", "Triton kernels, which gather the rows and store the least data for backward"
    if dtype == torch.float16:
        return "loop", f"not triton: {rule}; the other grouped GEMMs run as a single kernel only in bf16"
    name, reason = _choose_on_gpu(has_grouped_mm)
    return name, f"not triton: {rule}; {reason}"


def _choose_on_gpu(has_grouped_mm: bool) -> tuple[str, str]:
    """Chooses the first usable backend: PyTorch's grouped_mm, an installed package, or the loop."""
    major, _ = torch.cuda.get_device_capability()
    if has_grouped_mm and major == 9:
        return "torch", "grouped_mm runs as one kernel on Hopper"
    if not has_grouped_mm:
        reason = f"torch {torch.__version__} has no grouped_mm"
    elif major < 9:
        reason = "grouped_mm is slow on GPUs before Hopper"
    else:
        reason = "on Blackwell grouped_mm may compute wrong gradients for experts without tokens"
        reason += " (pytorch issue 172439)"
    # grouped_gemm's kernels are written for Ampere. Transformer Engine uses cuBLAS, which supports all GPUs.
    for package in ("grouped_gemm", "te") if major <= 9 else ("te",):
        if not PACKAGES[package].missing():
            return package, f"{reason}, and {' and '.join(PACKAGES[package].modules)} is installed"
    return "loop", reason


# FP8. If TransformerConfig.fp8 is set, Megatron runs every layer inside Transformer Engine's autocast, and
# GroupedLinear (EXPERT_BACKEND=te) quantizes rows, weights and gradients. This file only adds padding: FP8
# GEMMs require each expert's rows to be a multiple of 16, or 32 with MXFP8. Written from the sources of
# megatron-core 0.16 (fp8_utils) and Transformer Engine 2.x; not run with the package yet.

# Megatron's recipe name to (oldest GPU, multiple of sizes). `delayed` is not supported: its scales are a
# history per module, but all layers share one module without weights (`_te_module`).
RECIPES: dict[str, tuple[tuple[int, int], int]] = {
    "tensorwise": ((8, 9), 16),
    "blockwise": ((9, 0), 16),
    "mxfp8": ((10, 0), 32),
}


def check_fp8(fp8: str | None, recipe: str, *, backend: str) -> None:
    """Raises a ValueError if the experts cannot use FP8 in the way that TransformerConfig requests."""
    if not fp8:
        return
    # Megatron itself silently ignores FP8 without Transformer Engine.
    if importlib.util.find_spec("transformer_engine") is None:
        fix = f"{PACKAGES['te'].install}, or set FP8=none"
        raise ValueError(f"fp8={fp8}: requires Transformer Engine, which is not installed. Fix: {fix}.")
    if backend != "te":
        rule = f"requires expert_backend=te, not {backend}"
        raise ValueError(f"fp8={fp8}: {rule}. Fix: set EXPERT_BACKEND=te.")
    recipe = getattr(recipe, "value", recipe)  # Megatron also accepts an enum
    if recipe not in RECIPES:
        raise ValueError(f"fp8_recipe={recipe}: is not supported. Fix: use one of {', '.join(RECIPES)}.")
    oldest, _ = RECIPES[recipe]
    if not torch.cuda.is_available():
        raise ValueError(f"fp8={fp8}: requires a CUDA device. Fix: set FP8=none.")
    if (found := torch.cuda.get_device_capability()) < oldest:
        least, this = (f"{major}.{minor}" for major, minor in (oldest, found))
        rule = f"requires a GPU of compute capability {least} or newer, not {this}"
        others = [name for name, (capability, _) in RECIPES.items() if capability <= found]
        fix = f"use FP8_RECIPE={others[0]}" if others else "set FP8=none"
        raise ValueError(f"fp8_recipe={recipe}: {rule}. Fix: {fix}.")


OLDEST_FOR_KERNELS = (8, 9)  # the first tensor cores with e4m3


def check_fp8_kernels(backend: str, device: torch.device | str | None) -> None:
    """Raises ValueError if our kernels cannot compute e4m3 experts. On a CPU, torch replaces the kernels."""
    if backend != "triton":
        rule = f"requires expert_backend=triton, not {backend}"
        raise ValueError(f"fp8=e4m3: {rule}. Fix: set EXPERT_BACKEND=triton, or FP8=none.")
    on_gpu = torch.device(device or "cpu").type == "cuda"
    if on_gpu and (found := torch.cuda.get_device_capability(device)) < OLDEST_FOR_KERNELS:
        rule = f"requires a GPU of compute capability 8.9 or newer, not {found[0]}.{found[1]}"
        raise ValueError(f"fp8=e4m3: {rule}. Fix: set FP8=none.")


def te_row_multiple() -> int:
    """Required divisor of each expert's row count in an FP8 autocast. Outside an FP8 autocast, it is 1."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return 1
    return RECIPES["mxfp8" if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else "tensorwise"][1]


def padded_splits(splits: Sequence[int], multiple: int) -> list[int]:
    """Number of rows of each expert, rounded up to a multiple of `multiple`."""
    return [-(-rows // multiple) * multiple for rows in splits]


def pad_rows(x_RD: Tensor, splits: Sequence[int], multiple: int) -> Tensor:
    """Pads each expert's rows with zero rows to `padded_splits`. Zero rows do not affect weight gradients."""
    zeros = x_RD.new_zeros(multiple, x_RD.size(1))
    added = [padded - rows for padded, rows in zip(padded_splits(splits, multiple), splits, strict=True)]
    if not any(added):
        return x_RD
    pieces = zip(x_RD.split(list(splits)), (zeros[:rows] for rows in added), strict=True)
    return torch.cat([piece for pair in pieces for piece in pair])


def unpad_rows(y_RD: Tensor, splits: Sequence[int], multiple: int) -> Tensor:
    """Removes the rows that `pad_rows` added."""
    padded = padded_splits(splits, multiple)
    if list(splits) == padded:
        return y_RD
    pieces = [size for rows, whole in zip(splits, padded, strict=True) for size in (rows, whole - rows)]
    return torch.cat(y_RD.split(pieces)[::2])
