"""Metrics of a run: metrics.jsonl is written first, then the console, TensorBoard and wandb mirror it. Log messages, too.

Every record is a dict with `kind` and `iteration`:

    train  the keys of TRAIN_KEYS, every LOG_INTERVAL iterations
    valid  the keys of VALID_KEYS, every EVAL_INTERVAL iterations
    event  event, time (ISO 8601) and what the event needs: start, resume, and whatever the training loop reports

Values that were not measured are null. So are NaN and infinity, which JSON has not; nan_iterations tells them apart.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_exp.config import Config, ConfigError, problem
from moe_exp.files import write_atomically
from moe_exp.run_folder import RunFolder

logger = logging.getLogger(__name__)

Record = dict[str, Any]

# Means and rates are over the iterations since the previous record; sums are over all ranks.
TRAIN_KEYS = {
    "iteration": "number of the iteration, from 1",
    "consumed_samples": "samples since the start of training",
    "consumed_tokens": "tokens since the start of training",
    "global_batch_size": "samples in this iteration",
    "lm_loss": "cross entropy, nats per token",
    "load_balancing_loss": "mean over MoE layers before its coefficient; 1.0: perfect balance; null: dense",
    "z_loss": "router z-loss, mean over MoE layers before its coefficient; null: coefficient 0 or dense",
    "aux_losses": "mean over MoE layers of each loss of AUX_LOSS_TYPE before its coefficient, by its name",
    "learning_rate": "after this iteration's step of the schedule, as Megatron logs it",
    "grad_norm": "L2 norm before clipping, or null",
    "num_zeros": "zeros in the gradient, or null",
    "params_norm": "L2 norm of the parameters, or null",
    "loss_scale": "factor on the loss (fp16), else 1.0",
    "elapsed_time_per_iteration_ms": "wall time",
    "tokens_per_second": "of all ranks together",
    "tflops_per_gpu": "model TFLOP/s per rank, or null",
    "eta_seconds": "until TRAIN_ITERS at this speed",
    "skipped_iterations": "iterations without an optimizer step (overflow) since the previous record",
    "nan_iterations": "iterations with a loss that is not a number since the previous record",
    "memory_allocated_bytes": "largest allocation of rank 0's device, or null on a CPU",
    "peak_memory_bytes": "of the rank that needed most since its start: allocated on its device, or on a CPU the process's resident size",
    "experts": "one object per MoE layer: layer (from 1), tokens_per_expert, max_over_mean, dropped_fraction, router_entropy (nats)",
}
VALID_KEYS = {
    "iteration": "iteration after which it was measured",
    "consumed_samples": "training samples until then",
    "consumed_tokens": "training tokens until then",
    "lm_loss": "cross entropy on the validation data, nats per token",
    "lm_loss_ppl": "perplexity, exp(lm_loss), with lm_loss cut at 20 as in Megatron",
    "lm_loss_bits_per_byte": "lm_loss / ln 2 / UTF-8 bytes per token of the validation data, or null without a known tokenizer",
}
_PERFORMANCE = ("tokens_per_second", "tflops_per_gpu", "elapsed_time_per_iteration_ms", "memory_allocated_bytes", "peak_memory_bytes")
_NOT_A_CURVE = ("kind", "iteration", "experts", "aux_losses", "eta_seconds")


class Metrics:
    """Writer of one run's records; only rank 0 makes one. Use it in a `with` block, or call `close`.

    Args:
        config: settings of the run.
        folder: its run folder, made by `open_run_folder`.
        start_iteration: iteration of the checkpoint that training goes on from, 0 without one. Records after it come
            from a run that died beyond its last checkpoint and are removed, so that no iteration is there twice.

    Raises:
        ConfigError: wandb is asked for and cannot start.
    """

    def __init__(self, config: Config, folder: RunFolder, start_iteration: int = 0):
        self._config = config
        self._path = folder.metrics
        # wandb first: where it cannot start, nothing has been opened or removed yet.
        self._mirrors: list[Any] = [*_open_wandb(config, folder), *_open_tensorboard(folder, start_iteration)]
        num_removed = drop_records_after(self._path, start_iteration)
        self.event("resume" if start_iteration else "start", start_iteration, num_removed_records=num_removed)

    def train(self, record: Mapping[str, Any]) -> None:
        """Writes a train record, which has exactly the keys of TRAIN_KEYS; ValueError otherwise."""
        if missing_or_unknown := set(record) ^ set(TRAIN_KEYS):
            raise ValueError(f"train record: these keys are missing or unknown: {', '.join(sorted(missing_or_unknown))}")
        full: Record = {"kind": "train", **record}
        if not self._config.use_moe:
            full["load_balancing_loss"] = None
        if not self._config.use_moe or self._config.z_loss_coeff == 0:
            full["z_loss"] = None
        self._write(full)
        logger.info("%s", console_line(full, self._config.train_iters, datetime.now()), extra=_BARE)
        logger.info("%s", progress_line(full), extra=_BARE)
        self._mirror(full)

    def valid(
        self, *, iteration: int, consumed_samples: int, consumed_tokens: int, lm_loss: float, bytes_per_token: float | None = None
    ) -> None:
        """Writes a valid record; `lm_loss` in nats per token, and the UTF-8 bytes that these stand for where they are known."""
        ppl = math.exp(min(lm_loss, 20.0))  # in this order NaN stays NaN
        record: Record = {"kind": "valid", "iteration": iteration, "consumed_samples": consumed_samples}
        record |= {"consumed_tokens": consumed_tokens, "lm_loss": lm_loss, "lm_loss_ppl": ppl}
        record["lm_loss_bits_per_byte"] = lm_loss / math.log(2) / bytes_per_token if bytes_per_token else None
        self._write(record)
        for line in validation_lines(record):
            logger.info("%s", line, extra=_BARE)
        self._mirror(record)

    def event(self, name: str, iteration: int, **details: Any) -> None:
        """Writes an event record, for instance a saved checkpoint or a loss spike."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write({"kind": "event", "iteration": iteration, "event": name, "time": now, **details})

    def close(self, *, failed: bool = False) -> None:
        """Ends TensorBoard and wandb; `failed` is how wandb shows the run."""
        for mirror in self._mirrors:
            mirror.close(failed)
        self._mirrors = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)

    def _write(self, record: Record) -> None:
        # Opened anew each time: closing is what makes a record visible to readers on other nodes of a network file system.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_json_value(record), allow_nan=False) + "\n")

    def _mirror(self, record: Record) -> None:
        values = curves(record)
        for mirror in self._mirrors:
            mirror.write(values, record["iteration"])


def console_line(record: Mapping[str, Any], train_iters: int, now: datetime) -> str:
    """The line of Megatron-LM's `training_log`, field for field; fields without a value are left out, as there."""
    losses = [(" lm loss: {:.6E}", "lm_loss"), (" load_balancing_loss: {:.6E}", "load_balancing_loss"), (" z_loss: {:.6E}", "z_loss")]
    fields = [
        (" consumed samples: {:12d}", "consumed_samples"),
        (" elapsed time per iteration (ms): {:.1f}", "elapsed_time_per_iteration_ms"),
        (" throughput per GPU (TFLOP/s/GPU): {:.1f}", "tflops_per_gpu"),
        (" learning rate: {:.6E}", "learning_rate"),
        (" global batch size: {:5d}", "global_batch_size"),
        *losses,
        (" loss scale: {:.1f}", "loss_scale"),
        (" grad norm: {:.3f}", "grad_norm"),
        (" num zeros: {:.1f}", "num_zeros"),
        (" params norm: {:.3f}", "params_norm"),
        (" number of skipped iterations: {:3d}", "skipped_iterations"),
        (" number of nan iterations: {:3d}", "nan_iterations"),
    ]
    line = f"[{now:%Y-%m-%d %H:%M:%S}] iteration {record['iteration']:8d}/{train_iters:8d} |"
    return line + "".join(text.format(record[key]) + " |" for text, key in fields if record.get(key) is not None)


def progress_line(record: Mapping[str, Any]) -> str:
    """What Megatron's line has no field for: time left, tokens per second and the balance of the experts."""
    parts = []
    if (eta_seconds := record.get("eta_seconds")) is not None and math.isfinite(eta_seconds):
        parts.append(f"eta {timedelta(seconds=round(eta_seconds))}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{record['tokens_per_second']:.0f} tokens/s")
    if experts := [layer for layer in record.get("experts") or [] if layer["max_over_mean"] is not None]:
        worst = max(experts, key=lambda layer: float(layer["max_over_mean"]))
        parts.append(f"experts max/mean {worst['max_over_mean']:.2f} (layer {worst['layer']})")
        if (dropped := max(layer["dropped_fraction"] or 0.0 for layer in experts)) > 0:
            parts.append(f"dropped up to {dropped:.1%}")
    return ", ".join(parts)


def validation_lines(record: Mapping[str, Any]) -> list[str]:
    """Megatron's validation line between its two rulers."""
    line = f" validation loss at iteration {record['iteration']} | lm loss value: {record['lm_loss']:.6E} | "
    line += f"lm loss PPL: {record['lm_loss_ppl']:.6E} | "
    ruler = "-" * (len(line) + 1)
    return [ruler, line, ruler]


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a train or valid record under the names of TensorBoard and wandb, such as `train/lm_loss`."""
    values = {}
    for key, value in record.items():
        if key not in _NOT_A_CURVE and value is not None:
            values[f"{'perf' if key in _PERFORMANCE else record['kind']}/{key}"] = float(value)
    for name, value in (record.get("aux_losses") or {}).items():
        values[f"moe/{name}"] = float(value)
    for layer in record.get("experts") or []:
        for key in ("max_over_mean", "dropped_fraction", "router_entropy"):
            if layer.get(key) is not None:
                values[f"moe/layer_{layer['layer']:02d}/{key}"] = float(layer[key])
    return values


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl. A last line that a crash cut off is left out; FileNotFoundError if there is no file."""
    return list(_records(path))


def _records(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and line.endswith("\n"):
                yield record
            elif line.endswith("\n") and line.strip():
                logger.warning("%s: line %d is not a record and is left out", path, number)


def drop_records_after(path: Path, iteration: int) -> int:
    """Removes records after `iteration` and a broken last line from a metrics.jsonl, atomically; returns how many records."""
    if not path.exists():
        return 0
    num_removed = 0
    kept = []
    for record in _records(path):
        if record.get("iteration", 0) > iteration:
            num_removed += 1
        else:
            kept.append(json.dumps(record) + "\n")
    write_atomically(path, "".join(kept))
    return num_removed


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return _json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    def __init__(self, writer: Any):
        self._writer = writer

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _open_tensorboard(folder: RunFolder, start_iteration: int) -> list[_TensorBoard]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("no TensorBoard files: the tensorboard package is not installed (pip install tensorboard)")
        return []
    writer: Any = SummaryWriter
    return [_TensorBoard(writer(str(folder.tensorboard), purge_step=start_iteration + 1))]


class _Wandb:
    def __init__(self, run: Any):
        self._run = run
        # Our own axis: wandb's step never goes back, and would drop what a resumed run writes again.
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")

    def write(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log({**values, "iteration": iteration})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def wandb_problems(config: Config) -> list[str]:
    """Why wandb cannot run as the settings ask; an empty list if it can, or is not asked for."""
    if not config.wandb_project or config.wandb_mode == "disabled":
        return []
    try:
        from wandb import init  # noqa: F401 - a folder named wandb imports too, and has no init
    except ImportError:
        fix = "run `pip install moe-exp[wandb]`, or unset WANDB_PROJECT"
        return [problem("wandb_project", config.wandb_project, "the wandb package is not installed", fix)]
    return []


def _open_wandb(config: Config, folder: RunFolder) -> list[_Wandb]:
    if not config.wandb_project or config.wandb_mode == "disabled":
        return []
    if problems := wandb_problems(config):
        raise ConfigError(problems)
    import wandb

    try:
        run = wandb.init(
            project=config.wandb_project, mode=config.wandb_mode, id=_wandb_id(folder), name=config.name,
            group=config.moe_type if config.use_moe else "dense", config=config.model_dump(),
            dir=str(folder.path), resume="allow" if config.wandb_mode == "online" else None,
        )  # fmt: skip
    except wandb.errors.Error as error:
        fix = "run `wandb login`, or set WANDB_MODE=offline"
        raise ConfigError([problem("wandb_mode", config.wandb_mode, f"wandb cannot start ({' '.join(str(error).split())})", fix)]) from None
    return [_Wandb(run)]


def _wandb_id(folder: RunFolder) -> str:
    """The id of this run folder's wandb run: the same at every start, so that a resumed run goes on in one page."""
    path = folder.wandb / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()


# Marks lines that carry their own time or form, such as Megatron's.
_BARE = {"bare": True}


class _Lines(logging.Formatter):
    """INFO as it is, or with the time; WARNING and above with time, host name and rank."""

    def __init__(self, rank: int, *, with_time: bool):
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._source = f"{socket.gethostname()} rank {rank}"
        self._with_time = with_time

    def formatMessage(self, record: logging.LogRecord) -> str:
        time = f"[{self.formatTime(record, self.datefmt)}] "
        if record.levelno >= logging.WARNING:
            return f"{time}{record.levelname} {self._source} {record.name}: {record.message}"
        return time + record.message if self._with_time and not hasattr(record, "bare") else record.message


def setup_logging(folder: RunFolder, rank: int) -> None:
    """Sends log messages to the console and to train.log: INFO from rank 0, WARNING and above from every rank.

    INFO goes to stdout, the rest to stderr. Rank 0 opens the run folder first; a rank that cannot see the folder
    (no shared file system) writes to its console alone. Calling it again replaces the handlers of the call before.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Lines)]:
        root.removeHandler(handler)
        handler.close()
    lowest = logging.INFO if rank == 0 else logging.WARNING
    stdout, stderr = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    stdout.addFilter(lambda record: record.levelno < logging.WARNING)
    stderr.addFilter(lambda record: record.levelno >= logging.WARNING)
    handlers: list[logging.Handler] = [stdout, stderr]
    if folder.path.is_dir():
        # delay: of thousands of ranks, those without a warning never open the file.
        handlers.append(logging.FileHandler(folder.log, encoding="utf-8", delay=True))
    for handler in handlers:
        handler.setLevel(lowest)
        handler.setFormatter(_Lines(rank, with_time=isinstance(handler, logging.FileHandler)))
        root.addHandler(handler)
    logging.getLogger("moe_exp").setLevel(lowest)
