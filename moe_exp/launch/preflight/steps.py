"""What ranks and the launcher of a node agree on: where the results are. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS_FOLDER = "MOE_EXP_PREFLIGHT_RESULTS"  # variable that the launcher sets


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what it has found."""
    return folder / f"rank_{rank}.json"


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has found so far; empty before it has come that far."""
    try:
        return dict(json.loads(rank_file(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
