"""The kernels in FP8: quantization to the bit, products against their twins, and both against float64."""

import itertools
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from helpers.layers.backward_cases import SPARE_ROWS, drawn, offsets_of, tokens_of_rows
from helpers.layers.compiled import compiled, on_gpu
from helpers.layers.kernel_device import DEVICE, needs_kernels
from helpers.relative_error import relative_error
from moe_exp.layers.kernels.fp8 import products
from moe_exp.layers.kernels.fp8.block import block_matmul, block_weight_grad
from moe_exp.layers.kernels.fp8.quantize import (
    E4M3,
    quantize_blocks,
    quantize_blocks_torch,
    quantize_columns,
    quantize_columns_torch,
    quantize_rows,
    quantize_rows_torch,
)
from moe_exp.layers.kernels.launch import INTERPRETED

COUNTS = (0, 5, 131, 1, 0)  # two blocks of 128 rows, and the other experts around them
ROUNDING = 2**-4  # of a value in e4m3, relative
INT, FP32 = torch.int32, torch.float32
# Hopper's tensor cores keep about 14 bits of a sum of e4m3 products; one value rounded otherwise is 2e-2
LIMIT = 1e-5 if INTERPRETED else 5e-3


def spread(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of very different sizes, many below the smallest that e4m3 has beside the largest."""
    sizes = drawn(*shape, dtype=FP32, seed=seed + 1).mul(3).exp()
    return (drawn(*shape, dtype=FP32, seed=seed) * sizes).to(dtype)


def assert_same_bits(actual, expected, num_blocks=None):
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        integer = torch.uint8 if one.dtype == E4M3 else torch.int32
        assert torch.equal(one[:num_blocks].view(integer), other[:num_blocks].view(integer))


# Quantization


@needs_kernels
@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"), [(70, 200, FP32), (33, 128, torch.bfloat16), (1, 7, FP32)]
)
def test_rows_to_the_bit(num_rows, width, dtype):
    x = spread(num_rows, width, seed=1, dtype=dtype)
    x[0] = 0
    assert_same_bits(quantize_rows(x), quantize_rows_torch(x))
    index_R = tokens_of_rows(41, num_rows, seed=2)  # with padding
    assert_same_bits(quantize_rows(x, index_R), quantize_rows_torch(x, index_R))


@needs_kernels
def test_blocks_to_the_bit_also_of_a_transposed_matrix():
    w_LOI = spread(2, 130, 70, seed=1)
    assert_same_bits(quantize_blocks(w_LOI), quantize_blocks_torch(w_LOI))
    transposed = [x.transpose(1, 2) for x in quantize_blocks(w_LOI.transpose(1, 2))]
    assert_same_bits([x.contiguous() for x in transposed], quantize_blocks(w_LOI))


@needs_kernels
@pytest.mark.parametrize("gathers", [False, True])
def test_columns_to_the_bit(gathers):
    num_rows = sum(COUNTS) + SPARE_ROWS
    x = spread(19 if gathers else num_rows, 70, seed=1)
    index_R = tokens_of_rows(num_rows, 19, seed=2) if gathers else None
    if not gathers:
        x[sum(COUNTS) :] = float("nan")
    args = x, offsets_of(COUNTS), index_R
    assert_same_bits(quantize_columns(*args), quantize_columns_torch(*args), num_blocks=4)


def test_values_are_within_a_rounding_and_the_largest_is_the_largest_of_e4m3():
    x = spread(9, 300, seed=3)
    x[4] = 0
    q_RD, scale_RC = quantize_rows_torch(x)
    scale_RD = scale_RC.repeat_interleave(128, dim=1)[:, :300]
    limit = torch.maximum(ROUNDING * x.abs(), 2**-10 * scale_RD)  # half of the smallest step
    assert ((q_RD.float() * scale_RD - x).abs() <= limit * (1 + 1e-6)).all()
    assert not q_RD[4].float().any()
    largest = q_RD.float().abs()[:, :256].unflatten(1, (2, 128)).amax(2)
    assert (largest[x[:, :256].unflatten(1, (2, 128)).abs().amax(2) > 0] == 448).all()


def test_blocks_do_not_share_scales():
    """A row of small values beside one of large ones, an expert beside the next, keep their digits."""
    x = drawn(128 + 3, 256, dtype=FP32, seed=1)
    x[0] *= 1e6
    x[:, :128] *= 1e-6
    q_RD, scale_RC = quantize_rows_torch(x)
    back = q_RD.float() * scale_RC.repeat_interleave(128, dim=1)
    assert ((back - x).norm(dim=1) < 0.04 * x.norm(dim=1)).all()
    assert relative_error(back[:, :128], x[:, :128]) < 0.04
    q_BMR, scale_BM = quantize_columns_torch(x, offsets_of((1, 130)))
    assert relative_error((q_BMR[1].float() * scale_BM[1, :, None]).t(), x[1:129]) < 0.04


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value):
    x = torch.ones(2, 130)
    x[0, 3] = value
    q_RD, scale_RC = quantize_rows_torch(x)
    back = q_RD.float() * scale_RC.repeat_interleave(128, dim=1)[:, :130]
    assert not back[0, 3].isfinite() and back[1].isfinite().all()


# Products


def product_args(width, depth, *, dtype=FP32, bias=False, transposed=False):
    num_rows = sum(COUNTS) + SPARE_ROWS
    x = drawn(num_rows, depth, dtype=dtype, seed=1)
    x[sum(COUNTS) :] = 1e30
    w = drawn(len(COUNTS), width, depth, dtype=dtype, seed=2).transpose(1, 2)
    of_bias = (drawn(len(COUNTS), width, dtype=dtype, seed=3), drawn(num_rows, dtype=FP32, seed=4))
    return x, w.contiguous() if transposed else w, offsets_of(COUNTS), *(of_bias if bias else ())


@needs_kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("width", "depth", "options"), [(150, 200, {}), (130, 128, {"bias": True}), (7, 5, {"transposed": True})]
)
def test_grouped_matmul_against_its_twin(width, depth, options):
    args, last = product_args(width, depth, **options), sum(COUNTS)
    expected = products.grouped_matmul_torch(*args)[:last]
    assert relative_error(products.grouped_matmul(*args)[:last], expected) < LIMIT


@needs_kernels
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("sizes", "dtype"), [((40, 150), FP32), ((130, 3), torch.bfloat16)])
def test_weight_grad_against_its_twin(sizes, dtype):
    num_rows = sum(COUNTS) + SPARE_ROWS
    a, b = drawn(num_rows, sizes[0], dtype=dtype, seed=1), drawn(19, sizes[1], dtype=dtype, seed=2)
    a[sum(COUNTS) :] = float("nan")
    args, options = (a, b, offsets_of(COUNTS)), {"b_index_R": tokens_of_rows(num_rows, 18, seed=3)}
    dw_LMN = products.weight_grad(*args, **options)
    assert dw_LMN.dtype == dtype and not dw_LMN[[0, 4]].any()
    limit = LIMIT if dtype == FP32 else 1e-2
    assert relative_error(dw_LMN, products.weight_grad_torch(*args, **options)) < limit
    before = drawn(*dw_LMN.shape, dtype=FP32, seed=5)
    main_grad, expected = before.clone(), before.clone()
    assert products.weight_grad(*args, **options, out=main_grad) is main_grad
    assert relative_error(main_grad, products.weight_grad_torch(*args, **options, out=expected)) < LIMIT
    assert torch.equal(main_grad[[0, 4]], before[[0, 4]])  # experts without rows


def test_products_against_float64():
    """Every product of two roundings is off by at most 2 * 2^-4 + 2^-8 of itself, what is small by steps."""
    x, w, offsets_L1 = product_args(150, 200)
    last, bound = sum(COUNTS), 2 * ROUNDING + ROUNDING**2 + 1e-3
    expert_R = torch.arange(len(COUNTS), device=DEVICE).repeat_interleave(torch.tensor(COUNTS, device=DEVICE))
    pairs = (x, w), (x.abs(), w.abs())
    exact, sizes = (torch.einsum("ri,rio->ro", a[:last].double(), b[expert_R].double()) for a, b in pairs)
    y_RO = products.grouped_matmul_torch(x, w, offsets_L1)[:last]
    assert ((y_RO - exact).abs() <= bound * sizes).all()
    assert 0.02 < relative_error(y_RO, exact) < 0.05  # roundings of two operands, so not of one, nor of bf16
    a = drawn(last + SPARE_ROWS, 40, dtype=FP32, seed=4)
    dw_LMN = products.weight_grad_torch(a, x, offsets_L1)
    parts = itertools.pairwise(offsets_L1.tolist())
    exact = torch.stack([a[i:j].double().t() @ x[i:j].double() for i, j in parts])
    assert 0.02 < relative_error(dw_LMN, exact) < 0.05


# Compiled for GPUs that are not there


def products_in_e4m3(rows: int = 4096, dim: int = 1024, width: int = 1024, experts: int = 64) -> None:
    """Both kernels with products, on operands that are quantized already."""
    offsets_L1, blocks = on_gpu(experts + 1, dtype=INT), rows // 128 + experts
    x = on_gpu(rows, dim, dtype=E4M3), on_gpu(rows, dim // 128, dtype=FP32)
    w = on_gpu(experts, width, dim, dtype=E4M3), on_gpu(experts, width // 128, dim // 128, dtype=FP32)
    block_matmul(*x, *w, offsets_L1, torch.bfloat16)
    a = on_gpu(blocks, dim, 128, dtype=E4M3), on_gpu(blocks, dim, dtype=FP32)
    b = on_gpu(blocks, width, 128, dtype=E4M3), on_gpu(blocks, width, dtype=FP32)
    block_weight_grad(on_gpu(experts, dim, width, dtype=FP32), *a, *b, offsets_L1, True)


def layer_in_e4m3() -> None:
    tokens, rows, dim, ffn, experts = 1024, 4096, 1024, 512, 64
    offsets_L1, token_R = on_gpu(experts + 1, dtype=INT), on_gpu(rows, dtype=INT)
    weight1 = on_gpu(experts, 2 * ffn, dim)
    products.grouped_matmul(on_gpu(tokens, dim), weight1.transpose(1, 2), offsets_L1, index_R=token_R)
    products.grouped_matmul(on_gpu(rows, 2 * ffn), weight1, offsets_L1)
    products.weight_grad(on_gpu(rows, 2 * ffn), on_gpu(tokens, dim), offsets_L1, b_index_R=token_R)


def spilled_bytes() -> dict[int, int]:
    """Known spills of the weight gradients by capability."""
    return {90: 40, 100: 440} if Version(version("triton")) >= Version("3.8") else {90: 0, 100: 384}


@needs_kernels
def test_hopper_multiplies_e4m3():
    kernels = compiled(products_in_e4m3, 90)
    assert [kernel.function for kernel in kernels] == ["block_matmul_kernel", "block_weight_grad_kernel"]
    for kernel in kernels:
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel.ptx
        assert kernel.instructions["cp.async"] > 0 and kernel.instructions["atomic"] == 0
        assert kernel.shared_bytes <= 99 * 1024  # those of sm_89, too
        assert kernel.stack_bytes <= (spilled_bytes()[90] if "weight" in kernel.function else 0)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_every_kernel_is_compiled(capability):
    kernels = compiled(layer_in_e4m3, capability)
    assert [kernel.function for kernel in kernels].count("block_matmul_kernel") == 2
    for kernel in kernels:
        assert kernel.shared_bytes <= 99 * 1024, kernel
        spilled = spilled_bytes()[100] if capability == 100 and "weight" in kernel.function else 0
        assert kernel.stack_bytes <= spilled, kernel
    products = [kernel.instructions for kernel in kernels if kernel.function.startswith("block_")]
    assert len(products) == 3 and all(one["mma"] + one["wgmma"] + one["tcgen05"] for one in products)
