"""Expert load over time in a bounded number of columns, for a heatmap of a run of any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_COLUMNS = 120
_CHUNK = 512  # records
DEAD_BELOW = 0.01  # of the fair share

# Keys of one layer in metrics.jsonl; older files lack some.
LAYER_KEYS = (
    "max_over_mean", "dead_fraction", "dropped_fraction", "router_entropy", "top1_weight", "max_vio",
)  # fmt: skip


def number(value: object) -> float:
    """A JSON value as a float; NaN if it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


class LoadHistory:
    """Sums the `experts` of train records into columns of equal numbers of records, layer by layer.

    With more records than `num_records`, the last column gets the rest.
    """

    def __init__(self, num_records: int):
        self._num_records = max(num_records, 1)
        self._num_columns = min(NUM_COLUMNS, self._num_records)
        self._num_seen = 0
        self._waiting: list[tuple[int, float, list[Mapping[str, Any]]]] = []
        self._bounds = np.full((self._num_columns, 2), np.nan)
        self._means: list[Floats] = []
        self.layers: list[int] = []

    def add(self, iteration: float, experts: list[Mapping[str, Any]]) -> None:
        """Adds one record's `experts`; call `finish` after the last one."""
        column = min(self._num_seen * self._num_columns // self._num_records, self._num_columns - 1)
        self._waiting.append((column, iteration, experts))
        self._num_seen += 1
        if len(self._waiting) == _CHUNK:
            self.finish()

    def finish(self) -> None:
        """Sums what was added. Works in chunks, because numpy's cost per call would dominate."""
        waiting, self._waiting = self._waiting, []
        if waiting and not self._count(waiting):
            for one in waiting:  # their shapes differ
                if not self._count([one]):
                    self._means.append(np.full((1, len(LAYER_KEYS)), np.nan))

    def _count(self, records: Sequence[tuple[int, float, list[Mapping[str, Any]]]]) -> bool:
        """Adds records shaped like the first; returns False and adds nothing if one differs."""
        try:
            of_records = [experts for _, _, experts in records]
            layers = [[layer["layer"] for layer in experts] for experts in of_records]
            counts = [[layer["tokens_per_expert"] for layer in experts] for experts in of_records]
            values = [[[layer.get(key) for layer in experts] for key in LAYER_KEYS] for experts in of_records]
            counts_RLE, values_RKL = np.array(counts, dtype=np.float64), np.array(values, dtype=np.float64)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        if counts_RLE.ndim != 3 or not counts_RLE.size or not np.isfinite(counts_RLE).all():
            return False
        if not self.layers:
            self._begin(layers[0], counts_RLE.shape[2])
        if any(row != self.layers for row in layers) or counts_RLE.shape[1:] != self._loads_CLE.shape[1:]:
            return False
        self._sum(np.array([column for column, _, _ in records]), counts_RLE, values_RKL)
        for column, iteration, _ in records:
            self._bounds[column] = np.fmin(self._bounds[column, 0], iteration), iteration
        return True

    def _begin(self, layers: list[int], num_experts: int) -> None:
        self.layers = layers
        self._loads_CLE = np.zeros((self._num_columns, len(layers), num_experts))
        self._sums_CKL = np.zeros((self._num_columns, len(LAYER_KEYS), len(layers)))
        self._counts_CKL = np.zeros((self._num_columns, len(LAYER_KEYS), len(layers)))

    def _sum(self, columns_R: NDArray[np.int64], counts_RLE: Floats, values_RKL: Floats) -> None:
        shares_RLE = counts_RLE * counts_RLE.shape[2] / np.maximum(counts_RLE.sum(axis=2, keepdims=True), 1)
        # Older files lack the first two of LAYER_KEYS; compute them from the counts.
        computed = (shares_RLE.max(axis=2), (shares_RLE < DEAD_BELOW).mean(axis=2))
        for index, from_counts_RL in enumerate(computed):
            missing = ~np.isfinite(values_RKL[:, index])
            values_RKL[:, index][missing] = from_counts_RL[missing]
        known_RKL = np.isfinite(values_RKL)
        sums_RKL = np.where(known_RKL, values_RKL, 0)
        np.add.at(self._loads_CLE, columns_R, counts_RLE)
        np.add.at(self._sums_CKL, columns_R, sums_RKL)
        np.add.at(self._counts_CKL, columns_R, known_RKL)
        means_RK = _mean(sums_RKL.sum(axis=2), known_RKL.sum(axis=2))
        means_RK[:, 0] = np.fmax.reduce(values_RKL[:, 0], axis=1)
        self._means.append(means_RK)

    def record_means(self) -> dict[str, Floats]:
        """LAYER_KEYS of each record, mean over layers (`max_over_mean`: maximum) [num_added]."""
        table = np.concatenate(self._means) if self._means else np.empty((0, len(LAYER_KEYS)))
        return {key: table[:, index] for index, key in enumerate(LAYER_KEYS)}

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return self._loads_CLE.shape[2]

    def columns(self, most: int = NUM_COLUMNS) -> tuple[Floats, Floats, dict[str, Floats]]:
        """The history in at most `most` columns, oldest first.

        Returns:
            First and last iteration [C, 2]; load relative to the fair share [C, L, E], 1 for an expert with
            tokens*k/E of its layer; for each of LAYER_KEYS the mean over a column's records [C, L] or NaN.
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


def _mean(sums: Floats, counts: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)
