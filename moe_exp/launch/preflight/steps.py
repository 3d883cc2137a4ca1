"""Result files that ranks write and their launcher reads. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_exp.host.files import read_json

RESULTS_FOLDER = "MOE_EXP_PREFLIGHT_RESULTS"  # environment variable, set by the launcher


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    """A rank's results so far; empty before the first."""
    try:
        return dict(read_json(rank_file(folder, rank)))
    except (OSError, ValueError):
        return {}
