"""Layout arithmetic: rank <-> (data, pipeline, tensor), the sizes a job can run at, and who computes which samples.

Ranks count tensor fastest, then pipeline, then data, so a replica is a run of consecutive ranks and tensor
partners, who talk most, are neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple, Protocol

from rubato.pipelines import SCHEDULES


class Coordinates(NamedTuple):
    """Where a rank sits on the mesh."""

    data: int
    pipeline: int
    tensor: int


LARGEST_WORLD = 65_536
"""The most workers a job may have; no search for a size goes on beyond it."""


@dataclass(frozen=True)
class Layout:
    """Degrees of data, pipeline and tensor parallelism. World size = data x pipeline x tensor."""

    data: int
    pipeline: int
    tensor: int

    @property
    def replica_size(self) -> int:
        """Workers of one model copy."""
        return self.pipeline * self.tensor

    @property
    def world_size(self) -> int:
        """Workers of all replicas."""
        return self.data * self.replica_size

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank, 0 <= rank < world_size."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        replica, place = divmod(rank, self.replica_size)
        return Coordinates(replica, *divmod(place, self.tensor))

    def rank(self, at: Coordinates) -> int:
        """The rank at a place."""
        return (at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor


class ReplicaShape(Protocol):
    """What the arithmetic needs to know of a spec's ``parallelism`` section."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def virtual_stages(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...


def split_evenly(total: int, parts: int) -> list[int]:
    """``total`` as ``parts`` whole numbers that differ by at most one, the larger first."""
    share, rest = divmod(total, parts)
    return [share + (index < rest) for index in range(parts)]


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``, both at least 1."""
    small = [d for d in range(1, min(most, isqrt(number)) + 1) if number % d == 0]
    return max(small[-1], *(number // d for d in small if number // d <= most), 1)


def sharding_degree(data: int, shard_over: int | None) -> int:
    """Replicas that share one copy of a sharded state: at least ``shard_over``, and a divisor of ``data``; None: all.

    More than were asked for where they do not divide the data degree, so that no size needs more memory a worker.
    """
    if shard_over is None or shard_over >= data:
        return data
    return next(degree for degree in range(shard_over, data + 1) if data % degree == 0)


def micro_batches(shape: ReplicaShape, global_batch: int, data: int) -> list[int]:
    """Micro-batches each replica computes in a step; replicas with more weigh more in the loss."""
    return split_evenly(global_batch // shape.micro_batch, data)


def _distinct_counts(shape: ReplicaShape, global_batch: int, data: int) -> set[int]:
    """The distinct values of ``micro_batches``, at a cost that does not grow with ``data``."""
    share, rest = divmod(global_batch // shape.micro_batch, data)
    return {share, share + 1} if rest else {share}


def sample_range(shape: ReplicaShape, global_batch: int, data: int, replica: int) -> range:
    """The samples of the global batch, by their place in it, that one of ``data`` replicas computes."""
    counts = micro_batches(shape, global_batch, data)
    start = sum(counts[:replica]) * shape.micro_batch
    return range(start, start + counts[replica] * shape.micro_batch)


def layout_for(shape: ReplicaShape, workers: int) -> Layout | None:
    """The layout of a number of workers, or None when they are not a whole number of replicas."""
    data, rest = divmod(workers, shape.tensor * shape.pipeline)
    return None if rest or not data else Layout(data, shape.pipeline, shape.tensor)


def runs_in_schedule(shape: ReplicaShape, count: int) -> bool:
    """Whether the pipeline schedule can run ``count`` micro-batches (the rules of torch.distributed.pipelining)."""
    if count < 1 or shape.pipeline == 1:
        return count >= 1
    rules = SCHEDULES[shape.schedule]
    if rules.rounds and count % max(1, count // shape.pipeline):
        return False
    return count >= rules.fewest * shape.pipeline


def fewest_micro_batches(shape: ReplicaShape) -> int:
    """The smallest number of micro-batches that the pipeline schedule can run."""
    return next(count for count in itertools.count(1) if runs_in_schedule(shape, count))


def possible_sizes(shape: ReplicaShape, global_batch: int, low: int, high: int) -> list[int]:
    """Worker counts from ``low`` to ``high`` at which every replica has work that its schedule can run."""
    replica = shape.tensor * shape.pipeline
    most = min(high // replica, global_batch // shape.micro_batch)
    return [
        data * replica
        for data in range(max(1, -(-low // replica)), most + 1)
        if all(runs_in_schedule(shape, count) for count in _distinct_counts(shape, global_batch, data))
    ]


def nearest_sizes(
    shape: ReplicaShape, global_batch: int, workers: int, low: int = 1, high: int | None = None
) -> list[int]:
    """The possible sizes next below and next above ``workers`` (itself, when it is possible), within the bounds."""
    sizes = possible_sizes(shape, global_batch, low, LARGEST_WORLD if high is None else high)
    if workers in sizes:
        return [workers]
    below = [size for size in sizes if size < workers][-1:]
    above = [size for size in sizes if size > workers][:1]
    return below + above


def distinct_stages(pipeline: int) -> list[int]:
    """Pipeline ranks that may differ in what they hold: the first, the second and the last.

    Those between hold no more than the second.
    """
    return sorted({0, min(1, pipeline - 1), pipeline - 1})
