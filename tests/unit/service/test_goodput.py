"""Every second of a job is booked once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.states import JobState
from service.jobs.goodput import goodput

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Stretch:
    state: str
    began_at: datetime
    ended_at: datetime | None
    step_s: float = 0.0
    redone_s: float = 0.0
    checkpoint_s: float = 0.0


def stretch(state: JobState, seconds: float, **measured: float) -> Stretch:
    return Stretch(state, START, START + timedelta(seconds=seconds), **measured)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (JobState.QUEUED, "waiting_s"),
        (JobState.PAUSED, "waiting_s"),
        (JobState.STARTING, "starting_s"),
        (JobState.RUNNING, "training_s"),
        (JobState.RESIZING, "resizing_s"),
        (JobState.RECOVERING, "recovering_s"),
        (JobState.PAUSING, "checkpoint_s"),
        (JobState.CANCELLING, "checkpoint_s"),
    ],
)
def test_kinds(state: JobState, kind: str) -> None:
    booked = goodput([stretch(state, 8)], START).model_dump(exclude={"ratio"})
    assert {name: seconds for name, seconds in booked.items() if seconds} == {kind: 8}


def test_training_goes_on_while_replicas_come_and_go() -> None:
    booked = goodput([stretch(JobState.RESIZING, 10, step_s=7, checkpoint_s=1)], START)
    assert (booked.training_s, booked.checkpoint_s, booked.resizing_s) == (7, 1, 2)


def test_a_stretch_that_lasts_counts_up_to_now() -> None:
    booked = goodput([Stretch(JobState.RUNNING, START, None)], START + timedelta(seconds=5))
    assert (booked.training_s, booked.ratio) == (5, 1.0)


def test_the_ratio_leaves_out_waiting() -> None:
    booked = goodput(
        [stretch(JobState.QUEUED, 100), stretch(JobState.STARTING, 5), stretch(JobState.RUNNING, 15)], START
    )
    assert booked.ratio == 0.75
    assert goodput([stretch(JobState.QUEUED, 100)], START).ratio is None


seconds = st.floats(0, 1e6)


@given(st.lists(st.tuples(st.sampled_from(JobState), seconds, seconds, seconds, seconds)))
def test_the_parts_add_up_to_the_whole(stretches: list[tuple[JobState, float, float, float, float]]) -> None:
    alive = [given for given in stretches if not given[0].terminal]
    intervals = [
        stretch(state, length, step_s=steps, redone_s=redone, checkpoint_s=saved)
        for state, length, steps, redone, saved in alive
    ]
    booked = goodput(intervals, START)
    parts = booked.model_dump(exclude={"ratio"}).values()
    whole = sum((interval.ended_at - START).total_seconds() for interval in intervals if interval.ended_at)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(whole, abs=1e-3)
    assert booked.ratio is None or 0 <= booked.ratio <= 1
