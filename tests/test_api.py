"""The Python interface of docs/library.md: `moe_exp.load_run`, `plan`, `load_model` and `train`."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

import moe_exp
from helpers import ROOT
from helpers.run_folders import dense_and_moe, event, train_record, write_run
from moe_exp.config import ConfigError


@pytest.fixture(scope="module")
def dense_and_moe_runs(tmp_path_factory):
    return dense_and_moe(tmp_path_factory.mktemp("runs"))


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_there_without_loading_torch():
    code = """
import sys, moe_exp
assert not [name for name in sys.modules if name.startswith("moe_exp.") or name == "torch"]
assert set(moe_exp.__all__) <= set(dir(moe_exp))
print(moe_exp.__version__, moe_exp.load_run.__name__, moe_exp.plan.__name__, moe_exp.load_model.__name__)
assert not {"torch", "megatron.core", "pandas", "matplotlib"} & set(sys.modules)
"""
    assert python(code) == "0.2.0 load_run plan load_model\n"
    with pytest.raises(AttributeError, match="module 'moe_exp' has no attribute 'trian'"):
        moe_exp.trian  # noqa: B018


@pytest.mark.parametrize("which", [0, 1], ids=["dense", "experts"])
def test_frames_have_every_field_of_metrics_jsonl(dense_and_moe_runs, which):
    run = moe_exp.load_run(dense_and_moe_runs[which])
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(run.train) + len(run.valid) + len(run.events) > 40
    rows = {
        kind: iter(frame.to_dict("records"))
        for kind, frame in (("train", run.train), ("valid", run.valid), ("event", run.events))
    }
    for line in lines:
        record = json.loads(line)
        row = next(rows[record.pop("kind")])
        for name, value in row.items():
            expected = record.pop(name, None)
            is_null = value is None or (isinstance(value, float) and math.isnan(value))
            assert is_null if expected is None else value == expected, name
        assert record == {}


def test_columns_of_numbers_are_numbers(tmp_path):
    huge = 10**24  # FLOPs of a large run, too many for int64
    records = [event("start", 0, "10:00:00"), train_record(1, None, consumed_flops=huge)]
    run = moe_exp.load_run(write_run(tmp_path / "short", records))
    assert run.train["lm_loss"].isna().all() and run.train["lm_loss"].dtype == float
    assert run.train["consumed_flops"].tolist() == [1e24]
    assert len(run.valid) == 0 and "lm_loss_ppl" in run.valid
    with pytest.raises(ValueError, match=r"x=consumed_samplse: no record has it with a value to draw. Fix: "):
        run.plot(x="consumed_samplse")


def test_load_of_the_experts(dense_and_moe_runs):
    dense, moe = map(moe_exp.load_run, dense_and_moe_runs)
    assert moe.experts.query("iteration == 21")["tokens_per_expert"].tolist() == [
        [120, 8, 64, 64],
        [21 * 64, 21 * 64, 21 * 64, 0],
    ]
    assert len(dense.experts) == 0 and moe.experts.groupby("layer")["max_over_mean"].max().round(
        3
    ).tolist() == [
        1.875,
        1.333,
    ]


def test_config_and_summary(dense_and_moe_runs):
    run = moe_exp.load_run(str(dense_and_moe_runs[1]))
    assert (run.name, run.config.num_experts, run.summary) == ("experts", 4, {})
    assert repr(run) == f"<Run {run.path}: has no summary yet, {len(run.records)} records>"
    (run.path / "summary.json").write_text('{"status": "finished"}')
    assert moe_exp.load_run(run.path).summary == {"status": "finished"}
    (run.path / "summary.json").unlink()


def test_plot_draws_a_line_per_run_and_leaves_pyplot_alone(dense_and_moe_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    dense, moe = map(moe_exp.load_run, dense_and_moe_runs)
    lines = {axes.get_title(loc="left"): len(axes.lines) for axes in dense.plot(moe).axes}
    assert list(lines.values()) == [2, 2, 2, 1] and "busiest expert" in list(lines)[3]
    figure = dense.plot(x="consumed_tokens")
    assert len(figure.axes) == 2  # no validation with that key, no experts
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "curves.png")


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=rf"RUN={tmp_path}: is no run folder: .*\. Fix: give a run folder"):
        moe_exp.load_run(tmp_path)


def test_without_pandas(dense_and_moe_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = moe_exp.load_run(dense_and_moe_runs[0])
    assert run.plot() and run.records
    with pytest.raises(
        ModuleNotFoundError, match=r'^pandas is not installed. Fix: pip install pandas, or .* "analysis".$'
    ):
        run.train  # noqa: B018
