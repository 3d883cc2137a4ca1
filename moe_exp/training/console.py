"""Log lines of a run: Megatron's format in train.log and pipes, a shorter format on terminals."""

import logging
import math
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from moe_exp.host.devices import device_label
from moe_exp.host.files import count_text
from moe_exp.runs.run_folder import RunFolder


def console_line(record: Mapping[str, Any], train_iters: int, now: datetime) -> str:
    """Log line in the format of Megatron-LM's `training_log`; omits fields without a value."""
    fields = [
        (" consumed samples: {:12d}", "consumed_samples"),
        (" elapsed time per iteration (ms): {:.1f}", "elapsed_time_per_iteration_ms"),
        (" throughput per GPU (TFLOP/s/GPU): {:.1f}", "tflops_per_gpu"),
        (" learning rate: {:.6E}", "learning_rate"),
        (" global batch size: {:5d}", "global_batch_size"),
        (" lm loss: {:.6E}", "lm_loss"),
        (" mtp loss: {:.6E}", "mtp_loss"),
        (" load_balancing_loss: {:.6E}", "load_balancing_loss"),
        (" z_loss: {:.6E}", "z_loss"),
        (" loss scale: {:.1f}", "loss_scale"),
        (" grad norm: {:.3f}", "grad_norm"),
        (" num zeros: {:.1f}", "num_zeros"),
        (" params norm: {:.3f}", "params_norm"),
        (" number of skipped iterations: {:3d}", "skipped_iterations"),
        (" number of nan iterations: {:3d}", "nan_iterations"),
    ]
    head = f"[{now:%Y-%m-%d %H:%M:%S}] iteration {record['iteration']:8d}/{train_iters:8d}"
    shown = (text.format(record[key]) for text, key in fields if record.get(key) is not None)
    return " |".join([head, *shown, ""])


def terminal_line(record: Mapping[str, Any], train_iters: int) -> str:
    """Line for a train or valid record, at most 80 columns; omits the last fields if they do not fit."""
    loss = record["lm_loss"]
    parts = [
        f"step {record['iteration']:{len(str(train_iters))}}/{train_iters}",
        f"{'validation ' if record['kind'] == 'valid' else ''}loss {math.nan if loss is None else loss:.4f}",
    ]
    if record["kind"] == "valid":
        parts.append(f"perplexity {record['lm_loss_ppl']:.2f}")
        if (bits := record["lm_loss_bits_per_byte"]) is not None:
            parts.append(f"{bits:.3f} bits per byte")
        if (averaged := record.get("ema_lm_loss")) is not None:
            parts.append(f"averaged weights {averaged:.4f}")
    else:
        counts = {"skipped": record["skipped_iterations"], "nan": record["nan_iterations"]}
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        speed, seconds = record["tokens_per_second"], round(record["eta_seconds"])
        parts.append(f"{count_text(speed) if speed >= 99999.5 else f'{speed:,.0f}':>5} tokens/s")
        days, hours = divmod(seconds // 3600, 24)
        parts.append(f"eta {f'{days}d {hours}h' if days else str(timedelta(seconds=seconds)):>7}")
        if layers := record["experts"]:
            parts.append(f"expert max {max(layer['max_over_mean'] for layer in layers):.2f}x")
    while len(line := "  ".join(parts)) > 80:
        parts.pop()
    return line


def progress_line(record: Mapping[str, Any]) -> str:
    """Line below Megatron's line, with remaining time, tokens per second and expert load balance."""
    eta = timedelta(seconds=round(record["eta_seconds"]))
    parts = [f"eta {eta}, {record['tokens_per_second']:.0f} tokens/s"]
    if experts := record["experts"]:
        worst = max(experts, key=lambda layer: float(layer["max_over_mean"]))
        parts.append(f"experts max/mean {worst['max_over_mean']:.2f} (layer {worst['layer']})")
        parts.append(f"{worst['microbatch_max_over_mean']:.2f} within a micro-batch")
        parts.append(f"MaxVio {max(layer['max_vio'] for layer in experts):.2f}")
        if dropped := max(layer["dropped_fraction"] for layer in experts):
            parts.append(f"dropped up to {dropped:.1%}")
    return ", ".join(parts)


def timers_line(timers: Mapping[str, float]) -> str:
    """Milliseconds per iteration by phase; a phase in parentheses is part of the phase before it."""
    values = {phase: f"{phase.replace('_', '-')} {value:.1f}" for phase, value in timers.items()}
    if inside := ", ".join(values.pop(phase) for phase in ("all_to_all", "experts") if phase in values):
        values["forward_backward"] = f"{values['forward_backward']} ({inside})"
    return f"ms per iteration: {', '.join(values.values())}"


def validation_lines(record: Mapping[str, Any]) -> list[str]:
    """Megatron's validation line between two lines of dashes."""
    line = f" validation loss at iteration {record['iteration']} | lm loss value: {record['lm_loss']:.6E} | "
    line += f"lm loss PPL: {record['lm_loss_ppl']:.6E} | "
    if (averaged := record.get("ema_lm_loss")) is not None:
        line += f"ema lm loss value: {averaged:.6E} | "
    ruler = "-" * (len(line) + 1)
    return [ruler, line, ruler]


class _Lines(logging.Formatter):
    """Puts time, host name, rank and device before warnings and errors; optionally puts the time before INFO.

    INFO records with the attribute `bare` get no prefix. If a record has the attribute
    `on_terminal`, a terminal shows the attribute's shorter text.
    """

    def __init__(self, rank: int, *, with_time: bool, is_terminal: bool):
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._source = f"{socket.gethostname()} rank {rank} {device_label()}"
        self._with_time, self._is_terminal = with_time, is_terminal

    def formatMessage(self, record: logging.LogRecord) -> str:
        if self._is_terminal and hasattr(record, "on_terminal"):
            return str(record.on_terminal)
        time = f"[{self.formatTime(record, self.datefmt)}] "
        if record.levelno >= logging.WARNING:
            return f"{time}{record.levelname} {self._source} {record.name}: {record.message}"
        return time + record.message if self._with_time and not hasattr(record, "bare") else record.message


class _LogFile(logging.FileHandler):
    """Handler of train.log. It reports only its first write error, as one line on the console."""

    _is_full = False

    def handleError(self, record: logging.LogRecord) -> None:
        # logging calls this inside its `except`
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_full:
            self._is_full = True
            line = f"cannot write to {self.baseFilename} ({error.strerror or error}): log lines are lost"
            with suppress(OSError):
                print(line, file=sys.stderr, flush=True)


def setup_logging(folder: RunFolder, rank: int) -> None:
    """Sets up the console and train.log: rank 0 logs INFO and above, all other ranks WARNING and above."""
    end_logging()
    lowest = logging.INFO if rank == 0 else logging.WARNING
    stdout, stderr = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    stdout.addFilter(lambda record: record.levelno < logging.WARNING)
    stderr.addFilter(lambda record: record.levelno >= logging.WARNING)
    handlers: list[logging.Handler] = [stdout, stderr]
    # Rank 0 has created the folder. Without a shared file system, a node logs only to its console.
    if folder.path.is_dir():
        # delay: ranks without warnings never open the file.
        handlers.append(_LogFile(folder.log, encoding="utf-8", delay=True))
    for handler in handlers:
        handler.setLevel(lowest)
        is_file = isinstance(handler, logging.FileHandler)
        # the ranks inherit the launcher's stdout, so this is the user's terminal
        is_terminal = not is_file and sys.stdout.isatty()
        handler.setFormatter(_Lines(rank, with_time=is_file, is_terminal=is_terminal))
        logging.getLogger().addHandler(handler)
    logging.getLogger("moe_exp").setLevel(lowest)


def end_logging() -> None:
    """Removes and closes the handlers installed by `setup_logging`."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Lines)]:
        root.removeHandler(handler)
        handler.close()
