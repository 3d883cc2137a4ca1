"""A stand-in for a SLURM cluster, whose queued jobs run for real when a test says so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SBATCH = """#!/bin/sh
"exec" "{python}" "$0" "$@"  # a path with a space cannot follow #!
import json, pathlib, sys
queue = pathlib.Path("{queue}")
job = str(100 + len(list(queue.glob("*.sh"))))
(queue / (job + ".args")).write_text(json.dumps(sys.argv[1:-1]))
(queue / (job + ".sh")).write_text(pathlib.Path(sys.argv[-1]).read_text())
print(job if "--parsable" in sys.argv else f"Submitted batch job {job}")
"""
SQUEUE = """#!/bin/sh
"exec" "{python}" "$0" "$@"  # a path with a space cannot follow #!
import pathlib, sys
queue = pathlib.Path("{queue}")
for job in sys.argv[-1].split(","):
    if (queue / (job + ".sh")).exists() and not (queue / (job + ".end")).exists():
        print(job)
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo localhost
"""


class Cluster:
    """Jobs in a folder: JOB.sh and JOB.args of a call of sbatch; JOB.end, `ok` or `failed`, at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": SRUN, "scontrol": SCONTROL}.items():
            self._write(name, text.replace("{python}", sys.executable).replace("{queue}", str(folder)))

    def replace(self, name: str, script: str) -> None:
        """Another program in the place of one of them, in bash."""
        self._write(name, f"#!/bin/bash\n{script}\n")

    def _write(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)

    def jobs(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.sh"))

    def options(self, job: str) -> dict[str, str]:
        text = (self.folder / f"{job}.sh").read_text()
        directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
        words = json.loads((self.folder / f"{job}.args").read_text())
        arguments = dict(one.removeprefix("--").partition("=")[::2] for one in words)
        return directives | arguments

    def run(self, lost: set[tuple[str, int]] | None = None) -> None:
        """Runs what is queued, in order; array tasks `lost` fail without a word, as on a lost node."""
        for job in self.jobs():
            if (self.folder / f"{job}.end").exists():
                continue
            options = self.options(job)
            depends = re.findall(r"\d+", options.get("dependency", ""))
            ok = all((self.folder / f"{one}.end").read_text() == "ok" for one in depends)
            assert ok or options["kill-on-invalid-dep"] == "yes"
            last = int(re.fullmatch(r"0-(\d+)(%\d+)?", options["array"])[1]) if "array" in options else -1
            tasks = range(last + 1) if last >= 0 else [None]
            if ok:
                done = [(job, task) not in (lost or ()) and self._run(job, task) for task in tasks]
                ok = all(done)
            (self.folder / f"{job}.end").write_text("ok" if ok else "failed")

    def _run(self, job: str, task: int | None) -> bool:
        hidden = ("SLURM", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {"SLURM_JOB_ID": job, "SLURM_NODELIST": "localhost", "RUN_OFFSET": "0"}
        environment |= {} if task is None else {"SLURM_ARRAY_TASK_ID": str(task)}
        command = ["bash", str(self.folder / f"{job}.sh")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        (self.folder / f"{job}_{task}.out").write_text(done.stdout + done.stderr)
        return done.returncode == 0
