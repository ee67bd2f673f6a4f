"""Cuts the documents of a source into windows that can be read in any order.

Three ways: the stream as it lies, the stream with its documents shuffled, and one document at a time. None of them
holds anything in memory that grows with the corpus, but a sum for every so many documents, which is mapped from disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rubato.corpus.open import Stream, TokenSource
from rubato.spec import DataSpec
from workers.engine.data.permutation import permute

NOT_COUNTED = -100
"""A target that is no token: it adds neither to the loss nor to the count of tokens."""

_STRIDE = 64  # documents a sum
_AT_ONCE = 1 << 18
_DOCUMENT_EPOCH = 2**64 - 2
"""Documents have one order for a run: windows are cut of it once, and visited in another order in each epoch."""

Places = NDArray[np.uint64]
Ids = NDArray[np.int64]


class Windows(Protocol):
    """Samples of a source, by number. ``count``: how many there are."""

    count: int

    def read(self, numbers: Places) -> tuple[Ids, Ids]:
        """Tokens and the targets that follow them, each (len(numbers), sequence_length)."""
        ...


def windows_of(data: DataSpec, stream: Stream, seed: int | None, keep: Path | None) -> Windows:
    """The windows of a stream, as the spec wants them cut.

    Args:
        seed: names the order of documents, where they are shuffled; None: they stay as they are.
        keep: where sums over documents are kept; None: in memory.
    """
    if data.packing == "padded":
        return PaddedDocuments(stream, data.sequence_length, keep)
    if data.shuffle == "documents" and seed is not None:
        return ShuffledDocuments(stream, data.sequence_length, seed, keep)
    return PlainStream(stream, data.sequence_length)


class PlainStream:
    """Documents without gaps between them, in the order of the corpus."""

    def __init__(self, stream: Stream, length: int) -> None:
        self._stream, self._length = stream, length
        self.count = max(0, len(stream.tokens) - 1) // length

    def read(self, numbers: Places) -> tuple[Ids, Ids]:
        taken = np.empty((len(numbers), self._length + 1), np.int64)
        answers = None if self._stream.answers is None else np.empty(taken.shape, np.uint8)
        for row, number in enumerate(numbers.tolist()):
            there = slice(number * self._length, (number + 1) * self._length + 1)
            taken[row] = self._stream.tokens[there]
            if answers is not None and self._stream.answers is not None:
                answers[row] = self._stream.answers[there]
        return taken[:, :-1], counted(taken[:, 1:], answers)


class ShuffledDocuments:
    """Documents without gaps between them, in an order that (seed) names and nobody stores."""

    def __init__(self, stream: Stream, length: int, seed: int, keep: Path | None) -> None:
        self._stream, self._length, self._seed = stream, length, seed
        self.count = max(0, len(stream.tokens) - 1) // length
        path = keep / f"documents-{seed:x}.sums" if keep else None
        self._sums = sums_over(len(stream.ends), lambda places: self._spans(places)[1], path)

    def read(self, numbers: Places) -> tuple[Ids, Ids]:
        taken = np.empty((len(numbers), self._length + 1), np.int64)
        answers = None if self._stream.answers is None else np.empty(taken.shape, np.uint8)
        for row, number in enumerate(numbers.tolist()):
            self._fill(taken[row], None if answers is None else answers[row], number * self._length)
        return taken[:, :-1], counted(taken[:, 1:], answers)

    def _fill(self, row: Ids, answers: NDArray[np.uint8] | None, start: int) -> None:
        block = int(np.searchsorted(self._sums, start, "right")) - 1
        at, filled = int(self._sums[block]), 0
        while filled < len(row):
            first = block * _STRIDE
            places = np.arange(first, min(first + _STRIDE, len(self._stream.ends)), dtype=np.uint64)
            for begin, size in zip(*(each.tolist() for each in self._spans(places)), strict=True):
                skipped = max(0, start + filled - at)
                if skipped < size:
                    taken = min(size - skipped, len(row) - filled)
                    there = slice(begin + skipped, begin + skipped + taken)
                    row[filled : filled + taken] = self._stream.tokens[there]
                    if answers is not None and self._stream.answers is not None:
                        answers[filled : filled + taken] = self._stream.answers[there]
                    filled += taken
                    if filled == len(row):
                        return
                at += size
            block += 1

    def _spans(self, places: Places) -> tuple[Ids, Ids]:
        """Where the documents at these places of the order begin, and how long they are."""
        return spans(self._stream, permute(places, len(self._stream.ends), self._seed, _DOCUMENT_EPOCH))


class PaddedDocuments:
    """A window is one document, or a piece of one that is longer; what is left of it does not count."""

    def __init__(self, stream: Stream, length: int, keep: Path | None) -> None:
        self._stream, self._length = stream, length
        path = keep / f"pieces-{length}.sums" if keep else None
        self._sums = sums_over(len(stream.ends), lambda places: self._pieces(spans(stream, places)[1]), path)
        self.count = int(self._sums[-1])

    def read(self, numbers: Places) -> tuple[Ids, Ids]:
        tokens = np.zeros((len(numbers), self._length), np.int64)
        targets = np.full((len(numbers), self._length), NOT_COUNTED, np.int64)
        for row, number in enumerate(numbers.tolist()):
            begin, size, piece = self._find(number)
            first = piece * self._length
            there = slice(begin + first, begin + min(size, first + self._length + 1))
            taken = self._stream.tokens[there].astype(np.int64)
            answers = None if self._stream.answers is None else self._stream.answers[there]
            tokens[row, : len(taken) - 1] = taken[:-1]
            targets[row, : len(taken) - 1] = counted(taken[1:], answers)
        return tokens, targets

    def _find(self, number: int) -> tuple[int, int, int]:
        """The document of a window: where it begins, its length, and which of its pieces this is."""
        block = int(np.searchsorted(self._sums, number, "right")) - 1
        places = np.arange(block * _STRIDE, min((block + 1) * _STRIDE, len(self._stream.ends)), dtype=np.uint64)
        begins, sizes = spans(self._stream, places)
        ends = int(self._sums[block]) + np.cumsum(self._pieces(sizes))
        found = int(np.searchsorted(ends, number, "right"))
        before = int(ends[found - 1]) if found else int(self._sums[block])
        return int(begins[found]), int(sizes[found]), number - before

    def _pieces(self, sizes: Ids) -> Ids:
        return -(-np.maximum(sizes - 1, 0) // self._length)


def counted(targets: Ids, answers: NDArray[np.uint8] | None) -> Ids:
    """Targets without those that are to be read only. ``answers`` is one token longer, as it begins before them."""
    return targets if answers is None else np.where(answers[..., 1:] != 0, targets, NOT_COUNTED)


def spans(stream: Stream, documents: Places) -> tuple[Ids, Ids]:
    """Where documents begin, and how many tokens they have."""
    ends = stream.ends[documents].astype(np.int64)
    begins = np.where(documents > 0, stream.ends[np.maximum(documents, 1) - np.uint64(1)], 0).astype(np.int64)
    return begins, ends - begins


def sums_over(count: int, sizes: Callable[[Places], Ids], path: Path | None) -> NDArray[np.uint64]:
    """Sums of sizes before every 64th of ``count`` places, and of all: kept at ``path``, where there is one."""
    if path is not None and path.is_file():
        return _mapped(path)
    blocks = -(-count // _STRIDE)
    sums = np.zeros(blocks + 1, np.uint64)
    for first in range(0, count, _AT_ONCE):
        part = sizes(np.arange(first, min(first + _AT_ONCE, count), dtype=np.uint64))
        within = np.add.reduceat(part, np.arange(0, len(part), _STRIDE)).astype(np.uint64)
        sums[first // _STRIDE + 1 : first // _STRIDE + 1 + len(within)] = within
    np.cumsum(sums, out=sums)
    if path is None:
        return sums
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(sums.data)
        os.fchmod(file.fileno(), 0o644)
    Path(name).rename(path)  # whoever was first wrote the same
    return _mapped(path)


def folder_of(corpus_folder: Path | None, source: TokenSource, split: str) -> Path | None:
    """Where sums over the documents of a split are kept."""
    return corpus_folder / f"{source.key}-{split}" if corpus_folder and source.key else None


def _mapped(path: Path) -> NDArray[Any]:
    return np.asarray(np.memmap(path, "<u8", mode="r"))
