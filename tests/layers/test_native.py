"""The compiled functions of a CPU: against float64 and plain torch, and where there is no compiler."""

import contextlib
import io
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch

from helpers.layers.tiny_moe import random, tiny_layer
from helpers.ranks import run_on_ranks
from moe_exp.layers import activations, native
from moe_exp.layers.activations import ACTIVATIONS

# Largest relative error of a rounding to the nearest, and that of a few operations in fp32 besides.
ROUNDING = {torch.float32: 0, torch.bfloat16: 2.0**-8}
FP32 = 1e-6

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])


def inputs(rows: int, width: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    wide = width * (1 + ACTIVATIONS[name][1])
    hidden, grad = 3 * random(rows, wide, seed=1), random(rows, width, seed=2)
    return hidden.to(dtype), random(rows, seed=3).float(), grad.to(dtype)


def expected_of(hidden, weights, grad, name) -> list[torch.Tensor]:
    """Result of plain torch in float64, and gradients of the hidden rows and of the weights."""
    hidden, weights = hidden.double(), weights.double().unsqueeze(1)
    active = activations.weighted_activation(hidden, weights, name)
    dhidden, dweights, _ = activations.weighted_activation_backward(grad.double(), hidden, weights, name)
    return [active, dhidden, dweights]


def is_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    largest = exact.abs().max() if exact.numel() else 0
    return bool(((actual - exact).abs() <= ROUNDING[actual.dtype] * exact.abs() + FP32 * largest).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (1, 37), (5, 64), (3, 1030)])
def test_activations_are_rounded_once(name, dtype, rows, width):
    hidden, weights, grad = inputs(rows, width, name, dtype)
    active, dhidden, dweights = expected_of(hidden, weights, grad, name)
    result = native.weighted_activation(hidden, weights, name)
    assert result.dtype == dtype
    assert is_rounded_once(result, active)
    grad_before = grad.clone()
    actual, actual_dweights, again = native.weighted_activation_backward(grad, hidden, weights, name)
    assert torch.equal(again, result)
    assert is_rounded_once(actual, dhidden)
    assert actual_dweights.dtype == torch.float32
    terms = grad_before.double() * active / weights.double().unsqueeze(1)
    assert ((actual_dweights - dweights).abs() <= FP32 * terms.abs().sum(dim=1)).all()


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_relative_error_of_an_activation_everywhere(name):
    """In units of the last place, also where the result is tiny; GELU squares its argument."""
    tiny = torch.logspace(-30, 0, 2001)
    gate = torch.cat([torch.linspace(-105, 105, 40001), tiny, -tiny])
    hidden = torch.stack([gate, torch.ones_like(gate)], dim=1) if name == "swiglu" else gate.unsqueeze(1)
    actual = native.weighted_activation(hidden, torch.ones(len(gate)), name).squeeze(1).double()
    x = gate.double()
    exact = x * torch.sigmoid(x) if name == "swiglu" else x * torch.special.erfc(-x / 2**0.5) / 2
    normal = exact.abs() > 2.0**-120
    ulps = ((actual - exact).abs() / exact.abs())[normal] / 2.0**-24
    limit = 4 if name == "swiglu" else 6 + x.square()[normal]
    assert (ulps <= limit).all()
    assert (actual - exact)[~normal].abs().max() <= 2.0**-120


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(name, dtype, value):
    hidden, weights, grad = inputs(3, 37, name, dtype)
    hidden[1, 5] = value
    expected = expected_of(hidden, weights, grad, name)
    active = native.weighted_activation(hidden, weights, name)
    dhidden, dweights, _ = native.weighted_activation_backward(grad, hidden, weights, name)
    for actual, other in zip((active, dhidden, dweights), expected, strict=True):
        assert torch.equal(actual.isnan(), other.isnan())
        assert torch.equal(actual.isinf(), other.isinf())
        assert actual[[0, 2]].isfinite().all()


@pytest.mark.parametrize("num_slots", [0, 1, 500])
def test_slots_are_sorted_like_a_stable_sort(num_slots):
    expert_N = torch.randint(0, 8, (num_slots,), generator=torch.Generator().manual_seed(1))
    slot_N, row_N = native.sort_slots(expert_N, 7)
    assert torch.equal(slot_N, expert_N.argsort(stable=True))
    assert torch.equal(row_N[slot_N], torch.arange(num_slots))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_left_to_torch(dtype):
    assert not native.takes(torch.zeros(1, dtype=dtype))
    assert not native.takes(torch.zeros(1, device="meta"))
    assert native.takes(torch.nn.Parameter(torch.zeros(1)))


# Where the library comes from

WITHOUT_OPTIMIZING = (
    '#!/bin/sh\n[ "$1" = --version ] || echo compiled >>"$COMPILED"\nexec {compiler} "$@" -O0\n'
)


def result_of_a_layer() -> float:
    layer = tiny_layer(dtype=torch.float32, router={"dtype": "fp32"})
    output, _ = layer(torch.ones(3, 6))
    output.sum().backward()
    return float(output.detach().sum())


def library_in(folder: Path, environ: dict[str, str]) -> tuple[bool, str, float, str]:
    """In another process: whether it has a library and why, a result of the layer, and what is logged."""
    os.environ.update(environ, XDG_CACHE_HOME=str(folder))
    native.library.cache_clear()
    native._function.cache_clear()
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        loaded, why = native.library()
        total = result_of_a_layer()
    return loaded is not None, why, total, errors.getvalue()


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler that takes half a second and writes a line for each library."""
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no C++ compiler")
    path = tmp_path / "compiler"
    path.write_text(WITHOUT_OPTIMIZING.format(compiler=real))
    path.chmod(0o755)
    return path


def test_processes_compile_once_between_them_and_compute_the_same(tmp_path, compiler):
    environ = {"CXX": str(compiler), "COMPILED": str(tmp_path / "compiled")}
    answers = run_on_ranks(2, library_in, tmp_path / "cache", environ, join=False)
    assert [loaded for loaded, *_ in answers] == [True, True]
    assert all(why.startswith("compiled by ") for _, why, *_ in answers)
    assert [errors for *_, errors in answers] == ["", ""]
    assert answers[0][2] == answers[1][2]
    assert (tmp_path / "compiled").read_text() == "compiled\n"
    assert {path.suffix for path in (tmp_path / "cache" / "moe-exp").iterdir()} <= {".so", ".lock"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("PATH is empty", "no C++ compiler in PATH (g++, clang++, c++)"),
        ("echo no header >&2; exit 1", "broken failed with exit code 1: no header"),
        pytest.param(
            'while [ "$1" != -o ]; do shift; done; echo text >"$2"', "file too short", marks=pytest.mark.slow
        ),
        pytest.param("no folder", "Not a directory", marks=pytest.mark.slow),
    ],
)
def test_plain_torch_runs_where_there_is_no_library(tmp_path, compiler, case, expected):
    """`case`: a line of a shell, what the compiler does, if nothing else."""
    environ = {"CXX": str(compiler), "COMPILED": str(tmp_path / "compiled")}
    if case == "PATH is empty":
        environ |= {"CXX": "", "PATH": str(tmp_path)}
    elif case == "no folder":
        (tmp_path / "cache").write_text("a file")
    else:
        environ["CXX"] = str(tmp_path / "broken")
        script = f'#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit\n{case}\n'
        (tmp_path / "broken").write_text(script)
        (tmp_path / "broken").chmod(0o755)
    ((loaded, why, total, errors),) = run_on_ranks(1, library_in, tmp_path / "cache", environ, join=False)
    assert not loaded
    assert expected in why
    # Where a compiler is there it should have worked, so that is said, once.
    assert errors.count("native.cpp is not used") == (case != "PATH is empty")
    assert native.library()[0] is not None  # in this process
    assert abs(total - result_of_a_layer()) <= 1e-5 * abs(total)


def test_the_name_of_the_library_depends_on_the_processor(monkeypatch, tmp_path):
    """Machines with a common home folder do not run each other's instructions."""
    names: list[str] = []
    monkeypatch.setattr(native, "_run", lambda *command: names.append(Path(command[-2]).name) or "compiler 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        loaded, why = native.library.__wrapped__()
        assert loaded is None and names[-1] in why
    assert names[1] != names[3]  # version, library, version, library


def test_a_forked_child_computes_the_same():
    hidden, weights, _ = inputs(5, 64, "swiglu", torch.float32)
    expected = native.weighted_activation(hidden, weights, "swiglu")
    if (child := os.fork()) == 0:
        os._exit(0 if torch.equal(native.weighted_activation(hidden, weights, "swiglu"), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
