"""Gradients of one step in a few large tensors: a reduction call costs more than its bytes when it is small."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MB = 1_000_000


class GradientBuckets:
    """The gradients that are reduced and applied, side by side in flat tensors.

    Args:
        leaves: the local tensors the optimizer updates, whose gradients these are.
        bucket_mb: largest size of a bucket; a leaf larger than that has a bucket of its own.
        order: places of the leaves in the order in which their gradients become whole; None: that of ``leaves``.

    Attributes:
        mb: largest size of a bucket, MB.
        flat: the buckets, in that order.
        gradients: of the leaves, in theirs; views of ``flat``.
        bucket: of each leaf, the place of its bucket in ``flat``.
    """

    def __init__(self, leaves: Sequence[Tensor], bucket_mb: float, order: Sequence[int] | None = None) -> None:
        self._leaves = list(leaves)
        self._order = list(range(len(leaves)) if order is None else order)
        self.resize(bucket_mb)

    def resize(self, bucket_mb: float) -> None:
        """Makes buckets of another size. What is in them is gone."""
        self.mb = bucket_mb
        sizes = [
            len(bucket) for bucket in split_into_buckets([self._leaves[place] for place in self._order], bucket_mb)
        ]
        places = iter(self._order)
        self._places = [[next(places) for _ in range(size)] for size in sizes]
        self.bucket = [0] * len(self._leaves)
        for number, held in enumerate(self._places):
            for place in held:
                self.bucket[place] = number
        self.renew()

    def renew(self) -> None:
        """Takes fresh memory: an aborted reduction may still write to the old."""
        self.flat = [
            self._leaves[held[0]].new_zeros(sum(shape.numel() for shape in shapes))
            for held, shapes in zip(self._places, self.shapes, strict=True)
        ]
        self.gradients = self.views(self.flat)
        for leaf, gradient in zip(self._leaves, self.gradients, strict=True):
            leaf.grad = gradient

    @property
    def shapes(self) -> list[list[torch.Size]]:
        """Of the gradients in each bucket, in their order there."""
        return [[self._leaves[place].shape for place in held] for held in self._places]

    def views(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """What belongs to each leaf, in their order, in tensors laid out like the buckets."""
        views = [torch.empty(0)] * len(self._leaves)
        for tensor, held, shapes in zip(flat, self._places, self.shapes, strict=True):
            parts = tensor.split([shape.numel() for shape in shapes])
            for place, part, shape in zip(held, parts, shapes, strict=True):
                views[place] = part.view(shape)
        return views

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        torch._foreach_mul_(self.flat, factor)


class ShardedGradients:
    """The gradients of the rows a rank holds, like `GradientBuckets` of whole parameters; a layer is a bucket.

    Attributes:
        flat: a tensor a layer, and one for the rest.
        gradients: of the rows, in the order of the parameters; views of ``flat``.
        sent_bytes: that a rank sends in a step, gradients and parameters.
        saved_bytes: how many fewer these are than uncompressed.
    """

    def __init__(self, count: int) -> None:
        self.flat: list[Tensor] = []
        self.gradients: list[Tensor] = [torch.empty(0)] * count
        self.sent_bytes = self.saved_bytes = 0

    def renew(self) -> None:
        """Nothing to do: what a call may still write to is dropped with the call."""

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        torch._foreach_mul_(self.flat, factor)


def split_into_buckets(tensors: Sequence[Tensor], bucket_mb: float) -> list[list[Tensor]]:
    """Neighbours of one dtype and device together, up to ``bucket_mb`` MB a bucket."""
    buckets: list[list[Tensor]] = []
    room = 0.0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        last = buckets[-1][0] if buckets else None
        if last is None or size > room or (tensor.dtype, tensor.device) != (last.dtype, last.device):
            buckets.append([])
            room = bucket_mb * MB
        buckets[-1].append(tensor)
        room -= size
    return buckets
