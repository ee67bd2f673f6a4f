"""Projects as the REST API takes and shows them: what their jobs may have at one time, and what they have."""

from __future__ import annotations

from pydantic import Field

from rubato.resources import Request, Resource
from rubato.spec.section import NonNegativeInt


class ProjectRequest(Request):
    """What a project may have at one time; null: no limit."""

    weight: float = Field(1.0, gt=0, le=1e6, description="a project of twice the weight has a right to twice as much")
    workers: NonNegativeInt | None = Field(None, description="workers of all its jobs")
    gpus: NonNegativeInt | None = Field(None, description="GPUs of all its jobs")
    running_jobs: NonNegativeInt | None = Field(None, description="jobs that have workers")


class ProjectView(Resource):
    """A project with its quotas, and what it has."""

    name: str
    weight: float
    workers: int | None = Field(description="the most workers; null: no limit")
    gpus: int | None = Field(description="the most GPUs; null: no limit")
    running_jobs: int | None = Field(description="the most jobs that have workers; null: no limit")
    usage: float = Field(description="GPUs (CPUs where it has none) it held of late, a moving average of some days")
    held_workers: int
    held_gpus: float
    held_jobs: int
