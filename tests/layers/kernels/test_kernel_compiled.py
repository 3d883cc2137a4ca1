"""The kernels as compiled for GPUs that are not there: they fit, nothing is spilled, and tensor cores compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compiled import SHARED_LIMIT, Compiled, compiled, num_configs, on_gpu

from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.grouped_matmul import CONFIGS, grouped_matmul
from moe_exp.layers.kernels.slot_sort import slot_sort
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

TOKENS, ROWS, DIM, FFN, EXPERTS = 1024, 4096, 1024, 512, 64
INT, FP32, BF16 = torch.int32, torch.float32, torch.bfloat16


def gathered() -> dict[str, torch.Tensor]:
    return {"token_R": on_gpu(ROWS, dtype=INT), "weights_R": on_gpu(ROWS, dtype=FP32)}


def up(activation: str = "swiglu", gather: bool = True, dtype: torch.dtype = BF16) -> None:
    width = 2 * FFN if activation == "swiglu" else FFN
    x, w = on_gpu(TOKENS if gather else ROWS, DIM, dtype=dtype), on_gpu(EXPERTS, width, DIM, dtype=dtype)
    up_projection(x, w, on_gpu(EXPERTS + 1, dtype=INT), activation=activation, **(gathered() if gather else {}))


def down(transposed: bool = True, dtype: torch.dtype = BF16, tf32: bool = False) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    w = on_gpu(EXPERTS, DIM, FFN, dtype=dtype).transpose(1, 2) if transposed else on_gpu(EXPERTS, FFN, DIM, dtype=dtype)
    grouped_matmul(on_gpu(ROWS, FFN, dtype=dtype), w, on_gpu(EXPERTS + 1, dtype=INT))


def activation_gradient(activation: str = "swiglu", gather: bool = True) -> None:
    dy, w, hidden = (
        on_gpu(TOKENS if gather else ROWS, DIM),
        on_gpu(EXPERTS, DIM, FFN),
        on_gpu(ROWS, FFN * (2 if activation == "swiglu" else 1)),
    )
    activation_grad(dy, w, hidden, on_gpu(EXPERTS + 1, dtype=INT), activation=activation, **(gathered() if gather else {}))


def weight_gradient(gather: bool = True, main_grad: bool = False) -> None:
    index = on_gpu(ROWS, dtype=INT) if gather else None
    out = on_gpu(EXPERTS, 2 * FFN, DIM, dtype=FP32) if main_grad else None
    b = on_gpu(TOKENS if gather else ROWS, DIM)
    weight_grad(on_gpu(ROWS, 2 * FFN), b, on_gpu(EXPERTS + 1, dtype=INT), b_index_R=index, out=out)


def combined(weighted: bool = True) -> None:
    combine(on_gpu(ROWS, DIM), on_gpu(TOKENS, 4, dtype=INT), on_gpu(TOKENS, 4, dtype=FP32) if weighted else None)


def sorted_slots() -> None:
    slot_sort(on_gpu(TOKENS, 4, dtype=torch.int64), EXPERTS)


GEMMS = [up, down, activation_gradient, weight_gradient]
OTHERS = [combined, sorted_slots]
VARIANTS = [
    partial(up, "gelu", False),
    partial(up, "squared_relu"),
    partial(up, gather=False),
    partial(up, dtype=torch.float16),
    partial(down, False),
    partial(down, dtype=torch.float16),
    partial(activation_gradient, "gelu", False),
    partial(weight_gradient, False, True),
    partial(combined, False),
]
TENSOR_CORES = {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


def name_of(launch: Any) -> str:
    return (
        launch.__name__
        if hasattr(launch, "__name__")
        else "-".join([launch.func.__name__, *map(str, (*launch.args, *launch.keywords.values()))])
    )


def check(kernel: Compiled, capability: int, *, is_gemm: bool, spilled_bytes: int = 0) -> None:
    assert kernel.shared_bytes <= SHARED_LIMIT[capability], kernel
    assert kernel.stack_bytes <= spilled_bytes, f"registers are spilled: {kernel}"
    assert kernel.instructions["atomic"] == 0 or not is_gemm, kernel
    if is_gemm:
        assert kernel.instructions[TENSOR_CORES[capability]] > 0, kernel
        assert kernel.instructions["cp.async"] + kernel.instructions["tma"] > 0, f"the loads are not pipelined: {kernel}"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("launch", GEMMS, ids=name_of)
def test_first_config(launch: Callable[[], None], capability: int) -> None:
    """It has to run everywhere, so also in the 99 KB of a gaming card; on Hopper and newer the same tiles take more stages."""
    kernels = [kernel for kernel in compiled(launch, capability) if any(kernel.instructions[kind] for kind in TENSOR_CORES.values())]
    assert kernels
    for kernel in kernels:
        check(kernel, capability, is_gemm=True)
        assert capability != 80 or kernel.shared_bytes <= SHARED_LIMIT[86]


@pytest.mark.parametrize("launch", OTHERS, ids=name_of)
def test_kernels_without_products(launch: Callable[[], None]) -> None:
    kernels = compiled(launch, 80)
    assert kernels
    for kernel in kernels:
        check(kernel, 80, is_gemm=False)


def test_descriptors_replace_addresses() -> None:
    """Where there are descriptors, all that comes from memory in the loop comes by them, and they cost fewer registers."""
    alike = [{**config, "TMA": 0, "PROGRAMS": 0, "num_stages": 0} for config in CONFIGS]
    number = next(number for number, config in enumerate(alike) if config == alike[0] and CONFIGS[number]["TMA"])
    (by_address,), (by_descriptor,) = compiled(down, 90), compiled(down, 90, number)
    assert by_descriptor.instructions["tma"] > 0
    assert by_descriptor.instructions["cp.async"] == 0
    assert by_descriptor.registers < by_address.registers
    assert num_configs(down, 80) < num_configs(down, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("launch", [*GEMMS, *OTHERS, *VARIANTS], ids=name_of)
def test_all_configs(launch: Callable[[], None], capability: int) -> None:
    """Every config compiles; the first fits and spills two registers at most. What is more for others is for the autotuner."""
    for config in range(num_configs(launch, capability)):
        for kernel in compiled(launch, capability, config):
            is_gemm = launch not in OTHERS and any(kernel.instructions[kind] for kind in TENSOR_CORES.values())
            if config == 0 or kernel.shared_bytes <= SHARED_LIMIT[capability]:
                check(kernel, capability, is_gemm=is_gemm, spilled_bytes=160 if config else 8)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_tf32_only_when_asked_for(capability: int) -> None:
    (plain,) = compiled(partial(down, dtype=FP32), capability)
    assert not any(plain.instructions[kind] for kind in TENSOR_CORES.values())
    (tf32,) = compiled(partial(down, dtype=FP32, tf32=True), capability)
    assert tf32.instructions[TENSOR_CORES[capability]] > 0
    for kernel in (plain, tf32):
        assert kernel.shared_bytes <= SHARED_LIMIT[86 if capability == 80 else 90]
