"""The lock under which admission decides."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.database.tables import LockRow

_QUEUE = "queue"


async def lock_queue(session: AsyncSession) -> None:
    """Until the transaction ends, no other control plane decides who is admitted. The row comes with the schema."""
    await session.execute(select(LockRow).where(LockRow.name == _QUEUE).with_for_update())
