"""Queries over attempts."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.database.tables import AttemptRow


class AttemptState(StrEnum):
    """OPEN: its processes may be alive. LOST: given up, and fenced off should it return. ENDED: seen to be over."""

    OPEN = "OPEN"
    LOST = "LOST"
    ENDED = "ENDED"


async def find(session: AsyncSession, attempt_id: str) -> AttemptRow | None:
    """An attempt by its id."""
    return await session.get(AttemptRow, attempt_id)


async def locked(session: AsyncSession, attempt_id: str) -> AttemptRow | None:
    """The same, with the row locked until the transaction ends."""
    return await session.get(AttemptRow, attempt_id, with_for_update=True, populate_existing=True)


async def open_attempts(session: AsyncSession) -> Sequence[AttemptRow]:
    """The attempts whose processes may be alive."""
    query = select(AttemptRow).where(AttemptRow.state == AttemptState.OPEN).order_by(AttemptRow.created_at)
    return (await session.scalars(query)).all()


async def open_of(session: AsyncSession, job_id: str) -> AttemptRow | None:
    """The attempt of a job whose processes may be alive; there is at most one."""
    query = select(AttemptRow).where(AttemptRow.job_id == job_id, AttemptRow.state == AttemptState.OPEN)
    return (await session.scalars(query)).one_or_none()
