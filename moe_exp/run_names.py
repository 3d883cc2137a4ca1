"""The name of a run that was given none: what its checkpoints depend on, so that other settings get another folder. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_exp.config import Config


def built_name(config: Config) -> str:
    """Name of a run, from its model, its layout and its optimizer."""
    vpp = "none" if config.vpp is None else config.vpp
    name = f"moe_{str(config.use_moe).lower()}"
    if config.use_moe:
        name += f"_num_experts_{config.num_experts}_topk_{config.topk}_type_{config.moe_type}"
    name += f"_num_nodes_{config.nnodes}_gpus_per_node_{config.gpus_per_node}_TP_{config.tp}_PP_{config.pp}_VPP_{vpp}_EP_{config.ep}"
    name += "".join(f"_{key.upper()}_{getattr(config, key)}" for key in ("etp", "cp") if getattr(config, key) > 1)
    return name if config.optimizer == "adam" else f"{name}_OPTIMIZER_{config.optimizer}"
