"""What the content of a file is, without reading it twice: checksums, kept by path, size and time of change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import cast

from rubato.corpus.find import Source
from rubato.corpus.formats import format_of
from rubato.corpus.place import Place
from rubato.corpus.remote import is_remote
from rubato.corpus.token_files import index_of
from rubato.durable import write_durably

_NAME = "checksums.json"


class Identities:
    """Checksums of files that were read before, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME

    def of(self, place: Place, files: Sequence[Source]) -> list[str]:
        """Another text for another content, for each file. Of what is remote its storage tells.

        Raises:
            RubatoError: a file cannot be read.
        """
        known = self._read()
        before = len(known)
        found = []
        for source in files:
            try:
                found.append(self._one(place, source, known))
            except OSError as error:
                raise place.unreadable(source.location, error) from error
        if len(known) != before:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self._path, json.dumps(self._read() | known))
        return found

    def _one(self, place: Place, source: Source, known: dict[str, str]) -> str:
        if format_of(place, source) == "megatron":
            index = index_of(source)
            # That it is missing is for the reader to tell.
            return f"{self._content(source, known)}+{self._content(index, known) if index.is_there() else 'none'}"
        return self._content(source, known)

    def _content(self, source: Source, known: dict[str, str]) -> str:
        if is_remote(source.location):
            return f"{source.location}@{source.stamp}"
        state = Path(source.location).stat()
        key = f"{source.location}@{state.st_size}-{state.st_mtime_ns}"
        if key not in known:
            with source.open() as file:
                known[key] = hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
        return known[key]

    def _read(self) -> dict[str, str]:
        try:
            content: dict[str, str] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return content
