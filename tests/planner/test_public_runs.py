"""The table of public runs: sources, layouts, and whether TFLOP/s, memory and seconds fit the planner's."""

import csv
import statistics
import sys

import pytest

from helpers import ROOT
from moe_exp.planner.calibration import log_memory_ratio, log_time_ratio
from moe_exp.planner.costs.constants import RECENT
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.measured import PUBLIC_RUNS, contradictions, read_rows
from moe_exp.planner.prediction import load_constants

sys.path.append(str(ROOT / "bench/planner"))
from public_fit import fit_public, read_public_runs

ROWS = {row["row_id"]: row for row in csv.DictReader(PUBLIC_RUNS.read_text().splitlines())}
RUNS = read_public_runs()
# Published TFLOP/s by another rule, or of a part that the planner does not count.
OTHER_RULES = {
    "attention over a window": lambda row: bool(row["sliding_window"]),
    "tokens predicted ahead": lambda row: row["num_mtp_layers"] not in ("", "0"),
    "all scores of attention": lambda row: (
        (row["repo"] == "NVIDIA/Megatron-LM" and row["date"] < "2025") or "mcorellama" in row["cluster"]
    ),
    "derived": lambda row: "derived" in row["notes"] + row["assumed"],
    "no second source": lambda row: not row["tokens_per_s_per_gpu"],
}


def mean(errors):
    return statistics.fmean(map(abs, errors))


def test_every_row_has_a_source_and_a_name_of_its_own():
    assert len(ROWS) == len(RUNS) > 400
    needed = ("repo", "path", "commit", "cluster", "model", "gpu")
    assert all(row[name] for row in ROWS.values() for name in needed)
    assert list(contradictions(read_rows(PUBLIC_RUNS), PUBLIC_RUNS)) == []


def test_layouts_exist_and_numbers_fit_each_other():
    for run in RUNS:
        config, row = run.job.config, ROWS[run.row_id]
        num_gpus = int(row["n_gpus"])
        assert config.world_size == num_gpus and sum(run.job.stage_layers) == config.num_layers, run.row_id
        assert num_gpus % (config.tp * config.pp * config.cp) == 0, run.row_id
        assert config.gbsz % (config.mbsz * config.data_parallel_size) == 0, run.row_id
        assert not config.use_moe or config.num_experts % config.ep == 0, run.row_id
        speed = config.gbsz * config.seq_len / run.seconds / num_gpus
        published = float(row["tokens_per_s_per_gpu"] or speed)
        assert speed == pytest.approx(published, rel=0.01), run.row_id
    by_layout = {ROWS[run.row_id]["pipeline_layout"]: run.job.stage_layers for run in RUNS}
    assert by_layout["Et*4|(t*4|)*14tmL"] == (32, 30)
    assert by_layout["Et|(tt|)*30L"] == (7, 8, 8, 8, 8, 8, 8, 6)


def test_published_operations_are_those_of_the_planner():
    compared = [run for run in RUNS if not any(rule(ROWS[run.row_id]) for rule in OTHER_RULES.values())]
    assert len(compared) > 200 and len({run.model for run in compared}) >= 8
    errors = {}
    for run in compared:
        ours = flops_per_iteration(run.job.config) / run.seconds / run.job.config.world_size
        errors[run.row_id] = ours / float(ROWS[run.row_id]["tflops_per_gpu"]) / 1e12 - 1
    assert {name: error for name, error in errors.items() if abs(error) > 0.025} == {}
    assert mean(errors.values()) < 0.005


def test_published_memory():
    """Of the runs of SimuMax, whose optimizer is stated, and of Megatron's FSDP."""
    memory = load_constants().memory
    errors = {
        run.row_id: abs(log_memory_ratio(run, memory))
        for run in RUNS
        if run.memory_gib and (run.cluster.startswith("SimuMax") or run.job.engine.shards_parameters)
    }
    of_simumax = [error for name, error in errors.items() if name.startswith("s")]
    assert len(of_simumax) == 43 and mean(of_simumax) < 0.01
    assert len(errors) == 46 and mean(error for name, error in errors.items() if name.startswith("m")) < 0.03


def test_published_times_with_the_shipped_constants():
    constants = load_constants().time
    stated = [run for run in RUNS if run.is_stated]
    errors = {run.row_id: log_time_ratio(run, constants) for run in stated}
    moe = [run for run in stated if run.job.config.use_moe]
    assert len(moe) > 190
    assert mean(errors[run.row_id] for run in moe if run.kind.startswith("MoE within")) < 0.05
    assert mean(errors[run.row_id] for run in moe if run.kind.startswith("MoE across")) < 0.1
    assert mean(errors.values()) < 0.06


@pytest.mark.slow
def test_the_constants_of_recent_devices_are_the_fit_to_the_runs():
    shipped, again = load_constants().time, fit_public(RUNS).constants
    for name in RECENT:
        assert getattr(shipped, name) == pytest.approx(getattr(again, name), rel=0.03), name
