"""Which windows of the corpus a step reads: a function of (seed, step), never of ranks or of what was read before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rubato.spec import JobSpec
from workers.engine.data.corpus import Corpus, Tokens
from workers.engine.data.permutation import permute

NOT_COUNTED = -100
"""A target that is no token: it adds neither to the loss nor to the count of tokens."""

_VALIDATION_EPOCH = 2**64 - 1  # held-out windows are read in one order, whatever the seed


class Sampler:
    """Samples by (step, place in the global batch).

    The corpus is cut into windows of ``sequence_length`` tokens. Sample ``n`` of the run, counted over steps, is a
    window of epoch ``n // windows``; each epoch visits every window once, in an order of its own that is computed and
    not stored. A global batch may therefore span two epochs, and a run may begin anywhere at no cost.
    """

    def __init__(self, spec: JobSpec, corpus: Corpus) -> None:
        self._corpus = corpus
        self._seed = spec.train.seed
        self._global_batch = spec.train.global_batch
        self._length = spec.data.sequence_length
        self._validation_batches = spec.data.validation.batches

    @property
    def windows(self) -> int:
        """Samples of an epoch."""
        return (len(self._corpus.train) - 1) // self._length

    @property
    def held_out_windows(self) -> int:
        """Samples that are never trained on."""
        return max(0, len(self._corpus.held_out) - 1) // self._length

    @property
    def validation_batches(self) -> int:
        """Global batches an evaluation reads: as many as asked for, or as the held-out windows fill."""
        return min(self._validation_batches, -(-self.held_out_windows // self._global_batch))

    def batch(self, step: int, samples: range) -> tuple[Tensor, Tensor]:
        """Part of the global batch of a step.

        Args:
            step: optimizer steps done before this one; 0 for the first.
            samples: places in the global batch, such as ``rubato.layout.sample_range`` gives.

        Returns:
            ``tokens_BS`` and ``targets_BS``, int64, B = len(samples), S = sequence_length.
        """
        numbers = self._places(samples) + np.uint64(step * self._global_batch)
        epochs, places = np.divmod(numbers, np.uint64(self.windows))
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(places[here], self.windows, self._seed, int(epoch))
        return self._read(self._corpus.train, windows)

    def validation_batch(self, index: int, samples: range) -> tuple[Tensor, Tensor]:
        """Part of one of the global batches an evaluation reads, 0 <= index < validation_batches.

        Shapes are those of ``batch``. Where the held-out windows do not fill the last batch, the targets of the
        samples beyond them are NOT_COUNTED, so each window counts once.
        """
        numbers = self._places(samples) + np.uint64(index * self._global_batch)
        windows = permute(numbers % np.uint64(self.held_out_windows), self.held_out_windows, 0, _VALIDATION_EPOCH)
        tokens_BS, targets_BS = self._read(self._corpus.held_out, windows)
        targets_BS[torch.from_numpy(numbers >= self.held_out_windows)] = NOT_COUNTED
        return tokens_BS, targets_BS

    def _places(self, samples: range) -> NDArray[np.uint64]:
        if samples and not 0 <= min(samples) <= max(samples) < self._global_batch:
            raise ValueError(f"{samples} is not within a global batch of {self._global_batch}")
        return np.arange(samples.start, samples.stop, samples.step, dtype=np.uint64)

    def _read(self, stream: Tokens, windows: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        starts = windows.astype(np.int64) * self._length
        taken = stream[starts[:, None] + np.arange(self._length + 1)].astype(np.int64)
        window_BT = torch.from_numpy(taken)
        return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()
