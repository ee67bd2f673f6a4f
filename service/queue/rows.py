"""From rows of the database to what the policy is told, and back to no further than its terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import NodeView
from rubato.spec import JobSpec
from rubato.states import JobState
from service.attempts import repository as attempts
from service.database.tables import JobRow, ProjectRow
from service.jobs import repository as jobs
from service.jobs.stored import NONSENSE, UnreadableJobError, spec_of
from service.queue.rooms import Cluster, Need, Node, Room
from service.queue.terms import Held, Job, Project, Quota

# How long a job that lost its workers waits for all its places before it takes fewer: Ray shows the places of the dead
# as taken for some seconds more.
PATIENCE = timedelta(seconds=20)
# A resize that has gone on for so long is not waited for any more when others need the room.
STUCK = timedelta(minutes=5)

WAITS = frozenset({JobState.QUEUED, JobState.RECOVERING})


@dataclass(frozen=True)
class Shape:
    """What the queue needs of a spec."""

    need: Need
    sizes: Sequence[int]
    steps: int

    @classmethod
    def of(cls, spec: JobSpec, wanted: int) -> Shape:
        """``wanted``: a spec that was stored may have no size by the rules of today."""
        return cls(Need(spec.workers.cpus, spec.workers.gpus), spec.sizes or [wanted], spec.train.steps)


class Reader:
    """Makes the policy's jobs out of rows. It keeps what specs come to, which takes long, between rounds."""

    def __init__(self, elastic: bool) -> None:
        self._elastic = elastic
        self._shapes: dict[str, tuple[dict[str, Any], Shape]] = {}

    def forget_all_but(self, job_ids: Iterable[str]) -> None:
        """Jobs that are over need no shape."""
        kept = set(job_ids)
        self._shapes = {job_id: known for job_id, known in self._shapes.items() if job_id in kept}

    def waiting(self, row: JobRow, now: datetime) -> Job:
        """A job without workers. Raises UnreadableJobError."""
        shape, lost_at = self._shape(row), row.lost_at
        recovering = row.state == JobState.RECOVERING
        since = lost_at if recovering and lost_at is not None else row.created_at
        return Job(
            id=row.id,
            number=row.number,
            need=shape.need,
            # What was lost is taken up at any size; that its user wants another comes when there is room again.
            sizes=shape.sizes if recovering or not self._elastic else _between(row, shape.sizes),
            wanted=row.wanted_workers,
            project=row.project,
            priority=row.priority,
            since=since.timestamp(),
            recovering=recovering,
            takes_less=recovering and lost_at is not None and now - lost_at >= PATIENCE,
            work=_work(row, shape, row.wanted_workers)[0],
        )

    def running(self, row: JobRow, now: datetime) -> Job:
        """A job that has workers, or is about to. Raises UnreadableJobError."""
        shape = self._shape(row)
        try:
            # Counted without making resources of them: there may be thousands, and this is done every second.
            seen = sum(member["state"] == "training" for member in row.members)
        except NONSENSE as error:
            raise UnreadableJobError(row.id, error) from error
        changed_at = row.sized_at or row.started_at or row.created_at
        stuck = row.state == JobState.RESIZING and now - changed_at > STUCK
        left, done = _work(row, shape, seen)
        return Job(
            id=row.id,
            number=row.number,
            need=shape.need,
            sizes=_between(row, shape.sizes),
            wanted=row.wanted_workers,
            project=row.project,
            priority=row.priority,
            workers=row.wanted_workers,
            seen=seen,
            since=(row.started_at or row.created_at).timestamp(),
            changed_at=changed_at.timestamp(),
            settled=(row.state == JobState.RUNNING and seen == row.wanted_workers) or stuck,
            work=left,
            done=done,
        )

    def _shape(self, row: JobRow) -> Shape:
        known = self._shapes.get(row.id)
        if known is None or known[0] != row.spec:
            known = (row.spec, Shape.of(spec_of(row), row.wanted_workers))
            self._shapes[row.id] = known
        return known[1]


def _between(row: JobRow, sizes: Sequence[int]) -> Sequence[int]:
    """The sizes its user lets the queue choose from."""
    low, high = row.size_min or 1, row.size_max or sizes[-1]
    return [size for size in sizes if low <= size <= high] or [row.wanted_workers]


def _work(row: JobRow, shape: Shape, workers: int) -> tuple[float | None, float]:
    """Seconds of one worker that are left and that are done, by declared steps and measured time of a step."""
    if row.step_s is None or not workers:
        return None, 0.0
    of_one = row.step_s * workers**Job.exponent
    return max(0, shape.steps - row.step) * of_one, row.step * of_one


def cluster_of(nodes: Iterable[NodeView]) -> Cluster:
    """The living nodes."""
    return Cluster.of(
        Node(Room(node.cpus, node.gpus), Room(node.cpus_free, node.gpus_free)) for node in nodes if node.alive
    )


def project_of(row: ProjectRow) -> Project:
    """A project in the policy's terms."""
    quota = Quota(workers=row.max_workers, gpus=row.max_gpus, running_jobs=row.max_running_jobs)
    return Project(usage=row.usage, weight=row.weight, quota=quota)


def held_by(running: Iterable[Job]) -> dict[str, Held]:
    """What the jobs of each project hold."""
    found: dict[str, Held] = {}
    for job in running:
        found.setdefault(job.project, Held()).add(job.need, job.held, 1)
    return found


async def held_by_project(session: AsyncSession) -> dict[str, Held]:
    """The same, of what the database has now; jobs that cannot be read are left out."""
    held = {attempt.job_id for attempt in await attempts.open_attempts(session)}
    reader, running = Reader(elastic=False), []
    for row in await jobs.unfinished(session):
        if row.id in held:
            try:
                running.append(reader.running(row, row.created_at))
            except UnreadableJobError:
                continue  # it is shown as unreadable where jobs are listed
    return held_by(running)
