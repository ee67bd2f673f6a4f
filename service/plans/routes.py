"""POST /v1/plans."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body

from rubato.plans import Plan, PlanRequest
from service.dependencies import PlansDep
from service.jobs.schemas import SPEC_EXAMPLE
from service.problems import problems_doc

router = APIRouter(prefix="/v1/plans", tags=["plans"])

_EXAMPLE = {"spec": {key: value for key, value in SPEC_EXAMPLE.items() if key != "parallelism"}, "cluster": "cpu:8"}


@router.post("", summary="Plan a job without submitting it", responses=problems_doc(422, 503))
async def plan_job(
    request: Annotated[PlanRequest, Body(openapi_examples={"tiny": {"summary": "a small model", "value": _EXAMPLE}})],
    plans: PlansDep,
) -> Plan:
    """Memory, speed and time of a spec at some of its sizes, on this cluster or a named one; nothing is started.

    A spec without `parallelism` gets the layout that serves all its sizes best, the same that submitting it would.
    """
    return await plans.plan(request)
