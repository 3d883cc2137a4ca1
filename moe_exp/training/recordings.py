"""Profiler traces, GPU memory snapshots and tensor dumps of chosen iterations and ranks.
They cost nothing when off.

    RUN/profile/trace_rank_R_iter_A-B.json.gz    PROFILE_ITERS, for ui.perfetto.dev or chrome://tracing:
        operators with shapes and CPU memory; on a GPU, also kernels and GPU memory
    RUN/profile/memory_rank_R_iter_A-B.pickle    MEMORY_SNAPSHOT, for https://pytorch.org/memory_viz: every
        allocation of the caching allocator with its Python stack
    RUN/dumps/iter_0000010/rank_00003.safetensors    DUMP_ITERS, after the optimizer step of iteration 10:
        NAME                     this rank's shard of a parameter; layers are numbered across pipeline stages
        gradient of NAME         as the optimizer uses it: reduced over the replicas and clipped
        main weights of NAME     fp32, only with DTYPE=bf16 or fp16
        exp_avg of NAME, ...     the optimizer's moments and, with EMA_DECAY, the weight average (ema), fp32

With the distributed optimizer, each tensor except NAME itself covers only this rank's elements of the
parameter: a range in memory order, such as `exp_avg of NAME[128:256]`. These ranges differ between data
parallel ranks, but are the same in two runs with the same layout.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_exp.checkpoint.optimizer_state import Owned, owned_state
from moe_exp.checkpoint.state import Progress, Trained, parameters_in_sync
from moe_exp.checkpoint.tools.diff import Comparison, compare_tensors
from moe_exp.config import Config
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import bytes_text
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.replica_checks import named_parameters
from moe_exp.watch.hangs import heartbeat

logger = logging.getLogger(__name__)


class Recorder:
    """Records traces (PROFILE_ITERS) and memory histories (MEMORY_SNAPSHOT) on the ranks of PROFILE_RANKS."""

    def __init__(self, config: Config, runtime: Runtime, folder: RunFolder):
        self._folder, self._rank, self._device = folder.profile, runtime.rank, runtime.device
        is_mine = config.profile_ranks == "all" or str(runtime.rank) in config.profile_ranks.split(",")
        has_memory = is_mine and runtime.device.type == "cuda"
        self._ranges = {
            "trace": iteration_ranges(config.profile_iters if is_mine else ""),
            "memory": iteration_ranges(config.memory_snapshot if has_memory else ""),
        }
        self._begun: dict[str, tuple[int, int]] = {}  # first and last iteration of each active recording
        self._last = config.train_iters
        self._profiler: profile | None = None

    def begin(self, iteration: int) -> None:
        """Starts recordings before an iteration. A run resumed inside a range records only the rest."""
        for what, ranges in self._ranges.items():
            lasts = [min(last, self._last) for first, last in ranges if first <= iteration <= last]
            if what in self._begun or not lasts or iteration > lasts[0]:
                continue
            self._begun[what] = (iteration, lasts[0])
            if what == "memory":
                torch.cuda.memory._record_memory_history(max_entries=1_000_000)  # a few hundred bytes each
                continue
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profiler.start()

    def end(self, iteration: int) -> None:
        """Stops each recording whose last iteration is over, and writes its file."""
        for what, (first, last) in list(self._begun.items()):
            if iteration >= last:
                del self._begun[what]
                try:
                    self._write(what, f"{what}_rank_{self._rank}_iter_{first}-{last}")
                except (OSError, RuntimeError) as error:  # if fatal, every restart would fail here again
                    logger.warning("could not write a recording to %s: %s", self._folder, error)

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
                torch.cuda.synchronize()  # for the kernels of the last iteration
            profiler.stop()  # before anything that may fail: the next range starts a new profiler
            path = self._folder / f"{name}.json.gz"
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
        size, seconds = bytes_text(path.stat().st_size), time.monotonic() - start
        logger.info("wrote %s (%s) in %.1f s", path, size, seconds)


def dump_file(run: Path, iteration: int, rank: int) -> Path:
    """Path of one rank's dump."""
    return run / "dumps" / f"iter_{iteration:07d}" / f"rank_{rank:05d}.safetensors"


def is_dumped(config: Config, iteration: int) -> bool:
    """Whether DUMP_ITERS includes the iteration."""
    return any(first <= iteration <= last for first, last in iteration_ranges(config.dump_iters))


@heartbeat.during("dump")
def dump(config: Config, runtime: Runtime, run: Path, trained: Trained, progress: Progress) -> None:
    """Writes a dump if this rank is in DUMP_RANKS. Every rank must call it. Failures are only logged."""
    path = dump_file(run, progress.iteration, runtime.rank)
    with parameters_in_sync(trained.model):
        if config.dump_ranks and runtime.rank not in map(int, config.dump_ranks.split(",")):
            return
        try:
            names = {id(parameter): name for name, parameter in named_parameters(trained.model)}
            states = (_state(names[id(one.parameter)], one) for one in owned_state(trained.optimizer))
            found = chain(named_parameters(trained.model), *states)
            tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in found}
            path.parent.mkdir(parents=True, exist_ok=True)
            # Rename at the end, so that `compare_dumps` never finds a partial file.
            partial = path.with_suffix(".partial")
            facts = {"iteration": str(progress.iteration), "rank": str(runtime.rank), "host": runtime.host}
            save_file(tensors, partial, facts)
            partial.replace(path)
        except (OSError, MemoryError, safetensors.SafetensorError) as error:
            line = "could not dump the tensors of rank %d at iteration %d: %s"
            logger.warning(line, runtime.rank, progress.iteration, error)
        else:
            logger.info("dumped %d tensors of rank %d to %s", len(tensors), runtime.rank, path)


def _state(name: str, owned: Owned) -> Iterator[tuple[str, Tensor]]:
    parameter = owned.parameter
    is_whole = owned.stop - owned.start == parameter.numel()
    where = name if is_whole else f"{name}[{owned.start}:{owned.stop}]"
    gradient: Any = getattr(parameter, "main_grad", None)
    if gradient is not None:
        flat = gradient.view(-1)[owned.start : owned.stop]
        yield f"gradient of {where}", flat.view(parameter.shape) if is_whole else flat
    for state, values in owned.values.items():
        if state == "param":
            if values.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
                continue  # an fp32 parameter is its own main weight
            state = "main weights"
        yield f"{state} of {where}", values.view(parameter.shape) if is_whole else values


@dataclass(frozen=True)
class DumpedTensor:
    """A tensor of a dump, read from the file only when `diff.compare_tensors` needs it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Any = field(repr=False)
    name: str

    def read(self, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """Returns the tensor. With `offsets`, returns only rows `offsets[0]` to `offsets[0] + sizes[0]`."""
        if not offsets:
            return torch.as_tensor(self.file.get_tensor(self.name))
        return torch.as_tensor(self.file.get_slice(self.name)[offsets[0] : offsets[0] + sizes[0]])


def compare_dumps(a: Path, b: Path) -> Comparison:
    """Compares two dump files, or same-named files in two folders. Raises ValueError for unusable paths."""
    if a.is_dir() != b.is_dir():
        kind = "folder" if a.is_dir() else "file"
        raise ValueError(f"A={a}: is a {kind}, but B={b} is not. Fix: give two files or two folders.")
    if not a.is_dir():
        return compare_tensors(_tensors(a, ""), _tensors(b, ""))
    files = [sorted(folder.glob("rank_*.safetensors")) for folder in (a, b)]
    if not {path.name for path in files[0]} & {path.name for path in files[1]}:
        raise ValueError(f"A={a}: has no rank in common with B={b}. Fix: give a file from each folder.")
    sides: list[dict[str, DumpedTensor]] = [{}, {}]
    for side, paths in zip(sides, files, strict=True):
        for path in paths:
            side |= _tensors(path, f"rank {int(path.stem.removeprefix('rank_'))}: ")
    return compare_tensors(*sides)


def _tensors(path: Path, prefix: str) -> dict[str, DumpedTensor]:
    try:
        file = safetensors.safe_open(path, framework="pt")
        # Reads headers only; each tensor is read when it is compared.
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    except (OSError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot read the dump ({reason}). Fix: give another dump.") from None
    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}
    dtypes = {name: names.get(one.get_dtype(), torch.float32) for name, one in slices.items()}
    return {
        prefix + name: DumpedTensor(tuple(one.get_shape()), dtypes[name], file, name)
        for name, one in slices.items()
    }
