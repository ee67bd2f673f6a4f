"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.dependencies import PlaneDep
from service.health import measures
from service.health.schemas import Health, Readiness

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Does the process work", responses={503: {"model": Health}})
async def healthz(plane: PlaneDep, response: Response) -> Health:
    """200 as long as the process should go on; 503 when it should be started anew. Looks at nothing outside it."""
    health = plane.health.live()
    response.status_code = 200 if health.status == "ok" else 503
    return health


@router.get("/readyz", summary="Can the service do its work", responses={503: {"model": Readiness}})
async def readyz(plane: PlaneDep, response: Response) -> Readiness:
    """200 when database and Ray cluster are seen. While Ray is away, all but starting and ending jobs still works."""
    readiness = await plane.health.ready()
    response.status_code = 200 if readiness.status == "ok" else 503
    return readiness


@router.get("/metrics", summary="For Prometheus", response_class=Response)
async def metrics(plane: PlaneDep, request: Request) -> Response:
    """Requests, jobs by state, progress of the jobs that are not over, and saturation."""
    found: measures.Measures = request.app.state.measures
    return Response(await plane.health.exposition(found), media_type=measures.CONTENT_TYPE)
