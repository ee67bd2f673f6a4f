"""Seconds of communication: rings inside a node and across nodes, and transfers between pipeline neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from service.planning.constants import Constants
from service.planning.shapes import Cluster


@dataclass(frozen=True)
class Ring:
    """``size`` ranks, every ``stride``-th of the world, that run NCCL's ring collectives.

    A ring needs (n - 1)/n of the message through each rank's link for an all-gather or reduce-scatter, and n - 1 hops
    (Patarasuk and Yuan 2009; NCCL's documentation of bus bandwidth). Ranks of the group that share a node enter and
    leave it over all their network ports together, so the slowest cut is theirs, or the links inside the node.
    """

    cluster: Cluster
    constants: Constants
    size: int
    stride: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second through the slowest cut of the ring."""
        node = self.cluster.node_size
        inside = self.cluster.accelerator.link_bytes
        if self.size * self.stride > node:
            neighbours = max(1, min(self.size, node // self.stride))
            network = neighbours * self.cluster.network_bytes
            inside = min(inside, network) if neighbours > 1 else network
        return inside * self.constants.link_share

    def gather(self, message: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, ``message`` bytes on every rank."""
        if self.size == 1:
            return 0.0
        hops = self.size - 1
        return message * hops / self.size / self.bandwidth + hops * self.constants.hop_latency_s

    def reduce(self, message: float) -> float:
        """Seconds of an all-reduce of ``message`` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather(message)


def transfer(cluster: Cluster, constants: Constants, stride: int, message: float) -> float:
    """Seconds to hand ``message`` bytes to the rank ``stride`` further on."""
    inside = stride < cluster.node_size
    bandwidth = cluster.accelerator.link_bytes if inside else cluster.network_bytes
    return message / (bandwidth * constants.link_share) + constants.hop_latency_s
