"""Reads a run folder for the report: settings, curves, events, and expert load over time.

Accepts incomplete files and files of any version: all keys are optional, and an incomplete last line is
skipped. Files are read once, without keeping the records in memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from moe_exp.config import Config, problem, raise_for
from moe_exp.config.loading import known_settings, recorded_settings
from moe_exp.host.files import read_json, regular
from moe_exp.host.progress import progress
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.report.follower import Follower, number
from moe_exp.runs.records import parsed_record
from moe_exp.runs.run_folder import RunFolder

Floats = NDArray[np.float64]

NUM_COLUMNS = 120
_CHUNK = 512  # records per numpy call
DEAD_BELOW = 0.01  # relative to the fair share
SPIKE_FACTOR, SPIKE_WINDOW, _SPIKE_FEWEST = 3.0, 50, 10

# Keys of a layer in metrics.jsonl; files of older versions lack some.
LAYER_KEYS = (
    "max_over_mean", "dead_fraction", "dropped_fraction", "router_entropy", "top1_weight", "max_vio",
)  # fmt: skip
# x axes: keys of the records.
AXES = ("iteration", "consumed_tokens", "consumed_flops", "training_seconds")
CURVES = (
    "lm_loss", "mtp_loss", "load_balancing_loss", "z_loss", "learning_rate", "grad_norm",
    "tokens_per_second", "tflops_per_gpu", "elapsed_time_per_iteration_ms", "peak_memory_bytes",
    "memory_allocated_bytes",
)  # fmt: skip
VALID_CURVES = ("lm_loss", "lm_loss_ppl", "lm_loss_bits_per_byte", "ema_lm_loss")
_TRAIN_COLUMNS, _VALID_COLUMNS = (*AXES, *CURVES, "consumed_samples"), (*AXES, *VALID_CURVES)


class LoadHistory:
    """Sums each layer's expert loads in time columns; each column covers about the same number of records."""

    def __init__(self, num_records: int):
        self._num_records = max(num_records, 1)
        self._num_columns = min(NUM_COLUMNS, self._num_records)
        self._num_seen = 0
        self._waiting: list[tuple[int, float, list[Mapping[str, Any]]]] = []
        self._bounds = np.full((self._num_columns, 2), np.nan)
        self._means: list[Floats] = []
        self.layers: list[int] = []  # empty without expert records

    def add(self, iteration: float, experts: list[Mapping[str, Any]]) -> None:
        """Adds one record's `experts`; call `finish` after the last record."""
        # a running job may have written records since they were counted: the last column gets them
        column = min(self._num_seen * self._num_columns // self._num_records, self._num_columns - 1)
        self._waiting.append((column, iteration, experts))
        self._num_seen += 1
        if len(self._waiting) == _CHUNK:
            self.finish()

    def finish(self) -> None:
        """Sums the records added since the last `finish`, all at once because numpy calls have overhead."""
        waiting, self._waiting = self._waiting, []
        if waiting and not self._count(waiting):
            for one in waiting:  # their shapes differ
                if not self._count([one]):
                    self._means.append(np.full((1, len(LAYER_KEYS)), np.nan))

    def _count(self, records: Sequence[tuple[int, float, list[Mapping[str, Any]]]]) -> bool:
        """Adds `records`; adds nothing and returns False if a shape differs from the first record's shape."""
        try:
            of_records = [experts for _, _, experts in records]
            layers = [[layer["layer"] for layer in experts] for experts in of_records]
            counts = [[layer["tokens_per_expert"] for layer in experts] for experts in of_records]
            values = [[[layer.get(key) for layer in experts] for key in LAYER_KEYS] for experts in of_records]
            counts_RLE, values_RKL = np.array(counts, dtype=np.float64), np.array(values, dtype=np.float64)
        # another version, or a damaged record
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        if counts_RLE.ndim != 3 or not counts_RLE.size or not np.isfinite(counts_RLE).all():
            return False
        if not self.layers:
            self.layers = layers[0]
            self._loads_CLE = np.zeros((self._num_columns, *counts_RLE.shape[1:]))
            self._sums_CKL = np.zeros((self._num_columns, len(LAYER_KEYS), len(self.layers)))
            self._counts_CKL = np.zeros_like(self._sums_CKL)
        if any(row != self.layers for row in layers) or counts_RLE.shape[1:] != self._loads_CLE.shape[1:]:
            return False
        shares_RLE = counts_RLE * counts_RLE.shape[2] / np.maximum(counts_RLE.sum(axis=2, keepdims=True), 1)
        # Files of older versions lack the first two LAYER_KEYS: compute them from the counts.
        computed = (shares_RLE.max(axis=2), (shares_RLE < DEAD_BELOW).mean(axis=2))
        for index, from_counts_RL in enumerate(computed):
            _fill(values_RKL[:, index], from_counts_RL)
        known_RKL = np.isfinite(values_RKL)
        sums_RKL = np.where(known_RKL, values_RKL, 0)
        # `add.at` adds a repeated column every time, `+=` only once
        columns_R = np.array([column for column, _, _ in records])
        np.add.at(self._loads_CLE, columns_R, counts_RLE)
        np.add.at(self._sums_CKL, columns_R, sums_RKL)
        np.add.at(self._counts_CKL, columns_R, known_RKL)
        means_RK = _mean(sums_RKL.sum(axis=2), known_RKL.sum(axis=2))
        # max_over_mean, the first of LAYER_KEYS, is the maximum over layers instead of the mean
        means_RK[:, 0] = np.fmax.reduce(values_RKL[:, 0], axis=1)
        self._means.append(means_RK)
        for column, iteration, _ in records:
            self._bounds[column] = np.fmin(self._bounds[column, 0], iteration), iteration
        return True

    def record_means(self) -> dict[str, Floats]:
        """Maps LAYER_KEYS to values per record: the mean over layers, or for `max_over_mean` the maximum."""
        table = np.concatenate(self._means) if self._means else np.empty((0, len(LAYER_KEYS)))
        return {key: table[:, index] for index, key in enumerate(LAYER_KEYS)}

    @property
    def num_experts(self) -> int:
        return self._loads_CLE.shape[2]

    def columns(self, most: int = NUM_COLUMNS) -> tuple[Floats, Floats, dict[str, Floats]]:
        """The load history merged into at most `most` columns, oldest first.

        Returns:
            For C columns, L layers and E experts: each column's first and last iteration [C, 2]; the load
            [C, L, E] relative to the fair share tokens*k/E; a dict that maps each key in
            LAYER_KEYS to the means [C, L] over a column's records (NaN if no record has a value).
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


@dataclass
class RunRecords:
    """Contents of a run folder. Each curve is an array [num_records], stored by key."""

    name: str  # unique among the runs of a report
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)  # from the latest start; empty if unreadable
    config: Config | None = None  # validated settings; None if invalid in this version
    train: dict[str, Floats] = field(default_factory=dict)  # AXES, CURVES, means over layers `experts/<key>`
    valid: dict[str, Floats] = field(default_factory=dict)  # AXES and VALID_CURVES
    events: list[dict[str, Any]] = field(default_factory=list)
    load: LoadHistory = field(default_factory=lambda: LoadHistory(1))
    notes: list[str] = field(default_factory=list)  # problems when reading, one sentence each
    starts: list[dict[str, Any]] = field(default_factory=list)  # from provenance.json, oldest first
    ranks: list[dict[str, Any]] = field(default_factory=list)  # of ranks.json, latest times of each rank
    text: str = ""  # content of notes.md
    samples: list[tuple[str, str]] = field(default_factory=list)  # prompts and texts in generated.jsonl
    written: datetime | None = None  # modification time of metrics.jsonl, with time zone
    ended: str | None = None  # status of the latest start; None without a recorded end

    @property
    def kind(self) -> str:
        """`dense`, or the MOE_TYPE."""
        if not self.settings:
            return "MoE" if self.load.layers else "unknown"
        return str(self.settings.get("moe_type", "MoE")) if self.settings.get("use_moe") else "dense"

    @property
    def is_moe(self) -> bool:
        return self.kind not in ("dense", "unknown")

    @property
    def num_records(self) -> int:
        """Number of train records."""
        return len(self.train["iteration"])

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed`, `running`, `no end recorded`, or `no records`."""
        if self.ended:
            return self.ended
        if not self.num_records and not self.events:
            return "no records"
        age = (datetime.now(timezone.utc) - self.written).total_seconds() if self.written else math.inf
        return "running" if age < 600 else "no end recorded"  # wrote within ten minutes

    def last(self, key: str) -> float:
        """Last finite value of a train curve; NaN if there is no finite value."""
        return latest(self.train[key])


def latest(values: Floats) -> float:
    """The last finite value; NaN if there is no finite value."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")


def spikes(values: Floats) -> list[int]:
    """Indices of values > SPIKE_FACTOR * median of the SPIKE_WINDOW values before (if >= 10 are finite)."""
    found: list[int] = []
    if len(values) <= _SPIKE_FEWEST:
        return found
    # shifted by one: a value is compared with the values before it, not with itself
    padded = np.concatenate([np.full(SPIKE_WINDOW, np.nan), values[:-1]])
    windows = np.lib.stride_tricks.sliding_window_view(padded, SPIKE_WINDOW)
    for start in range(0, len(values), 8192):  # in parts, because the median copies its input
        part = windows[start : start + 8192]
        enough = np.isfinite(part).sum(axis=1) >= _SPIKE_FEWEST
        limits = np.full(len(part), np.nan)
        limits[enough] = SPIKE_FACTOR * np.nanmedian(part[enough], axis=1)
        found += (start + np.flatnonzero(values[start : start + 8192] > limits)).tolist()
    return found


def read_runs(paths: Sequence[Path]) -> list[RunRecords]:
    """Reads each run folder once. Raises ConfigError before reading if a path is not a run folder."""
    folders = list({path.resolve(): path for path in paths}.values())
    raise_for(run_problems(paths))
    metrics = [RunFolder(path).metrics for path in folders]
    total = sum(path.stat().st_size for path in metrics if path.exists())
    # a progress bar only for large files
    shown = progress("reading metrics", total) if total >= 1 << 26 else nullcontext(lambda num_bytes: None)
    with shown as advance:
        runs = [read_run(path, advance) for path in folders]
    for run, name in zip(runs, distinct_names(folders), strict=True):
        run.name = name
    return runs


def run_problems(paths: Sequence[Path]) -> list[str]:
    """Error messages for paths that are not run folders; does not read any run."""
    found = []
    for path in dict.fromkeys(paths):
        rule = "is not a run folder: it contains neither config.yaml nor metrics.jsonl"
        fix = "give a run folder, RUN_DIR/RUN_NAME, created by moe-exp train"
        if not path.is_dir():
            rule = "is a file, not a run folder" if path.exists() else "folder not found"
        elif RunFolder(path).config.exists() or RunFolder(path).metrics.exists():
            continue
        elif inside := sorted(child.parent.name for child in path.glob("*/metrics.jsonl")):
            fix = f"give the run folders in it: {', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}"
            fix += f", or the pattern '{path}/*' in quotes"
        found.append(problem("run", path, rule, fix))
    return found


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Unique names of run folders. A repeated name gets the parent folder's name and, if needed, a number."""
    folders = [path.resolve() for path in paths]
    plain = [folder.name for folder in folders]
    names = [one.name if plain.count(one.name) < 2 else f"{one.parent.name}/{one.name}" for one in folders]
    return [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, start=1)]


def read_run(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> RunRecords:
    """Reads one run folder, which may be empty; calls `advance` with the number of bytes read."""
    run = RunRecords(name=path.resolve().name, path=path)
    reader = _Reader(run)
    follower = Follower(path, reader.add, advance)
    folder = follower.folder
    _read_settings(run, folder.config)
    # Count the lines first, because the column of a record depends on their number.
    if folder.metrics.exists():
        with regular(folder.metrics).open("rb") as file:
            num_lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
        run.load = LoadHistory(num_lines)
    follower.refresh()
    if follower.trouble:
        run.notes.append(f"metrics.jsonl cannot be read ({follower.trouble})")
    if follower.modified is not None:
        run.written = datetime.fromtimestamp(follower.modified, timezone.utc)
    if num_bad := follower.watched.num_unreadable_lines:
        run.notes.append(f"metrics.jsonl: {num_bad} lines are not records and are left out")
    reader.finish()
    run.ended = follower.status()
    with suppress(OSError, ValueError, LookupError, TypeError):  # the run has not started yet
        run.starts = [one for one in read_json(folder.provenance)["starts"] if isinstance(one, dict)]
    with suppress(OSError, ValueError, LookupError, TypeError):  # a single rank, or SLOW_RANK_EVERY=0
        run.ranks = [one for one in read_json(folder.ranks)["ranks"] if isinstance(one, dict)]
    # files that users put into a run folder for the report
    run.text = _text_of(run, "notes.md").strip()
    for line in _text_of(run, "generated.jsonl").splitlines():
        sample = parsed_record(line) or {}
        if isinstance(text := sample.get("text"), str):
            run.samples.append((str(sample.get("prompt", "")), text))
    return run


def _text_of(run: RunRecords, name: str) -> str:
    try:
        with regular(run.path / name).open(encoding="utf-8", errors="replace") as file:
            return file.read(200_000)
    except FileNotFoundError:
        return ""
    except OSError as error:
        run.notes.append(f"{name} cannot be read ({error.strerror or error})")
        return ""


def _read_settings(run: RunRecords, path: Path) -> None:
    if not path.exists():
        run.notes.append("config.yaml is missing: settings, parameters and FLOPs are unknown")
        return
    try:
        run.settings = recorded_settings(path)
    except ValueError as error:
        run.notes.append(f"config.yaml cannot be read ({' '.join(str(error).split())[:200]})")
        return
    if run.settings.get("attention_flops") == "full":
        run.notes.append("its FLOPs and TFLOP/s include masked attention scores (ATTENTION_FLOPS=full)")
    try:
        run.config = Config(**known_settings(run.settings))
    except ValidationError as error:
        names = ", ".join(str(item["loc"][0]) for item in error.errors() if item["loc"])
        why = names or "incompatible settings"
        run.notes.append(f"config.yaml is not valid in this version ({why}): parameters are unknown")


class _Reader:
    """Collects the records of a run."""

    def __init__(self, run: RunRecords):
        self.run = run
        self.train, self.valid = list[list[Any]](), list[list[Any]]()
        self.with_experts: list[int] = []
        self.last_iteration, self.num_out_of_order = -math.inf, 0

    def add(self, record: Mapping[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "valid":
            self.valid.append([record.get(key) for key in _VALID_COLUMNS])
        elif kind == "event":
            self.run.events.append(dict(record))
        if kind != "train":
            return
        iteration = number(record.get("iteration"))
        # curves require an increasing x
        if iteration is None or iteration <= self.last_iteration:
            self.num_out_of_order += 1
            return
        self.last_iteration = iteration
        if (experts := record.get("experts")) and isinstance(experts, list):
            self.with_experts.append(len(self.train))
            self.run.load.add(iteration, experts)
        self.train.append([record.get(key) for key in _TRAIN_COLUMNS])

    def finish(self) -> None:
        """Sets the run's arrays, and computes axes that are missing in files of older versions."""
        run = self.run
        run.train, run.valid = _arrays(self.train, _TRAIN_COLUMNS), _arrays(self.valid, _VALID_COLUMNS)
        run.load.finish()
        for key, means in run.load.record_means().items():
            values = np.full(len(self.train), np.nan)
            values[self.with_experts] = means
            run.train[f"experts/{key}"] = values
        if self.num_out_of_order:
            rule = f"{self.num_out_of_order} train records are out of order"
            run.notes.append(f"metrics.jsonl: {rule} and are left out")
        train, valid = run.train, run.valid
        if run.config:
            _fill(train["consumed_flops"], train["consumed_samples"] * flops_per_iteration(run.config, 1))
        if seq_len := number(run.settings.get("seq_len")):
            _fill(train["consumed_tokens"], train["consumed_samples"] * seq_len)
        milliseconds = train["elapsed_time_per_iteration_ms"]
        if np.isfinite(milliseconds).any():
            # a record's time is the mean over the iterations since the previous record
            complete = np.where(np.isfinite(milliseconds), milliseconds, np.nanmedian(milliseconds))
            summed = np.cumsum(complete * np.diff(train["iteration"], prepend=0)) / 1e3
            _fill(train["training_seconds"], summed)
            if (np.diff(train["training_seconds"]) < 0).any():  # a run started by an older version
                train["training_seconds"] = summed
        for key in AXES[1:]:
            known = np.isfinite(train[key])
            if known.any():
                at, values = train["iteration"][known], train[key][known]
                # usage before the first record is unknown
                _fill(valid[key], np.interp(valid["iteration"], at, values, left=np.nan))
        _fill(valid["lm_loss_ppl"], np.exp(np.minimum(valid["lm_loss"], 20)))


def _arrays(rows: list[list[Any]], keys: Sequence[str]) -> dict[str, Floats]:
    try:
        table = np.array(rows, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        table = np.array([[number(value) for value in row] for row in rows], dtype=np.float64)
    table = table.reshape(len(rows), len(keys))
    table[~np.isfinite(table)] = np.nan
    return {key: table[:, index].copy() for index, key in enumerate(keys)}


def _fill(values: Floats, other: Floats) -> None:
    missing = ~np.isfinite(values)
    values[missing] = other[missing]
