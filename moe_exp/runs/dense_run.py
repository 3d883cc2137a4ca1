"""The dense run that an MoE run starts from (UPCYCLE_FROM): its checkpoint, and whether settings fit it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.config.model_changes import model_changes
from moe_exp.runs.run_folder import LATEST


def dense_checkpoint(c: Config) -> Path | None:
    """The iteration folder that UPCYCLE_FROM names, or the newest in the checkpoints folder that it names."""
    folder = Path(c.upcycle_from).expanduser()
    if (folder / LATEST).is_file():
        latest = (folder / LATEST).read_text(errors="replace").strip()
        if not re.fullmatch("[0-9]{1,12}", latest):
            return None
        folder /= f"iter_{int(latest):07d}"
    return folder if (folder / "metadata.json").is_file() else None


def dense_problems(c: Config, dense: Mapping[str, Any]) -> list[str]:
    """Why this run cannot start from the dense run with settings `dense`."""
    if dense.get("use_moe"):
        return [
            problem(
                "upcycle_from",
                c.upcycle_from,
                "is the checkpoint of an MoE run",
                "name a run with USE_MOE=false",
            )
        ]
    source = f"the dense run UPCYCLE_FROM={c.upcycle_from}"
    shapes, functions = model_changes(c.model_copy(update={"use_moe": False}), dense, source)
    return [change.problem(source) for change in shapes + functions]
