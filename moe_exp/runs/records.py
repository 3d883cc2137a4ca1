"""The records of metrics.jsonl: their content, reading and appending. No torch.

Every record is a dict with `kind` and `iteration`:

    train  the keys of TRAIN_KEYS, every LOG_INTERVAL iterations
    valid  the keys of VALID_KEYS, every EVAL_INTERVAL iterations
    event  event, time (ISO 8601) and its details, see EVENTS; from rank 0, and from the launcher if ranks
           have died

Values that were not measured are null, and so are NaN and infinity, which JSON lacks; nan_iterations counts
them apart.
"""

import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from moe_exp.host.files import regular, replacing

logger = logging.getLogger(__name__)

Record = dict[str, Any]

# Means and rates are over the iterations since the previous record; sums are over all ranks.
TRAIN_KEYS = {
    "iteration": "number of the iteration, from 1",
    "consumed_samples": "samples since the start of training",
    "consumed_tokens": "tokens since the start of training",
    "consumed_flops": "model FLOPs since the start of training, of all ranks (planner.costs.flops)",
    "training_seconds": "wall time of all iterations so far, over all starts, without evaluation and saves",
    "global_batch_size": "samples per iteration, mean since the previous record",
    "lm_loss": "cross entropy, nats per token",
    "load_balancing_loss": "mean over MoE layers before its coefficient; 1.0: perfect balance; null: dense",
    "z_loss": "router z-loss, mean over MoE layers before its coefficient; null: coefficient 0 or dense",
    "aux_losses": "mean over MoE layers of each loss of AUX_LOSS_TYPE before its coefficient, by its name",
    "learning_rate": "after this iteration's step of the schedule, as Megatron logs it",
    "grad_norm": "L2 norm before clipping, or null",
    "num_zeros": "zeros in the gradient, or null",
    "params_norm": "L2 norm of the parameters, or null",
    "max_attention_logits": "largest attention logit of each layer, before QK_CLIP; null without QK_CLIP",
    "loss_scale": "factor on the loss (fp16), else 1.0",
    "elapsed_time_per_iteration_ms": "wall time",
    "tokens_per_second": "of all ranks together",
    "tflops_per_gpu": "model TFLOP/s per rank, or null",
    "eta_seconds": "until TRAIN_ITERS, at this speed per sample",
    "skipped_iterations": "without an optimizer step (overflow, or not finite) since the previous record",
    "nan_iterations": "iterations with a loss that is not a number since the previous record",
    "memory_allocated_bytes": "largest allocation of rank 0's device, or null on a CPU",
    "peak_memory_bytes": "largest of all ranks since the start: on the device, or a process's resident size",
    "timers": "ms per iteration by phase (training.interval.PHASES), mean of ranks; null without LOG_TIMERS",
    "experts": "one object per MoE layer, with the keys of EXPERT_KEYS",
}
EXPERT_KEYS = {
    "layer": "number of the layer in the model, from 1",
    "tokens_per_expert": "slots (tokens times TOPK, if all are used) per expert before any drop",
    "experts_per_token": "slots that tokens use, mean over tokens; TOPK unless they decide their number",
    "max_over_mean": "the busiest expert's slots over the mean, of the whole interval",
    "microbatch_max_over_mean": "the same within a rank's micro-batch, mean: sets memory, drops and time",
    "max_vio": "max_over_mean - 1 of a global batch; mean over the last 32 of the interval",
    "dead_fraction": "share of experts with under 1% of their fair share of the interval's slots",
    "dropped_fraction": "share of slots over capacity",
    "router_entropy": "of the scores of a token, nats, mean over tokens; ln(NUM_EXPERTS): undecided",
    "top1_weight": "largest router weight of a token, mean over tokens, after normalization and scaling",
    "load_balancing_loss": "before its coefficient; 1.0: perfect balance",
    "z_loss": "router z-loss before its coefficient, also with coefficient 0: how large the logits are",
    "aux_losses": "each loss of AUX_LOSS_TYPE before its coefficient, by its name",
}
VALID_KEYS = {
    "iteration": "iteration after which it was measured",
    "consumed_samples": "training samples until then",
    "consumed_tokens": "training tokens until then",
    "consumed_flops": "training FLOPs until then",
    "training_seconds": "training time until then, or null before the first train record",
    "lm_loss": "cross entropy on the validation data, nats per token",
    "lm_loss_ppl": "perplexity, exp(lm_loss), with lm_loss cut at 20 as in Megatron",
    "lm_loss_bits_per_byte": "lm_loss / ln 2 / UTF-8 bytes per token; null without a known tokenizer",
    "ema_lm_loss": "lm_loss with the average of the weights (EMA_DECAY), or null without one",
}
EVENTS = {
    "start": "training begins at iteration 0",
    "resume": "training continues from a checkpoint",
    "checkpoint": "one was saved: seconds, bytes",
    "checkpoint_failed": "one was not saved: reason",
    "upload": "one was copied to REMOTE_DIR: seconds, bytes",
    "upload_failed": "one was not copied to REMOTE_DIR: reason",
    "preflight": "nodes were checked before training: grade, seconds, findings, exclude",
    "damaged_checkpoint": "one could not be used for the resume: reason",
    "kernels_failed": "a Triton kernel differs from plain torch and is not used: part, problems, backend",
    "restore_failed": "loaded tensors differ from the saved ones; the start ends: checkpoint, tensors",
    "replicas_differ": "replicas differ, or an optimizer group is wrong; the job ends: problems",
    "data_stage": "a stage of DATA_STAGES has begun with this iteration: stage, train_data, seq_len",
    "other_data": "the data have changed since the checkpoint (ALLOW_OTHER_DATA): changes",
    "changed_settings": "a resume has other settings than the start before it: changes",
    "bad_step": "no step, as loss or gradient is not finite; once per row of them: loss, grad_norm, samples",
    "too_many_bad_steps": "MAX_BAD_STEPS of them in a row have ended the run: checkpoint",
    "spike": "the loss or the gradient norm has jumped: z-scores, levels, samples and their documents",
    "spike_end": "it is over: first_iteration, outcome, highest_loss, highest_grad_norm",
    "rollback": "the run goes back before a spike and skips its batches: back_to, samples, set_aside",
    "no_rollback": "it does not: reason",
    "hang": "no rank continued, all were ended: reason, ranks and hosts apart from the others, why, folder",
    "stop": "the run was asked to end before TRAIN_ITERS: reason (faults.STOP_REASONS)",
    "end": "the ranks have ended by themselves: status, wall_seconds",
    "rank_failed": "a rank has died: rank, host, device, cause (its error, or the signal)",
    "restart": "the ranks start again: number, reason (failure or asked), failures so far, delay_seconds",
}


def append_event(path: Path, name: str, iteration: int, /, **details: Any) -> None:
    """Appends an event, one of EVENTS, to a metrics.jsonl, which is created if missing.

    `iteration`: the last that completed, as far as is known.
    """
    append(path, event_record(name, iteration, **details))


def event_record(name: str, iteration: int, /, **details: Any) -> Record:
    """The record of an event at the current time; arguments as in `append_event`."""
    if name not in EVENTS:
        raise ValueError(f"event={name}: is not one of {', '.join(EVENTS)}. Fix: add it to EVENTS.")
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"kind": "event", "iteration": iteration, "event": name, "time": now, **details}


def append(path: Path, *records: Record) -> None:
    """Appends all records to a metrics.jsonl, or none and raises OSError, e.g. if the disk is full."""
    left = "".join(json.dumps(json_value(record), allow_nan=False) + "\n" for record in records).encode()
    # Reopened each time: on a network file system, closing makes a record visible to other nodes.
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            left = b"\n" + left  # a process was killed while writing
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)  # else the next record would be appended to a partial one
            raise


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl, without an incomplete last line; FileNotFoundError without a file."""
    return list(_records(path, lambda line: parsed_record(line.decode(errors="replace"))))


def iter_metrics(path: Path) -> Iterator[Record]:
    """Like `read_metrics`, one at a time and with `fast_record`: after weeks the file may have gigabytes."""
    return _records(path, fast_record)


def last_records(path: Path, num_bytes: int = 1 << 20) -> list[Record]:
    """The records in the last `num_bytes` of a metrics.jsonl, which may be large after weeks."""
    with regular(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - num_bytes))
        lines = file.read().split(b"\n")[(size > num_bytes) : -1]
    found = (parsed_record(line) for line in lines)  # read_metrics reports invalid lines
    return [record for record in found if record is not None]


def parsed_record(line: str | bytes) -> Record | None:
    """The record in a line, which may contain NaN, or None. Numbers of more than 40 digits become null."""
    try:
        record = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) <= 40 else None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def fast_record(line: bytes) -> Record | None:
    """Like `parsed_record`, in a fifth of the time; integers of more than 64 bits become floats."""
    try:
        record = orjson.loads(line)
    except ValueError:
        return parsed_record(line.decode(errors="replace"))
    return record if isinstance(record, dict) else None


def time_of(event: Record) -> float | None:
    """Time of an event in seconds since the epoch; None if missing."""
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _records(path: Path, parse: Callable[[bytes], Record | None]) -> Iterator[Record]:
    with regular(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # incomplete: being written, or a crash
            if (record := parse(line)) is not None:
                yield record
            elif line.strip():
                logger.warning("%s: line %d is not a record and is left out", path, number)


def newest_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl from the last train record on that has `training_seconds`, or all."""
    found = []
    for _, line in _backwards(path):
        if line.endswith(b"\n") and (record := parsed_record(line)) is not None:
            found.append(record)
            if record.get("kind") == "train" and record.get("training_seconds") is not None:
                break
    return found[::-1]


def drop_records_after(path: Path, iteration: int) -> int:
    """Removes curves after `iteration` and a broken last line, atomically; returns the number of records.

    Events stay: those of iterations that will be repeated are part of the run's history. Read from the end
    and only as far as needed, as after weeks the file may be large.
    """
    if not path.exists():
        return 0
    kept, num_removed, begin, end = list[bytes](), 0, 0, path.stat().st_size
    for begin, line in _backwards(path):
        record = parsed_record(line) if line.endswith(b"\n") else None
        is_curve = record is not None and record.get("kind") != "event"
        if record is not None and is_curve and (record.get("iteration") or 0) <= iteration:
            begin += len(line)
            break
        num_removed += is_curve
        if record is not None and not is_curve:
            kept.append(line)
    if begin + sum(map(len, kept)) < end:
        with path.open("rb") as before, replacing(path) as file:
            shutil.copyfileobj(before, file)
            file.truncate(begin)
            file.seek(begin)
            file.writelines(reversed(kept))
    return num_removed


def _backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Place and bytes of every line, the last first."""
    with regular(path).open("rb") as file:
        if not (end := file.seek(0, os.SEEK_END)):
            return
        with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as text:
            while end:
                begin = text.rfind(b"\n", 0, end - 1) + 1
                yield begin, text[begin:end]
                end = begin


def json_value(value: Any) -> Any:
    """`value` in JSON's types: tensors and arrays as lists, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
