"""Starts whole runs with settings from the environment, and reads what they leave.

conftest.py has three fixtures: `runs`, with a run folder of its own for every test, `session_runs`, with one
for all, and `script_runs`, which starts runs as a user does, by the script. The others do so only where a
test looks at the processes (`start`), see warm_runs.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers import ROOT
from helpers.ranks import free_port
from helpers.warm_runs import run_warm
from moe_exp.config import Config
from moe_exp.host.exit_codes import TO_BE_CONTINUED
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder

SCRIPT = ROOT / "moe_exp" / "scripts" / "run_moe_from_scratch.sh"
SETTINGS = {name.upper() for name in Config.model_fields}

# Settings of all kinds of tests: models of this size, whatever PRESET=cpu is.
SMALL: dict[str, Any] = {
    "preset": "cpu", "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 256, "moe_ffn_hidden_size": 0,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 256, "vocab_size": 4096, "num_experts": 8, "topk": 1,
    "router_pre_softmax": True, "router_scaling_factor": 1.0, "aux_loss_coeff": "0.01", "z_loss_coeff": 1e-3,
    "init_std": 0.02, "optimizer": "adam", "distributed_optimizer": True, "mbsz": 4, "gbsz": 16,
    "train_iters": 300, "warmup_iters": 20, "lr": 3e-3, "min_lr": 3e-4, "log_interval": 10,
    "eval_interval": 100, "eval_iters": 4, "save_interval": 100,
}  # fmt: skip
# A model for which a run is little more than its imports, with the vocabulary of the embedded corpus. The
# learning rate moves at every step.
TINY = {name.upper(): value for name, value in SMALL.items()} | {
    "GPUS_PER_NODE": 1, "NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 96,
    "SEQ_LEN": 64, "VOCAB_SIZE": 2048, "NUM_EXPERTS": 8, "TOPK": 2, "MBSZ": 2, "GBSZ": 8,
    "TRAIN_ITERS": 20, "WARMUP_ITERS": 10, "DECAY_ITERS": 20,
    "LR": 0.001, "Z_LOSS_COEFF": 0.001, "LOG_INTERVAL": 1, "EVAL_INTERVAL": 0,
    "SAVE_INTERVAL": 0,
}  # fmt: skip


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended: exit code, what it printed and its folder."""

    code: int
    stdout: str
    stderr: str
    folder: RunFolder

    @property
    def text(self) -> str:
        """Everything it printed."""
        return self.stdout + self.stderr

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """Records of metrics.jsonl in order."""
        return [record for record in read_metrics(self.folder.metrics) if record["kind"] == kind]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Event records of these names in order."""
        return [record for record in self.records("event") if record["event"] in names]

    def curve(self, name: str) -> list[Any]:
        """One value of every train record."""
        return [record[name] for record in self.records()]


@dataclass(frozen=True)
class Runs:
    """Runs of a test in `run_dir`. Settings are environment variables, above those of TINY."""

    run_dir: Path
    data_dir: Path
    by_script: bool = False

    def folder(self, name: str) -> RunFolder:
        """Run folder of the run `name`."""
        return RunFolder(self.run_dir / name)

    def environ(self, name: str, *, tiny: bool = True, **settings: Any) -> dict[str, str]:
        """Environment for the run `name`, `tiny` or as the settings alone say."""
        places = {"RUN_DIR": self.run_dir, "RUN_NAME": name, "DATA_DIR": self.data_dir}
        places |= {"MASTER_PORT": free_port(), "PYTHON": sys.executable}
        return clean_environ(**{**places, **(TINY if tiny else {}), **settings})

    def start(self, name: str, *flags: str, **settings: Any) -> subprocess.Popen[str]:
        """Starts the run `name` with settings as in `environ`; `flags` go to the script."""
        # Files, not pipes: ranks that outlive the launcher would keep those open. A session of its own, out
        # of reach of Ctrl-C.
        with self._stream(name, "out").open("w") as out, self._stream(name, "err").open("w") as err:
            command, environ = ["bash", str(SCRIPT), *flags], self.environ(name, **settings)
            return subprocess.Popen(
                command, env=environ, stdout=out, stderr=err, text=True, start_new_session=True
            )

    def end(self, name: str, process: subprocess.Popen[str], *, timeout: float = 240.0) -> EndedRun:
        """Waits for the end of a run that `start` started."""
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{name} did not end in {timeout} s:\n{self.printed(name)}") from None
        return self._ended(name, process.returncode)

    def _ended(self, name: str, code: int) -> EndedRun:
        out, err = (self._stream(name, kind).read_text() for kind in ("out", "err"))
        return EndedRun(code, out, err, self.folder(name))

    def run(self, name: str, *flags: str, timeout: float = 240.0, **settings: Any) -> EndedRun:
        """Runs to the end, whatever that is."""
        if self.by_script or flags:
            return self.end(name, self.start(name, *flags, **settings), timeout=timeout)
        streams = (self._stream(name, kind) for kind in ("out", "err"))
        code = run_warm(self.environ(name, **settings), *streams, timeout=timeout)
        assert code is not None, f"{name} did not end in {timeout} s:\n{self.printed(name)}"
        return self._ended(name, code)

    def succeed(self, name: str, *flags: str, **settings: Any) -> EndedRun:
        """Runs to the end, which has to be exit code 0."""
        ended = self.run(name, *flags, **settings)
        assert ended.code == 0, ended.text
        return ended

    def stopped(self, name: str, *flags: str, **settings: Any) -> EndedRun:
        """Runs until it has saved and ended before TRAIN_ITERS, by EXIT_INTERVAL for instance."""
        ended = self.run(name, *flags, **settings)
        assert ended.code == TO_BE_CONTINUED, ended.text
        return ended

    def printed(self, name: str) -> str:
        """What a run has printed so far."""
        return "".join(self._stream(name, kind).read_text() for kind in ("out", "err"))

    def wait_for_iteration(
        self, name: str, process: subprocess.Popen[str], iteration: int, *, timeout: float = 120.0
    ) -> None:
        """Returns once the train record of `iteration` is written."""

        def is_there(found: list[dict[str, Any]]) -> bool:
            return any(one["kind"] == "train" and one["iteration"] >= iteration for one in found)

        self._wait_for(is_there, name, process, timeout)

    def wait_for_start(
        self, name: str, process: subprocess.Popen[str], number: int, *, timeout: float = 120.0
    ) -> None:
        """Returns once the ranks of a run have started training `number` times."""

        def is_there(found: list[dict[str, Any]]) -> bool:
            return sum(one.get("event") in ("start", "resume") for one in found) >= number

        self._wait_for(is_there, name, process, timeout)

    def _wait_for(self, is_there: Callable[[Any], bool], name: str, process: Any, timeout: float) -> None:
        metrics, deadline = self.folder(name).metrics, time.monotonic() + timeout
        while not metrics.exists() or not is_there(read_metrics(metrics)):
            assert process.poll() is None, f"the run has ended:\n{self.printed(name)}"
            assert time.monotonic() < deadline, f"waited for {timeout} s:\n{self.printed(name)}"
            time.sleep(0.05)

    def _stream(self, name: str, kind: str) -> Path:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        return self.run_dir.parent / f"{self.run_dir.name}.{name}.{kind}"


def clean_environ(**settings: Any) -> dict[str, str]:
    """This environment without the settings of whoever runs the tests, and with `settings`; kernels are not
    interpreted in it.
    """
    left_out = {*SETTINGS, "PYTHONPATH", "TRITON_INTERPRET"}
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    for name, value in settings.items():
        environ[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return environ


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks of a run by rank, from their environment; not of those that stand by."""
    found = {}
    children = psutil.Process(launcher.pid).children(recursive=True)
    for child in sorted(children, key=psutil.Process.create_time, reverse=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            environ = child.environ()
            if "LOCAL_RANK" in environ:
                found[int(environ["RANK"])] = child.pid
    return found


def wait_until_gone(pids: Iterable[int], *, timeout: float = 60.0) -> None:
    """Returns once none of the processes is there (Linux)."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} did not end in {timeout} s"
        time.sleep(0.05)


def processes_in(run_dir: Path) -> list[int]:
    """Launchers, torchruns and ranks of runs below `run_dir`: they have it on their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"--run-dir={run_dir}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found
