"""Whole sweeps: killed, resumed, timed out, interrupted, out of memory; here and as SLURM jobs."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers.slurm.cluster import Cluster
from helpers.studies.study_runs import StudyRuns, write_tokens
from helpers.whole_runs import ROOT, SETTINGS, processes_in
from moe_exp.cli import main
from moe_exp.config import load_config
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.measured import read_runs
from moe_exp.planner.prediction import predict
from moe_exp.studies import child_runs
from moe_exp.studies.sweep import driver
from moe_exp.studies.sweep.settings import SweepSettings

SCRIPT = ROOT / "moe_exp" / "scripts" / "sweep_parallelism.sh"
# A case is little more than its imports. RUN_OOM: whatever is predicted, these run.
TINY = {
    "PRESET": "cpu", "NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 96, "SEQ_LEN": 64,
    "NUM_EXPERTS": 4, "TOPK": 2, "GPUS": 1, "SWEEP_ITERS": 3, "SWEEP_WARMUP": 1, "RUN_OOM": "true",
    "SWEEP_NAME": "mine", "PYTHON": sys.executable,
}  # fmt: skip
# Of data and anonymous memory of a process, above that of the imports: with MBSZ=64 ranks need more.
ABOVE_IMPORTS = 1700 * 2**20


@cache
def memory_limit() -> int:
    """The limit here: a CUDA build of torch has 600 MB more than a CPU build."""
    code = "import moe_exp.training.loop; print(*open('/proc/self/status'))"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    return int(found.stdout.partition("VmData:")[2].split()[0]) * 1024 + ABOVE_IMPORTS


class Sweeps(StudyRuns):
    """Sweeps of a test: `sweeps/mine` in its folder."""

    def __init__(self, path: Path):
        self.folder = path / "sweeps" / "mine"
        places = {"SWEEP_DIR": path / "sweeps", "TRAIN_DATA": write_tokens(path)}
        super().__init__(path, ["bash", str(SCRIPT)], TINY | places)

    def dry_run(self, *flags: str, **settings: object) -> str:
        return self.answer("sweep", "--dry-run", *flags, **settings)

    def rows(self) -> dict[str, dict[str, str]]:
        lines = (self.folder / "sweep.csv").read_text().splitlines()
        return {row["row_id"]: row for row in csv.DictReader(lines)}

    def wait_for(self, name: str, sweep: subprocess.Popen[bytes]) -> None:
        """Returns once a file of the sweep is there and has something in it."""
        path = self.folder / name
        self.wait_until(lambda: path.exists() and path.stat().st_size > 0, sweep)

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 60
        while left := processes_in(self.folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture
def sweeps(tmp_path: Path) -> Iterator[Sweeps]:
    mine = Sweeps(tmp_path)
    yield mine
    mine.end()


def name_of(mbs: int, **other: int) -> str:
    layout = {"gpus": 1, "TP": 1, "PP": 1, "EP": 1} | other
    return "_".join(f"{key}_{value}" for key, value in layout.items()) + f"_MBS_{mbs}"


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_records_a_case_without_memory(sweeps):
    settings = {"VOCAB_SIZE": 32768, "MBSZS": "8 64 24", "GBSZ": 64, "SWEEP_ITERS": 2}
    settings |= {"SAVE_INTERVAL": 1, "WANDB_PROJECT": "x"}
    sweep = sweeps.start(limit=memory_limit(), **settings)
    sweeps.wait_for(f"logs/{name_of(64)}.log", sweep)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    first = (sweeps.folder / "results" / f"{name_of(8)}.json").read_bytes()
    statuses = {name_of(8): "ok", name_of(64): "left", name_of(24): "rejected"}
    assert {name: row["status"] for name, row in sweeps.rows().items()} == statuses

    printed = sweeps.run(limit=memory_limit(), **settings)
    sweeps.wait_until_gone()
    assert f"sweep: {name_of(64)}\n" in printed
    assert f"[1/1] {name_of(64)}: oom, " in printed
    assert "  rejected: 1 case, GBSZ: must be a multiple of MBSZ*DP\n" in printed
    assert name_of(24) not in printed
    assert (sweeps.folder / "results" / f"{name_of(8)}.json").read_bytes() == first
    done, out_of_memory, rejected = sweeps.rows().values()
    expected = {"status": "ok", "oom": "0", "mem_kind": "rss", "device": "CPU", "reason": ""}
    assert {name: done[name] for name in expected} == expected
    assert (out_of_memory["status"], out_of_memory["oom"], out_of_memory["sec_per_it"]) == ("oom", "1", "")
    assert "DefaultCPUAllocator: can't allocate memory" in out_of_memory["reason"]
    assert rejected["status"] == "rejected" and rejected["reason"].startswith(
        "GBSZ=64: must be a multiple of"
    )

    # What was measured is what the run has written, and it has written nothing else.
    run = sweeps.folder / "runs" / name_of(8)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (second,) = (record for record in records if record["kind"] == "train" and record["iteration"] > 1)
    seconds = second["elapsed_time_per_iteration_ms"] / 1000
    assert float(done["sec_per_it"]) == pytest.approx(seconds, rel=1e-5)
    assert float(done["mem_gb"]) == pytest.approx(second["peak_memory_bytes"] / 2**30, rel=1e-5)
    assert 0.05 < float(done["mem_gb"]) < memory_limit() / 2**30
    config = load_config(json.loads(first)["flags"], {})
    assert float(done["tflops"]) == pytest.approx(flops_per_iteration(config) / seconds / 1e12, rel=1e-5)
    assert list((run / "checkpoints").iterdir()) == []
    # It is what calibrate reads, beside what the planner says about these rows.
    measured, *others = read_runs(sweeps.folder / "sweep.csv")
    assert (measured.job.measured_by, measured.hardware.name) == ("rss", "CPU")
    assert [run.seconds for run in others] == [None, None]
    predicted = predict(measured.job, measured.hardware)
    assert float(done["predicted_mem_gb"]) == pytest.approx(predicted.peak_bytes / 2**30, rel=1e-5)
    assert float(done["predicted_sec_per_it"]) == pytest.approx(predicted.time.total, rel=1e-5)
    table = (sweeps.folder / "sweep.md").read_text()
    assert f"| 1 | 1 | 1 | 1 | 8 | 64 | {float(done['mem_gb']):.2f} |" in table
    assert (sweeps.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_time_out_and_interrupt_leave_no_process(sweeps):
    settings = {"MBSZS": "1 2", "GBSZ": 4, "CASE_TIMEOUT": 3, "SWEEP_ITERS": 100000}
    sweep = sweeps.start(**settings)
    sweeps.wait_for(f"results/{name_of(1)}.json", sweep)
    while not processes_in(sweeps.folder):
        assert sweep.poll() is None, sweeps.printed()
    # Ctrl-C goes to the script and to Python.
    os.killpg(sweep.pid, signal.SIGINT)
    assert sweep.wait(60) == 130
    assert processes_in(sweeps.folder) == []
    assert "stopped. Repeat the command to resume." in sweeps.printed()
    first, second = sweeps.rows().values()
    assert (first["status"], first["sec_per_it"], second["status"]) == ("timeout", "", "left")
    assert first["reason"].startswith("exceeded CASE_TIMEOUT=3 s; last line of its log: ")
    assert ": 2 cases of 100000 iterations, including 1 warm-up: 1 timeout, 1 to run" in sweeps.dry_run(
        **{**settings, "SWEEP_WARMUP": 1}
    )
    assert ": 2 to run" in sweeps.dry_run("--retry-failed", **settings)
    # With other lists the table keeps what is known, and only what they name runs.
    printed = sweeps.dry_run("--retry-failed", **{**settings, "MBSZS": 4})
    assert ": 2 cases of 100000 iterations, including 1 warm-up: 1 to run, 1 timeout" in printed


def in_process(monkeypatch, folder: Path, **settings: object) -> None:
    for name in (*SETTINGS, *(name.upper() for name in SweepSettings.model_fields)):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**TINY, "SWEEP_DIR": folder / "sweeps", **settings}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_sweep_with_other_settings_is_refused(tmp_path, monkeypatch, capsys, dry_run):
    # Nothing runs: no layout is one.
    in_process(monkeypatch, tmp_path, TPS="3 5", GBSZ=4)
    assert main(["sweep"]) == 1
    written = {path: path.read_bytes() for path in (tmp_path / "sweeps" / "mine").iterdir()}
    capsys.readouterr()
    assert main(["sweep", "--hidden-size=128", "--mbszs=2", "--sweep-iters=5", *dry_run]) == 1
    lines = capsys.readouterr().err.splitlines()
    folder = tmp_path / "sweeps" / "mine"
    assert f"HIDDEN_SIZE=128: {folder} has 64. Fix: restore HIDDEN_SIZE" in lines[0]
    assert [line.partition("=")[0] for line in lines[1:]] == ["SWEEP_ITERS"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == written


def test_bad_data_are_refused_before_any_case_runs(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch, tmp_path, MBSZS="1 2", GBSZ=4, TRAIN_DATA=tmp_path / "none")
    assert main(["sweep"]) == 1
    assert capsys.readouterr().err.startswith(f"moe-exp sweep: TRAIN_DATA={tmp_path}/none: ")
    assert list(tmp_path.iterdir()) == []

    def ensure(folder: Path) -> None:
        raise ValueError(f"DATA_DIR={folder}: is full")

    monkeypatch.setattr(driver, "ensure_embedded_corpus", ensure)
    in_process(monkeypatch, tmp_path, MBSZS="1", GBSZ=4, DATA_DIR=tmp_path / "data")
    assert main(["sweep"]) == 1
    assert capsys.readouterr().err == f"moe-exp sweep: DATA_DIR={tmp_path}/data: is full\n"
    assert not (tmp_path / "sweeps" / "mine" / "logs").exists()


def test_without_sbatch_and_with_one_that_refuses(tmp_path, monkeypatch, capsys):
    cluster, path = Cluster(tmp_path / "cluster"), os.environ["PATH"]
    in_process(monkeypatch, tmp_path, MBSZS="1", GBSZ=4, EXECUTOR="slurm", SBATCH="--partition=gpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["sweep"]) == 1
    assert "EXECUTOR=slurm: sbatch not found. Fix: " in capsys.readouterr().err
    cluster.replace("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{cluster.programs}:{path}")
    assert main(["sweep"]) == 1
    error = capsys.readouterr().err
    assert "invalid partition specified: gpu. Fix: correct the options SBATCH=--partition=gpu" in error


@pytest.mark.slow
def test_slurm_jobs_run_each_case_and_are_collected(tmp_path, monkeypatch, capsys):
    cluster, data = Cluster(tmp_path / "clu ster"), write_tokens(tmp_path)
    monkeypatch.setenv("PATH", f"{cluster.programs}:{os.environ['PATH']}")
    monkeypatch.setattr(child_runs, "POLL_SECONDS", 0.2)
    settings = {"MBSZS": "1 2", "GBSZ": 4, "EXECUTOR": "slurm", "SBATCH": "--partition=gpu --time=5"}
    settings |= {"NODES": "1", "GPUS": "2", "CASE_TIMEOUT": 90}
    in_process(monkeypatch, tmp_path, **settings, TRAIN_DATA=data)
    # Stopped after its jobs were submitted: those stay, and the same command waits for them.
    with monkeypatch.context() as patch:
        patch.setattr(child_runs, "ended_jobs", lambda waiting: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["sweep"]) == 130
    assert "the SLURM jobs continue" in capsys.readouterr().out
    assert len(cluster.jobs()) == 2
    options = cluster.options(cluster.jobs()[0])
    expected = {"nodes": "1", "gpus-per-node": "2", "partition": "gpu", "time": "5"}
    expected["job-name"] = name_of(1, gpus=2)
    assert {name: options[name] for name in expected} == expected

    # The second job never gets to its end.
    script = cluster.folder / f"{cluster.jobs()[1]}.sh"
    cut = "echo 'slurmstepd: error: *** DUE TO TIME LIMIT ***'; exit 1; srun "
    script.write_text(script.read_text().replace("srun ", cut))
    jobs = threading.Thread(target=cluster.run)
    jobs.start()
    assert main(["sweep"]) == 0
    jobs.join()
    assert len(cluster.jobs()) == 2
    folder = tmp_path / "sweeps" / "mine"
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    printed = [(cluster.folder / f"{job}_None.out").read_text() for job in cluster.jobs()]
    assert [row["status"] for row in rows] == ["ok", "failed"], printed
    assert rows[0]["device"] == "CPU"
    assert list((folder / "jobs").glob("*.id")) == list((folder / "jobs").glob("*.code")) == []


def test_ctrl_c_while_a_launcher_is_started_leaves_none(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)  # before the caller knows of it

    monkeypatch.setattr(child_runs, "train_command", lambda flags: ["sleep", "100"])
    monkeypatch.setattr(child_runs.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        child_runs.run_to_end({}, tmp_path / "log", timeout=None, environ=dict(os.environ))
    assert [process.poll() for process in started] == [-signal.SIGKILL]
