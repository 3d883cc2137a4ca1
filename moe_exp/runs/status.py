"""How the latest start of a run has ended: one rule for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_exp.runs.run_folder import RunFolder


def ended_status(
    folder: RunFolder,
    *,
    modified: float | None,
    start_time: str,
    end: str | None,
    read_json: Callable[[Path], Mapping[str, Any]],
) -> str | None:
    """How the run ended: finished, stopped or failed; None if it may still be running.

    A killed process writes no `end` event; then the summary decides, which its launcher writes after the
    last record.

    Args:
        modified: when metrics.jsonl was last written, seconds since the epoch; None without one.
        start_time: of the latest start or resume in it, ISO 8601; empty without one.
        end: status of the `end` event after that.
        read_json: returns a file's content; empty if unreadable.
    """
    if modified is None or _is_starting(read_json(folder.provenance), start_time):
        return None
    if end:
        return end
    try:
        is_of_this_start = folder.summary.stat().st_mtime >= modified
    except OSError:
        return None
    status = read_json(folder.summary).get("status")
    return str(status) if status and is_of_this_start else None


def _is_starting(provenance: Mapping[str, Any], start_time: str) -> bool:
    """Whether the latest start has no record yet, so that an `end` belongs to the start before."""
    try:
        return datetime.fromisoformat(provenance["starts"][-1]["time"]) > datetime.fromisoformat(start_time)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
