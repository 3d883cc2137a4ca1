"""Over which ranks the model of a checkpoint is spread where it is used, and the settings that follow. No
process group is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import Config, ConfigError
from moe_exp.config.checks.checks import check_config
from moe_exp.host.devices import count_gpus, num_cores

# What only training asks for, and would be checked for a run of other sizes.
_NO_TRAINING: dict[str, Any] = {
    "mbsz": 1, "rampup_batch_size": "", "upcycle_from": "", "upcycle_granularity": 1, "load_dir": "",
    "train_data": "unused", "valid_data": "", "split": "", "eval_interval": 0, "recompute": "none",
    "distributed_optimizer": False, "overlap": "false", "wandb_project": "", "optimizer": "adam",
    "optimizer_state_dtype": "fp32",
}  # fmt: skip
# The cache of keys and values is in our attention; which kernels run depends on this machine, not on that of
# the training. Weights of an FP8 training are saved in its DTYPE.
_OUR_PARTS: dict[str, Any] = {
    "impl": "local",
    "expert_backend": "auto",
    "dispatcher": "auto",
    "fp8": "none",
    "cross_entropy": "megatron",
}
_DROPLESS: dict[str, Any] = {"moe_type": "dmoe", "capacity_factor": 0.0, "min_capacity": 0}


@dataclass(frozen=True)
class Layout:
    """Ranks, and what they are parallel in.

    Args:
        tp, pp, ep, etp: sizes, as the settings of the same names.
        gpus_per_node: ranks per node; 0: as many as the sizes need.
        threads_per_rank: torch threads; 0: on a CPU its cores shared among the ranks.
        nnodes, node_rank, master_addr, master_port: as the settings of the same names.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    gpus_per_node: int = 0
    threads_per_rank: int = 0
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int = 23456

    def settings(self, *, use_moe: bool) -> dict[str, Any]:
        """The fields of Config that say the same."""
        expert = self.pp * (self.ep * self.etp if use_moe else 1)
        num_ranks = math.lcm(self.tp * self.pp, expert)
        per_node = self.gpus_per_node or -(-num_ranks // self.nnodes)
        threads = self.threads_per_rank or (0 if count_gpus() else max(1, num_cores() // per_node))
        return {**vars(self), "gpus_per_node": per_node, "vpp": None, "cp": 1, "threads_per_rank": threads}


def config_for_use(
    folder: Path, layout: Layout, *, dtype: str | None = None, capacity: bool = False
) -> Config:
    """The settings of a checkpoint's model, spread as `layout` says, for use instead of training.

    Args:
        folder: of one iteration.
        layout: of the ranks here, whatever it was in training.
        dtype: fp32, bf16 or fp16; by default that of the training.
        capacity: drop tokens over the capacity of MOE_TYPE=moe as in training. Without, a model trained so
            computes every token's experts, and what it says of a sequence does not depend on the others of
            the batch.

    Raises:
        ValueError: where the checkpoint cannot be used, or (ConfigError) the layout does not fit its sizes.
    """
    saved = saved_config(folder)
    changes = (
        layout.settings(use_moe=saved.use_moe) | _NO_TRAINING | _OUR_PARTS | ({} if capacity else _DROPLESS)
    )
    # Each replica its row, and a sequence that the ranks of TP can share.
    changes |= {
        "gbsz": changes["nnodes"] * changes["gpus_per_node"],
        "seq_len": -(-saved.seq_len // layout.tp) * layout.tp,
    }
    config = saved_config(folder, **changes, **({"dtype": dtype} if dtype else {}))
    if problems := check_config(config):
        raise ConfigError(problems)
    return config
