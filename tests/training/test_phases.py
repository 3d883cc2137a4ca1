"""Timers of phases, on the CPU's clock and by CUDA events."""

import pytest
import torch
from test_interval import ITERATIONS, SETTINGS, record_on_rank

from helpers.ranks import run_jobs
from moe_exp.training.interval import PHASES, PhaseTimers, timed

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("name", DEVICES)
def test_sums_until_they_are_taken(name):
    device = torch.device(name)
    timers, x = PhaseTimers(device), torch.ones(300, 300, device=device)
    timers.stop("optimizer")  # was not begun
    for _ in range(3):
        with timed(timers, "experts"):
            x = x @ x / 300
    timers.start("all_to_all")  # is not ended
    timers.add("checkpoint", 1.5)
    timers.add("checkpoint", 0.25)
    taken = timers.take()
    assert tuple(taken) == PHASES
    assert taken["experts"] > 0
    assert {phase: seconds for phase, seconds in taken.items() if phase != "experts"} == {
        "data": 0, "forward_backward": 0, "all_to_all": 0, "optimizer": 0, "checkpoint": 1.75,
    }  # fmt: skip
    assert timers.take() == dict.fromkeys(PHASES, 0.0)
    timers.stop("all_to_all")
    assert timers.take()["all_to_all"] > 0


def test_a_phase_that_fails_is_ended():
    timers = PhaseTimers(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), timed(timers, "data"):
        1 / 0  # noqa: B018
    first = timers.take()["data"]
    timers.stop("data")
    assert first > 0 == timers.take()["data"]


@pytest.mark.parametrize(("num_ranks", "sizes"), [(1, {}), (2, {"ep": 2})])
def test_phases_of_a_model(num_ranks, sizes):
    jobs = [(SETTINGS | sizes | {"gbsz": 8, "log_timers": log_timers},) for log_timers in (True, False)]
    (timed_record, _), (plain, _) = (ranks[0] for ranks in run_jobs(num_ranks, record_on_rank, jobs))
    timers = timed_record["timers"]
    assert plain["timers"] is None and tuple(timers) == PHASES
    # Each phase lies inside the one that it is said to be part of.
    assert 0 < timers["all_to_all"] + timers["experts"] < timers["forward_backward"] or num_ranks == 1
    assert 0 < timers["experts"] < timers["forward_backward"] and timers["checkpoint"] == 0
    assert (timers["all_to_all"] > 0) == (num_ranks > 1)
    assert timers["data"] > 0 and timers["optimizer"] > 0
    parts = timers["data"] + timers["forward_backward"] + timers["optimizer"]
    assert parts < timed_record["elapsed_time_per_iteration_ms"] and ITERATIONS > 1
    # Measuring changes nothing else.
    different = {
        "timers", "elapsed_time_per_iteration_ms", "tokens_per_second", "tflops_per_gpu", "eta_seconds",
        "peak_memory_bytes",
    }  # fmt: skip
    assert [key for key in plain if plain[key] != timed_record[key] and key not in different] == []
