"""Operations, as users see them."""

from __future__ import annotations

from rubato.resources import Operation
from service.database.engine import Database
from service.operations import lifecycle, repository
from service.problems import not_found


class OperationService:
    """Looks up operations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, operation_id: str) -> Operation:
        """An operation by its id. Raises RubatoError (404)."""
        async with self._database.reading() as session:
            row = await repository.find(session, operation_id)
        if row is None:
            raise not_found("operation", operation_id, "use the id that scale or cancel returned")
        return lifecycle.view(row)
