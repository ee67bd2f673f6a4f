"""How an operation begins, passes through its phases and ends."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import Operation, OperationState, Phase
from service.database.tables import JobRow, OperationRow


def begin(session: AsyncSession, job: JobRow, kind: str, request: dict[str, Any], at: datetime) -> OperationRow:
    """A new operation in its phase "accepted"."""
    operation = OperationRow(
        id=f"op-{secrets.token_hex(6)}",
        job_id=job.id,
        kind=kind,
        request=request,
        state=OperationState.RUNNING,
        message=None,
        phases=[{"name": "accepted", "at": at.isoformat()}],
        created_at=at,
        finished_at=None,
    )
    session.add(operation)
    return operation


def enter_phase(operation: OperationRow, name: str, at: datetime) -> None:
    """The next phase begins; the one before ends. Phases of an operation that is over are not added to."""
    if operation.finished_at is None and operation.phases[-1]["name"] != name:
        operation.phases = [*operation.phases, {"name": name, "at": at.isoformat()}]


def end(operation: OperationRow, state: OperationState, message: str | None, at: datetime) -> None:
    """The operation is over, once and for all."""
    if operation.finished_at is not None:
        return
    if state is OperationState.DONE:
        enter_phase(operation, "done", at)
    operation.state = state
    operation.message = message
    operation.finished_at = at


def view(operation: OperationRow) -> Operation:
    """An operation as the API shows it: each phase lasts until the next begins."""
    began = [datetime.fromisoformat(phase["at"]) for phase in operation.phases]
    ends: list[datetime | None] = [*began[1:], operation.finished_at]
    return Operation(
        id=operation.id,
        job_id=operation.job_id,
        kind=operation.kind,
        request=operation.request,
        state=OperationState(operation.state),
        message=operation.message,
        phases=[
            Phase(name=phase["name"], at=at, seconds=None if end is None else max(0.0, (end - at).total_seconds()))
            for phase, at, end in zip(operation.phases, began, ends, strict=True)
        ],
        created_at=operation.created_at,
        finished_at=operation.finished_at,
    )
