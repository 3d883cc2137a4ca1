"""Seconds of Muon's step: the products that orthogonalize every matrix (`moe_exp.engine.muon`). No torch.

Five steps of Newton and Schulz on an [r, c] matrix, r <= c: x x^T, its square, their sum times x; or 5 * (4*r^2*c + 2*r^3) operations in
fp32. A rank does them for whole matrices, though tensor parallel ranks have a part each, and data parallel ranks all do the same.
"""

from __future__ import annotations

from moe_exp.config import Config
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.products import Device
from moe_exp.planner.time_constants import TimeConstants

_NUM_STEPS = 5


def muon_seconds(config: Config, hardware: Hardware, constants: TimeConstants, layers: list[tuple[int, int]]) -> float:
    """Seconds of the slowest stage's products; 0 with another optimizer.

    Args:
        config: the settings.
        hardware: the devices.
        constants: what was fitted.
        layers: (without experts, with experts) of every stage.
    """
    if config.optimizer != "muon":
        return 0.0
    device = Device(hardware, "fp32", constants, num_processes=config.gpus_per_node)
    dense, moe = (_seconds(device, _attention(config) + mlp) for mlp in (_mlp(config, config.ffn_hidden_size), _experts(config)))
    return max(num_dense * dense + num_moe * moe for num_dense, num_moe in layers)


def _seconds(device: Device, shapes: list[tuple[int, int, int]]) -> float:
    """Of matrices [rows, columns], so many of each shape."""
    total = 0.0
    for rows, columns, count in shapes:
        short, long = min(rows, columns), max(rows, columns)
        gram = device.product(short, short, long, count)
        total += _NUM_STEPS * (gram + device.product(short, short, short, count) + device.product(short, long, short, count))
    return total


def _mlp(config: Config, ffn: int, count: int = 1) -> list[tuple[int, int, int]]:
    """Gate and up projection are one matrix."""
    hidden = config.hidden_size
    return [((2 if config.gated else 1) * ffn, hidden, count), (hidden, ffn, count)] if ffn else []


def _experts(config: Config) -> list[tuple[int, int, int]]:
    if not config.use_moe:
        return []
    return _mlp(config, config.expert_ffn_size, config.num_experts // config.ep) + _mlp(config, config.shared_expert_size)


def _attention(config: Config) -> list[tuple[int, int, int]]:
    """Queries, keys and values are one matrix, those of multi-latent attention one for each projection (arXiv:2405.04434)."""
    hidden, query = config.hidden_size, config.num_heads * config.kv_channels
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels, hidden, 1), (hidden, query, 1)]
    latent, value = config.kv_lora_rank, config.num_heads * config.v_head_dim
    down_up = [(latent + config.qk_pos_emb_head_dim, hidden, 1), (config.num_heads * config.qk_head_dim + value, latent, 1)]
    queries = [(config.q_lora_rank, hidden, 1), (query, config.q_lora_rank, 1)] if config.q_lora_rank else [(query, hidden, 1)]
    return [*down_up, *queries, (hidden, value, 1)]
