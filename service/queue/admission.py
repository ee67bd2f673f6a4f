"""Applies the policy of the queue to the jobs in the database: one control plane at a time, in one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import OperationState
from rubato.spec import JobSpec, stored_spec
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
from service.jobs.view import attempt_id, members
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries
from service.queue import repository
from service.queue.policy import Candidate, Decision, Need, Node, Room, Running, decide, impatient
from service.wakeups import Wakeups

log = structlog.get_logger(__name__)

# How long a job that lost its workers waits for all its places before it takes fewer: Ray shows the places of the dead
# as taken for some seconds more.
PATIENCE = timedelta(seconds=20)

_WAITS = frozenset({JobState.QUEUED, JobState.RECOVERING})


class Admission:
    """Starts what fits. An admitted job has an attempt row; the supervisor makes Ray run it."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock) -> None:
        self._database = database
        self._wakeups = wakeups
        self._clock = clock

    async def admit(self, sight: Sight | None, detail: str) -> list[str]:
        """Decides about all jobs that wait. Returns those whose attempt was created.

        Args:
            sight: the cluster as it was seen just now; None: it could not be seen, and nobody is admitted.
            detail: in words, what became of that look.
        """
        async with self._database.reading() as session:
            if not await self._waiting(session):
                return []
        async with self._database.writing() as session:
            await repository.lock_queue(session)
            waiting = await self._waiting(session)
            decided_from = {job.id: (job.wanted_workers, job.wanted_version) for job in waiting}
            if sight is None:
                message = f"waits until the cluster can be seen: {detail}"
                decisions = [Decision(job.id, None, "cluster_unreachable", message) for job in waiting]
            else:
                decisions = await self._decide(session, sight, waiting)
            by_id = {job.id: job for job in waiting}
            admitted, changed = [], []
            for decision in decisions:
                job = by_id[decision.job]
                await session.refresh(job, with_for_update=True)
                if job.state not in _WAITS:
                    continue  # cancelled since it was read
                if (job.wanted_workers, job.wanted_version) != decided_from[job.id]:
                    continue  # scaled since it was read: the next round decides about the new size
                if decision.workers is not None and sight is not None:
                    await self._start(session, job, decision.workers, sight)
                    admitted.append(job.id)
                    changed.append(job.id)
                elif self._wait(session, job, decision):
                    changed.append(job.id)
        for job_id in changed:
            self._wakeups.notify(job_id)
        for job_id in admitted:
            log.info("job.admitted", job=job_id)
        return admitted

    @staticmethod
    async def _waiting(session: AsyncSession) -> list[JobRow]:
        held = {attempt.job_id for attempt in await attempts.open_attempts(session)}
        return [job for job in await jobs.unfinished(session) if job.state in _WAITS and job.id not in held]

    async def _decide(self, session: AsyncSession, sight: Sight, waiting: Sequence[JobRow]) -> list[Decision]:
        now = self._clock()
        nodes = [
            Node(Room(node.cpus, node.gpus), Room(node.cpus_free, node.gpus_free)) for node in sight.nodes if node.alive
        ]
        held = {attempt.job_id for attempt in await attempts.open_attempts(session)}
        running = [_running(job) for job in await jobs.unfinished(session) if job.id in held]
        candidates, refused = [], []
        for job in waiting:
            if job.not_before is not None and job.not_before > now:
                continue
            try:
                candidates.append(_candidate(job, now))
            except Exception as error:  # a row that cannot be read must not keep all others waiting
                log.exception("admission.job_unreadable", job=job.id)
                message = f"the control plane cannot read what was stored of it: {error!r}"
                refused.append(Decision(job.id, None, "internal_error", message))
        return [*refused, *decide(candidates, nodes, running)]

    async def _start(self, session: AsyncSession, job: JobRow, workers: int, sight: Sight) -> None:
        now = self._clock()
        job.epoch += 1
        if job.wanted_workers != workers:
            asked = job.wanted_workers
            message = f"{asked} -> {workers} workers: no room for more"
            events.add(session, job.id, now, "job.shrunk", message, "service", {"from": asked, "to": workers})
            for operation in await operation_queries.unfinished(session, job.id):
                message = f"restarted with {workers}: no room for {asked}"
                operations.end(operation, OperationState.FAILED, message, now)
            job.wanted_workers, job.wanted_operation = workers, None
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
        why = Why("admitted", f"starts with {workers} workers", "service", now, {"attempt": attempt.id})
        if job.state == JobState.QUEUED:
            await change_state(session, job, JobState.STARTING, why)
        else:
            give_reason(job, Why("restarting", f"starts again with {workers} workers", "service", now))
        data = {"attempt": attempt.id, "epoch": job.epoch, "workers": workers}
        events.add(session, job.id, now, "attempt.created", f"attempt {job.epoch}", "service", data)

    def _wait(self, session: AsyncSession, job: JobRow, decision: Decision) -> bool:
        if (job.reason_code, job.reason_message) == (decision.code, decision.message):
            return False
        now = self._clock()
        if job.reason_code != decision.code:  # numbers in a message change often; the timeline tells of new causes
            events.add(session, job.id, now, "job.waiting", decision.message, "service", {"reason": decision.code})
        give_reason(job, Why(decision.code, decision.message, "service", now))
        return True


def _need(spec: JobSpec) -> Need:
    return Need(spec.workers.cpus, spec.workers.gpus)


def _running(job: JobRow) -> Running:
    seen = sum(member.state == "training" for member in members(job))
    return Running(_need(stored_spec(job.spec)), job.wanted_workers, seen)


def _candidate(job: JobRow, now: datetime) -> Candidate:
    spec = stored_spec(job.spec)
    recovering = job.state == JobState.RECOVERING
    candidate = Candidate(
        job=job.id,
        number=job.number,
        priority=job.priority,
        need=_need(spec),
        workers=job.wanted_workers,
        sizes=spec.sizes or [job.wanted_workers],  # a spec that was stored may have no size by the rules of today
        recovering=recovering,
    )
    lost_at = job.lost_at
    waited_enough = recovering and lost_at is not None and now - lost_at >= PATIENCE
    return impatient(candidate) if waited_enough else candidate
