"""Types of settings: which values one may have, and how its text is read."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

# Control characters, line separators and halves of surrogate pairs, which stand for bytes that are not UTF-8.
_NOT_ONE_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
NOT_ONE_LINE_RULE = "has a line break, or a character that cannot be printed"
ONE_LINE_FIX = "give one line of text"


def is_one_line(text: str) -> bool:
    """Whether a text can be a name, a path or a word of a script: it has no control characters."""
    return not _NOT_ONE_LINE.search(text)


def one_line(value: Any) -> Any:
    """Validates every setting as given: text has to be one line, see `is_one_line`."""
    if isinstance(value, str) and not is_one_line(value):
        raise PydanticCustomError("one_line", NOT_ONE_LINE_RULE)
    return value


_LONGEST_SHOWN = 100


def shown(value: object) -> str:
    """A value as an error echoes it: one line of at most 100 characters; others by `repr`, without their
    middle.
    """
    text = str(value)
    text = text if is_one_line(text) else repr(text)
    half = (_LONGEST_SHOWN - 3) // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def _none_or_int(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("none", "") else value


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0.0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


def _pattern(value: Any) -> str:
    """Checks MOE_LAYER_FREQ, a positive number or a list of 0 and 1 with repetitions; returns it without
    spaces.
    """
    text = "".join(str(value).split())
    if not (int(text) if text.isdigit() else re.fullmatch(_PATTERN, text)):
        raise ValueError("must be a positive number, or a pattern such as [0]*3+[1]*21 or 0,1,1,1")
    return text


def _losses(value: Any) -> str:
    """Checks AUX_LOSS_TYPE; returns it without spaces."""
    text = "".join(str(value).split())
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in (*LOSS_KINDS, *NO_LOSS)]:
        raise ValueError(f"{unknown[0] or 'nothing'} is not a loss")
    if len(kinds) > 1 and (set(kinds) & set(NO_LOSS) or len(set(kinds)) < len(kinds)):
        raise ValueError("none and sinkhorn stand alone, and no loss is named twice")
    return text


def _numbers(value: Any) -> str:
    """Checks a list of numbers that are not negative; returns it without spaces."""
    text = "".join(str(value).split())
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError("must be a number of at least 0, or several with commas")
    return text


def _whole_numbers(value: Any) -> str:
    """Checks a list of whole numbers, which may be empty; returns it without spaces."""
    text = "".join(str(value).split())
    if text and not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError("must be a whole number, or several with commas")
    return text


def _stage_layers(value: Any) -> str:
    """Checks PIPELINE_LAYERS, whole numbers with repetitions; returns it without spaces."""
    text = "".join(str(value).split())
    if text and not re.fullmatch(_STAGES, text):
        raise ValueError(
            "must be whole numbers with commas, and repetitions such as 9*10 for ten stages of 9"
        )
    return text


def _timeout(value: Any) -> str:
    """Checks HANG_TIMEOUT: auto, none or seconds."""
    text = str(value).strip().lower()
    try:
        is_valid = text in ("auto", "none") or 0 < float(text) < float("inf")
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("must be auto, none or a number of seconds above 0")
    return text


def _iterations(value: Any) -> str:
    """Checks PROFILE_ITERS and the like; returns it without spaces."""
    text = "".join(str(value).split())
    ends = (
        [end for pair in iteration_ranges(text) for end in pair]
        if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
        else [0]
    )
    # within a pair they may be equal
    in_order = all(ends[i] <= ends[i + 1] - i % 2 for i in range(len(ends) - 1))
    if text and not (ends[0] >= 1 and in_order):
        raise ValueError(
            "must be an iteration from 1 on, the first and the last such as 10-12, or several of these in"
            " order, with commas"
        )
    return text


def _ranks(value: Any) -> str:
    """Checks PROFILE_RANKS; returns it without spaces."""
    text = "".join(str(value).split())
    if text != "all" and not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError("must be ranks with commas such as 0,3, or all")
    return text


LOSS_KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "importance")
NO_LOSS = ("none", "sinkhorn")
_TERM = r"(\[?[01](,[01])*\]?(\*\d+)?)"
_PATTERN = rf"{_TERM}(\+{_TERM})*"
_STAGE = r"\d{1,4}(\*[1-9]\d{0,3})?"
_STAGES = rf"{_STAGE}(,{_STAGE})*"
LayerPattern = Annotated[str, BeforeValidator(_pattern)]
LossKinds = Annotated[str, BeforeValidator(_losses)]
Numbers = Annotated[str, BeforeValidator(_numbers)]
OptionalNumbers = Annotated[str, BeforeValidator(lambda value: _numbers(value) if value else "")]
WholeNumbers = Annotated[str, BeforeValidator(_whole_numbers)]
StageLayers = Annotated[str, BeforeValidator(_stage_layers)]
Timeout = Annotated[str, BeforeValidator(_timeout)]
Iterations = Annotated[str, BeforeValidator(_iterations)]
RankList = Annotated[str, BeforeValidator(_ranks)]
OptionalPositive = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_none_or_int)]


def expanded_pattern(pattern: str) -> str:
    """The zeros and ones that a pattern such as [0]*3+[1,0]*2 stands for."""
    terms = [term.partition("*") for term in pattern.split("+")]
    return "".join(re.sub(r"[^01]", "", bits) * int(times or 1) for bits, _, times in terms)


@cache  # a layout search asks thousands of times
def layers_of_pattern(pattern: str, num_layers: int, num_first_dense: int) -> tuple[bool, ...]:
    """For every layer whether a MOE_LAYER_FREQ makes it an MoE layer. A list keeps its own length."""
    if pattern.isdigit():
        chosen = [layer % int(pattern) == 0 for layer in range(num_layers)]
    else:
        chosen = [bit == "1" for bit in expanded_pattern(pattern)]
    return tuple(is_moe and layer >= num_first_dense for layer, is_moe in enumerate(chosen))


def expanded_layers(stages: str) -> list[int]:
    """The layers of every stage that a text such as 8,9*10,8 stands for."""
    terms = [term.partition("*") for term in stages.split(",")]
    return [int(layers) for layers, _, times in terms for _ in range(int(times or 1))]


@cache  # asked in every iteration
def iteration_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """First and last of the iterations that a text such as 5,10-12 names, range by range; none of an empty
    one.
    """
    pairs = (part.partition("-") for part in text.split(",") if part)
    return tuple((int(first), int(last or first)) for first, _, last in pairs)
