"""pdb in one rank of a job: commands are typed into a pseudo-terminal, as a person does."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.ranks import free_port
from helpers.whole_runs import ROOT, clean_environ

# Ranks whose collectives time out after three seconds, less than one is at its prompt.
WORKER = """
import datetime, os, sys
import torch, torch.distributed as dist
from moe_exp.training import debug
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
value = torch.tensor([dist.get_rank() + 1.0])
STOP
dist.all_reduce(value)
print(f"rank {dist.get_rank()} has {value.item()}", flush=True)
dist.destroy_process_group()
"""
LAUNCH = """
import sys
from moe_exp.config import load_config
from moe_exp.launch import launch, torchrun_job
launch.torchrun_command = lambda *given: torchrun_job.torchrun_command(*given, "debugged")
flags = {"run_dir": sys.argv[1], "train_data": "given", "master_port": sys.argv[2], "max_restarts": "3"}
sys.exit(launch.launch(load_config(flags), flags))
"""


class Terminal:
    """A job whose standard streams are a pseudo-terminal."""

    def __init__(self, command: list[str], **environ: object):
        self._master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True}
        self.job = subprocess.Popen(command, env=clean_environ(**environ), **streams)
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str, *, timeout: float = 90.0) -> None:
        """Reads until `text` is there, after what was waited for before."""
        deadline, seen = time.monotonic() + timeout, ""
        while text not in seen:
            assert time.monotonic() < deadline, f"no {text!r} in {timeout} s:\n{self.text}{seen}"
            seen += self._read(0.2)
        self.text += seen

    def type(self, line: str) -> None:
        """A line with its return key."""
        os.write(self._master, line.encode() + b"\n")

    def end(self) -> int:
        """Reads to the end of the job; its exit code."""
        deadline = time.monotonic() + 60
        while self.job.poll() is None and time.monotonic() < deadline:
            self.text += self._read(0.2)
        self.text += self._read(0.2)
        os.close(self._master)
        self.job.kill()
        return self.job.wait()

    def _read(self, seconds: float) -> str:
        ready, _, _ = select.select([self._master], [], [], seconds)
        try:
            return os.read(self._master, 65536).decode(errors="replace") if ready else ""
        except OSError:  # nobody has the other end any more
            return ""


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "debugged")


def job(tmp_path: Path, stop: str, *arguments: str, **environ: object) -> Terminal:
    """By torchrun, if those are the `arguments`, or by the launcher of this package."""
    (tmp_path / "debugged.py").write_text(WORKER.replace("STOP", stop))
    given = arguments or ("-c", LAUNCH, str(tmp_path / "runs"), str(free_port()))
    environ |= {"PYTHONPATH": f"{ROOT}:{tmp_path}", "GPUS_PER_NODE": 2, "PRESET": "cpu", "OMP_NUM_THREADS": 1}
    return Terminal([sys.executable, *given], **environ)


def values_in(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d has [\d.]+", text))


def test_commands_that_are_typed_while_the_others_wait(tmp_path):
    terminal = job(tmp_path, "breakpoint()", PYTHONBREAKPOINT="moe_exp.training.debug.set_trace")
    terminal.wait_for("(Pdb rank 0) ")
    terminal.type("value.mul_(10)")
    time.sleep(4)  # somebody thinks for longer than a collective may take
    terminal.wait_for("(Pdb rank 0) ")
    terminal.type("c")
    assert terminal.end() == 0, terminal.text
    assert "tensor([10.])" in terminal.text
    assert values_in(terminal.text) == ["rank 0 has 12.0", "rank 1 has 12.0"]


@pytest.mark.slow
def test_steps_while_the_others_are_in_a_collective(tmp_path):
    terminal = job(tmp_path, "debug.set_trace(rank=1)", *TORCHRUN)
    terminal.wait_for("(Pdb rank 1) ")
    terminal.type("p value.item()")
    terminal.wait_for("2.0")
    # After `n` the others run into their all-reduce, or are through it.
    for command in ("import time; time.sleep(0)", "tbreak torch.distributed.destroy_process_group", "n"):
        terminal.type(command)
        terminal.wait_for("(Pdb rank 1) ")
    time.sleep(4)
    terminal.type("c")
    terminal.wait_for("(Pdb rank 1) ")
    terminal.type("c")
    assert terminal.end() == 0, terminal.text
    assert values_in(terminal.text) == ["rank 0 has 3.0", "rank 1 has 3.0"]


@pytest.mark.slow
def test_quit_ends_the_job_and_does_not_start_it_again(tmp_path):
    terminal = job(tmp_path, "debug.set_trace()")
    terminal.wait_for("(Pdb rank 0) ")
    terminal.type("q")
    assert terminal.end() == 1, terminal.text
    assert "ending the job" in terminal.text
    assert "restarting" not in terminal.text
    assert "has 3.0" not in terminal.text


@pytest.mark.slow
def test_without_anything_to_read_the_run_goes_on(tmp_path):
    (tmp_path / "debugged.py").write_text(WORKER.replace("STOP", "debug.set_trace()"))
    environ = clean_environ(PYTHONPATH=f"{ROOT}:{tmp_path}", OMP_NUM_THREADS=1)
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *TORCHRUN], env=environ, timeout=120, **streams)
    assert done.returncode == 0, done.stderr
    assert "end of standard input, continuing" in done.stdout
    assert values_in(done.stdout) == ["rank 0 has 3.0", "rank 1 has 3.0"]
