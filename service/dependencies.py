"""What routes are given: the parts of the control plane, by their types."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from service.attempts.service import AttemptService
from service.cluster.service import ClusterService
from service.events.service import EventService
from service.jobs.files import JobFiles
from service.jobs.service import JobService
from service.operations.service import OperationService
from service.plane import ControlPlane
from service.plans.service import PlanService
from service.projects.service import ProjectService
from service.wakeups import Wakeups


def _plane(request: Request) -> ControlPlane:
    plane: ControlPlane = request.app.state.plane
    return plane


PlaneDep = Annotated[ControlPlane, Depends(_plane)]


def _jobs(plane: PlaneDep) -> JobService:
    return plane.jobs


def _files(plane: PlaneDep) -> JobFiles:
    return plane.files


def _events(plane: PlaneDep) -> EventService:
    return plane.events


def _operations(plane: PlaneDep) -> OperationService:
    return plane.operations


def _projects(plane: PlaneDep) -> ProjectService:
    return plane.projects


def _attempts(plane: PlaneDep) -> AttemptService:
    return plane.attempts


def _cluster(plane: PlaneDep) -> ClusterService:
    return plane.cluster


def _plans(plane: PlaneDep) -> PlanService:
    return plane.plans


def _wakeups(plane: PlaneDep) -> Wakeups:
    return plane.wakeups


JobsDep = Annotated[JobService, Depends(_jobs)]
FilesDep = Annotated[JobFiles, Depends(_files)]
EventsDep = Annotated[EventService, Depends(_events)]
OperationsDep = Annotated[OperationService, Depends(_operations)]
ProjectsDep = Annotated[ProjectService, Depends(_projects)]
AttemptsDep = Annotated[AttemptService, Depends(_attempts)]
ClusterDep = Annotated[ClusterService, Depends(_cluster)]
PlansDep = Annotated[PlanService, Depends(_plans)]
WakeupsDep = Annotated[Wakeups, Depends(_wakeups)]

Limit = Annotated[int, Query(ge=1, le=10_000, description="the most items to return")]
