"""Which code a planned run takes, as far as that changes its cost. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import TypeVar

from moe_exp.config import Config, setting_error
from moe_exp.planner.hardware import Hardware

T = TypeVar("T")
_BACKENDS = ("auto", "triton", "loop", "torch", "grouped_gemm", "te", "megablocks")


def priced(config: Config, name: str, costs: Mapping[str, T]) -> T:
    """Entry of `costs` for the value of the setting `name`; a ValueError if it has none."""
    value = getattr(config, name)
    if value not in costs:
        raise setting_error(name, value, "the planner has no price for it", f"use {', '.join(costs)}")
    return costs[value]


def fp8_parts(config: Config) -> tuple[bool, bool]:
    """Whether the linear layers of routed experts, and those of the other layers, compute in FP8.

    The others do with Transformer Engine, which FP8 needs but for EXPERT_BACKEND=triton, where only experts
    do; so IMPL=auto counts as te. Output layer, router and embedding stay in bf16.
    """
    if config.fp8 == "none":
        return False, False
    if config.is_fp8_by_kernels:
        return True, False
    return config.use_moe, config.impl != "local"


def fp8_kept(config: Config) -> tuple[bool, bool]:
    """Whether these keep inputs and weights for backward in FP8: our kernels keep what they do in bf16."""
    return (False, False) if config.is_fp8_by_kernels else fp8_parts(config)


def planned_backend(config: Config, *, on_cpu: bool, runs_kernels: bool = True) -> str:
    """The backend of the experts that is counted: EXPERT_BACKEND, or what `grouped_gemm.choose_backend` makes
    of `auto`; `auto` for all others on GPUs, which depend on what is installed and count the same memory.
    `runs_kernels`: see `Hardware`; triton counts as installed.
    """
    backend = priced(config, "expert_backend", dict(zip(_BACKENDS, _BACKENDS, strict=True)))
    if backend != "auto":
        return backend
    if on_cpu:
        return "loop"
    return "auto" if _why_not_triton(config, runs_kernels) else "triton"


def _why_not_triton(config: Config, runs_kernels: bool) -> str:
    """Why `auto` takes other code on a GPU; empty: it takes triton."""
    if config.dtype == "fp32":
        return "DTYPE=fp32"
    return "" if runs_kernels else "its kernels need a GPU of compute capability 8.0 or newer"


def planned_loss(config: Config, *, on_cpu: bool, runs_kernels: bool = True) -> str:
    """CROSS_ENTROPY, or what `cross_entropy.choose_cross_entropy` makes of `auto`; arguments as above."""
    names = ("auto", "megatron", "triton")
    loss = priced(config, "cross_entropy", dict(zip(names, names, strict=True)))
    if loss != "auto":
        return loss
    return "triton" if runs_kernels and not on_cpu else "megatron"


def counted_as(config: Config, hardware: Hardware) -> dict[str, str]:
    """Notes on how a plan counts, by part."""
    words = {}
    if config.use_moe:
        backend = planned_backend(config, on_cpu=hardware.is_cpu, runs_kernels=hardware.runs_kernels)
        said = f"{backend}, asked for by EXPERT_BACKEND"
        if config.expert_backend == "auto":
            said = f"{backend}, which EXPERT_BACKEND=auto takes on this device"
        if backend == "auto":
            why = _why_not_triton(config, hardware.runs_kernels)
            said = f"grouped GEMMs apart from each other, not triton: {why}"
        words["experts"] = f"{said} (its memory; the time is counted the same for all)"
    if planned_loss(config, on_cpu=hardware.is_cpu, runs_kernels=hardware.runs_kernels) == "triton":
        fused, older = "and the time of a fused kernel", "of its kernel, the time of Megatron's"
        words["cross entropy"] = f"triton: the memory {fused if hardware.is_recent else older}"
    if config.fp8 != "none":
        what = " and ".join(compress(("experts", "other layers"), fp8_parts(config)))
        words["FP8"] = f"{what}, by the peak of FP8 and the casts; its memory has not been measured"
    return words
