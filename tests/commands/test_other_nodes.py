"""Commands that prepare runs for other nodes take defaults from these nodes, not from the login node."""

import re
import shlex
from pathlib import Path

import pytest

from helpers.token_files import write_distinct
from moe_exp import plan
from moe_exp.cli import main
from moe_exp.config import Config, load_config
from moe_exp.host.files import write_json
from moe_exp.launch.slurm.submission import plan_job, script_of
from moe_exp.studies.child_runs import JobOptions, batch_script
from moe_exp.studies.ladder.ladder import Definition, Ladder
from moe_exp.studies.sweep.driver import Sweep, run_sweep

MODEL = {"NUM_LAYERS": "2", "GBSZ": "64", "SEQ_LEN": "16", "NUM_EXPERTS": "8", "EVAL_INTERVAL": "0"}
MODEL |= {"VOCAB_SIZE": "60000"}
REFERENCE, CPU = ("reference", "bf16", "adam", 2), ("cpu", "fp32", "muon", 0)
ON_GPUS_AS_ON_CPUS, ON_ONE_GPU = ("cpu", "fp32", "muon", 2), ("gpu", "bf16", "adam", 2)


def on_machine(monkeypatch, gpus: int) -> None:
    for module in ("loading", "presets", "sections.launch", "sections.data"):
        monkeypatch.setattr(f"moe_exp.config.{module}.count_gpus", lambda: gpus)


def in_script(text: str) -> dict[str, str]:
    """Settings that an sbatch file gives to the launcher: exported, or as flags."""
    exported = re.findall(r"^export ([A-Z_]+)=(.*)$", text, re.MULTILINE)
    flags = re.findall(r"--([a-z-]+)=(\S+)", "\n".join(re.findall("moe_exp train (.*)", text)))
    found = [(name.lower().replace("-", "_"), "".join(shlex.split(value))) for name, value in exported]
    found += [(name.replace("-", "_"), value.strip("'\"")) for name, value in flags]
    return {name: value for name, value in found if name in Config.model_fields and "$" not in value}


def submitted(command: str, environ: dict[str, str], folder: Path) -> tuple[Config, dict[str, str]]:
    """The settings that the command shows, and what its job gives to the launcher."""
    if command == "slurm":
        job = plan_job({"disk_check": "none"}, environ)
        return job.config, in_script(script_of(job))
    if command == "sweep":
        lists = {"TPS": "1", "PPS": "1", "EPS": "1", "MBSZS": "1", "EXECUTOR": "slurm"}
        case = Sweep.of({}, environ | lists).cases()[0]
        options = JobOptions([], 60, on_gpus=True)
        return case.config, in_script(batch_script(case.name, case, folder, options))
    definition = Definition(rungs=({"TRAIN_ITERS": 100}, {"TRAIN_ITERS": 200}))
    variant = Ladder.of(definition, {}, environ, executor="slurm").rungs[0].reference
    return variant.config, {name: str(value) for name, value in variant.flags.items()}


@pytest.mark.parametrize("login_gpus", [0, 8])
@pytest.mark.parametrize(
    ("command", "settings", "node_gpus", "expected", "ranks"),
    [
        ("slurm", {"GPUS_PER_NODE": "4"}, 4, REFERENCE, 4),
        ("slurm", {"GPUS_PER_NODE": "4", "PRESET": "cpu"}, 4, ON_GPUS_AS_ON_CPUS, 4),
        ("slurm", {"GPUS_PER_NODE": "4", "DTYPE": "fp32"}, 4, ("reference", "fp32", "adam", 2), 4),
        ("slurm", {"CPU_NODES": "true"}, 0, CPU, 2),
        ("slurm", {"CPU_NODES": "true", "GPUS_PER_NODE": "4", "TRAIN_DATA": "tokens"}, 0, CPU, 4),
        ("sweep", {"GPU": "H100-80GB"}, 8, REFERENCE, 8),
        ("sweep", {"GPU": "H100-80GB", "GPUS": "2"}, 2, REFERENCE, 2),
        ("sweep", {"GPUS": "4"}, 4, REFERENCE, 4),
        ("sweep", {"GPUS_PER_NODE": "4", "DTYPE": "fp16"}, 4, ("reference", "fp16", "adam", 2), 4),
        ("sweep", {"GPU": "H100-80GB", "PRESET": "cpu"}, 8, ON_GPUS_AS_ON_CPUS, 2),
        ("sweep", {"GPU": "cpu"}, 0, CPU, 2),
        ("sweep", {"GPU": "CPU", "GPUS": "4", "NUM_WORKERS": "1"}, 0, (*CPU[:3], 1), 4),
        ("ladder", {"GPUS_PER_NODE": "4", "TRAIN_DATA": "tokens"}, 4, REFERENCE, 4),
        ("ladder", {"GPUS_PER_NODE": "4", "PRESET": "reference"}, 4, REFERENCE, 4),
        ("ladder", {"GPUS_PER_NODE": "4"}, 0, CPU, 4),
        ("ladder", {"PRESET": "cpu", "TRAIN_DATA": "tokens"}, 0, CPU, 2),
    ],
)
def test_defaults_of_submitted_runs(
    command, settings, node_gpus, expected, ranks, login_gpus, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_distinct(tmp_path / "tokens", [100])
    on_machine(monkeypatch, login_gpus)
    shown, given = submitted(command, MODEL | settings, tmp_path)
    on_machine(monkeypatch, node_gpus)
    for config in (shown, load_config(given, {})):
        found = (config.preset, config.dtype, config.optimizer, config.num_workers)
        assert (found, config.gpus_per_node) == (expected, ranks)
    places = {"run_dir", "run_name", "node_rank", "master_addr", "master_port"}
    assert load_config(given, {}).model_dump(exclude=places) == shown.model_dump(exclude=places)


@pytest.mark.parametrize("login_gpus", [0, 3])
@pytest.mark.parametrize(
    ("gpu", "settings", "expected", "ranks"),
    [
        (None, {}, REFERENCE, 8),
        ("H100", {}, REFERENCE, 8),
        ("H100", {"preset": "cpu"}, ON_GPUS_AS_ON_CPUS, 2),
        ("H100", {"dtype": "fp16", "gpus_per_node": 4}, ("reference", "fp16", "adam", 2), 4),
        ("CPU", {}, CPU, 2),
    ],
)
def test_defaults_of_a_plan(gpu, settings, expected, ranks, login_gpus, monkeypatch):
    on_machine(monkeypatch, login_gpus)
    config = plan(gpu=gpu, **settings).config
    assert (config.preset, config.dtype, config.optimizer, config.num_workers) == expected
    assert config.gpus_per_node == ranks


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [(0, {"GPU": "H100-80GB"}, CPU), (8, {}, ON_ONE_GPU), (8, {"TRAIN_DATA": "tokens"}, REFERENCE)],
)
def test_a_local_sweep_takes_the_defaults_of_this_machine(gpus, settings, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_distinct(tmp_path / "tokens", [100])
    on_machine(monkeypatch, gpus)
    sweep = Sweep.of({}, MODEL | {"GPUS_PER_NODE": "2", "EXECUTOR": "local"} | settings)
    config = load_config(sweep.given, {})
    assert (config.preset, config.dtype, config.optimizer, config.num_workers) == expected


@pytest.mark.parametrize(
    ("command", "flags", "environ"),
    [
        ("sweep", ["--executor=slurm"], {}),
        ("ladder", ["--sizes=64,128", "--executor=slurm"], {"EXECUTOR": "local", "TRAIN_DATA": "tokens"}),
        ("slurm", [], {}),
    ],
)
def test_dry_runs_show_the_settings(command, flags, environ, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_distinct(tmp_path / "tokens", [50_000])
    on_machine(monkeypatch, 0)
    for name, value in (MODEL | environ).items():
        monkeypatch.setenv(name, value)
    arguments = [command, *flags, "--dry-run"]
    assert main(arguments) != 0
    assert "GPUS_PER_NODE=none: must be given" in capsys.readouterr().err
    assert main([*arguments, "--gpus-per-node=2"]) == 0
    assert "PRESET=reference DTYPE=bf16 OPTIMIZER=adam" in "".join(capsys.readouterr())


def test_a_sweep_begun_with_another_preset_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = MODEL | {"GPUS": "2", "EXECUTOR": "slurm", "SWEEP_NAME": "mine", "PRESET": "cpu"}
    folder = tmp_path / "sweeps" / "mine"
    folder.mkdir(parents=True)
    write_json(folder / "sweep.json", Sweep.of({}, environ).shared_settings())
    with pytest.raises(ValueError, match=r"^PRESET=reference: sweeps/mine has cpu\. Fix: [^\n]*$"):
        run_sweep(Sweep.of({}, environ | {"PRESET": ""}))
