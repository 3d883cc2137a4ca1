"""Output at the end of a run: summary.json, a plot of the loss, and the printed summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from moe_exp.config import Config
from moe_exp.host.files import write_json
from moe_exp.runs.curves import draw_loss_curve
from moe_exp.runs.records import iter_metrics
from moe_exp.runs.run_folder import RunFolder
from moe_exp.runs.summary import Caller, Status, split_experts, summarize, summary_text

LOSS_CURVE = "loss_curve.png"


def finish_run(
    config: Config,
    folder: RunFolder,
    *,
    since: datetime,
    wall_seconds: float,
    code: int | None = None,
    caller: Caller | None = None,
) -> tuple[Status, str] | None:
    """Writes the summary of the start of this run that was launched at `since` (with time zone).

    Returns:
        The status and the summary text, which says what could not be written; None if the run did not get as
        far as its run folder.
    """
    records, experts = split_experts(iter_metrics(folder.metrics) if folder.metrics.exists() else [])
    status = status_of_last_start(records, since)
    if status is None:
        return None
    summary = summarize(config, records, experts, folder, wall_seconds, status, code)
    text = summary_text(summary, config, caller)
    try:
        write_json(folder.summary, summary)
        if summary["min_lm_loss"] is not None:
            draw_loss_curve(records, folder.path / LOSS_CURVE, config.name)
            text += f"\n  {folder.path / LOSS_CURVE}   # the loss curve"
    except OSError as error:  # a full disk; the status is known anyway
        text += f"\n  not written: {error.filename or folder.summary} ({error.strerror or error})"
    return status, text


def status_of_last_start(records: Sequence[Mapping[str, Any]], since: datetime) -> Status | None:
    """Status in the last start's `end` event; failed without one, None if the start is before `since`."""
    events = [record for record in records if record["kind"] == "event"]
    starts = [index for index, event in enumerate(events) if event["event"] in ("start", "resume")]
    # Events have whole seconds.
    if not starts or datetime.fromisoformat(events[starts[-1]]["time"]) < since.replace(microsecond=0):
        return None
    ends = [event["status"] for event in events[starts[-1] :] if event["event"] == "end"]
    return ends[-1] if ends else "failed"
