"""Reads tokens that others have made: Megatron's indexed datasets, and flat files such as nanoGPT's."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rubato.corpus.find import Source
from rubato.corpus.place import Place
from rubato.corpus.records import BadRecords, Document, Stretch, TokenIds, seekable
from rubato.problems import RubatoError

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Headers of 256 words of 32 bits that begin with a number of their own: llm.c's files, and modded-nanogpt's.
_HEADER, _HEADED_TYPES = 1024, {20240520: "<u2", 20240801: "<u4"}
_PIECE = 16 * 1024
"""Tokens of a flat file that are held out, or not, together: it does not say where documents end."""


@dataclass(frozen=True)
class MegatronReader:
    """A ``.bin`` of tokens and the ``.idx`` that says where sequences and documents end.

    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
    """

    place: Place
    vocab_size: int

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        kind, ends = self._index(source)
        found, start = [], 0
        while start < len(ends) - 1:
            most = ends[start] + max(1, largest // kind.itemsize)
            stop = max(start + 1, int(np.searchsorted(ends, most, "right")) - 1)
            found.append(Stretch(start, stop, int(ends[stop] - ends[start]) * kind.itemsize))
            start = stop
        return found

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        kind, ends = self._index(source)
        with seekable(source) as file:
            file.seek(int(ends[stretch.start]) * kind.itemsize)
            for number in range(stretch.start, stretch.stop):
                tokens = read_tokens(file, kind, int(ends[number + 1] - ends[number]))
                if len(tokens):
                    where = f"{source.location}, document {number + 1}"
                    yield within(tokens, self.vocab_size, self.place, where)

    def _index(self, source: Source) -> tuple[np.dtype[Any], NDArray[np.int64]]:
        """The type of tokens, and the place of each document's first one, with the end of the last."""
        index = index_of(source)
        try:
            with index.open() as file:
                content = file.read()
        except FileNotFoundError as error:
            cause = f"{index.location} is missing beside {source.location}"
            raise self.place.problem(
                "corpus_missing", cause, "copy it there, or set format: tokens for a file of tokens alone"
            ) from error
        try:
            kind, sizes, documents = _parse_index(content)
        except _IndexError as error:
            raise self.place.problem("corpus_broken", f"{index.location} {error}", error.fix) from error
        places = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if places[-1] * kind.itemsize != source.size:
            cause = (
                f"{source.location} has {source.size} bytes, {index.location} speaks of {places[-1] * kind.itemsize}"
            )
            raise self.place.problem("corpus_broken", cause, "copy both files again")
        return kind, places[documents]


class _IndexError(Exception):
    def __init__(self, cause: str, fix: str = "copy both files again") -> None:
        super().__init__(cause)
        self.fix = fix


def _parse_index(content: bytes) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]:
    head = struct.Struct("<QBQQ")
    if not content.startswith(_MEGATRON):
        raise _IndexError(
            "does not begin like an index of Megatron", "make it with tools/preprocess_data.py --dataset-impl mmap"
        )
    if len(content) < len(_MEGATRON) + head.size:
        raise _IndexError("is cut short")
    version, code, sequences, documents = head.unpack_from(content, len(_MEGATRON))
    if version != 1:
        raise _IndexError(f"has version {version}, known is 1", "make it again with a Megatron that writes 1")
    if code not in _MEGATRON_TYPES:
        raise _IndexError(f"has tokens of type {code}, which is no type of whole numbers", "make it again")
    at = len(_MEGATRON) + head.size
    if len(content) < at + 12 * sequences + 8 * documents:
        raise _IndexError("is cut short")
    sizes = np.frombuffer(content, "<i4", sequences, at)
    ends = np.frombuffer(content, "<i8", documents, at + 12 * sequences)
    if documents < 1 or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any() or (sizes < 0).any():
        raise _IndexError("counts documents that are not there")
    return np.dtype(_MEGATRON_TYPES[code]), sizes, ends


def index_of(source: Source) -> Source:
    """The index that belongs to a ``.bin``."""
    return replace(
        source,
        name=source.name.removesuffix(".bin") + ".idx",
        location=source.location.removesuffix(".bin") + ".idx",
    )


@dataclass(frozen=True)
class FlatReader:
    """Tokens one after the other, two or four bytes each. Read in pieces, as it knows no documents."""

    place: Place
    vocab_size: int

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        with seekable(source) as file:
            kind, _, count = self._head(source, file)
        step = max(1, largest // kind.itemsize // _PIECE) * _PIECE
        return [
            Stretch(start, min(start + step, count), (min(start + step, count) - start) * kind.itemsize)
            for start in range(0, count, step)
        ]

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        with seekable(source) as file:
            kind, first, _ = self._head(source, file)
            file.seek(first + stretch.start * kind.itemsize)
            for start in range(stretch.start, stretch.stop, _PIECE):
                tokens = read_tokens(file, kind, min(_PIECE, stretch.stop - start))
                yield within(tokens, self.vocab_size, self.place, f"{source.location}, tokens from {start}")

    def _head(self, source: Source, file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
        """The type of tokens, where the first one is, and how many there are."""
        head = np.frombuffer(file.read(12), "<i4")
        if len(head) == 3 and int(head[0]) in _HEADED_TYPES:
            kind, count = np.dtype(_HEADED_TYPES[int(head[0])]), int(head[2])
            if source.size != _HEADER + count * kind.itemsize:
                cause = f"{source.location} has {source.size} bytes, its header speaks of {count} tokens"
                raise self.place.problem("corpus_broken", f"{cause}: it is cut short", "copy the file again")
            return kind, _HEADER, count
        kind = np.dtype("<u2" if self.place.spec.token_type == "uint16" else "<u4")
        if source.size % kind.itemsize:
            cause = f"{source.location} has {source.size} bytes, no whole number of tokens of {kind.itemsize}"
            raise self.place.problem("corpus_broken", f"{cause}: it is cut short", "copy it again, or set token_type")
        return kind, 0, source.size // kind.itemsize


def read_tokens(file: BinaryIO, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    """So many tokens from where a file is. Raises OSError when it ends before."""
    content = file.read(count * kind.itemsize)
    if len(content) != count * kind.itemsize:
        raise OSError(f"it ends {count * kind.itemsize - len(content)} bytes too early")
    return np.frombuffer(content, kind)


def within(tokens: NDArray[Any], vocab_size: int, place: Place, where: str) -> TokenIds:
    """Tokens as ids of the vocabulary. Raises RubatoError when one lies beyond it."""
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        raise beyond_vocabulary(place, f"{where}: token {int(tokens[first])} at place {first + 1}", vocab_size)
    return tokens.astype(np.uint32)


def beyond_vocabulary(place: Place, what: str, vocab_size: int) -> RubatoError:
    """The refusal of a token that the model has no row for."""
    return place.problem(
        "corpus_vocabulary",
        f"{what} is beyond the vocabulary of {vocab_size}",
        "use the tokenizer that made the tokens, a larger data.vocab_size, or the right token_type",
    )
