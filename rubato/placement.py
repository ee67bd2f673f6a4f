"""The order of ranks by the nodes they are on.

Tensor partners talk in every layer, pipeline neighbours once a micro-batch, replicas once a step. So tensor groups are
placed inside nodes first, then pipelines; and on the data axis replicas of a node are neighbours, since a ring then
crosses between nodes as seldom as can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def order_in_replica(nodes: Sequence[str], tensor: int) -> list[int]:
    """Ranks of a replica in the order of its places (pipeline, then tensor), by the nodes they are on.

    As many tensor groups as possible lie inside a node. Ranks ascend along both axes, as torch.distributed has them in
    a group.

    Args:
        nodes: of each rank.
        tensor: degree of the tensor axis; it divides the number of ranks.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    rows: list[list[int]] = []
    rest: list[int] = []
    for ranks in by_node.values():
        whole = len(ranks) // tensor * tensor
        rows += [ranks[start : start + tensor] for start in range(0, whole, tensor)]
        rest += ranks[whole:]
    rows += [sorted(rest[start : start + tensor]) for start in range(0, len(rest), tensor)]
    # Sorting columns leaves rows sorted, though it may tear some apart.
    columns = [sorted(column) for column in zip(*rows, strict=True)]
    grouped = [rank for row in zip(*columns, strict=True) for rank in row]
    return min(list(range(len(nodes))), grouped, key=lambda order: _split_groups(order, nodes, tensor))


def _split_groups(order: Sequence[int], nodes: Sequence[str], tensor: int) -> int:
    rows = [order[start : start + tensor] for start in range(0, len(order), tensor)]
    return sum(len({nodes[rank] for rank in row}) > 1 for row in rows)


def order_replicas(nodes: Sequence[str], speed: Mapping[tuple[str, str], float] | None = None) -> list[int]:
    """Replicas in an order in which those of a node are neighbours, and nodes with a fast link are, too.

    The first stays the first. Without speeds, nodes come in the order in which they first appear.

    Args:
        nodes: of each replica.
        speed: of links between nodes, in any unit; what is not there counts as 0.
    """
    known = speed or {}
    left = list(dict.fromkeys(nodes))
    order: list[int] = []
    here = left.pop(0) if left else None
    while here is not None:
        order += [replica for replica, node in enumerate(nodes) if node == here]
        at = here
        here = max(left, key=lambda node: known.get((at, node), known.get((node, at), 0.0)), default=None)
        if here is not None:
            left.remove(here)
    return order


def speeds(links: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """From the data of such an event: MB/s by pairs of nodes."""
    return {(link["nodes"][0], link["nodes"][1]): float(link["mb_s"]) for link in links}
