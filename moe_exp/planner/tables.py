"""The plan of one run. Plans and layouts are shown as tables, or as values for `--json`. No torch."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from typing import Any, TextIO

from rich.box import HEAVY_HEAD, SIMPLE

from moe_exp.config import Config, raise_for
from moe_exp.host.files import bytes_text, count_text, scaled_text
from moe_exp.host.progress import print_table, table_console
from moe_exp.planner.calibration import Calibration
from moe_exp.planner.costs import params
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.memory import StageMemory
from moe_exp.planner.costs.params import checkpoint_bytes, count_parameters, counted, stages_text
from moe_exp.planner.costs.products import counted_as
from moe_exp.planner.costs.saves import Goodput, goodput_of
from moe_exp.planner.estimate import Cost, Lever, cost_of, levers, speed_of
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Constants, Prediction, predict
from moe_exp.planner.search import topology
from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS, recompute_level
from moe_exp.planner.search.topology import Candidate, Explanation, Search, layout_words


@dataclass(frozen=True, repr=False)
class RunPlan:
    """Predicted memory, time and cost of a run. Printing it shows the tables of `moe-exp plan`."""

    config: Config
    hardware: Hardware
    prediction: Prediction  # memory of each pipeline stage, and the parts of the iteration time
    cost: Cost  # of the complete run
    goodput: Goodput | None = None  # None without `failures`
    levers: Sequence[Lever] = ()  # savings from changing one setting

    def __repr__(self) -> str:
        stream = io.StringIO()
        self.print(stream)
        return stream.getvalue().rstrip()

    def print(self, stream: TextIO) -> None:
        PlanPrinter(stream).run(self)

    @property
    def report(self) -> dict[str, Any]:
        """All values, as `moe-exp plan --json` prints them."""
        config, prediction = self.config, self.prediction
        count, stage = count_parameters(config), params.most_loaded_rank(config)
        candidate = Candidate(config, prediction)
        return {
            "gpu": self.hardware.name,
            "num_gpus": config.world_size,
            "preset": config.preset,
            "dtype": config.dtype,
            "layout": layout_words(config),
            "stage_layers": list(PlannedJob.of(config).stage_layers),
            "parameters": {
                "total": count.total,
                "active_per_token": count.active_per_token,
                "most_loaded_rank": params.rank_parameters(config, stage).total,
                "most_loaded_stage": stage,
            },
            "counted_as": counted_as(config, self.hardware),
            "memory": _memory_report(prediction),
            "time": _time_report(config, self.hardware, prediction),
            "cost": asdict(self.cost) | {"days": self.cost.days},
            "goodput": asdict(self.goodput) if self.goodput else None,
            "error": {  # expected relative error
                "memory": prediction.memory_error,
                "time": prediction.time_error,
                "is_calibrated": prediction.is_calibrated,
                "published": asdict(prediction.published) if prediction.published else None,
            },
            "checkpoint_bytes": checkpoint_bytes(config),
            "filling_batch": candidate.filling_batch,
            "notes": candidate.notes,
            "levers": [asdict(lever) for lever in self.levers],
        }

    @property
    def fits(self) -> bool:
        return not self.prediction.oom

    @property
    def memory_bytes(self) -> float:
        """Bytes needed by the fullest rank."""
        return self.prediction.needed_bytes

    @property
    def seconds_per_iteration(self) -> float:
        """Iteration time at the full global batch."""
        return self.prediction.time.total

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all GPUs at the full global batch."""
        return speed_of(self.config, self.hardware, self.seconds_per_iteration).tokens_per_second


def plan_run(
    config: Config, hardware: Hardware, constants: Constants, *, num_tokens: int | None = None,
    price_per_gpu_hour: float | None = None, failures: Mapping[str, Any] | None = None,
) -> RunPlan:  # fmt: skip
    """Plans a run, with goodput if given `failures` (see `goodput_of`). ConfigError for invalid settings."""
    raise_for(config.problems())
    budget: Any = {"num_tokens": num_tokens, "price_per_gpu_hour": price_per_gpu_hour}
    cost = cost_of(config, hardware, **budget, constants=constants)
    prediction = predict(PlannedJob.of(config), hardware, constants)
    times = {"iteration_seconds": prediction.time.total, "training_seconds": cost.seconds}
    goodput = goodput_of(config, **times, **failures) if failures else None
    changes = levers(config, hardware, constants, prediction)
    return RunPlan(config, hardware, prediction, cost, goodput, changes)


def _memory_report(prediction: Prediction) -> dict[str, Any]:
    """Returns the bytes of each stage by component, the stage that needs the most, and the bytes left."""
    return {
        "stages": [asdict(stage) | {"total": stage.total} for stage in prediction.stages],
        "peak_stage": prediction.peak_stage,
        "peak_bytes": prediction.peak_bytes,
        "device_bytes": prediction.memory_bytes,
        "margin_bytes": prediction.margin_bytes,
        "oom": prediction.oom,
    }


def _time_report(config: Config, hardware: Hardware, prediction: Prediction) -> dict[str, Any]:
    """Returns the speed, and the seconds of an iteration by component."""
    time, parts = prediction.time, prediction.time.parts()
    bound_by = f"{time.bound.replace('_', ' ')} {parts[time.bound] / time.total:.0%}"
    return asdict(speed_of(config, hardware, time.total)) | {"parts": parts, "bound_by": bound_by}


def describe_candidate(candidate: Candidate, found: Search, place: int) -> dict[str, Any]:
    config, prediction = candidate.config, candidate.prediction
    best = found.ranked[0].seconds if found.ranked else candidate.seconds
    return {
        "place": place,
        **{name: getattr(config, name) for name in LAYOUT_SETTINGS},
        "dp": config.data_parallel_size,
        "edp": params.num_replicas(config)[1],
        "stage_layers": config.stage_layers,
        "peak_bytes": prediction.peak_bytes,
        "margin_bytes": prediction.margin_bytes,
        **_time_report(config, found.hardware, prediction),
        "slower_than_best": candidate.seconds / best - 1,
        "runner_up": place > 1 and candidate.seconds <= (1 + topology.RUNNER_UP) * best,
        "filling_batch": candidate.filling_batch,
        "notes": candidate.notes,
    }


def describe_search(found: Search, top: int) -> dict[str, Any]:
    """Returns a search's `top` fastest layouts, and how many layouts were tried, fit or were rejected."""
    return {
        "gpu": found.hardware.name,
        "counted_as": counted_as(found.ranked[0].config, found.hardware) if found.ranked else {},
        "num_tried": found.num_tried,
        "num_fitting": len(found.ranked),
        "num_runner_ups": len(found.runner_ups()),
        "rejected": dict(found.rejected.most_common()),
        "layouts": [
            describe_candidate(one, found, place) for place, one in enumerate(found.ranked[:top], start=1)
        ],
    }


def describe_explanation(explained: Explanation, found: Search) -> dict[str, Any]:
    report: dict[str, Any] = {
        "asked": dict(explained.wanted),
        "valid": explained.candidate is not None,
        "fits": explained.fits,
        "problems": explained.problems,
    }
    if explained.candidate is not None:
        report["losses_seconds"] = explained.losses
        report["layout"] = describe_candidate(explained.candidate, found, explained.place)
        report["memory"] = _memory_report(explained.candidate.prediction)
    return report


_GIBIBYTE = 2**30
_MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead", "cached")
_WIDE = 140
_LEFT = "device memory minus what the fullest rank needs, not counting its allocator's cache"
# columns omitted on a narrow terminal; --json has them
_LEFT_OUT = ("layers per stage", "left", "vs best", "TFLOP/s", "bubble", "notes")
_WORDS = ("layout", "recompute", "layers per stage", "bound by", "notes")


class PlanPrinter:
    """Prints the planner's tables to a stream."""

    def __init__(self, stream: TextIO):
        self._console = table_console(stream, highlight=False)
        self._table = partial(print_table, console=self._console)

    def run(self, plan: RunPlan) -> None:
        report, prediction = plan.report, plan.prediction
        count, time = report["parameters"], report["time"]
        title = "{num_gpus} x {gpu}, {layout}, PRESET={preset}, {dtype}".format_map(report)
        of_rank = f"{counted(count['most_loaded_rank'])} at most (stage {count['most_loaded_stage']})"
        rows = {
            "parameters": f"{counted(count['total'])}, {counted(count['active_per_token'])} active per token",
            "parameters per rank": of_rank,
            "layers per stage": stages_text(report["stage_layers"]),
            **report["counted_as"],
            "memory": _verdict(prediction),
            "seconds per iteration": f"{_short(time['seconds'], 4)} {error_words(prediction)}",
            "TFLOP/s per GPU": f"{_short(time['tflops_per_gpu'])}, MFU {time['mfu']:.1%}",
            "tokens per second": f"{time['tokens_per_second']:,.0f}",
            "whole run": _whole(plan.cost),
            **(_goodput_rows(plan.goodput) if plan.goodput else {}),
            "checkpoint": bytes_text(report["checkpoint_bytes"]),
            "batch to fill the pipeline": f"{report['filling_batch']:,} samples",
            "notes": ", ".join(report["notes"]),
        }
        self._rows(title, rows)
        self._memory(prediction)
        self._levers(plan.levers)
        total = prediction.time.total
        times = {
            name.replace("_", " "): f"{_short(part, 4)} s, {part / total:.1%}"
            for name, part in prediction.time.parts().items()
        }
        self._rows("time of an iteration", times | {"total": f"{_short(total, 4)} s"})

    def search(self, found: Search, top: int, changes: Mapping[str, str]) -> None:
        """Prints the fastest layouts, how many are almost as fast, and why other layouts were rejected.

        `changes`: settings that had to change so that a layout fits with 8% of the memory to spare.
        """
        if changes:
            settings = " ".join(f"{name.upper()}={value}" for name, value in changes.items())
            self._print(
                f"no layout fits with 8% of the memory to spare; with {settings}, which changes the results:"
            )
        if found.ranked:
            config = found.ranked[0].config
            count, batch = count_parameters(config), f"GBSZ={config.gbsz}, SEQ_LEN={config.seq_len}"
            size = f"{count_text(count.total)} parameters, {count_text(count.active_per_token)} active"
            model = f"PRESET={config.preset}, {size}, {config.dtype}, {batch}"
            self._print(f"{model}; {config.world_size} x {found.hardware.name}")
            for part, words in counted_as(config, found.hardware).items():
                self._print(f"{part}: {words}")
            is_narrow = self._console.width < _WIDE
            title = "layouts by time per iteration; = marks times within 2% of the best"
            title += "" if is_narrow else ", too close for predictions to distinguish"
            rows = []
            for place, one in enumerate(found.ranked[:top], start=1):
                row, of = describe_candidate(one, found, place), one.prediction
                cells = {
                    "": f"{'=' if row['runner_up'] else ''}{place}",
                    "layout": layout_words(one.config),
                    "MBSZ": str(one.config.mbsz),
                    "recompute": recompute_level(one.config),
                    "layers per stage": stages_text(row["stage_layers"]),
                    "GiB": f"{of.peak_bytes / _GIBIBYTE:.1f}",
                    "left": f"{of.margin_bytes / of.memory_bytes:.0%}",
                    "s/iteration": _short(one.seconds, 4),
                    "vs best": f"{row['slower_than_best']:+.1%}",
                    "TFLOP/s": f"{row['tflops_per_gpu']:.1f}",
                    "bubble": f"{of.time.bubble / one.seconds:.1%}",
                    "bound by": row["bound_by"],
                    "notes": ", ".join(row["notes"]),
                }
                rows.append({name: cells[name] for name in cells if not (is_narrow and name in _LEFT_OUT)})
            box = SIMPLE if is_narrow else HEAVY_HEAD
            self._table(title, rows[0], (row.values() for row in rows), left=_WORDS, box=box)
            if not is_narrow:
                self._print(f"left: {_LEFT}, as a share of device memory")
        elif found.smallest:
            self._print(f"nothing fits; least memory: {topology.memory_line(found.smallest)}")
        else:
            self._console.print("all layouts were rejected; --explain TP=...,PP=... shows why for one layout")
        tried, fit, near = found.num_tried, len(found.ranked), len(found.runner_ups())
        self._console.print(f"{tried:,} layouts tried, {fit:,} fit, {near} within 2% of the best")
        for reason, number in found.rejected.most_common():
            self._console.print(f"  {number:,} rejected: {reason}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def best(self, candidate: Candidate, cost: Cost) -> None:
        config, write = candidate.config, self._console.print
        write(f"{layout_words(config)}: {_whole(cost)}")
        write(f"  {_short(candidate.seconds, 4)} s per iteration {error_words(candidate.prediction)}")
        write(f"  a global batch of {candidate.filling_batch:,} fills the pipeline; GBSZ is {config.gbsz:,}")
        write(f"  checkpoint size: {bytes_text(checkpoint_bytes(config))}")

    def explanation(self, explained: Explanation, found: Search) -> None:
        asked = ", ".join(f"{name.upper()}={value}" for name, value in explained.wanted.items())
        if explained.candidate is None:
            self._console.print(f"{asked}: rejected")
        elif not explained.fits:
            self._console.print(f"{asked}: valid, but out of memory")
        for line in explained.problems:
            self._print(f"  {line}")
        if explained.candidate is None:
            return
        if explained.fits:
            candidate, config = explained.candidate, explained.candidate.config
            best = found.ranked[0] if found.ranked else candidate
            words = f"{layout_words(config)}, MBSZ={config.mbsz}, recompute of {recompute_level(config)}"
            self._print(f"{asked}: fastest layout {words}")
            place = "slower than all ranked layouts"
            if explained.place <= len(found.ranked):
                place = f"place {explained.place:,} of {len(found.ranked):,}"
            slower = f"{candidate.seconds / best.seconds - 1:+.1%} vs the best ({layout_words(best.config)})"
            self._console.print(f"  {_short(candidate.seconds, 4)} s per iteration, {slower}: {place}")
            for name, seconds in explained.losses.items():
                if abs(seconds) >= 0.0005 * best.seconds:
                    self._console.print(f"  {seconds:+.4g} s {name.replace('_', ' ')}")
        self._memory(explained.candidate.prediction)

    def calibration(self, calibration: Calibration) -> None:
        """Prints the fitted constants and the errors of predictions with these constants."""
        rows, constants = [], []
        for name, fit in calibration.parts.items():
            num_rows, *shares = fit.summary.values()
            rows.append((name, str(num_rows), *(f"{share:.1%}" for share in shares if num_rows)))
            for of in fields(fit.constants):
                value, prior = getattr(fit.constants, of.name), of.metadata["prior"]
                constants.append((of.name, f"{value:.4g}", f"{prior:.4g}", of.metadata["meaning"]))
        columns = ("", "rows", "mean error", "largest", "mean left out", "90% within")
        self._table("errors of predictions", columns, rows)
        self._table("constants", ("constant", "value", "expected", "meaning"), constants)
        # The measurements of these rows should be checked first.
        for name, fit in calibration.parts.items():
            if worst := sorted(fit.left_out.items(), key=lambda row: -abs(row[1]))[:5]:
                said = ", ".join(f"{row} {error:+.1%}" for row, error in worst)
                self._console.print(f"rows with the largest {name} errors when left out of the fit: {said}")

    def hardware(self, profiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Prints all hardware profiles with the source of each number."""
        for name, content in profiles.items():
            rows = []
            for key, one in content.items():
                entry = one if isinstance(one, dict) and "value" in one else {"value": one}
                rows.append((key, _number(entry["value"]), str(entry.get("source", ""))))
            self._table(name, ("", "value", "source"), rows)

    def _memory(self, prediction: Prediction) -> None:
        """Prints the memory of the stages, and the activations of the fullest rank, largest first."""
        rows, first = [], 0

        def shown(stage: StageMemory) -> list[str]:
            return [f"{getattr(stage, part) / _GIBIBYTE:.2f}" for part in _MEMORY_PARTS]

        # Consecutive stages with the same numbers share a row.
        for sizes, run in groupby(prediction.stages, key=shown):
            last = first + len(members := list(run)) - 1
            name = str(first) if first == last else f"{first}-{last}"
            peak = "peak" if first <= prediction.peak_stage <= last else ""
            rows.append((name, *sizes, f"{members[0].total / _GIBIBYTE:.2f}", peak))
            first = last + 1
        title = f"memory of a rank, GiB: {_verdict(prediction)}"
        self._table(title, ("stage", *_MEMORY_PARTS, "total", ""), rows, left=())
        self._print(f"left: {_LEFT}")
        stage = prediction.stages[prediction.peak_stage]
        title = f"activations of a rank in stage {prediction.peak_stage}, GiB"
        parts = sorted(stage.activation_parts.items(), key=lambda part: -part[1])
        shares = {
            name: f"{size / _GIBIBYTE:.2f}, {size / stage.activations:.1%}" for name, size in parts if size
        }
        self._rows(title, shares | {"total": f"{stage.activations / _GIBIBYTE:.2f}"})

    def _levers(self, levers: Sequence[Lever]) -> None:
        """Prints what each change of a single setting saves, and which of these changes are invalid."""
        rows = []
        for lever in levers:
            if not lever.problem:
                sizes = (lever.activation_bytes, lever.needed_bytes)
                saved = (f"{round(size / _GIBIBYTE, 2) + 0.0:.2f}" for size in sizes)  # no -0.00
                fits = "" if lever.fits else "out of memory"
                rows.append((lever.setting, *saved, f"{lever.slower:+.1%}", fits))
        if rows:
            title = "memory saved on the fullest rank, GiB (negative: the change needs more)"
            self._table(title, ("change", "activations", "memory", "time", ""), rows)
        for lever in levers:
            if lever.problem:
                self._print(f"{lever.setting} is invalid here: {lever.problem}")

    def _rows(self, title: str, rows: Mapping[str, str]) -> None:
        self._table(title, (), [(name, value) for name, value in rows.items() if value])


def error_words(prediction: Prediction) -> str:
    if prediction.is_calibrated:
        return f"(nine of ten runs left out of the fit were within {prediction.time_error:.0%})"
    if of := prediction.published:
        return f"(mean error over {of.rows} published runs of this kind, {of.kind}: {of.mean_error:.0%})"
    return "(the fit includes no runs on this device)"


def _goodput_rows(of: Goodput) -> dict[str, str]:
    days = f"{of.wall_seconds / 86400:.3g} days of wall time" if of.wall_seconds else "the run never finishes"
    intervals = f"SAVE_INTERVAL={of.best_iterations} (Daly; Young: {of.young_iterations})"
    assumed = f"a failure every {of.mtbf_hours:.3g} hours, {of.save_seconds:.3g} s per save,"
    assumed += f" {of.restart_seconds / 60:.3g} min from a failure to the next iteration,"
    return {
        "goodput": f"{of.goodput:.1%} training: {days}; {of.best_goodput:.1%} with {intervals}",
        "goodput assumes": f"{assumed} {of.evaluation_share:.2%} extra for evaluation",
    }


def _verdict(prediction: Prediction) -> str:
    needed, device = prediction.needed_bytes / _GIBIBYTE, prediction.memory_bytes / _GIBIBYTE
    margin = prediction.margin_bytes / _GIBIBYTE
    of = f"{needed:.1f} of {device:.1f} GiB on stage {prediction.peak_stage}"
    words = f"fits, {of} without the allocator's cache, {margin:.1f} left"
    if prediction.oom:
        words = f"OUT OF MEMORY, {of}, {-margin:.1f} too much"
    return words + (f", within the expected error ({prediction.memory_error:.0%})" * prediction.is_close)


def _whole(cost: Cost) -> str:
    words = f"{cost.num_iterations:,} iterations, {count_text(cost.num_tokens)} tokens"
    words += f": {_short(cost.days)} days, {_short(cost.gpu_hours)} GPU-hours"
    return words if cost.price is None else f"{words}, price {cost.price:,.2f}"


def _number(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_number(one)}" for name, one in value.items())
    if isinstance(value, (int, float)) and value >= 1e6:
        return scaled_text(value, ("", " k", " M", " G", " T"), 4)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(number: float, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits, but keeps all digits before the decimal point."""
    return f"{number:,.0f}" if number >= 10 ** (digits - 1) else f"{number:.{digits}g}"
