"""Formats numbers like the report's `assets/format.js`; a dash means that a value was not measured."""

import math
from datetime import timedelta

from moe_exp.host import files


def count_text(value: float) -> str:
    """Number of tokens or parameters with at most four digits: 16384 is `16.38K`, 3e9 is `3B`."""
    return files.count_text(value, 4) if math.isfinite(value) else "–"


def flops_text(value: float) -> str:
    """Number of FLOPs with four digits and a decimal prefix: 2.5e18 is `2.5E`."""
    return files.scaled_text(value, ("", *"KMGTPEZY"), 4) if math.isfinite(value) else "–"


def rate_text(value: float) -> str:
    """Tokens per second as an integer with thousands separators."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def digits_text(value: float, digits: int = 4) -> str:
    """Number with `digits` significant digits."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "–"


def loss_text(value: float) -> str:
    """Loss with four decimal places."""
    return f"{value:.4f}" if math.isfinite(value) else "–"


def target_text(loss: float) -> str:
    """Target loss with at least four decimal places."""
    return f"{loss:.4f}" if loss == round(loss, 4) else f"{loss:.10g}"


def percent(value: float, places: int = 1) -> str:
    return f"{value:.{places}%}" if math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """Duration as `95.3 s` (below two minutes), `1:02:03` or `2 days, 1:02:03`; if huge, as days only."""
    if not math.isfinite(seconds):
        return "–"
    if seconds >= 1e10:  # three centuries: beyond that no hour matters
        return f"{seconds / 86400:.4g} days"
    return f"{seconds:.3g} s" if seconds < 120 else str(timedelta(seconds=round(seconds)))


def bytes_text(value: float) -> str:
    """Size with a decimal unit."""
    return files.bytes_text(value) if math.isfinite(value) else "–"
