"""Does what the policy of the queue decides about the jobs in the database: one control plane at a time."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import OperationState
from rubato.states import JobState
from service.attempts import repository as attempts
from service.attempts.repository import AttemptState
from service.clock import Clock
from service.cluster.ray import Sight
from service.database.engine import Database
from service.database.tables import AttemptRow, JobRow
from service.events import repository as events
from service.jobs import repository as jobs
from service.jobs.lifecycle import Why, change_state, give_reason, want
from service.jobs.scaling import scale
from service.jobs.stored import UnreadableJobError
from service.jobs.view import attempt_id
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries
from service.projects import repository as projects
from service.queue import repository
from service.queue.order import decayed
from service.queue.policy import decide
from service.queue.rows import WAITS, Reader, cluster_of, held_by, project_of
from service.queue.terms import Action, Decision, Job, Project, Rules, wait
from service.settings import Settings
from service.wakeups import Wakeups

log = structlog.get_logger(__name__)

# How often what projects hold is added to what they had; in between it is taken to be what it was.
_ACCOUNTED_EVERY = timedelta(seconds=60)


@dataclass
class Situation:
    """What the database says of jobs and projects at one moment."""

    rows: dict[str, JobRow] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    told: list[Job] = field(default_factory=list)
    unreadable: list[Decision] = field(default_factory=list)
    projects: dict[str, Project] = field(default_factory=dict)
    accounted_at: datetime | None = None  # when what projects have was added up last

    @property
    def running(self) -> list[Job]:
        return [job for job in self.told if job.held]


class Admission:
    """Starts what fits, and gives running jobs the sizes that the policy decides. An admitted job has an attempt row;
    the supervisor makes Ray run it. A new size is an operation, as if a user had asked for it."""

    def __init__(self, settings: Settings, database: Database, wakeups: Wakeups, clock: Clock) -> None:
        self._rules = Rules(elastic=settings.elastic)  # nothing pauses jobs: the control plane cannot do that yet
        self._half_life = settings.share_half_life
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._reader = Reader(settings.elastic)

    async def admit(self, sight: Sight | None, detail: str) -> list[str]:
        """Decides about all jobs, and does it. Returns those whose attempt was created.

        Args:
            sight: the cluster as it was seen just now; None: it could not be seen, and nobody is admitted or resized.
            detail: in words, what became of that look.
        """
        async with self._database.reading() as session:
            situation = await self._look(session)
        if not self._would_change(situation, self._decide(situation, sight, detail)):
            return []
        async with self._database.writing() as session:
            await repository.lock_queue(session)
            situation = await self._look(session)
            await self._account(session, situation)
            decided_from = {row.id: (row.wanted_workers, row.wanted_version) for row in situation.rows.values()}
            admitted, changed = [], []
            for decision in self._decide(situation, sight, detail):
                job = situation.rows[decision.job]
                await session.refresh(job, with_for_update=True)
                if (job.wanted_workers, job.wanted_version) != decided_from[job.id]:
                    continue  # scaled or cancelled since it was read: the next round decides anew
                if await self._apply(session, job, decision, sight):
                    changed.append(job.id)
                    admitted += [job.id] if decision.action is Action.START else []
        for job_id in changed:
            self._wakeups.notify(job_id)
        for job_id in admitted:
            log.info("job.admitted", job=job_id)
        return admitted

    async def _look(self, session: AsyncSession) -> Situation:
        now, found = self._clock(), Situation()
        held = {attempt.job_id for attempt in await attempts.open_attempts(session)}
        for row in await jobs.unfinished(session):
            has_workers = row.id in held
            if not has_workers and row.state not in WAITS:
                continue
            found.rows[row.id] = row
            if not has_workers:
                found.waiting.append(row.id)
                if row.not_before is not None and row.not_before > now:
                    continue
            try:
                job = self._reader.running(row, now) if has_workers else self._reader.waiting(row, now)
                found.told.append(job)
            except UnreadableJobError as error:
                if not has_workers:  # of one that runs its driver says what it does
                    found.unreadable.append(wait(row.id, error.code, error.detail))
        self._reader.forget_all_but(found.rows)
        rows = await projects.all_by_name(session)
        found.projects = {name: project_of(row) for name, row in rows.items()}
        accounted = [row.usage_at for row in rows.values() if row.usage_at is not None]
        found.accounted_at = min(accounted, default=None)
        return found

    def _decide(self, situation: Situation, sight: Sight | None, detail: str) -> list[Decision]:
        if sight is None:
            message = f"waits until the cluster can be seen: {detail}"
            return [wait(job_id, "cluster_unreachable", message) for job_id in situation.waiting]
        now = self._clock().timestamp()
        decisions = decide(situation.told, cluster_of(sight.nodes), now, self._rules, situation.projects)
        return [*situation.unreadable, *decisions]

    def _would_change(self, situation: Situation, decisions: Iterable[Decision]) -> bool:
        for decision in decisions:
            row = situation.rows[decision.job]
            if decision.action is not Action.WAIT or _says_new(row, decision):
                return True
        if not situation.running:
            return False
        held = {job.project for job in situation.running}
        accounted_at = situation.accounted_at if held <= set(situation.projects) else None
        return accounted_at is None or self._clock() - accounted_at >= _ACCOUNTED_EVERY

    async def _account(self, session: AsyncSession, situation: Situation) -> None:
        """Adds what projects hold now to what they had of late."""
        now, held = self._clock(), held_by(situation.running)
        for name in sorted({*situation.projects, *(job.project for job in situation.told)}):
            row = await projects.for_change(session, name)
            has = held[name].scarce if name in held else 0.0
            if row.usage_at is not None:
                row.usage = decayed(row.usage, has, (now - row.usage_at).total_seconds(), self._half_life)
            row.usage_at = now
            situation.projects[name] = project_of(row)

    async def _apply(self, session: AsyncSession, job: JobRow, decision: Decision, sight: Sight | None) -> bool:
        """Does what was decided about a locked job, if it still can be; whether anything changed."""
        state = JobState(job.state)
        if decision.action is Action.RESIZE:
            if state not in (JobState.RUNNING, JobState.RESIZING):
                return False
            await scale(session, job, decision.workers, self._clock(), "queue", "queue.decided", decision.message)
            log.info("job.resized", job=job.id, workers=decision.workers, why=decision.message)
            return True
        if state not in WAITS:
            return False  # cancelled since it was read
        if decision.action is Action.START and sight is not None:
            await self._start(session, job, decision, sight)
            return True
        return self._wait(session, job, decision)

    async def _start(self, session: AsyncSession, job: JobRow, decision: Decision, sight: Sight) -> None:
        now, workers = self._clock(), decision.workers
        job.epoch += 1
        if job.wanted_workers > workers:
            asked = job.wanted_workers
            message = f"{asked} -> {workers} workers: no room for more"
            events.add(session, job.id, now, "job.shrunk", message, "service", {"from": asked, "to": workers})
            for operation in await operation_queries.unfinished(session, job.id):
                message = f"restarted with {workers}: no room for {asked}"
                operations.end(operation, OperationState.FAILED, message, now)
            job.wanted_operation = None
        job.wanted_workers, job.sized_at = workers, now
        want(job)
        attempt = AttemptRow(
            id=attempt_id(job.id, job.epoch),
            job_id=job.id,
            epoch=job.epoch,
            workers=workers,
            token=secrets.token_urlsafe(32),
            cluster_session=sight.session,
            state=AttemptState.OPEN,
            created_at=now,
        )
        session.add(attempt)
        if job.state == JobState.QUEUED:
            why = Why("admitted", decision.message, "service", now, {"attempt": attempt.id})
            await change_state(session, job, JobState.STARTING, why)
        else:
            give_reason(job, Why("restarting", f"starts again with {workers} workers", "service", now))
        data = {"attempt": attempt.id, "epoch": job.epoch, "workers": workers}
        events.add(session, job.id, now, "attempt.created", f"attempt {job.epoch}", "service", data)

    def _wait(self, session: AsyncSession, job: JobRow, decision: Decision) -> bool:
        if not _says_new(job, decision):
            return False
        now = self._clock()
        if job.reason_code != decision.code:  # numbers in a message change often; the timeline tells of new causes
            events.add(session, job.id, now, "job.waiting", decision.message, "service", {"reason": decision.code})
        give_reason(job, Why(decision.code, decision.message, "service", now))
        return True


def _says_new(job: JobRow, decision: Decision) -> bool:
    return (job.reason_code, job.reason_message) != (decision.code, decision.message)
