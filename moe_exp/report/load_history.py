"""Expert load over time in a bounded number of columns: what a heatmap can show of a run of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_COLUMNS = 120
DEAD_BELOW = 0.01  # of the fair share

# Of one layer, as metrics.jsonl has them; readers of older files find some of them missing.
LAYER_KEYS = ("max_over_mean", "dead_fraction", "dropped_fraction", "router_entropy", "top1_weight")


def number(value: object) -> float:
    """A JSON value as a float, NaN for what is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


class LoadHistory:
    """Sums the `experts` of train records into columns of equal numbers of records, layer by layer.

    Args:
        num_records: about how many records will come; with more of them the last column gets the rest.
    """

    def __init__(self, num_records: int):
        self._num_records = max(num_records, 1)
        self._num_columns = min(NUM_COLUMNS, self._num_records)
        self._num_seen = 0
        self._bounds = np.full((self._num_columns, 2), np.nan)
        self.layers: list[int] = []

    def add(self, iteration: float, experts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Takes one record's `experts` and returns that record's means over the layers, with the largest `max_over_mean`."""
        column = min(self._num_seen * self._num_columns // self._num_records, self._num_columns - 1)
        self._num_seen += 1
        counts_LE = self._counts(experts)
        if counts_LE is None:
            return {}
        values_KL = np.array([[number(layer.get(key)) for layer in experts] for key in LAYER_KEYS])
        share_LE = counts_LE * counts_LE.shape[1] / np.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
        _fill(values_KL[0], share_LE.max(axis=1))
        _fill(values_KL[1], (share_LE < DEAD_BELOW).mean(axis=1))
        self._loads_CLE[column] += counts_LE
        known_KL = np.isfinite(values_KL)
        self._sums_CKL[column] += np.where(known_KL, values_KL, 0)
        self._counts_CKL[column] += known_KL
        self._bounds[column] = np.fmin(self._bounds[column, 0], iteration), iteration
        means = _mean(np.where(known_KL, values_KL, 0).sum(axis=1), known_KL.sum(axis=1))
        return dict(zip(LAYER_KEYS, means.tolist(), strict=True)) | {"max_over_mean": float(np.fmax.reduce(values_KL[0]))}

    def _counts(self, experts: Sequence[Mapping[str, Any]]) -> Floats | None:
        """Tokens of each layer and expert; None for a record that does not look like the first one."""
        try:
            layers = [int(layer["layer"]) for layer in experts]
            counts_LE = np.array([layer["tokens_per_expert"] for layer in experts], dtype=np.float64)
        except (KeyError, TypeError, ValueError):
            return None
        if counts_LE.ndim != 2 or not counts_LE.size:
            return None
        if not self.layers:
            self.layers = layers
            num_layers, num_experts = counts_LE.shape
            self._loads_CLE = np.zeros((self._num_columns, num_layers, num_experts))
            self._sums_CKL = np.zeros((self._num_columns, len(LAYER_KEYS), num_layers))
            self._counts_CKL = np.zeros((self._num_columns, len(LAYER_KEYS), num_layers))
        is_like_first = layers == self.layers and counts_LE.shape == self._loads_CLE.shape[1:]
        return counts_LE if is_like_first else None

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self._loads_CLE.shape[2]

    def columns(self, most: int = NUM_COLUMNS) -> tuple[Floats, Floats, dict[str, Floats]]:
        """The history in at most `most` columns, oldest first.

        Returns:
            First and last iteration [C, 2]; load relative to the fair share [C, L, E], 1 for an expert with tokens*k/E of its
            layer; and by name the mean of each of LAYER_KEYS over the records of a column [C, L], NaN where it was not recorded.
        """
        used = np.flatnonzero(np.isfinite(self._bounds[:, 0]))
        parts = np.array_split(used, min(most, len(used)))
        bounds = np.array([[self._bounds[part[0], 0], self._bounds[part[-1], 1]] for part in parts])
        loads_CLE = np.array([self._loads_CLE[part].sum(axis=0) for part in parts])
        sums_CKL = np.array([self._sums_CKL[part].sum(axis=0) for part in parts])
        counts_CKL = np.array([self._counts_CKL[part].sum(axis=0) for part in parts])
        shares_CLE = loads_CLE * self.num_experts / np.maximum(loads_CLE.sum(axis=2, keepdims=True), 1)
        means_CKL = _mean(sums_CKL, counts_CKL)
        return bounds, shares_CLE, {key: means_CKL[:, index] for index, key in enumerate(LAYER_KEYS)}


def _fill(values: Floats, from_counts: Floats) -> None:
    """What an older file lacks follows from its counts."""
    missing = ~np.isfinite(values)
    values[missing] = from_counts[missing]


def _mean(sums: Floats, counts: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)
