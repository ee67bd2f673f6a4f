"""The sync call of a driver: heartbeat and reports in, what is wanted out, as soon as there is news."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.problems import RubatoError
from rubato.resources import DriverState, OperationState, SyncReply, SyncRequest
from rubato.states import JobState
from service.attempts import journal, record, repository
from service.attempts.journal import Untold
from service.attempts.repository import AttemptState
from service.attempts.states import path
from service.clock import Clock
from service.database.engine import Database
from service.database.tables import AttemptRow, JobRow
from service.events import repository as events
from service.jobs import repository as jobs
from service.jobs.lifecycle import Why, change_state, give_reason, touch
from service.jobs.stored import UnreadableJobError, spec_of
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries
from service.plans.predictions import SETTLED_STEPS
from service.plans.service import PlanService
from service.problems import not_found
from service.settings import Settings
from service.wakeups import Waiter, Wakeups

log = structlog.get_logger(__name__)

PLAN_DIFFERS = "plan.differs"

# Reasons the supervisor gives while a driver cannot be heard: the first word of the driver replaces them.
_REPLACED = frozenset({"driver_unheard", "ray_not_ready", "internal_error"})


class AttemptService:
    """Talks with drivers."""

    def __init__(
        self, settings: Settings, database: Database, wakeups: Wakeups, clock: Clock, plans: PlanService
    ) -> None:
        self._plans = plans
        # A call that is held must end well before its silence would be taken for a loss.
        self._longest = settings.heartbeat_timeout * 2 / 3
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._calls: dict[str, Waiter] = {}
        self.held = 0  # how many drivers wait for news here

    async def sync(self, attempt_id: str, token: str | None, request: SyncRequest) -> SyncReply:
        """Stores what a driver reports, then answers at once with news, or holds the call until there is some.

        Raises:
            RubatoError: unknown attempt (404), wrong token (401), or an attempt that is not the newest (409 fenced):
                its driver must stop without writing anything.
        """
        attempt = await self._authenticated(attempt_id, token)
        with self._wakeups.watch(attempt.job_id) as waiter:
            # A driver with something to tell hangs up and calls again; the call it left is over then.
            left_behind = self._calls.get(attempt_id)
            self._calls[attempt_id] = waiter
            if left_behind is not None:
                left_behind.event.set()
            try:
                reply = await self._take(attempt, request, await self._missing(attempt.job_id, request))
                return await self._hold(attempt, request, reply, waiter)
            finally:
                if self._calls.get(attempt_id) is waiter:
                    del self._calls[attempt_id]

    async def _hold(self, attempt: AttemptRow, request: SyncRequest, reply: SyncReply, waiter: Waiter) -> SyncReply:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(request.wait_s, self._longest)
        self.held += 1
        try:
            while reply.version <= request.seen_version and not self._wakeups.closed:
                left = until - loop.time()
                if left <= 0 or self._calls.get(attempt.id) is not waiter:
                    break
                await waiter.wait(left)
                reply = await self._look(attempt, request)
        finally:
            self.held -= 1
        return reply

    async def _authenticated(self, attempt_id: str, token: str | None) -> AttemptRow:
        async with self._database.reading() as session:
            attempt = await repository.find(session, attempt_id)
        if attempt is None:
            raise not_found("attempt", attempt_id, "only attempts that the control plane started can report to it")
        if token is None or not secrets.compare_digest(token.encode(), attempt.token.encode()):
            raise RubatoError(
                f"the token is not that of attempt {attempt_id}",
                fix="send `Authorization: Bearer TOKEN` with the token the driver was started with",
                code="wrong_token",
                status=401,
            )
        return attempt

    async def _look(self, attempt: AttemptRow, request: SyncRequest) -> SyncReply:
        async with self._database.reading() as session:
            newest = await repository.find(session, attempt.id)
            job = await jobs.find(session, attempt.job_id)
            assert newest is not None  # rows are never deleted
            assert job is not None
            _check_fence(newest, job, request)
            return _reply(job, newest, await _profile_order(session, job))

    async def _missing(self, job_id: str, request: SyncRequest) -> Untold:
        """What lies between the reports stored and those of a request: nothing, unless the database is an old copy."""
        async with self._database.reading() as session:
            job = await jobs.find(session, job_id)
        assert job is not None  # rows are never deleted
        events, metrics = job.events_acknowledged, job.metrics_acknowledged
        if all(item.seq <= events + 1 for item in request.events[:1]) and all(
            item.seq <= metrics + 1 for item in request.metrics[:1]
        ):
            return Untold()
        log.warning("reports.missing", job=job_id, events_stored=events, metrics_stored=metrics)
        try:
            return await asyncio.to_thread(journal.read, Path(job.run_dir), events, metrics)
        except OSError as error:
            log.warning("journal.unreadable", job=job_id, cause=str(error))
            return Untold()

    async def _take(self, attempt: AttemptRow, request: SyncRequest, missing: Untold) -> SyncReply:
        async with self._database.writing() as session:
            job = await jobs.locked(session, attempt.job_id)
            row = await repository.locked(session, attempt.id)
            assert job is not None  # rows are never deleted
            assert row is not None
            _check_fence(row, job, request)
            before, revision = job.state, job.revision
            now = self._clock()
            if row.submitted_at is None:
                row.submitted_at = now  # it runs, so Ray has it, whatever became of the answer
            row.heartbeat_at = now
            await record.metrics(session, job, [*missing.metrics, *request.metrics])
            await record.driver_events(session, job, [*missing.events, *request.events])
            if not JobState(job.state).terminal:
                _observe(job, request)
                await self._follow(session, job, row, request)
                await self._compare(session, job, request)
                await _settle_scale(session, job, request, self._clock)
            reply = _reply(job, row, await _profile_order(session, job))
            changed, after = job.revision != revision, job.state
        if changed:
            self._wakeups.notify(job.id)
        if before != after:
            log.info("job.changed", job=job.id, attempt=row.id, state=after, reason=request.reason_code)
            self._wakeups.supervisor.set()
        return reply

    async def _compare(self, session: AsyncSession, job: JobRow, request: SyncRequest) -> None:
        """Says once in the life of a job when it is much faster or slower than predicted, and on what that rests."""
        newest = request.metrics[-1].metric if request.metrics else None
        if newest is None or request.layout is None or request.state is not DriverState.RUNNING:
            return
        settled = await jobs.metrics_of(session, job.id, [newest.step - SETTLED_STEPS])
        if not settled or settled[newest.step - SETTLED_STEPS].record.get("generation") != newest.generation:
            return
        try:
            expected = self._plans.expect(spec_of(job), request.layout)
        except UnreadableJobError:  # it is shown as that wherever it is listed
            return
        remark = None if expected is None else expected.remark(newest.tokens_per_s)
        if expected is None or remark is None or await events.has_kind(session, job.id, PLAN_DIFFERS):
            return
        data = {
            "predicted_tokens_per_s": expected.tokens_per_s,
            "measured_tokens_per_s": newest.tokens_per_s,
            "calibrated": expected.calibrated,
            "layout": request.layout.model_dump(mode="json"),
        }
        events.add(session, job.id, self._clock(), PLAN_DIFFERS, remark, "service", data)
        touch(job)

    async def _follow(self, session: AsyncSession, job: JobRow, attempt: AttemptRow, request: SyncRequest) -> None:
        now = self._clock()
        why = Why(record.storable(request.reason_code), record.storable(request.reason_message), "driver", now)
        if request.state is DriverState.FAILED and job.state == JobState.CANCELLING:
            why = Why("cancelled", f"the driver failed while it stopped: {why.message}", "driver", now)
        states = path(JobState(job.state), request.state)
        for state in states:
            await change_state(session, job, state, why)
        heard_again = job.reason_code in _REPLACED and not JobState(job.state).terminal
        told = (job.reason_code, job.reason_message) != (why.code, why.message)
        if not states and told and (job.state == request.state.value or heard_again):
            give_reason(job, why)
        if JobState(job.state).terminal:
            attempt.reported_at = now


def _check_fence(attempt: AttemptRow, job: JobRow, request: SyncRequest) -> None:
    if attempt.state != AttemptState.LOST and attempt.epoch == job.epoch == request.epoch:
        return
    raise RubatoError(
        f"attempt {attempt.id} (epoch {request.epoch}) is not the one that runs job {job.id} (epoch {job.epoch})",
        fix="stop, and write nothing more to the run directory",
        code="fenced",
        status=409,
    )


def _observe(job: JobRow, request: SyncRequest) -> None:
    over = request.state in (DriverState.SUCCEEDED, DriverState.FAILED, DriverState.CANCELLED)
    seen = {
        "generation": request.generation,
        "restarts": _sum(job.restarts_before, request.restarts.model_dump()),
    }
    if not over:  # a job that is over goes on to show the layout and the workers it had
        seen["layout"] = None if request.layout is None else request.layout.model_dump(mode="json")
        seen["members"] = record.storable([member.model_dump(mode="json") for member in request.members])
    for name, value in seen.items():
        if getattr(job, name) != value:
            setattr(job, name, value)
            touch(job)


def _sum(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {kind: count + before.get(kind, 0) for kind, count in now.items()}


async def _settle_scale(session: AsyncSession, job: JobRow, request: SyncRequest, clock: Clock) -> None:
    """Ends a scale whose size the driver has, if it did not say so itself: it may have started at that size."""
    if request.state is not DriverState.RUNNING or request.seen_version < job.wanted_version or not request.layout:
        return
    layout = request.layout
    size = layout.data * layout.pipeline * layout.tensor
    trains = sum(member.state == "training" for member in request.members)
    if not size == trains == job.wanted_workers:
        return
    for operation in await operation_queries.unfinished(session, job.id):
        if operation.kind == "scale" and operation.request.get("workers", size) == size:
            operations.end(operation, OperationState.DONE, f"{size} workers train", clock())
            touch(job)


async def _profile_order(session: AsyncSession, job: JobRow) -> dict[str, Any] | None:
    """What is to be recorded, as long as nobody has said that it was."""
    for operation in await operation_queries.unfinished(session, job.id):
        if operation.kind == "profile":
            return {"operation": operation.id, **operation.request}
    return None


def _reply(job: JobRow, attempt: AttemptRow, profile: dict[str, Any] | None) -> SyncReply:
    cancel = job.wanted_cancel
    if JobState(job.state).terminal and attempt.reported_at is None:
        cancel = "force"  # the job was ended without its driver
    return SyncReply.model_validate(
        {
            "version": job.wanted_version,
            "workers": job.wanted_workers,
            "operation": job.wanted_operation,
            "cancel": cancel,
            "profile": profile,
            "events_acknowledged": job.events_acknowledged,
            "metrics_acknowledged": job.metrics_acknowledged,
        }
    )
