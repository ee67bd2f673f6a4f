"""What the control plane needs of a Ray cluster, as an interface; ``ray_http.py`` is the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from rubato.resources import NodeView


class RayUnreachable(Exception):  # noqa: N818 (not an error of anybody's: it says what could not be seen)
    """Ray did not answer. Nothing follows from it about any job."""


class RayRefused(Exception):  # noqa: N818
    """Ray answered that it will not do what was asked; the message says why."""


@dataclass(frozen=True)
class Sight:
    """What was seen of a cluster at one moment.

    ``session`` names this life of the cluster: another one means that all its processes are gone.
    """

    session: str
    version: str
    nodes: Sequence[NodeView]


class RayJobState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def over(self) -> bool:
        """Whether Ray holds the job for ended."""
        return self in (RayJobState.SUCCEEDED, RayJobState.FAILED, RayJobState.STOPPED)


@dataclass(frozen=True)
class RayJob:
    """A submitted job as Ray's Jobs API shows it."""

    state: RayJobState
    message: str
    ended_at: datetime | None


class Ray(Protocol):
    """A Ray cluster. Every method raises RayUnreachable when it does not answer in time."""

    async def look(self) -> Sight:
        """The cluster as it is now."""
        ...

    async def submit(self, submission_id: str, entrypoint: str, environment: Mapping[str, str]) -> None:
        """Starts a job. A submission id that Ray has seen before is not started again.

        Raises:
            RayRefused: Ray will not take it, now or later.
            RayUnreachable: Ray could not take it now; ``job`` says whether it has.
        """
        ...

    async def job(self, submission_id: str) -> RayJob | None:
        """A submitted job; None when Ray knows of none by this id."""
        ...

    async def stop(self, submission_id: str) -> None:
        """Asks a job to end: SIGTERM, some seconds later SIGKILL. One that is over or unknown is left as it is."""
        ...

    async def close(self) -> None:
        """Gives back connections."""
        ...
