"""What the loop asks of whoever brings gradients from backward to the optimizer, and parameters back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from workers.engine.comm.buckets import GradientBuckets, ShardedGradients
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.data import DataGroup
from workers.engine.parallel.pipeline import Runner

Start = Callable[[Tensor], None]
"""Begins to reduce a bucket in place. Called in the midst of a backward pass, which must not be left: never raises."""


class Exchange(Protocol):
    """Between replicas that all hold the state (``overlap.py``), or rows of it (``parallel/zero.py``).

    Attributes:
        buckets: gradients of what the optimizer updates.
    """

    @property
    def buckets(self) -> GradientBuckets | ShardedGradients: ...

    def hold(self, data: DataGroup) -> None:
        """Begins a generation whose state is about to be loaded: takes memory for what this worker will hold."""
        ...

    def runner(self, share: ModelShare, counts: Sequence[int], replica: int) -> Runner:
        """Runs the micro-batches of a replica, of which each has so many."""
        ...

    def reducing(self, start: Start) -> AbstractContextManager[None]:
        """To be entered around the passes of a step, whose buckets are given to ``start`` or reduced by and by.

        Raises RuntimeError when a parameter has no gradient.
        """
        ...

    def last_pass(self, part: nn.Module) -> AbstractContextManager[None]:
        """To be entered around the last backward pass through a part."""
        ...

    def totals(self, squares: Sequence[float]) -> list[float]:
        """Sums of squared gradients over all parameters, of what they are over this replica. Raises DataAxisError."""
        ...
