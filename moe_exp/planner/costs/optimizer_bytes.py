"""Bytes of optimizer state per parameter, before it is sharded over data parallel ranks.

    OPTIMIZER                            main weight   moments               together, bf16 or fp16 / fp32
    adam                                 4             4 + 4                 12      / 8
    adam, OPTIMIZER_STATE_DTYPE=bf16     4             2 + 2                 8       / 4
    adam8bit                             4             1 + 1 + 2 * 4 / 256   6.03125 / 2.03125
    sgd, SGD_MOMENTUM over 0             4             4                     8       / 4
    sgd, SGD_MOMENTUM=0                  4             0                     4       / 0
    muon, DISTRIBUTED_OPTIMIZER=false    4             4                     8       / 4

fp32 weights need no main copy: they are the weights that are trained. 8-bit moments have an fp32 scale for
every block of 256 values (Dettmers et al. 2022, arXiv:2110.02861, section 2; the block of bitsandbytes). Muon
keeps one moment of matrices; embedding and output layer, which it leaves to Adam, have
`embedding_moment_bytes` more a parameter; norms and routers, which are small, are counted as matrices. With
EMA_DECAY the average of the weights adds 4.
"""

from __future__ import annotations

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import priced

QUANTIZED_BLOCK = 256  # values that share a scale


def optimizer_state_bytes(config: Config) -> float:
    """Bytes per parameter of main weight, moments and average, of a rank that holds all of them.

    Weight and gradient are not counted: see `planner.params`.
    """
    return main_weight_bytes(config) + moment_bytes(config) + average_bytes(config)


def main_weight_bytes(config: Config) -> int:
    """Bytes per parameter of the fp32 copy of the weight."""
    return 0 if config.dtype == "fp32" else 4


def average_bytes(config: Config) -> int:
    """Bytes per parameter of the average of the weights, fp32, in memory and in a checkpoint."""
    return 4 if config.ema_decay else 0


def num_moments(config: Config) -> int:
    """Running means per parameter that the optimizer keeps."""
    by_sgd = int(config.sgd_momentum > 0)
    return priced(config, "optimizer", {"adam": 2, "adam8bit": 2, "muon": 1, "sgd": by_sgd})


def moment_bytes(config: Config) -> float:
    """Bytes per parameter of those running means."""
    of_adam = priced(config, "optimizer_state_dtype", {"fp32": 4.0, "bf16": 2.0})
    each = {"adam": of_adam, "adam8bit": 1 + 4 / QUANTIZED_BLOCK, "muon": 4.0, "sgd": 4.0}
    return num_moments(config) * priced(config, "optimizer", each)


def embedding_moment_bytes(config: Config) -> int:
    """Bytes that embedding and output layer add, which Muon leaves to Adam."""
    return 4 if config.optimizer == "muon" else 0
