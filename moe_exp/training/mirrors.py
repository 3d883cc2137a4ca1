"""Mirrors that copy the records of metrics.jsonl to TensorBoard, wandb and a Prometheus file."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import TRAITS, Config, ConfigError, problem, to_yaml
from moe_exp.host.files import write_atomically
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)


# X axes of curves and their keys in records.
AXES = {
    "iteration": "iteration",
    "tokens": "consumed_tokens",
    "flops": "consumed_flops",
    "seconds": "training_seconds",
}
# Axes that replace TensorBoard's step for the losses: unit and factor. Steps are integers, hence small units.
_STEPS = {"tokens": ("tokens", 1.0), "flops": ("gflops", 1e-9), "seconds": ("milliseconds", 1e3)}
_OVER_STEPS = ("train/lm_loss", "valid/lm_loss")

Axes = Mapping[str, float]


def axes_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Position of a train or valid record on the AXES of plots; axes without a value are omitted."""
    found = {axis: record.get(key) for axis, key in AXES.items()}
    return {axis: value for axis, value in found.items() if value is not None}


# Every mirror has `name`, `close`, and `write` for a record's numbers by name and its position on AXES.


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, config: Config, folder: RunFolder, start_iteration: int, last: Axes):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        make: Any = SummaryWriter
        self._writer = make(str(folder.tensorboard), purge_step=start_iteration + 1)
        text = "".join(f"    {line}\n" for line in to_yaml(config).splitlines())
        self._writer.add_text("config", text, start_iteration + 1)
        self._writer.add_text("group", group_of(config), start_iteration + 1)
        # Settings for the HPARAMS tab. SummaryWriter.add_hparams would create a second run beside every run.
        values = {
            name: str(value).lower() if isinstance(value, bool) or value is None else value
            for name, value in config.model_dump().items()
            if TRAITS[name].part not in ("place", "care")
        }
        for summary in hparams(values, dict.fromkeys(_OVER_STEPS, 0))[:2]:
            self._writer.file_writer.add_summary(summary)
        # TensorBoard plots only over steps or wall-clock time, so the losses are repeated over tokens, FLOPs
        # and training time. Each has its own folder, because a resume purges a folder by step.
        self._by_axis = {}
        for axis, (unit, scale) in _STEPS.items() if config.tensorboard_axes else ():
            purge_step = round(last[axis] * scale) + 1 if axis in last else 0
            self._by_axis[axis] = make(str(folder.tensorboard / f"by_{unit}"), purge_step=purge_step)

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        for name, value in values.items():
            self._writer.add_scalar(tensorboard_name(name), value, axes["iteration"])
        for axis, writer in self._by_axis.items():
            unit, scale = _STEPS[axis]
            for name in _OVER_STEPS:
                if name in values and axis in axes:
                    writer.add_scalar(f"{name}_by_{unit}", values[name], round(axes[axis] * scale))
            writer.flush()
        self._writer.flush()

    def close(self, failed: bool) -> None:
        for writer in (self._writer, *self._by_axis.values()):
            writer.close()


def tensorboard_name(name: str) -> str:
    """Name of a curve in TensorBoard. `moe/` and `perf/` get the prefix `train_` to sort after `train/`."""
    return f"train_{name}" if name.startswith(("moe/", "perf/")) else name


def open_tensorboard(config: Config, folder: RunFolder, start_iteration: int, last: Axes) -> list[Mirror]:
    """The TensorBoard mirror, or [] if TensorBoard is not installed or its folder is not writable."""
    # The next `write` raises the errors of TensorBoard's writer threads; suppress their tracebacks on stderr.
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    if not getattr(before, "leaves_out_tensorboard", False):  # set by an earlier run in this process
        hook.leaves_out_tensorboard = True  # type: ignore[attr-defined]
        threading.excepthook = hook
    try:
        return [_TensorBoard(config, folder, start_iteration, last)]
    except ImportError:
        logger.info("not writing TensorBoard files: tensorboard is not installed (pip install tensorboard)")
    except OSError as error:
        line = "not writing TensorBoard files: cannot write to %s (%s)"
        logger.warning(line, folder.tensorboard, error.strerror or error)
    return []


def group_of(config: Config) -> str:
    """Kind of model: `dense`, `moe` or `dmoe`."""
    return config.moe_type if config.use_moe else "dense"


# Non-finite numbers in Prometheus' text format.
_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class Prometheus:
    """Writes the latest values to PROMETHEUS_FILE as gauges for node_exporter's textfile collector."""

    name = "Prometheus"

    def __init__(self, config: Config):
        name = config.name.replace("\\", "\\\\").replace('"', '\\"')
        self._path, self._label = Path(config.prometheus_file), f'run="{name}"'
        self._values: dict[str, float] = {}
        self._failed = False

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        position = {f"consumed_{axis}": value for axis, value in axes.items() if axis != "iteration"}
        self._values |= {**values, "iteration": axes["iteration"], **position}
        self._values["last_record_timestamp_seconds"] = time.time()
        # The format requires all values of a metric to be adjacent. The layer is a label, so that one query
        # returns all layers.
        metrics: dict[str, list[str]] = {}
        for name, value in sorted(self._values.items()):
            layer = re.fullmatch(r"moe/layer_(\d+)/(.+)", name)
            metric = "moe_exp_" + re.sub(r"\W", "_", f"layer/{layer[2]}" if layer else name, flags=re.ASCII)
            label = f'{self._label},layer="{int(layer[1])}"' if layer else self._label
            number = repr(float(value))
            line = f"{metric}{{{label}}} {_NOT_FINITE.get(number, number)}"
            metrics.setdefault(metric, []).append(line)
        lines = [line for name, of in metrics.items() for line in (f"# TYPE {name} gauge", *of)]
        try:
            # atomically, as the collector reads the file at any time
            write_atomically(self._path, "\n".join(lines) + "\n")
            self._failed = False
        except OSError as error:
            # warn once per outage, not once per record
            if not self._failed:
                line = "PROMETHEUS_FILE=%s: cannot be written (%s)"
                logger.warning(line, self._path, error.strerror or error)
            self._failed = True

    def close(self, failed: bool) -> None:
        """Keeps the file, because its timestamp shows when the run ended."""


class _Wandb:
    name = "wandb"

    def __init__(self, run: Any):
        self._run = run
        # Our own axes, because wandb's step counts calls and never decreases.
        for axis in AXES:
            run.define_metric(axis)
        run.define_metric("*", step_metric="iteration")
        # wandb cannot delete iterations that an earlier start sent, so they are not sent again. An offline
        # run starts empty.
        self._last = int(run.summary.get("iteration") or 0)

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        if axes["iteration"] > self._last:
            self._run.log({**values, **axes})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


Mirror = _TensorBoard | Prometheus | _Wandb


def open_wandb(config: Config, folder: RunFolder) -> list[Mirror]:
    """The wandb mirror, or [] if wandb is not requested. Raises ConfigError if wandb cannot start. The
    caller must write the run's old records to the mirror before new ones.
    """
    if not config.wandb_project or config.wandb_mode == "disabled":
        return []
    try:
        from wandb import errors, init  # a folder named wandb can be imported, but has no init
    except ImportError:
        rule = "the wandb package is not installed"
        fix = "run `pip install moe-exp[wandb]`, or unset WANDB_PROJECT"
        raise ConfigError([problem("wandb_project", config.wandb_project, rule, fix)]) from None

    if config.wandb_mode == "offline":
        # wandb cannot append to offline files, so every start writes the complete run again under the same
        # id. Files of earlier starts are moved out of reach of `wandb sync`, because ids must be unique.
        for path in sorted(folder.wandb.glob("offline-run-*")):
            replaced = folder.wandb / "replaced" / path.name
            replaced.parent.mkdir(exist_ok=True)
            if replaced.exists():
                replaced = replaced.with_name(f"{path.name}-{secrets.token_hex(4)}")
            path.rename(replaced)
    # A constant id keeps a resumed run on one page. Online, wandb continues that run.
    run_id = folder.wandb / "run_id"
    if not run_id.exists():
        run_id.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run_id, secrets.token_hex(4))
    try:
        run = init(
            project=config.wandb_project, mode=config.wandb_mode, name=config.name, group=group_of(config),
            id=run_id.read_text(encoding="utf-8").strip(), tags=[group_of(config)],
            config=config.model_dump(), dir=str(folder.path),
            resume="allow" if config.wandb_mode == "online" else None,
        )  # fmt: skip
    except errors.Error as error:
        fix, reason = "run `wandb login`, or set WANDB_MODE=offline", " ".join(str(error).split())
        if key := os.environ.get("WANDB_API_KEY"):
            reason = reason.replace(key, "the key")
        rule = f"wandb cannot start ({reason})"
        raise ConfigError([problem("wandb_mode", config.wandb_mode, rule, fix)]) from None
    return [_Wandb(run)]
