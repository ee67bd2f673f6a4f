"""A job as the API shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

from rubato.resources import Job, LayoutView, Progress, Reason, Restarts, WorkersView, WorkerView
from rubato.spec import JobSpec
from rubato.states import JobState
from service.database.tables import IntervalRow, JobRow
from service.jobs.goodput import goodput
from service.jobs.stored import NONSENSE, UnreadableJobError, spec_of
from service.plans.predictions import Expected

_TRAINS = frozenset({JobState.RUNNING, JobState.RESIZING, JobState.RECOVERING})


Expect = Callable[[JobSpec, LayoutView], Expected | None]


def view(job: JobRow, intervals: Iterable[IntervalRow], ray_dashboard: str, now: datetime, expect: Expect) -> Job:
    """The job with its history added up to ``now``, and with what is expected of it at its layout.

    One whose row cannot be read is shown as that, with the reason.
    """
    try:
        return _view(job, intervals, ray_dashboard, now, expect)
    except UnreadableJobError as error:
        return _unreadable(job, error, ray_dashboard, now)
    except NONSENSE as error:
        return _unreadable(job, UnreadableJobError(job.id, error), ray_dashboard, now)


def _view(job: JobRow, intervals: Iterable[IntervalRow], ray_dashboard: str, now: datetime, expect: Expect) -> Job:
    spec = spec_of(job)
    state = JobState(job.state)
    layout = None if job.layout is None else LayoutView.model_validate(job.layout)
    return Job(
        id=job.id,
        name=job.name,
        project=job.project,
        priority=job.priority,
        state=state,
        reason=Reason.model_validate(
            {"code": job.reason_code, "message": job.reason_message, "actor": job.reason_actor, "at": job.reason_at}
        ),
        spec=spec,
        layout=layout,
        workers=_workers(job, spec, state),
        progress=_progress(job, spec, state, expect(spec, layout) if layout and state in _TRAINS else None),
        generation=job.generation,
        attempts=job.epoch,
        restarts=Restarts.model_validate(job.restarts),
        goodput=goodput(intervals, now),
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        run_dir=job.run_dir,
        links=_links(job, ray_dashboard),
    )


def _unreadable(job: JobRow, error: UnreadableJobError, ray_dashboard: str, now: datetime) -> Job:
    """What columns of its own say of the job; a state that there is not counts as the end of it."""
    known = job.state in JobState.__members__
    message = error.detail if known else f"{error.detail}; its state is '{job.state}'"
    return Job(
        id=job.id,
        name=job.name,
        project=job.project,
        priority=job.priority,
        state=JobState(job.state) if known else JobState.FAILED,
        reason=Reason(code=error.code, message=f"{message}: {error.fix}", actor="service", at=job.reason_at),
        spec=None,
        layout=None,
        workers=WorkersView(desired=job.wanted_workers, observed=0, min=job.wanted_workers, max=job.wanted_workers),
        progress=Progress(step=job.step, steps=job.step, tokens=job.tokens),
        generation=job.generation,
        attempts=job.epoch,
        restarts=Restarts(),
        goodput=goodput((), now),
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        run_dir=job.run_dir,
        links=_links(job, ray_dashboard),
    )


def members(job: JobRow) -> list[WorkerView]:
    """The workers as the driver told of them last; of a job that is over, those it had in the end."""
    return [WorkerView.model_validate(member) for member in job.members]


def _workers(job: JobRow, spec: JobSpec, state: JobState) -> WorkersView:
    present = [] if state.terminal else members(job)
    return WorkersView(
        desired=job.wanted_workers,
        observed=sum(member.state == "training" for member in present),
        min=spec.workers.min,
        max=spec.workers.max,
        queue_min=job.size_min or spec.workers.min,
        queue_max=job.size_max or spec.workers.max,
        members=present,
    )


def _progress(job: JobRow, spec: JobSpec, state: JobState, expected: Expected | None) -> Progress:
    trains = state in _TRAINS
    steps = spec.train.steps
    return Progress(
        step=job.step,
        steps=steps,
        tokens=job.tokens,
        loss=job.loss,
        tokens_per_s=job.tokens_per_s if trains else None,
        predicted_tokens_per_s=None if expected is None else expected.tokens_per_s,
        mfu=job.mfu if trains else None,
        eta_s=(steps - job.step) * job.step_s if trains and job.step_s is not None else None,
    )


def _links(job: JobRow, ray_dashboard: str) -> dict[str, str]:
    here = f"/v1/jobs/{job.id}"
    parts = ("events", "metrics", "logs", "checkpoints", "files", "scale", "profile", "cancel")
    links = {"self": here, **{part: f"{here}/{part}" for part in parts}, "page": f"/jobs/{job.id}"}
    if job.epoch:
        links["ray"] = f"{ray_dashboard}/#/jobs/{attempt_id(job.id, job.epoch)}"
    return links


def attempt_id(job_id: str, epoch: int) -> str:
    """The name of an attempt, here and in Ray. A function of job and epoch, so it can never be given twice."""
    return f"{job_id}-a{epoch}"
