"""POST /v1/attempts/{id}/sync: for drivers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from rubato.resources import SyncReply, SyncRequest
from service.dependencies import AttemptsDep
from service.problems import problems_doc

router = APIRouter(prefix="/v1/attempts", tags=["drivers"])

_bearer = HTTPBearer(auto_error=False, description="the token in the driver's RUBATO_ATTEMPT_TOKEN")


@router.post("/{attempt}/sync", summary="Report, and hear what is wanted", responses=problems_doc(401, 404, 409, 422))
async def sync(
    attempt: str,
    request: SyncRequest,
    attempts: AttemptsDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> SyncReply:
    """A driver's heartbeat. Held until what is wanted has a higher version than `seen_version`, or for `wait_s`.

    409 with code `fenced`: a newer attempt runs the job; stop without writing anything.
    """
    token = None if credentials is None else credentials.credentials
    return await attempts.sync(attempt, token, request)
