"""The tables: projects, jobs, their attempts, operations, events, metrics and how long they spent in a state."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, Index, Integer, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

# SQLite counts rows by itself only in a column of exactly this type.
Counter = BigInteger().with_variant(Integer, "sqlite")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment. SQLite knows no time zones, so it is UTC on the way in and on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """UTC, refusing moments that do not say where they are."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Table(DeclarativeBase):
    """The base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
    }


class JobRow(Table):
    """A job. Everything that belongs to it is written with this row locked, so its history has one order."""

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(Counter, primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(63), index=True)
    project: Mapped[str] = mapped_column(String(63))
    priority: Mapped[int]
    spec: Mapped[dict[str, Any]]
    run_dir: Mapped[str] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_hash: Mapped[str] = mapped_column(String(64))

    state: Mapped[str] = mapped_column(String(16), index=True)
    reason_code: Mapped[str] = mapped_column(Text)
    reason_message: Mapped[str] = mapped_column(Text)
    reason_actor: Mapped[str] = mapped_column(String(16))
    reason_at: Mapped[datetime]

    # What is wanted of the attempt. The version grows with every change of the others.
    wanted_version: Mapped[int] = mapped_column(default=1)
    wanted_workers: Mapped[int]
    wanted_operation: Mapped[str | None] = mapped_column(String(32))
    wanted_cancel: Mapped[str] = mapped_column(String(8), default="no")
    # Between these sizes the queue chooses; none: between those of the spec. Its user set them.
    size_min: Mapped[int | None]
    size_max: Mapped[int | None]
    sized_at: Mapped[datetime | None]  # when the size that is wanted changed last
    cancelled_at: Mapped[datetime | None]

    # What was seen of it.
    epoch: Mapped[int] = mapped_column(default=0)
    generation: Mapped[int] = mapped_column(default=0)
    layout: Mapped[dict[str, Any] | None]
    members: Mapped[list[dict[str, Any]]]
    restarts: Mapped[dict[str, Any]]
    restarts_before: Mapped[dict[str, Any]]  # of the attempts before the newest
    step: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    step_s: Mapped[float | None]
    mfu: Mapped[float | None]
    events_acknowledged: Mapped[int] = mapped_column(BigInteger, default=0)
    metrics_acknowledged: Mapped[int] = mapped_column(BigInteger, default=0)

    # Attempts in a row that ended without a new step, when the last was lost, and when the next may begin.
    idle_attempts: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[datetime | None]
    lost_at: Mapped[datetime | None]

    revision: Mapped[int] = mapped_column(BigInteger, default=1)
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (Index("ix_jobs_project_number", "project", "number"),)


class AttemptRow(Table):
    """One Ray job run for a job. Its id is the submission id, so Ray itself refuses to run it twice."""

    __tablename__ = "attempts"

    id: Mapped[str] = mapped_column(String(48), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    epoch: Mapped[int]
    workers: Mapped[int]
    # Kept as it is, since a crash between this row and Ray must be able to submit with the token of the first try.
    token: Mapped[str] = mapped_column(String(64))
    cluster_session: Mapped[str] = mapped_column(String(128))
    state: Mapped[str] = mapped_column(String(16), index=True)
    cause: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]
    submitted_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    reported_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    lease_token: Mapped[str | None] = mapped_column(String(32))
    lease_until: Mapped[datetime | None]


class OperationRow(Table):
    """A commanded change of a job."""

    __tablename__ = "operations"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    request: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    message: Mapped[str | None] = mapped_column(Text)
    phases: Mapped[list[dict[str, Any]]]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class EventRow(Table):
    """An entry of a job's timeline."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(Text)
    message: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(16))
    data: Mapped[dict[str, Any]]

    # SQLite would give the id of a deleted row to the next one, and a cursor must never go back.
    __table_args__ = (Index("ix_events_job_id_id", "job_id", "id"), {"sqlite_autoincrement": True})


class MetricRow(Table):
    """What a step reported. A step that is done again replaces what it said the first time."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    record: Mapped[dict[str, Any]]


class IntervalRow(Table):
    """A stretch of time a job spent in one state, with what was measured inside it."""

    __tablename__ = "state_intervals"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    state: Mapped[str] = mapped_column(String(16))
    reason_code: Mapped[str] = mapped_column(Text)
    began_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    step_s: Mapped[float] = mapped_column(default=0.0)
    redone_s: Mapped[float] = mapped_column(default=0.0)
    checkpoint_s: Mapped[float] = mapped_column(default=0.0)


class ProjectRow(Table):
    """What a project may have at one time, none: no limit; and what it had of late, as a moving average."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    max_workers: Mapped[int | None]
    max_gpus: Mapped[int | None]
    max_running_jobs: Mapped[int | None]
    usage: Mapped[float] = mapped_column(default=0.0)
    usage_at: Mapped[datetime | None]


class LockRow(Table):
    """A row that is locked by whoever decides something over all jobs, such as who is admitted."""

    __tablename__ = "locks"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
