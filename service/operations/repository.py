"""Queries over operations."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import OperationState
from service.database.tables import OperationRow


async def find(session: AsyncSession, operation_id: str) -> OperationRow | None:
    """An operation by its id."""
    return await session.get(OperationRow, operation_id)


async def unfinished(session: AsyncSession, job_id: str) -> Sequence[OperationRow]:
    """The operations of a job that are not over, oldest first."""
    query = (
        select(OperationRow)
        .where(OperationRow.job_id == job_id, OperationRow.state == OperationState.RUNNING)
        .order_by(OperationRow.created_at, OperationRow.id)
    )
    return (await session.scalars(query)).all()
