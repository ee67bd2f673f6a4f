"""The one way a job changes its state: by the table of transitions, with a reason, an event and a new interval."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import OperationState
from rubato.states import JobState, can_change
from service.database.tables import IntervalRow, JobRow
from service.events import repository as events
from service.jobs import repository
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries


@dataclass(frozen=True)
class Why:
    """The reason of a change."""

    code: str
    message: str
    actor: str
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)


async def change_state(session: AsyncSession, job: JobRow, new: JobState, why: Why) -> None:
    """Puts a locked job into another state.

    Raises:
        RuntimeError: the table of transitions has no such change; whoever calls must have looked.
    """
    old = JobState(job.state)
    if not can_change(old, new):
        raise RuntimeError(f"job {job.id} cannot go from {old} to {new}")
    for interval in (await repository.intervals(session, [job.id]))[job.id]:
        if interval.ended_at is None:
            interval.ended_at = max(why.at, interval.began_at)
    job.state = new
    give_reason(job, why)
    data = {"from": old, "to": new, "reason": why.code, **why.data}
    events.add(session, job.id, why.at, f"job.{new.lower()}", why.message, why.actor, data)
    if new is JobState.STARTING and job.started_at is None:
        job.started_at = why.at
    if new.terminal:
        job.finished_at = why.at
        await _end_operations(session, job, new, why)
    else:
        open_interval(session, job, why.at)


def open_interval(session: AsyncSession, job: JobRow, at: datetime) -> None:
    """Begins to count the time in the state a job is in."""
    session.add(
        IntervalRow(
            job_id=job.id,
            state=job.state,
            reason_code=job.reason_code,
            began_at=at,
            ended_at=None,
            step_s=0.0,
            redone_s=0.0,
            checkpoint_s=0.0,
        )
    )


def give_reason(job: JobRow, why: Why) -> None:
    """Says why a job is in its state."""
    job.reason_code = why.code
    job.reason_message = why.message
    job.reason_actor = why.actor
    job.reason_at = why.at
    touch(job)


def touch(job: JobRow) -> None:
    """Tells whoever waits for changes of a job that there is one."""
    job.revision += 1


def want(job: JobRow) -> None:
    """Gives what is wanted of the attempt a new version, so that its driver hears of it."""
    job.wanted_version += 1
    touch(job)


async def _end_operations(session: AsyncSession, job: JobRow, new: JobState, why: Why) -> None:
    for operation in await operation_queries.unfinished(session, job.id):
        if operation.kind == "cancel" and new is JobState.CANCELLED:
            operations.end(operation, OperationState.DONE, None, why.at)
        elif operation.kind == "cancel":
            operations.end(operation, OperationState.DONE, f"the job was over first: {new}", why.at)
        else:
            what = "the size was reached" if operation.kind == "scale" else "it was done"
            message = f"the job was over before {what}: {new}"
            operations.end(operation, OperationState.FAILED, message, why.at)
