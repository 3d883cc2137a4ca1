"""The mirrors of metrics.jsonl: TensorBoard and wandb."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from moe_exp.config import Config, ConfigError, problem
from moe_exp.files import write_atomically
from moe_exp.run_folder import RunFolder

logger = logging.getLogger(__name__)


def open_mirrors(config: Config, folder: RunFolder, start_iteration: int) -> list[Any]:
    """What the run is mirrored to, each with `write(values, iteration)` and `close(failed)`.

    Raises:
        ConfigError: wandb is asked for and cannot start.
    """
    # wandb first: where it cannot start, nothing has been opened or removed yet.
    return [*_open_wandb(config, folder), *_open_tensorboard(folder, start_iteration)]


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
