"""Numbers as text; a dash if not measured."""

from __future__ import annotations

import math

from moe_exp.host import files

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def short(value: float) -> str:
    """Four digits with a decimal prefix: 16384 is `16.38k`."""
    if not math.isfinite(value):
        return "–"
    if abs(value) < 1e3:
        return f"{value:.4g}"
    power = min(int(math.log10(abs(value)) / 3 + 1e-9), len(_PREFIXES) - 1)
    return f"{value / 1000**power:.4g}{_PREFIXES[power]}"


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
    """In the unit that leaves few digits."""
    if not math.isfinite(seconds):
        return "–"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.4g} days"


def bytes_text(value: float) -> str:
    """With a decimal unit, or a dash for none."""
    return files.bytes_text(value) if math.isfinite(value) else "–"
