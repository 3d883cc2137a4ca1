"""A chain of jobs that run_slurm.sh submits to a stand-in cluster, and its stand-in launcher."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.slurm.stand_in import StandIn
from helpers.warm_runs import answer_warm
from helpers.whole_runs import ROOT, clean_environ

SCRIPT = ROOT / "moe_exp" / "scripts" / "run_slurm.sh"

# In the place of the launcher: ends as the n-th word of CODES says, and says what it was given.
LAUNCHER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["RUN_DIR"]) / os.environ["RUN_NAME"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
attempts = folder / f"attempts.{os.environ['NODE_RANK']}"
number = len(attempts.read_text().split()) if attempts.exists() else 0
names = ("NODE_RANK", "MASTER_ADDR", "NNODES", "LR", "RUN_NAME", "LEAK", "NCCL_DEBUG")
print(*(f"{name}={os.environ.get(name)}" for name in names), os.environ.get("SECRET"), flush=True)
code = os.environ["WANDB_PROJECT"].split("/")[number]
def stopped(number, _):
    print("told to stop by", signal.Signals(number).name, flush=True)
    sys.exit(75)
signal.signal(signal.SIGUSR1, stopped)
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
    """A chain on a stand-in cluster, whose jobs end by codes: 0, 75, ckpt1 (saves first), kill, wait."""

    def __init__(self, folder: Path):
        self.cluster = StandIn(folder / "cluster")
        self.folder = folder / "all runs" / "it's a run"
        fake = folder / "python"
        (fake / "moe_exp").mkdir(parents=True)
        (fake / "moe_exp" / "__main__.py").write_text(LAUNCHER)
        self.setup = folder / "set up.sh"
        self.setup.write_text(f"export PYTHONPATH={str(fake)!r}\necho setting up $NOT_SET\n")

    def environ(self, codes: str, **settings: object) -> dict[str, str]:
        own = {
            "RUN_DIR": self.folder.parent, "RUN_NAME": self.folder.name, "JOB_NAME": "big-run",
            "SETUP": self.setup, "CPU_NODES": True, "NNODES": 2, "GPUS_PER_NODE": 1, "WANDB_PROJECT": codes,
            "WANDB_MODE": "disabled", "PYTHON": sys.executable, "RETRY_SECONDS": 0,
            "PATH": self.cluster.path(), "LEAK": "no", "SECRET": "s3cret",
        }  # fmt: skip
        return clean_environ(**own | settings)

    def submit(self, codes: str, *flags: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """What the script does once it has found a Python; `submit_by_script` starts that."""
        environ = self.environ(codes, **settings) | {"PYTHONPATH": str(ROOT)}
        return answer_warm(["slurm", *flags], environ, self.setup.parent)

    def submit_by_script(self, codes: str, **settings: object) -> subprocess.CompletedProcess[str]:
        # not the checkout, in which `python -m moe_exp` is that one
        place = {"env": self.environ(codes, **settings), "cwd": self.setup.parent}
        return subprocess.run(["bash", SCRIPT], **place, capture_output=True, text=True)

    def log(self, pattern: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"slurm/{pattern}")))


@pytest.fixture
def chain(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("LEAK", "no")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    chain = Submitted(tmp_path)
    yield chain
    chain.cluster.close()
