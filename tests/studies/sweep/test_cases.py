"""From lists to cases: the cross product, names, what each runs with, and what is refused."""

import subprocess
from pathlib import Path

import pytest

from helpers.whole_runs import ROOT, SMALL
from moe_exp.cli import main
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.studies.child_runs import JobOptions, batch_script, run_environment
from moe_exp.studies.sweep.driver import Sweep
from moe_exp.studies.sweep.settings import AXES, SweepSettings

CPU = {name.upper(): str(value) for name, value in SMALL.items()}
CPU |= {"GPUS_PER_NODE": "2", "SWEEP_DIR": "sweeps"}


def cases(**environ: str):
    return Sweep.of({}, CPU | environ).cases()


def test_cross_product_in_order_without_repetitions():
    names = [case.name for case in cases(GPUS="1 2", EPS="1,2", MBSZS="1 2 1")]
    layouts = [(gpus, ep, mbs) for gpus in (1, 2) for ep in (1, 2) for mbs in (1, 2)]
    assert names == [f"gpus_{gpus}_TP_1_PP_1_EP_{ep}_MBS_{mbs}" for gpus, ep, mbs in layouts]


def test_names_have_what_tells_layouts_apart():
    lists = dict.fromkeys(("NODES", "TPS", "PPS", "EPS", "ETPS", "CPS", "MBSZS"), "1 2")
    found = cases(**lists, GPUS="4 8", VPPS="none 2")
    assert len({case.name for case in found}) == len(found) == 2**9
    assert len(cases(USE_MOE="false", EPS="1 2 4", ETPS="1 2")) == 1
    assert len({tuple(getattr(case.config, name) for name in AXES.values()) for case in found}) == 2**9


def test_a_case_runs_with_the_settings_that_were_given_and_writes_no_checkpoint():
    given = {
        "HIDDEN_SIZE": "64", "TP": "2", "MBSZS": "4", "SWEEP_ITERS": "6", "LOAD_DIR": "x",
        "WARMUP_ITERS": "500", "RAMPUP_BATCH_SIZE": "4 4 100", "SPIKE_ACTION": "rollback",
        "DATA_STAGES": '[{"from_samples": 160, "seq_len": 32}]', "EMA_DECAY": "0.9", "AVERAGE_EVERY": "100",
    }  # fmt: skip
    (case,) = cases(**given)
    config = load_config(case.flags, {})
    assert config == case.config and case.problems == ()
    expected = {
        "hidden_size": 64, "tp": 2, "train_iters": 6, "save_interval": 0, "save_at_end": False,
        "eval_interval": 0, "load_dir": "", "log_interval": 1, "rampup": None, "spike_action": "none",
        "data_stages": "", "average_every": 1, "warmup_iters": 0, "run_name": case.name,
        "run_dir": "sweeps/cpu_layers_4_hidden_64_experts_8_GBS_16/runs",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_breaks_a_rule_has_all_reasons():
    by_name = {case.name: case for case in cases(GPUS="2", TPS="1 2", PPS="1 3", MBSZS="1 3")}
    broken = by_name["gpus_2_TP_1_PP_3_EP_1_MBS_3"]
    assert list(broken.problems) == list(broken.config.problems())
    assert [line.partition("=")[0] for line in broken.problems] == ["GPUS_PER_NODE", "PP"]
    assert by_name["gpus_2_TP_2_PP_1_EP_1_MBS_1"].problems == ()
    (line,) = by_name["gpus_2_TP_1_PP_1_EP_1_MBS_3"].problems
    assert line.startswith("GBSZ=16: must be a multiple of MBSZ*DP=3*2=6.")


def test_more_nodes_need_slurm():
    one, two = cases(NODES="1 2")
    assert one.problems == ()
    assert two.problems[0].startswith("NODES=2: EXECUTOR=local supports a single node. Fix: ")
    assert all(case.problems == () for case in cases(NODES="1 2", EXECUTOR="slurm"))


@pytest.mark.parametrize(("ranks", "number"), [("1", 2), ("2", 16), ("8", 2 * 2 * 4 * 2)])
def test_without_any_list_there_are_a_few(ranks, number):
    environ = {"PRESET": "cpu", "GPUS_PER_NODE": ranks, "EXECUTOR": "slurm"}
    found = Sweep.of({}, environ).cases()
    assert len(found) == number
    assert any(not case.problems for case in found)
    assert len(cases(GPUS_PER_NODE=ranks, MBSZS="1")) == 1
    assert {case.config.pp for case in Sweep.of({}, environ | {"PP": "1"}).cases()} == {1}


def test_flags_stand_above_the_environment():
    environ = CPU | {"MBSZS": "1 2", "HIDDEN_SIZE": "64"}
    (case,) = Sweep.of({"mbszs": "4", "hidden_size": "32"}, environ).cases()
    assert (case.config.mbsz, case.config.hidden_size) == (4, 32)


def test_bad_values_are_named_together():
    bad = {"TPS": "1 two", "PPS": "0 1", "VPPS": "none x", "SWEEP_ITERS": "0", "EXECUTOR": "ray"}
    bad |= {"HIDDEN_SIZE": "x", "GBSZ": "-1"}
    with pytest.raises(ConfigError) as error:
        Sweep.of({}, CPU | bad)
    assert [line.partition("=")[0] for line in error.value.problems] == list(bad)
    assert error.value.problems[0].startswith("TPS=two: must be a valid integer. Fix: correct TPS: list of")
    with pytest.raises(ConfigError, match=r"^SWEEP_ITERS=3: .* SWEEP_WARMUP=3\. Fix: .* at least 4\.$"):
        Sweep.of({}, CPU | {"SWEEP_ITERS": "3"})
    with pytest.raises(ValueError, match=r"^GPU=A1000: unknown device\. Fix: "):
        Sweep.of({}, CPU | {"GPU": "A1000"})


def test_what_is_wrong_everywhere_is_no_matter_of_the_layout():
    with pytest.raises(ConfigError) as error:
        cases(GPUS="1 2", TPS="1 3", MOE_LAYER_FREQ="0,1", HIDDEN_SIZE="130")
    assert [line.partition("=")[0] for line in error.value.problems] == ["NUM_HEADS", "MOE_LAYER_FREQ"]


def test_a_dry_run_says_what_would_run_and_touches_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in (*Config.model_fields, *SweepSettings.model_fields):
        monkeypatch.delenv(name.upper(), raising=False)
    flags = ["--gpus=1 2", "--eps=1 2", "--mbszs=1", "--run-oom=true"]
    assert main(["sweep", "--dry-run", "--preset=cpu", *flags]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("sweeps/cpu_layers_4_hidden_32_experts_64_GBS_32: 4 cases of 10 iterations")
    assert head.endswith(": 3 to run, 1 rejected; PRESET=cpu DTYPE=fp32 OPTIMIZER=muon")
    assert [line.split()[:2] for line in lines] == [
        ["left", "gpus_1_TP_1_PP_1_EP_1_MBS_1"],
        ["rejected", "gpus_1_TP_1_PP_1_EP_2_MBS_1"],
        ["left", "gpus_2_TP_1_PP_1_EP_1_MBS_1"],
        ["left", "gpus_2_TP_1_PP_1_EP_2_MBS_1"],
    ]
    assert "must be a multiple of ETP*EP*PP=2" in lines[1]
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_list_is_pointed_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPZ", "1 2")
    monkeypatch.setenv("SWEEP_ITER", "20")
    assert main(["sweep", "--dry-run", "--preset=cpu", "--mbszs=1"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert "SWEEP_ITER is not a setting; did you mean SWEEP_ITERS?" in first
    assert "TPZ is not a setting; did you mean TPS?" in second


def test_the_script_explains_itself():
    script = ROOT / "moe_exp" / "scripts" / "sweep_parallelism.sh"
    done = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True)
    assert len(script.read_text().splitlines()) < 60
    for name, setting in SweepSettings.model_fields.items():
        assert name.upper() in done.stdout
        if setting.default not in ("", (), False, "local"):
            assert f"{name.upper()} ({str(setting.default).lower()}" in done.stdout


def test_a_batch_script_for_two_nodes(tmp_path):
    (case,) = cases(EXECUTOR="slurm", NODES="2", GPUS="8", MBSZS="1")
    jobs = tmp_path / "jo bs"
    text = batch_script(case.name, case, jobs, JobOptions(["--account=mine"], 61, on_gpus=True))
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        f"--job-name={case.name}", "--nodes=2", "--ntasks-per-node=1", "--time=2",
        f"--output={case.log.resolve()}",
        f"--chdir={Path.cwd()}", "--gpus-per-node=8", "--mem=0", "--exclusive", "--account=mine",
    ]  # fmt: skip
    assert "--nnodes=2" in text and "--gpus-per-node=8" in text and "--node-rank=0" not in text
    assert " --cpu-bind=none " in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    for options in (JobOptions(["--gres=gpu:8"], 60, on_gpus=True), JobOptions([], 60, on_gpus=False)):
        assert "#SBATCH --gpus-per-node" not in batch_script(case.name, case, jobs, options)


def test_paths_with_spaces_and_options_in_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir((tmp_path / "my runs").mkdir() or tmp_path / "my runs")
    (case,) = cases(EXECUTOR="slurm", MBSZS="1")
    text = batch_script(case.name, case, Path("jobs"), JobOptions(["--comment=a b"], 60, on_gpus=False))
    log = f"{tmp_path}/my runs/{case.log}"
    for option in (f"--chdir={tmp_path}/my runs", f"--output={log}", "--comment=a b"):
        assert f'#SBATCH "{option}"\n' in text


def test_cases_do_not_see_the_lists(monkeypatch):
    monkeypatch.setenv("MBSZS", "1 2")
    monkeypatch.setenv("NUM_LAYERS", "3")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    environ = run_environment(also_without=SweepSettings.model_fields)
    assert {"MBSZS", "NUM_LAYERS", "SOMETHING_ELSE"} & set(environ) == {"SOMETHING_ELSE"}
