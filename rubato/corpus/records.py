"""What readers share: documents, stretches of a file that are read on their own, and what becomes of bad records."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rubato.corpus.find import Source
from rubato.corpus.place import Place

TokenIds = NDArray[np.unsignedinteger[Any]]


class Answers(NamedTuple):
    """Text in parts, of which some are what a model is to learn to say."""

    parts: tuple[tuple[bytes, bool], ...]

    @property
    def text(self) -> bytes:
        """All of it."""
        return b"".join(part for part, _ in self.parts)


Document = bytes | Answers | TokenIds
"""Text, text with answers in it, or tokens that others have made."""

COMPRESSED = (".gz", ".zst")
_BLOCK = 1 << 20
_EXAMPLES = 5


class Stretch(NamedTuple):
    """A part of a file that can be read on its own, in the unit of its format: bytes, row groups, documents, tokens."""

    start: int
    stop: int
    bytes: int


class Reader(Protocol):
    """Reads the files of one format."""

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        """The whole of a file, in parts of about ``largest`` bytes where the format can be entered in between.

        Raises:
            OSError: it cannot be read.
            RubatoError: it is not of this format, or is damaged.
        """
        ...

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        """The documents of a stretch, in their order. Raises as ``stretches`` does."""
        ...


@dataclass
class BadRecords:
    """What could not be read: an error, or a count, as the spec says.

    Attributes:
        count: records that were passed over.
        examples: the first of them, each with its place and what is wrong.
    """

    place: Place
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, where: str, cause: str, fix: str = "correct it, or set bad_records to skip") -> None:
        """Passes a record over, or refuses the corpus because of it."""
        if self.place.spec.bad_records == "stop":
            raise self.place.problem("corpus_broken", f"{where}: {cause}", fix)
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{where}: {cause}")


def open_text(source: Source) -> BinaryIO:
    """The bytes of a file, decompressed where its name ends so. Raises OSError."""
    file = source.open()
    if source.name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if source.name.endswith(".zst"):
        import pyarrow

        return cast(BinaryIO, pyarrow.CompressedInputStream(file, "zstd"))
    return file


def is_compressed(source: Source) -> bool:
    """Whether a file can be read from its beginning alone."""
    return source.name.endswith(COMPRESSED)


def whole_or_parts(source: Source, largest: int) -> list[Stretch]:
    """The stretches of a file of lines."""
    if is_compressed(source) or source.size <= largest:
        return [Stretch(0, max(source.size, 0), max(source.size, 0))]
    return [
        Stretch(start, min(start + largest, source.size), min(largest, source.size - start))
        for start in range(0, source.size, largest)
    ]


def blocks(source: Source, stretch: Stretch) -> Iterator[tuple[int, bytes]]:
    """The whole lines that begin in a stretch, in blocks of at least one line, each with its place in the file."""
    with open_text(source) as file:
        at, limit = 0, stretch.stop
        if is_compressed(source) or source.size < 0:
            limit = -1
        elif stretch.start:
            at = stretch.start - 1
            file.seek(at)
        rest, skipping = b"", at > 0
        while block := file.read(_BLOCK):
            rest += block
            if skipping:
                end = rest.find(b"\n")
                if end < 0:
                    at, rest = at + len(rest), b""
                    continue
                at, rest, skipping = at + end + 1, rest[end + 1 :], False
            if 0 <= limit <= at:
                return
            # The last line of a stretch may reach into the next one, which skips it.
            end = rest.find(b"\n", limit - 1 - at) if 0 <= limit <= at + len(rest) else rest.rfind(b"\n")
            if end < 0:
                continue
            yield at, rest[: end + 1]
            at, rest = at + end + 1, rest[end + 1 :]
        if rest and not skipping and not 0 <= limit <= at:
            yield at, rest


def line_number(source: Source, place: int) -> int:
    """The number of the line that begins at a byte, counted from 1."""
    number, left = 1, place
    with open_text(source) as file:
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            number, left = number + block.count(b"\n"), left - len(block)
    return number


def seekable(source: Source) -> BinaryIO:
    """The bytes of a file that is read here and there. Raises OSError."""
    file = source.open()
    return file if file.seekable() else cast(BinaryIO, io.BytesIO(file.read()))
