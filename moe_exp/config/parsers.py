"""Parsers of settings with their own syntax: LR_DECAY_STYLE, WSD_DECAY_ENDS, MTP_LOSS_COEFF, LR_GROUPS and
DATA_STAGES.

Each `read_*` function validates a setting: it returns the normalized text or raises ValueError with the
broken rule. A composed LR_DECAY_STYLE is a comma-separated list of pieces, STYLE:UNTIL or STYLE:UNTIL:RATE:

    constant:80%,linear                                 WSD with a final decay over a fifth of the run
    constant:10000,cosine:14000:10%,constant            decay to a tenth of LR, then constant to the end

A piece ends at UNTIL: an iteration, or a percentage of the last iteration (DECAY_ITERS, or TRAIN_ITERS if
DECAY_ITERS=0). The last piece may omit UNTIL. RATE is the learning rate at the end of the piece, as a
percentage of LR. Without RATE, decays end at MIN_LR and `constant` keeps the previous rate. MTP_LOSS_COEFF is
a number, or a list of VALUE:UNTIL pieces followed by a last value, such as 0.3:70%,0.1. LR_GROUPS: see
parameter_groups.py; DATA_STAGES: see sections/data.py.
"""

import json
import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import yaml

from moe_exp.config.choices import PIECES
from moe_exp.host.files import expanded, regular, shallow

_SYNTAX = "must be a named style, or comma-separated STYLE:UNTIL pieces such as constant:80%,linear"
# Settings that contain points of the schedule, as iterations or fractions.
POINTS = ("lr_decay_style", "wsd_decay_ends", "mtp_loss_coeff")
_POINT = r"[1-9][0-9]{0,8}|[0-9]{1,3}(?:\.[0-9]{1,6})?%"
_PIECE = re.compile(rf"([a-z_-]+)(?::({_POINT})(?::([0-9]{{1,3}}(?:\.[0-9]{{1,6}})?)%)?)?")


def number_in(text: Any) -> float:
    """Parses a number; NaN if invalid."""
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_composed(style: str) -> bool:
    """Whether LR_DECAY_STYLE is a list of pieces."""
    return ":" in style or "," in style


def iteration_of(point: str, last: int) -> int:
    """Converts `point` to an iteration. `1200` is an iteration, `75%` is a share of `last`, '' is `last`."""
    if not point:
        return last
    return round(last * float(point[:-1]) / 100) if point.endswith("%") else int(point)


def scaled_points(text: str, factor: float) -> str:
    """Returns `text`, the value of a setting like WSD_DECAY_ENDS, with iterations scaled by `factor`."""
    multiplied = lambda found: str(max(1, round(int(found[0]) * factor)))  # noqa: E731
    before = ":" if ":" in text else ","
    return re.sub(rf"(?<={before})[0-9]+(?=[,:]|$)", multiplied, f",{text}")[1:]


def read_composed(value: str) -> str | None:
    """Returns a composed LR_DECAY_STYLE without spaces, or None if `value` is not a list of pieces."""
    text = "".join(value.split())
    if not is_composed(text):
        return None
    pieces = composed(text)
    if any(not until for _, until, _ in pieces[:-1]):
        raise ValueError("only the last STYLE:UNTIL piece may omit UNTIL, the point at which it ends")
    _check_shares([until for _, until, _ in pieces])
    if any(target is not None and target > 1 for _, _, target in pieces):
        raise ValueError("the RATE of a STYLE:UNTIL:RATE piece must not exceed 100% of LR")
    return text


def read_points(value: object) -> str:
    """Returns WSD_DECAY_ENDS without spaces."""
    text = "".join(str(value).split())
    points = text.split(",") if text else []
    if not all(re.fullmatch(_POINT, point) for point in points):
        raise ValueError("must be comma-separated iterations or fractions such as 25%")
    _check_shares(points)
    return text


def read_values(value: object) -> float | str:
    """Returns MTP_LOSS_COEFF: a number, or VALUE:UNTIL pieces without spaces."""
    text = "".join(str(value).split())
    numbers, ends = zip(*value_pieces(text), strict=True)
    if not all(0 <= number_in(number) < math.inf for number in numbers) or not all(
        re.fullmatch(_POINT, end) for end in ends[:-1]
    ):
        raise ValueError(
            "must be a number of at least 0, or comma-separated VALUE:UNTIL pieces such as 0.3:70%,0.1"
        )
    if ends[-1]:
        raise ValueError("the last value applies until the end and must not be followed by :UNTIL")
    _check_shares(ends[:-1])
    return float(text) if len(ends) == 1 else text


def value_pieces(text: str) -> list[tuple[str, str]]:
    """Splits MTP_LOSS_COEFF into pieces (value, end), as written. An omitted end is ''."""
    return [(value, end) for value, _, end in (part.partition(":") for part in text.split(","))]


def _check_shares(points: Sequence[str]) -> None:
    if any(point.endswith("%") and not 0 < float(point[:-1]) <= 100 for point in points):
        raise ValueError("fractions must be above 0% and at most 100%")


@cache  # called at every step
def composed(text: str) -> tuple[tuple[str, str, float | None], ...]:
    """Parses pieces into (style, end as written, final rate as a fraction of LR), or raises ValueError."""
    pieces = []
    for part in text.split(","):
        match = _PIECE.fullmatch(part)
        if not match:
            raise ValueError(_SYNTAX)
        if match[1] not in PIECES:
            rule = f"{match[1]} cannot be the style of a STYLE:UNTIL piece"
            raise ValueError(f"{rule}; use one of {', '.join(PIECES)}")
        pieces.append((match[1], match[2] or "", float(match[3]) / 100 if match[3] else None))
    return tuple(pieces)


_GROUPS = "must be PATTERN:lr=NUMBER,wd=NUMBER, separated by semicolons, such as '*.router.*:lr=0.5,wd=0'"


class Rule(NamedTuple):
    """Factors for the parameters whose names match a pattern; a factor that the rule does not set is None."""

    setting: str  # source of the rule
    pattern: str
    lr: float | None = None
    wd: float | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule applies to the parameter that checkpoints call `name`."""
        without_layer = re.sub(r"^decoder\.layers\.\d+\.", "decoder.layers.", name)
        return fnmatchcase(name, self.pattern) or fnmatchcase(without_layer, self.pattern)


def read_groups(value: object) -> str:
    """Returns LR_GROUPS without redundant spaces."""
    lines = [" ".join(line.split()) for line in str(value).split(";")]
    text = ";".join(re.sub(r" ?([:=,]) ?", r"\1", line) for line in lines if line)
    if text:
        parsed_groups(text)
    return text


@cache
def parsed_groups(text: str) -> tuple[Rule, ...]:
    rules = []
    for line in text.split(";"):
        pattern, colon, multiples = line.partition(":")
        if not (pattern and colon and multiples) or " " in pattern:
            raise ValueError(_GROUPS)
        found: dict[str, float] = {}
        for part in re.split("[ ,]", multiples):
            key, _, number = part.partition("=")
            if key not in ("lr", "wd") or key in found:
                raise ValueError(_GROUPS)
            found[key] = number_in(number)
            if not 0 <= found[key] < math.inf:
                raise ValueError(f"{part} must be a number of at least 0")
        rules.append(Rule("lr_groups", pattern, **found))
    return tuple(rules)


_BEGINS = ("from_samples", "from_tokens")
_KEYS = (*_BEGINS, "train_data", "seq_len")


def read_stages(value: object) -> str:
    """Converts DATA_STAGES from YAML text or a YAML file to JSON."""
    text = str(value).strip()
    if not text:
        return ""
    if not text.startswith(("[", "-", "{")):
        try:
            text = regular(expanded(text)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not text"
            raise ValueError(f"cannot be read as a file ({reason})") from None
    try:
        stages = yaml.safe_load(shallow(text))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"is not YAML ({str(error).splitlines()[0][:80]})") from None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError("must be a list of stages, each with from_samples or from_tokens")
    return json.dumps([_read_stage(number, stage) for number, stage in enumerate(stages, 1)])


def _read_stage(number: int, stage: dict[Any, Any]) -> dict[str, Any]:
    if unknown := [name for name in stage if name not in _KEYS]:
        raise ValueError(
            f"stage {number} has an unknown key {str(unknown[0])[:40]!r}; use one of {', '.join(_KEYS)}"
        )
    begins = [name for name in _BEGINS if name in stage]
    if len(begins) != 1:
        raise ValueError(f"stage {number} must have either from_samples or from_tokens")
    numbers = {name: number_in(stage[name]) for name in (*begins, "seq_len") if name in stage}
    for name, found in numbers.items():
        if not (1 <= found < 2**53 and found == int(found)):  # may be text: YAML reads 4e9 as such
            given = str(stage[name])[:40]
            raise ValueError(f"stage {number}: {name}={given} must be a whole number of at least 1")
    data = stage.get("train_data")
    if data is not None and not (isinstance(data, str) and data.strip()):
        raise ValueError(f"stage {number}: train_data must be a non-empty string in the format of TRAIN_DATA")
    if data is None and "seq_len" not in numbers:
        raise ValueError(f"stage {number} changes nothing: add train_data or seq_len")
    read: dict[str, Any] = {name: int(found) for name, found in numbers.items()}
    return read | ({} if data is None else {"train_data": data.strip()})
