"""How a case ended: a result from its exit code, log and metrics, and the file that keeps it. No torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from moe_exp.host.files import read_json, write_json
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import LONGEST, Case, last_line, median_seconds, records_after, why_it_failed

Status = Literal["ok", "failed", "oom", "timeout"]

TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """Result of a case that has run."""

    status: Status
    reason: str = ""  # unless ok, the last useful line of its log
    seconds: float | None = None  # per iteration, median after the warm-up; None: not measured
    # maximum over ranks, allocated on a GPU, resident on a CPU; None: not measured
    memory_bytes: float | None = None
    device: str = ""  # it ran on; empty if it did not get that far
    flags: dict[str, str] = field(default_factory=dict)  # the settings it ran with

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads such a file; ValueError if it is invalid."""
        try:
            return cls(**read_json(path))
        except (ValueError, TypeError):
            raise ValueError(
                f"{path}: is no result of a case. Fix: remove it, the case then runs again."
            ) from None


def result_of(
    case: Case, code: int | None, *, timeout: int = 0, num_warmup: int, num_iterations: int
) -> Result:
    """The result of a case whose processes are gone.

    Args:
        code: exit code of its launcher; None if it timed out, or ended without one.
        timeout: seconds after which it was ended here; 0: its SLURM job has another limit.
        num_warmup: iterations at the start that are not measured.
        num_iterations: that it had to run.
    """
    text = case.log.read_text(encoding="utf-8", errors="replace") if case.log.exists() else ""
    status: Status
    measured: dict[str, float] = {}
    if code is None and (timeout or TIME_LIMIT.search(text)):
        limit = f"CASE_TIMEOUT={timeout} s" if timeout else "the time limit of its job"
        status, reason = "timeout", f"had not ended after {limit}; its last line: {last_line(text)}"[:LONGEST]
    elif code != 0:
        status, reason = why_it_failed(text, code)
    else:
        records = records_after(case.folder, num_warmup)
        if len(records) == num_iterations - num_warmup:
            memory = max(record["peak_memory_bytes"] for record in records)
            status, reason = "ok", ""
            measured = {"seconds": median_seconds(records), "memory_bytes": memory}
        else:
            status = "failed"
            reason = f"ended with {len(records) + num_warmup} of {num_iterations} iterations measured"
    return Result(status, reason, device=_device(case.folder), flags=dict(case.flags), **measured)


def _device(folder: RunFolder) -> str:
    """As recorded by the run's own node."""
    try:
        return str(read_json(folder.provenance)["starts"][-1].get("device", ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
