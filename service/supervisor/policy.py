"""What to do about an attempt, as a function of what is known of it. No input, no output, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from rubato.states import JobState
from service.cluster.ray import RayJob, RayJobState
from service.settings import Settings

# A driver that reported its end has this long to leave before it is stopped.
_LEAVE = timedelta(seconds=60)
# Between two requests to stop the same attempt.
_STOP_AGAIN = timedelta(seconds=10)
# An attempt nobody ever heard of is given up so long after Ray saw it end, rather than after a whole timeout.
_STILLBORN = timedelta(seconds=5)


@dataclass(frozen=True)
class Facts:
    """What the database knows of an open attempt and of its job."""

    job_state: JobState
    forced: bool
    cancelled_at: datetime | None
    finished_at: datetime | None
    submitted_at: datetime | None
    heartbeat_at: datetime | None
    stopped_at: datetime | None
    listening_since: datetime  # before that no heartbeat could arrive here


class Step(Enum):
    NOTHING = auto()
    SUBMIT = auto()
    CHECK = auto()
    STOP = auto()


def plan(facts: Facts, now: datetime, settings: Settings) -> Step:
    """What to do next. CHECK asks Ray and then ``judge``."""
    if facts.submitted_at is None:
        ending = facts.job_state.terminal or facts.job_state is JobState.CANCELLING
        return Step.CHECK if ending else Step.SUBMIT
    if _stop_is_due(facts, now, settings):
        return Step.STOP
    if facts.job_state.terminal or facts.stopped_at is not None or facts.heartbeat_at is None:
        return Step.CHECK
    return Step.CHECK if silent(facts, now, settings) else Step.NOTHING


def silent(facts: Facts, now: datetime, settings: Settings) -> bool:
    """Whether a driver that lives would have been heard by now: the first sign of its loss."""
    last = facts.heartbeat_at or facts.submitted_at
    if last is None:
        return False
    return now - max(last, facts.listening_since) > timedelta(seconds=settings.heartbeat_timeout)


class Verdict(Enum):
    """ALIVE: it is left alone, perhaps for want of a second sign. NEVER: Ray was never given it. NEW_CLUSTER: the
    cluster it ran on is gone. The others: how it ended."""

    ALIVE = auto()
    NEVER = auto()
    NEW_CLUSTER = auto()
    VANISHED = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    STOPPED = auto()


_HOW = {
    RayJobState.SUCCEEDED: Verdict.SUCCEEDED,
    RayJobState.FAILED: Verdict.FAILED,
    RayJobState.STOPPED: Verdict.STOPPED,
}


def judge(facts: Facts, seen: RayJob | None, same_cluster: bool, now: datetime, settings: Settings) -> Verdict:
    """Whether an attempt is over.

    Ray's word alone is not enough, since after a restart of its head it may be wrong both ways. The second sign is
    the silence of the driver, or that it was told to stop, or that it said itself that it ends.
    """
    if facts.submitted_at is None and seen is None:
        return Verdict.NEVER
    if seen is not None and not seen.state.over:
        return Verdict.ALIVE
    second_sign = facts.stopped_at is not None or facts.job_state.terminal or silent(facts, now, settings)
    if not second_sign and facts.heartbeat_at is None and seen is not None and seen.ended_at is not None:
        # Measured from when this control plane could have heard it, by its own clock and not by Ray's.
        began = max(seen.ended_at, facts.listening_since, facts.submitted_at or facts.listening_since)
        second_sign = now - began > _STILLBORN
    if not second_sign:
        return Verdict.ALIVE
    if seen is None:
        return Verdict.VANISHED if same_cluster else Verdict.NEW_CLUSTER
    return _HOW[seen.state]


def _stop_is_due(facts: Facts, now: datetime, settings: Settings) -> bool:
    if facts.stopped_at is not None and now - facts.stopped_at < _STOP_AGAIN:
        return False
    if facts.job_state is JobState.CANCELLING and facts.cancelled_at is not None:
        patience = settings.force_timeout if facts.forced else settings.drain_timeout
        return now - facts.cancelled_at > timedelta(seconds=patience)
    if facts.job_state.terminal and facts.finished_at is not None:
        return now - facts.finished_at > _LEAVE
    return False
