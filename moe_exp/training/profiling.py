"""torch profiler traces and GPU memory snapshots of chosen iterations and ranks. No cost when off.

A trace is profile/trace_rank_R_iter_A-B.json.gz in the run folder, for https://ui.perfetto.dev or
chrome://tracing: operators with shapes, CPU memory, and on a GPU its kernels and memory. A snapshot is
profile/memory_rank_R_iter_A-B.pickle, for https://pytorch.org/memory_viz: every allocation of the caching
allocator with its Python stack.
"""

import logging
import time

import torch
from torch.profiler import ProfilerActivity, profile

from moe_exp.config import Config
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import bytes_text
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Recorder:
    """Records PROFILE_ITERS and MEMORY_SNAPSHOT on the ranks of PROFILE_RANKS."""

    def __init__(self, config: Config, runtime: Runtime, folder: RunFolder):
        self._folder, self._rank, self._device = folder.profile, runtime.rank, runtime.device
        is_mine = config.profile_ranks == "all" or str(runtime.rank) in config.profile_ranks.split(",")
        has_memory = is_mine and runtime.device.type == "cuda"
        self._ranges = {
            "trace": iteration_ranges(config.profile_iters if is_mine else ""),
            "memory": iteration_ranges(config.memory_snapshot if has_memory else ""),
        }
        self._begun: dict[str, tuple[int, int]] = {}  # first and last iteration of what is recorded now
        self._last = config.train_iters
        self._profiler: profile | None = None

    def begin(self, iteration: int) -> None:
        """Before an iteration. A run that resumes within a range records the rest."""
        for what, ranges in self._ranges.items():
            lasts = [min(last, self._last) for first, last in ranges if first <= iteration <= last]
            if what not in self._begun and lasts and iteration <= lasts[0]:
                self._begun[what] = (iteration, lasts[0])
                self._start(what)

    def end(self, iteration: int) -> None:
        """After an iteration: writes the files of a completed range."""
        for what, (first, last) in list(self._begun.items()):
            if iteration >= last:
                del self._begun[what]
                try:
                    self._write(what, f"{what}_rank_{self._rank}_iter_{first}-{last}")
                except (OSError, RuntimeError) as error:  # a restarted run would fail at the same iteration
                    logger.warning("no recording in %s: %s", self._folder, error)

    def _start(self, what: str) -> None:
        if what == "memory":
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)  # a few hundred bytes each
            return
        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        activities = [ProfilerActivity.CPU, *on_gpu]
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def _write(self, what: str, name: str) -> None:
        start, profiler = time.monotonic(), self._profiler
        if what == "memory":
            path = self._folder / f"{name}.pickle"
            self._folder.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            assert profiler is not None
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # the kernels of the last iteration
            profiler.stop()
            path = self._folder / f"{name}.json.gz"
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        size, seconds = bytes_text(path.stat().st_size), time.monotonic() - start
        logger.info("wrote %s, %s, in %.1f s", path, size, seconds)
