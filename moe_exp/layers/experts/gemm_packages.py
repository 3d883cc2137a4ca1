"""Grouped GEMMs of other CUDA packages, for `grouped_gemm`. Shape suffixes in `moe_exp.layers`.

Written from the sources of github.com/tgale96/grouped_gemm and nv-grouped-gemm
(github.com/fanshiqing/grouped_gemm), which share the import name, megablocks and Transformer Engine 2.x; not
run with the packages yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_exp.config.choices import EXPERT_BACKENDS
from moe_exp.layers.experts.fp8 import pad_rows, padded_splits, te_row_multiple, unpad_rows

PACKAGES = {name: backend for name, backend in EXPERT_BACKENDS.items() if backend.modules}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_package(name: str, *, device_type: str, dtype: torch.dtype) -> None:
    """Checks that a backend of PACKAGES can run.

    Raises:
        ValueError: if a package is missing, or does not support the device or the dtype.
    """
    package = PACKAGES[name]
    if missing := package.missing():
        rule = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise ValueError(f"expert_backend={name}: {rule}. Fix: {package.install}, or use auto.")
    if device_type != "cuda":
        raise ValueError(f"expert_backend={name}: needs a CUDA device, not {device_type}. Fix: use auto.")
    dtypes = [_DTYPES[one] for one in package.dtypes]
    if dtype not in dtypes:
        names = ", ".join(map(_name, dtypes))
        rule = f"computes in {names}, not in {_name(dtype)}"
        raise ValueError(f"expert_backend={name}: {rule}. Fix: use auto, or one of these dtypes.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def grouped_gemm_backend(
    x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Sequence[int] | None
) -> Tensor:
    """`grouped_gemm.ops.gmm`: one CUTLASS kernel, or cuBLAS expert by expert, depending on the build."""
    from grouped_gemm import ops

    return _gmm(ops.gmm, x_RD, w_LDF, tokens_per_expert_L, splits)


def megablocks_backend(
    x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Sequence[int] | None
) -> Tensor:
    """megablocks.grouped_gemm_util.ops.gmm, which the grouped MLP of megablocks' dMoE calls."""
    from megablocks import grouped_gemm_util

    return _gmm(grouped_gemm_util.ops.gmm, x_RD, w_LDF, tokens_per_expert_L, splits)


def _gmm(
    gmm: Callable[..., Tensor],
    x_RD: Tensor,
    w_LDF: Tensor,
    tokens_per_expert_L: Tensor,
    splits: Sequence[int] | None,
) -> Tensor:
    if x_RD.size(0) == 0:  # it refuses empty inputs; a product without rows keeps the gradients, all zero
        return _no_rows(x_RD, w_LDF)
    # On the host: cuBLAS builds accept them only there, CUTLASS builds also there.
    counts_L = tokens_per_expert_L.cpu() if splits is None else torch.tensor(splits)
    w_LFD = w_LDF.transpose(1, 2)
    if w_LFD.is_contiguous():  # it checks that, so our weights are passed as they are in memory
        return gmm(x_RD.contiguous(), w_LFD, counts_L.to(torch.int64), trans_b=True)
    return gmm(x_RD.contiguous(), w_LDF.contiguous(), counts_L.to(torch.int64), trans_b=False)


def te_backend(
    x_RD: Tensor, w_LDF: Tensor, tokens_per_expert_L: Tensor, splits: Sequence[int] | None
) -> Tensor:
    """transformer_engine.pytorch.GroupedLinear with our weights; inside its FP8 autocast on padded rows.

    Our weights are one parameter, passed as views: autograd concatenates the experts' gradients, which reads
    and writes all of them once more than one parameter per expert would.
    """
    if x_RD.size(0) == 0:
        return _no_rows(x_RD, w_LDF)
    sizes = tokens_per_expert_L.tolist() if splits is None else list(splits)
    module = _te_module(*w_LDF.shape, x_RD.dtype)
    weights = {f"weight{expert}": w for expert, w in enumerate(w_LDF.transpose(1, 2).unbind(0))}
    if (multiple := te_row_multiple()) == 1:
        return torch.func.functional_call(module, weights, (x_RD, sizes))
    rows = (pad_rows(x_RD, sizes, multiple), padded_splits(sizes, multiple))
    return unpad_rows(torch.func.functional_call(module, weights, rows), sizes, multiple)


@functools.cache
def _te_module(num_experts: int, dim_in: int, dim_out: int, dtype: torch.dtype) -> Any:
    """A GroupedLinear without memory for weights; functional_call inserts ours."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(num_experts, dim_in, dim_out, bias=False, params_dtype=dtype, device="meta")


def _no_rows(x_RD: Tensor, w_LDF: Tensor) -> Tensor:
    return x_RD @ w_LDF.sum(dim=0)
