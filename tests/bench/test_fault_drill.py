"""The drill plans every kind of fault, and its comparison finds what a run must not lose; slow: a short
drill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "bench/drill"))

import fault_drill
from drill_faults import KINDS
from drill_run import BAD_SAMPLES, GBSZ, ITERATIONS

Records = list[dict[str, Any]]


@pytest.fixture
def records() -> Records:
    """What a run without a fault would have."""
    return [
        {"iteration": i, "consumed_samples": i * GBSZ, "experts": [{"tokens_per_expert": [i, 8 - i]}]}
        | dict.fromkeys(set(fault_drill.CURVE) - {"consumed_samples"}, 1 / i)
        for i in range(1, ITERATIONS + 1)
    ]


def test_twenty_faults_are_of_every_kind_and_a_seed_always_means_the_same_ones() -> None:
    faults = fault_drill.planned(7, 20)
    assert {
        kind: sum(isinstance(fault, kind) and type(fault) is kind for fault in faults) for kind in KINDS
    } == {kind: kind.share for kind in KINDS}
    again, other = fault_drill.planned(7, 20), fault_drill.planned(8, 20)
    assert [(type(fault), fault.iteration) for fault in faults] == [
        (type(fault), fault.iteration) for fault in again
    ]
    assert [type(fault) for fault in faults] != [type(fault) for fault in other]
    iterations = [fault.iteration for fault in faults]
    assert iterations == sorted(iterations)
    assert iterations[0] >= 9
    assert iterations[-1] < ITERATIONS


def test_nan_samples_are_expected_at_the_iteration_before_they_are_read() -> None:
    bad = [fault for fault in fault_drill.planned(7, 20) if hasattr(fault, "sample")]
    assert sorted(fault.sample for fault in bad) == sorted(BAD_SAMPLES)
    for fault in bad:
        assert fault.iteration * GBSZ <= fault.sample - GBSZ < (fault.iteration + 1) * GBSZ


def test_equal_runs_have_no_problem(records: Records) -> None:
    assert fault_drill.compared(records, records) == []


@pytest.mark.parametrize("key", [key for key in fault_drill.CURVE if key != "consumed_samples"])
def test_one_other_number_is_found(records: Records, key: str) -> None:
    other = [dict(record) for record in records]
    other[99][key] *= 1 + 2**-52
    (problem,) = fault_drill.compared(other, records)
    assert problem == f"iteration 100: {key} are not those of the undisturbed run"


def test_other_experts_are_found(records: Records) -> None:
    other = [dict(record) for record in records]
    other[49]["experts"] = [{"tokens_per_expert": [49, -41]}]
    (problem,) = fault_drill.compared(other, records)
    assert problem.startswith("iteration 50: tokens_per_expert")


def test_lost_samples_and_repeated_iterations_are_found(records: Records) -> None:
    lost = [
        record | {"consumed_samples": record["consumed_samples"] + GBSZ * (record["iteration"] > 60)}
        for record in records
    ]
    assert fault_drill.compared(lost, records)[0] == "samples were lost or repeated before iteration 61"
    assert "once each" in fault_drill.compared([*records[:20], *records[19:]], records)[0]
    assert "once each" in fault_drill.compared(records[:-1], records)[0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_drill_ends_with_the_undisturbed_curve(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        str(ROOT / "bench/drill/fault_drill.py"),
        "--faults",
        "5",
        "--ranks",
        "2",
        "--json",
        str(results),
    ]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(results.read_text())["1"]
    assert result["problems"] == []
    assert len({outcome["kind"] for outcome in result["outcomes"]}) == 5
    assert all(outcome["event"] for outcome in result["outcomes"])
