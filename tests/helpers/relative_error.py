"""The measure of comparisons: norm of the difference over norm of the reference, per tensor, in float64."""

import math
from collections.abc import Mapping

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; infinite where only the reference is zero, or anything not finite."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, size = (actual - expected).norm().item(), expected.norm().item()
    if not math.isfinite(difference):
        return math.inf
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def relative_errors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Of every tensor; both have to have the same names, and no gradient may be missing."""
    assert actual.keys() == expected.keys(), f"names differ: {sorted(actual.keys() ^ expected.keys())}"
    errors = {}
    for name, reference in expected.items():
        value = actual[name]
        assert value is not None and reference is not None, f"{name}: there is no tensor"
        errors[name] = relative_error(value, reference)
    return errors


def assert_equal_to(
    limit: float, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> float:
    """Fails where an error is not below `limit`, naming every such tensor. Returns the largest error."""
    errors = relative_errors(actual, expected)
    wrong = {name: error for name, error in errors.items() if not error < limit}
    assert not wrong, f"relative errors not below {limit:g}: {wrong}"
    # A reference of zeros would prove nothing.
    zero = [name for name, reference in expected.items() if reference is None or not reference.any()]
    assert not zero, f"the reference is zero: {zero}"
    return max(errors.values())
