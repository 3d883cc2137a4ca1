"""Slow ranks are named: from tables of phase times, and in training on real ranks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoint.legs import LAYOUTS, MODEL, write_data
from helpers.ranks import run_on_ranks
from moe_exp.config import Config, load_config
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.slow_ranks import COLUMNS, PHASES, SlowRanks, differences, median_of_others, report
from moe_exp.watch.watchdog.rules import QUIET_EVENTS

EVERY = 5  # iterations of a sample
OWN = np.array([0.02, 0.3, 0.5, 0.18])  # seconds of the phases, 1 in all


def drawn(
    generator: np.random.Generator, works: Sequence[str], num_samples: int, *, noise: float = 0.02,
    sizes: Sequence[float] = (),
) -> np.ndarray:  # fmt: skip
    """Samples [S, R, COLUMNS] of a job. `noise`: relative deviation of an iteration's times, with a long
    tail; `sizes`: work of each rank.
    """
    shape = num_samples, EVERY, len(works), len(PHASES)
    own = OWN * np.array(sizes or [1.0] * len(works))[:, None]
    own = own * np.exp(noise * generator.standard_t(4, shape))
    total = own.sum(axis=-1)
    waits = total.max(axis=2, keepdims=True) - total
    variance = total.var(axis=1) / total.mean(axis=1) ** 2 / (EVERY - 1)
    return np.concatenate([own.mean(axis=1), waits.mean(axis=1)[..., None], variance[..., None]], axis=-1)


def slowed(table: np.ndarray, rank: int, phase: int, first: int, last: int | None = None) -> np.ndarray:
    """The table with `rank` at 0.8 of its speed in the samples [first, last), for which the others wait."""
    table, extra = table.copy(), 0.25 * table[first:last, rank, : len(PHASES)].sum(axis=-1)
    table[first:last, rank, phase] += extra
    table[first:last, :, len(PHASES)] += extra[:, None]
    table[first:last, rank, len(PHASES)] -= extra
    return table


def events_of(
    table: np.ndarray, works: Sequence[str], folder: Path, load: Sequence[float] = (1.0, 1.0, 0.0)
) -> list[tuple[int, str, int, str]]:
    """Number of the sample, name, rank and phase of each event. `load`: PROCESSORS of each sample."""
    places = [{"host": f"node{rank}", "device": "cpu", "work": work} for rank, work in enumerate(works)]
    watch = SlowRanks(places, folder / "ranks.json")
    return [
        (number, name, found["rank"], found.get("phase", ""))
        for number, rows in enumerate(table)
        for name, found in watch.add([[*row, *load] for row in rows.tolist()])
    ]


@pytest.mark.parametrize("phase", range(len(PHASES)), ids=PHASES)
@pytest.mark.parametrize(
    ("works", "sizes"),
    [
        ("aa", (1, 1)),
        ("aaaaaaaa", (1,) * 8),
        ("aabb", (1, 1, 2, 2)),  # two stages
        ("ab", (1, 1.6)),  # no peers
        ("abc", (1, 1.2, 1.4)),
    ],
)
def test_slow_rank_is_named_with_its_phase(works, sizes, phase, tmp_path):
    generator = np.random.default_rng(phase)
    rank = len(works) - 1
    table = slowed(drawn(generator, works, 60, sizes=sizes), rank, phase, 20, 40)
    begin, end = events_of(table, works, tmp_path)
    assert begin[1:] == ("slow_rank", rank, PHASES[phase])
    assert 20 < begin[0] <= 20 + 30 // EVERY
    assert end[1:] == ("slow_rank_end", rank, "") and 40 < end[0] <= 46


def test_rank_that_is_slow_from_the_start_is_named_by_its_peers(tmp_path):
    table = drawn(np.random.default_rng(0), "aab", 40, sizes=(1, 1.25, 3))
    (begin,) = events_of(table, "aab", tmp_path)
    # nothing tells that the third rank, without peers, does not simply do more
    assert begin[:3] == (4, "slow_rank", 1)


def test_rank_on_an_overloaded_host_is_named_after_a_minute(tmp_path, monkeypatch):
    table = slowed(drawn(np.random.default_rng(0), "aa", 60), 1, 1, 20, 50)
    others, itself, idle = (0.5, 2.0, 0.0), (1.9, 2.0, 0.0), (0.5, 1.8, 0.2)  # seconds of two processors
    usual = events_of(table, "aa", tmp_path)
    assert usual[0][0] <= 26
    assert events_of(table, "aa", tmp_path, itself) == events_of(table, "aa", tmp_path, idle) == usual
    assert not events_of(table, "aa", tmp_path, others)
    clock = count(0.0, 4.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    late = events_of(table, "aa", tmp_path, others)
    assert late[0][1:] == usual[0][1:] and late[0][0] - usual[0][0] == 15


def test_rank_without_peers_stays_slow_until_it_is_as_before(tmp_path):
    table = slowed(drawn(np.random.default_rng(0), "ab", 300, sizes=(1, 2)), 1, 2, 30, 250)
    (begin, end) = events_of(table, "ab", tmp_path)
    assert begin[0] < 40 and 250 < end[0] < 260


def test_victims_and_late_arrivals_are_not_named(tmp_path):
    """More own time while it also waits more than its peers: the cause is another one."""
    table = drawn(np.random.default_rng(0), "aaaa", 40)
    table[10:, 2, 1] += 0.3
    table[10:, 2, len(PHASES)] += 1.0
    assert not events_of(table, "aaaa", tmp_path)


@pytest.mark.parametrize("spikes", [0.0, 0.01])
@pytest.mark.parametrize(
    ("works", "noise"),
    [("aa", 0.1), ("ab", 0.1)]
    + [
        pytest.param(works, noise, marks=pytest.mark.slow)
        for works in ("aa", "aaaa", "aabbccdd", "ab")
        for noise in (0.01, 0.1, 0.2)
    ],
)
def test_noise_names_nobody(works, noise, spikes, tmp_path):
    """2,000 iterations, three seeds. `spikes`: share of samples that take three times as long on a rank."""
    for seed in range(3):
        generator = np.random.default_rng(seed)
        table = drawn(generator, works, 2000 // EVERY, noise=noise)
        is_spike = generator.random(table.shape[:2]) < spikes
        table[is_spike, : len(PHASES)] *= 3
        assert not events_of(table, works, tmp_path)


@settings(max_examples=50)
@given(st.integers(2, 9), st.integers(0, 2**31))
def test_median_of_others(num_ranks, seed):
    values = np.random.default_rng(seed).integers(0, 5, (num_ranks, 3)).astype(float)  # with ties
    found = median_of_others(values)
    for rank in range(num_ranks):
        assert np.array_equal(found[rank], np.median(np.delete(values, rank, axis=0), axis=0))


@settings(max_examples=30)
@given(st.integers(2, 6), st.floats(0.01, 100), st.integers(0, 2**31))
def test_ratios_do_not_depend_on_the_unit(num_ranks, factor, seed):
    (table,), works = drawn(np.random.default_rng(seed), "a" * num_ranks, 1), "a" * num_ranks
    ratios = differences(table, works)[:, -1]
    table[:, : len(PHASES)] *= factor
    assert np.allclose(differences(table, works)[:, -1], ratios)


def test_report_adds_the_host_to_the_list(tmp_path, caplog):
    found = {"rank": 3, "host": "node-b.x", "device": "cuda:3", "work": "", "phase": "data", "factor": 1.253}
    path = tmp_path / "exclude_nodes.txt"
    report("slow_rank", found, None)
    assert (
        not path.exists() and "node-b.x: rank 3 (cuda:3) is slow, mainly in data: 1.25 times" in caplog.text
    )
    report("slow_rank", found, path)
    assert path.read_text().startswith("node-b ") and "rank 3" in path.read_text()
    path.write_text("not a host\n")
    report("slow_rank", found, path)
    assert "cannot add node-b.x" in caplog.text
    assert "slow_rank_end" in QUIET_EVENTS and "slow_rank" not in QUIET_EVENTS


@pytest.mark.parametrize(
    ("given", "named"),
    [({"slow_rank_every": 0, "exclude_slow": True}, "EXCLUDE_SLOW"), ({"slow_rank_every": 4}, "=4")],
)
def test_settings_are_checked(given, named):
    (problem,) = Config(gpus_per_node=1, **given).problems()
    assert named in problem


# On real ranks.


@contextmanager
def stress() -> Iterator[None]:
    """A program that computes and one that writes to 256 MB of memory, as of `stress -c 1 -m 1`."""
    programs = "while True: pass", "while True: bytearray(2**28)"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


Plan = Sequence[tuple[str, int, int]]  # phase, first iteration and the one after the last


def train(given: Mapping[str, Any], slow: int, plan: Plan, by_calls: bool) -> float:
    """On a rank: a whole run, in which the rank `slow` spends 25% of its own time in a busy loop, in the
    phases and iterations of `plan`; returns the CPU seconds that exchanges took per iteration.

    `by_calls`: phases are measured by numbers of calls, which do not depend on what else this machine does;
    the loop counts as 25% of them. Waits are measured by time.
    """
    from moe_exp.engine import faults
    from moe_exp.training import interval, loop
    from moe_exp.training.interval import PhaseTimers, RankTimes

    make, end, stop, spent = RankTimes.__init__, RankTimes.end, PhaseTimers.stop, []
    usual, usual_calls, calls, added = [], [], 0, 0.0
    iteration, own = 1, time.perf_counter() - interval._seconds_waited

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    def prepare(self, *args):
        make(self, *args)
        if by_calls:
            self.timers._clock = lambda: 1e-6 * (calls + added)
            interval.processor_seconds = lambda: np.zeros(3)
            sys.setprofile(count)

    def slowly(self, phase):
        nonlocal calls, added
        is_slow = any(phase == one and first <= iteration < last for one, first, last in plan)
        if phase in self._begun and is_slow and not added and int(os.environ["RANK"]) == slow:
            before, until = calls, time.perf_counter() + 0.25 * float(np.median(usual[-10:]))
            while time.perf_counter() < until:
                pass
            calls, added = before, 0.25 * float(np.median(usual_calls[-10:]))
        stop(self, phase)

    def measured(self, number):
        nonlocal iteration, own, calls, added
        now = time.perf_counter() - interval._seconds_waited
        if not added:
            usual.append(now - own)
            usual_calls.append(1e6 * sum(self.timers._seconds.values()))
        calls, added, iteration, own = calls + int(added), 0.0, number + 1, now
        begun = time.thread_time()
        rows = end(self, number)
        spent.append(time.thread_time() - begun)
        return rows

    PhaseTimers.stop, RankTimes.__init__, RankTimes.end = slowly, prepare, measured
    with faults.stop_signal() as request:
        assert loop.run(load_config(given, {}), request) == 0
    sys.setprofile(None)
    return sum(spent) / max(1, len(spent))


def run(
    folder: Path, layout: Mapping[str, Any], slow: int = -1, plan: Plan = (), *, by_calls: bool = True,
    timeout: float = 500, **more: Any,
) -> list[Any]:  # fmt: skip
    """Records of a run on ranks of this machine."""
    data = folder / "tokens"
    if not data.with_suffix(".bin").exists():
        write_data(folder)
    given = {**MODEL, **layout, "train_data": str(data), "run_dir": str(folder), "run_name": "run", **more}
    given |= {"save_interval": 0, "save_at_end": False, "log_interval": 5}
    ranks = given["gpus_per_node"]
    path = RunFolder(folder / "run").metrics
    path.unlink(missing_ok=True)
    seconds = run_on_ranks(ranks, train, given, slow, plan, by_calls, join=False, timeout=timeout)
    print(f"{1e6 * max(seconds):.0f} us per iteration for exchanges")
    return read_metrics(path)


def losses(records: list[Any]) -> list[float]:
    return [one["lm_loss"] for one in records if one["kind"] == "train"]


def check_named(records: list[Any], slow: int, plan: Plan) -> None:
    """Each episode of `plan` has an event within 30 iterations, and there are no others."""
    begins = [one for one in records if one.get("event") == "slow_rank"]
    print([(one["iteration"], one["rank"], one["phase"], one["factor"]) for one in begins])
    assert {one["rank"] for one in begins} <= {slow}
    assert [one["phase"] for one in begins] == [phase for phase, _, _ in plan]
    for one, (_, first, _) in zip(begins, plan, strict=True):
        assert first < one["iteration"] <= first + 30
        assert 1.1 < one["factor"] < 1.6
    ends = [one["iteration"] for one in records if one.get("event") == "slow_rank_end"]
    assert all(last < end <= last + 30 for end, (_, _, last) in zip(ends, plan, strict=True))


PLAN = tuple((phase, 41 + 60 * number, 71 + 60 * number) for number, phase in enumerate(PHASES))
WIDE = {"hidden_size": 64, "ffn_hidden_size": 96, "moe_ffn_hidden_size": 64, "seq_len": 64}


def test_slow_rank_of_two_is_named_and_losses_stay_the_same(tmp_path):
    plan = [("backward", 31, 61)]
    records = run(tmp_path, LAYOUTS["DP2"], 1, plan, train_iters=91, exclude_slow=True)
    check_named(records, 1, plan)
    assert len((tmp_path / "exclude_nodes.txt").read_text().splitlines()) == 1
    ranks = json.loads(RunFolder(tmp_path / "run").ranks.read_text())["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1] and {*COLUMNS[:-1]} < set(ranks[0])
    without = run(tmp_path, LAYOUTS["DP2"], train_iters=20, slow_rank_every=0)
    assert losses(without) == losses(records)[:4]


@pytest.mark.slow
def test_slow_rank_of_two_is_named_in_each_phase(tmp_path):
    """Within 30 iterations."""
    records = run(tmp_path, LAYOUTS["DP2"] | WIDE, 1, PLAN, train_iters=281)
    check_named(records, 1, PLAN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["TP2"], LAYOUTS["PP2"], LAYOUTS["EP2"], {"gpus_per_node": 4}, {"gpus_per_node": 4, "ep": 2},
        {"gpus_per_node": 4, "pp": 2}, {"gpus_per_node": 4, "tp": 2}, {"gpus_per_node": 8, "gbsz": 16},
    ],
    ids=["TP2", "PP2", "EP2", "DP4", "DP4_EP2", "DP2_PP2", "DP2_TP2", "DP8"],
)  # fmt: skip
def test_slow_rank_is_named_in_every_layout(layout, tmp_path):
    # later, as ranks without peers need a past
    plan = [(phase, first + 60, last + 60) for phase, first, last in PLAN]
    records = run(tmp_path, layout | WIDE, 1, plan, train_iters=341)
    check_named(records, 1, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_named_beside_other_programs(seed, tmp_path):
    """2,000 iterations by wall time, as in use."""
    given = {"train_iters": 2000, "seed": seed, "timeout": 2000}
    with stress():
        records = run(tmp_path, LAYOUTS["DP2"], by_calls=False, **given)
    assert not [one for one in records if "slow" in str(one.get("event"))]
