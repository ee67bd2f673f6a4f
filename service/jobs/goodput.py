"""Where the seconds of a job went, from the stretches it spent in each state and what was measured inside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rubato.resources import Goodput
from rubato.states import JobState

_WAITING = frozenset({JobState.QUEUED, JobState.PAUSED})
_SAVING = frozenset({JobState.PAUSING, JobState.CANCELLING})  # what is left there is the way to a last checkpoint


class Interval(Protocol):
    """A stretch of time in one state; the last one of a job has no end while the job lasts."""

    @property
    def state(self) -> str: ...
    @property
    def began_at(self) -> datetime: ...
    @property
    def ended_at(self) -> datetime | None: ...
    @property
    def step_s(self) -> float: ...
    @property
    def redone_s(self) -> float: ...
    @property
    def checkpoint_s(self) -> float: ...


@dataclass
class _Account:
    training: float = 0.0
    checkpoint: float = 0.0
    starting: float = 0.0
    recovering: float = 0.0
    resizing: float = 0.0
    redone: float = 0.0
    waiting: float = 0.0

    def book(self, state: JobState, seconds: float, steps: float, redone: float, checkpoint: float) -> None:
        if state in _WAITING:
            self.waiting += seconds
            return
        # A measured part never exceeds the stretch it lies in, so that the parts add up to the whole.
        redone = min(redone, seconds)
        checkpoint = min(checkpoint, seconds - redone)
        rest = seconds - redone - checkpoint
        self.redone += redone
        self.checkpoint += checkpoint
        if state is JobState.RUNNING:
            self.training += rest
            return
        # While replicas come, go and return the others train on, and say so step by step.
        trained = min(steps, rest)
        self.training += trained
        idle = rest - trained
        if state is JobState.STARTING:
            self.starting += idle
        elif state is JobState.RESIZING:
            self.resizing += idle
        elif state is JobState.RECOVERING:
            self.recovering += idle
        elif state in _SAVING:
            self.checkpoint += idle


def goodput(intervals: Iterable[Interval], now: datetime) -> Goodput:
    """The seconds by kind up to ``now``. They add up to the life of the job so far."""
    account = _Account()
    for interval in intervals:
        seconds = max(0.0, ((interval.ended_at or now) - interval.began_at).total_seconds())
        account.book(JobState(interval.state), seconds, interval.step_s, interval.redone_s, interval.checkpoint_s)
    busy = (
        account.training
        + account.checkpoint
        + account.starting
        + account.recovering
        + account.resizing
        + account.redone
    )
    return Goodput(
        ratio=account.training / busy if busy > 0 else None,
        training_s=account.training,
        checkpoint_s=account.checkpoint,
        starting_s=account.starting,
        recovering_s=account.recovering,
        resizing_s=account.resizing,
        redone_s=account.redone,
        waiting_s=account.waiting,
    )
