"""Reads the files of a corpus document by document."""

from __future__ import annotations

from collections.abc import Iterator

from rubato.corpus import Source


def documents(source: Source, largest: int) -> Iterator[bytes]:
    """The documents of a file: the file itself, or pieces of at most ``largest`` bytes that end with a line."""
    with source.path.open("rb") as file:
        rest = b""
        while block := file.read(largest - len(rest)):
            block = rest + block
            end = len(block) if len(block) < largest else block.rfind(b"\n") + 1 or len(block)
            yield block[:end]
            rest = block[end:]
        if rest:
            yield rest
