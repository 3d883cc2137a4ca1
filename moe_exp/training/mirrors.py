"""The mirrors of metrics.jsonl: TensorBoard and wandb."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from moe_exp.config import Config, ConfigError, problem, to_yaml
from moe_exp.host.files import write_atomically
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)


# Axes that curves can be drawn over, and what counts them in a record.
AXES = {
    "iteration": "iteration",
    "tokens": "consumed_tokens",
    "flops": "consumed_flops",
    "seconds": "training_seconds",
}
# Those that TensorBoard, whose steps are whole numbers, gets as steps of the losses: the unit, and how many
# are one of AXES.
_STEPS = {"tokens": ("tokens", 1.0), "flops": ("gflops", 1e-9), "seconds": ("milliseconds", 1e3)}
_OVER_STEPS = ("train/lm_loss", "valid/lm_loss")

Axes = Mapping[str, float]


def axes_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Where a train or valid record lies on each of AXES; those that the record does not tell are left
    out.
    """
    found = {axis: record.get(key) for axis, key in AXES.items()}
    return {axis: value for axis, value in found.items() if value is not None}


class Mirror(Protocol):
    """Shows what is written to metrics.jsonl."""

    name: str

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        """One record: its numbers by their names, and where it lies on AXES."""

    def close(self, failed: bool) -> None: ...


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, writer: Any, by_axis: Mapping[str, Any]):
        self._writer, self._by_axis = writer, by_axis

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, axes["iteration"])
        for axis, writer in self._by_axis.items():
            for name in _OVER_STEPS:
                if name in values and axis in axes:
                    writer.add_scalar(f"{name}_by_{_STEPS[axis][0]}", values[name], _step(axis, axes))
            writer.flush()
        self._writer.flush()

    def close(self, failed: bool) -> None:
        for writer in (self._writer, *self._by_axis.values()):
            writer.close()


def _step(axis: str, axes: Axes) -> int:
    return round(axes[axis] * _STEPS[axis][1])


def open_tensorboard(config: Config, folder: RunFolder, start_iteration: int, last: Axes) -> list[Mirror]:
    """Its files, empty from `start_iteration` on; none where the package is not installed.

    TensorBoard draws over steps, wall-clock time or time since the first record. The losses are there once
    more over tokens, FLOPs and training time, in folders of their own, because what a resume takes back is
    found by its step.

    Args:
        config: the settings, which are written as text.
        folder: the run folder.
        start_iteration: that training goes on from.
        last: where the last record until then lies.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info(
            "no TensorBoard files: the tensorboard package is not installed (pip install tensorboard)"
        )
        return []
    make: Any = SummaryWriter
    writer = make(str(folder.tensorboard), purge_step=start_iteration + 1)
    writer.add_text(
        "config", "".join(f"    {line}\n" for line in to_yaml(config).splitlines()), start_iteration + 1
    )
    writer.add_text("group", group_of(config), start_iteration + 1)
    by_axis = {}
    for axis, (unit, _) in _STEPS.items():
        purge_step = _step(axis, last) + 1 if axis in last else 0
        by_axis[axis] = make(str(folder.tensorboard / f"by_{unit}"), purge_step=purge_step)
    return [_TensorBoard(writer, by_axis)]


def group_of(config: Config) -> str:
    """`dense`, `moe` or `dmoe`."""
    return config.moe_type if config.use_moe else "dense"


class _Wandb:
    name = "wandb"

    def __init__(self, run: Any):
        self._run = run
        # Our own axes: wandb's step never goes back, and counts calls.
        for axis in AXES:
            run.define_metric(axis)
        run.define_metric("*", step_metric="iteration")
        # What an earlier start has sent cannot be taken back, so it is not sent again. An offline run begins
        # empty.
        self._last = int(run.summary.get("iteration") or 0)

    def write(self, values: Mapping[str, float], axes: Axes) -> None:
        if axes["iteration"] > self._last:
            self._run.log({**values, **axes})

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


def open_wandb(config: Config, folder: RunFolder) -> list[Mirror]:
    """The wandb run of this folder, if one is asked for. It wants to be told all records that are kept, then
    the new ones.

    Online, a resume goes on in the same run, and iterations that wandb has are not sent again. Offline, wandb
    cannot go on in its own files: every start writes the whole run anew, under the same id, and moves the
    folder of the start before to wandb/replaced.

    Raises:
        ConfigError: it cannot start.
    """
    if not config.wandb_project or config.wandb_mode == "disabled":
        return []
    if problems := wandb_problems(config):
        raise ConfigError(problems)
    import wandb

    if config.wandb_mode == "offline":
        _put_aside(folder)
    try:
        run = wandb.init(
            project=config.wandb_project, mode=config.wandb_mode, id=_wandb_id(folder), name=config.name,
            group=group_of(config), tags=[group_of(config)], config=config.model_dump(),
            dir=str(folder.path), resume="allow" if config.wandb_mode == "online" else None,
        )  # fmt: skip
    except wandb.errors.Error as error:
        fix, reason = "run `wandb login`, or set WANDB_MODE=offline", " ".join(str(error).split())
        if key := os.environ.get("WANDB_API_KEY"):
            reason = reason.replace(key, "the key")
        raise ConfigError(
            [problem("wandb_mode", config.wandb_mode, f"wandb cannot start ({reason})", fix)]
        ) from None
    return [_Wandb(run)]


def _put_aside(folder: RunFolder) -> None:
    """Moves offline runs of earlier starts to where `wandb sync` does not look: two folders of one id would
    be one run twice.
    """
    for path in sorted(folder.wandb.glob("offline-run-*")):
        replaced = folder.wandb / "replaced" / path.name
        replaced.parent.mkdir(exist_ok=True)
        path.rename(
            replaced if not replaced.exists() else replaced.with_name(f"{path.name}-{secrets.token_hex(4)}")
        )


def _wandb_id(folder: RunFolder) -> str:
    """The id of this run folder's wandb run: the same at every start, so that a resumed run goes on in one
    page.
    """
    path = folder.wandb / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()
