"""A run's jobs in SLURM's queue: those that run, wait, or will never start. No torch."""

import getpass
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

# States of jobs that have nodes, without COMPLETING, in which a job is over.
_RUNNING = ("RUNNING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "RESIZING")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED")
_HALTED = ("SUSPENDED", "STOPPED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# Reasons of jobs that will not start by themselves, as in SLURM's job_reason_string; %r has no parentheses.
_NEVER = re.compile(
    r"DependencyNeverSatisfied|JobHeld(User|Admin)|JobHoldMaxRequeue|BadConstraints|"
    r"NonZeroExitCode|launch failed requeued held|(job )?requeued (in )?held( state)?|"
    r"user env retrieval failed requeued held|"
    r"Invalid(Account|QOS)|(Account|QOS)NotAllowed|Partition(TimeLimit|NodeLimit)|ReservationDeleted|"
    r"DeadLine|FrontEndDown|AccountingPolicy|(QOS|Assoc)\w*MaxWall\w*|(QOS|Assoc)\w*MaxSubmit\w*|"
    r"(QOS|Assoc)(Max|Grp)(?!\w*RunMinutes)\w*Minutes\w*|"  # RunMinutes: a limit of running jobs, which end
    r"(QOS|Assoc)Max(Cpu|Node|GRES|TRES|Mem)\w*PerJob\w*|QOSMin\w*"
)


@dataclass(frozen=True)
class QueuedJob:
    """One line of squeue."""

    name: str  # in squeue's notation: 123, 123_4 or 123_[5-20%1]
    state: str
    start: datetime | None  # actual, or expected by the scheduler
    limit_seconds: int | None  # time limit of each job; None: unlimited
    left_seconds: int | None  # remaining time of a running job
    reason: str  # why it is waiting

    @property
    def text(self) -> str:
        reason = "" if self.reason in ("None", "") else f" ({self.reason})"
        return f"job {self.name} {self.state.lower()}{reason}"

    @property
    def num_tasks(self) -> int:
        """Number of jobs in a squeue line: 1 for 123 and 123_4, 17 for 123_[4-20%1], 3 for 123_[1,4-8:4]."""
        found = re.fullmatch(r"\d+_\[([\d,:-]+)(%\d+)?\]", self.name)
        total = 0
        for part in found[1].split(",") if found else ():
            if numbers := re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part):
                first, last, step = int(numbers[1]), int(numbers[2] or numbers[1]), int(numbers[3] or 1)
                total += len(range(first, last + 1, step))
        return total if found else 1


@dataclass(frozen=True)
class Queue:
    """Jobs with the same name and user, in squeue's order."""

    running: list[QueuedJob] = field(default_factory=list)  # have nodes
    ending: list[QueuedJob] = field(default_factory=list)  # includes requeued jobs for a while
    coming: list[QueuedJob] = field(default_factory=list)  # waiting for nodes or for the previous job
    stuck: list[QueuedJob] = field(default_factory=list)  # will not start without intervention

    @property
    def all_jobs(self) -> list[QueuedJob]:
        return [*self.running, *self.coming, *self.stuck, *self.ending]

    @property
    def next_start(self) -> datetime | None:
        """Expected start of the next job; None if the scheduler does not know it."""
        return min((job.start for job in self.coming if job.start), default=None)

    @property
    def limit_seconds(self) -> int | None:
        return next((job.limit_seconds for job in [*self.running, *self.coming] if job.limit_seconds), None)

    @property
    def scheduled_seconds(self) -> float | None:
        """Sum of the jobs' remaining times; None if a job has no time limit."""
        times = [job.left_seconds for job in self.running]
        # the line of an array stands for several jobs that run sequentially
        times += [job.limit_seconds and job.limit_seconds * job.num_tasks for job in self.coming]
        known = [one for one in times if one is not None]
        return sum(known) if len(known) == len(times) else None


class QueueError(ValueError):
    """SLURM does not respond, so the state of the jobs is unknown."""


class NoSqueue(QueueError):
    """squeue is not installed; retrying does not help."""


def read_queue(name: str, user: str = "", *, job_ids: Sequence[str] = ()) -> Queue:
    """Reads the jobs in `job_ids`. If `job_ids` is empty, reads all jobs of `user` (default: this user) that
    are named `name`. Raises QueueError.
    """
    chosen = [f"--user={user or getpass.getuser()}", f"--name={name}"]
    chosen = [f"--jobs={','.join(job_ids)}"] if job_ids else chosen
    # Fields of squeue(1): id, state, start (if waiting: expected, or N/A), time limit, time left, reason.
    return parse_queue(_squeue(*chosen, "--format=%i|%T|%S|%l|%L|%r"))


def parse_queue(text: str) -> Queue:
    """Parses squeue's output in the format that `read_queue` requests, and classifies the jobs by state."""
    queue = Queue()
    for line in text.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) < 6:
            continue
        name, state, start, limit, left, reason = fields
        times = slurm_time(start), slurm_seconds(limit), slurm_seconds(left)
        job = QueuedJob(name, state, *times, reason.strip("() "))
        if state in _RUNNING:
            queue.running.append(job)
        elif state == "COMPLETING":
            queue.ending.append(job)
        elif state in _HALTED or (state in _WAITING and _NEVER.fullmatch(job.reason)):
            queue.stuck.append(job)
        elif state in _WAITING:
            queue.coming.append(job)
    return queue


def slurm_seconds(text: str) -> int | None:
    """SLURM time (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) in seconds; None for text such as UNLIMITED."""
    if not (match := re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip())):
        return None
    numbers = [int(part) for part in match.groups() if part is not None]
    if match[1] is None:  # H:M:S, or M or M:S
        numbers = [0, *numbers] if len(numbers) == 3 else [0, 0, *numbers]
    days, hours, minutes, seconds = (*numbers, 0, 0, 0)[:4]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_time(text: str) -> datetime | None:
    """Time from squeue's output, in this host's time zone; None for N/A."""
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except ValueError:
        return None


def job_environment() -> str:
    """Shell command that adds this Python to a job's PATH and a source checkout to the job's PYTHONPATH."""
    package_root = Path(__file__).resolve().parents[2]
    paths = {"PATH": Path(sys.executable).parent}
    # Not if installed: this Python finds the package anyway, and its site-packages would hide a container's.
    if package_root.name not in ("site-packages", "dist-packages"):
        paths["PYTHONPATH"] = package_root
    return "; ".join(
        f'export {name}={shlex.quote(str(path))}"${{{name}:+:${name}}}"' for name, path in paths.items()
    )


def _squeue(*options: str) -> str:
    """Returns squeue's output. Raises NoSqueue if it is not on PATH, QueueError if it fails or times out."""
    # Drop the user's own settings, which may hide jobs, truncate long array ids or change the time format.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    environ = {**kept, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
    command = ["squeue", "--noheader", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60.0)
    except FileNotFoundError:
        fix = "add its folder to PATH (cron's PATH is short), run this on a login node, or omit --slurm-name"
        raise NoSqueue(f"squeue: is not on PATH. Fix: {fix}.") from None
    except subprocess.TimeoutExpired:
        raise QueueError("squeue: no response in 60 s") from None
    # an error about requested jobs only means that they ended some time ago
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise QueueError(f"squeue: exit code {done.returncode}: {' '.join(done.stderr.split())}")
    return done.stdout


def still_there(job_ids: list[str]) -> list[str]:
    """Jobs among `job_ids` that have not ended, except this process's own job."""
    if not job_ids:
        return []
    try:
        known = set(_squeue("--format=%F", "--jobs", ",".join(job_ids)).split())
    except NoSqueue:
        rule = f"is not on PATH, so the SLURM jobs {' '.join(job_ids)} cannot be checked"
        raise ValueError(f"squeue: {rule}. Fix: run this on a login node of the cluster.") from None
    except QueueError as error:
        raise ValueError(f"{error}. Fix: try again when SLURM responds.") from None
    return [job for job in job_ids if job in known and job != os.environ.get("SLURM_JOB_ID")]
