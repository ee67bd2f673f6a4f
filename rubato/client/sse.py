"""Server-sent events out of bytes as they arrive (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

END = "end"
"""The kind of the event after which nothing more will come: a stream that stops without it was cut."""

# Only these end a line; str.splitlines would also split at U+2028, which JSON may hold.
_LINE_END = re.compile("\r\n|\n|\r")


@dataclass(frozen=True)
class ServerSentEvent:
    """One event: ``kind`` is ``message`` unless the server named another; ``id`` is empty when it gave none."""

    kind: str
    data: str
    id: str

    @property
    def cursor(self) -> str | None:
        """The id as the place to go on from, None when it is none."""
        return self.id or None


class Decoder:
    """Bytes in, events out, across any boundaries between chunks."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._kind = ""
        self._id = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """The events that ``chunk`` completes."""
        text = self._rest + self._text.decode(chunk)
        held = text.endswith("\r")  # it may be half of \r\n
        *lines, self._rest = _LINE_END.split(text[:-1] if held else text)
        if held:
            self._rest += "\r"
        for line in lines:
            event = self._line(line)
            if event:
                yield event

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        data, kind = self._data, self._kind
        self._data, self._kind = [], ""
        return ServerSentEvent(kind or "message", "\n".join(data), self._id) if data else None
