"""Each command that a run suggests is accepted where it is printed: with --dry-run if it trains."""

import dataclasses
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from helpers.warm_runs import answer_warm, run_warm
from helpers.whole_runs import SCRIPT, Runs
from moe_exp.report.page_parts import about_html
from moe_exp.report.run_data import read_run

SHORT = {"TRAIN_ITERS": 2, "WARMUP_ITERS": 1, "DECAY_ITERS": 2, "LOG_INTERVAL": 1}
LONGER = SHORT | {"TRAIN_ITERS": 4, "DECAY_ITERS": 4, "EVAL_INTERVAL": 0}


@pytest.fixture(scope="module")
def trained(session_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to start from, in a folder with a space: `moe`, `dense`, and `hf` by way of Hugging Face."""
    folder = tmp_path_factory.mktemp("has a space")
    for name, use_moe in (("moe", True), ("dense", False)):
        environ = session_runs.environ(name, USE_MOE=use_moe, RUN_DIR=folder, **SHORT)
        out, err = folder / "out", folder / "err"
        assert run_warm(environ, out, err, timeout=120) == 0, err.read_text()
    for argv in (["to-hf", "moe", "theirs"], ["from-hf", "theirs", "hf"]):
        done = answer_warm(["convert", *argv], environ, folder)
        assert done.returncode == 0, done.stderr
    return folder


def tokens(runs: Runs) -> str:
    """Token files of the embedded corpus, which a converted model does not take by itself."""
    return str(min(path.with_suffix("") for path in runs.data_dir.glob("python_*/*train*.bin")))


def stages(runs: Runs) -> str:
    """A stage of the embedded corpus itself with samples of twice the length."""
    return json.dumps([{"from_samples": 16, "train_data": tokens(runs), "seq_len": 128}])


# name: (settings of the environment, flags), with {} for the folder of `trained`
SITUATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "environment": ({"USE_MOE": True}, []),
    "flags with spaces": ({}, ["--run-name", "my run", "--use-moe=true", "--lr", "0.002"]),
    "dense": ({"USE_MOE": False}, []),
    "LOAD_DIR": ({"LOAD_DIR": "{}/moe"}, []),
    "--load-dir": ({}, ["--load-dir", "{}/moe/checkpoints"]),
    "dense from LOAD_DIR": ({"USE_MOE": False, "LOAD_DIR": "{}/dense"}, []),
    "settings.env of Hugging Face": ({"TRAIN_DATA": tokens}, ["--config", "{}/hf/settings.env"]),
    "settings.env, LOAD_DIR": ({"TRAIN_DATA": tokens, "LOAD_DIR": "{}/hf"}, ["--config={}/hf/settings.env"]),
    "settings of another run": ({"LR": 0.002}, ["--config", "{}/moe", "--load-dir", "{}/moe"]),
    "UPCYCLE_FROM": ({"UPCYCLE_FROM": "{}/dense/checkpoints", "ROUTER_PRE_SOFTMAX": False}, []),
    "DATA_STAGES": ({"DATA_STAGES": stages}, []),
    "a name built of the settings": ({"RUN_NAME": "", "LOAD_DIR": "{}/moe"}, []),
}


@pytest.mark.parametrize(
    "situation",
    [name if name == "LOAD_DIR" else pytest.param(name, marks=pytest.mark.slow) for name in SITUATIONS],
)
def test_each_suggested_command_is_accepted(situation, runs: Runs, trained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings, flags = SITUATIONS[situation]
    values = {name: value(runs) if callable(value) else value for name, value in settings.items()}
    values = {name: str(value).replace("{}", str(trained)) for name, value in values.items()}
    typed = [flag.replace("{}", str(trained)) for flag in flags]
    environ = runs.environ("mine", tiny="--config" not in " ".join(flags), **LONGER, **values)
    given = {flag.removeprefix("--").replace("-", "_").upper() for flag in flags}
    environ = {name: value for name, value in environ.items() if name not in given}
    (tmp_path / "exported").mkdir()  # of an earlier run
    assert run_warm(environ, Path("out"), Path("err"), *typed, timeout=120) == 0, Path("err").read_text()
    commands = list(suggested(Path("out").read_text()))
    (folder,) = {path.parent for path in runs.run_dir.rglob("metrics.jsonl")}
    again = re.search("command with the same settings.*?<td.*?>(.*?)</td>", about_html([read_run(folder)]))
    assert again and not run_suggested(unescape(again[1]), environ, tmp_path).returncode
    starts = [command for command in commands if " train" in command]
    assert len(starts) == (1 if situation == "UPCYCLE_FROM" or "dense" in situation else 2)
    assert len(commands) == len(starts) + 3
    for command in commands:
        done = run_suggested(command, environ, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if re.search("the dense baseline|with experts", command):
            assert "\nLOAD_DIR=\n" in re.sub(" *#.*", "", done.stdout)


@pytest.mark.slow
def test_the_script_suggests_its_own_command(runs: Runs, trained: Path, tmp_path: Path) -> None:
    script = dataclasses.replace(runs, by_script=True)
    done = script.succeed("mine", "--load-dir", f"{trained}/moe", **LONGER)
    (command,) = (one for one in suggested(done.stdout) if "the dense baseline" in one)
    assert f" bash {SCRIPT} " in command
    done = run_suggested(command, script.environ("mine"), tmp_path)
    assert done.returncode == 0 and "\nRUN_NAME=mine_dense " in done.stdout, done.stderr


@pytest.mark.slow
def test_a_job_of_slurm_suggests_to_submit_one(runs: Runs, tmp_path: Path, monkeypatch) -> None:
    """The run takes its environment from the sbatch file, as the job does."""
    monkeypatch.chdir(tmp_path)
    submit = ["slurm", "--cpu-nodes", "true", "--time-limit=1:00:00", "--num-jobs=2", "--dry-run"]
    submit += ["--data-dir", str(runs.data_dir)]
    submitted = answer_warm(submit, runs.environ("mine", **LONGER, CONSTRAINT="a|b"), tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    exports = [line for line in submitted.stdout.splitlines() if line.startswith("export ")]
    shell = subprocess.run(["bash", "-c", "\n".join([*exports, "env -0"])], capture_output=True, text=True)
    environ = dict(line.split("=", 1) for line in shell.stdout.split("\0") if "=" in line)
    assert run_warm(environ, Path("out"), Path("err"), timeout=120) == 0, Path("err").read_text()
    (command,) = (one for one in suggested(Path("out").read_text()) if "the dense baseline" in one)
    assert all(flag in command for flag in (" slurm ", "--time-limit=1:00:00", "'--constraint=a|b'"))
    done = run_suggested(command, environ, tmp_path)
    assert done.returncode == 0 and "\nexport USE_MOE=false\n" in done.stdout, done.stderr


def test_the_error_of_another_model_names_load_dir(runs, trained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = runs.environ("mine", **LONGER, USE_MOE=False, LOAD_DIR=trained / "moe")
    assert run_warm(environ, Path("out"), Path("err"), timeout=120) == 2
    assert "Fix: set USE_MOE=True, or LOAD_DIR= (--load-dir '')" in Path("err").read_text()


def suggested(text: str) -> Iterator[str]:
    """The lines below `What to try next` that are commands."""
    for line in text.partition("What to try next\n")[2].splitlines():
        if not line.endswith("# the loss curve"):
            yield line.strip()


def run_suggested(command: str, environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a suggested command as a shell would that has only what is not a setting."""
    words = shlex.split(command, comments=True)
    given = list(itertools.takewhile(re.compile("[A-Z_]+=").match, words))
    words = words[len(given) :]
    kept = {name: environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "PYTHON") if name in environ}
    shell = kept | dict(word.split("=", 1) for word in given)
    if words[0] == "bash":
        return subprocess.run([*words, "--dry-run"], env=shell, cwd=folder, capture_output=True, text=True)
    assert Path(words.pop(0)).name == "moe-exp"
    return answer_warm([*words, *["--dry-run"] * (words[0] in ("train", "slurm"))], shell, folder)
