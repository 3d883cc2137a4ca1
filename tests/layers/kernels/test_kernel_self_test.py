"""The self-test finds a kernel that is wrong, and names it; right ones pass in every variant."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moe_exp.layers.kernels import (
    activation_grad,
    combine,
    grouped_matmul,
    launch,
    rows,
    self_test,
    slot_sort,
    tuning,
    weight_grad,
)
from moe_exp.layers.kernels.self_test import Sizes, check_kernels

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")
CPU = torch.device("cpu")
SMALL = Sizes(torch.float32, hidden_size=40, ffn_size=24, num_experts=3, vocab_size=100)
ROUTER = {"num_experts": 8, "score": "sigmoid", "normalize": True, "expert_bias": True}


def broken(monkeypatch, kernel, spoil):
    """`kernel` spoils what it has written; `spoil` gets the arguments of the launch."""
    function = kernel.fn if isinstance(kernel, tuning.Tuned) else kernel
    run = function.run
    monkeypatch.setattr(function, "run", lambda *args, **kwargs: (run(*args, **kwargs), spoil(*args)))


def failed(part="experts", sizes=SMALL):
    return [check for check in check_kernels(part, sizes, CPU) if check.problem]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu", "squared_relu"])
@pytest.mark.parametrize("gathers", [True, False])
def test_right_kernels_pass(dtype, activation, gathers):
    bias = activation in ("clamped_swiglu", "gelu")
    sizes = Sizes(dtype, 40, 24, 3, activation=activation, bias=bias, gathers=gathers, adds=not gathers)
    state = torch.get_rng_state()
    checks = list(check_kernels("experts", sizes, CPU))
    gemms = {"up_projection", "grouped_matmul", "activation_grad", "weight_grad"}
    assert gemms <= {check.kernel for check in checks}
    assert [check.problem for check in checks] == [""] * len(checks)
    assert all(check.num_configs == 1 and 0 <= check.error < 0.03 for check in checks)
    assert torch.equal(torch.get_rng_state(), state)  # training draws what it would have drawn


@pytest.mark.parametrize("part", ["routing", "cross entropy"])
def test_right_kernels_of_other_parts_pass(part):
    sizes = Sizes(torch.bfloat16, 40, 24, 4, vocab_size=100, router=ROUTER)
    assert failed(part, sizes) == []


@pytest.mark.parametrize(
    ("num_rows", "rows_of_experts"), [(0, [1, 256, 1024]), (800, [32, 100, 1024]), (5601, [32, 256, 701])]
)
def test_kernels_are_timed_in_every_class_of_rows_and_with_the_rows_of_the_run(
    monkeypatch, num_rows, rows_of_experts
):
    found = []
    monkeypatch.setattr(self_test, "_expert_cases", lambda *args: iter(found.append(args[2]) or ()))
    sizes = Sizes(torch.float32, 8, 8, 8, num_rows=num_rows)
    assert list(self_test.timing_cases(["experts", "routing"], sizes, CPU)) == []
    assert found == [[rows] * 8 for rows in rows_of_experts]


def test_a_wrong_row_is_enough(monkeypatch):
    """One of 40; the config and all versions are in the line."""
    broken(monkeypatch, grouped_matmul._kernel, lambda x, w, y, *_: y[-1].mul_(1.01))
    forward, backward = failed()
    assert forward.kernel == backward.kernel == "grouped_matmul"
    assert forward.error == pytest.approx(0.01, rel=0.01)
    assert forward.problem.startswith("config BLOCK_M: 32, BLOCK_N: 32")
    assert forward.problem.endswith("relative error 0.01 (limit 0.0001)")
    where = "fp32, 40 rows, 3 experts, 40 x 24, swiglu; interpreted on a CPU"
    versions = f"torch {torch.__version__}, triton {launch.triton.__version__}"
    assert f"kernel grouped_matmul ({where}; {versions}" in forward.line(CPU)
    assert forward.problem in forward.line(CPU)


def test_a_gradient_that_is_added_wrongly_is_wrong(monkeypatch):
    broken(monkeypatch, weight_grad._kernel, lambda a, b, dw, *_: dw.mul_(1.01))
    found = failed(sizes=Sizes(torch.float32, 40, 24, 3, adds=True))
    assert {check.kernel for check in found} == {"weight_grad"}
    assert all(check.error == pytest.approx(0.01, rel=0.02) for check in found)


def test_a_wrong_bias_is_wrong(monkeypatch):
    def spoil(x, w, y, x_tma, w_tma, bias, *_):
        if bias is not None:
            y.add_(0.01 * bias.mean(dim=0))

    broken(monkeypatch, grouped_matmul._kernel, spoil)
    assert failed() == []
    (check,) = failed(sizes=replace(SMALL, bias=True))
    assert check.kernel == "grouped_matmul" and ", biases" in check.shape


@pytest.mark.parametrize(
    ("kernel", "argument", "added", "part", "name"),
    [
        (activation_grad._kernel, 6, math.nan, "experts", "activation_grad"),
        (slot_sort._place_kernel, 3, 1, "experts", "slot_sort"),
        (rows._chunk_kernel, 2, 1, "routing", "chunk_order"),
    ],
)
def test_a_nan_or_a_wrong_integer_is_wrong(monkeypatch, kernel, argument, added, part, name):
    broken(monkeypatch, kernel, lambda *args: args[argument].view(-1)[0].add_(added))
    (check,) = failed(part)
    assert check.kernel == name
    assert check.error == math.inf if added == 1 else math.isnan(check.error)


def test_an_exception_is_named(monkeypatch):
    def fail(*args):
        raise RuntimeError("no such instruction")

    broken(monkeypatch, combine._kernel, fail)
    (check,) = failed()
    assert (check.kernel, check.num_configs) == ("combine", 0)
    assert check.problem.startswith("config BLOCK_D: 32")
    assert check.problem.endswith("RuntimeError: no such instruction")


def test_every_config_is_compared_and_one_that_cannot_run_is_dropped(monkeypatch, caplog):
    """With descriptors or without; wrong numbers of any of them are a problem of the kernel."""
    half = replace(SMALL, dtype=torch.float16)
    kernel, run = grouped_matmul._kernel, grouped_matmul._kernel.fn.run
    configs = [tuning.make_config(config) for config in grouped_matmul.CONFIGS]
    for name, value in {"configs": configs, "_dropped": [], "_warned": [], "choices": {}}.items():
        monkeypatch.setattr(kernel, name, value)
    checks = check_kernels("experts", half, CPU)
    forward, backward = (check for check in checks if check.kernel == "grouped_matmul")
    assert forward.num_configs == backward.num_configs == len(configs)

    def launched(*args, **kwargs):
        if kwargs["TMA"]:
            raise RuntimeError("no descriptor")
        run(*args, **kwargs)

    monkeypatch.setattr(kernel.fn, "run", launched)
    assert failed(sizes=half) == []
    assert {config.constants["TMA"] for config in kernel._dropped} == {1}
    assert len(caplog.records) == 3 and "is not used: RuntimeError: no descriptor" in caplog.text

    def wrong(*args, **kwargs):
        run(*args, **kwargs)
        if kwargs["num_stages"] == 3 and not kwargs["TMA"]:
            args[2].zero_()

    monkeypatch.setattr(kernel.fn, "run", wrong)
    forward, _ = failed(sizes=half)
    assert "TMA: 0" in forward.problem and "num_stages: 3" in forward.problem
    assert forward.error == pytest.approx(1)
