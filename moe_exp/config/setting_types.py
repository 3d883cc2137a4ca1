"""Types of settings. Each type defines the allowed values of a setting and parses its text."""

import glob
import math
import os
import re
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from moe_exp.config.choices import LOSSES, NO_LOSS, OFFLOADED, RECOMPUTED
from moe_exp.config.parsers import number_in, read_groups, read_points, read_stages, read_values
from moe_exp.host.files import ending, is_url

# Control characters, line separators and surrogates, which represent bytes that are not UTF-8.
_NOT_ONE_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
NOT_ONE_LINE_RULE = "has a line break or an unprintable character"
ONE_LINE_FIX = "use one line of text"


def is_one_line(text: str) -> bool:
    """Whether text has no control characters, so that it can be a name, a path or a word of a script."""
    return not _NOT_ONE_LINE.search(text)


def one_line(value: Any) -> Any:
    """Validates that the text of a setting is one line, see `is_one_line`."""
    if isinstance(value, str) and not is_one_line(value):
        raise PydanticCustomError("one_line", NOT_ONE_LINE_RULE)
    return value


_LONGEST_SHOWN = 100


def shown(value: object) -> str:
    """Returns a value as one line for error messages. Cuts out the middle to keep at most 100 characters."""
    text = str(value)
    text = text if is_one_line(text) else repr(text)
    half = (_LONGEST_SHOWN - 3) // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def as_given(value: object) -> str:
    """Returns a value as a user would write it in the environment or on the command line."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(
    check: Callable[[str], None] = lambda text: None, pattern: str = "", rule: str = ""
) -> BeforeValidator:
    """Returns a validator that removes all spaces from a setting's text. It then calls `check`, which may
    raise ValueError. If the text does not match `pattern`, the validator raises ValueError(`rule`).
    """

    def read(value: Any) -> str:
        text = "".join(str(value).split())
        check(text)
        if pattern and not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return BeforeValidator(read)


# Upper bounds far above any real run, but low enough for checks and reports to stay fast.
_MOST = 10**9
_MOST_LAYERS = _MOST_STAGES = 10_000
Positive = Annotated[int, Field(ge=1, le=_MOST)]
NonNegative = Annotated[int, Field(ge=0, le=_MOST)]
NumRanks = Annotated[int, Field(ge=1, le=100_000)]  # also nodes and parallel sizes
NumLayers = Annotated[int, Field(ge=1, le=_MOST_LAYERS)]
FewLayers = Annotated[int, Field(ge=0, le=16)]
NumExperts = Annotated[int, Field(ge=1, le=2**20)]
NumHeads = Annotated[int, Field(ge=1, le=2**16)]
Width = Annotated[int, Field(ge=1, le=2**24)]
OptionalWidth = Annotated[int, Field(ge=0, le=2**24)]
Seed = Annotated[int, Field(ge=0, le=4 * 10**9)]  # ranks add to it, and numpy requires less than 2**32
Rate = Annotated[float, Field(ge=0.0)]
RateByIteration = Annotated[float | str, BeforeValidator(read_values)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


def _layer_pattern(text: str) -> None:
    is_repeated = re.fullmatch(rf"{_INT}(:{_INT})?", text)
    if not (all(map(int, text.split(":"))) if is_repeated else re.fullmatch(_PATTERN, text)):
        raise ValueError("must be a positive number, a ratio n:m, or a list such as [0]*3+[1]*21 or 0,1,1,1")
    terms = [] if is_repeated else _pattern_terms(text)
    if (length := sum(len(bits) * times for bits, times in terms)) > _MOST_LAYERS:
        raise ValueError(f"describes {length} layers, more than the limit of {_MOST_LAYERS}")


def _losses(text: str) -> None:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in (*LOSSES, *NO_LOSS)]:
        raise ValueError(f"{shown(unknown[0] or 'empty text')} is not a loss")
    if len(kinds) > 1 and (set(kinds) & set(NO_LOSS) or len(set(kinds)) < len(kinds)):
        raise ValueError("must not repeat a loss; none and sinkhorn cannot be combined with other losses")


def _modules(text: str, known: Collection[str]) -> None:
    if unknown := set(text.split(",")) - set(known) if text else ():
        raise ValueError(f"{shown(min(unknown) or 'empty text')} is not one of {', '.join(known)}")


def _numbers(text: str) -> None:
    if not all(0 <= number_in(part) < float("inf") for part in text.split(",")):
        raise ValueError("must be a number of at least 0, or a comma-separated list of such numbers")


def _stage_layers(text: str) -> None:
    if text and not re.fullmatch(_STAGES, text):
        raise ValueError(
            "must be a comma-separated list of layers per stage, in which 9*10 means ten stages of 9 layers"
        )
    if text and (number := sum(times for _, times in stage_terms(text))) > _MOST_STAGES:
        raise ValueError(f"describes {number} stages, more than the limit of {_MOST_STAGES}")


def _iterations(text: str) -> None:
    is_list = re.fullmatch(rf"{_INT}(-{_INT})?(,{_INT}(-{_INT})?)*", text)
    ends = [end for pair in iteration_ranges(text) for end in pair] if is_list else [0]
    # the two ends of a range may be equal
    in_order = all(ends[i] <= ends[i + 1] - i % 2 for i in range(len(ends) - 1))
    if text and not (ends[0] >= 1 and in_order):
        raise ValueError(
            "must be comma-separated iterations (1 or higher) or ranges such as 10-12, in ascending order"
        )


def _timeout(value: Any) -> str:
    text = str(value).strip().lower()
    if text not in ("auto", "none") and not 0 < number_in(text) < float("inf"):
        raise ValueError("must be auto, none or a number of seconds above 0")
    return text


_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # Linux's limits (bytes)


def _path(value: str) -> str:
    """Checks that text can be a path; whether the path exists is checked later, on each machine."""
    if len(os.fsencode(value)) > _LONGEST_PATH:
        raise ValueError(f"must be a path of at most {_LONGEST_PATH} bytes")
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in value.split("/")):
        raise ValueError(f"must have file names of at most {_LONGEST_NAME} bytes")
    try:
        Path(value).expanduser()
    except RuntimeError:
        raise ValueError("names the home folder of an unknown user") from None
    return value


def _blend(value: str) -> str:
    for word in value.split():
        _path(f"{word}.bin")
    return value


def blend_members(value: str) -> list[tuple[str, str]]:
    """Returns (weight, path) of each corpus in TRAIN_DATA or VALID_DATA. A missing weight is ''."""
    text = value.strip()
    if text and (Path(text).exists() or Path(f"{text}.bin").is_file()):  # one path, even with spaces
        return [("", text)]
    members, weight = [], ""
    for word in text.split():
        if not weight and not math.isnan(number_in(word)):
            weight = word
            continue
        members.append((weight, word))
        weight = ""
    return members


def names_text(value: str) -> bool:
    """Whether any corpus in TRAIN_DATA or VALID_DATA is text."""
    return any(is_text(name) for _, name in blend_members(value))


def is_prepared_first(value: str) -> bool:
    """Whether any corpus in TRAIN_DATA or VALID_DATA is text or is in an object store."""
    return any(is_text(name) or is_url(name) for _, name in blend_members(value))


def is_text(name: str) -> bool:
    """Whether a corpus is text rather than token files. A corpus is text if `name` is a folder, a file or a
    glob pattern, or if it ends with a data suffix such as .jsonl.
    """
    if not name or name.endswith((".bin", ".idx")) or Path(f"{name}.bin").is_file():
        return False
    path = Path(name).expanduser()
    return path.is_dir() or path.is_file() or bool(ending(name)) or glob.has_magic(name)


Part = Literal["place", "layout", "model", "experts", "learning", "data", "output", "care"]

_INT = "[0-9]{1,9}"
_TERM = rf"(\[?[01](,[01])*\]?(\*{_INT})?)"
_PATTERN = rf"{_TERM}(\+{_TERM})*"
_STAGE = r"\d{1,4}(\*[1-9]\d{0,3})?"
_STAGES = rf"{_STAGE}(,{_STAGE})*"
LayerPattern = Annotated[str, _text(_layer_pattern)]
LayersOrWindowed = Annotated[str, _text(lambda text: None if text == "windowed" else _layer_pattern(text))]
Losses = Annotated[str, _text(_losses)]
RecomputedModules = Annotated[str, _text(partial(_modules, known=RECOMPUTED))]
OffloadedModules = Annotated[str, _text(partial(_modules, known=OFFLOADED))]
Numbers = Annotated[str, _text(_numbers)]
Shares = Annotated[str, _text(lambda text: _numbers(text) if text else None)]
_RULE = "must be a whole number or a comma-separated list of whole numbers"
WholeNumbers = Annotated[str, _text(pattern=rf"({_INT}(,{_INT})*)?", rule=_RULE)]
_RULE = "must be comma-separated ranks such as 0,3, or all"
RankList = Annotated[str, _text(pattern=rf"all|{_INT}(,{_INT})*", rule=_RULE)]
StageLayers = Annotated[str, _text(_stage_layers)]
Timeout = Annotated[str, BeforeValidator(_timeout)]
Iterations = Annotated[str, _text(_iterations)]
IterationsOrShares = Annotated[str, BeforeValidator(read_points)]
PathText = Annotated[str, AfterValidator(_path)]
Stages = Annotated[str, BeforeValidator(read_stages)]
ParameterGroups = Annotated[str, BeforeValidator(read_groups)]
Blend = Annotated[str, AfterValidator(_blend)]
OptionalPositive = Annotated[
    Positive | None, BeforeValidator(lambda value: None if str(value).lower() in ("none", "") else value)
]


def _pattern_terms(pattern: str) -> list[tuple[str, int]]:
    terms = [term.partition("*") for term in pattern.split("+")]
    return [(re.sub(r"[^01]", "", bits), int(times or 1)) for bits, _, times in terms]


def pattern_of(flags: list[bool]) -> str:
    """Converts `flags`, one per layer, to a value of WINDOW_PATTERN or a similar setting."""
    return "1" if all(flags) else ",".join(str(int(flag)) for flag in flags)


@cache  # called thousands of times in a layout search
def layers_of_pattern(pattern: str, num_layers: int, num_first_dense: int) -> tuple[bool, ...]:
    """Returns one bool per layer: true if `pattern` chooses the layer. The first `num_first_dense` layers are
    never chosen. If `pattern` is a list, its length replaces `num_layers`.
    """
    if ":" in pattern:
        chosen_ones, others = map(int, pattern.split(":"))
        chosen = [layer % (chosen_ones + others) < chosen_ones for layer in range(num_layers)]
    elif pattern.isdigit():
        chosen = [layer % int(pattern) == 0 for layer in range(num_layers)]
    else:
        chosen = [bit == "1" for bits, times in _pattern_terms(pattern) for bit in bits * times]
    return tuple(is_chosen and layer >= num_first_dense for layer, is_chosen in enumerate(chosen))


def stage_terms(stages: str) -> list[tuple[int, int]]:
    """Returns the pairs (layers per stage, number of such stages) in text such as 8,9*10,8."""
    terms = [term.partition("*") for term in stages.split(",")]
    return [(int(layers), int(times or 1)) for layers, _, times in terms]


@cache  # called in every iteration
def iteration_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """First and last iteration of each range in text such as 5,10-12. Empty text has no ranges."""
    pairs = (part.partition("-") for part in text.split(",") if part)
    return tuple((int(first), int(last or first)) for first, _, last in pairs)
