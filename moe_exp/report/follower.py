"""Follows a run's metrics.jsonl. The file may be missing at first and may still grow, and a resume may
truncate it.

Each poll reads only appended lines, so that files with 100,000 lines stay cheap.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from moe_exp.host.files import read_json, read_yaml, regular
from moe_exp.runs.records import Record, fast_record
from moe_exp.runs.run_folder import RunFolder

LAST_RECORDS = 2000  # losses kept for the plot
_CHUNK_BYTES = 1 << 22
_TAIL_BYTES = 8192  # a whole record of a small model: the ends of different records may be equal


class WorstLayer(NamedTuple):
    """One MoE layer of a train record. `layer` starts at 1. `dropped` is a fraction. None: not measured."""

    layer: int
    max_over_mean: float | None
    num_dead: int  # experts with less than 1% of the layer's mean load
    num_experts: int
    dropped: float | None
    entropy: float | None


@dataclass
class Watched:
    """State of a run according to its records. Losses are in nats per token; None means not finite."""

    num_train: int = 0
    # (iteration, loss)
    losses: deque[tuple[int, float | None]] = field(default_factory=lambda: deque(maxlen=LAST_RECORDS))
    interval_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=20))
    train: Record = field(default_factory=dict)  # the latest train record
    valid: Record = field(default_factory=dict)  # the latest valid record
    iteration: int = 0
    since_iteration: int = 0  # iteration of the latest train record, or of a later start
    num_unreadable_lines: int = 0
    num_not_finite: int = 0
    start_time: str = ""  # time of the latest start or resume, ISO 8601
    end: str | None = None  # status of the `end` event after that start

    @property
    def usual_interval_seconds(self) -> float | None:
        """Median time between the latest train records; None before the first record."""
        return statistics.median(self.interval_seconds) if self.interval_seconds else None

    def take(self, record: Mapping[str, Any]) -> bool:
        """Adds the next record; returns False if it is invalid."""
        iteration = record.get("iteration")
        if not isinstance(iteration, int):
            self.num_unreadable_lines += 1
            return False
        kind, name = record.get("kind"), record.get("event")
        if kind == "event":
            self.events.append(dict(record))
            if name in ("start", "resume"):
                self.end, self.since_iteration, self.start_time = None, iteration, str(record.get("time", ""))
            elif name == "end":
                self.end = str(record.get("status", "ended"))
            else:  # do not set `iteration`: a checkpoint saved in the background is logged late
                return True
        elif kind == "valid":
            self.valid = dict(record)
        elif kind == "train":
            # the first record after a start covers fewer iterations
            num_iterations = max(1, iteration - self.since_iteration)
            self.num_train += 1
            self.train, self.since_iteration = dict(record), iteration
            loss = number(record.get("lm_loss"))
            self.num_not_finite += loss is None
            self.losses.append((iteration, loss))
            milliseconds = number(record.get("elapsed_time_per_iteration_ms"))
            if milliseconds is not None:
                self.interval_seconds.append(milliseconds / 1000 * num_iterations)
        self.iteration = iteration
        return True


class Follower:
    """Follows one run.

    Args:
        path: run folder or its metrics.jsonl, which may not exist yet.
        also: called with every record, and again with all records if the file was rewritten.
        advance: called after every read with the number of bytes read.
    """

    def __init__(
        self,
        path: Path,
        also: Callable[[Record], None] = lambda record: None,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ):
        self._also, self._advance = also, advance
        self.folder = RunFolder(path.parent if path.name == "metrics.jsonl" else path)
        self.name = self.folder.path.resolve().name
        self.trouble: str | None = None  # read error of an existing file
        self.modified: float | None = None  # modification time (seconds since 1970); None without a file
        self.watched, self._offset, self._tail = Watched(), 0, b""
        self._read: dict[Path, tuple[int, dict[str, Any]]] = {}

    def refresh(self) -> None:
        """Reads the lines appended since the last call. Stores a read error in `trouble`."""
        self.trouble = None
        try:
            with regular(self.folder.metrics).open("rb") as file:
                # Other bytes before the last position mean that the file was rewritten: read it again.
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self.watched, self._offset, self._tail = Watched(), 0, b""
                file.seek(self._offset)
                while chunk := file.read(_CHUNK_BYTES):
                    # an incomplete line, or one longer than a chunk
                    whole = chunk[: chunk.rfind(b"\n") + 1] or chunk + file.readline()
                    if not whole.endswith(b"\n"):
                        break
                    for line in filter(bytes.strip, whole.splitlines()):
                        record = fast_record(line)
                        if record is None:
                            self.watched.num_unreadable_lines += 1
                        elif self.watched.take(record):
                            self._also(record)
                    self._advance(len(whole))
                    self._offset += len(whole)
                    self._tail = (self._tail + whole)[-_TAIL_BYTES:]
                    file.seek(self._offset)
                self.modified = self.folder.metrics.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            self.modified = None
            self.watched, self._offset, self._tail = Watched(), 0, b""
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def settings(self) -> dict[str, Any]:
        return self._content(self.folder.config)

    def _content(self, path: Path) -> dict[str, Any]:
        """Content of a file, read again only after a change. Empty if the file is missing or unreadable."""
        try:
            changed = path.stat().st_mtime_ns
            if path not in self._read or self._read[path][0] != changed:
                found = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
                self._read[path] = (changed, found if isinstance(found, dict) else {})
        except (OSError, ValueError):
            return {}
        return self._read[path][1]

    def age_seconds(self) -> float | None:
        """Time since the file was last written; None without a file. Clipped at 0: clocks may differ."""
        return None if self.modified is None else max(0.0, time.time() - self.modified)

    def status(self) -> str | None:
        """Final status (finished, stopped or failed); None if the run may still be running.

        A killed process writes no `end` event; the status then comes from the launcher's summary.json.
        """
        if self.modified is None:
            return None
        with suppress(KeyError, IndexError, TypeError, ValueError):
            latest = self._content(self.folder.provenance)["starts"][-1]["time"]
            if datetime.fromisoformat(latest) > datetime.fromisoformat(self.watched.start_time):
                return None  # a new start without a record yet: `end` belongs to the previous start
        if self.watched.end:
            return self.watched.end
        with suppress(OSError):
            if self.folder.summary.stat().st_mtime >= self.modified:
                status = self._content(self.folder.summary).get("status")
                return str(status) if status else None
        return None

    def is_late(self) -> bool:
        """Whether an unfinished run has written nothing for 10 s and 10 usual intervals between records."""
        age, usual = self.age_seconds(), self.watched.usual_interval_seconds
        if age is None or usual is None or self.status():
            return False
        # In small runs, an evaluation or a checkpoint may take longer than ten iterations.
        return age > max(10.0, 10.0 * usual)


def number(value: Any) -> float | None:
    """`value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number_text(value: Any, form: str, factor: float = 1.0) -> str:
    """Formats a finite number multiplied by `factor`; returns a dash for anything else."""
    known = number(value)
    return "-" if known is None else format(known * factor, form)


def layers_by_load(record: Mapping[str, Any]) -> list[WorstLayer]:
    """MoE layers of a train record, sorted by the load of each layer's busiest expert."""
    found = []
    # records of another version, or edited by hand, may contain anything
    for layer in (one for one in _list(record.get("experts")) if isinstance(one, dict)):
        counts = map(number, _list(layer.get("tokens_per_expert")))
        tokens = [count for count in counts if count is not None]
        keys = ("max_over_mean", "dropped_fraction", "router_entropy")
        peak, dropped, entropy = (number(layer.get(key)) for key in keys)
        index = layer["layer"] if isinstance(layer.get("layer"), int) else 0
        fair = sum(tokens) / max(1, len(tokens))
        num_dead = sum(count < 0.01 * fair for count in tokens)
        found.append(WorstLayer(index, peak, num_dead, len(tokens), dropped, entropy))
    return sorted(found, key=lambda layer: -(layer.max_over_mean or 0.0))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
