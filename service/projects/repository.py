"""Queries over projects."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.database.tables import ProjectRow


async def find(session: AsyncSession, name: str) -> ProjectRow | None:
    """A project by its name; one that nobody set a quota for and that never ran a job has no row."""
    return await session.get(ProjectRow, name)


async def all_by_name(session: AsyncSession) -> dict[str, ProjectRow]:
    """All projects that have a row."""
    rows: Sequence[ProjectRow] = (await session.scalars(select(ProjectRow).order_by(ProjectRow.name))).all()
    return {row.name: row for row in rows}


async def for_change(session: AsyncSession, name: str) -> ProjectRow:
    """The row of a project, locked; made where there is none. Whoever calls holds the lock of the queue."""
    found = await session.get(ProjectRow, name, with_for_update=True, populate_existing=True)
    if found is None:
        found = ProjectRow(name=name, weight=1.0, usage=0.0)
        session.add(found)
        await session.flush()
    return found
