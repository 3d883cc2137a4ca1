"""The kernels as compiled for GPUs that are not there: they fit, nothing is spilled, and tensor cores
compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.layers.compiled import (
    SHARED_LIMIT,
    Compiled,
    compiled,
    devices,
    num_configs,
    on_gpu,
    specializations,
)
from moe_exp.layers.kernels import activation_grad as activation_grads
from moe_exp.layers.kernels import weight_grad as weight_grads
from moe_exp.layers.kernels.activation_grad import activation_grad
from moe_exp.layers.kernels.combine import combine
from moe_exp.layers.kernels.cross_entropy import cross_entropy_gradient, cross_entropy_statistics
from moe_exp.layers.kernels.drops import keep_within, padded_order
from moe_exp.layers.kernels.grouped_matmul import CONFIGS, grouped_matmul
from moe_exp.layers.kernels.rows import chunk_order, gather_rows
from moe_exp.layers.kernels.slot_sort import slot_sort
from moe_exp.layers.kernels.topk import _topk_backward, _topk_forward
from moe_exp.layers.kernels.up_projection import up_projection
from moe_exp.layers.kernels.weight_grad import weight_grad

TOKENS, ROWS, DIM, FFN, EXPERTS = 1024, 4096, 1024, 512, 64
INT, FP32, BF16 = torch.int32, torch.float32, torch.bfloat16


def gathered(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {"token_R": on_gpu(rows, dtype=INT), "weights_R": on_gpu(rows, dtype=FP32)}


def offsets(experts: int) -> torch.Tensor:
    return on_gpu(experts + 1, dtype=INT)


def up(
    activation: str = "swiglu",
    gather: bool = True,
    dtype: torch.dtype = BF16,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
    keeps_hidden: bool = True,
) -> None:
    width = 2 * FFN if activation == "swiglu" else FFN
    x, w = on_gpu(tokens if gather else rows, DIM, dtype=dtype), on_gpu(experts, width, DIM, dtype=dtype)
    up_projection(
        x,
        w,
        offsets(experts),
        activation=activation,
        keeps_hidden=keeps_hidden,
        **(gathered(rows) if gather else {}),
    )


def down(
    transposed: bool = True,
    dtype: torch.dtype = BF16,
    tf32: bool = False,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
) -> None:
    del tokens  # as all of GEMMS
    torch.backends.cuda.matmul.allow_tf32 = tf32
    w = (
        on_gpu(experts, DIM, FFN, dtype=dtype).transpose(1, 2)
        if transposed
        else on_gpu(experts, FFN, DIM, dtype=dtype)
    )
    grouped_matmul(on_gpu(rows, FFN, dtype=dtype), w, offsets(experts))


def activation_gradient(
    activation: str = "swiglu",
    gather: bool = True,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
) -> None:
    dy, w = on_gpu(tokens if gather else rows, DIM), on_gpu(experts, DIM, FFN)
    hidden = on_gpu(rows, FFN * (2 if activation == "swiglu" else 1))
    activation_grad(
        dy, w, hidden, offsets(experts), activation=activation, **(gathered(rows) if gather else {})
    )


def weight_gradient(
    gather: bool = True,
    main_grad: bool = False,
    *,
    experts: int = EXPERTS,
    tokens: int = TOKENS,
    rows: int = ROWS,
) -> None:
    index = on_gpu(rows, dtype=INT) if gather else None
    out = on_gpu(experts, 2 * FFN, DIM, dtype=FP32) if main_grad else None
    weight_grad(
        on_gpu(rows, 2 * FFN),
        on_gpu(tokens if gather else rows, DIM),
        offsets(experts),
        b_index_R=index,
        out=out,
    )


def combined(weighted: bool = True) -> None:
    combine(
        on_gpu(ROWS, DIM), on_gpu(TOKENS, 4, dtype=INT), on_gpu(TOKENS, 4, dtype=FP32) if weighted else None
    )


def sorted_slots() -> None:
    slot_sort(on_gpu(TOKENS, 4, dtype=torch.int64), EXPERTS)


def micro_batch(tokens: int, rows: int) -> None:
    """All kernels, for numbers of tokens and rows that another micro-batch would change."""
    for gemm in GEMMS:
        gemm(tokens=tokens, rows=rows)
    up(gather=False, rows=rows)
    activation_gradient(gather=False, rows=rows)
    weight_gradient(False, True, rows=rows)
    combine(on_gpu(rows, DIM), on_gpu(tokens, 4, dtype=INT), on_gpu(tokens, 4, dtype=FP32))
    gather_rows(on_gpu(tokens, DIM), on_gpu(rows, dtype=INT), 4)
    chunk_order(on_gpu(8, EXPERTS, dtype=torch.int64), rows)
    chosen, weights = on_gpu(tokens, 4, dtype=torch.int64), on_gpu(tokens, 4, dtype=FP32)
    slot_sort(chosen, EXPERTS)
    padded_order(chosen, EXPERTS, rows)
    keep_within(chosen, None, on_gpu(EXPERTS, dtype=INT))
    keep_within(chosen, weights, on_gpu(EXPERTS, dtype=INT))
    logits, options = on_gpu(tokens, EXPERTS, dtype=FP32), ("softmax", True, False, 1.0)
    _topk_forward(logits, None, None, 4, *options)
    _topk_backward(logits, None, chosen, weights, None, None, *options)


GEMMS = [up, down, activation_gradient, weight_gradient]
CONFIGS_OF = {
    activation_gradient: activation_grads.CONFIGS,
    weight_gradient: weight_grads.CONFIGS,
}
OTHERS = [combined, partial(combined, False), sorted_slots]
VARIANTS = [
    partial(up, "gelu", False),
    partial(up, "squared_relu"),
    partial(up, gather=False),
    partial(up, dtype=torch.float16),
    partial(down, False),
    partial(down, dtype=torch.float16),
    partial(activation_gradient, "gelu", False),
    partial(weight_gradient, False, True),
    partial(up, keeps_hidden=False),
    *(
        partial(gemm, experts=experts)
        for gemm in (up, down, activation_gradient, weight_gradient)
        for experts in (1, 128)
    ),
]
TENSOR_CORES = {80: "mma", 86: "mma", 89: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}


def name_of(launch: Any) -> str:
    return (
        launch.__name__
        if hasattr(launch, "__name__")
        else "-".join(
            [
                launch.func.__name__,
                *map(str, launch.args),
                *(f"{key}={value}" for key, value in launch.keywords.items()),
            ]
        )
    )


def check(kernel: Compiled, capability: int, *, is_gemm: bool, spilled_bytes: int = 0) -> None:
    assert kernel.shared_bytes <= SHARED_LIMIT[capability], kernel
    assert kernel.stack_bytes <= spilled_bytes, f"registers are spilled: {kernel}"
    assert kernel.instructions["atomic"] == 0 or not is_gemm, kernel
    if is_gemm:
        assert kernel.instructions[TENSOR_CORES[capability]] > 0, kernel
        assert kernel.instructions["cp.async"] + kernel.instructions["tma"] > 0, (
            f"the loads are not pipelined: {kernel}"
        )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("launch", [*GEMMS, partial(weight_gradient, experts=128)], ids=name_of)
def test_first_config(launch: Callable[[], None], capability: int) -> None:
    """It has to run everywhere, so also in the 99 KB of a gaming card; on Hopper and newer the same tiles
    take more stages.
    """
    kernels = [
        kernel
        for kernel in compiled(launch, capability)
        if any(kernel.instructions[kind] for kind in TENSOR_CORES.values())
    ]
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


def test_one_kernel_for_all_numbers_of_rows() -> None:
    """Multiples of 16, others and 1; a kernel that is compiled in the middle of a run is a stall for all
    ranks.
    """
    usual, *others = (
        specializations(partial(micro_batch, tokens, rows), 80)
        for tokens, rows in ((1024, 4096), (1025, 4099), (1030, 1))
    )
    assert len(usual) > 15
    for other in others:
        assert other == usual


def all_kernels() -> None:
    micro_batch(1024, 4096)
    logits, target = on_gpu(64, 1000), on_gpu(64, dtype=torch.int64)
    cross_entropy_statistics(logits, target, 0)
    cross_entropy_gradient(logits, target, on_gpu(64, dtype=FP32), on_gpu(64, dtype=FP32), 0)


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    """Which is not the current one here."""
    started = devices(all_kernels, 80)
    assert {name for name, _ in started} >= {"cross_entropy", "topk", "rows", "weight_grad", "combine"}
    assert {device for _, device in started} == {1}


def test_hidden_is_not_written_where_nobody_wants_it() -> None:
    (both,), (one,) = compiled(up, 80), compiled(partial(up, keeps_hidden=False), 80)
    assert 0 < one.ptx.count("st.global") <= both.ptx.count("st.global") / 2
    check(one, 80, is_gemm=True)


def test_descriptors_replace_addresses() -> None:
    """Where there are descriptors, all that comes from memory in the loop comes by them, and they cost fewer
    registers.
    """
    alike = [{**config, "TMA": 0, "PROGRAMS": 0, "num_stages": 0} for config in CONFIGS]
    number = next(
        number for number, config in enumerate(alike) if config == alike[0] and CONFIGS[number]["TMA"]
    )
    (by_address,), (by_descriptor,) = compiled(down, 90), compiled(down, 90, number)
    assert by_descriptor.instructions["tma"] > 0
    assert by_descriptor.instructions["cp.async"] == 0
    assert by_descriptor.registers < by_address.registers
    assert num_configs(down, 80) < num_configs(down, 90)


@pytest.mark.parametrize("gemm", [activation_gradient, weight_gradient])
def test_gradients_have_descriptors_for_what_is_not_gathered(gemm: Callable[..., None]) -> None:
    number = next(i for i, config in enumerate(CONFIGS_OF[gemm]) if config["TMA"])
    (one_gathered,) = compiled(gemm, 90, number)
    (none_gathered,) = compiled(partial(gemm, gather=False), 90, number)
    assert 0 < one_gathered.instructions["tma"] < none_gathered.instructions["tma"]
    assert none_gathered.instructions["cp.async"] == 0 < one_gathered.instructions["cp.async"]


def test_both_operands_of_the_weight_gradient_are_pipelined_on_ampere() -> None:
    """Each is 4 copies of 16 bytes per thread and step; two steps are before the loop, one is in it."""
    (kernel,) = compiled(weight_gradient, 80)
    assert kernel.instructions["cp.async"] == 3 * (4 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("launch", [*GEMMS, *OTHERS, *VARIANTS], ids=name_of)
def test_all_configs(launch: Callable[[], None], capability: int) -> None:
    """Every config compiles, the first fits and spills four registers at most; of the others enough fit for
    the autotuner to choose.
    """
    num_fitting = 0
    for config in range(num_configs(launch, capability)):
        for kernel in compiled(launch, capability, config):
            is_gemm = any(kernel.instructions[kind] for kind in TENSOR_CORES.values())
            if config == 0 or kernel.shared_bytes <= SHARED_LIMIT[capability]:
                check(kernel, capability, is_gemm=is_gemm, spilled_bytes=256 if config else 16)
                num_fitting += is_gemm
    assert num_fitting >= 2 or launch in OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_tf32_only_when_asked_for(capability: int) -> None:
    (plain,) = compiled(partial(down, dtype=FP32), capability)
    assert not any(plain.instructions[kind] for kind in TENSOR_CORES.values())
    (tf32,) = compiled(partial(down, dtype=FP32, tf32=True), capability)
    assert tf32.instructions[TENSOR_CORES[capability]] > 0
    for kernel in (plain, tf32):
        assert kernel.shared_bytes <= SHARED_LIMIT[86 if capability == 80 else 90]
