"""The record of a run over several attempts, and what of it is still to be told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from workers.driver.journal import EVENTS_A_CALL, Journal
from workers.engine.run import RunDirectory

STEP: dict[str, Any] = {
    "step": 1,
    "loss": 2.0,
    "grad_norm": 1.0,
    "lr": 0.1,
    "tokens": 10,
    "tokens_per_s": 5.0,
    "step_s": 2.0,
    "mfu": None,
    "generation": 4,
    "data": 1,
    "validation_loss": None,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_lines_are_numbered_and_told_until_they_are_acknowledged(run: RunDirectory) -> None:
    journal = Journal(run)
    journal.event("a", "first", {"x": 1})
    journal.event("b", "second", operation="op", phase="done", done=True)
    journal.metric(STEP)
    events, metrics = journal.pending()
    assert [(event.seq, event.kind, event.operation) for event in events] == [(1, "a", None), (2, "b", "op")]
    assert [(item.seq, item.metric.loss) for item in metrics] == [(1, 2.0)]
    journal.acknowledged(1, 0)
    assert [event.seq for event in journal.pending()[0]] == [2]
    assert not journal.all_told
    journal.acknowledged(2, 1)
    assert journal.all_told
    assert [json.loads(line)["kind"] for line in run.events.read_text().splitlines()] == ["a", "b"]


def test_the_next_attempt_goes_on_where_the_last_one_was_cut_off(run: RunDirectory) -> None:
    first = Journal(run)
    first.event("generation.formed", "three", {"generation": 3})
    first.metric(STEP)
    with run.events.open("a") as file:
        file.write('{"at": "2026-')  # its writer was killed in the middle of a line
    second = Journal(run)
    assert second.last_generation == 4
    second.event("attempt.started", "again")
    assert [event.seq for event in second.pending()[0]] == [1, 2], "what nobody acknowledged is told again"
    assert [json.loads(line)["kind"] for line in run.events.read_text().splitlines()] == [
        "generation.formed",
        "attempt.started",
    ]


def test_a_loss_that_is_no_number_is_kept(run: RunDirectory) -> None:
    Journal(run).metric(STEP | {"loss": math.nan})
    assert math.isnan(Journal(run).pending()[1][0].metric.loss)


def test_one_call_carries_a_bounded_number(run: RunDirectory) -> None:
    journal = Journal(run)
    for number in range(EVENTS_A_CALL + 5):
        journal.event("a", str(number))
    assert len(journal.pending()[0]) == EVENTS_A_CALL
    journal.acknowledged(EVENTS_A_CALL, 0)
    assert len(journal.pending()[0]) == 5
