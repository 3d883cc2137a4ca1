import csv
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.planner.planned import LARGE, write_profile
from moe_exp import cli
from moe_exp.config import load_config
from moe_exp.host.processes import own_command
from moe_exp.planner.hardware import PROFILES
from moe_exp.planner.measured import MEASURED_RUNS, job_of_row, read_runs
from moe_exp.planner.prediction import CONSTANTS

MODEL = [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in LARGE.items()]


@pytest.fixture
def plan(no_settings, tmp_path, capsys):
    profile = str(write_profile(tmp_path))

    def call(*arguments, code=0):
        flags = [] if {"hardware", "calibrate"} & set(arguments) else ["--profile", profile]
        assert cli.main(["plan", *arguments, *flags]) == code
        return capsys.readouterr()

    return call


def test_what_a_run_costs(plan):
    layout = "--gpus 384 --tp 4 --pp 12 --pipeline-layers 5,6*10,5 --mbsz 2 --recompute full"
    settings = [*layout.split(), *MODEL]
    report = json.loads(plan(*settings, "--tokens", "366B", "--price", "2", "--json").out)
    count, memory = report["parameters"], report["memory"]
    # l*(12h^2+13h)+v*h+s*h+2h without what that GPT of 2020 had: learned positions, biases, and biases of the
    # norms.
    without = 2048 * 14336 + 70 * 13 * 14336 + 2 * 14336 - 14336 * (2 * 70 + 1)
    assert count["total"] == 176_276_602_880 - without
    assert count["most_loaded_rank"] > count["total"] / 48
    totals = [stage["total"] for stage in memory["stages"]]
    assert len(totals) == 12 and totals[memory["peak_stage"]] == max(totals)
    assert memory["margin_bytes"] >= memory["device_bytes"] - memory["peak_bytes"] > 0
    assert sum(report["time"]["parts"].values()) == pytest.approx(report["time"]["seconds"])
    assert report["cost"]["price"] == pytest.approx(2 * report["cost"]["gpu_hours"])
    assert report["cost"]["num_tokens"] >= 366 * 10**9
    assert (report["filling_batch"], report["num_gpus"]) == (192, 384)
    assert report["stage_layers"] == [5, *[6] * 10, 5]
    text = plan("run", *settings).out
    for words in ("384 x A100-80GB, TP4,PP12,DP8", "5,6*10,5", "TFLOP/s per GPU", "GPU-hours", "bubble"):
        assert words in text


def test_it_says_what_it_counts(plan):
    settings = ("--preset", "mixtral-8x7b", "--gpus", "8", "--gpu", "H100-80GB", "--ep", "8")
    for flags, part, words in (
        ("", "experts", "triton, the choice of EXPERT_BACKEND=auto on this device ("),
        ("--dtype fp32", "experts", "separate grouped GEMMs, not triton: DTYPE=fp32"),
        ("--expert-backend te --fp8 hybrid", "FP8", "experts and other layers: planned with FP8 peak"),
        ("--expert-backend te", "experts", "te, set by EXPERT_BACKEND ("),
        ("--tp 1", "cross entropy", "triton: memory of its kernel, time of a fused kernel"),
    ):
        report = json.loads(plan("run", *settings, *flags.split(), "--json").out)
        assert report["counted_as"][part].startswith(words)
    assert words in plan("run", *settings, "--tp", "1").out
    of_megatron = plan("run", *settings, "--cross-entropy", "megatron", "--json").out
    assert "cross entropy" not in json.loads(of_megatron)["counted_as"]
    searched = ["search", *settings, "--tp", "1", "--ep", "1", "--pp", "8", "--gpus", "64"]
    assert f"{part}: {words}\n" in plan(*searched).out
    assert "counted_as" in json.loads(plan(*searched, "--json").out)


def test_environment_and_flags_are_those_of_training(plan, monkeypatch):
    monkeypatch.setenv("PRESET", "reference")
    monkeypatch.setenv("EP", "4")
    monkeypatch.setenv("GPUS_PER_NODE", "8")
    for arguments in (["--ep", "8", "run"], ["run", "--ep", "8"], ["--ep", "8"]):
        assert json.loads(plan(*arguments, "--json").out)["layout"] == "TP1,PP1,EP8,DP8"
    assert json.loads(plan("--json").out)["parameters"]["most_loaded_rank"] == 1_204_838_912


def test_search_as_table_and_json(plan):
    arguments = ["search", "--gpus", "384", *MODEL]
    text = plan(*arguments, "--top", "3").out
    report = json.loads(plan(*arguments, "--top", "3", "--json").out)
    assert [row["place"] for row in report["layouts"]] == [1, 2, 3]
    assert report["layouts"][0]["runner_up"] is False and report["layouts"][0]["slower_than_best"] == 0
    assert f"{report['num_tried']:,} layouts tried, {report['num_fitting']:,} fit" in text
    assert report["num_tried"] == report["num_fitting"] + sum(report["rejected"].values())
    for reason, number in report["rejected"].items():
        assert f"{number:,} rejected: {reason}" in text
    best = report["layouts"][0]
    assert f"TP{best['tp']},PP{best['pp']}" in text
    assert f"a global batch of {best['filling_batch']:,} fills the pipeline" in text
    assert "checkpoint size: " in text


def test_explain(plan):
    arguments = ["search", "--gpus", "384", *MODEL]
    refused = plan(*arguments, "--gbsz", "1024", "--explain", "TP=2,PP=4").out
    assert "GBSZ=1024: must be a multiple of MBSZ*DP=1*48=48." in refused
    text = plan(*arguments, "--explain", "TP=4,PP=12,MBS=2,DP=8").out
    assert "vs the best" in text and "memory of a rank" in text
    report = json.loads(plan(*arguments, "--explain", "TP=4,PP=12,MBS=2,DP=8", "--json").out)["explained"]
    assert report["valid"] and report["fits"] and report["problems"] == []
    assert report["layout"]["filling_batch"] == 192


def test_export(plan, monkeypatch):
    monkeypatch.setenv("TP", "2")
    arguments = ["search", "--gpus", "384", *MODEL, "--rampup-batch-size", "192 16 9765", "--export", "env"]
    best = json.loads(plan(*arguments[:-2], "--json").out)["layouts"]
    for rank, chosen in (("1", best[0]), ("2", best[1])):
        printed = plan(*arguments, "--rank", rank)
        assert "TP=2 of the environment: ignored by the search" in printed.err
        assert "layouts tried" in printed.err
        script = f"set -a; source /dev/stdin <<'E'\n{printed.out}E\nenv -0"
        environ = {"PATH": os.environ["PATH"]}
        sourced = subprocess.check_output(["bash", "-c", script], env=environ, text=True)
        config = load_config({}, dict(line.split("=", 1) for line in sourced.rstrip("\0").split("\0")))
        assert list(config.problems()) == []
        assert (config.world_size, config.hidden_size) == (384, 14336)
        assert config.rampup_batch_size == "192 16 9765"
        for name in ("tp", "pp", "vpp", "mbsz", "recompute", "pipeline_layers"):
            assert getattr(config, name) == chosen[name]
    explained = plan(*arguments, "--explain", "TP=4,PP=12,MBSZ=2").out
    assert {"TP=4", "PP=12", "MBSZ=2"} <= set(explained.splitlines())


QWEN = ["--gpus", "64", "--gpu", "H100-80GB", "--preset", "qwen3-30b-a3b", "--gbsz", "512"]


def test_activations_by_module_and_what_a_change_saves(plan):
    arguments = [*QWEN, "--pp", "4", "--ep", "8", "--mbsz", "2"]
    report = json.loads(plan(*arguments, "--json").out)
    stage = report["memory"]["stages"][report["memory"]["peak_stage"]]
    assert sum(stage["activation_parts"].values()) == stage["activations"]
    full = next(lever for lever in report["levers"] if lever["setting"] == "RECOMPUTE=full")
    lines = plan(*arguments).out.splitlines()
    (attention,) = (line for line in lines if re.search(r"attention +│ [\d.]+, ", line))
    assert f"{stage['activation_parts']['attention'] / 2**30:.2f}" in attention
    (shown,) = (line for line in lines if "RECOMPUTE=full" in line)
    assert f"{full['activation_bytes'] / 2**30:.2f}" in shown and f"{full['slower']:+.1%}" in shown
    assert any(line.startswith("left: device memory minus what") for line in lines)


def test_an_export_within_the_error_says_so(plan, tmp_path):
    path, arguments = tmp_path / "topo.env", ["search", *QWEN, "--tp", "1"]
    layouts = json.loads(plan(*arguments, "--json").out)["layouts"]
    close = [one for one in layouts if "memory margin within error" in one["notes"]]
    safe = [one for one in layouts if one not in close]
    assert close and safe
    printed = plan(*arguments, "--rank", str(close[0]["place"]), "--export", str(path))
    warning = r"the exported layout leaves [\d.]+ GiB free, less than the expected error \([\d.]+ GiB\)"
    assert re.search(f"moe-exp plan: warning: {warning}.*choose --rank {safe[0]['place']}\\.", printed.err)
    assert re.search(f"^# {warning}", path.read_text(), re.MULTILINE)
    path.unlink()
    printed = plan(*arguments, "--rank", str(safe[0]["place"]), "--export", str(path))
    assert "exported layout leaves" not in printed.err + path.read_text()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        pytest.param("", "", marks=pytest.mark.slow),
        ("--warmup-iters 77 --lr 1e-3", "WARMUP_ITERS LR"),
        ("--first-stage-layers 22 --pp 2 --vpp none", "FIRST_STAGE_LAYERS"),
    ],
)
def test_an_exported_file_has_what_was_given_or_searched(given, names, plan, tmp_path):
    path = tmp_path / "topo.env"
    plan("search", *QWEN, "--gpus", "16", *given.split(), "--export", str(path))
    lines = (line.partition("=")[0] for line in path.read_text().splitlines() if not line.startswith("#"))
    searched = {"TP", "PP", "VPP", "EP", "ETP", "CP", "MBSZ", "RECOMPUTE"}
    # not of an even split, or without recomputed modules
    layout = {name for name in lines if name not in ("PIPELINE_LAYERS", "RECOMPUTE_MODULES")}
    assert layout == searched | {"PRESET", "NNODES", "GPUS_PER_NODE", "GBSZ", *names.split()}


def test_an_exported_file_is_one_for_config(plan, tmp_path, capsys):
    arguments = ["search", "--gpus", "16", "--preset", "mixtral-8x7b", "--pp", "4", "--gpu", "H100-80GB"]
    path = tmp_path / "my topo.env"
    printed = plan(*arguments, "--export", str(path))
    assert "layouts tried" in printed.out
    assert printed.out.endswith(f"  {shlex.join([*own_command(), 'train', '--config', str(path)])}\n")
    settings = {one for one in shlex.split(path.read_text(), comments=True) if not one.endswith("=")}
    assert cli.main(["train", "--config", str(path), "--dry-run", "--disk-check", "none"]) == 0
    shown = dict(line.split("  # ") for line in capsys.readouterr().out.splitlines() if "  # " in line)
    shown = {name.strip(): source for name, source in shown.items()}
    assert {one for one, source in shown.items() if source == str(path)} == settings
    refused = plan(*arguments, "--export", str(tmp_path / "no" / "x"), code=1)
    assert "no is not a folder. Fix: create it" in refused.err
    refused = plan(*arguments, "--config", str(path), "--tp", "4").err
    assert f"of {path}: ignored by the search; to keep these values, set them with flags" in refused
    assert " TP=" not in refused


def test_nothing_fits_or_is_left(plan):
    printed = plan("search", "--gpus", "8", *MODEL, "--mbsz", "1", code=1)
    assert "nothing fits; least memory: LAYOUT=" in printed.out
    assert "all layouts were rejected" in plan("search", "--gpus", "8", *MODEL, "--tp", "3", code=1).out
    refused = plan("search", "--gpus", "8", *MODEL, "--tp", "3", "--export", "env", code=1)
    assert "RANK=1: no layout fits. Fix: use more GPUs" in refused.err
    refused = plan("search", "--gpus", "384", *MODEL, "--explain", "TP=3,PP=13", "--export", "env", code=1)
    assert refused.out == ""
    assert "EXPLAIN=TP=3,PP=13: this layout cannot run, so it is not exported." in refused.err


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("--preset reference --gpus 24 --gbsz 50 --ep 3", ["EP=3: must divide", "GBSZ=50: must be"]),
        ("search --gpus 8 --tp 0 --vpp x", ["TP=0: must be", "VPP=x: must be"]),
        ("search --gpus 8 --hidden-size 0 --seq-len -1", ["HIDDEN_SIZE=0: must be", "SEQ_LEN=-1: must be"]),
        ("search --gpus 8 --top 0", ["TOP=0: must be at least 1"]),
        ("search --gpus 8 --export env --json", ["EXPORT=env: cannot be combined with --json"]),
        ("--tp 4 predict --runs a.csv --out b.csv", ["TP=4: has no effect here"]),
    ],
)
def test_bad_input_is_one_clear_line_each(plan, arguments, lines):
    printed = plan(*arguments.split(), code=1)
    assert printed.out == ""
    given = printed.err.removeprefix("moe-exp plan: ").splitlines()
    for line, expected in zip(given, lines, strict=True):
        assert line.startswith(expected) and " Fix: " in line


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_predictions_for_every_row_in_order_and_without_columns_of_results(plan, tmp_path):
    bare, out, whole = tmp_path / "runs.csv", tmp_path / "bare.csv", tmp_path / "whole.csv"
    runs = rows_of(MEASURED_RUNS)
    results = ("mem_gb", "sec_per_it", "oom", "use_mem", "use_time", "quirk", "tflops", "dp")
    with bare.open("w", newline="") as file:
        kept = [name for name in runs[0] if name not in results]
        writer = csv.DictWriter(file, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(runs[::-1])
    for given, written in ((bare, out), (MEASURED_RUNS, whole)):
        plan("predict", "--runs", str(given), "--out", str(written))
    rows, without_dp = rows_of(whole), {row["row_id"]: row for row in rows_of(out)}
    assert list(rows[0]) == ["row_id", "mem_gb", "sec_per_it", "oom"]
    assert [row["row_id"] for row in rows] == list(without_dp)[::-1] == [run["row_id"] for run in runs]
    for run, row in zip(runs, rows, strict=True):
        assert float(row["mem_gb"]) > 0 and row["oom"] in ("0", "1")
        assert bool(row["sec_per_it"]) == bool(run["dp"] and run["gbs"])
    # The number of GPUs says how many replicas there are.
    both = zip(runs, rows, strict=True)
    same = [row for run, row in both if run["n_gpus"] and run["dp"] and run["gbs"]]
    assert len(same) > 50
    assert all(without_dp[row["row_id"]] == row for row in same)


def test_predictions_are_whole_or_not_written(plan, tmp_path):
    bad, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    lines = MEASURED_RUNS.read_text().splitlines()
    lines[4] = lines[4].replace("A100-80GB", "A999")
    lines[5] = lines[5].replace(",2048,", ",many,", 1)
    bad.write_text("\n".join(lines))
    out.write_text("mine")
    device, number = plan("predict", "--runs", str(bad), "--out", str(out), code=1).err.splitlines()
    assert "column gpu" in device and "=many: must be a whole number" in number
    assert out.read_text() == "mine"


def test_hardware_with_sources(plan):
    text, report = plan("hardware").out, json.loads(plan("hardware", "--json").out)
    assert "A100-80GB" in text and "source" in text
    assert report["A100-80GB"]["num_units"]["value"] == 108
    one = plan("hardware", "h200").out
    assert "H200" in one and "150.8 G" in one and "A100" not in one


def test_hardware_of_a_file(plan, tmp_path):
    """The file's numbers, also if its name is that of a device of the package."""
    for name in ("A100-40GB", "A100-80GB"):
        content = json.loads((PROFILES / "A100-80GB.json").read_text()) | {"name": name}
        content["num_units"]["value"] = 107
        (tmp_path / "mine.json").write_text(json.dumps(content))
        report = json.loads(plan("hardware", str(tmp_path / "mine.json"), "--json").out)
        assert {key: one["num_units"]["value"] for key, one in report.items()} == {name: 107}


def test_a_search_loads_nothing_heavy(no_settings, tmp_path):
    arguments = ["plan", "search", "--gpus", "64", "--preset", "mixtral-8x7b"]
    code = f"""
import sys
from moe_exp.cli import main
assert main({[*arguments, "--profile", str(write_profile(tmp_path))]}) == 0
print(sorted({{"torch", "megatron", "numpy", "scipy"}} & set(sys.modules)))
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300)
    assert printed.splitlines()[-1] == "[]"


def test_calibrate_and_predict_with_what_it_wrote(plan, tmp_path):
    runs, profile, out = tmp_path / "runs.csv", tmp_path / "mine.json", tmp_path / "predictions.csv"
    lines = MEASURED_RUNS.read_text().splitlines(keepends=True)
    runs.write_text(lines[0] + "".join(lines[1::3]))
    printed = plan("calibrate", "--runs", str(runs), "--out", str(profile)).out
    assert "mean left out" in printed and "matrix_efficiency" in printed and "largest time errors" in printed
    files = ["--runs", str(MEASURED_RUNS), "--profile", str(profile), "--out", str(out)]
    assert cli.main(["plan", "predict", *files]) == 0
    predicted = {row["row_id"]: row for row in rows_of(out)}
    assert list(predicted) == [line.partition(",")[0] for line in lines[1:]]
    others = {line.partition(",")[0] for number, line in enumerate(lines[1:]) if number % 3}
    left_out = [run for run in read_runs(MEASURED_RUNS) if run.seconds and run.row_id in others]
    errors = [abs(float(predicted[run.row_id]["sec_per_it"]) / run.seconds - 1) for run in left_out]
    assert len(errors) > 50 and sum(errors) / len(errors) < 0.05


def test_a_fit_from_another_profile(plan, tmp_path):
    runs, profile = tmp_path / "runs.csv", tmp_path / "mine.json"
    runs.write_text("".join(MEASURED_RUNS.read_text().splitlines(keepends=True)[:2]))
    plan("calibrate", "--runs", str(runs), "--out", str(profile), "--prior", str(CONSTANTS))
    shipped, fitted = (json.loads(path.read_text())["constants"]["time"] for path in (CONSTANTS, profile))
    assert fitted["v100_share"] == pytest.approx(shipped["v100_share"], rel=1e-4)


def test_calibrate_writes_nothing_over_its_input_or_from_nothing(plan, tmp_path):
    runs = tmp_path / "runs.csv"
    before = "row_id,gpu,layers,hidden,heads,seq,vocab,tp,pp\nr1,A100-80GB,24,1024,16,2048,32000,1,1\n"
    runs.write_text(before)
    for command, out, line in (
        ("calibrate", runs, "must not be the --runs file"),
        ("predict", runs, "must not be the --runs file"),
        ("calibrate", tmp_path / "p.json", "RUNS: no row has a measured"),
    ):
        assert line in plan(command, "--runs", str(runs), "--out", str(out), code=1).err
    assert [path for path in tmp_path.iterdir() if path.name != "profile.json"] == [runs]
    assert runs.read_text() == before


def test_an_export_has_the_token_budget(plan):
    budget = "--tokens 1B --warmup-iters 20 --export env"
    printed = plan("search", "--gpus", "8", *budget.split()).out
    values = dict(line.split("=", 1) for line in printed.splitlines())
    assert int(values["TRAIN_ITERS"]) == -(-(10**9) // 2048 // 64)
    config = load_config({}, {name: value.strip("'") for name, value in values.items()})
    assert (config.warmup_iters, config.decay_iters) == (20, 0)


def test_rows_that_contradict_themselves(plan, tmp_path):
    runs, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    head = "row_id,gpu,layers,hidden,heads,seq,vocab,tp,pp,dp,n_gpus,mbs,gbs,experts,ep,laiers\n"
    bad = "a,A100,24,1024,16,2048,32000,3,1,7,64,4,8,64,7,\n"
    runs.write_text(head + bad + "b,A100,24,1024,16,2048,32000,2,1,,64,1,64,,,\n")
    lines = plan("predict", "--runs", str(runs), "--out", str(out)).err.splitlines()
    assert [line.removeprefix(f"moe-exp plan: warning: {runs}, ") for line in lines] == [
        "column laiers: is ignored; did you mean layers?",
        "row a: 64 GPUs, but tp*pp*cp*dp is 21",
        "row a: tp=3 must divide heads=16",
        "row a: ep=7 must divide experts=64",
        "row a: gbs=8 is less than mbs*dp=28",
    ]


def test_the_number_of_gpus_counts_in_calibrate_as_in_predict():
    base = {"row_id": "a", "gpu": "A100", "layers": "24", "hidden": "1024", "heads": "16", "seq": "2048"}
    base |= {"vocab": "32000", "tp": "2", "pp": "1", "mbs": "1", "gbs": "64"}
    assert job_of_row(base | {"n_gpus": "64"}).config.data_parallel_size == 32
    assert job_of_row(base | {"nodes": "2", "gpus_per_node": "8"}).config.data_parallel_size == 8
    assert job_of_row(base | {"dp": "4"}).config.world_size == 8
    assert job_of_row(base).sharding == "distributed"
    assert job_of_row(base | {"zero_stage": "1"}).sharding == "zero1"


def test_doubts_about_a_fit(plan, tmp_path):
    runs, profile = tmp_path / "runs.csv", tmp_path / "p.json"
    lines = MEASURED_RUNS.read_text().splitlines()
    column = lines[0].split(",").index("sec_per_it")
    rows = [line.split(",") for line in lines[1:20]]
    for number, row in enumerate(rows):
        row[column] = str((number % 7 + 1) * 1.5)
    runs.write_text("\n".join([lines[0], *map(",".join, rows)]) + "\n")
    printed = plan("calibrate", "--runs", str(runs), "--out", str(profile)).err
    assert "time: predictions are" in printed and "check the rows" in printed
    assert "is far from the" in printed


@pytest.mark.parametrize("command", ["predict", "calibrate"])
def test_what_is_no_file_is_not_replaced(plan, tmp_path, command):
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    nowhere = tmp_path / "absent" / "out"
    for out, rule in (
        (folder, "not a regular file"),
        (pipe, "not a regular file"),
        (nowhere, "absent is not a folder"),
    ):
        printed = plan(command, "--runs", str(MEASURED_RUNS), "--out", str(out), code=1)
        assert printed.err.count("\n") == 1 and f"OUT={out}: " in printed.err and rule in printed.err
    assert stat.S_ISFIFO(pipe.stat().st_mode) and {folder, pipe} <= set(tmp_path.iterdir())
    assert not list(tmp_path.glob(".*.tmp"))
