"""What users do with jobs: submit, look, scale, cancel."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from pathlib import Path

import structlog
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.corpus import all_places
from rubato.layout import nearest_sizes
from rubato.problems import FieldProblem, RubatoError
from rubato.resources import Job, Metric, Operation, OperationState, Page, ProfileRequest, Restarts, ScaleRequest
from rubato.spec import JobSpec, as_given
from rubato.states import JobState
from service import cursors
from service.attempts import repository as attempts
from service.clock import Clock
from service.database.engine import Database
from service.database.tables import JobRow
from service.events import repository as events
from service.jobs import repository, run_directory
from service.jobs.corpus_check import check_corpus, check_paths
from service.jobs.lifecycle import Why, change_state, open_interval, want
from service.jobs.profiles import profile_refusal
from service.jobs.repository import JobFilter
from service.jobs.scaling import HAS_ATTEMPT, scale
from service.jobs.stored import spec_of
from service.jobs.view import view
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries
from service.plans.service import PlanService
from service.problems import not_found
from service.settings import Settings
from service.wakeups import Wakeups

log = structlog.get_logger(__name__)

_SUBMITTED_BY = 600.0  # seconds after which nobody is still storing a job whose run directory was made


class JobService:
    """Jobs, as their users see them. Safe to call from any number of requests and control planes at once."""

    def __init__(
        self, settings: Settings, database: Database, wakeups: Wakeups, clock: Clock, plans: PlanService
    ) -> None:
        self._plans = plans
        self._settings = settings
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._owner = database.url.render_as_string(hide_password=True)

    async def submit(self, spec: JobSpec, idempotency_key: str | None) -> tuple[Job, bool]:
        """Queues a job; the same key and spec again give the same job, and True.

        A spec that leaves its layout out is given one, which the job then keeps.

        Raises:
            RubatoError: the key belongs to another spec (409), the corpus is not there or no layout fits the workers
                (422), or the run directory cannot be written (503). Nothing is left behind.
        """
        digest = hashlib.sha256(json.dumps(as_given(spec)).encode()).hexdigest()
        if idempotency_key is not None and (earlier := await self._replay(idempotency_key, digest)):
            return earlier, True
        check_paths(spec)
        await check_corpus(all_places(spec.data), self._settings.ray_dashboard)
        spec = await self._plans.prepare(spec)
        job_id = f"job-{secrets.token_hex(5)}"
        run_dir = await asyncio.to_thread(run_directory.make, self._settings.runs, job_id, spec, self._owner)
        try:
            async with self._database.writing() as session:
                job = await self._insert(session, job_id, spec, run_dir, idempotency_key, digest)
                intervals = (await repository.intervals(session, [job_id]))[job_id]
        except IntegrityError:
            await asyncio.to_thread(run_directory.remove, run_dir)
            # The same key came twice at once, and the other was faster.
            if idempotency_key is None or not (earlier := await self._replay(idempotency_key, digest)):
                raise
            return earlier, True
        except BaseException:
            await asyncio.to_thread(run_directory.remove, run_dir)
            raise
        try:
            await asyncio.to_thread(run_directory.keep, run_dir)
        except OSError as error:  # the next start does it
            log.warning("run_directory.mark_left", job=job_id, cause=str(error))
        log.info("job.submitted", job=job_id, name=spec.name, workers=job.wanted_workers)
        self._wakeups.supervisor.set()
        return view(job, intervals, self._settings.ray_dashboard, self._clock(), self._plans.expect), False

    async def sweep(self) -> None:
        """Takes back run directories of submissions that were cut off by a kill before their job was stored."""
        try:
            before = time.time() - _SUBMITTED_BY
            for path in await asyncio.to_thread(run_directory.pending, self._settings.runs, self._owner, before):
                async with self._database.reading() as session:
                    stored = await repository.find(session, path.name) is not None
                await asyncio.to_thread(run_directory.keep if stored else run_directory.remove, path)
                log.info("run_directory.swept", path=str(path), job_stored=stored)
        except (OSError, SQLAlchemyError) as error:
            log.warning("run_directory.not_swept", cause=str(error))

    async def _insert(
        self, session: AsyncSession, job_id: str, spec: JobSpec, run_dir: Path, key: str | None, digest: str
    ) -> JobRow:
        now = self._clock()
        job = JobRow(
            id=job_id,
            name=spec.name,
            project=spec.project,
            priority=spec.priority,
            spec=spec.model_dump(mode="json"),
            run_dir=str(run_dir),
            idempotency_key=key,
            request_hash=digest,
            state=JobState.QUEUED,
            reason_code="submitted",
            reason_message="waits to be admitted",
            reason_actor="user",
            reason_at=now,
            wanted_workers=spec.sizes[0],
            members=[],
            restarts=Restarts().model_dump(),
            restarts_before=Restarts().model_dump(),
            created_at=now,
        )
        session.add(job)
        await session.flush()  # what follows refers to it
        events.add(session, job_id, now, "job.queued", "submitted", "user", {"workers": spec.sizes[0]})
        open_interval(session, job, now)
        await session.flush()
        return job

    async def _replay(self, key: str, digest: str) -> Job | None:
        async with self._database.reading() as session:
            job = await repository.of_idempotency_key(session, key)
            if job is None:
                return None
            if job.request_hash != digest:
                fix = "use a new key for a new spec, or send the spec as it was"
                problem = FieldProblem("Idempotency-Key", f"'{key}' was used for another spec, job {job.id}", fix)
                raise RubatoError(str(problem), fix=fix, code="idempotency_key_reused", status=409, problems=[problem])
            return await self._view(session, job)

    async def get(self, name_or_id: str) -> Job:
        """A job by its id, or by its name when one job alone can be meant. Raises RubatoError (404, 409)."""
        async with self._database.reading() as session:
            return await self._view(session, await self.resolve(session, name_or_id))

    async def list_page(self, wanted: JobFilter, cursor: str | None, limit: int) -> Page[Job]:
        """A page of jobs, newest first. Jobs that are added meanwhile do not shift it."""
        before = None if cursor is None else cursors.decode(cursor)
        async with self._database.reading() as session:
            rows = await repository.page(session, wanted, before, limit + 1)
            intervals = await repository.intervals(session, [job.id for job in rows[:limit]])
        now = self._clock()
        return Page[Job](
            items=[
                view(job, intervals[job.id], self._settings.ray_dashboard, now, self._plans.expect)
                for job in rows[:limit]
            ],
            next=cursors.encode(rows[limit - 1].number) if len(rows) > limit else None,
        )

    async def metrics(self, name_or_id: str, after: int, limit: int) -> Page[Metric]:
        """A page of metrics, by ascending step."""
        async with self._database.reading() as session:
            job = await self.resolve(session, name_or_id)
            rows = await repository.metrics_page(session, job.id, after, limit + 1)
        items = [Metric.model_validate(row.record) for row in rows[:limit]]
        return Page[Metric](items=items, next=str(items[-1].step) if len(rows) > limit else None)

    async def scale(self, name_or_id: str, request: ScaleRequest) -> Operation:
        """Changes the size that is wanted of a job, or between which sizes the queue chooses for it.

        A number of workers is a wish that the queue keeps to: it neither grows nor shrinks the job from then on.

        Raises:
            RubatoError: the job cannot run at that size (422, with the nearest it can), or is over or ending (409).
        """
        async with self._database.writing() as session:
            job = await self._locked(session, name_or_id)
            spec, state, now = spec_of(job), JobState(job.state), self._clock()
            sizes = _sizes_asked_for(spec, request)
            if state.terminal or state not in HAS_ATTEMPT | {JobState.QUEUED, JobState.PAUSED}:
                raise _too_late(job, "scaled")
            workers = min(sizes, key=lambda size: abs(size - job.wanted_workers))
            job.size_min, job.size_max = sizes[0], sizes[-1]
            operation = await scale(session, job, workers, now, request=request.model_dump(exclude_none=True))
        log.info("job.scaled", job=job.id, workers=workers, operation=operation.id)
        self._announce(job)
        return operations.view(operation)

    async def cancel(self, name_or_id: str, force: bool) -> Operation:
        """Ends a job: it saves and stops, or with ``force`` stops at once. Raises RubatoError (409) when it is over."""
        async with self._database.writing() as session:
            job = await self._locked(session, name_or_id)
            state, now = JobState(job.state), self._clock()
            if state.terminal:
                raise _too_late(job, "cancelled")
            wanted = "force" if force else "drain"
            unfinished = [op for op in await operation_queries.unfinished(session, job.id) if op.kind == "cancel"]
            if unfinished and job.wanted_cancel in ("force", wanted):
                return operations.view(unfinished[-1])
            operation = operations.begin(session, job, "cancel", {"force": force}, now)
            for earlier in unfinished:
                operations.end(earlier, OperationState.DONE, f"hurried by {operation.id}", now)
            job.wanted_cancel, job.wanted_operation, job.cancelled_at = wanted, operation.id, now
            want(job)
            message = "cancelled by force" if force else "cancelled: saves, then stops"
            why = Why("cancelled", message, "user", now, {"operation": operation.id})
            if state in (JobState.QUEUED, JobState.PAUSED):
                await change_state(session, job, JobState.CANCELLED, why)
            elif state is not JobState.CANCELLING:
                await change_state(session, job, JobState.CANCELLING, why)
                operations.enter_phase(operation, "draining", now)
                if await attempts.open_of(session, job.id) is None:  # it lost its workers, and none are coming yet
                    await change_state(session, job, JobState.CANCELLED, why)
        log.info("job.cancelled", job=job.id, force=force, operation=operation.id)
        self._announce(job)
        return operations.view(operation)

    async def profile(self, name_or_id: str, request: ProfileRequest) -> Operation:
        """Has workers of a running job record their next steps.

        Raises:
            RubatoError: the job does not train or records already (409), or has no workers of these ranks (422).
        """
        async with self._database.writing() as session:
            job = await self._locked(session, name_or_id)
            refusal = profile_refusal(job, request, await operation_queries.unfinished(session, job.id))
            if refusal is not None:
                raise refusal
            operation = operations.begin(session, job, "profile", request.model_dump(), self._clock())
            want(job)
        log.info("job.profiled", job=job.id, operation=operation.id)
        self._announce(job)
        return operations.view(operation)

    async def resolve(self, session: AsyncSession, name_or_id: str) -> JobRow:
        """The row that an id or a name means: of several jobs with a name the one that is not over."""
        job = await repository.find(session, name_or_id)
        if job is not None:
            return job
        found = await repository.named(session, name_or_id)
        alive = [job for job in found if not JobState(job.state).terminal]
        if not found:
            raise not_found("job", name_or_id, "GET /v1/jobs lists the jobs there are")
        if len(alive) == 1 or len(found) == 1:
            return (alive or list(found))[0]
        ids = ", ".join(job.id for job in (alive or found)[-10:])
        problem = FieldProblem("job", f"{len(found)} jobs are called '{name_or_id}'", f"use an id: {ids}")
        raise RubatoError(str(problem), fix=problem.fix, code="name_ambiguous", status=409, problems=[problem])

    async def _locked(self, session: AsyncSession, name_or_id: str) -> JobRow:
        job = await self.resolve(session, name_or_id)
        await session.refresh(job, with_for_update=True)
        return job

    async def _view(self, session: AsyncSession, job: JobRow) -> Job:
        intervals = (await repository.intervals(session, [job.id]))[job.id]
        return view(job, intervals, self._settings.ray_dashboard, self._clock(), self._plans.expect)

    def _announce(self, job: JobRow) -> None:
        self._wakeups.notify(job.id)
        self._wakeups.supervisor.set()


def _sizes_asked_for(spec: JobSpec, request: ScaleRequest) -> list[int]:
    """The possible sizes that a request leaves to choose from, ascending."""
    if request.workers is not None:
        if request.workers not in spec.sizes:
            raise _impossible_size(spec, request.workers)
        return [request.workers]
    low, high = request.min or spec.workers.min, request.max or spec.workers.max
    for bound in (low, high):
        if not spec.workers.min <= bound <= spec.workers.max:
            raise _impossible_size(spec, bound, "min" if bound == low else "max")
    found = [size for size in spec.sizes if low <= size <= high]
    if not found:
        raise _impossible_size(spec, low, "min")
    return found


def _impossible_size(spec: JobSpec, workers: int, field: str = "workers") -> RubatoError:
    bounds = spec.workers
    near = nearest_sizes(spec.parallelism, spec.train.global_batch, workers, bounds.min, bounds.max)
    if not bounds.min <= workers <= bounds.max:
        cause = f"{workers} is outside workers.min..max of the spec ({bounds.min}..{bounds.max})"
    else:
        shape = spec.parallelism
        cause = f"{workers} workers cannot be laid out at tensor {shape.tensor} x pipeline {shape.pipeline}"
        if workers % shape.replica_size == 0:
            cause += f" with a global batch of {spec.train.global_batch} in micro-batches of {shape.micro_batch}"
    fix = f"use {' or '.join(map(str, near))} workers"
    problem = FieldProblem(field, cause, fix)
    return RubatoError(str(problem), fix=fix, code="impossible_size", status=422, problems=[problem])


def _too_late(job: JobRow, done: str) -> RubatoError:
    over = JobState(job.state).terminal
    return RubatoError(
        f"job {job.id} is {job.state} and cannot be {done}",
        fix="submit it again" if over else "wait until it is over, then submit it again",
        code="job_is_over" if over else "job_is_ending",
        status=409,
    )
