"""The timeline of a job, a page at a time."""

from __future__ import annotations

from rubato.resources import Event, Page
from service.database.engine import Database
from service.database.tables import EventRow
from service.events import repository
from service.jobs.service import JobService


class EventService:
    """Events, as users see them."""

    def __init__(self, database: Database, jobs: JobService) -> None:
        self._database = database
        self._jobs = jobs

    async def page(self, name_or_id: str, after: int, limit: int) -> Page[Event]:
        """Up to ``limit`` events with an id above ``after``. Raises RubatoError (404)."""
        async with self._database.reading() as session:
            job = await self._jobs.resolve(session, name_or_id)
            rows = await repository.page(session, job.id, after, limit + 1)
        items = [view(row) for row in rows[:limit]]
        return Page[Event](items=items, next=str(items[-1].id) if len(rows) > limit else None)


def view(row: EventRow) -> Event:
    """An event as the API shows it."""
    return Event.model_validate(
        {
            "id": row.id,
            "at": row.at,
            "kind": row.kind,
            "message": row.message,
            "actor": row.actor,
            "data": row.data,
        }
    )
