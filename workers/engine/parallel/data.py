"""The data axis: replicas that hold the same state, compute different samples and sum their gradients.

The group of a position of the replica lives as long as a generation. Whatever goes wrong on it is a DataAxisError:
the replica itself is whole and can take part in the next generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.membership import Generation
from workers.engine.mesh import ReplicaMesh

TIMEOUT = timedelta(minutes=30)
"""How long a call waits for the other replicas, who may be saving; that one is gone is heard at once."""

MB = 1_000_000


class DataAxisError(Exception):
    """The data axis of a generation failed. Nobody's state is harmed beyond what the step has not yet committed."""


class DataGroup:
    """The workers at one position of all replicas of a generation.

    Made unformed, so that `abort`, which alone may be called from another thread, can end the forming too.
    """

    def __init__(self, generation: Generation, mesh: ReplicaMesh, timeout: timedelta = TIMEOUT) -> None:
        self.generation = generation
        self.size = generation.data
        self.index = generation.replica
        self._prefix = f"p{mesh.pipeline.index}t{mesh.tensor.index}"
        self._store = generation.store
        self._timeout = timeout
        self._group = mesh.device.breakable_group() if generation.data > 1 else None

    def form(self) -> None:
        """Connects to the other replicas."""
        if self._group is not None:
            group, store = self._group, dist.PrefixStore(self._prefix, self._store)
            self._attempt(lambda: group.form(store, self.index, self.size, self._timeout))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over the replicas, in place; all in flight at once."""
        self._reduce(tensors, dist.ReduceOp.SUM)

    def max(self, tensors: Sequence[Tensor]) -> None:
        """The largest of each element over the replicas, in place."""
        self._reduce(tensors, dist.ReduceOp.MAX)

    def min(self, tensors: Sequence[Tensor]) -> None:
        """The smallest of each element over the replicas, in place."""
        self._reduce(tensors, dist.ReduceOp.MIN)

    def broadcast(self, tensors: Sequence[Tensor], source: int, bucket_mb: float) -> None:
        """Fills each tensor with that of replica ``source``, in buckets."""
        if self._group is None:
            return
        group = self._group
        for bucket in split_into_buckets(tensors, bucket_mb):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self._attempt(lambda flat=flat: group.broadcast([flat], source))
            for tensor, received in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(received.view_as(tensor))

    def abort(self) -> None:
        """Makes what this worker does on the axis fail now, and what the others do with it. From any thread."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Frees the group, once everybody is done with it or it was aborted."""
        if self._group is not None:
            self._group.close()

    def _reduce(self, tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> None:
        if self._group is not None:
            group = self._group
            self._attempt(lambda: group.all_reduce(tensors, operation))

    @staticmethod
    def _attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as error:  # what torch.distributed raises for lost peers, time-outs and broken connections
            raise DataAxisError(str(error)) from error


class GradientBuckets:
    """Gradients of one step in a few large tensors: a reduction call costs more than its bytes when it is small.

    Args:
        leaves: the local tensors the optimizer updates, whose gradients these are.
        bucket_mb: largest size of a bucket; a leaf larger than that has a bucket of its own.
    """

    def __init__(self, leaves: Sequence[Tensor], bucket_mb: float) -> None:
        self._leaves = list(leaves)
        self._bucket_mb = bucket_mb
        self.renew()

    def renew(self) -> None:
        """Takes fresh memory: an aborted reduction may still write to the old."""
        self.flat: list[Tensor] = []
        self.gradients: list[Tensor] = []
        for bucket in split_into_buckets(self._leaves, self._bucket_mb):
            sizes = [leaf.numel() for leaf in bucket]
            flat = bucket[0].new_zeros(sum(sizes))
            self.flat.append(flat)
            self.gradients += [part.view_as(leaf) for part, leaf in zip(flat.split(sizes), bucket, strict=True)]
        for leaf, gradient in zip(self._leaves, self.gradients, strict=True):
            leaf.grad = gradient

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Takes the gradients of the leaves, in their order."""
        torch._foreach_copy_(self.gradients, list(gradients))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        torch._foreach_mul_(self.flat, factor)


def split_into_buckets(tensors: Sequence[Tensor], bucket_mb: float) -> list[list[Tensor]]:
    """Neighbours of one dtype together, up to ``bucket_mb`` MB a bucket."""
    buckets: list[list[Tensor]] = []
    room = 0.0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_mb * MB
        buckets[-1].append(tensor)
        room -= size
    return buckets
