"""What users do with projects: look at them, and set their quotas."""

from __future__ import annotations

from rubato.projects import ProjectRequest, ProjectView
from rubato.resources import Page
from service.database.engine import Database
from service.database.tables import ProjectRow
from service.projects import repository
from service.queue import rows
from service.queue.repository import lock_queue
from service.queue.terms import Held
from service.wakeups import Wakeups


class ProjectService:
    """Quotas. A project begins to exist when a job names it, without a limit on anything."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups

    async def list_all(self) -> Page[ProjectView]:
        """All projects that have quotas or jobs, by name."""
        async with self._database.reading() as session:
            known = await repository.all_by_name(session)
            held = await rows.held_by_project(session)
        names = sorted({*known, *held})
        return Page[ProjectView](items=[_view(name, known.get(name), held.get(name)) for name in names], next=None)

    async def get(self, name: str) -> ProjectView:
        """One project; without jobs and quotas it holds nothing and has no limit."""
        async with self._database.reading() as session:
            found = await repository.find(session, name)
            held = await rows.held_by_project(session)
        return _view(name, found, held.get(name))

    async def put(self, name: str, request: ProjectRequest) -> ProjectView:
        """Sets all quotas of a project. Jobs that run go on; where they share, they are shrunk for those to come."""
        async with self._database.writing() as session:
            await lock_queue(session)
            row = await repository.for_change(session, name)
            row.weight = request.weight
            row.max_workers, row.max_gpus = request.workers, request.gpus
            row.max_running_jobs = request.running_jobs
            held = await rows.held_by_project(session)
        self._wakeups.supervisor.set()
        return _view(name, row, held.get(name))


def _view(name: str, row: ProjectRow | None, held: Held | None) -> ProjectView:
    held = held or Held()
    return ProjectView(
        name=name,
        weight=1.0 if row is None else row.weight,
        workers=None if row is None else row.max_workers,
        gpus=None if row is None else row.max_gpus,
        running_jobs=None if row is None else row.max_running_jobs,
        usage=0.0 if row is None else round(row.usage, 3),
        held_workers=held.workers,
        held_gpus=held.gpus,
        held_jobs=held.jobs,
    )
