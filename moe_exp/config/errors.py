"""Errors about settings, and the values that an error's fix suggests. Does not import torch."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from moe_exp.config.setting_types import shown
from moe_exp.host.exit_codes import BAD_INPUT


class ConfigError(ValueError):
    """Invalid settings. Each error is one line (name, value, rule, fix). The job ends with `exit_code`."""

    exit_code = BAD_INPUT

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:  # pickled to other ranks
        return type(self), (self.problems,)


def raise_for(problems: Iterable[str]) -> None:
    """Raises ConfigError with all problems, if there are any."""
    if lines := list(problems):
        raise ConfigError(lines)


def problem(name: str, value: object, rule: str, fix: str) -> str:
    """Formats the error line for a setting: name, value, rule and fix."""
    return f"{name.upper()}={shown(value)}: {rule}. Fix: {fix}."


def setting_error(name: str, value: object, rule: str, fix: str) -> ValueError:
    """Builds a ValueError about a setting or argument; `problem` formats its message."""
    return ValueError(problem(name, value, rule, fix))


def choices(values: list[int]) -> str:
    """Formats allowed values: '4', or 'one of 2, 4, 8'."""
    return str(values[0]) if len(values) == 1 else "one of " + ", ".join(map(str, values))


def divisors(number: int, near: int) -> list[int]:
    """Returns the divisors of `number` that are nearest to `near`, at most eight."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*small, *(number // d for d in small)})
    return sorted(sorted(found, key=lambda d: abs(d - near))[:8])


def multiples(step: int, near: int) -> str:
    """Formats the multiples of `step` below and above `near`, such as '24 or 32'."""
    below = near // step * step
    return " or ".join(str(x) for x in (below, below + step) if x > 0)
