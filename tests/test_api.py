"""The Python interface of docs/library.md: `moe_exp.load_run`, `plan`, `load_model` and `train`."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from matplotlib.collections import LineCollection, PolyCollection

import moe_exp
from helpers import ROOT
from helpers.checkpoint.small_job import small_settings, write_tokens
from helpers.planner.planned import write_profile
from helpers.ranks import RankError, run_on_ranks
from helpers.run_folders import dense_and_moe, event, train_record, write_run
from moe_exp.config import Config, ConfigError
from moe_exp.host.exit_codes import REASONS_FILE


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in {name.upper() for name in Config.model_fields} & set(os.environ):
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def dense_and_moe_runs(tmp_path_factory):
    return dense_and_moe(tmp_path_factory.mktemp("runs"))


def test_the_names_are_there_without_loading_torch():
    code = """
import sys, moe_exp
assert not [name for name in sys.modules if name.startswith("moe_exp.") or name == "torch"]
assert set(moe_exp.__all__) <= set(dir(moe_exp))
print(moe_exp.__version__, moe_exp.load_run.__name__, moe_exp.plan.__name__, moe_exp.load_model.__name__)
assert not {"torch", "megatron.core", "pandas", "matplotlib"} & set(sys.modules)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0.2.0 load_run plan load_model\n", done.stderr
    with pytest.raises(AttributeError, match="module 'moe_exp' has no attribute 'runs_of'"):
        moe_exp.runs_of  # noqa: B018


@pytest.mark.parametrize("which", [0, 1], ids=["dense", "experts"])
def test_frames_have_every_field_of_metrics_jsonl(dense_and_moe_runs, which):
    run = moe_exp.load_run(dense_and_moe_runs[which])
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(run.train) + len(run.valid) + len(run.events) > 40
    frames = {"train": run.train, "valid": run.valid, "event": run.events}
    rows = {kind: iter(frame.to_dict("records")) for kind, frame in frames.items()}
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
    with pytest.raises(ValueError, match=r"x=consumed_samplse: no record has both this key and .* Fix: "):
        run.plot(x="consumed_samplse")


def test_load_of_the_experts(dense_and_moe_runs):
    dense, moe = map(moe_exp.load_run, dense_and_moe_runs)
    loads = moe.experts.query("iteration == 21")["tokens_per_expert"].tolist()
    assert loads == [[120, 8, 64, 64], [21 * 64, 21 * 64, 21 * 64, 0]]
    busiest = moe.experts.groupby("layer")["max_over_mean"].max()
    assert busiest.round(3).tolist() == [1.875, 1.333] and len(dense.experts) == 0


def test_config_and_summary(dense_and_moe_runs):
    run = moe_exp.load_run(str(dense_and_moe_runs[1]))
    assert (run.name, run.config.num_experts, run.summary) == ("experts", 4, {})
    assert "no summary yet" in repr(run) and f"{len(run.records)} records" in repr(run)
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


def test_plot_draws_seeds_as_a_band_and_names_lines_by_what_differs(tmp_path):
    """Two dense seeds, of which one has not finished; three MoE runs, one of another learning rate."""
    runs = []
    dense = [(False, 1, 1e-3, 4), (False, 2, 1e-3, 3)]
    kinds = [*dense, (True, 1, 1e-3, 4), (True, 3, 1e-3, 4), (True, 1, 2e-3, 4)]
    for number, (use_moe, seed, lr, end) in enumerate(kinds):
        records = [train_record(index, 10.0 * seed - index) for index in range(1, end + 1)]
        stage = event("data_stage", 3, "10:00:00", stage=1, train_data="web", seq_len=64)
        name = f"moe_{use_moe}_num_experts_4_topk_1_gbsz_8_seq_len_64_number_{number}"
        path = write_run(tmp_path / name, [*records, stage], use_moe=use_moe, seed=seed, lr=lr)
        runs.append(moe_exp.load_run(path))
    axes = runs[0].plot(*runs[1:]).axes[0]
    drawn = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines}
    lines = {label: points for label, points in drawn.items() if not label.startswith("_")}
    # each seed to its end, beyond what all have reached
    beyond = sorted(points for label, points in drawn.items() if label.startswith("_"))
    assert beyond == [([3], [17.0]), ([3, 4], [7.0, 6.0]), ([4], [6.0]), ([4], [26.0])]
    assert lines == {
        "dense, LR=0.001 (2 seeds)": ([1, 2, 3], [14, 13, 12]),  # of 9, 8, 7 and 19, 18, 17
        "dmoe, LR=0.001 (2 seeds)": ([1, 2, 3, 4], [19, 18, 17, 16]),
        "dmoe, LR=0.002": ([1, 2, 3, 4], [9, 8, 7, 6]),
    }
    band = next(one for one in axes.collections if isinstance(one, PolyCollection))
    assert sorted({*band.get_paths()[0].vertices[:, 1]}) == [7, 8, 9, 17, 18, 19]
    marks = [one.get_segments()[0][0][0] for one in axes.collections if isinstance(one, LineCollection)]
    assert marks == [2, 2, 2] and [text.get_text() for text in axes.texts] == ["stage 1"] * 3


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ([{"use_moe": False}, {"use_moe": True}], ["dense", "dmoe"]),
        ([{"num_experts": 4}, {"num_experts": 8}], ["NUM_EXPERTS=4", "NUM_EXPERTS=8"]),
        ([{"use_moe": False}, {"topk": 2}, {"topk": 1}], ["dense", "dmoe, TOPK=2", "dmoe, TOPK=1"]),
        # DECAY_ITERS follows, and a path says less than the name that was chosen
        ([{"train_iters": 4}, {"train_iters": 8, "decay_iters": 8}], ["TRAIN_ITERS=4", "TRAIN_ITERS=8"]),
        ([{"train_data": "a/" * 30}, {"train_data": "b"}], ["run0", "run1"]),
        ([{}, None], ["run0", "run1"]),
    ],
)
def test_names_of_lines(others, names, tmp_path):
    runs = []
    for index, settings in enumerate(others):
        path = write_run(tmp_path / f"run{index}", [train_record(1, 5.0)], **(settings or {}))
        if settings is None:
            (path / "config.yaml").unlink()
        runs.append(moe_exp.load_run(path))
    assert [line.get_label() for line in runs[0].plot(*runs[1:]).axes[0].lines] == names


def test_plot_names_runs_of_one_name_by_their_paths(dense_and_moe_runs, tmp_path):
    run = moe_exp.load_run(dense_and_moe_runs[0])
    other = moe_exp.load_run(shutil.copytree(run.path, tmp_path / run.name))
    labels = [line.get_label() for line in run.plot(other).axes[0].lines]
    assert labels == [str(run.path), str(other.path)]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=rf"RUN={tmp_path}: is not a run folder: .*\. Fix: give a run"):
        moe_exp.load_run(tmp_path)


def test_without_pandas(dense_and_moe_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = moe_exp.load_run(dense_and_moe_runs[0])
    assert run.plot() and run.records
    with pytest.raises(ModuleNotFoundError, match=r"^pandas is not .* Fix: pip install .*\[analysis\]"):
        run.train  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 4, "topk": 8}, r"^TOPK=8: must be at most NUM_EXPERTS=4\. Fix: "),
        ({"num_expert": 8}, r"^NUM_EXPERT=8: is not a setting\. Fix: use NUM_EXPERTS"),
        ({"use_moe": "maybe"}, "^USE_MOE=maybe: must be true or false"),
    ],
)
def test_settings_that_cannot_run_raise(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        moe_exp.train(run_dir=tmp_path, data_dir=tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        moe_exp.plan(gpu="cpu", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (1, RuntimeError, "small: the run failed with exit code 1: rank 0 failed: why$"),
        (2, ConfigError, "^rank 0 failed: why$"),
        (130, KeyboardInterrupt, "^$"),
    ],
)
def test_a_launch_that_fails_raises_with_the_reason(code, error, message, tmp_path, monkeypatch):
    def fail(*_, **__):
        Path(os.environ[REASONS_FILE]).write_text("rank 0 failed: why\n" * 2)
        return code

    write_tokens(tmp_path)
    monkeypatch.setattr("moe_exp.launch.launch.launch", fail)
    monkeypatch.setattr("moe_exp.launch.launch.check_environment", lambda config: [])
    with pytest.raises(error, match=message):
        moe_exp.train(**small_settings(tmp_path, "small"))
    assert REASONS_FILE not in os.environ


def train_twice(settings):
    """On a rank: trains, resumes, refuses bad settings; returns the size of the process group."""
    moe_exp.train(**settings, train_iters=2)
    num_threads = psutil.Process().num_threads()
    run = moe_exp.train(**settings, train_iters=4)
    assert run.path == Path(settings["run_dir"]) / "here"
    # The first job's process groups have ended, of 50 threads; one that Megatron still knows keeps its three.
    assert psutil.Process().num_threads() <= num_threads + 5
    with pytest.raises(ConfigError, match="TOPK=8: must be at most NUM_EXPERTS=4"):
        moe_exp.train(**settings | {"topk": 8})
    return torch.distributed.get_world_size()


@pytest.mark.parametrize("is_in_group", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_of_another_program_train_themselves(is_in_group, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "here", ep=2, vocab_size=300)
    del settings["train_iters"]
    assert run_on_ranks(2, train_twice, settings, join=is_in_group) == [2, 2]
    run = moe_exp.load_run(tmp_path / "here")
    assert run.train["iteration"].tolist() == [1, 2, 3, 4]
    assert run.events.query("event in ('start', 'resume')")["iteration"].tolist() == [0, 2]
    assert (run.summary["status"], run.summary["iteration"], run.config.gpus_per_node) == ("finished", 4, 2)
    if is_in_group:
        assert run_on_ranks(1, use_model, run.path, join=False) == [True]
        with pytest.raises(RankError, match=r"WORLD_SIZE=2: must be 1 to load a model. Fix: "):
            run_on_ranks(2, moe_exp.load_model, run.path)


def use_model(path):
    """In a process of its own: generates and scores; returns whether both agree."""
    model = moe_exp.load_model(path, tokenizer="bytes")
    text = model.generate("ab", max_new_tokens=3)
    assert (text.prompt_tokens, len(text.tokens), model.decode([97, 98])) == ([97, 98], 3, "ab")
    # one text, not a sequence of letters
    assert text.text
    stopped = model.generate("ab", max_new_tokens=3, stop=text.text)
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert model.generate("ab", max_new_tokens=3, stop=text.text + "?").text == text.text
    drawn = [model.generate("ab", max_new_tokens=3, temperature=1.0, seed=3) for _ in range(2)]
    assert drawn[0] == drawn[1]
    logits = model.score([model.encode("ab") + text.tokens] * 2)
    assert logits.shape == (2, 5, 300) and torch.equal(logits[0], logits[1])
    for tokens, message in (([[300]], "TOKENS=300: must be from 0 to 299"), ([1], "must be integers")):
        with pytest.raises(ValueError, match=message):
            model.score(tokens)
    assert moe_exp.load_model(path, dtype="bf16").score([[1, 2]]).dtype == torch.float32
    return logits[0, 1:4].argmax(1).tolist() == text.tokens


def test_without_torch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(vars(moe_exp), "train", raising=False)
    for call in (lambda: moe_exp.train(), lambda: moe_exp.load_model(tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"^torch is not .* Fix: pip install .*\[train\]"):
            call()


def test_plan(tmp_path):
    settings = {"preset": "mixtral-8x7b", "pp": 8, "ep": 8, "mbsz": 1, "profile": write_profile(tmp_path)}
    plan = moe_exp.plan(gpus=128, gpu="H100-80GB", tokens=1e12, price=2, **settings)
    assert plan.fits and 0 < plan.memory_bytes < plan.hardware.memory_bytes
    tokens = plan.config.gbsz * plan.config.seq_len
    assert plan.tokens_per_second == pytest.approx(tokens / plan.seconds_per_iteration)
    assert plan.cost.price == pytest.approx(2 * plan.cost.gpu_hours)
    assert plan.report["num_gpus"] == 128 and plan.config.nnodes == 16
    assert "128 x H100-80GB, TP1,PP8,EP8,DP16" in repr(plan) and "tokens per second" in repr(plan)
    assert repr(moe_exp.plan(gpus=128, gpu="H100-80GB", tokens="1T", price=2, **settings)) == repr(plan)
    with pytest.raises(ValueError, match="GPUS=12: must be a multiple of GPUS_PER_NODE=8"):
        moe_exp.plan(gpus=12)
