"""What moe_exp/scripts/environment.sh installs, and commands in an environment without torch and megatron."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

# Instead of the Python of .venv: it has no torch and no GPU. Answers and failures come from variables.
STUB = """#!/bin/bash
case "$*" in
    *--missing*) echo "torch>=2.6"; exit 1 ;;
    *count_gpus*) exit "${GPUS:-1}" ;;
    *"pip config"*) printf '%s\\n' "${PIP_CONFIG-}" ;;
    *urlopen*) exit "${ASKED:-0}" ;;
    *"pip install"*)
        words="$*" && echo "pip ${words#*pip install }" >>"$CALLS"
        echo "Collecting torch"
        echo "  Downloading torch-2.13.0+cpu-cp311-linux_x86_64.whl (190.1 MB)"
        echo "  Downloading mpmath-1.3.0-py3-none-any.whl (536 kB)"
        case "$*" in *--index-url*) exit "${CPU_INDEX_FAILS:-0}" ;; esac ;;
esac
"""
CPU_BUILD = "pip --no-compile --disable-pip-version-check --progress-bar off --no-deps --index-url"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has CPU builds in every index")
@pytest.mark.parametrize(
    ("given", "indices", "said"),
    [
        ({}, ["cpu"], "a CPU build from"),
        ({"GPUS": "0"}, ["default"], "installing PIN"),
        (
            {"PIP_CONFIG": "global.index-url='https://mirror'"},
            ["default"],
            "from the index configured for pip",
        ),
        ({"PIP_CONFIG": ":env:.find-links='/wheels'"}, ["default"], "from the index configured for pip"),
        ({"PIP_CONFIG": "global.timeout='60'"}, ["cpu"], "a CPU build from"),
        ({"ASKED": "1"}, ["default"], "is unreachable"),
        ({"CPU_INDEX_FAILS": "1"}, ["cpu", "default"], "installing PIN"),
        ({"SBATCH": "true"}, ["default"], "jobs run on other nodes: torch with CUDA"),
        ({"SBATCH": "true", "CPU_NODES": "true"}, ["cpu"], "a CPU build from"),
    ],
)
def test_torch_without_gpus_is_a_cpu_build_if_its_index_answers(tmp_path, given, indices, said):
    python, calls = tmp_path / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(STUB)
    python.chmod(0o755)
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    script = f'set -euo pipefail; source moe_exp/scripts/environment.sh; _venv="{tmp_path}"; _install train'
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    if "SBATCH" in given:
        (tmp_path / "bin" / "sbatch").symlink_to("/bin/true")
        environ["PATH"] += f":{tmp_path / 'bin'}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT, env=environ | {"CALLS": str(calls)} | given, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *of_torch, _, package = calls.read_text().splitlines()
    assert ["cpu" if line.startswith(CPU_BUILD) else "default" for line in of_torch] == indices
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pin = next((line for line in constraints if line.startswith("torch==")), "torch")
    assert all(line.endswith(f" {pin}") for line in of_torch) and package.endswith("-e .[train]")
    assert said.replace("PIN", pin) in done.stderr
    assert "Downloading torch-2.13.0+cpu-cp311-linux_x86_64.whl (190.1 MB)\n" in done.stderr
    assert "Collecting" not in done.stderr and "mpmath" not in done.stderr


# Each command with its variables, one after another: exit codes, and what they print.
IN_TURN = """
import contextlib, io, json, os, sys
from moe_exp.cli import main
ends = []
for words, environ in json.loads(sys.argv[1]):
    os.environ.update(environ)
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    ends.append((code, said.getvalue()))
    for name in environ:
        del os.environ[name]
print(json.dumps(ends))
"""


def without_torch(tmp_path: Path, *commands: tuple[tuple[str, ...], dict[str, str]]) -> list[tuple[int, str]]:
    """Runs `moe-exp` where nothing of the extra `train` can be imported; exit codes and error output."""
    blocked = "'torch', 'megatron', 'safetensors', 'tensorboard', 'matplotlib', 'scipy'"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in ({blocked}):\n"
        f"            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        f"sys.meta_path.insert(0, Blocked())\n"
        f"import importlib.util\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *more: None if name in ({blocked}) else find(name, *more)\n"
    )
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(commands)],
        cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_login_node_plans_submits_and_reports_without_torch(tmp_path):
    from helpers.checkpoint.ckpt_files import write_without_tensors
    from helpers.run_folders import dense_and_moe

    runs = [str(path) for path in dense_and_moe(tmp_path)]
    job = {"GPUS_PER_NODE": "8", "GBSZ": "1024", "EVAL_INTERVAL": "0", "DISK_CHECK": "none"}
    checkpoint = {"LOAD_DIR": str(tmp_path / "saved" / "iter_0000010")}
    resumed = job | checkpoint | {"CONTAINER": "moe", "CONTAINER_RUNTIME": "pyxis"}
    progress = {"iteration": 10, "consumed_samples": 80, "sample_order": {}, "skipped_samples": []}
    common = {"config": {}, "progress": progress, "scheduler": {"num_steps": 80}}
    write_without_tensors(Path(resumed["LOAD_DIR"]), common)
    search = ("plan", "search", "--preset", "cpu", "--gpus", "2", "--gpu", "A100-80GB")
    report, train = ("report", *runs, "--format", "md"), ("train", "--preset", "cpu")
    slurm = ("slurm", "--dry-run")
    searched, submission, continued, reported, dry, *refused = without_torch(
        tmp_path, (search, {}), (slurm, job), (slurm, resumed), (report, {}), ((*train, "--dry-run"), {}),
        (train, {}), (("slurm",), job),
    )  # fmt: skip
    assert (searched[0], reported[0], dry[0], continued[0]) == (0, 0, 0, 0)
    assert "sbatch --parsable" in submission[1] and "sbatch --parsable" in continued[1]
    assert "torch, megatron, safetensors not installed, but required" in dry[1]
    fix = 'Fix: pip install "moe-exp[train]", or in a checkout'
    for code, said in refused:
        assert code and fix in said and len(said.splitlines()) == 1, said
    assert not (tmp_path / "runs").exists()
