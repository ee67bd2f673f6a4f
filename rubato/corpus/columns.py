"""Reads Parquet files and the Arrow files of a dataset that Hugging Face `datasets` has saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow
import pyarrow.parquet

from rubato.corpus.find import Source
from rubato.corpus.lines import Form, RecordError, as_document
from rubato.corpus.place import Place
from rubato.corpus.records import BadRecords, Document, Stretch, seekable
from rubato.problems import RubatoError, nearest

_ROWS = 1024


@dataclass(frozen=True)
class ParquetReader:
    """A row is a document; stretches are row groups."""

    place: Place
    form: Form

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        with seekable(source) as file:
            metadata = self._open(source, file).metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        found: list[Stretch] = []
        for group, size in enumerate(sizes):
            if found and found[-1].bytes + size <= largest:
                found[-1] = Stretch(found[-1].start, group + 1, found[-1].bytes + size)
            else:
                found.append(Stretch(group, group + 1, size))
        return found

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        with seekable(source) as file:
            parquet = self._open(source, file)
            groups = list(range(stretch.start, stretch.stop))
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(stretch.start))
            try:
                for batch in parquet.iter_batches(_ROWS, row_groups=groups, columns=[self.place.spec.field]):
                    yield from rows(source, batch, row, self.place, self.form, bad)
                    row += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                raise broken(self.place, source, error) from error

    def _open(self, source: Source, file: Any) -> pyarrow.parquet.ParquetFile:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise broken(self.place, source, error) from error
        check_field(self.place, source, parquet.schema_arrow.names)
        return parquet


@dataclass(frozen=True)
class ArrowReader:
    """A row is a document. A file is read as a whole: its format is a stream."""

    place: Place
    form: Form

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        with seekable(source) as file:
            check_field(self.place, source, self._open(source, file).schema.names)
        return [Stretch(0, source.size, source.size)]

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        row = 0
        with seekable(source) as file:
            try:
                for batch in self._open(source, file):
                    yield from rows(source, batch, row, self.place, self.form, bad)
                    row += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                raise broken(self.place, source, error) from error

    def _open(self, source: Source, file: Any) -> Any:
        try:
            return pyarrow.ipc.open_stream(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise broken(self.place, source, error) from error


def rows(source: Source, batch: Any, first: int, place: Place, form: Form, bad: BadRecords) -> Iterator[Document]:
    """The documents of some rows of a table."""
    field = place.spec.field
    for number, value in enumerate(batch.column(batch.schema.get_field_index(field)), first + 1):
        try:
            yield as_document({field: value.as_py()}, field, form)
        except (RecordError, UnicodeDecodeError) as error:
            bad.add(f"{source.location}, row {number}", str(error))


def check_field(place: Place, source: Source, names: list[str]) -> None:
    """Refuses a field that is no column, with the nearest that is."""
    field = place.spec.field
    if field not in names:
        close = nearest(field, names)
        cause = f"{source.location} has no column '{field}'; its columns are {', '.join(names) or 'none'}"
        fix = f"did you mean '{close}'?" if close else "name the column with the text"
        raise place.problem("corpus_field", cause, fix, field="field")


def broken(place: Place, source: Source, error: Exception) -> RubatoError:
    """The refusal of a file that is not what its name says."""
    cause = f"{source.location} is damaged or cut short: {error}"
    return place.problem("corpus_broken", cause, "copy the file again, or give the format it has")
