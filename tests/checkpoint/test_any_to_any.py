"""A run continues under any other layout as if it had been there from the start: losses, gradient norms,
routing, optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.checkpoint.legs import Leg, Step, deviations, run_legs, write_data


class Layout(NamedTuple):
    """Ranks are as many as all the groups need: experts take ETP*EP*PP, so the second and third have DP 2."""

    tp: int
    pp: int
    ep: int
    etp: int
    dp: int
    vpp: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        ranks = {"gpus_per_node": self.tp * self.pp * self.dp}
        return ranks | sizes | ({"vpp": self.vpp} if self.vpp else {})


LAYOUTS = {
    "one": Layout(1, 1, 1, 1, 1),
    "TP2_EP2_ETP2": Layout(2, 1, 2, 2, 2),
    "PP2_EP2": Layout(1, 2, 2, 1, 2),
    "EP4": Layout(1, 1, 4, 1, 4),
    "TP2_PP2_ETP2": Layout(2, 2, 1, 2, 1),
    "PP2_VPP2": Layout(1, 2, 1, 1, 2, 2),
}
LIMITS = dict.fromkeys(("lm_loss", "balancing_loss", "z_loss", "params_norm", "learning_rate"), 1e-6)
LIMITS |= {"grad_norm": 1e-5}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("tokens"))


class Matrix:
    """Runs of every layout, saved half way, and from each of those on under the others. Layouts of equally
    many ranks share processes.
    """

    def __init__(
        self, folder: Path, data: Path, dtype: str, steps: int, layouts: dict[str, Layout], **model: Any
    ):
        self.folder, self.steps = folder, steps
        base = {"train_data": str(data), "dtype": dtype, **model}
        self.settings = {name: base | layout.settings for name, layout in layouts.items()}
        self.whole = self._all(
            {name: Leg(self.settings[name], None, steps, {steps // 2: folder / name}) for name in layouts}
        )

    def _all(self, legs: dict[str, Leg]) -> dict[str, list[Step]]:
        found = {}
        for size in {leg.config.world_size for leg in legs.values()}:
            names = [name for name, leg in legs.items() if leg.config.world_size == size]
            found |= dict(zip(names, run_legs([legs[name] for name in names], timeout=900), strict=True))
        return found

    def resumed(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Step]]:
        """Source and target to the second half of the steps."""
        legs = {
            f"{source}>{target}": Leg(
                self.settings[target], self.folder / source, self.steps - self.steps // 2
            )
            for source, target in pairs
        }
        found = self._all(legs)
        return {(source, target): found[f"{source}>{target}"] for source, target in pairs}

    def second_half(self, name: str) -> list[Step]:
        return self.whole[name][self.steps // 2 :]

    @property
    def between_layouts(self) -> dict[str, float]:
        """By how much uninterrupted runs differ from that on one process, at most."""
        found = [deviations(steps, self.whole["one"]) for steps in self.whole.values()]
        return {name: max(of_layout[name] for of_layout in found) for name in found[0]}


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[str], Matrix]:
    """Of a dtype: all layouts, 20 steps."""
    return cache(lambda dtype: Matrix(tmp_path_factory.mktemp(dtype), data, dtype, 20, LAYOUTS))


def check(steps: list[Step], expected: list[Step]) -> dict[str, float]:
    """Equal in fp32; the deviations."""
    found = deviations(steps, expected)
    assert {name: value for name, value in found.items() if not value <= LIMITS[name]} == {}
    assert [step.tokens_per_expert for step in steps] == [step.tokens_per_expert for step in expected]
    return found


def test_short_matrix(tmp_path, data):
    """Into expert parallelism and out of it, tensor parallel ranks with parts of gated experts and whole
    latent projections, virtual stages.
    """
    layouts = {name: LAYOUTS[name] for name in ("one", "TP2_EP2_ETP2")}
    layouts |= {"PP2_VPP2": LAYOUTS["PP2_VPP2"]._replace(dp=1)}
    changes = {"moe_latent_size": 20, "gbsz": 4, "warmup_iters": 1, "lr": 5e-3}
    short = Matrix(tmp_path, data, "fp32", 4, layouts, **changes)
    pairs = [("one", "TP2_EP2_ETP2"), ("TP2_EP2_ETP2", "PP2_VPP2"), ("PP2_VPP2", "one")]
    for (_, target), steps in short.resumed(pairs).items():
        check(steps, short.second_half(target))
    assert short.whole["one"][-1].lm_loss < short.whole["one"][0].lm_loss - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_whole_matrix(target, matrix, record_property):
    runs = matrix("fp32")
    for (source, _), steps in runs.resumed([(source, target) for source in LAYOUTS]).items():
        for name, value in check(steps, runs.second_half(target)).items():
            record_property(f"{name} from {source}", value)
        if source == target:
            assert steps == runs.second_half(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
def test_whole_matrix_in_bf16(target, matrix, record_property):
    """Layouts round differently from the first step on, so a moved run differs as uninterrupted runs of two
    layouts do, not more.
    """
    runs = matrix("bf16")
    limits = {name: 3 * value for name, value in runs.between_layouts.items()}
    assert 1e-6 < limits["lm_loss"] < 3e-4
    assert limits["grad_norm"] < 3e-3
    for (source, _), steps in runs.resumed([(source, target) for source in LAYOUTS]).items():
        found = deviations(steps, runs.second_half(target))
        for name, value in found.items():
            record_property(f"{name} from {source}", value)
        assert {name: value for name, value in found.items() if not value <= limits[name]} == {}, source
        if source == target:
            assert steps == runs.second_half(target)
