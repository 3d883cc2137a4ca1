"""Suggestions for settings that must divide each other: valid divisors and multiples."""

import math
from collections.abc import Iterator

from moe_exp.config.settings import Config


def choices(values: list[int]) -> str:
    """'4', or 'one of 2, 4, 8'."""
    return str(values[0]) if len(values) == 1 else "one of " + ", ".join(map(str, values))


def divisors(number: int, near: int) -> list[int]:
    """The divisors of a number, at most the eight around `near`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = sorted({*small, *(number // d for d in small)})
    return sorted(sorted(found, key=lambda d: abs(d - near))[:8])


def multiples(step: int, near: int) -> str:
    """'24 or 32': the multiples of `step` around `near`."""
    below = near // step * step
    return " or ".join(str(x) for x in (below, below + step) if x > 0)


def must_divide(c: Config, name: str, whole_name: str, whole: int) -> Iterator[str]:
    """One problem if setting `name` does not divide `whole`."""
    value = getattr(c, name)
    if whole % value:
        fix = f"set {name.upper()} to {choices(divisors(whole, value))}"
        yield c.problem(name, f"does not divide {whole_name}={whole}", fix)
