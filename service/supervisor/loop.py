"""The loop that compares what is wanted with what is seen, and acts. It remembers nothing between two rounds."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import time
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from rubato.states import JobState
from service.attempts import journal
from service.attempts import repository as attempts
from service.attempts.repository import AttemptState
from service.clock import Clock
from service.cluster.ray import Ray, RayJob, RayJobState, RayRefused, RayUnreachable, Sight
from service.cluster.service import ClusterService
from service.database.engine import Database
from service.database.tables import AttemptRow, JobRow
from service.jobs import repository as jobs
from service.jobs import run_directory
from service.jobs.lifecycle import Why, give_reason, touch
from service.queue.admission import Admission
from service.settings import Settings
from service.supervisor.endings import settle
from service.supervisor.policy import Facts, Step, Verdict, judge, plan, silent
from service.wakeups import Wakeups, wait

log = structlog.get_logger(__name__)


class Supervisor:
    """Starts, watches and ends attempts. Several control planes may run one each: an attempt is acted on under a lease,
    and what was found is applied only while the lease still holds."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        wakeups: Wakeups,
        ray: Ray,
        cluster: ClusterService,
        admission: Admission,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._database = database
        self._wakeups = wakeups
        self._ray = ray
        self._cluster = cluster
        self._admission = admission
        self._clock = clock
        self._listening_since = clock()
        self.round_seconds = 0.0
        self.last_round = time.monotonic()
        self.failure: str | None = None  # of the last round, in words

    async def run(self) -> None:
        """Rounds until the service shuts down, each soon after something happened, or after a pause."""
        while not self._wakeups.closed:
            self._wakeups.supervisor.clear()
            try:
                await self.round()
            except (SQLAlchemyError, OSError) as error:
                self.failure = str(error)
                log.warning("supervisor.round_failed", cause=str(error))
            except Exception as error:  # an error of ours must end neither later rounds nor other jobs
                self.failure = repr(error)
                log.exception("supervisor.round_failed")
            await wait(self._wakeups.supervisor, self._settings.reconcile_every)

    async def round(self) -> None:
        """Looks at the cluster once, admits what fits, and does the next step of every open attempt."""
        began = time.monotonic()
        self.failure = None
        sight = await self._cluster.look()
        try:
            await self._admission.admit(sight, self._cluster.detail)
        except Exception as error:  # jobs that run are looked after whatever becomes of those that wait
            self.failure = f"admission: {error!r}"
            log.exception("admission.failed")
        if sight is not None:
            async with self._database.reading() as session:
                found = [(attempt.id, attempt.job_id) for attempt in await attempts.open_attempts(session)]
            await asyncio.gather(*(self._guarded(attempt_id, job_id, sight) for attempt_id, job_id in found))
        self.last_round = time.monotonic()
        self.round_seconds = self.last_round - began

    async def _guarded(self, attempt_id: str, job_id: str, sight: Sight) -> None:
        """The next step of one attempt. One that fails keeps its lease until it runs out: then it is tried again."""
        try:
            await self._reconcile(attempt_id, sight)
        except (SQLAlchemyError, OSError) as error:
            self.failure = f"attempt {attempt_id}: {error}"
            log.warning("attempt.failed_here", attempt=attempt_id, cause=str(error))
        except Exception as error:  # an error about one attempt must not reach the others
            self.failure = f"attempt {attempt_id}: {error!r}"
            log.exception("attempt.failed_here", attempt=attempt_id)
            message = f"the control plane failed to look after attempt {attempt_id}, and tries again: {error!r}"
            with contextlib.suppress(SQLAlchemyError, OSError):  # the log has it
                await self._explain(job_id, "internal_error", message)

    async def _explain(self, job_id: str, code: str, message: str) -> None:
        """Gives a job that is not over a reason, once; its driver's next word replaces it."""
        async with self._database.writing() as session:
            job = await jobs.locked(session, job_id)
            if job is None or JobState(job.state).terminal or job.reason_code == code:
                return
            give_reason(job, Why(code, message, "service", self._clock()))
        self._wakeups.notify(job_id)

    async def _reconcile(self, attempt_id: str, sight: Sight) -> None:
        async with self._database.reading() as session:
            attempt = await attempts.find(session, attempt_id)
            job = None if attempt is None else await jobs.find(session, attempt.job_id)
        if attempt is None or job is None:
            return
        step = plan(self._facts(job, attempt), self._clock(), self._settings)
        if step is Step.NOTHING:
            return
        lease = await self._take_lease(attempt_id)
        if lease is None:
            return
        try:
            if step is Step.SUBMIT:
                await self._submit(job, attempt, sight, lease)
            elif step is Step.STOP:
                await self._stop(attempt, lease)
            else:
                await self._check(job, attempt, sight, lease)
        except RayUnreachable as error:
            log.warning("ray.unreachable", attempt=attempt_id, cause=str(error))
            if step is Step.SUBMIT:
                await self._explain(job.id, "ray_not_ready", f"waits until Ray takes it: {error}")
        await self._return_lease(attempt_id, lease)

    def _facts(self, job: JobRow, attempt: AttemptRow) -> Facts:
        return Facts(
            job_state=JobState(job.state),
            forced=job.wanted_cancel == "force",
            cancelled_at=job.cancelled_at,
            finished_at=job.finished_at,
            submitted_at=attempt.submitted_at,
            heartbeat_at=attempt.heartbeat_at,
            stopped_at=attempt.stopped_at,
            listening_since=self._listening_since,
        )

    async def _submit(self, job: JobRow, attempt: AttemptRow, sight: Sight, lease: str) -> None:
        """Gives an attempt to Ray, unless Ray has it: from before a crash, or from a call whose answer was lost."""
        if await self._ray.job(attempt.id) is None:
            try:
                await asyncio.to_thread(run_directory.write_epoch, Path(job.run_dir), attempt.epoch)
            except OSError as error:
                await self._cannot_start(attempt, lease, f"{job.run_dir} cannot be written: {error.strerror}")
                return
            environment = {"RUBATO_ATTEMPT_TOKEN": attempt.token}
            try:
                await self._ray.submit(attempt.id, self._entrypoint(job, attempt), environment)
            except RayUnreachable:
                if await self._ray.job(attempt.id) is None:
                    raise
            except RayRefused as error:
                if await self._ray.job(attempt.id) is None:
                    await self._end(attempt, lease, Verdict.FAILED, f"Ray refused it: {error}")
                    return
        async with self._database.writing() as session:
            _, row = await self._locked(session, attempt.id, lease)
            if row is not None and row.submitted_at is None:
                row.submitted_at = self._clock()
                row.cluster_session = sight.session
        log.info("attempt.submitted", attempt=attempt.id)

    def _entrypoint(self, job: JobRow, attempt: AttemptRow) -> str:
        arguments = {
            "--run-dir": job.run_dir,
            "--attempt": attempt.id,
            "--epoch": str(attempt.epoch),
            "--workers": str(attempt.workers),
            "--control": self._settings.control_url,
        }
        spent = job.restarts_before.get("hardware", 0)
        if spent:  # faults.hardware is a budget of the job, not of an attempt
            arguments["--hardware-restarts"] = str(spent)
        program = [self._settings.driver_python, "-m", "workers.driver"]
        return shlex.join([*program, *(word for pair in arguments.items() for word in pair)])

    async def _stop(self, attempt: AttemptRow, lease: str) -> None:
        async with self._database.writing() as session:
            job, row = await self._locked(session, attempt.id, lease)
            if job is None or row is None:
                return
            row.stopped_at = self._clock()  # first: it is the second sign that the end which follows is no loss
            touch(job)
        log.info("attempt.stopping", attempt=attempt.id)
        await self._ray.stop(attempt.id)

    async def _check(self, job: JobRow, attempt: AttemptRow, sight: Sight, lease: str) -> None:
        seen: RayJob | None = await self._ray.job(attempt.id)
        same = attempt.cluster_session == sight.session
        facts, now = self._facts(job, attempt), self._clock()
        verdict = judge(facts, seen, same, now, self._settings)
        if verdict is not Verdict.ALIVE:
            await self._end(attempt, lease, verdict, "" if seen is None else _short(seen.message))
            return
        if seen is not None and seen.state is RayJobState.RUNNING and silent(facts, now, self._settings):
            await self._unheard(job, attempt, now)
        if attempt.submitted_at is None:
            async with self._database.writing() as session:
                _, row = await self._locked(session, attempt.id, lease)
                if row is not None:
                    row.submitted_at = self._clock()

    async def _unheard(self, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
        last = max(filter(None, (attempt.heartbeat_at, attempt.submitted_at, self._listening_since)))
        message = (
            f"Ray says that its driver runs, but it was not heard for {(now - last).total_seconds():.0f} s: it reports "
            f"to {self._settings.control_url}, so see that its machine reaches that address, or set RUBATO_CONTROL_URL"
        )
        if job.state != JobState.CANCELLING:  # there the user's own reason says more
            await self._explain(job.id, "driver_unheard", message)

    async def _end(self, attempt: AttemptRow, lease: str, verdict: Verdict, said: str) -> None:
        """Applies a verdict, unless the driver was heard again since the facts it rests on were read."""
        async with self._database.reading() as session:
            job = await jobs.find(session, attempt.job_id)
        assert job is not None  # rows are never deleted
        untold = await asyncio.to_thread(
            journal.read, Path(job.run_dir), job.events_acknowledged, job.metrics_acknowledged
        )
        async with self._database.writing() as session:
            job, row = await self._locked(session, attempt.id, lease)
            if job is None or row is None or row.heartbeat_at != attempt.heartbeat_at:
                return
            await settle(session, job, row, verdict, said, untold, self._settings, self._clock())
            touch(job)
            log.info("attempt.over", attempt=attempt.id, job_state=job.state, cause=row.cause)
        self._wakeups.notify(attempt.job_id)
        self._wakeups.supervisor.set()

    async def _cannot_start(self, attempt: AttemptRow, lease: str, cause: str) -> None:
        async with self._database.writing() as session:
            job, row = await self._locked(session, attempt.id, lease)
            if job is None or row is None or job.reason_code == "run_directory_not_writable":
                return
            message = f"waits until its run directory can be written: {cause}"
            give_reason(job, Why("run_directory_not_writable", message, "service", self._clock()))
        log.error("attempt.cannot_start", attempt=attempt.id, cause=cause)
        self._wakeups.notify(attempt.job_id)

    @staticmethod
    async def _locked(
        session: AsyncSession, attempt_id: str, lease: str
    ) -> tuple[JobRow, AttemptRow] | tuple[None, None]:
        """The rows of an attempt, locked in the order everybody locks them; none when the lease is lost."""
        found = await attempts.find(session, attempt_id)
        job = None if found is None else await jobs.locked(session, found.job_id)
        row = None if job is None else await attempts.locked(session, attempt_id)
        if job is None or row is None or row.lease_token != lease or row.state != AttemptState.OPEN:
            return None, None
        return job, row

    async def _take_lease(self, attempt_id: str) -> str | None:
        now = self._clock()
        async with self._database.writing() as session:
            row = await attempts.locked(session, attempt_id)
            taken = row is not None and row.lease_until is not None and row.lease_until > now
            if row is None or taken or row.state != AttemptState.OPEN:
                return None
            row.lease_token = secrets.token_hex(8)
            row.lease_until = now + timedelta(seconds=self._settings.lease_seconds)
            return row.lease_token

    async def _return_lease(self, attempt_id: str, lease: str) -> None:
        async with self._database.writing() as session:
            row = await attempts.locked(session, attempt_id)
            if row is not None and row.lease_token == lease:
                row.lease_token = row.lease_until = None


def _short(message: str, most: int = 300) -> str:
    """Ray says how the process ended and appends its output: the former, and the last line of the latter."""
    said, _, output = message.strip().partition("\n")
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    ending = said.partition(", last available logs")[0].strip()
    return ": ".join(part if len(part) <= most else part[: most - 1] + "…" for part in (ending, last) if part)
