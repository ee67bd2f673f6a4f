"""GET and PUT /v1/calibrations: what was measured of this cluster's workers."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from rubato.plans import Calibration
from rubato.resources import Page
from service.dependencies import PlansDep
from service.problems import problems_doc

router = APIRouter(prefix="/v1/calibrations", tags=["plans"])


@router.get("", summary="What was measured of the workers", responses=problems_doc(503))
async def list_calibrations(plans: PlansDep) -> Page[Calibration]:
    """One measurement a kind of device. Plans rest on it where there is one, and on a catalogue elsewhere."""
    found = await asyncio.to_thread(plans.calibrations)
    return Page[Calibration](items=list(found.values()), next=None)


@router.put("", summary="Plan with a measurement", responses=problems_doc(422, 503))
async def put_calibration(measured: Calibration, plans: PlansDep) -> Calibration:
    """Replaces what was known of the same kind of device. `rubato calibrate` measures and sends this."""
    await asyncio.to_thread(plans.calibrate, measured)
    return measured
