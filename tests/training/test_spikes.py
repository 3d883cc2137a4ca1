"""Spikes are found at once, and noise is none."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_exp.training.spikes import (
    CALM_ITERATIONS,
    FEWEST,
    LONGEST,
    SPREAD_WINDOW,
    Baseline,
    Spike,
    SpikeDetector,
    SpikeEnd,
)


def found(losses, norms=None, detector=None):
    """What the detector says of a series, from iteration 1 on."""
    detector = detector or SpikeDetector()
    series = enumerate(zip(losses, np.ones(len(losses)) if norms is None else norms, strict=True), start=1)
    said = [detector.add(number, float(loss), float(norm)) for number, (loss, norm) in series]
    return [what for what in said if what is not None]


def noisy(level, count, sigma=0.03, seed=0):
    return level + sigma * np.random.default_rng(seed).standard_normal(count)


def test_level_and_spread():
    baseline = Baseline(floor=0.01)
    for value in (1, 2, 3, 4, 5, 6, 7, 8):
        baseline.accept(float(value))
    assert baseline.level == 4.5
    baseline.accept(5.5)  # departs by 1.0
    baseline.accept(4.0)  # from a level of 5.0, by -1.0: now 4.5 is the middle of ten
    baseline.accept(4.5)  # from 4.5, by 0
    # Median 0, absolute departures 1, 1, 0: their median is 1.
    assert list(baseline.departures) == [1.0, -1.0, 0.0]
    assert baseline.spread == 1.4826
    assert Baseline(floor=0.01).spread == 0.01
    assert baseline.z(100.0) == 0.0  # too few to judge


def test_z_counts_spreads():
    detector = SpikeDetector()
    assert not found(noisy(3.0, 200), detector=detector)
    what = detector.add(201, 4.0, 1.0)
    assert isinstance(what, Spike)
    assert what.loss_z == pytest.approx((4.0 - what.loss_level) / what.loss_spread)
    assert what.loss_spread == pytest.approx(0.03, rel=0.35)
    assert what.loss_level == pytest.approx(3.0, abs=0.02)
    assert len(what.recent_losses) == 16


def test_too_few_iterations_are_not_judged():
    assert not found([3.0] * FEWEST + [9.0])
    assert found([3.0] * (FEWEST + 10) + [9.0])


@pytest.mark.parametrize("per_line", [1, 10, 20])
@pytest.mark.parametrize("seed", range(10))
def test_historical_spike_at_the_first_bad_log_line(per_line, seed):
    """2.77 -> 7.34 -> 8.72, two log lines apart; the loss may jump or climb between them."""
    quiet = noisy(2.77, 400, seed=seed)
    climb = np.interp(np.arange(1, 2 * per_line + 1), [0, per_line, 2 * per_line], [2.77, 7.34, 8.72])
    (spike,) = (what for what in found(np.concatenate([quiet, climb])) if isinstance(what, Spike))
    assert 400 < spike.first_iteration <= spike.iteration <= 400 + per_line
    jump = np.concatenate([quiet, [7.34] * per_line, [8.72] * per_line])
    assert [what.iteration for what in found(jump)] == [401]


def test_the_batch_before_is_the_first():
    """The gradient explodes at 301, the loss with the weights that it made at 302."""
    losses, norms = noisy(3.0, 302), np.exp(noisy(-1.0, 302, 0.1, seed=1))
    losses[301], norms[300:302] = 6.0, 50.0
    (spike,) = found(losses, norms)
    assert (spike.iteration, spike.first_iteration) == (302, 301)


def test_three_hard_batches_are_none_but_four_are():
    losses = noisy(3.0, 400)
    losses[300:303] = 3.3
    assert not found(losses)
    losses[303] = 3.3
    assert [what.first_iteration for what in found(losses)] == [301, 301]


def test_one_large_gradient_is_none_but_three_are():
    losses, norms = noisy(3.0, 400), np.exp(noisy(-1.0, 400, 0.1, seed=1))
    norms[300] = norms[320] = norms[321] = 100.0
    assert not found(losses, norms)
    norms[350:360] = 20.0
    spike, end = found(losses, norms)
    assert (spike.iteration, spike.first_iteration, spike.loss_z < 4) == (353, 351, True)
    assert isinstance(end, SpikeEnd)


def test_one_spike_and_its_recovery():
    healing = 3.0 + 5.0 * np.exp(-np.arange(300) / 40)
    spike, end = found(np.concatenate([noisy(3.0, 300), healing, noisy(3.0, 200, seed=1)]))
    assert spike.iteration == 301
    assert (end.first_iteration, end.outcome, end.highest_loss) == (301, "recovered", 8.0)
    assert 350 < end.iteration < 560


def test_a_loss_that_stays_is_the_new_level():
    spike, end = found(np.concatenate([noisy(3.0, 300), noisy(7.0, LONGEST + 300, seed=1)]))
    assert (spike.iteration, end.iteration, end.outcome) == (301, 301 + LONGEST, "new level")


def test_calm_has_to_last():
    losses = noisy(3.0, 400)
    losses[300 : 300 + 6 * (CALM_ITERATIONS - 1) : CALM_ITERATIONS - 1] = 6.0
    spike, end = found(losses)
    assert spike.iteration == 301
    assert end.iteration == 301 + 5 * (CALM_ITERATIONS - 1) + 1


@pytest.mark.parametrize("at", [299, 301, 310])
def test_goes_on_from_its_state(at):
    """Before, in and after a spike; the state is plain values."""
    spike = 3.0 + 5.0 * np.exp(-np.arange(60) / 5)
    losses = np.concatenate([noisy(3.0, 300), spike, noisy(3.0, 100, seed=2)])
    first, whole = SpikeDetector(), found(losses)
    before = found(losses[:at], detector=first)
    second = SpikeDetector(json.loads(json.dumps(first.state())))
    said = [second.add(number, float(loss), 1.0) for number, loss in enumerate(losses[at:], start=at + 1)]
    both = before + [what for what in said if what is not None]
    assert [(one.iteration, type(one)) for one in both] == [(one.iteration, type(one)) for one in whole]


def normal_series(kind, seed, count=2000):
    """Loss and gradient norm of a run without trouble; norms have heavy tails (Student's t)."""
    random, steps = np.random.default_rng(seed), np.arange(1, count + 1)
    noise, sigma = random.standard_normal(count), np.full(count, 0.03)
    curve = 2.6 + 8.2 * np.exp(-steps / 150) + 1.2 * (steps + 10.0) ** -0.2
    if kind == "level":
        curve = np.full(count, 2.77)
    elif kind == "falls fast":  # flat while the learning rate warms up
        curve = np.where(steps < 30, 10.8, 2.6 + 8.2 * np.exp(-(steps - 30) / 60.0))
    elif kind == "small batches":
        sigma[:] = 0.4
    elif kind == "ramp-up":
        sigma = 0.3 / np.sqrt(1 + steps // 100)
    elif kind == "hard documents":
        curve = curve + 0.15 * (random.random(count) < 0.03)
    elif kind == "large batches":
        sigma[:] = 0.001
    norms = np.exp(-0.3 - 0.5 * np.log1p(steps / 200) + 0.15 * random.standard_t(2.5, count).clip(-50, 50))
    return curve + sigma * noise, norms


KINDS = ["level", "falls", "falls fast", "small batches", "ramp-up", "hard documents", "large batches"]


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_no_alarm_in_2000_normal_iterations(kind, seed):
    assert not found(*normal_series(kind, seed))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.integers(SPREAD_WINDOW, 1900))
def test_a_spike_in_noise_is_found_at_once(kind, seed, at):
    # Where the loss falls by a tenth an iteration, the departures from its level are as large as a spike.
    assume(kind != "falls fast" or at >= 250)
    losses, norms = normal_series(kind, seed)
    # As the historical one, in units of the noise: 4.6 nats at batches whose noise is not over 0.03.
    losses[at:] += max(4.6, 40 * float(np.std(np.diff(losses[max(0, at - 64) : at]))))
    first = found(losses[: at + 1], norms[: at + 1])
    assert [what.iteration for what in first] == [at + 1]


def test_a_norm_of_zero_or_none_is_no_reading():
    detector = SpikeDetector()
    for number in range(100):
        assert detector.add(number, 3.0, None if number % 2 else 0.0) is None
    assert not math.isnan(detector.add(100, 9.0, None).grad_norm_z)
