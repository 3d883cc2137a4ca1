"""Numbers as text, with the same units in tables, in the terminal and on the report page.

A dash stands for what was not measured. `assets/format.js` of the report has the same rules.
"""

import math
from datetime import timedelta

from moe_exp.host import files


def count_text(value: float) -> str:
    """Four digits of a number of tokens or parameters: 16384 is `16.38K`, 3e9 is `3B`."""
    return files.count_text(value, 4) if math.isfinite(value) else "–"


def flops_text(value: float) -> str:
    """Four digits of a number of FLOPs with a decimal prefix: 2.5e18 is `2.5E`."""
    return files.scaled_text(value, ("", *"KMGTPEZY"), 4) if math.isfinite(value) else "–"


def rate_text(value: float) -> str:
    """Tokens per second, with every digit before the point."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def digits_text(value: float, digits: int = 4) -> str:
    """Significant digits, without a unit."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "–"


def loss_text(value: float) -> str:
    """Four places."""
    return f"{value:.4f}" if math.isfinite(value) else "–"


def target_text(loss: float) -> str:
    """A target loss: four places, or more if it has more."""
    return f"{loss:.4f}" if loss == round(loss, 4) else f"{loss:.10g}"


def percent(value: float, places: int = 1) -> str:
    """A share as a percentage."""
    return f"{value:.{places}%}" if math.isfinite(value) else "–"


def duration(seconds: float) -> str:
    """Three digits of seconds below two minutes, else `H:MM:SS` with the days in front, or days alone."""
    if not math.isfinite(seconds):
        return "–"
    if seconds >= 1e10:  # three centuries: beyond that no hour matters
        return f"{seconds / 86400:.4g} days"
    return f"{seconds:.3g} s" if seconds < 120 else str(timedelta(seconds=round(seconds)))


def bytes_text(value: float) -> str:
    """With a decimal unit, or a dash for none."""
    return files.bytes_text(value) if math.isfinite(value) else "–"
