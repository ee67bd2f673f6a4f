"""What the health routes say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rubato.resources import Resource


class Health(Resource):
    """Whether the process itself works."""

    status: Literal["ok", "failing"]
    version: str
    detail: str


class Part(Resource):
    """Something the control plane depends on."""

    status: Literal["ok", "failing"]
    detail: str
    seconds: float = Field(description="how long it took to answer, or to fail")


class Saturation(Resource):
    """How close the control plane is to its limits."""

    drivers_waiting: int = Field(description="drivers whose sync call is held here")
    requests_waiting: int = Field(description="calls and streams that wait for a change of a job")
    round_seconds: float = Field(description="how long the supervisor's last round took")
    seconds_since_round: float
    jobs_queued: int


class SupervisorPart(Resource):
    """The loop that starts, watches and ends attempts."""

    status: Literal["ok", "failing"]
    detail: str


class Readiness(Resource):
    """Whether the control plane can do its work: `ok` when it sees database and cluster, and looks after jobs."""

    status: Literal["ok", "failing"]
    database: Part
    ray: Part
    supervisor: SupervisorPart
    saturation: Saturation
