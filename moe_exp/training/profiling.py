"""torch profiler traces and GPU memory snapshots of chosen iterations and ranks. No cost when off.

A trace is profile/trace_rank_R_iter_A-B.json.gz in the run folder, for https://ui.perfetto.dev or
chrome://tracing: operators with shapes, CPU memory, and on a GPU its kernels and memory. A snapshot is
profile/memory_rank_R_iter_A-B.pickle, for https://pytorch.org/memory_viz: every allocation of the caching
allocator with its Python stack.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moe_exp.config import Config
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import bytes_text
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)

_MOST_ALLOCATIONS = 1_000_000  # in a snapshot, a few hundred bytes each


class Recorder:
    """Records PROFILE_ITERS and MEMORY_SNAPSHOT on the ranks of PROFILE_RANKS."""

    def __init__(self, config: Config, runtime: Runtime, folder: RunFolder):
        self._folder, self._rank, self._device = folder.profile, runtime.rank, runtime.device
        is_mine = config.profile_ranks == "all" or str(runtime.rank) in config.profile_ranks.split(",")
        self._to_trace = iteration_ranges(config.profile_iters if is_mine else "")
        self._to_record = iteration_ranges(
            config.memory_snapshot if is_mine and runtime.device.type == "cuda" else ""
        )
        self._traced = self._recorded = (0, -1)  # the last range begun
        self._last = config.train_iters
        self._profiler: profile | None = None
        self._is_recording = False

    def begin(self, iteration: int) -> None:
        """Before an iteration. A run that resumes within a range records the rest."""
        if self._profiler is None and (last := self._last_of(self._to_trace, iteration)):
            self._traced = (iteration, last)
            activities = [
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if self._device.type == "cuda" else []),
            ]
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profiler.start()
        if not self._is_recording and (last := self._last_of(self._to_record, iteration)):
            self._recorded = (iteration, last)
            self._is_recording = True
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def end(self, iteration: int) -> None:
        """After an iteration: writes the files of a completed range."""
        if self._profiler is not None and iteration >= self._traced[1]:
            self._try(partial(self._write_trace, self._profiler))
            self._profiler = None
        if self._is_recording and iteration >= self._recorded[1]:
            self._try(self._write_snapshot)
            self._is_recording = False

    def _last_of(self, ranges: Sequence[tuple[int, int]], iteration: int) -> int:
        """Last iteration of the range around `iteration`, at most TRAIN_ITERS; 0 outside of any range."""
        return next(
            (min(last, self._last) for first, last in ranges if first <= iteration <= min(last, self._last)),
            0,
        )

    def _try(self, write: Callable[[], None]) -> None:
        """Ignores a full disk: a restarted run would fail at the same iteration."""
        try:
            write()
        except (OSError, RuntimeError) as error:
            logger.warning("no recording in %s: %s", self._folder, error)

    def _write_trace(self, profiler: profile) -> None:
        start = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the kernels of the last iteration
        profiler.stop()
        path = self._path("trace", self._traced, "json.gz")
        profiler.export_chrome_trace(str(path))
        self._say(path, start)

    def _write_snapshot(self) -> None:
        start = time.monotonic()
        path = self._path("memory", self._recorded, "pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._say(path, start)

    def _path(self, what: str, iterations: tuple[int, int], ending: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder / f"{what}_rank_{self._rank}_iter_{iterations[0]}-{iterations[1]}.{ending}"

    def _say(self, path: Path, start: float) -> None:
        logger.info(
            "wrote %s, %s, in %.1f s", path, bytes_text(path.stat().st_size), time.monotonic() - start
        )
