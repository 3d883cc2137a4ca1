"""How a case ended: a result from its exit code, log and metrics, and the file that keeps it. No torch."""

from __future__ import annotations

import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_exp.host.files import read_json, write_json
from moe_exp.runs.records import read_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.failures import LONGEST, last_line, why_it_failed

Status = Literal["ok", "failed", "oom", "timeout"]

TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """Result of a case that has run.

    Attributes:
        reason: unless ok, the last useful line of its log.
        seconds: per iteration, median after the warm-up; None: not measured.
        memory_bytes: maximum over ranks, allocated on a GPU, resident on a CPU; None: not measured.
        device: it ran on; empty if it did not get that far.
        flags: the settings it ran with.
    """

    status: Status
    reason: str = ""
    seconds: float | None = None
    memory_bytes: float | None = None
    device: str = ""
    flags: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
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
    folder: RunFolder,
    log: Path,
    flags: dict[str, str],
    *,
    code: int | None,
    timeout: int = 0,
    num_warmup: int,
    num_iterations: int,
) -> Result:
    """The result of a case whose processes are gone.

    Args:
        code: exit code of its launcher; None if unknown.
        timeout: seconds after which it was ended; 0: it ended by itself.
        num_warmup: iterations at the start that are not measured.
        num_iterations: that it had to run.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    device = _device(folder)
    if timeout or (code is None and TIME_LIMIT.search(text)):
        limit = f"CASE_TIMEOUT={timeout} s" if timeout else "the time limit of its job"
        return Result(
            "timeout",
            f"had not ended after {limit}; its last line: {last_line(text)}"[:LONGEST],
            device=device,
            flags=flags,
        )
    if code == 0:
        records = [record for record in _records(folder) if record["iteration"] > num_warmup]
        if len(records) == num_iterations - num_warmup:
            memory = max((record["peak_memory_bytes"] for record in records), default=None)
            seconds = statistics.median(record["elapsed_time_per_iteration_ms"] for record in records) / 1e3
            return Result("ok", seconds=seconds, memory_bytes=memory, device=device, flags=flags)
        reason = f"ended with {len(records) + num_warmup} of {num_iterations} iterations measured"
        return Result("failed", reason, device=device, flags=flags)
    status, reason = why_it_failed(text, code)
    return Result(status, reason, device=device, flags=flags)


def _records(folder: RunFolder) -> list[dict[str, Any]]:
    return (
        [record for record in read_metrics(folder.metrics) if record["kind"] == "train"]
        if folder.metrics.exists()
        else []
    )


def _device(folder: RunFolder) -> str:
    """As recorded by the run's own node."""
    try:
        return str(read_json(folder.provenance)["starts"][-1].get("device", ""))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
