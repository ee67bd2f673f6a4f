"""Queries over events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.database.tables import EventRow


def add(
    session: AsyncSession, job_id: str, at: datetime, kind: str, message: str, actor: str, data: dict[str, Any]
) -> None:
    """Appends to the timeline of a job whose row is locked, so that ids ascend in the order of commits."""
    session.add(EventRow(job_id=job_id, at=at, kind=kind, message=message, actor=actor, data=data))


async def page(session: AsyncSession, job_id: str, after: int, limit: int) -> Sequence[EventRow]:
    """Up to ``limit`` events of a job with an id above ``after``, ascending."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > after).order_by(EventRow.id).limit(limit)
    return (await session.scalars(query)).all()


async def has_kind(session: AsyncSession, job_id: str, kind: str) -> bool:
    """Whether the timeline of a job has an event of a kind."""
    query = select(EventRow.id).where(EventRow.job_id == job_id, EventRow.kind == kind).limit(1)
    return (await session.scalars(query)).first() is not None
