"""Takes in what a driver reports: metrics and events, each once and in order, and what was measured by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from rubato.resources import DriverEvent, Metric, OperationState, SequencedMetric
from service.database.tables import IntervalRow, JobRow, MetricRow
from service.events import repository as events
from service.jobs import repository as jobs
from service.jobs.lifecycle import touch
from service.operations import lifecycle as operations
from service.operations import repository as operation_queries


async def metrics(session: AsyncSession, job: JobRow, reported: Sequence[SequencedMetric]) -> None:
    """Stores the metrics of a locked job that follow those stored, up to the first gap.

    A step that is there already was done again after a loss: its time is booked as redone.
    """
    fresh = []
    for item in reported:
        if item.seq == job.metrics_acknowledged + 1:
            fresh.append(item.metric)
            job.metrics_acknowledged = item.seq
    if not fresh:
        return
    known = await jobs.metrics_of(session, job.id, [metric.step for metric in fresh])
    # Clocks of two machines differ a little; what seems older than the first stretch belongs to it.
    intervals = await jobs.intervals_since(session, job.id, fresh[0].at - timedelta(seconds=1))
    for metric in fresh:
        record = storable(metric.model_dump(mode="json"))
        interval = _interval_at(intervals, metric.at)
        row = known.get(metric.step)
        if row is not None:
            row.at, row.record = metric.at, record
            if interval is not None:
                interval.redone_s += metric.step_s
            continue
        known[metric.step] = MetricRow(job_id=job.id, step=metric.step, at=metric.at, record=record)
        session.add(known[metric.step])
        job.idle_attempts = 0
        if interval is not None:
            interval.step_s += metric.step_s
    _progress(job, fresh[-1])
    touch(job)


def storable(value: Any) -> Any:
    """The same value without what a database cannot hold: NUL in text, and numbers that JSON has no word for."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [storable(item) for item in value]
    return value


def _progress(job: JobRow, metric: Metric) -> None:
    job.step = metric.step
    job.tokens = metric.tokens
    job.loss = metric.loss
    job.tokens_per_s = metric.tokens_per_s
    job.mfu = metric.mfu
    # One slow step (a checkpoint, a pause) should not make the time left jump.
    job.step_s = metric.step_s if job.step_s is None else 0.9 * job.step_s + 0.1 * metric.step_s


async def driver_events(session: AsyncSession, job: JobRow, reported: Sequence[DriverEvent]) -> None:
    """Stores the events of a locked job that follow those stored, up to the first gap, and acts on what they say."""
    for event in reported:
        if event.seq != job.events_acknowledged + 1:
            continue
        job.events_acknowledged = event.seq
        data = storable(event.data)
        if event.operation is not None:
            data |= {"operation": event.operation, "phase": event.phase}
            await _operation_phase(session, job, event)
        events.add(session, job.id, event.at, storable(event.kind), storable(event.message), "driver", data)
        if event.kind == "validation":
            await _validation(session, job, event)
        elif event.kind == "checkpoint.saved":
            await _checkpoint(session, job, event)
        touch(job)


async def _operation_phase(session: AsyncSession, job: JobRow, event: DriverEvent) -> None:
    operation = await operation_queries.find(session, event.operation or "")
    if operation is None or operation.job_id != job.id:
        return
    if event.phase is not None:
        operations.enter_phase(operation, storable(event.phase), event.at)
    if event.done:
        state = OperationState.FAILED if event.failed else OperationState.DONE
        operations.end(operation, state, storable(event.message), event.at)
        if job.wanted_operation == operation.id:
            job.wanted_operation = None


async def _validation(session: AsyncSession, job: JobRow, event: DriverEvent) -> None:
    step, loss = event.data.get("step"), event.data.get("loss")
    if not isinstance(step, int) or not isinstance(loss, int | float):
        return
    row = (await jobs.metrics_of(session, job.id, [step])).get(step)
    if row is not None:
        row.record = {**row.record, "validation_loss": float(loss)}


async def _checkpoint(session: AsyncSession, job: JobRow, event: DriverEvent) -> None:
    seconds = event.data.get("seconds")
    intervals = await jobs.intervals_since(session, job.id, event.at - timedelta(seconds=1))
    interval = _interval_at(intervals, event.at)
    if isinstance(seconds, int | float) and interval is not None:
        interval.checkpoint_s += seconds


def _interval_at(intervals: Sequence[IntervalRow], moment: datetime) -> IntervalRow | None:
    """The stretch a moment lies in; the newest when it lies in none, as with clocks that differ."""
    for interval in intervals:
        if interval.began_at <= moment and (interval.ended_at is None or moment < interval.ended_at):
            return interval
    return intervals[-1] if intervals else None
