"""When an attempt is asked about, stopped, or given up: over every combination of what can be known."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from rubato.resources import DriverState
from rubato.states import JobState, can_change
from service.attempts.states import path
from service.cluster.ray import RayJob, RayJobState
from service.settings import Settings
from service.supervisor.policy import Facts, Step, Verdict, judge, plan

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SETTINGS = Settings()
HEARD = NOW - timedelta(seconds=5)
SILENT = NOW - timedelta(seconds=31)
LONG_AGO = NOW - timedelta(hours=1)

FACTS = Facts(
    job_state=JobState.RUNNING,
    forced=False,
    cancelled_at=None,
    finished_at=None,
    submitted_at=LONG_AGO,
    heartbeat_at=HEARD,
    stopped_at=None,
    listening_since=LONG_AGO,
)
OVER = RayJob(RayJobState.FAILED, "", LONG_AGO)
ALIVE = RayJob(RayJobState.RUNNING, "", None)


def test_a_job_that_runs_well_costs_nothing() -> None:
    assert plan(FACTS, NOW, SETTINGS) is Step.NOTHING
    assert plan(replace(FACTS, heartbeat_at=SILENT), NOW, SETTINGS) is Step.CHECK


def test_what_was_never_submitted() -> None:
    facts = replace(FACTS, submitted_at=None, heartbeat_at=None, job_state=JobState.STARTING)
    assert plan(facts, NOW, SETTINGS) is Step.SUBMIT
    ending = replace(facts, job_state=JobState.CANCELLING, cancelled_at=NOW)
    assert plan(ending, NOW, SETTINGS) is Step.CHECK
    assert judge(ending, None, True, NOW, SETTINGS) is Verdict.NEVER
    assert judge(ending, ALIVE, True, NOW, SETTINGS) is Verdict.ALIVE


@pytest.mark.parametrize(("forced", "patience"), [(False, 120), (True, 5)])
def test_patience_with_a_cancelled_job(forced: bool, patience: float) -> None:
    facts = replace(FACTS, job_state=JobState.CANCELLING, forced=forced, cancelled_at=NOW)
    assert plan(facts, NOW + timedelta(seconds=patience), SETTINGS) is not Step.STOP
    assert plan(facts, NOW + timedelta(seconds=patience + 1), SETTINGS) is Step.STOP
    asked = replace(facts, stopped_at=NOW + timedelta(seconds=patience + 1))
    assert plan(asked, NOW + timedelta(seconds=patience + 2), SETTINGS) is Step.CHECK


def test_two_signs_are_needed_and_enough() -> None:
    for heartbeat, seen, same in product((HEARD, SILENT), (ALIVE, OVER, None), (True, False)):
        facts = replace(FACTS, heartbeat_at=heartbeat)
        verdict = judge(facts, seen, same, NOW, SETTINGS)
        both = heartbeat is SILENT and seen is not ALIVE
        assert (verdict is not Verdict.ALIVE) == both, (heartbeat, seen, same)
    assert judge(replace(FACTS, heartbeat_at=SILENT), None, False, NOW, SETTINGS) is Verdict.NEW_CLUSTER
    assert judge(replace(FACTS, heartbeat_at=SILENT), None, True, NOW, SETTINGS) is Verdict.VANISHED


def test_silence_counts_only_while_somebody_listened() -> None:
    facts = replace(FACTS, heartbeat_at=LONG_AGO, listening_since=NOW - timedelta(seconds=29))
    assert judge(facts, OVER, True, NOW, SETTINGS) is Verdict.ALIVE
    assert judge(facts, OVER, True, NOW + timedelta(seconds=2), SETTINGS) is Verdict.FAILED


def test_an_attempt_that_died_before_it_spoke_is_given_up_sooner() -> None:
    facts = replace(FACTS, submitted_at=NOW, heartbeat_at=None, job_state=JobState.STARTING)
    died = RayJob(RayJobState.FAILED, "", NOW + timedelta(seconds=1))
    assert judge(facts, died, True, NOW + timedelta(seconds=5), SETTINGS) is Verdict.ALIVE
    assert judge(facts, died, True, NOW + timedelta(seconds=7), SETTINGS) is Verdict.FAILED


def test_what_was_told_to_stop_needs_no_silence() -> None:
    facts = replace(FACTS, stopped_at=HEARD, job_state=JobState.CANCELLING)
    assert judge(facts, RayJob(RayJobState.STOPPED, "", NOW), True, NOW, SETTINGS) is Verdict.STOPPED
    assert judge(facts, ALIVE, True, NOW, SETTINGS) is Verdict.ALIVE


@pytest.mark.parametrize(("old", "said"), list(product(JobState, DriverState)))
def test_what_a_driver_says_leads_only_along_the_table(old: JobState, said: DriverState) -> None:
    at = old
    for state in path(old, said):
        assert can_change(at, state)
        at = state
    if old.terminal:
        assert at is old
    elif old is JobState.CANCELLING:
        assert at in (JobState.CANCELLING, JobState.CANCELLED, JobState.SUCCEEDED)
    elif old in (JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.RECOVERING):
        assert at == said.value or said is DriverState.STARTING
