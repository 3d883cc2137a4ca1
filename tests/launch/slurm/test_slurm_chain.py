"""run_slurm.sh's sbatch file under a stand-in srun: what a chain of jobs does with every end of a run."""

import subprocess
import sys

import pytest

from helpers import wait_for
from helpers.checkpoint.ckpt_files import write_without_tensors
from helpers.whole_runs import ROOT, TINY, Runs, clean_environ
from moe_exp.runs.records import read_metrics


def test_array_goes_on_until_the_run_has_finished_and_cancels_the_rest(chain):
    done = chain.submit_by_script("75/0", NUM_JOBS=4, PASS_ENV="SECRET", LR="0.002")
    assert done.returncode == 0, done.stderr
    assert "submitted 4 jobs of 2 nodes as 101;" in done.stdout
    assert chain.cluster.run() == (101, 0)
    assert chain.cluster.states() == ["COMPLETED", "PENDING", "PENDING", "PENDING"]
    assert chain.cluster.run() == (102, 0)
    assert chain.cluster.states() == ["COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"]
    given = "MASTER_ADDR=localhost NNODES=2 LR=0.002 RUN_NAME=it's a run LEAK=None NCCL_DEBUG=WARN s3cret\n"
    for job in (101, 102):
        for rank, node in enumerate(("localhost", "node-b")):
            assert chain.log(f"job{job}.{node}.log") == f"NODE_RANK={rank} {given}"
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
        ["--parsable"], ["--parsable", "--dependency=afterany:101"],
        ["--parsable", "--dependency=afterany:102"]
    ]  # fmt: skip
    number, process = chain.cluster.start()
    wait_for(lambda: [path.read_text() for path in chain.folder.glob("attempts.?")] == ["wait "] * 2)
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process) == 0
    # not by SIGTERM, at which ranks that stand still for half a minute would be ended unsaved
    for node in ("node-b", "localhost"):
        assert chain.log(f"job101.{node}.log").endswith("told to stop by SIGUSR1\n")
    assert "warning from SLURM: saving and stopping the run" in chain.log("job101.log")
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


def test_failures_of_another_chain_or_before_a_checkpoint_do_not_count(chain):
    assert chain.submit("1/1/1/1/1", NNODES=1, NUM_JOBS=1, MAX_FAILURES=2).returncode == 0
    assert chain.cluster.run() == (101, 1)
    # a job saved, and was killed before it could forget the failure
    latest = chain.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    latest.write_text("500")
    write_without_tensors(latest.parent / "iter_0000500")
    assert chain.cluster.run() == (101, 1)
    assert chain.cluster.states() == ["PENDING"]
    chain.cluster.cancel(101)
    assert chain.submit("1/1/1/1/1", NNODES=1, NUM_JOBS=1, MAX_FAILURES=2).returncode == 0
    assert chain.cluster.run() == (102, 1)
    assert chain.cluster.states()[-1] == "PENDING"
    assert chain.cluster.run() == (102, 1)
    assert chain.cluster.states()[-1] == "FAILED"


@pytest.mark.parametrize(
    ("code", "settings", "states", "waits"),
    [
        (1, {"NUM_JOBS": 2}, ["PENDING", "PENDING"], True),
        (1, {"NUM_JOBS": 2, "REQUEUE": False}, ["FAILED", "PENDING"], True),
        pytest.param(
            1, {"NUM_JOBS": 2, "EXCLUDE_FILE": "bad.txt"}, ["FAILED", "PENDING"], True, marks=pytest.mark.slow
        ),
        pytest.param(1, {"NUM_JOBS": 1, "REQUEUE": False}, ["FAILED"], False, marks=pytest.mark.slow),
        (1, {"NUM_JOBS": 2, "MAX_FAILURES": 1}, ["FAILED", "CANCELLED"], False),
        (2, {"NUM_JOBS": 3}, ["FAILED", "CANCELLED", "CANCELLED"], False),
        (3, {"NUM_JOBS": 2}, ["FAILED", "CANCELLED"], False),
    ],
    ids=[
        "queued again",
        "next job",
        "excluded node",
        "no job",
        "too many failures",
        "bad settings",
        "would repeat",
    ],
)
def test_a_failure_waits_before_the_next_job_and_only_then(code, settings, states, waits, chain, tmp_path):
    given = {"NNODES": 1, "RETRY_SECONDS": 1} | settings
    assert chain.submit(str(code), **given).returncode == 0
    (tmp_path / "bad.txt").write_text("localhost\n")
    assert chain.cluster.run() == (101, code)
    assert chain.cluster.states() == states
    assert ("waiting 1 s before the next attempt" in chain.log("job101*.log")) == waits


def test_the_warning_ends_the_wait_and_the_job_is_queued_again(chain):
    assert chain.submit("1", NNODES=1, NUM_JOBS=2, RETRY_SECONDS=600).returncode == 0
    number, process = chain.cluster.start()
    wait_for(lambda: "waiting 600 s" in chain.log("job101_1.log"))
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process) == 1
    assert chain.cluster.states() == ["PENDING", "PENDING"]


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
        ("set -e\nexit 3", {}, "set up.sh ended this script"),
        ("true", {"MODULES": "no/such"}, "module load no/such failed"),
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


def test_nodes_that_are_excluded_meanwhile_are_left_out_by_the_rest_of_the_chain(chain):
    chain.folder.parent.mkdir(parents=True)
    excluded = chain.folder.parent / "exclude_nodes.txt"
    excluded.write_text("# bad ones\nnode-x.cluster.local  # ECC\n")
    assert chain.submit("1/0", NNODES=1, NUM_JOBS=2).returncode == 0
    assert chain.cluster.job(101)["options"]["exclude"] == "node-x"
    with excluded.open("a") as file:
        file.write("\nlocalhost # slow\n")
    assert chain.cluster.run() == (101, 1)
    # It cannot be told to leave out its own node, so it is not queued again: the next one continues.
    assert chain.cluster.states() == ["FAILED", "PENDING"]
    assert chain.cluster.job(102)["excluded"] == "localhost,node-x"


@pytest.mark.slow
def test_a_run_of_two_nodes_goes_on_in_the_next_job_and_finishes(chain, runs: Runs):
    settings = TINY | {
        "NNODES": 2, "EP": 2, "CPU_NODES": True, "TRAIN_ITERS": 60, "RUN_DIR": runs.run_dir,
        "DATA_DIR": runs.data_dir, "RUN_NAME": "a run", "NUM_JOBS": 3, "PATH": chain.cluster.path(),
        "JOB_NAME": "x", "PYTHON": sys.executable,
    }  # fmt: skip
    script = ROOT / "moe_exp" / "scripts" / "run_slurm.sh"
    done = subprocess.run(["bash", script], env=clean_environ(**settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, process = chain.cluster.start()
    folder = runs.folder("a run")
    read = lambda: folder.metrics.read_text() if folder.metrics.exists() else ""  # noqa: E731
    wait_for(lambda: '"iteration": 3,' in read(), timeout=300)
    chain.cluster.warn(number, process)
    assert chain.cluster.end(number, process, timeout=300) == 0
    assert "to be continued" in (folder.path / "slurm" / "jobs.log").read_text()
    assert chain.cluster.states() == ["COMPLETED", "PENDING", "PENDING"]
    number, process = chain.cluster.start()
    assert chain.cluster.end(number, process, timeout=300) == 0
    assert chain.cluster.states() == ["COMPLETED", "COMPLETED", "CANCELLED"]
    records = read_metrics(folder.metrics)
    assert [record["iteration"] for record in records if record["kind"] == "train"] == list(range(1, 61))
    assert [record["status"] for record in records if record.get("event") == "end"] == ["stopped", "finished"]
