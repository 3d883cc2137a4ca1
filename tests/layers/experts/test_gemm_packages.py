"""The adapters to other packages' grouped GEMMs.

None of the packages runs on a CPU. Here they are replaced by stand-ins with the signatures, checks and
layouts of the real ones, computing in plain torch: that proves how our call lays out its arguments, and
nothing about the packages. The tests marked `gpu` call the real ones.
"""

import importlib.util
import sys
import types

import pytest
import torch
from test_grouped_gemm import SPLITS, assert_relative, inputs, reference

from moe_exp.layers.experts import grouped_gemm
from moe_exp.layers.experts.grouped_gemm import (
    BACKENDS,
    PACKAGES,
    RECIPES,
    check_fp8,
    check_package,
    choose_backend,
    pad_rows,
    padded_splits,
    unpad_rows,
)
from moe_exp.layers.kernels import launch


def gmm(a, b, batch_sizes, trans_b=False):
    """grouped_gemm.ops.gmm: a [R, K]; b [E, N, K] with trans_b, else [E, K, N]; sizes int64 on the host."""
    assert batch_sizes.dtype == torch.int64 and batch_sizes.device.type == "cpu"
    assert batch_sizes.sum() == len(a) > 0
    assert a.is_contiguous() and b.is_contiguous()
    parts = zip(a.split(batch_sizes.tolist()), b, strict=True)
    return torch.cat([x @ (w.t() if trans_b else w) for x, w in parts])


class GroupedLinear(torch.nn.Module):
    """transformer_engine.pytorch.GroupedLinear: weight0, weight1, ... [out, in] each."""

    def __init__(self, num_gemms, in_features, out_features, *, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return torch.cat([x @ w.t() for x, w in zip(inp.split(m_splits), weights, strict=True)])


@pytest.fixture
def put_in_place(monkeypatch):
    """Puts modules with these contents in the place of packages."""

    def put(**packages):
        for name, contents in packages.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        grouped_gemm._te_module.cache_clear()

    yield put
    grouped_gemm._te_module.cache_clear()


def transformer_engine(grouped_linear, **fp8_state):
    """The modules of Transformer Engine that our code imports."""
    state = types.SimpleNamespace(**fp8_state)
    return {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"GroupedLinear": grouped_linear},
        "transformer_engine.pytorch.fp8": {"FP8GlobalStateManager": state},
    }


def run(backend, x_RD, w_LDF, dy_RF, splits, known_splits):
    counts_L = torch.tensor(splits, device=x_RD.device)
    y_RF = BACKENDS[backend](x_RD, w_LDF, counts_L, splits if known_splits else None)
    y_RF.backward(dy_RF)
    return y_RF.detach(), x_RD.grad, w_LDF.grad


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("known_splits", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("backend", PACKAGES)
def test_arguments_as_the_packages_want_them(put_in_place, backend, splits, known_splits, transposed):
    ops = types.SimpleNamespace(gmm=gmm)
    put_in_place(
        grouped_gemm={"ops": ops},
        megablocks={"grouped_gemm_util": types.SimpleNamespace(ops=ops)},
        **transformer_engine(GroupedLinear, is_fp8_enabled=lambda: False),
    )
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=5, dim_out=3, dtype=torch.float64, transposed=transposed)
    actual = run(backend, x_RD, w_LDF, dy_RF, splits, known_splits)
    for one, other in zip(actual, reference(x_RD, w_LDF, splits, dy_RF), strict=True):
        assert_relative(one, other, 1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("backend", PACKAGES)
def test_the_packages_themselves(backend, splits):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if missing := PACKAGES[backend].missing():
        pytest.skip(f"not installed: {', '.join(missing)}")
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=32, dim_out=64, dtype=torch.bfloat16)
    expected = reference(x_RD, w_LDF, splits, dy_RF)
    x = x_RD.detach().cuda().requires_grad_()
    w = w_LDF.detach().transpose(1, 2).contiguous().cuda().transpose(1, 2).requires_grad_()
    for one, other in zip(run(backend, x, w, dy_RF.cuda(), splits, True), expected, strict=True):
        assert_relative(one.cpu(), other, 6e-3)


# Which backend is taken; what cannot run says so


def install(monkeypatch, *installed: str) -> None:
    """Of Triton and all packages that have grouped GEMMs only these are there."""
    find_spec = importlib.util.find_spec
    known = {"triton", *(module for package in PACKAGES.values() for module in package.modules)}

    def find(name):
        return (object() if name in installed else None) if name in known else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    ("name", "installed", "device_type", "dtype", "expected"),
    [
        ("te", [], "cuda", torch.bfloat16,
         r"te: transformer_engine is not installed\. Fix: pip install .*, or use auto\."),
        ("megablocks", [], "cuda", torch.bfloat16,
         r"megablocks: megablocks and grouped_gemm are not installed\. Fix: .*, or use auto\."),
        ("megablocks", ["megablocks"], "cuda", torch.bfloat16,
         r"megablocks: grouped_gemm is not installed\."),
        ("grouped_gemm", ["grouped_gemm"], "cpu", torch.bfloat16,
         r"grouped_gemm: .* CUDA device, not cpu\. Fix: use auto\."),
        ("grouped_gemm", ["grouped_gemm"], "cuda", torch.float32,
         r"grouped_gemm: .* bfloat16, not float32\. Fix: use auto"),
        ("te", ["transformer_engine"], "cuda", torch.float64,
         r"te: .* bfloat16, float16, float32, not float64\."),
        ("torch", [], "cpu", torch.float64, r"torch: .* float64\. Fix: use loop"),
        ("triton", [], "cpu", torch.float64, r"triton: .* float64\. Fix: use auto"),
        ("triton", [], "cuda", torch.bfloat16,
         r"triton: triton is not installed\. Fix: pip install triton, or use auto"),
        ("cutlass", [], "cpu", torch.float32,
         r"cutlass: .* Fix: use auto or one of triton, loop, "),
    ],
)  # fmt: skip
def test_a_named_backend_that_cannot_run(monkeypatch, name, installed, device_type, dtype, expected):
    install(monkeypatch, *installed)
    monkeypatch.setattr(launch, "triton", None)
    with pytest.raises(ValueError, match=f"^expert_backend={expected}"):
        choose_backend(name, device_type=device_type, dtype=dtype)


def test_a_named_backend_that_can_run(monkeypatch):
    install(monkeypatch, "grouped_gemm")
    check_package("grouped_gemm", device_type="cuda", dtype=torch.bfloat16)
    chosen = choose_backend("grouped_gemm", device_type="cuda", dtype=torch.bfloat16)
    assert chosen == ("grouped_gemm", "set by EXPERT_BACKEND")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("triton", ("triton", "set by EXPERT_BACKEND; on a CPU in plain torch")),
        ("loop", ("loop", "set by EXPERT_BACKEND")),
        ("torch", ("torch", "set by EXPERT_BACKEND")),
        ("auto", ("loop", "on a CPU, grouped_mm is also a loop over experts")),
    ],
)
def test_backends_on_a_cpu(name, expected):
    assert choose_backend(name, device_type="cpu", dtype=torch.float32) == expected


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = ["grouped_gemm", "transformer_engine"]


@pytest.mark.parametrize(
    ("missing", "installed", "capability", "dtype", "backend", "because"),
    [
        ("", [], (9, 0), BF16, "triton", "Triton kernels, which gather the rows"),
        ("", [], (9, 0), FP16, "triton", "Triton kernels, which gather the rows"),
        ("old", [], (9, 0), BF16, "torch", "not triton: old; grouped_mm runs as one kernel on Hopper"),
        (
            "old",
            [],
            (9, 0),
            FP16,
            "loop",
            "not triton: old; the other grouped GEMMs run as a single kernel only",
        ),
        ("old", [], (9, 0), FP32, "loop", "only in bf16 and fp16, not in float32"),
        ("old", BOTH[:1], (8, 0), BF16, "grouped_gemm", "before Hopper, and grouped_gemm is installed"),
        ("old", BOTH[1:], (8, 9), BF16, "te", "before Hopper, and transformer_engine is installed"),
        ("old", BOTH, (9, 0), BF16, "torch", "one kernel on Hopper"),
        ("old", BOTH, (10, 0), BF16, "te", "and transformer_engine is installed"),
        ("old", BOTH[:1], (10, 0), BF16, "loop", "(pytorch issue 172439)"),
        ("old", [], (8, 0), BF16, "loop", "grouped_mm is slow on GPUs before Hopper"),
    ],
)
def test_auto_on_a_gpu(monkeypatch, missing, installed, capability, dtype, backend, because):
    install(monkeypatch, *installed)
    monkeypatch.setattr(launch, "missing", lambda: missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    name, reason = choose_backend("auto", device_type="cuda", dtype=dtype)
    assert name == backend
    assert because in reason
    assert reason.startswith("not triton: old; ") == (missing == "old" and dtype != FP32)


def test_torch_without_grouped_mm(monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "it is missing")
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    name, reason = choose_backend("auto", device_type="cuda", dtype=torch.bfloat16)
    assert name == "loop" and reason.endswith(f"torch {torch.__version__} has no grouped_mm")
    with pytest.raises(ValueError, match=r"expert_backend=torch: torch .* has no grouped_mm\. Fix: use loop"):
        choose_backend("torch", device_type="cuda", dtype=torch.bfloat16)


# FP8 of Transformer Engine


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", SPLITS)
def test_rows_are_padded_and_nothing_else_changes(put_in_place, recipe, splits):
    """Inside Transformer Engine's FP8 autocast."""
    seen = []

    class Fp8GroupedLinear(GroupedLinear):
        def forward(self, inp, m_splits, is_first_microbatch=None):
            assert all(rows % RECIPES[recipe][1] == 0 for rows in m_splits), m_splits
            seen.append(m_splits)
            return super().forward(inp, m_splits)

    of_recipe = types.SimpleNamespace(mxfp8=lambda: recipe == "mxfp8")
    state = {"is_fp8_enabled": lambda: True, "get_fp8_recipe": lambda: of_recipe}
    put_in_place(**transformer_engine(Fp8GroupedLinear, **state))
    x_RD, w_LDF, dy_RF = inputs(splits, dim_in=5, dim_out=3, dtype=torch.float64)
    y_RF = BACKENDS["te"](x_RD, w_LDF, torch.tensor(splits), splits)
    y_RF.backward(dy_RF)
    found, expected = (y_RF.detach(), x_RD.grad, w_LDF.grad), reference(x_RD, w_LDF, splits, dy_RF)
    for one, other in zip(found, expected, strict=True):
        assert_relative(one, other, 1e-14)
    if sum(splits):
        assert seen == [padded_splits(splits, RECIPES[recipe][1])]


def test_padding_of_rows_by_hand():
    x_RD = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    padded = pad_rows(x_RD, (3, 0, 4), 4)
    assert padded.flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 7]
    assert padded_splits((3, 0, 4), 4) == [4, 0, 4]
    assert torch.equal(unpad_rows(padded, (3, 0, 4), 4), x_RD)
    # What needs no padding is not copied.
    assert pad_rows(padded, (4, 0, 4), 4) is unpad_rows(padded, (4, 0, 4), 4) is padded


def machine(monkeypatch, *, has_te=True, capability=(9, 0)):
    install(monkeypatch, *(["transformer_engine"] if has_te else []))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_fp8_that_can_run(monkeypatch):
    check_fp8(None, "delayed", backend="loop")  # Megatron's default without FP8
    for recipe, (capability, _) in RECIPES.items():
        machine(monkeypatch, capability=capability)
        check_fp8("hybrid", recipe, backend="te")


@pytest.mark.parametrize(
    ("here", "recipe", "backend", "text"),
    [
        ({"has_te": False}, "tensorwise", "te", r"fp8=hybrid: .* is not installed\. Fix: pip install"),
        ({}, "tensorwise", "triton", r"fp8=hybrid: .* not triton\. Fix: set EXPERT_BACKEND=te"),
        ({}, "delayed", "te", r"fp8_recipe=delayed: .* Fix: use one of tensorwise, blockwise, mxfp8\."),
        ({"capability": None}, "tensorwise", "te", r"fp8=hybrid: .* a CUDA device\. Fix: set FP8=none\."),
        ({"capability": (8, 0)}, "tensorwise", "te", r"fp8_recipe=tensorwise: .*8\.9 .*8\.0\. Fix: set FP8"),
        ({"capability": (9, 0)}, "mxfp8", "te", r"fp8_recipe=mxfp8: .* 10\.0 .* 9\.0\. Fix: use FP8_RECIPE="),
    ],
)
def test_fp8_that_cannot_run(monkeypatch, here, recipe, backend, text):
    machine(monkeypatch, **here)
    with pytest.raises(ValueError, match=f"^{text}"):
        check_fp8("hybrid", recipe, backend=backend)
