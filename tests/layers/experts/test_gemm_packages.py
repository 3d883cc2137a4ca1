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
from moe_exp.layers.experts.grouped_gemm import BACKENDS, PACKAGES, check_package, choose_backend
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
def stand_ins(monkeypatch):
    ops = types.SimpleNamespace(gmm=gmm)
    for name, contents in {
        "grouped_gemm": {"ops": ops},
        "megablocks": {"grouped_gemm_util": types.SimpleNamespace(ops=ops)},
        "transformer_engine": {},
        "transformer_engine.pytorch": {"GroupedLinear": GroupedLinear},
        "transformer_engine.pytorch.fp8": {
            "FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False)
        },
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    grouped_gemm._te_module.cache_clear()
    yield
    grouped_gemm._te_module.cache_clear()


def run(backend, x_RD, w_LDF, dy_RF, splits, known_splits):
    counts_L = torch.tensor(splits, device=x_RD.device)
    y_RF = BACKENDS[backend](x_RD, w_LDF, counts_L, splits if known_splits else None)
    y_RF.backward(dy_RF)
    return y_RF.detach(), x_RD.grad, w_LDF.grad


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("known_splits", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("backend", PACKAGES)
def test_arguments_as_the_packages_want_them(stand_ins, backend, splits, known_splits, transposed):
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


# What cannot run says so


def install(monkeypatch, *installed: str) -> None:
    find_spec = importlib.util.find_spec
    known = {module for package in PACKAGES.values() for module in package.modules}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if name in installed else None) if name in known else find_spec(name),
    )


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
         r"grouped_gemm: needs a CUDA device, not cpu\. Fix: use auto\."),
        ("grouped_gemm", ["grouped_gemm"], "cuda", torch.float32,
         r"grouped_gemm: computes in bfloat16, not in float32\. Fix: use auto"),
        ("te", ["transformer_engine"], "cuda", torch.float64,
         r"te: computes in bfloat16, float16, float32, not in float64\."),
    ],
)  # fmt: skip
def test_a_named_backend_that_cannot_run(monkeypatch, name, installed, device_type, dtype, expected):
    install(monkeypatch, *installed)
    with pytest.raises(ValueError, match=f"^expert_backend={expected}"):
        choose_backend(name, device_type=device_type, dtype=dtype)


def test_a_named_backend_that_can_run(monkeypatch):
    install(monkeypatch, "grouped_gemm")
    check_package("grouped_gemm", device_type="cuda", dtype=torch.bfloat16)
    chosen = choose_backend("grouped_gemm", device_type="cuda", dtype=torch.bfloat16)
    assert chosen == ("grouped_gemm", "asked for by EXPERT_BACKEND")


@pytest.mark.parametrize(
    ("installed", "capability", "backend", "because"),
    [
        (["grouped_gemm"], (8, 0), "grouped_gemm", "before Hopper, and grouped_gemm is installed"),
        (["transformer_engine"], (8, 9), "te", "before Hopper, and transformer_engine is installed"),
        (["grouped_gemm", "transformer_engine"], (9, 0), "torch", "one kernel on Hopper"),
        (["grouped_gemm", "transformer_engine"], (10, 0), "te", "and transformer_engine is installed"),
        (["grouped_gemm"], (10, 0), "loop", "Blackwell (pytorch issue 172439)"),
        ([], (8, 0), "loop", "grouped_mm is slow on GPUs before Hopper"),
    ],
)
def test_auto_takes_a_package_where_grouped_mm_is_no_choice(
    monkeypatch, installed, capability, backend, because
):
    install(monkeypatch, *installed)
    monkeypatch.setattr(launch, "missing", lambda: "it is missing")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    name, reason = choose_backend("auto", device_type="cuda", dtype=torch.bfloat16)
    assert name == backend
    assert reason.startswith("not triton: it is missing; ") and reason.endswith(because)
