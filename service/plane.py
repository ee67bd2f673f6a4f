"""The parts of the control plane, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from service.attempts.service import AttemptService
from service.clock import Clock, utc_now
from service.cluster.ray import Ray
from service.cluster.ray_http import HttpRay
from service.cluster.service import ClusterService
from service.database.engine import Database
from service.database.migrate import migrate
from service.events.service import EventService
from service.health.service import HealthService
from service.jobs import repository as jobs
from service.jobs.files import JobFiles
from service.jobs.service import JobService
from service.operations.service import OperationService
from service.plans.service import PlanService
from service.projects.service import ProjectService
from service.queue.admission import Admission
from service.settings import Settings
from service.supervisor.loop import Supervisor
from service.wakeups import Wakeups


@dataclass(frozen=True)
class ControlPlane:
    """Everything a request may need. Made once a process, by ``open_control_plane``."""

    settings: Settings
    started_at: datetime
    database: Database
    wakeups: Wakeups
    cluster: ClusterService
    jobs: JobService
    plans: PlanService
    files: JobFiles
    events: EventService
    operations: OperationService
    projects: ProjectService
    attempts: AttemptService
    supervisor: Supervisor
    health: HealthService

    @contextlib.asynccontextmanager
    async def supervising(self) -> AsyncIterator[None]:
        """Runs what goes on without requests: the supervisor, and the look-out for other control planes."""
        await self.jobs.sweep()
        tasks = [asyncio.create_task(self.supervisor.run()), asyncio.create_task(self.wakeups.run())]
        self.health.watch(tasks)
        try:
            yield
        finally:
            self.wakeups.close()
            for task in tasks:
                task.cancel()  # every step of theirs may be cut short and is taken up at the next start
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_control_plane(
    settings: Settings, ray: Ray | None = None, clock: Clock = utc_now
) -> AsyncIterator[ControlPlane]:
    """Opens the database, brings its schema up to date, and puts the parts together.

    Raises:
        RubatoError: the database cannot be opened.
    """
    database = Database(settings.database_url)
    ray = HttpRay(settings.ray_dashboard, settings.ray_timeout) if ray is None else ray
    try:
        await migrate(database)

        async def revisions(job_ids: Sequence[str]) -> dict[str, int]:
            async with database.reading() as session:
                return await jobs.revisions(session, job_ids)

        wakeups = Wakeups(revisions, settings.database_poll)
        cluster = ClusterService(settings, ray)
        plans = PlanService(settings, cluster)
        job_service = JobService(settings, database, wakeups, clock, plans)
        attempts = AttemptService(settings, database, wakeups, clock, plans)
        admission = Admission(settings, database, wakeups, clock)
        supervisor = Supervisor(settings, database, wakeups, ray, cluster, admission, clock)
        yield ControlPlane(
            settings=settings,
            started_at=clock(),
            database=database,
            wakeups=wakeups,
            cluster=cluster,
            jobs=job_service,
            plans=plans,
            files=JobFiles(database, job_service),
            events=EventService(database, job_service),
            operations=OperationService(database),
            projects=ProjectService(database, wakeups),
            attempts=attempts,
            supervisor=supervisor,
            health=HealthService(database, wakeups, cluster, attempts, supervisor),
        )
    finally:
        await ray.close()
        await database.close()
