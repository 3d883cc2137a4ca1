import json
import math
import random
import sys
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from helpers import ROOT
from moe_exp.planner.calibration import calibrate, fit, log_memory_ratio, log_time_ratio, profile_text
from moe_exp.planner.costs.constants import OWN, RECENT, TimeConstants
from moe_exp.planner.costs.memory import MemoryConstants
from moe_exp.planner.costs.timing import time_of
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import MEASURED_RUNS, MeasuredRun, read_runs
from moe_exp.planner.prediction import CONSTANTS, load_constants, predict

sys.path.append(str(ROOT / "bench/planner"))
from public_fit import read_public_runs

RUNS = read_runs(MEASURED_RUNS)
TIMED = [run for run in RUNS if run.seconds]
public_runs = cache(read_public_runs)


@cache
def fitted():
    return calibrate(RUNS)


def test_the_constants_of_the_package_are_the_fit_to_its_runs():
    shipped, again = load_constants(), fitted().constants
    for kind in ("memory", "time"):
        for name, value in vars(getattr(again, kind)).items():
            if name in RECENT:
                continue  # fitted to other runs, see test_public_runs.py
            assert getattr(getattr(shipped, kind), name) == pytest.approx(value, rel=0.02), name
    assert shipped.hardware == ("A100-80GB", "V100-32GB")
    assert shipped.time_error == pytest.approx(again.time_error, rel=0.02)


def test_few_constants():
    constants = load_constants()
    assert len(vars(constants.memory)) + len(vars(constants.time)) - len((*RECENT, *OWN)) <= 20
    assert 8 * len(RECENT) < sum(run.is_stated for run in public_runs())


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_other_half(seed):
    """The bars of this package; `bench/planner/bench_planner.py` has the table of many halves."""
    shuffled = random.Random(seed).sample(RUNS, len(RUNS))
    half, others = shuffled[: len(RUNS) // 2], shuffled[len(RUNS) // 2 :]
    constants = calibrate(half).constants
    memory = [abs(math.expm1(log_memory_ratio(run, constants.memory))) for run in others if run.memory_gib]
    time = [abs(math.expm1(log_time_ratio(run, constants.time))) for run in others if run.seconds]
    assert len(memory) > 20 and len(time) > 30
    assert fmean(memory) < 0.05 and max(memory) < 0.13
    assert fmean(time) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("run", [TIMED[4], TIMED[40]])
def test_left_out_errors_are_those_of_a_fit_without_the_row(run):
    found = fitted().time
    others = [other for other in TIMED if other is not run]
    without = fit(TimeConstants, others, log_time_ratio).constants
    assert found.left_out[run.row_id] == pytest.approx(math.expm1(log_time_ratio(run, without)), abs=0.006)
    assert abs(found.left_out[run.row_id]) >= abs(found.errors[run.row_id])


TRUE = TimeConstants(matrix_efficiency=0.7, tensor_bandwidth=0.5, layer_seconds=3e-4)


def made(run: MeasuredRun, factor: float = 1.0) -> MeasuredRun:
    return replace(run, seconds=factor * time_of(run.job, run.hardware, TRUE).total)


def test_constants_are_found_again():
    found = fit(TimeConstants, [made(run) for run in TIMED[::4]], log_time_ratio)
    assert max(map(abs, found.errors.values())) < 0.01
    assert found.constants.matrix_efficiency == pytest.approx(0.7, rel=0.05)
    assert found.constants.tensor_bandwidth == pytest.approx(0.5, rel=0.1)


def test_odd_rows_do_not_bend_the_rest():
    runs = [made(run, 2.0 if index % 20 == 7 else 1.0) for index, run in enumerate(TIMED[::3])]
    found = fit(TimeConstants, runs, log_time_ratio)
    others = [abs(error) for index, error in enumerate(found.errors.values()) if index % 20 != 7]
    assert fmean(others) < 0.02


def test_without_rows_constants_are_their_priors():
    with pytest.raises(ValueError, match=r"RUNS: no row has a measured mem_gb or sec_per_it"):
        calibrate([replace(run, seconds=None, memory_gib=None) for run in RUNS])
    assert vars(fit(TimeConstants, [], log_time_ratio).constants) == pytest.approx(vars(TimeConstants()))
    prior = replace(TimeConstants(), matrix_efficiency=0.5)
    assert fit(TimeConstants, [], log_time_ratio, prior).constants.matrix_efficiency == pytest.approx(0.5)
    near = fit(TimeConstants, [made(TIMED[0])], log_time_ratio, prior).constants
    assert near.v100_share == pytest.approx(TimeConstants().v100_share)


def test_constants_that_no_row_depends_on_are_those_of_the_rest():
    shipped = load_constants()
    rows = [run for run in read_runs(MEASURED_RUNS) if run.memory_gib and run.job.measured_by == "allocated"]
    found = calibrate(rows[:8], rest=shipped).memory.constants
    assert found.context_bytes == pytest.approx(shipped.memory.context_bytes)
    assert shipped.memory.context_bytes != pytest.approx(MemoryConstants().context_bytes)


def test_dense_runs_of_a_slow_cluster_say_little_about_its_moe_runs():
    """With a prior, what dense runs share is a factor of theirs; without, there is none."""
    prior = load_constants()
    dense = [run for run in public_runs() if run.is_stated and run.cluster == "SimuMax B200-180GB"]
    dense = [run for run in dense if not run.job.config.use_moe][:12]

    def slower(run):
        return replace(run, memory_gib=None, seconds=1.3 * time_of(run.job, run.hardware, prior.time).total)

    found = calibrate([slower(run) for run in dense], prior, prior).time
    assert max(map(abs, found.errors.values())) < 0.05
    assert found.constants.own_dense == pytest.approx(1.25, abs=0.05) and found.constants.own_moe == 1.0
    moe = next(run for run in public_runs() if run.row_id == "s023")
    before, after = (time_of(moe.job, moe.hardware, of).total for of in (prior.time, found.constants))
    assert 1.0 < after / before < 1.1
    alone = fit(TimeConstants, dense[:1], log_time_ratio).constants
    assert alone.own_dense == alone.own_moe == 1.0


def test_runs_that_depend_on_no_constant():
    """Peaks of torch's allocator in dense models have no part that is fitted."""
    of_simumax = [run for run in public_runs() if run.row_id == "s001"]
    found = calibrate(of_simumax, load_constants()).memory
    assert vars(found.constants) == pytest.approx(vars(load_constants().memory))
    assert abs(found.left_out["s001"]) < 0.03


def test_a_profile_is_read_again(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile_text(fitted(), MEASURED_RUNS))
    again = load_constants(path)
    assert again.time.matrix_efficiency == pytest.approx(fitted().constants.time.matrix_efficiency, rel=1e-4)
    assert again.hardware == fitted().hardware


def test_how_sure():
    run = TIMED[0]
    found = predict(run.job, run.hardware)
    assert found.is_calibrated and 0.01 < found.time_error < 0.13 and 0.01 < found.memory_error < 0.13
    assert not predict(run.job, load_hardware("H100")).is_calibrated
    assert CONSTANTS.name == "constants.json"


@pytest.mark.parametrize("value", [0, -1, float("nan"), "x", None, {}])
def test_a_constant_that_is_none_is_refused(tmp_path, value):
    content = json.loads(CONSTANTS.read_text())
    content["constants"]["time"]["matrix_efficiency"] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content if value != {} else value))
    with pytest.raises(ValueError, match=r"PROFILE=.*profile.json: must be a profile"):
        load_constants(path)
