"""The pieces of a learning-rate schedule: which shape it has from which sample to which. No torch.

Every LR_DECAY_STYLE is a warm-up and a list of pieces. A composed one is written as that list, STYLE:UNTIL or
STYLE:UNTIL:RATE with commas:

    constant:80%,linear                                 WSD with a final decay over a fifth of the run
    constant:10000,cosine:14000:10%,constant            down to a tenth of LR, and there to the end

UNTIL is an iteration, or a share of the last one (DECAY_ITERS, or TRAIN_ITERS), and may be left out of the
last piece. RATE is the learning rate at its end, as a share of LR; without it, decays end at MIN_LR, and
`constant` stays at the rate before it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from moe_exp.config.choices import PIECES, SCHEDULES

if TYPE_CHECKING:
    from moe_exp.config.settings import Config

_SYNTAX = "must be one of the names, or STYLE:UNTIL pieces with commas, such as constant:80%,linear"
_POINT = r"[1-9][0-9]{0,8}|[0-9]{1,3}(?:\.[0-9]{1,6})?%"
_PIECE = re.compile(rf"([a-z_-]+)(?::({_POINT})(?::([0-9]{{1,3}}(?:\.[0-9]{{1,6}})?)%)?)?")


class Piece(NamedTuple):
    """A part of a schedule.

    Attributes:
        style: one of PIECES.
        start: number of samples after which it begins.
        end: number of samples after which the next piece takes over.
        target: learning rate at its end, as a share of LR; None: MIN_LR, or no change if it is constant.
    """

    style: str
    start: int
    end: int
    target: float | None


def pieces_of(config: Config) -> list[Piece]:
    """The pieces after the warm-up, in order. Settings that passed config/checks have at least one.

    The first begins where the warm-up ends. A final decay that is longer than what the warm-up leaves of the
    run has begun before that, as Megatron has it.

    Raises:
        ValueError: LR_DECAY_STYLE is in SCHEDULES, but not known here.
    """
    pieces, start = [], config.warmup_iters
    for style, end, target in _parts(config):
        pieces.append(Piece(style, start * config.gbsz, end * config.gbsz, target))
        start = end
    return pieces


def _parts(config: Config) -> list[tuple[str, int, float | None]]:
    """Style, last iteration and target of each piece."""
    style, end, decay = config.lr_decay_style, config.decay_end, config.wsd_decay_iters
    if is_composed(style):
        return [(name, iteration_of(until, end), target) for name, until, target in _composed(style)]
    if style in PIECES and not SCHEDULES[style].has_final_decay:
        return [(style, end, None)]
    if style == "power":
        return [(style, end - decay, None), *([(config.wsd_decay_style, end, None)] if decay else [])]
    if style not in ("WSD", "WSD-S"):
        rule = "config/schedule.py does not know its pieces"
        raise ValueError(f"lr_decay_style={style}: {rule}. Fix: use cosine.")
    parts: list[tuple[str, int, float | None]] = []
    for last in decay_ends(config):
        parts += [("constant", last - decay, 1.0), (config.wsd_decay_style, last, None)]
    return parts


def decay_ends(config: Config) -> list[int]:
    """Iterations with which the decays of WSD and WSD-S end; the last of them is that of the run."""
    points = config.wsd_decay_ends.split(",") if config.lr_decay_style == "WSD-S" else []
    return [*(iteration_of(point, config.decay_end) for point in points if point), config.decay_end]


def is_composed(style: str) -> bool:
    """Whether LR_DECAY_STYLE is a list of pieces."""
    return ":" in style or "," in style


def iteration_of(point: str, last: int) -> int:
    """The iteration that `1200` or `75%` stands for; a share is one of `last`. Empty: the last."""
    if not point:
        return last
    return round(last * float(point[:-1]) / 100) if point.endswith("%") else int(point)


def scaled_points(text: str, factor: float) -> str:
    """WSD_DECAY_ENDS or LR_DECAY_STYLE, with all iterations times `factor`; shares stay."""
    multiplied = lambda found: str(max(1, round(int(found[0]) * factor)))  # noqa: E731
    return re.sub(r"(?<=[,:])[0-9]+(?=[,:]|$)", multiplied, f",{text}")[1:]


def read_composed(value: str) -> str | None:
    """Checks a composed LR_DECAY_STYLE; removes spaces. None if it is a single name.

    Raises:
        ValueError: with the rule that it breaks.
    """
    text = "".join(value.split())
    if not is_composed(text):
        return None
    pieces = _composed(text)
    if any(not until for _, until, _ in pieces[:-1]):
        raise ValueError("only the last piece may do without the iteration at which it ends")
    _check_points([until for _, until, _ in pieces])
    if any(target is not None and target > 1 for _, _, target in pieces):
        raise ValueError("a piece may end at most at 100% of LR")
    return text


def read_points(value: object) -> str:
    """Checks WSD_DECAY_ENDS; removes spaces. Raises ValueError with the rule that it breaks."""
    text = "".join(str(value).split())
    points = text.split(",") if text else []
    if not all(re.fullmatch(_POINT, point) for point in points):
        raise ValueError("must be iterations, or shares such as 25%, with commas")
    _check_points(points)
    return text


def _check_points(points: list[str]) -> None:
    if any(point.endswith("%") and not 0 < float(point[:-1]) <= 100 for point in points):
        raise ValueError("has a share that is not over 0% and up to 100%")


@cache  # asked at every step
def _composed(text: str) -> tuple[tuple[str, str, float | None], ...]:
    """Style, end as it is written, and target of each piece; ValueError if that is not what `text` is."""
    pieces = []
    for part in text.split(","):
        match = _PIECE.fullmatch(part)
        if not match:
            raise ValueError(_SYNTAX)
        if match[1] not in PIECES:
            raise ValueError(f"{match[1]} is no piece: these are {', '.join(PIECES)}")
        pieces.append((match[1], match[2] or "", float(match[3]) / 100 if match[3] else None))
    return tuple(pieces)
