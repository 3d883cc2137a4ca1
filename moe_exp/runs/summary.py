"""Writes the output at the end of a run: summary.json, a loss plot, and a printed summary."""

import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from moe_exp.config import Config
from moe_exp.config.setting_types import as_given
from moe_exp.host.exit_codes import FAILED, FINISHED, TO_BE_CONTINUED, WOULD_REPEAT
from moe_exp.host.files import write_json
from moe_exp.runs.curves import Floats, Records, draw_loss_curve
from moe_exp.runs.records import Record, iter_metrics
from moe_exp.runs.run_folder import RunFolder

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Caller:
    """The user's command, from which the summary derives its suggested commands."""

    program: str = "moe-exp"
    command: str = "moe-exp train"  # as typed, with its flags
    environ: Mapping[str, str] = field(default_factory=dict)  # settings from the environment, by variable
    problems: Callable[[Config], Iterable[str]] = Config.problems  # of a suggested run's settings

    def command_with(self, **changes: Any) -> str:
        """The command with `changes` as flags, or as variables for settings from the environment."""
        settings = dict(self.environ)
        flags = []
        for name, value in changes.items():
            text, flag = as_given(value), f"--{name.replace('_', '-')}"
            if name.upper() not in settings or flag in self.command:
                flags.append(f"{flag} {shlex.quote(text)}")
            elif text:
                settings[name.upper()] = text
            else:  # an empty variable would not override the settings file
                del settings[name.upper()]
                flags += [f"{flag} ''"] * ("--config" in self.command)
        given = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        # another run uses the settings of the resumed one, but has its own folder
        command = self.command
        if "run_name" in changes:
            command = re.sub(" --resume(?=[ =])", " --config", command)
        return " ".join([*given, command, *flags])


def finish_run(
    config: Config, folder: RunFolder, *, since: datetime, wall_seconds: float, code: int | None = None,
    caller: Caller | None = None,
) -> tuple[Status, str] | None:  # fmt: skip
    """Writes the summary of the launch that began at `since` (timezone-aware); returns its status and text.

    Returns None if the launch ended before it wrote its first record.
    """
    records, balance = split_experts(iter_metrics(folder.metrics) if folder.metrics.exists() else [])
    start, *later = _latest_start(records) or [{}]
    # times of events are whole seconds
    if "event" not in start or datetime.fromisoformat(start["time"]) < since.replace(microsecond=0):
        return None
    status: Status = next((one["status"] for one in later[::-1] if one.get("event") == "end"), "failed")
    summary = summarize(config, records, balance, folder, wall_seconds, status, code)
    text, curve = summary_text(summary, config, caller), folder.path / "loss_curve.png"
    try:
        write_json(folder.summary, summary)
        if summary["min_lm_loss"] is not None:
            draw_loss_curve(records, curve, config.name)
            text += f"\n  {curve}   # the loss curve"
    except OSError as error:  # a full disk; the status is known anyway
        text += f"\n  not written: {error.filename or folder.summary} ({error.strerror or error})"
    return status, text


def split_experts(records: Iterable[Record]) -> tuple[list[Record], dict[str, Any] | None]:
    """Returns (records without `experts`, load balance); `experts` would take gigabytes in a long run."""
    kept: list[Record] = []
    last: Records = ()  # layers of the last train record
    slots: dict[tuple[int, int], Floats] = {}  # sums over all train records, by (layer, E)
    for record in records:
        if record["kind"] == "train":
            last = record.get("experts") or []
            for layer in last:
                counts = np.asarray(layer["tokens_per_expert"], dtype=np.float64)
                key = layer["layer"], len(counts)
                slots[key] = slots.get(key, 0.0) + counts
        kept.append({key: value for key, value in record.items() if key != "experts"})
    return kept, _expert_balance(last, slots)


def summarize(
    config: Config, records: Records, balance: Mapping[str, Any] | None,
    folder: RunFolder, wall_seconds: float, status: Status, code: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Content of summary.json; losses are in nats per token, None if not measured or not finite.

    `records` and `balance` are from `split_experts`; `code` is the exit code of the ranks, None if unknown.
    """
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    last, latest = train[-1] if train else {}, _latest_start(records)
    # The first event since the latest start or restart that explains a failure.
    ended_by = None
    for record in latest:
        if record.get("event") == "restart":
            ended_by = None
        elif record.get("event") in ("too_many_bad_steps", "hang", "rank_failed"):
            ended_by = ended_by or dict(record)
    with_loss = [record for record in train if record["lm_loss"] is not None]
    lowest = min(with_loss, key=lambda record: float(record["lm_loss"]), default={})
    likely_code = TO_BE_CONTINUED if status == "stopped" else FAILED  # if `code` is unknown
    return {
        "status": status,
        "exit_code": FINISHED if status == "finished" else code or likely_code,
        "ended_by": ended_by if status == "failed" else None,
        "name": config.name,
        "run_folder": str(folder.path),
        "model": config.moe_type if config.use_moe else "dense",
        # the last completed iteration; events may be later than the last train record
        "iteration": max((int(record["iteration"]) for record in latest), default=0),
        "logged_iteration": last.get("iteration", 0),
        "train_iters": config.train_iters,
        "first_lm_loss": train[0]["lm_loss"] if train else None,
        "last_lm_loss": last.get("lm_loss"),
        "min_lm_loss": lowest.get("lm_loss"),
        "min_lm_loss_iteration": lowest.get("iteration"),
        "last_valid_lm_loss": valid[-1]["lm_loss"] if valid else None,
        "last_valid_ppl": valid[-1]["lm_loss_ppl"] if valid else None,
        "last_valid_ema_lm_loss": valid[-1].get("ema_lm_loss") if valid else None,
        "consumed_samples": last.get("consumed_samples", 0),
        "consumed_tokens": last.get("consumed_tokens", 0),
        "wall_seconds": round(wall_seconds, 3),
        # medians, so that warm-up, evaluation and checkpoints do not distort them
        "tokens_per_second": _median(train, "tokens_per_second"),
        "ms_per_iteration": _median(train, "elapsed_time_per_iteration_ms"),
        "tflops_per_gpu": _median(train, "tflops_per_gpu"),
        "skipped_iterations": sum(record["skipped_iterations"] or 0 for record in train),
        "nan_iterations": sum(record["nan_iterations"] or 0 for record in train),
        "num_starts": sum(record.get("event") in ("start", "resume") for record in records),
        "expert_balance": balance,
        "transformers": next(iter(latest), {}).get("transformers"),
        "checkpoints": sorted(path.name for path in folder.checkpoints.glob("iter_*") if path.is_dir()),
    }


def _latest_start(records: Records) -> Records:
    """Records since the last `start` or `resume` event; without such an event, all records but events."""
    starts = [index for index, record in enumerate(records) if record.get("event") in ("start", "resume")]
    return records[starts[-1] :] if starts else [record for record in records if record["kind"] != "event"]


def _median(records: Records, key: str) -> float | None:
    values = [float(record[key]) for record in records if record[key] is not None]
    return statistics.median(values) if values else None


def _expert_balance(last: Records, slots: Mapping[tuple[int, int], Floats]) -> dict[str, Any] | None:
    """Load balance at the last train record, and MaxVio over the whole run."""
    measured = [layer for layer in last if layer["max_over_mean"] is not None]
    if not measured:
        return None
    worst = max(measured, key=lambda layer: float(layer["max_over_mean"]))
    dead = [[one["layer"], i] for one in measured for i, n in enumerate(one["tokens_per_expert"]) if n == 0]
    return {
        "worst_layer": worst["layer"],
        "max_over_mean": worst["max_over_mean"],
        "microbatch_max_over_mean": worst.get("microbatch_max_over_mean"),
        "run_max_vio": max(float(n.max() / max(n.mean(), 1e-9)) for n in slots.values()) - 1,
        "dropped_fraction": max(layer["dropped_fraction"] or 0.0 for layer in measured),
        "num_experts": sum(len(layer["tokens_per_expert"]) for layer in measured),
        "dead_experts": dead,
    }


def summary_text(summary: Mapping[str, Any], config: Config, caller: Caller | None = None) -> str:
    """Printed summary: results, paths and suggested next steps."""
    head = f"Run {summary['status']}: {summary['iteration']} of {summary['train_iters']} iterations"
    head += ", this start took" if summary["num_starts"] > 1 else " in"
    head += f" {timedelta(seconds=round(summary['wall_seconds']))}"
    results, next_lines = _result_lines(summary), _next_lines(summary, config, caller or Caller())
    return "\n  ".join([head, *results]) + "\n  ".join(["\nWhat to try next", *next_lines])


def _result_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    loss = "never measured"
    if summary["min_lm_loss"] is not None:
        ends = (summary["first_lm_loss"], summary["last_lm_loss"])
        loss = " -> ".join("not a number" if value is None else f"{value:.4f}" for value in ends)
        loss += f" (lowest {summary['min_lm_loss']:.4f} at iteration {summary['min_lm_loss_iteration']})"
    yield f"lm loss      {loss}"
    if summary["last_valid_lm_loss"] is not None:
        ema = summary["last_valid_ema_lm_loss"]
        averaged = f", averaged weights {ema:.4f}" if ema is not None else ""
        perplexity = f"(perplexity {summary['last_valid_ppl']:.2f})"
        yield f"validation   {summary['last_valid_lm_loss']:.4f} {perplexity}{averaged}"
    logged = summary["logged_iteration"]
    until = f" up to iteration {logged}, the last logged iteration" if logged < summary["iteration"] else ""
    speeds = [("tokens_per_second", "{:,.0f} tokens/s"), ("ms_per_iteration", "{:.1f} ms per iteration")]
    speeds.append(("tflops_per_gpu", "{:.3g} TFLOP/s per rank"))
    speed = ", ".join(text.format(summary[key]) for key, text in speeds if summary[key] is not None)
    yield f"tokens       {summary['consumed_tokens']:,}{until}{f' ({speed})' if speed else ''}"
    if balance := summary["expert_balance"]:
        text = f"the busiest expert gets {balance['max_over_mean']:.2f} times its fair share"
        text += f" (layer {balance['worst_layer']}"
        if within := balance.get("microbatch_max_over_mean"):
            text += f", {within:.2f} in a micro-batch"
        text += f"), {len(balance['dead_experts'])} of {balance['num_experts']} got no token"
        if (run_max_vio := balance.get("run_max_vio")) is not None:
            text += f", MaxVio over the run {run_max_vio:.2f}"
        if dropped := balance["dropped_fraction"]:
            text += f", up to {dropped:.1%} of slots dropped"
        yield f"experts      {text}"
    if summary["nan_iterations"] or summary["skipped_iterations"]:
        not_finite, skipped = summary["nan_iterations"], summary["skipped_iterations"]
        yield f"problems     {not_finite} iterations with non-finite loss, {skipped} skipped"
    checkpoints = summary["checkpoints"]
    newest = f", newest: checkpoints/{checkpoints[-1]}" if checkpoints else ""
    yield f"checkpoints  {len(checkpoints)}{newest}"
    yield f"run folder   {summary['run_folder']}"


def _next_lines(summary: Mapping[str, Any], config: Config, caller: Caller) -> Iterator[str]:
    folder, program = shlex.quote(summary["run_folder"]), caller.program
    yield from _going_on(summary, config, folder)
    if summary["logged_iteration"]:
        yield f"{program} report {folder}   # HTML page with curves and expert load"
    if summary["checkpoints"] and (config.tokenizer or not config.train_data):
        prompt = "The" if config.train_data else "def main("
        yield f"{program} generate --checkpoint {folder} --prompt {shlex.quote(prompt)}"
    if summary["checkpoints"] and summary["transformers"]:
        names = ("exported" + f"_{number}" * (number > 1) for number in count(1))
        target = next(name for name in names if not Path(name).exists())
        yield f"{program} convert to-hf {folder} {target}   # for transformers and vLLM"
    if summary["last_lm_loss"] is None and summary["nan_iterations"]:
        yield f"LR={config.lr / 4:g} with another RUN_NAME   # the loss is no longer finite"
    if summary["status"] != "failed" and summary["exit_code"] != FAILED:
        yield from _other_runs(config, caller)


def _going_on(summary: Mapping[str, Any], config: Config, folder: str) -> list[str]:
    """Next steps for an unfinished run: what to do first, and what happens if the command is repeated."""
    if summary["status"] == "finished":
        return []
    checkpoints, ended_by = summary["checkpoints"], summary["ended_by"] or {}
    again = f"resumes from {checkpoints[-1]}" if checkpoints else "starts at iteration 0 (no checkpoint)"
    if ended_by.get("event") == "too_many_bad_steps":
        return [
            f"check the bad_step events in {folder}/metrics.jsonl   # if bad samples are the cause",
            f"set LR below {config.lr:g}, with another RUN_NAME   # if the training is unstable",
            f"the same command {again}, which helps if a bad batch was the cause",
        ]
    if summary["status"] == "stopped" and summary["exit_code"] == FAILED:
        why = f"exit code {FAILED}: SAVE_AT_END=false, and this start saved no checkpoint"
        often = f"SAVE_INTERVAL below {config.save_interval}" if config.save_interval else "SAVE_INTERVAL"
        return [f"set SAVE_AT_END=true, or {often}   # {why}", f"the same command {again}"]
    lines = [f"the same command {again}"]
    if summary["exit_code"] == WOULD_REPEAT:
        lines[0] = f"correct the cause first, see diagnosis above; then {lines[0]}"
    elif ended_by.get("event") in ("hang", "rank_failed") and not config.max_restarts:
        lines[0] += "; MAX_RESTARTS=3 restarts the ranks automatically"
    if ended_by.get("event") == "hang":
        lines.insert(0, f"{folder}/{ended_by['folder']}/summary.txt   # position of every rank")
    return lines


def _other_runs(config: Config, caller: Caller) -> Iterator[str]:
    """Variants of the user's command that start runs to compare with this run."""
    if config.nnodes > 1 or "--resume" in caller.command:
        return
    others: list[tuple[str, str, dict[str, Any]]] = []
    # LOAD_DIR has a checkpoint of this kind of model, which the other kind cannot load
    fresh, new = ({"load_dir": ""}, ", from new weights") if config.load_dir else ({}, "")
    if config.use_moe:
        others.append(("dense", f"the dense baseline{new}", {"use_moe": False} | fresh))
        if config.ep == 1:
            fits = config.world_size % (2 * config.etp * config.pp) == 0
            ranks = {} if fits else {"gpus_per_node": 2 * config.gpus_per_node}
            others.append(("ep2", "experts distributed over two ranks", {"ep": 2} | ranks))
    else:
        others.append(("moe", f"the same model with experts{new}", {"use_moe": True} | fresh))
    for suffix, what, changes in others:
        if config.run_name:  # names built from the settings change anyway
            changes |= {"run_name": f"{config.run_name}_{suffix}"}
        with suppress(ValidationError):
            if not any(caller.problems(Config(**{**config.model_dump(), **changes}))):
                yield f"{caller.command_with(**changes)}   # {what}"
