"""Reads the samples of the next step while this one is computed, so that no step waits for storage."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from workers.engine.data.sampler import Sampler

Batch = tuple[Tensor, Tensor]


class Ahead:
    """A sampler that has the next step's samples read before they are asked for.

    Attributes:
        waited_s: seconds that the last call of ``batch`` waited for storage.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._next: tuple[tuple[int, range], Future[Batch]] | None = None
        self.waited_s = 0.0

    @property
    def validation_batches(self) -> int:
        """As ``Sampler``'s."""
        return self._sampler.validation_batches

    def batch(self, step: int, samples: range) -> Batch:
        """As ``Sampler``'s. Whoever asks for step n is expected to ask for n + 1 with the same samples."""
        began = time.perf_counter()
        wanted, ready = (step, samples), self._next
        # Another generation has other samples, and a step that was undone is asked for again.
        found = ready[1].result() if ready is not None and ready[0] == wanted else self._sampler.batch(step, samples)
        self.waited_s = time.perf_counter() - began
        self._next = (step + 1, samples), self._thread.submit(self._sampler.batch, step + 1, samples)
        return found

    def validation_batch(self, index: int, samples: range) -> Batch:
        """As ``Sampler``'s."""
        return self._sampler.validation_batch(index, samples)
