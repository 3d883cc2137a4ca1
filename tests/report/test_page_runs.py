"""Reading run folders for the report, whatever their state and whatever their records lack."""

import json
import math

import numpy as np
import pytest

from helpers.run_folders import dense_and_moe, experts, train_record, write_run
from moe_exp.cli import main
from moe_exp.config import ConfigError
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.report.run_data import LoadHistory, read_run, read_runs
from moe_exp.runs.records import last_records


def test_a_run_as_the_trainer_leaves_it(tmp_path):
    dense, moe = read_runs(dense_and_moe(tmp_path))
    assert (dense.kind, moe.kind, dense.status, dense.num_records) == ("dense", "dmoe", "finished", 40)
    assert (len(dense.valid["iteration"]), len(moe.events)) == (4, 4)
    assert not dense.load.layers and moe.load.layers == [1, 2] and moe.load.num_experts == 4
    # Validation lacks FLOPs here: those of the train record of the same iteration.
    assert moe.valid["consumed_flops"].tolist() == [15000, 30000, 45000, 60000]
    assert np.isnan(moe.train["lm_loss"][10:12]).all() and not dense.notes and not moe.notes


def test_load_by_hand(tmp_path):
    run = read_run(dense_and_moe(tmp_path)[1])
    bounds, shares, means = run.load.columns()
    assert len(bounds) == 40 and bounds[0].tolist() == [1, 1] and bounds[-1].tolist() == [40, 40]
    assert shares[0, 0].tolist() == [120 / 64, 8 / 64, 1, 1]
    assert np.allclose(shares[-1, 1], [4 / 3, 4 / 3, 4 / 3, 0])
    assert means["dead_fraction"][-1].tolist() == [0, 0.25]  # older files do not have it: from the counts
    assert np.isnan(means["top1_weight"]).all()
    assert run.train["experts/max_over_mean"][-1] == 120 / 64
    assert run.train["experts/dead_fraction"][-1] == 0.125
    # Two columns: sums of tokens, not means of shares.
    _, shares, _ = run.load.columns(2)
    tokens = 64 * np.arange(1, 41)
    assert np.isclose(shares[1, 1, 0], 4 * tokens[20:].sum() / (3 * tokens[20:].sum()))


def test_load_of_more_records_than_columns():
    history = LoadHistory(1000)
    for index in range(1000):
        history.add(index + 1, experts([index, 1000, 0, 1]))
    history.finish()
    bounds, shares, _ = history.columns()
    assert len(bounds) == 120 and bounds[0, 0] == 1 and bounds[-1, 1] == 1000
    assert (bounds[1:, 0] == bounds[:-1, 1] + 1).all()  # every record in one column
    assert np.allclose(shares.sum(axis=2), 4)
    assert history.record_means()["max_over_mean"][500] == pytest.approx(1000 * 4 / 1501)


def test_one_odd_record_does_not_spoil_the_others():
    history = LoadHistory(3)
    for record in (experts([1, 3]), [{"layer": 1, "tokens_per_expert": "all"}], experts([1, 3])):
        history.add(1, record)
    history.finish()
    assert history.columns()[1].tolist() == [[[0.5, 1.5]], [[0.5, 1.5]]]
    assert np.isfinite(history.record_means()["max_over_mean"]).tolist() == [True, False, True]


def test_older_files_have_neither_flops_nor_times(tmp_path):
    records = [train_record(index, 5.0) for index in (10, 20)]
    for record in records:
        del record["consumed_flops"], record["training_seconds"], record["experts"], record["grad_norm"]
    run = read_run(write_run(tmp_path / "old", records, use_moe=False))
    assert run.train["training_seconds"].tolist() == [1.0, 2.0]
    flops = flops_per_iteration(run.config, 1)
    assert run.train["consumed_flops"].tolist() == [80 * flops, 160 * flops]
    assert np.isnan(run.train["grad_norm"]).all()


def test_lines_that_are_no_records(tmp_path):
    folder = write_run(tmp_path / "odd", [])
    second, first = (json.dumps(train_record(iteration, 5.0)) for iteration in (2, 1))
    third = '{"kind": "train", "iteration": 3, "lm_loss": NaN}'
    fourth = '{"kind": "train", "iteration": 4, "lm_loss": "low"}'
    lines = ["[1, 2]", "{not json", "", second, third, first, fourth, '{"kind": "train", "iter']
    (folder / "metrics.jsonl").write_text("\n".join(lines))  # the last is being written
    run = read_run(folder)
    assert run.train["iteration"].tolist() == [2, 3, 4]
    assert run.train["lm_loss"][0] == 5 and np.isnan(run.train["lm_loss"][1:]).all()
    assert run.notes == [
        "metrics.jsonl: 2 lines are not records and are left out",
        "metrics.jsonl: 1 train records are out of order and are left out",
    ]


def test_runs_with_nothing_yet_and_without_settings(tmp_path):
    empty = write_run(tmp_path / "empty", [])
    bare = write_run(tmp_path / "bare", [train_record(1, 5.0, experts=experts([1, 2]))])
    (bare / "config.yaml").unlink()
    broken = write_run(tmp_path / "broken", [train_record(1, 5.0)])
    (broken / "config.yaml").write_text("gbsz: many\n")
    runs = read_runs([empty, bare, broken])
    assert [run.status for run in runs] == ["no records", "running", "running"]
    assert [run.kind for run in runs] == ["dmoe", "MoE", "dense"]
    assert "config.yaml is missing" in runs[1].notes[0] and "this version (gbsz)" in runs[2].notes[0]
    assert math.isnan(runs[0].last("lm_loss"))


def test_folders_that_are_no_run_are_named_together(tmp_path):
    dense, _ = dense_and_moe(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError) as error:
        read_runs([dense, tmp_path / "other", tmp_path / "nowhere", tmp_path / "runs", dense / "config.yaml"])
    rules = [line.partition(": ")[2].partition(". Fix: ")[0] for line in error.value.problems]
    no_run = "is not a run folder: it contains neither config.yaml nor metrics.jsonl"
    assert rules == [no_run, "folder not found", no_run, "is a file, not a run folder"]
    assert "give the run folders in it: dense, experts" in error.value.problems[2]


def test_runs_of_one_name_are_told_apart_and_one_run_is_read_once(tmp_path):
    a, b = dense_and_moe(tmp_path / "a")[0], dense_and_moe(tmp_path / "b")[0]
    assert [run.name for run in read_runs([a, b, a])] == ["a/dense", "b/dense"]


def test_a_number_that_no_float_holds_is_not_measured(tmp_path, capsys):
    folder = tmp_path / "a"
    folder.mkdir()
    digits, nested = "1" * 400, "[" * 100_000
    (folder / "metrics.jsonl").write_text(
        '{"kind": "train", "iteration": 1, "lm_loss": 2.5}\n'
        f'{{"kind": "train", "iteration": 2, "lm_loss": {digits}, "grad_norm": -{digits}}}\n'
        f'{{"kind": "train", "iteration": {digits}, "lm_loss": 2.0}}\n'
        f'{{"kind": "valid", "iteration": 2, "lm_loss": {digits}}}\n'
        f'{{"kind": "event", "event": {nested}\n'
    )
    (folder / "summary.json").write_text(nested)
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["watch", "run", str(folder), "--once"]) in (0, 1, 2, 3)
    assert last_records(folder / "metrics.jsonl")[1]["lm_loss"] is None


def test_times_of_ranks_are_a_table_with_a_row_for_each(tmp_path):
    folder, page = write_run(tmp_path / "a", [train_record(1, lm_loss=3.0)]), tmp_path / "report.html"
    ranks = [{"rank": rank, "host": "<b>", "own time / peers'": 1.25, "data": 20.123} for rank in (0, 1)]
    (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    assert main(["report", str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert text.count("<td>&lt;b&gt;</td><td>1.25</td><td>20.1</td>") == 2 and '<section id="ranks"' in text
    (folder / "ranks.json").write_text('{"ranks": 3}')  # written by another program
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert '<section id="ranks"' not in page.read_text()
