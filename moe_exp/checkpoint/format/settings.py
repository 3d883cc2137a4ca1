"""The settings of the run that wrote a checkpoint, for a program that builds its model again."""

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

# How the run was spread over machines, which says nothing about the model, and what training alone is for:
# with deterministic algorithms torch would refuse to draw tokens on a GPU.
_LAYOUT: dict[str, Any] = {
    "nnodes": 1, "node_rank": 0, "gpus_per_node": 1, "master_addr": "localhost", "threads_per_rank": 0,
    "tp": 1, "pp": 1, "vpp": None, "ep": 1, "etp": 1, "cp": 1, "dispatcher": "auto", "num_workers": 0,
    "deterministic": False, "first_stage_layers": 0, "last_stage_layers": 0, "pipeline_layers": "",
}  # fmt: skip


def saved_order(folder: Path) -> dict[str, Any]:
    """`SampleOrder.facts` of the data that a run was trained on; empty if they are not recorded."""
    return order_in(read_common(folder))


def order_in(common: Mapping[str, Any]) -> dict[str, Any]:
    """The same, from `read_common`: weights alone have it without the progress."""
    return (common.get("progress") or common).get("sample_order") or {}


def refuse_other_checkpoint(config: Config, folder: Path, common: Mapping[str, Any]) -> None:
    """ConfigError if a checkpoint is of another model or optimizer, or if the learning rate would jump."""
    has_optimizer = "progress" in common  # else the checkpoint has weights alone
    name = f"the checkpoint {folder}"
    if has_optimizer:
        name = f"the checkpoint at iteration {common['progress']['iteration']} of {folder.parent}"
    is_own = RunFolder.of(config).checkpoints.resolve() in folder.resolve().parents
    instead = "" if is_own else ", or LOAD_DIR= (--load-dir '') to begin with new weights"
    refuse_other_model(config, common["config"], name, with_optimizer=has_optimizer, instead=instead)
    old = as_config(common["config"], f"the checkpoint {folder}")
    if has_optimizer and (line := schedule_change(config, old, saved_start(common))):
        raise ConfigError([line])


def saved_start(common: Mapping[str, Any]) -> Start:
    """Iteration and samples in a checkpoint's `read_common`; it has more than weights."""
    progress = common["progress"]
    consumed = progress["consumed_samples"]
    return Start(progress["iteration"], consumed, consumed - common["scheduler"]["num_steps"])


def saved_config(folder: Path, **changes: Any) -> Config:
    """Settings in an iteration's folder, for one rank, with `changes`; ValueError if damaged or not ours."""
    name = f"checkpoint={folder}"
    saved = read_common(folder).get("config")
    if not isinstance(saved, dict):
        rule = "was not written by moe_exp, it has no settings"
        raise unusable(name, rule, "name a checkpoint of moe_exp, such as of a run with it as LOAD_DIR")
    if unknown := sorted(set(saved) - set(Config.model_fields) - set(REMOVED)):
        logger.warning("%s: settings of another version are left out: %s", folder, ", ".join(unknown))
    known = known_settings(saved)
    if not known.get("train_data") and is_converted(folder):
        known["train_data"] = UNKNOWN_DATA
    return config_of(known | _LAYOUT | changes, name, "use another checkpoint")


def config_of(settings: Mapping[str, Any], place: str, fix: str) -> Config:
    """Config of settings that were read at `place`; ValueError if a value is none of its setting."""
    try:
        return Config(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        rule = f"{str(first['loc'][0]).upper()}={first['input']}: {first['msg']}"
        raise unusable(place, rule, fix) from None
