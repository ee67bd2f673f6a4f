"""How the size that is wanted of a job changes, whoever wants it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import Actor, OperationState
from rubato.states import JobState
from service.database.tables import JobRow, OperationRow
from service.events import repository as events
from service.jobs.lifecycle import want
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries

HAS_ATTEMPT = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.RECOVERING})


async def scale(
    session: AsyncSession,
    job: JobRow,
    workers: int,
    now: datetime,
    actor: Actor = "user",
    kind: str = "scale.accepted",
    why: str | None = None,
    request: dict[str, Any] | None = None,
) -> OperationRow:
    """Gives a locked job another size: an operation that its driver carries out, or nothing but a note if it has none.

    Args:
        kind: of the event in the job's timeline.
        why: what the event says; left out: from which size to which.
        request: what the user asked for, where that was not just the size.
    """
    request = request or {"workers": workers}
    unfinished = [each for each in await operation_queries.unfinished(session, job.id) if each.kind == "scale"]
    same = next((each for each in unfinished if each.request == request and job.wanted_workers == workers), None)
    if same is not None:
        return same
    operation = operations.begin(session, job, "scale", request, now)
    for earlier in unfinished:
        operations.end(earlier, OperationState.FAILED, f"replaced by {operation.id}", now)
    if job.state not in HAS_ATTEMPT:
        operations.end(operation, OperationState.DONE, "the job will start at this size", now)
    elif job.wanted_workers == workers and not unfinished:
        operations.end(operation, OperationState.DONE, "the job has this size already", now)
    if job.wanted_workers != workers:
        data = {"operation": operation.id, "from": job.wanted_workers, "to": workers}
        events.add(session, job.id, now, kind, why or f"{job.wanted_workers} -> {workers} workers", actor, data)
        job.sized_at = now
    job.wanted_workers = workers
    job.wanted_operation = operation.id if operation.finished_at is None else None
    want(job)
    return operation
