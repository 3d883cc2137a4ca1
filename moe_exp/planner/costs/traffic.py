"""Seconds of collectives and messages between ranks, and of the exchange of tokens with experts. No torch.

Ranks of a job are numbered as Megatron numbers them: tensor parallel ranks next to each other, then context,
(expert,) data and pipeline parallel ones. A group whose ranks span no more than a node uses the node's links,
else the network.

An all-to-all sends a token once for each of its experts; DeepEP and HybridEP once to each node and from there
once to each rank that has one or more of them; the all-gather sends it to every rank.
"""

from dataclasses import dataclass

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import priced
from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.products import routed_bytes
from moe_exp.planner.hardware import Hardware


@dataclass(frozen=True)
class Group:
    """Ranks that exchange something."""

    size: int  # ranks
    stride: int  # distance of one from the next in the numbering of all ranks
    hardware: Hardware  # what they are
    gpus_per_node: int  # ranks of a node

    @property
    def in_node(self) -> bool:
        """Whether no message leaves a node, or the devices that are connected as those of one."""
        return self.size * self.stride <= self._domain

    @property
    def _domain(self) -> int:
        return self.hardware.link_domain(self.gpus_per_node)

    @property
    def _in_one_node(self) -> int:
        return min(self.size, max(1, self._domain // self.stride))

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of a ring, which passes the network of a node once."""
        if self.in_node:
            return self.hardware.node_bytes_per_second
        network = self.hardware.network_bytes_per_second * self.hardware.network_share
        return min(self.hardware.node_bytes_per_second, network * self._in_one_node)

    @property
    def latency_seconds(self) -> float:
        """Latency of one collective of any size."""
        return self.hardware.node_latency_seconds if self.in_node else self.hardware.network_latency_seconds

    def reduce_scatter(self, num_bytes: float, share: float) -> float:
        """Seconds of a reduce-scatter or all-gather of `num_bytes` at `share` of the bandwidth."""
        if self.size == 1:
            return 0.0
        sent = (self.size - 1) / self.size * num_bytes
        return sent / (self.bytes_per_second * share) + self.latency_seconds

    def all_reduce(self, num_bytes: float, share: float) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.reduce_scatter(num_bytes, share)

    def recent_share(self, constants: TimeConstants) -> float:
        """Share of `bytes_per_second` that rings reach on devices newer than Ampere."""
        return constants.link_ring if self.in_node else constants.network_ring / self.hardware.network_share

    @property
    def num_nodes(self) -> float:
        return self.size / self._in_one_node

    def all_to_all(self, num_bytes: float, share: float, *, to_nodes: float | None = None) -> float:
        """Seconds of an all-to-all in which every rank sends `num_bytes`, with what it keeps, in equal parts.
        `to_nodes`: bytes to all nodes, if what several ranks of a node need goes there once.
        """
        if self.size == 1:
            return 0.0
        inside = (self._in_one_node - 1) / self.size * num_bytes / self.hardware.node_bytes_per_second
        if to_nodes is not None:  # what comes in is handed on in the node
            inside *= self.num_nodes
        sent = num_bytes if to_nodes is None else to_nodes
        outside = (self.size - self._in_one_node) / self.size * sent / self.hardware.network_bytes_per_second
        return max(inside, outside) / share + self.latency_seconds


def exchange_seconds(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """Seconds of one way, with the gather over expert TP ranks, for a rank's tokens of a micro-batch."""
    config = job.config
    if config.ep * config.etp == 1:
        return 0.0
    num_bytes = routed_bytes(config) / (config.tp if job.sequence_parallel else 1)
    slots = num_bytes * config.experts_per_token
    experts = Group(config.ep, config.etp, hardware, config.gpus_per_node)
    slices = Group(config.etp, 1, hardware, config.gpus_per_node)
    everywhere = num_bytes * config.ep
    if hardware.is_recent:
        rows, seconds = _of_recent(job, num_bytes, experts, constants)
    else:
        share = constants.tensor_bandwidth if experts.in_node else constants.data_bandwidth
        all_to_all = (slots, experts.all_to_all(slots, share))
        to_nodes = num_bytes * places_of_token(config, experts.num_nodes)
        costs = {
            "auto": all_to_all,
            "alltoall": all_to_all,
            "deepep": (slots, experts.all_to_all(slots, share, to_nodes=to_nodes)),
            "allgather": (everywhere, experts.reduce_scatter(everywhere, share)),
        }
        rows, seconds = priced(config, "dispatcher", costs)
        if job.software == "2024-10" and config.dispatcher != "allgather":
            seconds += constants.exchange_seconds_2024 * (config.ep - 1)
    share = slices.recent_share(constants) if hardware.is_recent else constants.tensor_bandwidth
    return seconds + slices.reduce_scatter(rows * config.etp, share)


def _of_recent(job: Job, num_bytes: float, experts: Group, constants: TimeConstants) -> tuple[float, float]:
    """Bytes that a rank's experts get, and seconds."""
    config, slots = job.config, num_bytes * job.config.experts_per_token
    if config.ep == 1:
        return slots, 0.0
    if config.dispatcher == "allgather":
        everywhere = num_bytes * config.ep
        return everywhere, experts.reduce_scatter(everywhere, experts.recent_share(constants))
    nodes = experts.num_nodes
    sends_once = priced(config, "dispatcher", {"auto": False, "alltoall": False, "deepep": True})
    if sends_once or job.engine.dispatcher == "hybridep":
        to_ranks, to_nodes = places_of_token(config, config.ep), places_of_token(config, nodes)
        inside = num_bytes * to_ranks * (config.ep - 1) / config.ep
        outside, link_share = num_bytes * to_nodes * (nodes - 1) / nodes, constants.link_deduplicated
    else:
        inside = slots * (config.ep / nodes - 1) / config.ep
        outside, link_share = slots * (nodes - 1) / nodes, constants.link_all_to_all
    hardware = experts.hardware
    in_nodes = inside / hardware.node_bytes_per_second / link_share
    between = outside / hardware.network_bytes_per_second / constants.network_exchange
    return slots, max(in_nodes, between) + constants.exchange_seconds


def skew_of(job: Job, hardware: Hardware, constants: TimeConstants) -> float:
    """Time of experts and exchange with the router's load, by that with tokens spread evenly over experts."""
    config = job.config
    is_padded = config.expert_capacity_factor is not None and config.pad_to_capacity
    is_even = job.engine.balanced or config.ep == 1 or is_padded or config.force_routing == "balanced"
    return constants.skew if hardware.is_recent and not is_even else 1.0


def places_of_token(config: Config, num_places: float) -> float:
    """Places (nodes or ranks) of a token's experts: N * (1 - (1 - 1/N)^TOPK), fewer with limited groups."""
    places = num_places * (1 - (1 - 1 / num_places) ** config.experts_per_token)
    if config.num_router_groups:
        places = min(places, config.router_group_topk * max(1.0, num_places / config.num_router_groups))
    return places
