"""A stand-in SLURM for chains of jobs, whose programs keep jobs in a folder and print as those of 23.11 do.

`StandIn.start` runs the next job that may start as a real process; its srun starts one per node.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

NODES = ("localhost", "node-b")  # the first has to be one that the others reach

_SBATCH = """
arguments, script = sys.argv[1:-1], sys.argv[-1]
text = pathlib.Path(script).read_text()
words = [word for line in re.findall("^#SBATCH (.*)$", text, re.M) for word in shlex.split(line)] + arguments
options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
if options.get("partition") == "nowhere":
    print("sbatch: error: invalid partition specified: nowhere", file=sys.stderr)
    sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
first = 101 + len(jobs())
last = int(re.fullmatch(r"1-(\\d+)%1", options["array"])[1]) if "array" in options else 0
for task in range(1, last + 1) or [None]:
    number = first + (task or 1) - 1
    job = {"id": number, "base": first, "task": task, "state": "PENDING", "options": options}
    write(number, job | {"script": text, "restarts": 0})
print(first)
"""
_SQUEUE = """
options = dict(re.findall(r"--([a-z]+)[= ]([^-\\s]\\S*)", " ".join(sys.argv[1:])))
known = [job for job in jobs() if job["state"] in ("PENDING", "RUNNING")]
if "states" in options:
    known = [job for job in known if job["state"] == options["states"]]
if "jobs" in options:
    known = [job for job in known if str(job["base"]) in options["jobs"].split(",")]
assert options["format"] == "%F", options
for base in sorted({job["base"] for job in known}):
    print(base)
"""
_SCANCEL = """
options = [word for word in sys.argv[1:] if word.startswith("--")]
for job in jobs():
    is_left = options == ["--state=PENDING"] and job["state"] != "PENDING"
    if str(job["base"]) in sys.argv[1:] and not is_left:
        write(job["id"], job | {"state": "CANCELLED"})
"""
_SCONTROL = """
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(sys.argv[3].split(",")))
elif sys.argv[1] == "update":
    values = dict(word.split("=") for word in sys.argv[2:])
    if "unknown" in values["ExcNodeList"]:
        sys.exit("Invalid node name specified for job " + values["JobId"])
    for job in jobs():
        if str(job["base"]) == values["JobId"] and job["state"] == "PENDING":
            write(job["id"], job | {"excluded": values["ExcNodeList"]})
elif sys.argv[1] == "requeue":
    (job,) = [job for job in jobs() if str(job["id"]) == sys.argv[2]]
    write(job["id"], job | {"state": "PENDING", "restarts": job["restarts"] + 1})
else:
    sys.exit(f"invalid entity: {sys.argv[1]}")
"""
_SRUN = """
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).removeprefix("--").partition("=")
    options[name] = value
nodes = os.environ["SLURM_JOB_NODELIST"].split(",")[: int(options["nodes"])]
assert options["ntasks-per-node"] == "1" and options["export"] == "ALL", options
tasks = []
for number, node in enumerate(nodes):
    path = options.get("output", "/dev/null").replace("%j", os.environ["SLURM_JOB_ID"]).replace("%N", node)
    mode = "ab" if options.get("open-mode") == "append" else "wb"
    with open(path, mode) as log:
        environ = {**os.environ, "SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
        tasks.append(subprocess.Popen(words, env=environ, stdout=log, stderr=log, preexec_fn=os.setpgrp))
codes = {}
while len(codes) < len(tasks):
    for number, task in enumerate(tasks):
        if number not in codes and task.poll() is not None:
            codes[number] = task.returncode
            if task.returncode and options.get("kill-on-bad-exit") == "1":
                for other in tasks:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(other.pid, 9)
    time.sleep(0.02)
sys.exit(max(code if code >= 0 else 128 - code for code in codes.values()))
"""
_PROGRAMS = {"sbatch": _SBATCH, "squeue": _SQUEUE, "scancel": _SCANCEL, "scontrol": _SCONTROL}
_PROGRAMS |= {"srun": _SRUN, "sinfo": 'print("\\n".join(["localhost ", "node-b ", "node-b "]))'}
_HEAD = """#!/bin/sh
"exec" "{python}" "$0" "$@"  # a path with a space cannot follow #!
import contextlib, json, os, pathlib, re, shlex, subprocess, sys, time
folder = pathlib.Path({folder!r})
def jobs():
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
def write(number, job):
    (folder / f"{number}.part").write_text(json.dumps(job))
    (folder / f"{number}.part").rename(folder / f"{number}.json")
with (folder / "calls.log").open("a") as log:
    log.write(shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
"""


class StandIn:
    """The cluster: its programs are in `programs`, its jobs in `folder`, each a JSON object."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        self._started: list[subprocess.Popen[bytes]] = []
        head = _HEAD.replace("{python}", sys.executable).replace("{folder!r}", repr(str(folder)))
        for name, text in _PROGRAMS.items():
            (self.programs / name).write_text(head + text)
            (self.programs / name).chmod(0o755)

    def path(self) -> str:
        """PATH with its programs first."""
        return f"{self.programs}:{os.environ['PATH']}"

    def job(self, number: int) -> dict[str, Any]:
        return json.loads((self.folder / f"{number}.json").read_text())

    def states(self) -> list[str]:
        """Of all jobs, in order of their ids."""
        return [self.job(int(path.stem))["state"] for path in sorted(self.folder.glob("*.json"))]

    def calls(self, program: str) -> list[list[str]]:
        """Arguments of every call of a program."""
        lines = [shlex.split(line) for line in (self.folder / "calls.log").read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == program]

    def start(self) -> tuple[int, subprocess.Popen[bytes]]:
        """Starts the first pending job; what it depends on has to have ended."""
        for path in sorted(self.folder.glob("*.json")):
            job = json.loads(path.read_text())
            if job["state"] == "PENDING":
                break
        depends = [int(one) for one in re.findall(r"\d+", job["options"].get("dependency", ""))]
        assert all(self.job(one)["state"] not in ("PENDING", "RUNNING") for one in depends)
        self._set(job["id"], state="RUNNING")
        options = job["options"]
        passed = {name: os.environ[name] for name in options["export"].split(",") if name in os.environ}
        passed |= {
            "PATH": self.path(), "SLURM_JOB_ID": str(job["id"]), "SLURM_NNODES": options["nodes"],
            "SLURM_JOB_NODELIST": ",".join(NODES[: int(options["nodes"])]),
            "SLURM_EXPORT_ENV": options["export"], "SLURM_RESTART_COUNT": str(job["restarts"]),
        }  # fmt: skip
        name = options["output"]
        for mark, key in (("%A", "base"), ("%a", "task"), ("%j", "id")):
            name = name.replace(mark, str(job[key]))
        script = self.folder / f"slurm_script_{job['id']}"
        script.write_text(job["script"])
        with open(name, "ab" if options["open-mode"] == "append" else "wb") as log:  # noqa: PTH123
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            command = ["bash", str(script)]
            process = subprocess.Popen(command, env=passed, cwd=options["chdir"], **streams)
        self._started.append(process)
        return job["id"], process

    def close(self) -> None:
        """Kills what a test that has failed has left of its jobs; launchers take their ranks with them."""
        for process in self._started:
            for one in _in_session(process.pid):
                os.kill(one, signal.SIGKILL)
            process.kill()
            process.wait()

    def warn(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """What SLURM does so long before the time limit as --signal says: B: the batch shell alone."""
        assert re.fullmatch(r"B:USR1@\d+", self.job(number)["options"]["signal"])
        os.kill(process.pid, signal.SIGUSR1)

    def end(self, number: int, process: subprocess.Popen[bytes], timeout: float = 120.0) -> int:
        """Waits for the end of a job; its exit code."""
        code = process.wait(timeout)
        if self.job(number)["state"] == "RUNNING":  # else it has queued itself again
            self._set(number, state="FAILED" if code else "COMPLETED")
        return code

    def run(self) -> tuple[int, int]:
        """The next job from its start to its end: id and exit code."""
        number, process = self.start()
        return number, self.end(number, process)

    def cancel(self, number: int) -> None:
        """As `scancel`, of a job that waits."""
        self._set(number, state="CANCELLED")

    def _set(self, number: int, **values: Any) -> None:
        part = self.folder / f"{number}.part"
        part.write_text(json.dumps(self.job(number) | values))
        part.rename(self.folder / f"{number}.json")


def _in_session(number: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == number and int(path.name) != number:
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found
