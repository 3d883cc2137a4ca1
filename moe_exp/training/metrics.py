"""Writes the metrics of a run to metrics.jsonl, the console, TensorBoard, wandb and Prometheus."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from moe_exp.checkpoint.hf.exporting import exports_as
from moe_exp.checkpoint.state import Progress
from moe_exp.config import Config
from moe_exp.runs import records
from moe_exp.runs.records import EXPERT_KEYS, Record
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.console import console_line, progress_line, terminal_line, timers_line, validation_lines
from moe_exp.training.mirrors import Mirror, Prometheus, axes_of, open_tensorboard, open_wandb

logger = logging.getLogger(__name__)

_PERFORMANCE = (
    "tokens_per_second", "tflops_per_gpu", "elapsed_time_per_iteration_ms", "memory_allocated_bytes",
    "peak_memory_bytes",
)  # fmt: skip
_CONSUMED = ("consumed_samples", "consumed_tokens", "consumed_flops")
_NOT_A_CURVE = (
    "kind", "iteration", "experts", "aux_losses", "timers", "eta_seconds", "max_attention_logits",
    "mtp_losses",
)  # fmt: skip


class Metrics(AbstractContextManager["Metrics"]):
    """Writes a run's records on rank 0 until `close` is called. Raises ConfigError if wandb cannot start."""

    def __init__(self, config: Config, folder: RunFolder, start_iteration: int = 0):
        self._config = config
        self._path = folder.metrics
        self._unwritten: list[Record] = []
        # First, so that nothing is removed if wandb cannot start.
        self._mirrors = open_wandb(config, folder)
        # A run that died after its last checkpoint has logged iterations that will be repeated.
        num_removed = records.drop_records_after(self._path, start_iteration)
        newest = records.newest_records(self._path) if self._path.exists() else []
        self._time = TrainingTime.of(newest, start_iteration)
        kept = [record for record in newest if record.get("kind") in ("train", "valid")]
        if self._mirrors and self._path.exists():
            # streamed: after weeks the file can be gigabytes long
            for record in records.iter_metrics(self._path):
                if record.get("kind") in ("train", "valid"):
                    self._mirror(record)
        self._mirrors += open_tensorboard(config, folder, start_iteration, axes_of(kept[-1]) if kept else {})
        if config.prometheus_file:  # its folder must exist, see `machine_checks`
            self._mirrors.append(Prometheus(config))
        facts = {"num_removed_records": num_removed, "transformers": exports_as(config)}
        self.event("resume" if start_iteration else "start", start_iteration, **facts)

    def train(self, record: Mapping[str, Any]) -> None:
        """Writes a train record. `record` has all TRAIN_KEYS except `training_seconds`, which is added."""
        self._time.add(record)
        full: Record = {"kind": "train", **record, "training_seconds": self._time.until(record["iteration"])}
        if self._config.z_loss_coeff == 0:
            full["z_loss"] = None
        self._write(full)
        # `bare`: Megatron's lines have their own time stamp; a terminal shows the short line instead
        lines = f"{console_line(full, self._config.train_iters, datetime.now())}\n{progress_line(full)}"
        short = terminal_line(full, self._config.train_iters)
        logger.info("%s", lines, extra={"bare": True, "on_terminal": short})
        if full["timers"]:
            logger.info("%s", timers_line(full["timers"]), extra={"bare": True})
        self._mirror(full)

    def valid(
        self, progress: Progress, lm_loss: float, *, ema_lm_loss: float | None = None,
        bytes_per_token: float | None = None,
    ) -> None:  # fmt: skip
        """Writes a validation record. Losses are in nats per token; `bytes_per_token` counts UTF-8 bytes."""
        record: Record = {
            "kind": "valid",
            **{name: getattr(progress, name) for name in ("iteration", *_CONSUMED)},
            "training_seconds": self._time.until(progress.iteration),
            "lm_loss": lm_loss,
            "lm_loss_ppl": math.exp(min(lm_loss, 20.0)),  # min(20.0, NaN) would return 20
            "lm_loss_bits_per_byte": lm_loss / math.log(2) / bytes_per_token if bytes_per_token else None,
            "ema_lm_loss": ema_lm_loss,
        }
        self._write(record)
        short = terminal_line(record, self._config.train_iters)
        logger.info("%s", "\n".join(validation_lines(record)), extra={"bare": True, "on_terminal": short})
        self._mirror(record)

    def event(self, name: str, iteration: int, /, **details: Any) -> None:
        """Writes an event record; takes the arguments of `records.append_event`."""
        self._write(records.event_record(name, iteration, **details))

    def close(self, *, failed: bool = False) -> None:
        """Closes TensorBoard, wandb and Prometheus; with `failed`, wandb shows the run as failed."""
        self._for_each_mirror(lambda mirror: mirror.close(failed))
        self._mirrors = []

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None)

    def _write(self, record: Record) -> None:
        """Appends the record. On a full disk, keeps the record in memory until a later write succeeds."""
        self._unwritten.append(record)
        try:
            records.append(self._path, *self._unwritten)
        except OSError as error:
            if len(self._unwritten) == 1:
                line = "cannot write to %s (%s): keeping new records in memory until a write succeeds"
                logger.warning(line, self._path, error.strerror or error)
            return
        if len(self._unwritten) > 1:
            logger.info("can write to %s again: wrote %d records", self._path, len(self._unwritten))
        self._unwritten = []

    def _mirror(self, record: Record) -> None:
        if self._mirrors:
            values, axes = curves(record), axes_of(record)
            self._for_each_mirror(lambda mirror: mirror.write(values, axes))

    def _for_each_mirror(self, action: Callable[[Mirror], None]) -> None:
        for mirror in list(self._mirrors):
            try:
                action(mirror)
            except Exception as error:  # any error: a mirror must not stop training
                line = "%s failed and receives no further records: %s: %s"
                logger.warning(line, mirror.name, type(error).__name__, error)
                self._mirrors.remove(mirror)


@dataclass
class TrainingTime:
    """Wall time of training, summed over train records (number of iterations * their mean time).
    Iterations repeated after a crash count once, with the time of the repetition.
    """

    iteration: int  # of the last record
    seconds: float = 0.0  # up to that iteration
    per_iteration: float | None = None  # seconds, from the last record

    @classmethod
    def of(cls, records: Sequence[Record], start_iteration: int) -> TrainingTime:
        """Sums the times of a run's records. Records of old runs may lack `training_seconds`."""
        has_time = any(record.get("kind") == "train" for record in records)
        time = cls((records[0].get("iteration") or 0) if has_time else start_iteration)
        for record in records:
            if record.get("kind") == "train":
                time.add(record)
                if (seconds := record.get("training_seconds")) is not None:
                    time.seconds = seconds
            elif record.get("event") in ("start", "resume") and time.per_iteration is None:
                # The time before LOAD_DIR's checkpoint is unknown, so counting starts there.
                time.iteration = record.get("iteration") or 0
        return time

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the time of the iterations that a train record covers."""
        self.per_iteration = (record.get("elapsed_time_per_iteration_ms") or 0.0) / 1e3
        self.seconds += (record["iteration"] - self.iteration) * self.per_iteration
        self.iteration = record["iteration"]

    def until(self, iteration: int) -> float | None:
        """Seconds up to `iteration`, extrapolated at the speed of the last record."""
        if self.per_iteration is None:
            return None
        return self.seconds + (iteration - self.iteration) * self.per_iteration


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Values of a train or valid record, by their names in TensorBoard and wandb, e.g. `train/lm_loss`."""
    values = {}
    for key, value in record.items():
        if key not in _NOT_A_CURVE and value is not None:
            values[f"{'perf' if key in _PERFORMANCE else record['kind']}/{key}"] = float(value)
    if logits := record.get("max_attention_logits"):
        values["train/max_attention_logit"] = float(max(logits))
    for depth, value in enumerate(record.get("mtp_losses") or [], start=1):
        values[f"train/mtp_loss_{depth}"] = float(value)
    for name, value in (record.get("aux_losses") or {}).items():
        values[f"moe/{name}"] = float(value)
    values |= {f"perf/{phase}_ms": float(value) for phase, value in (record.get("timers") or {}).items()}
    for layer in record.get("experts") or []:
        lists = ("layer", "tokens_per_expert", "aux_losses")
        numbers = {key: layer.get(key) for key in EXPERT_KEYS if key not in lists}
        for key, value in (numbers | (layer.get("aux_losses") or {})).items():
            if value is not None:
                values[f"moe/layer_{layer['layer']:02d}/{key}"] = float(value)
    return values
