"""A run of bench/drill/fault_drill.py: one chain of `moe-exp train`, tended like a scheduler would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from moe_exp.config import Config
from moe_exp.host.processes import free_port
from moe_exp.runs.records import read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1]))
from small_model import SETTINGS as MODEL

GBSZ, ITERATIONS, SAVE_INTERVAL = 8, int(os.environ.get("DRILL_ITERATIONS", "400")), 10
SETTINGS = {
    **{name.upper(): value for name, value in MODEL.items()},
    "NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 96, "NUM_HEADS": 4,
    "NUM_QUERY_GROUPS": 2, "SEQ_LEN": 64, "NUM_EXPERTS": 8, "TOPK": 2, "MBSZ": 1, "GBSZ": GBSZ,
    "TRAIN_ITERS": ITERATIONS, "WARMUP_ITERS": 20, "DECAY_ITERS": ITERATIONS, "LR": 0.001,
    "EVAL_INTERVAL": 0, "SAVE_INTERVAL": SAVE_INTERVAL, "KEEP_LAST": 4, "MAX_RESTARTS": 100,
    "MAX_ROLLBACKS": 100, "DTYPE": "fp32", "SPIKE_ACTION": "log", "SDC_CHECK_EVERY": 10, "SLOW_RANK_EVERY": 5,
}  # fmt: skip
HANG_TIMEOUT = 10
HANG_TIMEOUT_OTHER = 40  # a rank may be stopped in a save; a start takes 10 s, more on busy cores
DISK_BYTES = 256 * 2**20
# Found by every Python of the job.
_SITECUSTOMIZE = """
import os, pathlib, sys
if "RANK" in os.environ:
    sys.path.append({drill!r})
    from injected import Injected
    Injected(pathlib.Path({folder!r})).install()
"""
_LONGEST_SECONDS = 900.0


class Run:
    """A run folder and the chain of jobs that work on it.

    Args:
        folder: of the drill; the run is in a folder of it.
        name: of the run.
        num_ranks: processes.
        log: gets what they print; not on the disk that is filled.
        log_interval: LOG_INTERVAL; with 1 the results of every iteration are read at once.
    """

    def __init__(self, folder: Path, name: str, num_ranks: int, log: Path, *, log_interval: int = 1):
        self.folder, self.path, self.num_ranks, self.log = folder, folder / "runs" / name, num_ranks, log
        folder.mkdir(exist_ok=True)
        (folder / "site").mkdir(exist_ok=True)
        code = _SITECUSTOMIZE.format(drill=str(Path(__file__).parent.resolve()), folder=str(folder))
        (folder / "site" / "sitecustomize.py").write_text(code)
        ours = {name.upper() for name in Config.model_fields}
        environ = {key: value for key, value in os.environ.items() if key not in ours}
        root = Path(__file__).resolve().parents[2]
        environ["PYTHONPATH"] = f"{folder / 'site'}:{root}"
        places = {
            "RUN_DIR": folder / "runs",
            "RUN_NAME": name,
            "DATA_DIR": folder / "data",
            "GPUS_PER_NODE": num_ranks,
            "EP": num_ranks // 2,  # two replicas, which are compared
            "LOG_INTERVAL": log_interval,
        }
        limits = {"HANG_TIMEOUT": HANG_TIMEOUT, "HANG_TIMEOUT_OTHER": HANG_TIMEOUT_OTHER}
        self.environ = environ | {key: str(value) for key, value in (SETTINGS | places | limits).items()}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.num_jobs = 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for process in [
                    psutil.Process(self.launcher.pid),
                    *psutil.Process(self.launcher.pid).children(recursive=True),
                ]:
                    process.kill()
            self.launcher.wait()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def tend(self) -> None:
        """Starts the next job of the chain, unless one is at work or the run is done."""
        if self.launcher is not None:
            code = self.launcher.poll()
            if code is None:
                return
            self.exit_code = code
            if code == 0:
                return
        self.num_jobs += 1
        with self.log.open("ab") as log:
            command, environ = (
                [sys.executable, "-m", "moe_exp", "train"],
                self.environ | {"MASTER_PORT": str(free_port())},
            )
            self.launcher = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until(self, holds: Callable[[], bool], what: str, *, seconds: float = _LONGEST_SECONDS) -> None:
        """Tends the chain until something holds; RuntimeError if it does not, or can no longer."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self.exit_code == 0
            if holds():
                return
            if has_ended or time.monotonic() > deadline:
                why = "before the run's end" if has_ended else f"in {seconds:.0f} s"
                raise RuntimeError(f"{self.path}: {what} has not come {why}; see {self.log}")
            self.tend()
            time.sleep(0.05)

    def iteration(self) -> int:
        """Of the last train record; 0 before the first."""
        with suppress(OSError), self.metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 32768))
            for line in reversed(file.read().split(b"\n")):
                with suppress(ValueError):
                    record = json.loads(line)
                    if record["kind"] == "train":
                        return int(record["iteration"])
        return 0

    def events(self) -> list[dict[str, Any]]:
        """All so far, in the order in which they happened."""
        return (
            [record for record in read_metrics(self.metrics) if record["kind"] == "event"]
            if self.metrics.exists()
            else []
        )

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the job at work by rank; waits until all are there."""
        found: dict[int, psutil.Process] = {}

        def all_there() -> bool:
            found.clear()
            found.update(self._ranks())
            return len(found) == self.num_ranks

        self.wait_until(all_there, f"{self.num_ranks} ranks")
        return found

    def _ranks(self) -> Iterator[tuple[int, psutil.Process]]:
        if self.launcher is None:
            return
        with suppress(psutil.Error):
            children = psutil.Process(self.launcher.pid).children(recursive=True)
            # the oldest last: the others of a rank stand by
            for process in sorted(children, key=psutil.Process.create_time, reverse=True):
                with suppress(psutil.Error):
                    if "moe_exp.train" in process.cmdline() and "RANK" in (environ := process.environ()):
                        yield int(environ["RANK"]), process

    def stop(self) -> None:
        """What a scheduler sends before the time limit."""
        assert self.launcher is not None
        self.launcher.send_signal(signal.SIGTERM)


def train_records(metrics: Path) -> list[dict[str, Any]]:
    """Of a metrics.jsonl."""
    return [record for record in read_metrics(metrics) if record["kind"] == "train"]


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A small disk at `folder`, where this user may mount one."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
