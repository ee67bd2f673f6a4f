"""GET and PUT /v1/projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path

from rubato.projects import ProjectRequest, ProjectView
from rubato.resources import Page
from rubato.spec.job import NAME_PATTERN
from service.dependencies import ProjectsDep
from service.problems import problems_doc

router = APIRouter(prefix="/v1/projects", tags=["projects"])

ProjectName = Annotated[str, Path(pattern=NAME_PATTERN, description="as jobs name it in `project`")]


@router.get("", summary="List projects")
async def list_projects(projects: ProjectsDep) -> Page[ProjectView]:
    """All projects that have quotas or jobs that hold workers, with what they hold."""
    return await projects.list_all()


@router.get("/{name}", summary="A project", responses=problems_doc(422))
async def get_project(name: ProjectName, projects: ProjectsDep) -> ProjectView:
    """A project nobody has set quotas for has no limits; a job brings it into being by naming it."""
    return await projects.get(name)


@router.put("/{name}", summary="Set the quotas of a project", responses=problems_doc(422))
async def put_project(
    name: ProjectName,
    request: Annotated[
        ProjectRequest, Body(openapi_examples={"quotas": {"value": {"workers": 16, "running_jobs": 4}}})
    ],
    projects: ProjectsDep,
) -> ProjectView:
    """Replaces all quotas: one that is left out is no limit. Jobs that run are not stopped by it."""
    return await projects.put(name, request)
