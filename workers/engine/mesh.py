"""Where a worker sits in its replica, and the groups that tie the replica together for life.

``torch.arange(pipeline * tensor).view(pipeline, tensor)`` is the whole topology of a replica; replicas stack along
the data axis, whose groups come and go (``parallel/data.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rubato.layout import Coordinates, Layout, ReplicaShape
from rubato.placement import order_in_replica
from workers.engine.device import Device

TIMEOUT = timedelta(minutes=30)
"""How long a worker waits for its mates in a call. A dead mate is seen at once; this is for one that hangs."""


@dataclass(frozen=True)
class Axis:
    """A line of ranks: how many, which of them this is, and their group (None: this rank alone)."""

    size: int
    index: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class ReplicaMesh:
    """This worker's place in its replica.

    Attributes:
        device: where it computes.
        pipeline, tensor: the two axes.
        axes: both as a DeviceMesh with the names "pipeline" and "tensor"; None: the replica is one worker.
        group: all workers of the replica; None: it is one worker.
    """

    device: Device
    pipeline: Axis
    tensor: Axis
    axes: DeviceMesh | None
    group: dist.ProcessGroup | None

    @classmethod
    def of_default_group(
        cls, shape: ReplicaShape, device: Device, timeout: timedelta = TIMEOUT, node: str = ""
    ) -> ReplicaMesh:
        """The mesh of a replica whose workers are exactly the default process group, this one on a node of that name.

        Tensor partners are on one node, where that can be.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        nodes: list[str] = [node]
        if dist.is_initialized():
            nodes = [""] * dist.get_world_size()
            dist.all_gather_object(nodes, node)
        order = order_in_replica(nodes, shape.tensor)
        return cls.of_world(Layout(1, shape.pipeline, shape.tensor), rank, device, timeout, order)

    @classmethod
    def of_world(
        cls,
        layout: Layout,
        rank: int,
        device: Device,
        timeout: timedelta = TIMEOUT,
        order: Sequence[int] | None = None,
    ) -> ReplicaMesh:
        """The mesh of this rank's replica in a default process group that holds all replicas.

        Every rank of the default group calls this together. A layout of one worker needs no process group.

        Args:
            layout: the degrees.
            rank: this one.
            device: where it computes.
            timeout: of calls on the groups.
            order: ranks by their places in the layout, ascending along each axis; None: rank 0 has the first place.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != layout.world_size:
            raise ValueError(f"{layout} is for {layout.world_size} workers, the process group has {size}")
        order = list(range(size) if order is None else order)
        at = layout.coordinates(order.index(rank))
        if layout.replica_size == 1:
            return cls.of_one(device)
        world = torch.tensor(order).view(layout.data, layout.pipeline, layout.tensor)
        # Every rank makes every group, in the same order: that is how new_group works.
        whole = _own_group(rank, world.flatten(1), timeout)
        pipeline = _own_group(rank, world.transpose(1, 2).flatten(0, 1), timeout)
        tensor = _own_group(rank, world.flatten(0, 1), timeout)
        axes = DeviceMesh.from_group(
            [pipeline, tensor], device.type, mesh=world[at.data], mesh_dim_names=("pipeline", "tensor")
        )
        return cls(
            device,
            Axis(layout.pipeline, at.pipeline, pipeline if layout.pipeline > 1 else None),
            Axis(layout.tensor, at.tensor, tensor if layout.tensor > 1 else None),
            axes,
            whole,
        )

    @classmethod
    def of_one(cls, device: Device) -> ReplicaMesh:
        """The mesh of a replica that is one worker, which needs no process group."""
        alone = Axis(1, 0, None)
        return cls(device, alone, alone, None, None)

    def coordinates(self, data: int) -> Coordinates:
        """This worker's place when its replica is number ``data``."""
        return Coordinates(data, self.pipeline.index, self.tensor.index)

    def layout(self, data: int) -> Layout:
        """The layout of ``data`` such replicas."""
        return Layout(data, self.pipeline.size, self.tensor.size)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the workers of the replica."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the workers of the replica."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.group is None:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device.torch_device)
        dist.all_reduce(reduced, op=operation, group=self.group)
        return [float(value) for value in reduced]


def _own_group(rank: int, groups: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a group of each row; the one this rank is in."""
    own = None
    for ranks in groups.tolist():
        group = dist.new_group(ranks, timeout=timeout)
        own = group if rank in ranks else own
    assert own is not None  # every rank is in some row
    return own


@dataclass(frozen=True)
class World:
    """The processes that were started together: which of them this is, and the store they share (None: one process).

    ``nodes`` are those of all ranks.
    """

    rank: int
    size: int
    local_rank: int
    store: dist.Store | None
    nodes: tuple[str, ...] = ("",)

    @classmethod
    def from_environment(cls, *, gpu: bool, timeout: timedelta = TIMEOUT) -> World:
        """Joins what torchrun started, and makes it the default process group; else this one process."""
        if not dist.is_torchelastic_launched():
            return cls(0, 1, 0, None)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        local_rank = int(os.environ["LOCAL_RANK"])
        if gpu:
            torch.cuda.set_device(local_rank)
        backend = Device.of_rank(local_rank, gpu=gpu).backend
        dist.init_process_group(
            backend, store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=timeout
        )
        store.set(f"node/{rank}", os.environ["GROUP_RANK"])
        nodes = tuple(store.get(f"node/{other}").decode() for other in range(size))
        return cls(rank, size, local_rank, store, nodes)
