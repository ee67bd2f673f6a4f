"""GET /v1/jobs/{id}/events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rubato.resources import Event, Page
from service import streams
from service.cursors import LARGEST
from service.dependencies import EventsDep, JobsDep, Limit, WakeupsDep
from service.problems import problems_doc

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job}/events",
    summary="What happened to a job",
    response_model=Page[Event],
    responses={**streams.documented("events"), **problems_doc(404, 409, 422)},
)
async def list_events(
    request: Request,
    job: str,
    events: EventsDep,
    jobs: JobsDep,
    wakeups: WakeupsDep,
    after: Annotated[int, Query(ge=0, le=LARGEST, description="only events with a higher id")] = 0,
    limit: Limit = 100,
    last_event_id: streams.LastEventId = None,
) -> Page[Event] | Response:
    """The timeline, oldest first.

    Follow it with `curl -N -H 'Accept: text/event-stream' URL/v1/jobs/JOB/events`.
    """
    if not streams.wanted(request):
        return await events.page(job, after, limit)
    found = await jobs.get(job)

    async def load(cursor: int) -> streams.Chunk[int]:
        # The state is read before the events: what is written with the last state is then never missed.
        over = (await jobs.get(found.id)).state.terminal
        page = await events.page(found.id, cursor, limit)
        items = [(event.id, event.model_dump_json()) for event in page.items]
        return streams.Chunk(items, more=page.next is not None, over=over)

    return streams.response(wakeups, found.id, streams.start_of(after, last_event_id), load)
