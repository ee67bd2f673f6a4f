"""Reduction while backward goes on: a bucket is on its way as soon as the last of its gradients is whole.

Gradients add up in the parameters over the micro-batches of a step. In the last backward pass through a part each is
taken out the moment it is whole, so the axis is busy with the last layers while the first ones are computed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rubato.spec.communication import CPU_BUCKET_MB
from workers.engine.comm.buckets import GradientBuckets
from workers.engine.comm.exchange import Start
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.pipeline import Runner
from workers.engine.parallel.tensor import is_replicated, local_gradient, sum_partial


def _late(parameters: Sequence[nn.Parameter], parts: Sequence[nn.Module]) -> list[int]:
    """Gradients that are not whole with the last pass through a part.

    These are sums over the tensor axis, which are made in one call for all, and that of a matrix in several parts.
    """
    uses = Counter(parameter for part in parts for parameter in part.parameters())
    return [place for place, each in enumerate(parameters) if uses[each] > 1 or is_replicated(each)]


class Overlap:
    """Brings gradients from the parameters into buckets, and buckets on their way.

    Buckets hold gradients in the order in which backward completes them, as near as can be told before: the last
    layers first, and last of all what is whole only when all is computed. They set out in that order on all replicas,
    whatever happens on one of them: reductions are matched by their order.

    Args:
        share: whose parameters they are.
        leaves: the local tensors the optimizer updates, in the order of the parameters.
        bucket_mb: largest size of a bucket; "auto": it will be changed once it was measured.
        tensor: group of the tensor axis.
    """

    def __init__(
        self,
        share: ModelShare,
        leaves: Sequence[Tensor],
        bucket_mb: float | Literal["auto"],
        tensor: dist.ProcessGroup | None,
    ) -> None:
        parameters, parts = share.parameters, share.parts
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._tensor = tensor
        self._late = _late(self._parameters, parts)
        early = [place for place in range(len(leaves)) if place not in self._late]
        self.buckets = GradientBuckets(
            leaves, CPU_BUCKET_MB if bucket_mb == "auto" else bucket_mb, [*reversed(early), *self._late]
        )
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        self._held = {
            part: [places[each] for each in part.parameters() if places[each] not in self._late] for part in parts
        }
        self._start: Start = _nothing
        self._whole: set[int] = set()
        self._open: set[int] = set()
        self._missing: list[int] = []
        self._next = 0
        self._taking = threading.Lock()  # autograd has a thread a device, and layers may be on several
        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, place))

    def hold(self, data: DataGroup) -> None:
        """A generation begins; every replica holds all of the state, so nothing changes hands."""

    def totals(self, squares: Sequence[float]) -> list[float]:
        """What squared gradients come to over the data axis: every replica has all of them."""
        return list(squares)

    def runner(self, share: ModelShare, counts: Sequence[int], replica: int) -> Runner:
        """Runs the micro-batches of a replica, of which each has so many."""
        return share.runner(counts[replica])

    @contextmanager
    def reducing(self, start: Start) -> Iterator[None]:
        """To be entered around the passes of a step, whose buckets are to be given to ``start``, in their order.

        Raises:
            RuntimeError: a parameter has no gradient.
        """
        self._start = start
        self._whole.clear()
        self._open.clear()
        counts = Counter(self.buckets.bucket)
        self._missing = [counts[number] for number in range(len(self.buckets.flat))]
        self._next = 0
        yield
        gradients = [self._gradient(place) for place in self._late]
        sum_partial(gradients, self._tensor)
        for place, gradient in zip(self._late, gradients, strict=True):
            self._take(place, gradient)
        if self._next < len(self._missing):
            raise RuntimeError("a part had no last backward pass, so its gradients were never whole")

    @contextmanager
    def last_pass(self, part: nn.Module) -> Iterator[None]:
        """To be entered around the last backward pass through a part."""
        self._open.update(self._held[part])
        yield
        # Where the gradients of weights are computed apart from those of inputs, no hook hears of them.
        for place in reversed(self._held[part]):
            if place not in self._whole:
                self._take(place, self._gradient(place))

    def _accumulated(self, place: int, parameter: Tensor) -> None:
        if place in self._open and place not in self._whole:
            with self._taking:
                self._take(place, self._gradient(place))

    def _gradient(self, place: int) -> Tensor:
        parameter = self._parameters[place]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise RuntimeError(f"parameter {self._names[place]} has no gradient: the loss does not depend on it")
        return local_gradient(gradient, parameter)

    @torch.no_grad()
    def _take(self, place: int, gradient: Tensor) -> None:
        self.buckets.gradients[place].copy_(gradient)
        self._whole.add(place)
        self._missing[self.buckets.bucket[place]] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._start(self.buckets.flat[self._next])
            self._next += 1


def _nothing(bucket: Tensor) -> None:
    """Nobody is there to reduce with."""
