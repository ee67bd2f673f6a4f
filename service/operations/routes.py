"""GET /v1/operations/{id}."""

from __future__ import annotations

from fastapi import APIRouter

from rubato.resources import Operation
from service.dependencies import OperationsDep
from service.problems import problems_doc

router = APIRouter(prefix="/v1/operations", tags=["operations"])


@router.get("/{operation_id}", summary="An operation with its phases", responses=problems_doc(404))
async def get_operation(operation_id: str, operations: OperationsDep) -> Operation:
    """How far a scale or a cancel has come. It is over when `state` is DONE or FAILED."""
    return await operations.get(operation_id)
