"""How fast the links between nodes are: measured once a generation, in well under a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from workers.engine.device import BreakableGroup
from workers.engine.parallel.data import DataGroup

PROBE_BYTES = 4_000_000
PINGS = 5
MOST_NODES = 16
"""Of so many nodes all pairs are measured; of more those that are neighbours in the order of replicas."""


@dataclass(frozen=True)
class Link:
    """Between two nodes, both ways at once: microseconds until the first byte, and MB/s each way."""

    nodes: tuple[str, str]
    latency_us: float
    mb_s: float


def measure_links(data: DataGroup, nodes: Sequence[str], device: torch.device) -> list[Link]:
    """Times messages between the nodes of the replicas; the same links for all members. None where all are on one.

    Raises:
        DataAxisError: the axis failed.
    """
    speakers = {node: nodes.index(node) for node in nodes}
    names = list(speakers)
    if len(names) < 2:
        return []
    found = torch.zeros(len(names), len(names), 2, dtype=torch.float64, device=device)
    for pairs in _rounds(len(names)):
        peers = {speakers[names[one]]: speakers[names[other]] for pair in pairs for one, other in (pair, pair[::-1])}
        peer = peers.get(data.index)
        latency = min(data.call(lambda group, peer=peer: _exchange(group, peer, 1, device)) for _ in range(PINGS))
        count = PROBE_BYTES // torch.float32.itemsize
        seconds = data.call(lambda group, peer=peer, count=count: _exchange(group, peer, count, device))
        if peer is not None:
            here, there = names.index(nodes[data.index]), names.index(nodes[peer])
            found[here, there] = torch.tensor([latency, seconds])
    data.sum([found])
    links = []
    for one in range(len(names)):
        for other in range(one + 1, len(names)):
            # Each end has its own view; the slower one saw both ways.
            latency, seconds = found[[one, other], [other, one]].amax(dim=0).tolist()
            if seconds > 0:
                links.append(Link((names[one], names[other]), latency * 1e6, PROBE_BYTES / seconds / 1e6))
    return links


def told(links: Sequence[Link]) -> dict[str, Any]:
    """Links as the data of an event."""
    return {"links": [asdict(link) for link in links]}


def _rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs that are measured at the same time, nobody in two of them: a round-robin tournament, or neighbours."""
    if count > MOST_NODES:
        yield [(one, one + 1) for one in range(0, count - 1, 2)]
        yield [(one, one + 1) for one in range(1, count - 1, 2)]
        return
    seats = list(range(count + count % 2))  # with an odd number one has a rest
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _exchange(group: BreakableGroup, peer: int | None, count: int, device: torch.device) -> float:
    """Seconds until ``count`` numbers went to a member and as many came back; all members call together."""
    sizes = [count if member == peer else 0 for member in range(group.size)]
    sent = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    received = torch.empty_like(sent)
    began = time.perf_counter()
    group.all_to_all(received, sent, sizes)
    return time.perf_counter() - began
