"""The table of transitions, every pair of it."""

from __future__ import annotations

from itertools import product

import pytest

from rubato.states import TRANSITIONS, JobState, can_change

# Written out a second time on purpose, from the user's point of view: a slip in the table shows here.
STEPS = """
QUEUED      -> STARTING PAUSED CANCELLED FAILED
STARTING    -> RUNNING RECOVERING QUEUED PAUSING CANCELLING FAILED
RUNNING     -> SUCCEEDED RESIZING RECOVERING PAUSING CANCELLING FAILED
RESIZING    -> RUNNING SUCCEEDED RECOVERING PAUSING CANCELLING FAILED
RECOVERING  -> RUNNING SUCCEEDED RESIZING PAUSING CANCELLING FAILED
PAUSING     -> PAUSED SUCCEEDED CANCELLING FAILED
PAUSED      -> QUEUED CANCELLED
CANCELLING  -> CANCELLED SUCCEEDED FAILED
"""
ALLOWED = {
    (JobState(old.strip()), JobState(new))
    for old, _, targets in (line.partition("->") for line in STEPS.strip().splitlines())
    for new in targets.split()
}
TERMINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


@pytest.mark.parametrize(("old", "new"), list(product(JobState, JobState)))
def test_every_pair(old: JobState, new: JobState) -> None:
    assert can_change(old, new) is ((old, new) in ALLOWED)


@pytest.mark.parametrize("state", list(JobState))
def test_terminal_states_are_those_that_never_change(state: JobState) -> None:
    assert state.terminal is (state in TERMINAL)
    assert state in TRANSITIONS


def test_every_state_can_be_reached_and_every_job_can_end() -> None:
    reached = {JobState.QUEUED}
    while more := {new for old in reached for new in TRANSITIONS[old]} - reached:
        reached |= more
    assert reached == set(JobState)
    for start in set(JobState) - TERMINAL:
        ends = {start}
        while more := {new for old in ends for new in TRANSITIONS[old]} - ends:
            ends |= more
        assert JobState.CANCELLED in ends
