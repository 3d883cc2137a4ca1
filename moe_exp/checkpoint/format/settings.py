"""Reads the settings stored in a checkpoint, for programs that rebuild its model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_exp.checkpoint.format.folders import is_converted, unusable
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.config import Config, ConfigError
from moe_exp.config.learning_rate import Start, schedule_change
from moe_exp.config.loading import known_settings
from moe_exp.config.model_changes import as_config, refuse_other_model
from moe_exp.config.settings_file import REMOVED
from moe_exp.runs.run_folder import RunFolder

logger = logging.getLogger(__name__)

UNKNOWN_DATA = "(unknown)"  # TRAIN_DATA of a converted model: empty would mean the embedded corpus

# Settings that do not affect the model: the parallel layout and training options. With deterministic
# algorithms, PyTorch refuses to sample tokens on a GPU.
_LAYOUT: dict[str, Any] = {
    "nnodes": 1, "node_rank": 0, "gpus_per_node": 1, "master_addr": "localhost", "threads_per_rank": 0,
    "tp": 1, "pp": 1, "vpp": None, "ep": 1, "etp": 1, "cp": 1, "dispatcher": "auto", "num_workers": 0,
    "deterministic": False, "first_stage_layers": 0, "last_stage_layers": 0, "pipeline_layers": "",
}  # fmt: skip


def saved_order(folder: Path) -> dict[str, Any]:
    """Order of the training data (`SampleOrder.facts`) in a checkpoint; empty if the checkpoint has none."""
    return order_in(read_common(folder))


def order_in(common: Mapping[str, Any]) -> dict[str, Any]:
    """Like `saved_order`, but takes the result of `read_common` instead of a folder."""
    # Weights-only checkpoints store it outside `progress`.
    return (common.get("progress") or common).get("sample_order") or {}


def refuse_other_checkpoint(config: Config, folder: Path, common: Mapping[str, Any]) -> None:
    """Raises ConfigError if `config` changes model or optimizer, or makes the learning rate jump."""
    has_optimizer = "progress" in common  # otherwise the checkpoint only has weights
    name = f"the checkpoint {folder}"
    if has_optimizer:
        name = f"the checkpoint at iteration {common['progress']['iteration']} of {folder.parent}"
    is_own = RunFolder.of(config).checkpoints.resolve() in folder.resolve().parents
    instead = "" if is_own else ", or LOAD_DIR= (--load-dir '') to start with new weights"
    refuse_other_model(config, common["config"], name, with_optimizer=has_optimizer, instead=instead)
    old = as_config(common["config"], f"the checkpoint {folder}")
    if has_optimizer and (line := schedule_change(config, old, saved_start(common))):
        raise ConfigError([line])


def saved_start(common: Mapping[str, Any]) -> Start:
    """Iteration and consumed samples of a `read_common` result. The result must contain `progress`."""
    progress = common["progress"]
    consumed = progress["consumed_samples"]
    return Start(progress["iteration"], consumed, consumed - common["scheduler"]["num_steps"])


def saved_config(folder: Path, **changes: Any) -> Config:
    """An iter_ folder's settings for one rank, with `changes`. ValueError for missing or damaged settings."""
    name = f"checkpoint={folder}"
    saved = read_common(folder).get("config")
    if not isinstance(saved, dict):
        rule = "was not written by moe_exp (it has no settings)"
        raise unusable(name, rule, "start a run with LOAD_DIR set to this folder, then specify that run")
    if unknown := sorted(set(saved) - set(Config.model_fields) - set(REMOVED)):
        logger.warning("%s: ignoring settings of another version: %s", folder, ", ".join(unknown))
    known = known_settings(saved)
    if not known.get("train_data") and is_converted(folder):
        known["train_data"] = UNKNOWN_DATA
    return config_of(known | _LAYOUT | changes, name, "use another checkpoint")


def config_of(settings: Mapping[str, Any], place: str, fix: str) -> Config:
    """Builds a Config from settings read from `place`; ValueError if a value is invalid."""
    try:
        return Config(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        rule = f"{str(first['loc'][0]).upper()}={first['input']}: {first['msg']}"
        raise unusable(place, rule, fix) from None
