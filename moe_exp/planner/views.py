"""Views of a plan: the timeline of an iteration by stage, and the most similar published runs.

The schedules are Megatron-Core's: 1F1B, and the interleaved schedule with VPP model chunks per rank
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Imports no torch; only `as_svg` imports matplotlib.
"""

import csv
import io
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_exp.config import Config
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.device import Pass
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.timing import stage_passes, time_of
from moe_exp.planner.hardware import Hardware, load_hardware
from moe_exp.planner.measured import PUBLIC_RUNS, job_of_row
from moe_exp.planner.prediction import Constants

Kind = Literal["forward", "backward"]
PassKey = tuple[int, Kind, int, int]  # stage, kind, chunk, micro-batch
_COLORS = {"forward": "#4f9bd9", "backward": "#2a9d8f", "exchange": "#d9541e", "after": "#8c6d1f"}


@dataclass(frozen=True)
class Event:
    """Forward or backward pass of a micro-batch through one model chunk."""

    stage: int
    kind: Kind
    microbatch: int
    chunk: int
    start: float  # seconds from the start of the iteration
    end: float
    exchange: float  # seconds of it spent on token dispatch and combine


@dataclass(frozen=True)
class Timeline:
    events: list[Event]
    num_stages: int
    after: float  # seconds after the last pass: data-parallel communication and optimizer

    @property
    def passes_end(self) -> float:
        return max(event.end for event in self.events)


def timeline(job: PlannedJob, hardware: Hardware, constants: TimeConstants, most: int = 64) -> Timeline:
    """Returns the timeline of an iteration, limited to `most` micro-batches."""
    passes = stage_passes(job, hardware, constants)
    time = time_of(job, hardware, constants)
    count = min(job.num_microbatches, max(most // job.config.pp * job.config.pp, job.config.pp))
    events = _scheduled(passes, count, job.config.vpp or 1)
    return Timeline(events, len(passes), time.data_parallel + time.optimizer)


def _scheduled(passes: Sequence[tuple[Pass, Pass]], count: int, chunks: int) -> list[Event]:
    """Simulates all stages: each pass starts as soon as its stage is free and its input is ready."""
    stages = len(passes)
    orders = [deque(_order(stage, stages, count, chunks)) for stage in range(stages)]
    done: dict[PassKey | None, float] = {None: 0.0}  # end of each pass, and of none
    free, events = [0.0] * stages, list[Event]()
    while any(orders):
        before = len(events)
        for stage, order in enumerate(orders):
            while order:
                kind, chunk, microbatch = order[0]
                # The pass whose result this one needs. The first forward pass needs none; the first backward
                # pass needs the forward pass of the same (last) stage.
                at = chunk * stages + stage + (-1 if kind == "forward" else 1)
                needed: PassKey | None = (at % stages, kind, at // stages, microbatch) if at >= 0 else None
                if at == chunks * stages:
                    needed = stage, "forward", chunk, microbatch
                if needed not in done:
                    break
                order.popleft()
                seconds, share = (getattr(of, kind) for of in passes[stage])
                start = max(free[stage], done[needed])
                free[stage] = done[stage, kind, chunk, microbatch] = start + seconds / chunks
                events.append(Event(stage, kind, microbatch, chunk, start, free[stage], share / chunks))
        assert len(events) > before, "deadlock in the schedule"
    return events


def _order(stage: int, stages: int, count: int, chunks: int) -> Iterator[tuple[Kind, int, int]]:
    """Yields a stage's passes (kind, chunk, micro-batch): warm-up, 1F1B, then remaining backward passes."""
    total, group = count * chunks, stages * chunks
    # Megatron's number of warm-up passes, see `memory.micro_batches_in_flight`
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(ahead, total)

    def at(index: int, *, is_forward: bool) -> tuple[int, int]:
        chunk = index % group // stages
        return (chunk if is_forward else chunks - 1 - chunk), index // group * stages + index % stages

    for index in range(ahead):
        yield "forward", *at(index, is_forward=True)
    for index in range(total):
        if ahead + index < total:
            yield "forward", *at(ahead + index, is_forward=True)
        yield "backward", *at(index, is_forward=False)


def as_text(of: Timeline, width: int = 100) -> Iterator[str]:
    """Yields a line per stage (digits: forward passes, letters: backward passes), then a legend."""
    end = of.passes_end + of.after
    for stage in range(of.num_stages):
        line, events = ["."] * width, [event for event in of.events if event.stage == stage]
        idle = 1 - sum(event.end - event.start for event in events) / of.passes_end
        for event in events:
            first, last = (round(at / end * width) for at in (event.start, event.end))
            text = str(event.microbatch % 10) if event.kind == "forward" else chr(97 + event.microbatch % 10)
            line[first:last] = text * (last - first)
        after = round(of.passes_end / end * width)
        line[after:] = "=" * (width - after)
        yield f"stage {stage:>2} |{''.join(line)}| {idle:.0%} idle"
    yield "0-9: forward of a micro-batch, a-j: backward, .: idle, =: data-parallel traffic and optimizer"


def as_svg(of: Timeline) -> str:
    """Draws the timeline as SVG, with a row per stage. Marks the token exchange within each pass."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.2 + 0.35 * of.num_stages))
    axes = figure.add_subplot()
    for stage in range(of.num_stages):
        bars: dict[str, list[tuple[float, float]]] = {name: [] for name in _COLORS}
        for event in (event for event in of.events if event.stage == stage):
            bars[event.kind].append((event.start, event.end - event.start))
            if event.exchange:
                bars["exchange"].append((event.end - event.exchange, event.exchange))
        bars["after"].append((of.passes_end, of.after))
        for name, spans in bars.items():
            axes.broken_barh(spans, (stage - 0.4, 0.8), color=_COLORS[name], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(of.num_stages), [f"stage {stage}" for stage in range(of.num_stages)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    patches = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    axes.legend(handles=patches, ncols=4, loc="upper right")
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()


# Weight of each setting in the distance, which uses |log2| of the ratio: twice and half are equally far.
_RATIOS = {
    "hidden_size": 2.0, "num_layers": 1.0, "num_experts": 1.0, "topk": 1.0, "expert_ffn_size": 1.0, "tp": 0.7,
    "pp": 0.5, "ep": 0.7, "cp": 0.7, "mbsz": 0.5, "seq_len": 0.5, "world_size": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Neighbor:
    """A published run."""

    row: Mapping[str, str]  # of profiles/public_runs.csv
    job: PlannedJob
    hardware: Hardware
    distance: float  # from the planned run: weighted log ratios, plus penalties for differences in kind
    seconds: float  # per iteration, measured
    planned_seconds: float

    @property
    def dispatcher(self) -> str:
        """Name of the token dispatcher; empty for a dense model."""
        return self.row["dispatcher"] or ("alltoall" if self.job.config.use_moe else "")

    @property
    def source(self) -> str:
        return f"{self.row['repo']} {self.row['path']}"


def nearest_runs(config: Config, hardware: Hardware, constants: Constants, count: int) -> list[Neighbor]:
    """Returns the `count` published runs nearest to these settings and this device, nearest first."""
    # Rows are sorted by date and keyed by everything that matters, so newer publications replace older ones.
    found: dict[tuple[object, ...], Neighbor] = {}
    mine = [getattr(config, name) for name in _RATIOS]
    rows = csv.DictReader(PUBLIC_RUNS.read_text(encoding="utf-8").splitlines())
    for row in sorted(rows, key=lambda row: row["date"]):
        job, device = job_of_row(row), load_hardware(row["gpu"])
        other, theirs = job.config, [getattr(job.config, name) for name in _RATIOS]
        distance = 0.0
        for weight, one, another in zip(_RATIOS.values(), mine, theirs, strict=True):
            if one and another:
                distance += weight * abs(math.log2(one / another))
        distance += 10.0 * (config.use_moe != other.use_moe)
        distance += 3.0 * (hardware.architecture != device.architecture)
        distance += hardware.name != device.name
        distance += config.fp8 != other.fp8
        planned = time_of(job, device, constants.time).total
        run = Neighbor(row, job, device, distance, float(row["sec_per_it"]), planned)
        what = (row["model"], device.name, row["precision"], run.dispatcher, job.engine)
        key = (*what, other.gbsz, other.vpp, other.etp, other.recompute, other.recompute_modules, *theirs)
        found[key] = run
    return sorted(found.values(), key=lambda run: run.distance)[:count]
