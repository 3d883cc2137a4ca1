"""Results of a sweep as CSV (for `moe-exp plan calibrate`), Markdown and plot. No torch."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moe_exp.config import Config
from moe_exp.host.files import count_text, read_json, write_json
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.params import count_parameters
from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import GIBIBYTE, row_of_job
from moe_exp.planner.prediction import predict
from moe_exp.studies.child_runs import LONGEST, Case, median_seconds, records_after, why_it_failed

CPU = "CPU"
_FIRST = (
    "row_id", "section", "status", "gpu", "device", "gpus_per_node", "nodes", "n_gpus", "parameters",
    "layers", "hidden", "heads", "ffn", "kv_groups", "swiglu", "experts", "topk", "ep", "etp", "cp", "vpp",
    "seq", "vocab", "tp", "pp", "dp", "mbs", "gbs", "zero_stage", "precision", "pp_balanced_embedding",
    "recompute", "mem_gb", "predicted_mem_gb", "mem_kind", "oom", "sec_per_it", "predicted_sec_per_it",
    "tflops", "use_mem", "use_time", "quirk",
)  # fmt: skip
_MEASURED, _PREDICTED, _TEXT = "#1f5f9e", "#d9541e", "#333333"
_FASTEST_FIRST = ("ok", "oom", "timeout", "failed", "predicted-oom", "left")


Status = Literal["ok", "failed", "oom", "timeout", "left"]  # left: not yet run

TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """Result of a case that has run."""

    status: Status
    reason: str = ""  # unless ok, the most useful line of its log
    seconds: float | None = None  # median seconds per iteration after the warm-up; None: not measured
    # maximum over ranks, allocated on a GPU or resident on a CPU; None: not measured
    memory_bytes: float | None = None
    device: str = ""  # device that it ran on; empty if it failed before recording it
    flags: dict[str, str] = field(default_factory=dict)  # its settings

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads the result from a file; raises ValueError if the file is invalid."""
        try:
            return cls(**read_json(path))
        except (ValueError, TypeError):
            rule = "must be the result of a case. Fix: delete this file; the case then runs again"
            raise ValueError(f"{path}: {rule}.") from None


def result_of(case: Case, code: int | None, *, timeout: int, num_warmup: int, num_iterations: int) -> Result:
    """Result of a case whose launcher has ended. `code`: exit code (None if the launcher timed out or the
    code is unknown). `timeout`: time limit of a local case (seconds); 0 if SLURM enforces the limit.
    """
    text = case.log.read_text(encoding="utf-8", errors="replace") if case.log.exists() else ""
    status: Status
    measured: dict[str, float] = {}
    if code is None and (timeout or TIME_LIMIT.search(text)):
        limit = f"CASE_TIMEOUT={timeout} s" if timeout else "the time limit of its job"
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "none")
        status, reason = "timeout", f"exceeded {limit}; last line of its log: {last}"[:LONGEST]
    elif code != 0:
        status, reason = why_it_failed(text, code)
    else:
        records = records_after(case.folder, num_warmup)
        status, reason = "failed", f"ended after {len(records) + num_warmup} of {num_iterations} iterations"
        if len(records) == num_iterations - num_warmup:
            memory = max(record["peak_memory_bytes"] for record in records)
            status, reason = "ok", ""
            measured = {"seconds": median_seconds(records), "memory_bytes": memory}
    device = ""  # as recorded by the run itself, unless it failed earlier
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        device = str(read_json(case.folder.provenance)["starts"][-1].get("device", ""))
    return Result(status, reason, device=device, flags=dict(case.flags), **measured)


@dataclass(frozen=True)
class Row:
    """A row of the table: a case, its result and its prediction."""

    case: Case
    status: str  # of its result, or `rejected`, `predicted-oom`, or `left` (not yet run)
    reason: str  # why it is not ok
    device: str  # as recorded by the run, else that of this host; empty if unknown
    gpu: str  # hardware profile; empty without one
    seconds: float | None  # per iteration; None: not measured
    memory_gib: float | None  # peak, maximum over ranks; None: not measured
    predicted_seconds: float | None  # None if the device is unknown or the layout invalid
    predicted_gib: float | None  # likewise

    @property
    def short_reason(self) -> str:
        """The reason without the suggested fix."""
        problems = self.case.problems if self.status == "rejected" else [self.reason]
        return "; ".join(text.partition(". Fix: ")[0] for text in problems)

    @property
    def tflops(self) -> float | None:
        seconds, config = self.seconds, self.case.config
        return flops_per_iteration(config) / seconds / config.world_size / 1e12 if seconds else None


def job_of(config: Config, device: str) -> PlannedJob:
    """Job for predicting a run's recorded memory (CPU: resident memory; GPU: memory allocated by PyTorch)."""
    return replace(PlannedJob.of(config), measured_by="rss" if device == CPU else "allocated")


def is_oom(config: Config, device: str, gpu: str) -> str:
    """Why a layout is predicted to run out of memory; "" if it fits. CPU ranks of a node share memory."""
    if not gpu:
        return ""
    # On a GPU, context and NCCL buffers must fit as well, not only PyTorch's allocations.
    job = job_of(config, device)
    found = predict(job if device == CPU else replace(job, measured_by="nvidia-smi"), load_hardware(gpu))
    sharing = config.gpus_per_node if device == CPU else 1
    needed, there = sharing * found.needed_bytes / GIBIBYTE, found.memory_bytes / GIBIBYTE
    if needed <= there:
        return ""
    rule = f"is predicted to need {needed:.1f} GiB, but {gpu} has {there:.1f} GiB"
    return f"{rule}. Fix: set RUN_OOM=true to run it anyway"


def to_csv(rows: Sequence[Row], sweep_name: str) -> str:
    """Returns a CSV with a line per case in the format of `planner/measured.py`."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        config = row.case.config
        # Without a profile, use the device's name, which the reader then reports as unknown.
        job = row_of_job(job_of(config, row.device), row.gpu or row.device or "unknown")
        numbers = {
            "mem_gb": row.memory_gib, "predicted_mem_gb": row.predicted_gib, "sec_per_it": row.seconds,
            "predicted_sec_per_it": row.predicted_seconds, "tflops": row.tflops,
        }  # fmt: skip
        lines.append({
            "vpp": "none", "etp": config.etp, **job, "row_id": row.case.name, "section": sweep_name,
            "status": row.status, "reason": row.reason, "device": row.device,
            "parameters": count_parameters(config).total, "oom": {"ok": 0, "oom": 1}.get(row.status, ""),
            "use_mem": int(row.memory_gib is not None), "use_time": int(row.seconds is not None), "quirk": 0,
            **{name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()},
        })  # fmt: skip
    more = dict.fromkeys(name for line in lines for name in line if name not in (*_FIRST, "reason"))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_FIRST, *more, "reason"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def to_markdown(rows: Sequence[Row], title: str) -> str:
    """Returns a table of layouts, sorted by status, GPU count and time, followed by the rejected layouts."""
    lines, by_status = [f"# {title}"], _FASTEST_FIRST.index
    layouts = [row for row in rows if row.status != "rejected"]
    layouts.sort(key=lambda row: (by_status(row.status), row.case.config.world_size, row.seconds or 0.0))
    configs = [row.case.config for row in layouts]
    # Sizes that no layout sets get no column.
    optional = [one for one in ("etp", "cp", "vpp") if {getattr(c, one) for c in configs} - {1, None}]
    for number, (row, c) in enumerate(zip(layouts, configs, strict=True)):
        more = {name.upper(): getattr(c, name) for name in optional}
        cells = {
            "nodes": c.nnodes, "GPUs": c.world_size, "size": count_text(count_parameters(c).total),
            "DP": c.data_parallel_size, "TP": c.tp, "PP": c.pp, "EP": c.ep,
            **{name: "none" if value is None else value for name, value in more.items()},
            "MBS": c.mbsz, "GBS": c.gbsz,
        }  # fmt: skip
        for name, value, digits in (
            ("memory GiB", row.memory_gib, ".2f"), ("predicted GiB", row.predicted_gib, ".2f"),
            ("s per iteration", row.seconds, ".4g"), ("predicted s", row.predicted_seconds, ".4g"),
            ("TFLOP/s per GPU", row.tflops, ".3g"),
        ):  # fmt: skip
            cells[name] = "" if value is None else format(value, digits)
        if number == 0:
            ruler = ["---:"] * len(cells) + ["---", "---"]
            lines += ["", *(f"| {' | '.join(of)} |" for of in ([*cells, "status", "reason"], ruler))]
        last = row.status, row.short_reason.replace("|", "\\|")
        lines.append(f"| {' | '.join([*map(str, cells.values()), *last])} |")
    if broken := by_rule(rows):
        lines += ["", "Rejected, by the first violated rule (see sweep.csv for all):", ""]
        lines += [f"- {rule}: {', '.join(row.case.name for row in some)}" for rule, some in broken.items()]
    return "\n".join([*lines, ""])


def by_rule(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Groups rejected cases by the first rule that they violate, ignoring numbers in the rule's text."""
    found: dict[str, list[Row]] = {}
    for row in (row for row in rows if row.status == "rejected"):
        # `PP=3: must divide NUM_LAYERS=4. Fix: ...` becomes `PP: must divide NUM_LAYERS`
        rule = re.sub(r"=\d[^\s:,;()]*|\b\d+ ", "", row.case.problems[0].partition(". Fix: ")[0])
        found.setdefault(rule, []).append(row)
    return found


def draw_sweep(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Draws a PNG of measured and predicted time and memory; returns False if no row has a measured time."""
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.seconds is not None]
    measured.sort(key=lambda row: (row.case.config.world_size, row.seconds))
    if not measured:
        return False
    is_predicted = any(row.predicted_seconds is not None for row in measured)
    size = 13 if is_predicted else 8, 1.6 + 0.3 * max(len(measured), 8)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[2.2, 1]) if is_predicted else None

    # A bar for each layout, with a diamond at its prediction.
    axes: Any = figure.add_subplot(grid[:, 0]) if grid else figure.add_subplot()
    seconds = [row.seconds for row in measured]
    axes.barh(range(len(measured)), seconds, color=_MEASURED, height=0.65, label="measured")
    predicted = ((row.predicted_seconds, place) for place, row in enumerate(measured))
    if known := [pair for pair in predicted if pair[0] is not None]:
        style = {"linestyle": "none", "marker": "D", "markersize": 5, "label": "predicted"}
        axes.plot(*zip(*known, strict=True), color=_PREDICTED, **style)
    for place, row in enumerate(measured):
        axes.text(row.seconds, place, f" {row.seconds:.3g} s", va="center", fontsize=8, color=_TEXT)
    axes.set_yticks(range(len(measured)), [row.case.name.replace("_", " ") for row in measured], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    _finish(axes, "seconds per iteration")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)

    if grid:
        times = [(row.predicted_seconds, row.seconds) for row in measured]
        _draw_pairs(figure.add_subplot(grid[0, 1]), times, "seconds per iteration")
        memory = [(row.predicted_gib, row.memory_gib) for row in measured]
        _draw_pairs(figure.add_subplot(grid[1, 1]), memory, "memory (GiB)")
    figure.suptitle(title, fontsize=10, color=_TEXT, x=0.01, ha="left", parse_math=False)
    figure.savefig(path, format="png")
    return True


def _draw_pairs(axes: Any, pairs: Sequence[tuple[Any, Any]], what: str) -> None:
    if known := [pair for pair in pairs if None not in pair]:
        largest = 1.08 * max(map(max, known))
        axes.plot([0, largest], [0, largest], color="#c4c4c4", linewidth=1)
        axes.plot(*zip(*known, strict=True), color=_MEASURED, linestyle="none", marker="o", markersize=4)
        axes.set_xlim(0, largest)
        axes.set_ylim(0, largest)
    _finish(axes, f"predicted {what}")
    axes.set_ylabel("measured", fontsize=9, color=_TEXT)


def _finish(axes: Any, label: str) -> None:
    axes.set_xlabel(label, fontsize=9, color=_TEXT)
    axes.tick_params(colors=_TEXT, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
