"""A run continues under any other layout as if it had been there from the start."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint.legs import LAYOUTS, Leg, Step, deviations, run_legs, write_data

ON_FOUR = {name: LAYOUTS[name] for name in ("one", "TP2_EP2_ETP2", "PP2_EP2", "EP4", "TP2_PP2_ETP2")}
ON_FOUR["PP2_VPP2"] = LAYOUTS["PP2_VPP2"] | {"gpus_per_node": 4}
LIMITS = dict.fromkeys(("lm_loss", "balancing_loss", "z_loss", "params_norm", "learning_rate"), 1e-6)
LIMITS |= {"grad_norm": 1e-5}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_data(tmp_path_factory.mktemp("tokens")))


class Matrix:
    """Runs of every layout, saved half way, and from each of those on under the others."""

    def __init__(self, folder: Path, steps: int, layouts: dict[str, dict[str, Any]], **model: Any):
        self.folder, self.steps = folder, steps
        self.settings = {name: model | layout for name, layout in layouts.items()}
        legs = [Leg(of, None, steps, {steps // 2: folder / name}) for name, of in self.settings.items()]
        self.whole = dict(zip(layouts, run_legs(legs, timeout=900), strict=True))

    def resumed(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Step]]:
        """Source and target to the second half of the steps."""
        num_steps = self.steps - self.steps // 2
        legs = [Leg(self.settings[target], self.folder / source, num_steps) for source, target in pairs]
        return dict(zip(pairs, run_legs(legs, timeout=900), strict=True))

    def second_half(self, name: str) -> list[Step]:
        return self.whole[name][self.steps // 2 :]

    @property
    def between_layouts(self) -> dict[str, float]:
        """By how much uninterrupted runs differ from that on one process, at most."""
        found = [deviations(steps, self.whole["one"]) for steps in self.whole.values()]
        return {name: max(of_layout[name] for of_layout in found) for name in found[0]}


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory, data: str) -> Callable[[str], Matrix]:
    """Of a dtype: all layouts, 20 steps."""
    folder = tmp_path_factory.mktemp
    return cache(lambda dtype: Matrix(folder(dtype), 20, ON_FOUR, train_data=data, dtype=dtype))


def check(steps: list[Step], expected: list[Step], limits: dict[str, float]) -> dict[str, float]:
    """The deviations, which are within the limits; in fp32 the routing is the same."""
    found = deviations(steps, expected)
    assert {name: value for name, value in found.items() if not value <= limits[name]} == {}
    tokens, others = ([step.tokens_per_expert for step in some] for some in (steps, expected))
    assert limits is not LIMITS or tokens == others
    return found


def test_short_matrix(tmp_path, data):
    """Into and out of EP, TP with parts of gated experts and whole latent projections, virtual stages."""
    layouts = {name: LAYOUTS[name] for name in ("one", "TP2_EP2_ETP2", "PP2_VPP2")}
    changes = {"moe_latent_size": 20, "gbsz": 4, "warmup_iters": 1, "lr": 5e-3}
    short = Matrix(tmp_path, 4, layouts, train_data=data, **changes)
    pairs = [("one", "TP2_EP2_ETP2"), ("TP2_EP2_ETP2", "PP2_VPP2"), ("PP2_VPP2", "one")]
    for (_, target), steps in short.resumed(pairs).items():
        check(steps, short.second_half(target), LIMITS)
    assert short.whole["one"][-1].lm_loss < short.whole["one"][0].lm_loss - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("target", ON_FOUR)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whole_matrix(dtype, target, matrix, record_property):
    """bf16 rounds differently by layout: a moved run differs as uninterrupted runs of two layouts do."""
    runs, limits = matrix(dtype), LIMITS
    if dtype == "bf16":
        limits = {name: 3 * value for name, value in runs.between_layouts.items()}
        assert 1e-6 < limits["lm_loss"] < 3e-4
        assert limits["grad_norm"] < 3e-3
    for (source, _), steps in runs.resumed([(source, target) for source in ON_FOUR]).items():
        for name, value in check(steps, runs.second_half(target), limits).items():
            record_property(f"{name} from {source}", value)
        if source == target:
            assert steps == runs.second_half(target)
