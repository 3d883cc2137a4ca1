"""Records of metrics.jsonl: content, reading and appending. Does not import torch.

Every record is a dict with `kind` and `iteration`:

    train  keys of TRAIN_KEYS, every LOG_INTERVAL iterations
    valid  keys of VALID_KEYS, every EVAL_INTERVAL iterations
    event  `event` (the name), `time` (ISO 8601) and the details listed in EVENTS; written by rank 0, or by
           the launcher if ranks died

Values that were not measured are null. NaN and infinity are also null, because JSON has neither.
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

# Means and rates cover the iterations since the previous record; sums cover all ranks.
TRAIN_KEYS = {
    "iteration": "number of the iteration, from 1",
    "consumed_samples": "samples since the start of training",
    "consumed_tokens": "tokens since the start of training",
    "consumed_flops": "model FLOPs of all ranks since the start of training (planner.costs.flops)",
    "training_seconds": "wall time of all iterations so far, over all starts, without evaluation and saves",
    "global_batch_size": "samples per iteration, mean since the previous record",
    "lm_loss": "cross entropy, nats per token",
    "mtp_loss": "mean of the multi-token prediction losses, before MTP_LOSS_COEFF; null: MTP_NUM_LAYERS=0",
    "mtp_losses": "cross entropy of each layer for multi-token prediction; empty: MTP_NUM_LAYERS=0",
    "load_balancing_loss": "mean over MoE layers, before its coefficient; 1.0: perfect balance; null: dense",
    "z_loss": "router z-loss, mean over MoE layers, before its coefficient; null: coefficient 0 or dense",
    "aux_losses": "each loss of AUX_LOSS_TYPE by name, mean over MoE layers, before its coefficient",
    "learning_rate": "after this iteration's step of the schedule, as in Megatron's log",
    "grad_norm": "L2 norm before clipping, or null",
    "num_zeros": "number of zeros in the gradient, or null",
    "params_norm": "L2 norm of the parameters, or null",
    "max_attention_logits": "largest attention logit of each layer, before QK_CLIP; null without QK_CLIP",
    "loss_scale": "scale factor of the loss in fp16; 1.0 in other formats",
    "elapsed_time_per_iteration_ms": "wall time",
    "tokens_per_second": "over all ranks",
    "tflops_per_gpu": "model TFLOP/s per rank, or null",
    "eta_seconds": "remaining time until TRAIN_ITERS, at the current speed per sample",
    "skipped_iterations": "iterations without an optimizer step (fp16 overflow, or gradient not finite)",
    "nan_iterations": "iterations whose loss is not finite",
    "memory_allocated_bytes": "peak allocation on rank 0's device, or null on a CPU",
    "peak_memory_bytes": "highest peak of all ranks since their start: allocated (GPU) or resident (CPU)",
    "timers": "ms per iteration by phase (training.interval.PHASES), mean over ranks; null: no LOG_TIMERS",
    "experts": "one object per MoE layer, with the keys of EXPERT_KEYS",
}
EXPERT_KEYS = {
    "layer": "number of the layer in the model, from 1",
    "tokens_per_expert": "slots per expert before any drop; usually their sum is tokens times TOPK",
    "experts_per_token": "slots per token, mean over tokens; TOPK unless tokens choose their number",
    "max_over_mean": "slots of the busiest expert over the mean, in the whole interval",
    "microbatch_max_over_mean": "mean max_over_mean of a rank's micro-batches; drives memory, drops and time",
    "max_vio": "max_over_mean - 1 of a global batch, mean over the last 32 batches of the interval",
    "dead_fraction": "fraction of experts with less than 1% of their fair share of slots",
    "dropped_fraction": "fraction of slots dropped over capacity",
    "router_entropy": "entropy of a token's scores, nats, mean over tokens; ln(NUM_EXPERTS): uniform",
    "top1_weight": "largest router weight of a token, mean over tokens, after normalization and scaling",
    "load_balancing_loss": "before its coefficient; 1.0: perfect balance",
    "z_loss": "router z-loss before its coefficient, even if that is 0; measures the size of the logits",
    "aux_losses": "each loss of AUX_LOSS_TYPE by name, before its coefficient",
}
VALID_KEYS = {
    "iteration": "iteration after which it was measured",
    "consumed_samples": "training samples so far",
    "consumed_tokens": "training tokens so far",
    "consumed_flops": "training FLOPs so far",
    "training_seconds": "training time so far, or null before the first train record",
    "lm_loss": "cross entropy on the validation data, nats per token",
    "lm_loss_ppl": "perplexity, exp(lm_loss), with lm_loss capped at 20 as in Megatron",
    "lm_loss_bits_per_byte": "lm_loss / ln 2 / UTF-8 bytes per token; null without a known tokenizer",
    "ema_lm_loss": "lm_loss with the averaged weights (EMA_DECAY), or null without them",
}
EVENTS = {
    "start": "training starts at iteration 0",
    "resume": "training resumes from a checkpoint",
    "checkpoint": "a checkpoint was saved: seconds, bytes",
    "checkpoint_failed": "a checkpoint could not be saved: reason",
    "upload": "a checkpoint was copied to REMOTE_DIR: seconds, bytes",
    "upload_failed": "a checkpoint could not be copied to REMOTE_DIR: reason",
    "preflight": "nodes were checked before training: grade, seconds, findings, exclude",
    "damaged_checkpoint": "a checkpoint could not be used to resume: reason",
    "kernels_failed": "a Triton kernel differs from plain torch and is not used: part, problems, backend",
    "graph_failed": "the CUDA graph of a micro-batch failed its check and is not used: reason",
    "restore_failed": "loaded tensors differ from the saved tensors; the job ends: checkpoint, tensors",
    "replicas_differ": "replicas differ or parameter groups are wrong; the job ends: problems",
    "data_stage": "a stage of DATA_STAGES starts with this iteration: stage, train_data, seq_len",
    "other_data": "the data differ from the checkpoint's data (ALLOW_OTHER_DATA): changes",
    "changed_settings": "settings differ from the previous start's: changes",
    "bad_step": "first of consecutive steps with non-finite loss or gradient: loss, grad_norm, samples",
    "too_many_bad_steps": "MAX_BAD_STEPS consecutive bad steps ended the run: checkpoint",
    "spike": "the loss or gradient norm jumped: z-scores, levels, samples and their documents",
    "spike_end": "the spike is over: first_iteration, outcome, highest_loss, highest_grad_norm",
    "rollback": "the run resumes before a spike and skips the spike's batches: back_to, samples, set_aside",
    "no_rollback": "a rollback was not possible: reason",
    "slow_rank": "a rank is slower than its peers: rank, host, device, phase, factor (own time / peers')",
    "slow_rank_end": "a rank is no longer slow: rank, host, device",
    "sdc": "silent corruption; the run rolls back: problem, ranks, hosts, back_to, set_aside",
    "hang": "no rank made progress, so all were terminated: reason, deviating ranks and hosts, why, folder",
    "stop": "the run stops before TRAIN_ITERS: reason (faults.STOP_REASONS)",
    "end": "the ranks ended on their own: status, wall_seconds",
    "rank_failed": "a rank died: rank, host, device, cause (its error, or the signal)",
    "diagnosis": "what to do after failed ranks: action, category, reason, advice, host, line",
    "restart": "the ranks restart: number, reason (failure or asked), failures so far, delay_seconds",
}


def append_event(path: Path, name: str, iteration: int, /, **details: Any) -> None:
    """Appends one of EVENTS to a metrics.jsonl; `iteration` is the last iteration known to be complete."""
    append(path, event_record(name, iteration, **details))


def event_record(name: str, iteration: int, /, **details: Any) -> Record:
    """Record of an event at the current time; arguments as in `append_event`."""
    if name not in EVENTS:
        raise ValueError(f"event={name}: must be one of {', '.join(EVENTS)}. Fix: add it to EVENTS.")
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"kind": "event", "iteration": iteration, "event": name, "time": now, **details}


def append(path: Path, *records: Record) -> None:
    """Appends records to a metrics.jsonl. If writing fails, appends none of them and raises OSError."""
    left = "".join(json.dumps(json_value(record), allow_nan=False) + "\n" for record in records).encode()
    # Reopened each time, because network file systems show a record to other nodes only after a close.
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            left = b"\n" + left  # after a line that a killed process left incomplete
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)  # otherwise the next record would be appended to a partial one
            raise


def read_metrics(path: Path) -> list[Record]:
    """All records on complete lines of a metrics.jsonl; FileNotFoundError if the file is missing."""
    return list(_records(path, lambda line: parsed_record(line.decode(errors="replace"))))


def iter_metrics(path: Path) -> Iterator[Record]:
    """Like `read_metrics`, but yields records one by one, because the file of a long run is large."""
    return _records(path, fast_record)


def last_records(path: Path, num_bytes: int = 1 << 20) -> list[Record]:
    """Records in the last `num_bytes` of a metrics.jsonl. Does not read the rest, which can be large."""
    with regular(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - num_bytes))
        lines = file.read().split(b"\n")[(size > num_bytes) : -1]
    found = (parsed_record(line) for line in lines)  # skips invalid lines, which read_metrics reports
    return [record for record in found if record is not None]


def parsed_record(line: str | bytes) -> Record | None:
    """Record on a line, or None if the line is invalid. Integers of more than 40 digits become None."""
    # json.loads accepts NaN, unlike orjson.
    try:
        record = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) <= 40 else None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def fast_record(line: bytes) -> Record | None:
    """Like `parsed_record`, but five times as fast; integers of more than 64 bits become floats."""
    try:
        record = orjson.loads(line)
    except ValueError:
        return parsed_record(line.decode(errors="replace"))
    return record if isinstance(record, dict) else None


def time_of(event: Record) -> float | None:
    """Time of an event in seconds since the epoch; None if the event has no valid time."""
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _records(path: Path, parse: Callable[[bytes], Record | None]) -> Iterator[Record]:
    with regular(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # incomplete: still being written, or left by a crash
            if (record := parse(line)) is not None:
                yield record
            elif line.strip():
                logger.warning("%s: line %d is not a record, ignoring it", path, number)


def newest_records(path: Path) -> list[Record]:
    """The last train record with `training_seconds`, and all later records; without such a record, all."""
    found = []
    for _, line in _backwards(path):
        if line.endswith(b"\n") and (record := parsed_record(line)) is not None:
            found.append(record)
            if record.get("kind") == "train" and record.get("training_seconds") is not None:
                break
    return found[::-1]


def drop_records_after(path: Path, iteration: int) -> int:
    """Atomically removes train and valid records after `iteration`; returns the number of removed records."""
    if not path.exists():
        return 0
    # Keeps events, which are part of the run's history even if their iterations are repeated. Reads backwards
    # and only as far as needed, because the file may be large.
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
    """Yields (offset, bytes) of each line, from the last to the first."""
    with regular(path).open("rb") as file:
        if not (end := file.seek(0, os.SEEK_END)):
            return
        with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as text:
            while end:
                begin = text.rfind(b"\n", 0, end - 1) + 1
                yield begin, text[begin:end]
                end = begin


def json_value(value: Any) -> Any:
    """Converts `value` to JSON types: tensors and arrays to lists, non-finite numbers to None."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
