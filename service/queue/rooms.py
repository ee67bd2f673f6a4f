"""How many workers of a kind fit on some nodes, by arithmetic over groups of nodes that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_TOLERANCE = 1e-6  # Ray counts resources in steps of 1e-4, and sums of them as floats


class Need(NamedTuple):
    """What one worker takes, all of it on one node."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus}"

    def in_place_of(self, other: Need) -> int | None:
        """How many workers of this kind must go for one of another kind to fit; None: no number helps."""
        if other.gpus and not self.gpus:
            return None
        ratios = [theirs / ours for ours, theirs in zip(self, other, strict=True) if ours]
        if not ratios or (other.cpus and not self.cpus):
            return None
        return max(1, *(-int(-(ratio - _TOLERANCE) // 1) for ratio in ratios))


class Room(NamedTuple):
    """What a node has, or has free."""

    cpus: float
    gpus: float

    def holds(self, need: Need) -> int:
        """How many workers of one kind fit."""
        by_cpus = int((self.cpus + _TOLERANCE) // need.cpus) if need.cpus else None
        by_gpus = int((self.gpus + _TOLERANCE) // need.gpus) if need.gpus else None
        if by_cpus is None or by_gpus is None:
            return max(0, by_cpus or by_gpus or 0)
        return max(0, min(by_cpus, by_gpus))


@dataclass(frozen=True)
class Node:
    """A living node: all it has, and what Ray showed as free."""

    total: Room
    free: Room


@dataclass(frozen=True)
class Cluster:
    """The living nodes, as numbers of nodes that are alike."""

    total: Mapping[Room, int]
    free: Mapping[Room, int]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Cluster:
        """The cluster of these nodes."""
        total: dict[Room, int] = {}
        free: dict[Room, int] = {}
        for node in nodes:
            total[node.total] = total.get(node.total, 0) + 1
            free[node.free] = free.get(node.free, 0) + 1
        return cls(total, free)


class Rooms:
    """The room on some nodes, less what is taken. Nodes are not told apart: those that are alike are a number.

    Thousands of nodes are of few kinds, even partly taken, so nothing here costs more with more nodes.
    """

    def __init__(self, nodes: Mapping[Room, int]) -> None:
        self._nodes = dict(nodes)
        self._known: dict[Need, int] = {}

    def holds(self, need: Need) -> int:
        """How many workers of one kind fit in what is left."""
        found = self._known.get(need)
        if found is None:
            found = sum(room.holds(need) * count for room, count in self._nodes.items())
            self._known[need] = found
        return found

    def take(self, need: Need, workers: int) -> int:
        """Takes room for as many of these workers as fit, the fullest nodes first, as Ray packs them; says how many."""
        if workers <= 0:
            return 0
        left, held = workers, self._known.get(need)
        places = sorted((room.holds(need), room) for room in self._nodes)
        for each, room in places:
            if not each:
                continue
            if not left:
                break
            count = self._nodes.pop(room)
            whole = min(count, left // each)
            self._add(room, need, each, whole)
            left -= whole * each
            if whole < count:
                if left:
                    self._add(room, need, left, 1)
                    whole, left = whole + 1, 0
                if whole < count:
                    self._nodes[room] = self._nodes.get(room, 0) + count - whole
        self._known.clear()
        if held is not None:  # a worker takes one place of its own kind, wherever it is put
            self._known[need] = held - (workers - left)
        return workers - left

    def _add(self, room: Room, need: Need, workers: int, count: int) -> None:
        if count:
            rest = Room(room.cpus - workers * need.cpus, room.gpus - workers * need.gpus)
            self._nodes[rest] = self._nodes.get(rest, 0) + count
