"""Which windows of the corpus a step reads: a function of (seed, step), never of ranks or of what was read before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rubato.corpus.open import Corpus
from rubato.spec import JobSpec
from workers.engine.data.blend import assign
from workers.engine.data.permutation import permute
from workers.engine.data.windows import NOT_COUNTED, Ids, Places, Windows, folder_of, windows_of

_VALIDATION_EPOCH = 2**64 - 1  # held-out windows are read in one order, whatever the seed


class Sampler:
    """Samples by (step, place in the global batch).

    Each source is cut into windows of ``sequence_length`` tokens. Sample ``n`` of the run, counted over steps, is
    sample ``m`` of one source, and that is a window of the source's epoch ``m // windows``; each epoch visits every
    window once, in an order of its own that is computed and not stored. A global batch may therefore span two epochs,
    and a run may begin anywhere at no cost.
    """

    def __init__(self, spec: JobSpec, corpus: Corpus) -> None:
        self._seed = spec.train.seed
        self._global_batch = spec.train.global_batch
        self._length = spec.data.sequence_length
        self._validation_batches = spec.data.validation.batches
        self._weights = [source.weight for source in corpus.sources]
        self._train = [
            windows_of(spec.data, source.train, self._seed, folder_of(corpus.folder, source, "train"))
            for source in corpus.sources
        ]
        self._held_out = [
            windows_of(spec.data, source.held_out, None, folder_of(corpus.folder, source, "held_out"))
            for source in corpus.evaluated
        ]

    @property
    def windows(self) -> list[int]:
        """Samples of an epoch, of each source."""
        return [windows.count for windows in self._train]

    @property
    def held_out_windows(self) -> int:
        """Samples that are never trained on."""
        return sum(windows.count for windows in self._held_out)

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
        assigned = assign(numbers.tolist(), self._weights)
        source = np.array([source for source, _ in assigned], np.int64)
        own = np.array([number for _, number in assigned], np.uint64)
        epochs, places = np.divmod(own, np.array(self.windows, np.uint64)[source])
        windows = np.empty_like(places)
        for number, count in enumerate(self.windows):
            for epoch in np.unique(epochs[source == number]):
                here = (source == number) & (epochs == epoch)
                # The seed of the first source is the run's; the others have orders of their own.
                windows[here] = permute(places[here], count, self._seed + (number << 64), int(epoch))
        return _tensors(*_read(self._train, source, windows, self._length))

    def validation_batch(self, index: int, samples: range) -> tuple[Tensor, Tensor]:
        """Part of one of the global batches an evaluation reads, 0 <= index < validation_batches.

        Shapes are those of ``batch``. Where the held-out windows do not fill the last batch, the targets of the
        samples beyond them are NOT_COUNTED, so each window counts once.
        """
        numbers = self._places(samples) + np.uint64(index * self._global_batch)
        whole = self.held_out_windows
        places = permute(numbers % np.uint64(whole), whole, 0, _VALIDATION_EPOCH)
        ends = np.cumsum([windows.count for windows in self._held_out], dtype=np.uint64)
        source = np.searchsorted(ends, places, "right")
        begins = np.concatenate([[0], ends[:-1]]).astype(np.uint64)
        tokens_BS, targets_BS = _read(self._held_out, source, places - begins[source], self._length)
        targets_BS[numbers >= whole] = NOT_COUNTED
        return _tensors(tokens_BS, targets_BS)

    def _places(self, samples: range) -> Places:
        if samples and not 0 <= min(samples) <= max(samples) < self._global_batch:
            raise ValueError(f"{samples} is not within a global batch of {self._global_batch}")
        return np.arange(samples.start, samples.stop, samples.step, dtype=np.uint64)


def _read(cut: Sequence[Windows], source: Ids, windows: Places, length: int) -> tuple[Ids, Ids]:
    tokens_BS = np.empty((len(windows), length), np.int64)
    targets_BS = np.empty_like(tokens_BS)
    for number, each in enumerate(cut):
        here = source == number
        if here.any():
            tokens_BS[here], targets_BS[here] = each.read(windows[here])
    return tokens_BS, targets_BS


def _tensors(tokens_BS: Ids, targets_BS: Ids) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(tokens_BS), torch.from_numpy(targets_BS)
