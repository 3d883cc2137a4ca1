"""FP8 experts: requirements; with Transformer Engine also row padding. Shape suffixes in `moe_exp.layers`.

If TransformerConfig.fp8 is set, Megatron runs every layer inside Transformer Engine's autocast, and
GroupedLinear, which EXPERT_BACKEND=te calls, quantizes rows, weights and gradients. What is left to do is
padding: the FP8 GEMMs need each expert's rows to be a multiple of 16, or 32 with MXFP8. Based on the sources
of megatron-core 0.16 (fp8_utils) and Transformer Engine 2.x; not run with the package yet.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

# Megatron's recipe name to (oldest GPU, multiple of sizes). `delayed` is missing: its scales are a history
# per module, which checkpoints would have to hold, and layers share one module without weights
# (`grouped_gemm._te_module`).
RECIPES: dict[str, tuple[tuple[int, int], int]] = {
    "tensorwise": ((8, 9), 16),
    "blockwise": ((9, 0), 16),
    "mxfp8": ((10, 0), 32),
}


def check_fp8(fp8: str | None, recipe: str, *, backend: str) -> None:
    """Raises a ValueError if the experts cannot compute as TransformerConfig.fp8 and fp8_recipe request.

    Megatron itself ignores FP8 without Transformer Engine.
    """
    if not fp8:
        return
    if importlib.util.find_spec("transformer_engine") is None:
        fix = "pip install --no-build-isolation transformer-engine[pytorch], or set FP8=none"
        raise ValueError(f"fp8={fp8}: is computed by Transformer Engine, which is not installed. Fix: {fix}.")
    if backend != "te":
        rule = f"experts compute in FP8 with expert_backend=te, not with {backend}"
        raise ValueError(f"fp8={fp8}: {rule}. Fix: set EXPERT_BACKEND=te.")
    recipe = getattr(recipe, "value", recipe)  # Megatron also has an enum of them
    if recipe not in RECIPES:
        raise ValueError(f"fp8_recipe={recipe}: is not supported. Fix: use one of {', '.join(RECIPES)}.")
    oldest, _ = RECIPES[recipe]
    if not torch.cuda.is_available():
        raise ValueError(f"fp8={fp8}: needs a CUDA device. Fix: set FP8=none.")
    if (found := torch.cuda.get_device_capability()) < oldest:
        least, this = (f"{major}.{minor}" for major, minor in (oldest, found))
        rule = f"needs a GPU of compute capability {least} or newer, this is {this}"
        others = [name for name, (capability, _) in RECIPES.items() if capability <= found]
        fix = f"use FP8_RECIPE={others[0]}" if others else "set FP8=none"
        raise ValueError(f"fp8_recipe={recipe}: {rule}. Fix: {fix}.")


OLDEST_FOR_KERNELS = (8, 9)  # with e4m3 in its tensor cores


def check_fp8_kernels(backend: str, device: torch.device | str | None) -> None:
    """Raises a ValueError if the experts cannot compute in e4m3 with our kernels, or on a CPU their twins."""
    if backend != "triton":
        rule = f"the kernels in FP8 are those of expert_backend=triton, not of {backend}"
        raise ValueError(f"fp8=e4m3: {rule}. Fix: set EXPERT_BACKEND=triton, or FP8=none.")
    on_gpu = torch.device(device or "cpu").type == "cuda"
    if on_gpu and (found := torch.cuda.get_device_capability(device)) < OLDEST_FOR_KERNELS:
        rule = f"needs a GPU of compute capability 8.9 or newer, this is {found[0]}.{found[1]}"
        raise ValueError(f"fp8=e4m3: {rule}. Fix: set FP8=none.")


def te_row_multiple() -> int:
    """Required multiple of an expert's rows inside the active autocast; 1 outside of any."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return 1
    return RECIPES["mxfp8" if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else "tensorwise"][1]


def padded_splits(splits: Sequence[int], multiple: int) -> list[int]:
    """Rows of each expert, rounded up; 0 remains 0."""
    return [-(-rows // multiple) * multiple for rows in splits]


def pad_rows(x_RD: Tensor, splits: Sequence[int], multiple: int) -> Tensor:
    """Appends zero rows to each expert's, up to `padded_splits`; they do not affect weight gradients."""
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
