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
`embedding_moment_bytes` more a parameter, and norms are taken for matrices.
"""

from __future__ import annotations

from moe_exp.config import Config

QUANTIZED_BLOCK = 256  # values that share a scale


def optimizer_state_bytes(config: Config) -> float:
    """Bytes per parameter of main weight and moments, of a rank that holds all of them.

    Weight and gradient are not counted: see `planner.params`.
    """
    return main_weight_bytes(config) + moment_bytes(config)


def main_weight_bytes(config: Config) -> int:
    """Bytes per parameter of the fp32 copy of the weight."""
    return 0 if config.dtype == "fp32" else 4


def num_moments(config: Config) -> int:
    """Running means per parameter that the optimizer keeps."""
    if config.optimizer == "sgd":
        return int(config.sgd_momentum > 0)
    return 1 if config.optimizer == "muon" else 2


def moment_bytes(config: Config) -> float:
    """Bytes per parameter of those running means."""
    each = 4.0
    if config.optimizer == "adam8bit":
        each = 1 + 4 / QUANTIZED_BLOCK
    elif config.optimizer == "adam" and config.optimizer_state_dtype == "bf16":
        each = 2
    return num_moments(config) * each


def embedding_moment_bytes(config: Config) -> int:
    """Bytes per parameter of embedding and output layer on top of `moment_bytes`: their second moment, where
    Muon leaves them to Adam.
    """
    return 4 if config.optimizer == "muon" else 0
