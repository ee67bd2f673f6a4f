"""The states of a job and the one table of transitions between them."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    RECOVERING = "RECOVERING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    CANCELLING = "CANCELLING"
    CANCELLED = "CANCELLED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def terminal(self) -> bool:
        """Whether a job in this state is over, for ever."""
        return not TRANSITIONS[self]


_S = JobState

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    _S.QUEUED: frozenset({_S.STARTING, _S.PAUSED, _S.CANCELLED, _S.FAILED}),
    _S.STARTING: frozenset({_S.RUNNING, _S.RECOVERING, _S.QUEUED, _S.PAUSING, _S.CANCELLING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.SUCCEEDED, _S.RESIZING, _S.RECOVERING, _S.PAUSING, _S.CANCELLING, _S.FAILED}),
    _S.RESIZING: frozenset({_S.RUNNING, _S.SUCCEEDED, _S.RECOVERING, _S.PAUSING, _S.CANCELLING, _S.FAILED}),
    _S.RECOVERING: frozenset({_S.RUNNING, _S.SUCCEEDED, _S.RESIZING, _S.PAUSING, _S.CANCELLING, _S.FAILED}),
    _S.PAUSING: frozenset({_S.PAUSED, _S.SUCCEEDED, _S.CANCELLING, _S.FAILED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.SUCCEEDED, _S.FAILED}),
    _S.CANCELLED: frozenset(),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
}


def can_change(old: JobState, new: JobState) -> bool:
    """Whether a job may go from one state to another."""
    return new in TRANSITIONS[old]
