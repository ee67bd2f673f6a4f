"""Queries over jobs, their attempts, metrics and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.states import JobState
from service.database.tables import IntervalRow, JobRow, MetricRow

TERMINAL = tuple(state for state in JobState if state.terminal)


@dataclass(frozen=True)
class JobFilter:
    """Which jobs a list holds; an empty field does not restrict it."""

    states: Sequence[JobState] = field(default=())
    project: str | None = None
    name: str | None = None


async def find(session: AsyncSession, job_id: str) -> JobRow | None:
    """A job by its id."""
    return (await session.scalars(select(JobRow).where(JobRow.id == job_id))).one_or_none()


async def locked(session: AsyncSession, job_id: str) -> JobRow | None:
    """The same, with the row locked until the transaction ends. Needed before anything of the job is written."""
    query = select(JobRow).where(JobRow.id == job_id).with_for_update().execution_options(populate_existing=True)
    return (await session.scalars(query)).one_or_none()


async def named(session: AsyncSession, name: str) -> Sequence[JobRow]:
    """All jobs of a name, oldest first."""
    return (await session.scalars(select(JobRow).where(JobRow.name == name).order_by(JobRow.number))).all()


async def of_idempotency_key(session: AsyncSession, key: str) -> JobRow | None:
    """The job that was submitted with a key."""
    return (await session.scalars(select(JobRow).where(JobRow.idempotency_key == key))).one_or_none()


async def page(session: AsyncSession, wanted: JobFilter, before: int | None, limit: int) -> Sequence[JobRow]:
    """Up to ``limit`` jobs, newest first, with a number below ``before``."""
    query = select(JobRow).order_by(JobRow.number.desc()).limit(limit)
    if wanted.states:
        query = query.where(JobRow.state.in_(wanted.states))
    if wanted.project is not None:
        query = query.where(JobRow.project == wanted.project)
    if wanted.name is not None:
        query = query.where(JobRow.name == wanted.name)
    if before is not None:
        query = query.where(JobRow.number < before)
    return (await session.scalars(query)).all()


async def unfinished(session: AsyncSession) -> Sequence[JobRow]:
    """All jobs that are not over, oldest first."""
    query = select(JobRow).where(JobRow.state.not_in(TERMINAL)).order_by(JobRow.number)
    return (await session.scalars(query)).all()


async def count_by_state(session: AsyncSession) -> dict[str, int]:
    """How many jobs are in each state that has any."""
    query = select(JobRow.state, func.count()).group_by(JobRow.state)
    return {row[0]: row[1] for row in await session.execute(query)}


async def revisions(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, int]:
    """The revision of each job."""
    query = select(JobRow.id, JobRow.revision).where(JobRow.id.in_(job_ids))
    return {row[0]: row[1] for row in await session.execute(query)}


async def intervals(session: AsyncSession, job_ids: Iterable[str]) -> dict[str, list[IntervalRow]]:
    """The stretches of time each job spent in a state, oldest first."""
    found: dict[str, list[IntervalRow]] = {job_id: [] for job_id in job_ids}
    query = select(IntervalRow).where(IntervalRow.job_id.in_(found)).order_by(IntervalRow.id)
    for row in await session.scalars(query):
        found[row.job_id].append(row)
    return found


async def intervals_since(session: AsyncSession, job_id: str, moment: datetime) -> Sequence[IntervalRow]:
    """The stretches of time of a job that last or ended after a moment, oldest first."""
    query = (
        select(IntervalRow)
        .where(
            IntervalRow.job_id == job_id,
            IntervalRow.ended_at.is_(None) | (IntervalRow.ended_at > moment),
        )
        .order_by(IntervalRow.id)
    )
    return (await session.scalars(query)).all()


async def metrics_page(session: AsyncSession, job_id: str, after: int, limit: int) -> Sequence[MetricRow]:
    """Up to ``limit`` metrics of a job of steps above ``after``, ascending."""
    query = (
        select(MetricRow).where(MetricRow.job_id == job_id, MetricRow.step > after).order_by(MetricRow.step)
    ).limit(limit)
    return (await session.scalars(query)).all()


async def newest_metrics(session: AsyncSession, job_ids: Iterable[str]) -> dict[str, MetricRow]:
    """What the newest step of each job reported, by job."""
    query = (
        select(MetricRow)
        .join(JobRow, (JobRow.id == MetricRow.job_id) & (JobRow.step == MetricRow.step))
        .where(MetricRow.job_id.in_(set(job_ids)))
    )
    return {row.job_id: row for row in await session.scalars(query)}


async def metrics_of(session: AsyncSession, job_id: str, steps: Iterable[int]) -> dict[int, MetricRow]:
    """The metrics of some steps of a job, by step."""
    query = select(MetricRow).where(MetricRow.job_id == job_id, MetricRow.step.in_(set(steps)))
    return {row.step: row for row in await session.scalars(query)}
