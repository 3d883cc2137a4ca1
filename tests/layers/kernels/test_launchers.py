"""A launch after the first, without Triton's own search for the compiled kernel, is the same launch."""

import itertools
from functools import partial

import pytest
import torch

from helpers.layers import kernel_launches as launches
from helpers.layers.compiled import launched
from helpers.layers.kernel_launches import Sizes
from moe_exp.layers.kernels import grouped_matmul, launch

pytestmark = pytest.mark.skipif(launch.triton is None, reason="Triton is not installed")
SMALL = Sizes(tokens=64, rows=128, dim=64, ffn=32, experts=4)
CASES = {
    "up": launches.up, "up, rows": partial(launches.up, gather=False),
    "up, bias": partial(launches.up, bias=True),
    "down": launches.down, "gradient of the rows": partial(launches.down, False),
    "activation_grad": launches.activation_gradient, "weight_grad": launches.weight_gradient,
    "weight_grad, adding": partial(launches.weight_gradient, main_grad=True), "combine": launches.combined,
}  # fmt: skip


FAST = {("up", 90), ("combine", 90), ("down", 80)}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST))
        for case in itertools.product(CASES, (80, 90))
    ],
)
def test_the_driver_is_asked_for_the_same(name, capability):
    """The first and the last config: on Hopper, without and with tensor descriptors."""
    for config in (0, -1):
        first, second, third = launched(partial(CASES[name], at=SMALL), capability, config)
        assert len(first) >= 1 and second == first and third == first


def test_what_a_launcher_is_kept_for():
    """Rows may change; whatever Triton compiles for, or the choice of the config depends on, may not."""
    kernel = grouped_matmul._kernel
    buffer = torch.zeros(65, dtype=torch.bfloat16)
    names = kernel.fn.arg_names
    given = {"x": buffer[:64], "num_experts": 4, "rows_class": 1, "width": 64, "depth": 32}

    def signature(kwargs=(), **changed):
        values = given | changed
        return kernel._signature(
            [values.get(name) for name in names[:17]], {"TRANSPOSED": True, **dict(kwargs)}
        )

    same = signature()
    for change in (
        {"x": buffer[1:]}, {"x": buffer[:64].float()}, {"rows_class": 2}, {"depth": 48}, {"num_experts": 8},
        {"bias": buffer}, {"kwargs": {"TRANSPOSED": False}},
    ):  # fmt: skip
        assert signature(**change) != same, change
    assert signature(x=torch.zeros(96, dtype=torch.bfloat16)) == same
