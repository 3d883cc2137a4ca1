"""Up-projection and grouped GEMM against float64; in Triton's interpreter on a CPU, real shapes on a GPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.layers.kernel_device import DEVICE, needs_descriptors, use_descriptors
from helpers.relative_error import relative_error
from moe_exp.layers.activations import ACTIVATIONS
from moe_exp.layers.kernels import grouped_matmul as down
from moe_exp.layers.kernels import launch
from moe_exp.layers.kernels import up_projection as up
from moe_exp.layers.kernels.activation_grad import activation_grad

pytestmark = pytest.mark.usefixtures("poisoned")
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
# A sum over K products in fp32, one after the other, is off by about 6e-8 times the root of K/2, and the real
# shapes have K up to 2048.
REAL_LIMIT = LIMIT | {torch.float32: 1e-5}
DTYPES = list(LIMIT)
# The ends of the experts' rows: uneven and empty; one expert takes all; one row each; none at all.
ENDS = {"uneven": [0, 37, 38, 70], "one": [0, 45, 45], "single": [1, 2, 3], "none": [0, 0]}
FEW = ("one", "single", "none")
WASTE = 9  # rows that no expert has


def offsets_of(ends: list[int]) -> Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).to(DEVICE)


def spoiled(x: Tensor, first: int) -> Tensor:
    """Rows that are not to be read are NaN."""
    x[first:] = torch.nan
    return x


def check(
    actual: Tensor, expected: Tensor, rows: int, dtype: torch.dtype, limits: dict[torch.dtype, float]
) -> None:
    assert actual.dtype == dtype
    assert relative_error(actual[:rows], expected[:rows]) < limits[dtype]
    assert actual[rows:].isnan().all(), "a row past the last expert's was written"


def up_case(
    ends: list[int], dim: int, ffn: int, activation: str, gather: bool, dtype: torch.dtype, bias: bool = False
) -> tuple[tuple, dict]:
    rows, tokens = ends[-1] + WASTE, 21
    width = 2 * ffn if ACTIVATIONS[activation][1] else ffn
    kwargs = {"activation": activation, "weights_R": spoiled(torch.rand(rows, device=DEVICE), ends[-1])}
    if bias:
        kwargs |= {"bias1_LW": random(len(ends), width, dtype=dtype)}
    if gather:  # some rows are padding; those past the last expert's must not be looked at
        token_R = torch.randint(0, tokens + 1, (rows,), dtype=torch.int32, device=DEVICE)
        token_R[ends[-1] :] = 10**9
        kwargs |= {"token_R": token_R}
    x = random(tokens, dim, dtype=dtype) if gather else spoiled(random(rows, dim, dtype=dtype), ends[-1])
    return (x, random(len(ends), width, dim, dtype=dtype), offsets_of(ends)), kwargs


def check_up(case: tuple[tuple, dict], rows: int, limits: dict[torch.dtype, float] = LIMIT) -> None:
    (x, w, offsets), kwargs = case
    hidden_RW, active_RF = up.up_projection(x, w, offsets, **kwargs)
    if (bias := kwargs.get("bias1_LW")) is not None:
        kwargs |= {"bias1_LW": bias.double()}
    expected = up.up_projection_torch(x.double(), w.double(), offsets, **kwargs)
    if (token_R := kwargs.get("token_R")) is not None:  # padding remains zero
        assert not hidden_RW[:rows][token_R[:rows] == len(x)].any()
    check(hidden_RW, expected[0], rows, x.dtype, limits)
    check(active_RF, expected[1], rows, x.dtype, limits)


NAMES, WIDE = ("swiglu", "gelu"), (torch.float32, torch.bfloat16)
UP = [("uneven", (37, 19), activation, torch.float32, True, False) for activation in ACTIVATIONS]
UP += [("uneven", (37, 19), name, dtype, dtype in WIDE, False) for name in NAMES for dtype in DTYPES[1:]]
UP += [("uneven", (37, 19), *case, True) for case in itertools.product(NAMES, WIDE, (True, False))]
UP += [(ends, (64, 48), "swiglu", torch.float32, gather, False) for ends in FEW for gather in (True, False)]


@pytest.mark.parametrize(("ends", "sizes", "activation", "dtype", "gather", "bias"), UP)
def test_up_projection(ends, sizes, activation, dtype, gather, bias) -> None:
    check_up(up_case(ENDS[ends], *sizes, activation, gather, dtype, bias), ENDS[ends][-1])


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_without_hidden_where_no_backward_follows(activation: str) -> None:
    args, kwargs = up_case(ENDS["uneven"], 37, 19, activation, True, torch.float32)
    _, expected = up.up_projection(*args, **kwargs)
    for function, close in ((up.up_projection, 0), (up.up_projection_torch, 1e-6)):
        hidden_RW, active_RF = function(*args, **kwargs, keeps_hidden=False)
        assert hidden_RW.shape == (0, args[1].size(1))
        assert relative_error(active_RF[:70], expected[:70]) <= close


@needs_descriptors
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_up_projection_by_descriptors(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_descriptors(monkeypatch, up)
    check_up(up_case(ENDS["uneven"], 72, 40, activation, True, torch.bfloat16), 70)
    check_up(up_case(ENDS["single"], 72, 40, activation, False, torch.float16, bias=True), 3)


@needs_descriptors
@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_matmul_by_descriptors(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_descriptors(monkeypatch, down)
    check_down(ENDS["uneven"], 72, 40, torch.bfloat16, transposed)
    check_down(ENDS["single"], 72, 40, torch.float16, transposed, bias=True)


def test_padding_of_no_tokens_is_zero() -> None:
    options = {"token_R": torch.zeros(4, dtype=torch.int32, device=DEVICE)}
    options["weights_R"] = torch.ones(4, device=DEVICE)
    x, w = random(0, 8, dtype=torch.float32), random(1, 6, 8, dtype=torch.float32)
    found = up.up_projection(x, w, offsets_of([4]), activation="swiglu", **options)
    assert [part.shape for part in found] == [(4, 6), (4, 3)]
    assert not any(part.any() for part in found)


DOWN = [(37, 75, torch.float32), (37, 43, torch.float16), (64, 256, torch.bfloat16)]
DOWN = [("uneven", *sizes, transposed, False) for sizes in DOWN for transposed in (True, False)]
DOWN += [("uneven", 37, 43, torch.float32, True, True), ("uneven", 37, 256, torch.bfloat16, True, True)]
DOWN += [(ends, 48, 40, torch.float32, True, False) for ends in FEW]


@pytest.mark.parametrize(("ends", "depth", "width", "dtype", "transposed", "bias"), DOWN)
def test_grouped_matmul(ends, depth, width, dtype, transposed, bias) -> None:
    check_down(ENDS[ends], depth, width, dtype, transposed, bias=bias)


def check_down(
    ends: list[int], depth: int, width: int, dtype: torch.dtype, transposed: bool, limits=LIMIT, bias=False
) -> None:
    x_RI = spoiled(random(ends[-1] + WASTE, depth, dtype=dtype), ends[-1])
    w_LIO = random(len(ends), width, depth, dtype=dtype).transpose(1, 2)
    w_LIO = w_LIO if transposed else w_LIO.contiguous()
    offsets = offsets_of(ends)
    bias_LO = random(len(ends), width, dtype=dtype) if bias else None
    weights_R = spoiled(torch.rand(len(x_RI), device=DEVICE), ends[-1]) if bias else None
    y_RO = down.grouped_matmul(x_RI, w_LIO, offsets, bias_LO, weights_R)
    bias_LO = bias_LO.double() if bias else None
    expected = down.grouped_matmul_torch(x_RI.double(), w_LIO.double(), offsets, bias_LO, weights_R)
    check(y_RO, expected, ends[-1], dtype, limits)


def test_rows_and_matrices_of_wider_tensors() -> None:
    x_RI, offsets = random(20, 96, dtype=torch.float32)[:, 8:48], offsets_of([9, 20])
    w_LIO = random(2, 64, 64, dtype=torch.float32)[:, 5:45, 7:30]
    y_RO = down.grouped_matmul(x_RI, w_LIO, offsets)
    assert relative_error(y_RO, torch.cat([x_RI[:9] @ w_LIO[0], x_RI[9:] @ w_LIO[1]])) < 1e-6
    weight1_LWD = random(2, 64, 64, dtype=torch.float32)[:, 4:24, 16:56]
    kwargs = {"activation": "swiglu", "weights_R": torch.rand(20, device=DEVICE)}
    check_up(((x_RI, weight1_LWD, offsets), kwargs), 20)


@needs_descriptors
def test_descriptors_only_where_they_fit() -> None:
    fits = torch.zeros(4, 16, dtype=torch.bfloat16, device=DEVICE)
    assert launch.descriptors(fits)[0].shape == [4, 16]
    assert launch.descriptors(fits, None)[1] is None
    assert launch.descriptors(fits.new_zeros(4, 15), fits) == (None, None)  # stride of one is not aligned
    misaligned = fits[:, 1:]
    for x in (misaligned, fits.t(), fits.new_zeros(0, 16), fits.float()):
        assert launch.descriptors(x) == (None,)


# (hidden, expert ffn, experts, rows): OLMoE, Qwen3-30B-A3B, SonicMoE's 7B, and the reference runs.
REAL = [(2048, 1024, 64, 65536), (2048, 768, 128, 65536), (1536, 256, 128, 98304), (512, 1792, 64, 16384)]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes(shape: tuple[int, int, int, int], skewed: bool, dtype: torch.dtype) -> None:
    dim, ffn, experts, rows = shape
    share = torch.arange(1, experts + 1, dtype=torch.float64) ** (-1.2 if skewed else 0.0)
    ends = (share.cumsum(0) / share.sum() * rows).long().tolist()
    (x, w, offsets), kwargs = up_case(ends, dim, ffn, "swiglu", True, dtype)
    check_up(((x, w * dim**-0.5, offsets), kwargs), ends[-1], REAL_LIMIT)
    check_down(ends, ffn, dim, dtype, True, REAL_LIMIT)
    check_down(ends, 2 * ffn, dim, dtype, False, REAL_LIMIT)


# Multiprocessors that are left free


@pytest.mark.parametrize("margin", [0, 1, 4, 6])
def test_every_tile_is_computed_with_the_same_bits_whatever_the_margin(
    margin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, w, offsets), options = up_case(ENDS["uneven"], 37, 70, "swiglu", True, torch.float32)
    dy, weight2_LDF = random(21, 37, dtype=torch.float32), random(4, 37, 70, dtype=torch.float32)

    def results() -> list[Tensor]:
        hidden_RW, active_RF = up.up_projection(x, w, offsets, **options)
        y_RD = down.grouped_matmul(active_RF, weight2_LDF.transpose(1, 2), offsets)
        grads = activation_grad(dy, weight2_LDF, hidden_RW, offsets, **options)
        return [rows[:70] for rows in (hidden_RW, active_RF, y_RD, *grads)]

    expected = results()
    monkeypatch.setattr(launch, "_num_free_processors", margin)
    monkeypatch.setattr(launch, "processors", lambda device: 7)
    for actual, of_all in zip(results(), expected, strict=True):
        assert torch.equal(actual, of_all)


def test_programs_of_a_persistent_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(launch, "_num_free_processors", 0)
    for margin, programs in ((0, 132), (16, 116), (131, 1), (200, 1)):
        launch.leave_free(margin)
        assert launch.num_programs(x, 10**6) == programs
        assert launch.num_programs(x, 10**6, per_processor=2) == 2 * programs
        assert launch.num_programs(x, 10**6, takes_all=True) == 132
        assert launch.num_programs(x, 1) == 1
