"""Matrix products of a job, their seconds on a device, and those of memory traffic. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import fp8_parts
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.hardware import Hardware

# elements of 2 bytes: rows of a multiple of 16 bytes are what the matrix units read at full speed
_ALIGNMENT = 8


@cache
def _in_waves(m: float, n: float, count: float, num_units: int) -> float:
    """Elements of the output, those of the idle multiprocessors of the last wave with them."""
    least = math.inf
    # tiles of large products on NVIDIA GPUs (NVIDIA, Matrix Multiplication Background User's Guide)
    for height, width in ((128, 256), (256, 128)):
        tiles = math.ceil(m / height) * math.ceil(n / width) * count
        least = min(least, math.ceil(tiles / num_units) * num_units * height * width)
    return least


class Pass(NamedTuple):
    """Seconds of a layer's forward and backward pass."""

    forward: float
    backward: float

    def __add__(self, other: Pass) -> Pass:  # type: ignore[override]
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Pass:  # type: ignore[override]
        return Pass(self.forward * factor, self.backward * factor)


def _shares(hardware: Hardware, constants: TimeConstants) -> tuple[float, float, float, float, float]:
    """Shares that are reached: of the peak, by products and by flash attention; of the bandwidth; half_depth
    of products; and the share of FP8 and NVFP4, by that of their constants.
    """
    if not hardware.is_recent:
        matrix = constants.matrix_efficiency
        matrix *= constants.v100_share if hardware.architecture == "volta" else 1.0
        # an estimate: flash attention takes 1.3 times as long as products of as many operations
        return matrix, matrix / 1.3, constants.memory_efficiency, constants.half_depth, 1.0
    matrix, memory, narrow = constants.recent_matrix, constants.recent_memory, 1.0
    if hardware.architecture in ("blackwell", "blackwell_ultra"):
        matrix *= constants.blackwell_matrix * (hardware.watts / 1000) ** constants.power
        memory *= constants.blackwell_memory
        matrix *= constants.ultra_matrix if hardware.architecture == "blackwell_ultra" else 1.0
        narrow = constants.blackwell_fp8
    return matrix, constants.attention_share, memory, constants.recent_depth, narrow


class Device:
    """Seconds of matrix products and memory traffic on a device under given constants."""

    def __init__(self, hardware: Hardware, dtype: str, constants: TimeConstants, *, num_processes: int = 1):
        matrix, attention, memory, depth, narrow = _shares(hardware, constants)
        peak = hardware.dense_flops[dtype]
        volta = hardware.architecture == "volta"
        self.hardware, self.is_cpu, self.is_recent = hardware, hardware.is_cpu, hardware.is_recent
        # More processes than cores take turns.
        crowd = max(1.0, num_processes / hardware.gpus_per_node) if hardware.is_cpu else 1.0
        self.flops = peak * hardware.matrix_share * matrix / crowd
        self.attention_flops = peak * hardware.matrix_share * attention / crowd
        self.bandwidth = hardware.memory_bytes_per_second * memory / crowd
        # how much faster FP8 and NVFP4 products are; 0: there are none
        self.fp8_speedup = hardware.dense_flops.get("fp8", 0.0) / peak * constants.fp8_matrix * narrow
        self.fp4_speedup = hardware.dense_flops.get("fp4", 0.0) / peak * constants.fp4_matrix * narrow
        self.cast_share = constants.cast_bytes if self.is_recent else 1.0
        self.host_share = constants.host_grace if hardware.name.startswith("GB") else 1.0
        self.num_units = hardware.num_units
        self.half_depth = 0.0 if self.is_cpu else depth
        self.unaligned = 1.0 if self.is_cpu else constants.unaligned_v100 if volta else constants.unaligned
        self.num_bytes = 4 if dtype == "fp32" else 2

    def product(
        self, m: float, n: float, k: float, count: float = 1, *, sums_over_rows: bool = False
    ) -> float:
        """Seconds of `count` products [m, k] x [k, n]. On a GPU with U multiprocessors the output is cut into
        tiles, which run in waves of U, and one that is not full takes as long. Short inner dimensions do not
        fill the pipelines: k / (k + half_depth). With `sums_over_rows`, as in a weight's gradient, k counts
        rows and may be any number: both inputs lie in memory along m and n.
        """
        work = m * n * count if self.is_cpu else _in_waves(m, n, count, self.num_units)
        seconds = 2 * work * k / self.flops * (k + self.half_depth) / k
        is_aligned = n % _ALIGNMENT == 0 and (sums_over_rows or k % _ALIGNMENT == 0)
        return seconds if is_aligned else seconds * self.unaligned

    def linear(self, m: float, n: float, k: float, count: float = 1) -> Pass:
        """A product with gradients by both of its inputs: [m, n] x [n, k] and [n, m] x [m, k]."""
        by_weight = self.product(k, n, m, count, sums_over_rows=True)
        return Pass(self.product(m, n, k, count), self.product(m, k, n, count) + by_weight)

    def moved(self, elements: float, num_bytes: tuple[float, float]) -> Pass:
        """Reading and writing this number of bytes per element; figures are of 2-byte types."""
        scale = elements * self.num_bytes / 2 / self.bandwidth
        return Pass(num_bytes[0] * scale, num_bytes[1] * scale)


class Shape(NamedTuple):
    """`number` products [rows, depth] x [depth, columns]."""

    rows: float
    columns: float
    depth: float
    number: float = 1
    is_fp8: bool = False


def products(config: Config, *, sequence_parallel: bool) -> dict[str, list[Shape]]:
    """Products of a layer of every kind and of the output layer, by part; scores are not among them."""
    tokens, hidden = num_tokens(config), config.hidden_size
    experts_in_fp8, others_in_fp8 = fp8_parts(config)
    ways, tp = 2 if config.gated else 1, config.tp
    heads, width = config.num_heads / tp, config.num_heads * config.kv_channels / tp
    values = heads * config.v_head_dim if config.multi_latent_attention else width
    before = projections(config, width, heads, tp=tp)

    def dense(shapes: Iterable[tuple[float, float]]) -> list[Shape]:
        return [Shape(tokens, columns, depth, 1, others_in_fp8) for columns, depth in shapes]

    def mlp(ffn: float) -> list[Shape]:
        return dense([(ways * ffn, hidden), (hidden, ffn)] if ffn else [])

    found = {
        "projections": dense([(hidden, values), *(one for one in before if one[1] == hidden)]),
        "up_projections": dense(one for one in before if one[1] != hidden),  # arXiv:2405.04434
        "mlp": mlp(config.ffn_hidden_size / tp),
        "shared_expert": mlp(config.shared_expert_size / tp if config.use_moe else 0),
        "router": [],
        "latent_projections": [],
        "experts": [],
        "output": [Shape(tokens, config.padded_vocab_size / tp, hidden)],
    }
    if config.use_moe:
        local, ffn = config.num_experts / config.ep, config.expert_ffn_size / config.etp
        each = num_slots(config, tokens, sequence_parallel) / local
        rows, width = shared_rows(config, tokens, sequence_parallel), config.expert_hidden_size
        found["router"] = [Shape(rows, config.num_router_outputs, hidden)]
        if config.moe_latent_size:
            down_and_up = ((width, hidden), (hidden, width))
            found["latent_projections"] = [Shape(rows, *size, 1, others_in_fp8) for size in down_and_up]
        sizes = ((ways * ffn, width), (width, ffn))
        found["experts"] = [Shape(each, columns, depth, local, experts_in_fp8) for columns, depth in sizes]
    return found


def num_tokens(config: Config) -> float:
    """Tokens of a micro-batch on a context parallel rank."""
    return config.mbsz * config.seq_len / config.cp


def hidden_bytes(config: Config) -> float:
    """Bytes of the hidden states of a micro-batch on a context parallel rank."""
    return num_tokens(config) * config.hidden_size * (4 if config.dtype == "fp32" else 2)


def routed_bytes(config: Config) -> float:
    """Bytes of the same tokens as routed experts take them: of MOE_LATENT_SIZE channels, if it is set."""
    return hidden_bytes(config) * config.expert_hidden_size / config.hidden_size


def shared_rows(config: Config, tokens: float, sequence_parallel: bool) -> float:
    """Rows of a rank between the products of a layer, of `tokens` of its micro-batch."""
    return tokens / config.tp if sequence_parallel else tokens


def num_slots(config: Config, tokens: float, sequence_parallel: bool) -> float:
    """Slots (a token's use of an expert) of a rank's experts, all used alike or padded to capacity."""
    factor, rows = config.expert_capacity_factor, shared_rows(config, tokens, sequence_parallel)
    if factor is not None and config.pad_to_capacity:
        return padded_slots(config, rows)
    return rows * config.experts_per_token * config.etp * min(factor or 1.0, 1.0)


def projections(config: Config, query: float, heads: float, *, tp: int) -> list[tuple[float, float]]:
    """(columns, depth) of the products before the scores, of a rank's query channels and heads."""
    hidden, latent, rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    if not config.multi_latent_attention:
        return [(query + 2 * config.num_query_groups * config.kv_channels / tp, hidden)]
    up = heads * (config.qk_head_dim + config.v_head_dim)
    queries = [(rank, hidden), (query, rank)] if rank else [(query, hidden)]
    return [(latent + config.qk_pos_emb_head_dim, hidden), (up, latent), *queries]


def padded_slots(config: Config, tokens: float) -> float:
    """Rows that a rank's experts compute with PAD_TO_CAPACITY, when each rank has `tokens` of the
    micro-batch.

    Every rank gives every expert the capacity of its tokens (layers/moe_layer.py). With TP or CP it gives
    more if a rank keeps more than its share, which is not counted here.
    """
    share = tokens * config.topk / config.num_experts
    capacity = max(config.min_capacity, math.ceil(share * (config.expert_capacity_factor or 1.0)))
    return config.num_experts * config.etp * min(capacity, tokens)
