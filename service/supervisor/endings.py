"""What the end of an attempt, seen from outside, means for its job."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.spec import JobSpec
from rubato.states import JobState
from service.attempts import record
from service.attempts.journal import Untold
from service.attempts.repository import AttemptState
from service.database.tables import AttemptRow, JobRow
from service.events import repository as events
from service.jobs.lifecycle import Why, change_state, give_reason
from service.jobs.stored import UnreadableJobError, spec_of
from service.settings import Settings
from service.supervisor.policy import Verdict

_CAUSES = {
    Verdict.NEVER: "it was withdrawn before Ray had it",
    Verdict.NEW_CLUSTER: "the cluster it ran on is gone, another one answers at its address",
    Verdict.VANISHED: "Ray does not know it any more and its driver is silent",
    Verdict.SUCCEEDED: "its driver ended without a word",
    Verdict.FAILED: "its driver died",
    Verdict.STOPPED: "it was stopped through Ray",
}


async def settle(
    session: AsyncSession,
    job: JobRow,
    attempt: AttemptRow,
    verdict: Verdict,
    said: str,
    untold: Untold,
    settings: Settings,
    now: datetime,
) -> None:
    """Closes an attempt that is over, and takes its locked job where that leads.

    Args:
        said: what Ray said of the end, empty when it said nothing.
        untold: what the driver wrote but could not report.
    """
    await record.metrics(session, job, untold.metrics)
    await record.driver_events(session, job, untold.events)
    cause = _CAUSES[verdict] + (f": {said}" if said else "")
    attempt.finished_at = now
    attempt.cause = cause
    attempt.state = AttemptState.ENDED
    state = JobState(job.state)
    if state.terminal:
        return
    if state is JobState.CANCELLING:
        await change_state(session, job, JobState.CANCELLED, Why("cancelled", "stopped", "service", now))
        return
    try:
        spec = spec_of(job)
    except UnreadableJobError as error:  # nobody could start it again
        await change_state(session, job, JobState.FAILED, Why(error.code, error.detail, "service", now))
        return
    failed, finished = untold.find("attempt.failed"), untold.find("training.finished")
    done = finished is not None or job.step >= spec.train.steps
    if done and verdict is Verdict.SUCCEEDED:
        why = Why("finished", "all steps are done" if finished is None else finished.message, "driver", now)
        await _through_running(session, job, JobState.SUCCEEDED, why)
    elif failed is not None:
        await change_state(session, job, JobState.FAILED, Why("driver_failed", failed.message, "driver", now))
    elif verdict is Verdict.STOPPED:
        why = Why("stopped_in_ray", "somebody stopped it through Ray's own interface", "cluster", now)
        await change_state(session, job, JobState.CANCELLING, why)
        await change_state(session, job, JobState.CANCELLED, why)
    else:
        attempt.state = AttemptState.LOST
        await _lost(session, job, spec, verdict, cause, settings, now)


async def _lost(
    session: AsyncSession,
    job: JobRow,
    spec: JobSpec,
    verdict: Verdict,
    cause: str,
    settings: Settings,
    now: datetime,
) -> None:
    """A lost attempt is followed by another, unless losses are more than the spec allows or lead nowhere."""
    data = {"epoch": job.epoch, "cause": cause}
    events.add(session, job.id, now, "attempt.lost", f"attempt {job.epoch} is lost: {cause}", "cluster", data)
    restarts = {**job.restarts, "hardware": job.restarts.get("hardware", 0) + 1}
    job.restarts = job.restarts_before = restarts
    job.members = []
    job.lost_at = now
    if verdict is not Verdict.NEW_CLUSTER:
        job.idle_attempts += 1
    allowed = spec.faults.hardware
    if 0 <= allowed < restarts["hardware"]:
        message = f"lost workers {restarts['hardware']} times, and faults.hardware allows {allowed}; the last: {cause}"
        await change_state(session, job, JobState.FAILED, Why("too_many_losses", message, "service", now))
        return
    if job.idle_attempts >= settings.max_idle_attempts:
        message = f"{job.idle_attempts} attempts in a row ended without a new step; the last: {cause}"
        await change_state(session, job, JobState.FAILED, Why("no_progress", message, "service", now))
        return
    pause = min(60, 2**job.idle_attempts) if job.idle_attempts > 1 else 0
    job.not_before = now + timedelta(seconds=pause)
    why = Why("attempt_lost", cause, "cluster", now)
    if job.state == JobState.RECOVERING:
        give_reason(job, why)
    else:
        await change_state(session, job, JobState.RECOVERING, why)


async def _through_running(session: AsyncSession, job: JobRow, new: JobState, why: Why) -> None:
    if job.state == JobState.STARTING:
        await change_state(session, job, JobState.RUNNING, why)
    await change_state(session, job, new, why)
