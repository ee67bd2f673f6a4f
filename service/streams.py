"""Server-sent events: a list that goes on. The id of an event is the cursor to begin again from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Header, Request
from fastapi.responses import StreamingResponse

from service.cursors import number
from service.wakeups import Wakeups

MEDIA_TYPE = "text/event-stream"
_ALIVE_EVERY = 15.0  # seconds; shorter than the idle limit of common proxies

LastEventId = Annotated[
    str | None, Header(description="the last id seen, sent by browsers when they reconnect; wins over `after`")
]


Cursor = TypeVar("Cursor")  # its text is the id of an event


@dataclass(frozen=True)
class Chunk(Generic[Cursor]):
    """What there is after a cursor: (cursor, one line) pairs, whether more is there already, and whether no more
    will come."""

    items: Sequence[tuple[Cursor, str]]
    more: bool
    over: bool


Load = Callable[[Cursor], Awaitable[Chunk[Cursor]]]


def wanted(request: Request) -> bool:
    """Whether a request asks for a stream."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def start_of(after: int, last_event_id: str | None) -> int:
    """The cursor to begin from."""
    known = None if last_event_id is None else number(last_event_id)
    return after if known is None else known


def response(
    wakeups: Wakeups, job_id: str, cursor: Cursor, load: Load[Cursor], every: float = _ALIVE_EVERY
) -> StreamingResponse:
    """Follows ``load`` from a cursor on: unnamed events, which browsers call messages, then one called ``end``.

    Args:
        every: seconds after which to look again though the job did not change, for what tells nobody of its changes.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_follow(wakeups, job_id, cursor, load, every), media_type=MEDIA_TYPE, headers=headers)


async def _follow(
    wakeups: Wakeups, job_id: str, cursor: Cursor, load: Load[Cursor], every: float
) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    with wakeups.watch(job_id) as waiter:
        while not wakeups.closed:
            chunk = await load(cursor)
            for cursor, item in chunk.items:
                yield f"id: {cursor}\ndata: {item}\n\n"
            if chunk.more:
                continue
            if chunk.over:
                yield f"id: {cursor}\nevent: end\ndata: {{}}\n\n"
                return
            if not await waiter.wait(every) and not wakeups.closed:
                yield ": nothing new\n\n"


def documented(what: str) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that streams when asked to."""
    text = (
        f"A page of {what}; with `Accept: text/event-stream` a stream of them that goes on until the job is over and "
        "closes with an event called `end`."
    )
    stream = {"schema": {"type": "string"}, "example": 'id: 7\ndata: {"id": 7, ...}\n\n'}
    return {200: {"description": text, "content": {MEDIA_TYPE: stream}}}
