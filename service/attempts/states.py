"""From what a driver says of its attempt to the state of the job."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.resources import DriverState
from rubato.states import JobState, can_change

_ENDING = frozenset({JobState.CANCELLING, JobState.PAUSING})


def path(old: JobState, said: DriverState) -> Sequence[JobState]:
    """The states a job passes through, one after the other; empty when it stays as it is.

    A driver reports now and then, and not at all while the control plane is away, so the states in between that it
    must have passed are passed here too.
    """
    new = JobState(said.value)
    if old.terminal or old is new:
        return ()
    if old is JobState.CANCELLING and new is JobState.FAILED:
        # Whoever cancels wants the job to end; how its driver ended is in the timeline.
        return (JobState.CANCELLED,)
    if old in _ENDING and not new.terminal:
        return ()
    if new is JobState.STARTING:
        return ()  # a job that recovers is RECOVERING for its users until it trains again
    if can_change(old, new):
        return (new,)
    for between in (JobState.RUNNING, JobState.CANCELLING):
        if can_change(old, between) and can_change(between, new):
            return (between, new)
    return ()
