"""Looks after the service itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from rubato import __version__
from rubato.states import JobState
from service.attempts.service import AttemptService
from service.cluster.service import ClusterService
from service.database.engine import Database
from service.health.measures import Measures
from service.health.schemas import Health, Part, Readiness, Saturation, SupervisorPart
from service.jobs import repository as jobs
from service.supervisor.loop import Supervisor
from service.wakeups import Wakeups

_STUCK = 120.0  # seconds without a round of the supervisor, far above what a slow Ray can cause


class HealthService:
    """Answers whether the service works, and how much it has to do."""

    def __init__(
        self,
        database: Database,
        wakeups: Wakeups,
        cluster: ClusterService,
        attempts: AttemptService,
        supervisor: Supervisor,
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._cluster = cluster
        self._attempts = attempts
        self._supervisor = supervisor
        self._tasks: Sequence[asyncio.Task[None]] = ()

    def watch(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Tasks that must not end while the service runs."""
        self._tasks = tasks

    def live(self) -> Health:
        """Whether the process should go on, rather than be started anew."""
        for task in self._tasks:
            if task.done() and not self._wakeups.closed:
                error = None if task.cancelled() else task.exception()
                return Health(status="failing", version=__version__, detail=f"a background task ended: {error!r}")
        idle = time.monotonic() - self._supervisor.last_round
        if self._tasks and idle > _STUCK:
            return Health(status="failing", version=__version__, detail=f"no round of the supervisor for {idle:.0f} s")
        return Health(status="ok", version=__version__, detail="serving")

    async def ready(self) -> Readiness:
        """Whether everything is there that the service needs."""
        database, queued = await self._look_at_database()
        began = time.perf_counter()
        sight = await self._cluster.look()
        seconds = time.perf_counter() - began
        ray = Part(status="failing" if sight is None else "ok", detail=self._cluster.detail, seconds=seconds)
        supervisor = self._look_at_supervisor()
        return Readiness(
            status="ok" if database.status == ray.status == supervisor.status == "ok" else "failing",
            database=database,
            ray=ray,
            supervisor=supervisor,
            saturation=self.saturation(queued),
        )

    def saturation(self, queued: int) -> Saturation:
        """How much waits here, with the number of jobs in the queue."""
        return Saturation(
            drivers_waiting=self._attempts.held,
            requests_waiting=self._wakeups.waiting,
            round_seconds=self._supervisor.round_seconds,
            seconds_since_round=time.monotonic() - self._supervisor.last_round,
            jobs_queued=queued,
        )

    async def exposition(self, measures: Measures) -> bytes:
        """All metrics as Prometheus reads them, with jobs as they are now."""
        async with self._database.reading() as session:
            counts = await jobs.count_by_state(session)
            unfinished = await jobs.unfinished(session)
            newest = await jobs.newest_metrics(session, [job.id for job in unfinished])
        saturation = self.saturation(counts.get(JobState.QUEUED, 0))
        records = {job_id: row.record for job_id, row in newest.items()}
        return measures.exposition(counts, unfinished, records, saturation, self._cluster.sight is not None)

    def _look_at_supervisor(self) -> SupervisorPart:
        live, failure = self.live(), self._supervisor.failure
        if live.status == "ok" and failure is not None:
            return SupervisorPart(status="failing", detail=f"its last round failed: {failure}")
        return SupervisorPart(status=live.status, detail=live.detail)

    async def _look_at_database(self) -> tuple[Part, int]:
        began = time.perf_counter()
        try:
            async with self._database.reading() as session:
                counts = await jobs.count_by_state(session)
        except SQLAlchemyError as error:
            return Part(status="failing", detail=str(error), seconds=time.perf_counter() - began), 0
        backend = self._database.url.get_backend_name()
        part = Part(status="ok", detail=backend, seconds=time.perf_counter() - began)
        return part, counts.get(JobState.QUEUED, 0)
