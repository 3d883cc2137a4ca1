"""Seconds of collectives and messages between ranks. No torch.

Ranks of a job are numbered as Megatron numbers them: tensor parallel ranks next to each other, then context,
(expert,) data and pipeline parallel ones. A group whose ranks span no more than a node uses the node's links,
else the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_exp.planner.costs.constants import TimeConstants
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
        """Nodes that it has ranks on."""
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
