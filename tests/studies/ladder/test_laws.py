"""Fits recover synthetic laws, with intervals that cover them; speedups and trends by worked examples."""

import math

import numpy as np
import pytest

from moe_exp.studies.ladder.laws import Law, Noise, Points, fit_laws, fit_problem, speedups

COMPUTE = np.geomspace(1e12, 1e14, 6)
DENSE, MOE = Law(1.5, 60.0, 0.13), Law(1.5, 70.0, 0.14)


def points(law: Law, noise: float = 0.0, generator: np.random.Generator | None = None) -> Points:
    """Losses of three seeds."""
    drawn = (generator or np.random.default_rng(0)).standard_normal((len(COMPUTE), 3))
    return Points(COMPUTE, np.array([[law.loss(flops)] * 3 for flops in COMPUTE]) + noise * drawn)


@pytest.mark.parametrize("asymptote", [None, 1.5])
def test_exact_losses_give_the_law_back(asymptote):
    fit = fit_laws({"dense": points(DENSE), "moe": points(MOE)}, asymptote=asymptote, num_draws=0)
    for name, law in (("dense", DENSE), ("moe", MOE)):
        found = fit.laws[name]
        assert (found.asymptote, found.coefficient, found.exponent) == pytest.approx(
            (law.asymptote, law.coefficient, law.exponent), rel=1e-6
        )


def test_models_that_do_not_grow_have_asymptotes_of_their_own():
    """With a shared one, the law of the model that saturates bends too little."""
    dense = Law(2.5, 5e5, 0.45)
    exact = {"dense": points(dense), "moe": points(MOE)}
    fit = fit_laws(exact, is_shared=False, num_draws=0)
    for name, law in (("dense", dense), ("moe", MOE)):
        assert fit.loss(name, 1e15).value == pytest.approx(law.loss(1e15), rel=1e-6)
    shared = fit_laws(exact, num_draws=0)
    assert shared.loss("dense", 1e15).value < dense.loss(1e15) - 0.01


@pytest.mark.parametrize("asymptote", [None, 2.0])
def test_a_plateau_and_a_baseline_that_gets_worse_have_finite_laws(asymptote):
    compute = np.array([1e13, 2e13, 4e13])
    losses = {"dense": [3.0, 3.0, 3.01], "moe": [3.0, 2.4, 2.4]}
    variants = {name: Points(compute, np.array(own)[:, None] + [0, 1e-3]) for name, own in losses.items()}
    fit = fit_laws(variants, asymptote=asymptote, num_draws=20)
    assert all(math.isfinite(fit.loss(name, 8e13).value) for name in losses)
    found = speedups(fit, variants, "moe", "dense")
    assert found.trend.value > 1


def test_a_loss_the_baseline_never_reaches_counts_in_the_trend():
    exact = {"dense": points(DENSE), "moe": points(MOE)}
    fit = fit_laws(exact, num_draws=0)
    below = Points(COMPUTE, np.vstack([exact["moe"].losses[:-1], np.full((1, 3), 1.0)]))
    before = speedups(fit, exact, "moe", "dense")
    after = speedups(fit, {"dense": exact["dense"], "moe": below}, "moe", "dense")
    assert after.rungs[-1].value == math.inf
    assert after.trend.value > before.trend.value


def test_a_prediction_has_the_noise_of_the_runs_in_its_interval():
    variants = {"dense": points(DENSE, 0.01), "moe": points(MOE, 0.01)}
    fit, noise = fit_laws(variants), Noise.of(variants)
    law = fit.loss("moe", 2e14)
    one, many = (fit.prediction("moe", 2e14, noise, num_seeds) for num_seeds in (1, 10**6))
    assert one.high - one.low > 2 * 1.645 * noise.deviation
    assert many.high - many.low == pytest.approx(law.high - law.low, rel=0.05)


@pytest.mark.slow
def test_the_intervals_cover_the_law_in_90_of_100_draws():
    generator = np.random.default_rng(7)
    covered = dict.fromkeys(("asymptote", "coefficient", "exponent", "speedup"), 0)
    true_speedup = DENSE.compute(MOE.loss(COMPUTE[-1])) / COMPUTE[-1]
    for seed in range(100):
        laws = {"dense": DENSE, "moe": MOE}
        variants = {name: points(law, 0.003, generator=generator) for name, law in laws.items()}
        fit = fit_laws(variants, num_draws=100, seed=seed)
        for field, found in fit.parameters("moe").items():
            covered[field] += found.low <= getattr(MOE, field) <= found.high
        last = speedups(fit, variants, "moe", "dense").rungs[-1]
        covered["speedup"] += last.low <= true_speedup <= last.high
    assert min(covered.values()) >= 90, covered
    assert covered["asymptote"] < 100, "the intervals are wider than they claim"


def test_published_runs_have_their_published_exponent_and_a_gain_that_shrinks():
    """Clark et al. 2022 (arXiv:2202.01169): losses after 249,000 steps from their data (of the repository
    google-deepmind/scaling_laws_for_routing), dense and with 64 experts in every second layer. They fit
    L = (c / N)^0.078 to the dense models, and find that larger models gain less from routing.
    """
    sizes = np.array([1.652736e7, 2.727936e7, 5.73696e7, 1.32163584e8, 3.68123904e8, 1.308819456e9])
    losses = {
        "dense": [3.162017, 3.028384, 2.848552, 2.656076, 2.463254, 2.242015],
        "s_base": [2.755725, 2.641051, 2.493833, 2.344865, 2.210754, 2.054387],
        "hash": [2.825369, 2.702306, 2.556693, 2.410465, 2.269941, 2.112280],
    }
    variants = {name: Points(sizes, np.array(of)[:, None]) for name, of in losses.items()}
    fit = fit_laws(variants, asymptote=0.0, num_draws=0)
    assert fit.laws["dense"].exponent == pytest.approx(0.078, rel=0.02)
    for name in ("s_base", "hash"):
        speedup = speedups(fit, variants, name, "dense")
        assert speedup.rungs[0].value > speedup.rungs[-1].value > 1.5
        assert speedup.trend.value < -0.1
    # the largest model, predicted from the five smaller ones with a fitted asymptote: within 2%
    below = {name: Points(of.compute[:5], of.losses[:5]) for name, of in variants.items()}
    before = fit_laws(below, num_draws=0)
    for name, points in variants.items():
        assert before.laws[name].loss(sizes[-1]) == pytest.approx(points.means[-1], rel=0.02)


def test_speedup_worked_out():
    # dense: L = 1 + 100 / sqrt(C). The variant has dense's losses at four times the compute, then at nine.
    dense = Law(1.0, 100.0, 0.5)
    reached = {"dense": (1e4, 1e6), "fine": (4e4, 9e6)}
    losses = {name: np.array([[dense.loss(one)] for one in of]) for name, of in reached.items()}
    variants = {name: Points(np.array([1e4, 1e6]), of) for name, of in losses.items()}
    found = speedups(fit_laws(variants, asymptote=1.0, num_draws=0), variants, "fine", "dense")
    assert [one.value for one in found.rungs] == pytest.approx([4.0, 9.0])
    assert found.trend.value == pytest.approx(math.log(9 / 4) / math.log(100))
    assert not found.rungs[0].has_interval  # one seed
    assert dense.compute(0.9) == math.inf


def test_too_few_rungs_say_what_to_add():
    few = {"dense": Points(COMPUTE[:2], np.array([[3.0], [2.8]]))}
    assert "a law requires 3: add 1 more rung, or set --asymptote" in fit_problem(few, None)
    assert fit_problem(few, 1.0) == ""
    assert fit_problem(few, 2.9) == "--asymptote 2.9 must be below the lowest loss, 2.8000"
    with pytest.raises(ValueError, match="add 1 more rung"):
        fit_laws(few)


def test_missing_runs_are_left_out():
    whole = points(MOE)
    holes = Points(COMPUTE, whole.losses.copy())
    holes.losses[1] = math.nan
    holes.losses[2, 0] = math.nan
    found = fit_laws({"moe": holes}, num_draws=0).laws["moe"]
    assert found.exponent == pytest.approx(MOE.exponent, rel=1e-6)
