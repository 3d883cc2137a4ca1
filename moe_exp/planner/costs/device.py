"""Time of matrix products, memory traffic, collectives and token exchange on a device. Imports no torch.

Ranks are numbered as in Megatron: tensor parallelism varies fastest, then context, expert (for MoE), data
and pipeline parallelism. A group inside a node uses the node's links; other groups use the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from moe_exp.config import Config
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.costs.products import hidden_bytes, priced
from moe_exp.planner.hardware import Hardware

# in 2-byte elements: matrix units read rows of multiples of 16 bytes at full speed
_ALIGNMENT = 8
# Recipients of a token by dispatcher: each of its experts (all-to-all); each of their nodes, which forward it
# once to each of their ranks (DeepEP, HybridEP); or every rank (all-gather). None: requires EP=1.
RECIPIENTS: dict[str, Literal["experts", "ranks", "all"] | None] = {
    "auto": "experts", "alltoall": "experts", "deepep": "ranks", "allgather": "all", "local": None,
}  # fmt: skip


@cache
def _in_waves(m: float, n: float, count: float, num_units: int) -> float:
    """Returns the number of output elements; partial tiles and partial waves of tiles count as full."""
    least = math.inf
    # tiles of large products on NVIDIA GPUs (NVIDIA, Matrix Multiplication Background User's Guide)
    for height, width in ((128, 256), (256, 128)):
        tiles = math.ceil(m / height) * math.ceil(n / width) * count
        least = min(least, math.ceil(tiles / num_units) * num_units * height * width)
    return least


class Pass(NamedTuple):
    """Seconds of a forward pass and of its backward pass."""

    forward: float
    backward: float

    def __add__(self, other: Pass) -> Pass:  # type: ignore[override]
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Pass:  # type: ignore[override]
        return Pass(self.forward * factor, self.backward * factor)


class Device:
    """Predicts the time of matrix products and memory traffic on a device."""

    def __init__(self, hardware: Hardware, dtype: str, constants: TimeConstants, *, num_processes: int = 1):
        peak, architecture = hardware.dense_flops[dtype], hardware.architecture
        self.constants = constants
        self.hardware, self.is_cpu, self.is_recent = hardware, hardware.is_cpu, hardware.is_recent
        # Shares of the peak that products and attention reach, of the memory bandwidth, and a factor for FP8
        # and NVFP4. Devices newer than Ampere have separate constants.
        narrow, matrix, memory = 1.0, constants.recent_matrix, constants.recent_memory
        attention, depth = constants.attention_share, constants.recent_depth
        if not self.is_recent:
            matrix, memory = constants.matrix_efficiency, constants.memory_efficiency
            matrix *= constants.v100_share if architecture == "volta" else 1.0
            # An estimate: flash attention takes 1.3 times as long as products with as many operations.
            attention, depth = matrix / 1.3, constants.half_depth
        elif architecture in ("blackwell", "blackwell_ultra"):
            matrix *= constants.blackwell_matrix * (hardware.watts / 1000) ** constants.power
            memory *= constants.blackwell_memory
            matrix *= constants.ultra_matrix if architecture == "blackwell_ultra" else 1.0
            narrow = constants.blackwell_fp8
        # If there are more processes than cores, they take turns.
        crowd = max(1.0, num_processes / hardware.gpus_per_node) if hardware.is_cpu else 1.0
        self.flops = peak * hardware.matrix_share * matrix / crowd
        self.attention_flops = peak * hardware.matrix_share * attention / crowd
        self.bandwidth = hardware.memory_bytes_per_second * memory / crowd
        # speedup of FP8 and NVFP4 products; 0: unsupported
        self.fp8_speedup = hardware.dense_flops.get("fp8", 0.0) / peak * constants.fp8_matrix * narrow
        self.fp4_speedup = hardware.dense_flops.get("fp4", 0.0) / peak * constants.fp4_matrix * narrow
        self.cast_share = constants.cast_bytes if self.is_recent else 1.0
        self.host_share = constants.host_grace if hardware.name.startswith("GB") else 1.0
        self.half_depth = 0.0 if self.is_cpu else depth
        self.unaligned = 1.0 if self.is_cpu else constants.unaligned
        if architecture == "volta":
            self.unaligned = constants.unaligned_v100
        self.num_bytes = 4 if dtype == "fp32" else 2

    def product(
        self, m: float, n: float, k: float, count: float = 1, *, sums_over_rows: bool = False
    ) -> float:
        """Returns the seconds of `count` products [m, k] x [k, n].

        A GPU with U multiprocessors computes the output in waves of U tiles; a partial wave takes as long as
        a full wave. A product with inner dimension k reaches k / (k + half_depth) of full speed. With
        `sums_over_rows` (for a weight's gradient), the inputs are contiguous along m and n instead of k, so k
        need not be aligned.
        """
        # Waves of tiles are a property of GPUs.
        work = m * n * count if self.is_cpu else _in_waves(m, n, count, self.hardware.num_units)
        seconds = 2 * work * k / self.flops * (k + self.half_depth) / k
        is_aligned = n % _ALIGNMENT == 0 and (sums_over_rows or k % _ALIGNMENT == 0)
        return seconds if is_aligned else seconds * self.unaligned

    def linear(self, m: float, n: float, k: float, count: float = 1) -> Pass:
        """Time of a product [m, k] x [k, n] and of its gradients, [m, n] x [n, k] and [k, m] x [m, n]."""
        by_weight = self.product(k, n, m, count, sums_over_rows=True)
        return Pass(self.product(m, n, k, count), self.product(m, k, n, count) + by_weight)

    def moved(self, elements: float, num_bytes: tuple[float, float]) -> Pass:
        """Time to move elements. `num_bytes` (forward, backward): bytes moved per 2-byte element."""
        scale = elements * self.num_bytes / 2 / self.bandwidth
        return Pass(num_bytes[0] * scale, num_bytes[1] * scale)


@dataclass(frozen=True)
class Group:
    """A process group."""

    size: int  # number of ranks
    stride: int  # difference between the global numbers of neighboring ranks
    hardware: Hardware
    gpus_per_node: int

    @property
    def in_node(self) -> bool:
        return self.size * self.stride <= self.hardware.link_domain(self.gpus_per_node)

    @property
    def _in_one_node(self) -> int:
        return min(self.size, max(1, self.hardware.link_domain(self.gpus_per_node) // self.stride))

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of a ring that leaves each node once, over the network links of its ranks in the node."""
        if self.in_node:
            return self.hardware.node_bytes_per_second
        network = self.hardware.network_bytes_per_second * self.hardware.network_share
        return min(self.hardware.node_bytes_per_second, network * self._in_one_node)

    @property
    def latency_seconds(self) -> float:
        return self.hardware.node_latency_seconds if self.in_node else self.hardware.network_latency_seconds

    def reduce_scatter(self, num_bytes: float, share: float) -> float:
        """Returns the seconds of a reduce-scatter or all-gather that reaches `share` of the bandwidth."""
        if self.size == 1:
            return 0.0
        sent = (self.size - 1) / self.size * num_bytes
        return sent / (self.bytes_per_second * share) + self.latency_seconds

    def ring_share(self, constants: TimeConstants, older: float) -> float:
        """Returns the share of `bytes_per_second` that rings reach, or `older` on Ampere and older GPUs."""
        if not self.hardware.is_recent:
            return older
        return constants.link_ring if self.in_node else constants.network_ring / self.hardware.network_share

    @property
    def num_nodes(self) -> float:
        return self.size / self._in_one_node

    def all_to_all(self, num_bytes: float, share: float, *, to_nodes: float | None = None) -> float:
        """Returns the seconds of an all-to-all in which each rank splits `num_bytes` equally among all ranks.
        `to_nodes`: total bytes sent to all nodes, if data for several ranks of a node is sent only once.
        """
        if self.size == 1:
            return 0.0
        inside = (self._in_one_node - 1) / self.size * num_bytes / self.hardware.node_bytes_per_second
        if to_nodes is not None:  # the receiving node forwards the data
            inside *= self.num_nodes
        sent = num_bytes if to_nodes is None else to_nodes
        outside = (self.size - self._in_one_node) / self.size * sent / self.hardware.network_bytes_per_second
        return max(inside, outside) / share + self.latency_seconds


def exchange_seconds(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> float:
    """Returns the seconds to dispatch (or combine) a rank's tokens of a micro-batch, over EP and ETP."""
    config = job.config
    if config.ep * config.etp == 1:
        return 0.0
    # With MOE_LATENT_SIZE, tokens are sent in the latent size.
    num_bytes = hidden_bytes(config) * config.expert_hidden_size / config.hidden_size
    num_bytes /= config.tp if job.sequence_parallel else 1
    slots, everywhere = num_bytes * config.experts_per_token, num_bytes * config.ep
    experts = Group(config.ep, config.etp, hardware, config.gpus_per_node)
    slices = Group(config.etp, 1, hardware, config.gpus_per_node)
    older = constants.tensor_bandwidth if experts.in_node else constants.data_bandwidth
    known = {name: to for name, to in RECIPIENTS.items() if to or config.ep == 1}
    recipients = priced(config, "dispatcher", known)
    # Older devices: fitted by the shares of rings. Newer ones have constants for each kind of exchange.
    rows, seconds = slots, 0.0  # bytes that a rank's experts receive
    if recipients == "all" and (config.ep > 1 or not hardware.is_recent):
        rows, seconds = everywhere, experts.reduce_scatter(everywhere, experts.ring_share(constants, older))
    elif hardware.is_recent and config.ep > 1:
        # Links and network work concurrently, so the slower one determines the time.
        nodes, link_share = experts.num_nodes, constants.link_all_to_all
        inside, outside = slots * (config.ep / nodes - 1) / config.ep, slots * (nodes - 1) / nodes
        if recipients == "ranks" or job.engine.dispatcher == "hybridep":
            to_ranks, to_nodes = places_of_token(config, config.ep), places_of_token(config, nodes)
            inside = num_bytes * to_ranks * (config.ep - 1) / config.ep
            outside, link_share = num_bytes * to_nodes * (nodes - 1) / nodes, constants.link_deduplicated
        in_nodes = inside / hardware.node_bytes_per_second / link_share
        between = outside / hardware.network_bytes_per_second / constants.network_exchange
        seconds = max(in_nodes, between) + constants.exchange_seconds
    elif not hardware.is_recent:
        once = num_bytes * places_of_token(config, experts.num_nodes) if recipients == "ranks" else None
        seconds = experts.all_to_all(slots, older, to_nodes=once)
        if job.software == "2024-10":
            seconds += constants.exchange_seconds_2024 * (config.ep - 1)
    return seconds + slices.reduce_scatter(
        rows * config.etp, slices.ring_share(constants, constants.tensor_bandwidth)
    )


def skew_of(job: PlannedJob, hardware: Hardware, constants: TimeConstants) -> float:
    """Returns the factor by which an unbalanced load slows down the experts and the token exchange."""
    config = job.config
    is_padded = config.expert_capacity_factor is not None and config.pad_to_capacity
    is_even = job.engine.balanced or config.ep == 1 or is_padded or config.force_routing == "balanced"
    return constants.skew if hardware.is_recent and not is_even else 1.0


def places_of_token(config: Config, num_places: float) -> float:
    """How many of N nodes or ranks receive a token: N * (1 - (1 - 1/N)^TOPK), or less with router groups."""
    places = num_places * (1 - (1 - 1 / num_places) ** config.experts_per_token)
    if config.num_router_groups:
        places = min(places, config.router_group_topk * max(1.0, num_places / config.num_router_groups))
    return places
