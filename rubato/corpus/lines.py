"""Reads plain text and JSON lines."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rubato.corpus.chat import ChatError, parts, render
from rubato.corpus.find import Source
from rubato.corpus.place import Place
from rubato.corpus.records import Answers, BadRecords, Document, Stretch, blocks, line_number, open_text, whole_or_parts
from rubato.problems import nearest


@dataclass(frozen=True)
class TextReader:
    """A file is a document, or pieces of at most ``largest`` bytes that end with a line.

    Attributes:
        utf8: whether what is not UTF-8 is refused.
    """

    place: Place
    largest: int
    utf8: bool

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        return whole_or_parts(source, largest)

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        at = stretch.start
        for document in self._pieces(source, stretch):
            cause = _not_utf8(document) if self.utf8 else None
            if cause is None:
                yield document
            else:
                where, fix = _where(source, at), "convert it to UTF-8, use tokenizer bytes, or set bad_records to skip"
                bad.add(where, cause, fix)
            at += len(document)

    def _pieces(self, source: Source, stretch: Stretch) -> Iterator[bytes]:
        if stretch.start == 0 and stretch.bytes == max(source.size, 0):
            with open_text(source) as file:
                rest = b""
                while block := _read(file, source, self.place, self.largest - len(rest)):
                    block = rest + block
                    whole = len(block) < self.largest
                    end = len(block) if whole else block.rfind(b"\n") + 1 or self._text_end(block)
                    yield block[:end]
                    rest = block[end:]
                if rest:
                    yield rest
            return
        for _, block in blocks(source, stretch):
            while block:
                whole = len(block) <= self.largest
                end = len(block) if whole else block.rfind(b"\n", 0, self.largest) + 1 or self._text_end(block)
                yield block[:end]
                block = block[end:]

    def _text_end(self, block: bytes) -> int:
        """Where to cut a line that is longer than a document: not within a character, if it is text."""
        end = min(len(block), self.largest)
        while self.utf8 and end > 1 and _cut_short(block[:end]):
            end -= 1
        return end


class Form(NamedTuple):
    """How chats become documents: by which template, and whether answers are told apart."""

    template: str | None
    answers: bool = False


@dataclass(frozen=True)
class JsonReader:
    """A line is an object; one of its fields is the document, as text or as the messages of a chat."""

    place: Place
    form: Form

    def stretches(self, source: Source, largest: int) -> list[Stretch]:
        return whole_or_parts(source, largest)

    def documents(self, source: Source, stretch: Stretch, bad: BadRecords) -> Iterator[Document]:
        field = self.place.spec.field
        for begin, block in _guarded(blocks(source, stretch), source, self.place):
            at = begin
            for line in block.splitlines(keepends=True):
                try:
                    if line.strip():
                        yield as_document(json.loads(line), field, self.form)
                except UnicodeDecodeError:
                    bad.add(_line(source, at), "is not UTF-8")
                except json.JSONDecodeError as error:
                    bad.add(_line(source, at), f"is not JSON: {error.msg} at character {error.pos + 1}")
                except RecordError as error:
                    bad.add(_line(source, at), str(error), error.fix)
                at += len(line)


class RecordError(Exception):
    """A record that holds no document."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.fix = fix


def as_document(record: Any, field: str, form: Form) -> bytes | Answers:
    """The document of a record. Raises RecordError."""
    skip = "correct it, or set bad_records to skip"
    if not isinstance(record, dict):
        raise RecordError("is not an object", skip)
    if field not in record:
        names = ", ".join(f"'{name}'" for name in record) or "none"
        close = nearest(field, record)
        raise RecordError(
            f"has no field '{field}'; its fields are {names}",
            f"did you mean field: {close}?" if close else "set field to the one with the text",
        )
    value = record[field]
    if isinstance(value, str) and form.answers:
        raise RecordError(
            f"field '{field}' is text, of which nothing is an answer", "give messages, or no answers_only"
        )
    if isinstance(value, str):
        return _encoded(value, field)
    if isinstance(value, list):
        try:
            if not form.answers:
                return _encoded(render(value, form.template), field)
            found = parts(value, form.template)
            if not found:
                raise RecordError(f"field '{field}' holds no message of the assistant", skip)
            return Answers(tuple((_encoded(text, field), answer) for text, answer in found))
        except ChatError as error:
            raise RecordError(f"field '{field}' is no chat: {error}", skip) from error
    kind = "null" if value is None else type(value).__name__
    raise RecordError(f"field '{field}' is {kind}, neither text nor messages", skip)


def _encoded(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        cause = f"field '{field}' holds half of a surrogate pair, which is no text"
        raise RecordError(cause, "correct it, or set bad_records to skip") from error


def _not_utf8(document: bytes) -> str | None:
    try:
        document.decode()
    except UnicodeDecodeError as error:
        return f"byte {document[error.start]:#04x} after {error.start} more bytes is not UTF-8"
    return None


def _cut_short(text: bytes) -> bool:
    """Whether a text ends within a character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _where(source: Source, at: int) -> str:
    return f"{source.location}, document at byte {at}"


def _line(source: Source, at: int) -> str:
    return f"{source.location}, line {line_number(source, at)}"


def _read(file: Any, source: Source, place: Place, size: int) -> bytes:
    try:
        block: bytes = file.read(size)
    except (EOFError, zlib.error) as error:
        raise _damaged(source, place, error) from error
    except OSError as error:
        if error.errno is None:  # what decompresses says so of what it cannot read
            raise _damaged(source, place, error) from error
        raise
    return block


def _guarded(found: Iterator[tuple[int, bytes]], source: Source, place: Place) -> Iterator[tuple[int, bytes]]:
    try:
        yield from found
    except (EOFError, zlib.error) as error:
        raise _damaged(source, place, error) from error
    except OSError as error:
        if error.errno is None:
            raise _damaged(source, place, error) from error
        raise


def _damaged(source: Source, place: Place, error: Exception) -> Exception:
    cause = f"{source.location} is damaged or cut short: {error}"
    return place.problem("corpus_broken", cause, "copy the file again")
