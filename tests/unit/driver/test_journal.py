"""The record of a run over several attempts, and what of it is still to be told."""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rubato.resources import Metric
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


def test_a_step_that_is_told_again_is_told_once_but_one_done_again_is_told_again(run: RunDirectory) -> None:
    journal = Journal(run)
    for step, again in ((1, False), (2, False), (2, True), (3, True), (4, False), (2, False), (2, True)):
        journal.metric(STEP | {"step": step, "again": again})
    told = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [each["step"] for each in told] == [1, 2, 3, 4, 2]
    assert "again" not in told[0]


def test_metrics_and_samples_are_on_the_board_too(run: RunDirectory) -> None:
    Journal(run).metric(STEP)
    assert not run.tensorboard.exists()
    journal = Journal(run, board=True)
    journal.metric(STEP)
    journal.event("sample", "text", {"step": 1, "prompt": "a", "text": "b"})
    assert len(list(run.tensorboard.iterdir())) == 1


def test_going_back_is_counted(run: RunDirectory) -> None:
    journal = Journal(run)
    for kind in ("spike.rolled_back", "spike.skipped", "spike.rolled_back"):
        journal.event(kind, "a spike")
    assert journal.rollbacks == 2


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


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond ``size`` bytes: the write that would is cut short, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def kinds(run: RunDirectory) -> list[str]:
    return [json.loads(line)["kind"] for line in run.events.read_text().splitlines()]


def test_a_full_disk_costs_nothing_once_there_is_room_again(run: RunDirectory) -> None:
    journal = Journal(run)
    journal.event("a", "first")
    size = run.events.stat().st_size
    with full_disk(size + 10):
        journal.event("b", "does not fit")
        journal.event("c", "nor does this")
        assert run.events.stat().st_size == size, "half a line is taken back"
        assert [event.kind for event in journal.pending()[0]] == ["a"], "what has no line has no number"
        journal.acknowledged(1, 0)
        assert not journal.all_told
        assert Journal(run).pending()[0][0].kind == "a", "another attempt can read it"
    assert [(event.seq, event.kind) for event in journal.pending()[0]] == [(2, "b"), (3, "c")]
    assert kinds(run) == ["a", "b", "c"]
    journal.acknowledged(3, 0)
    assert journal.all_told


def test_half_a_line_that_could_not_be_taken_back_is_not_glued_to_the_next(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(run)
    journal.event("a", "first")
    size = run.events.stat().st_size
    with full_disk(size + 10), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda handle, length: os.fstat(-1))
        journal.event("b", "does not fit")
        assert run.events.stat().st_size == size + 10
    journal.event("c", "after it")
    assert kinds(run) == ["a", "b", "c"]


def test_what_waits_for_room_is_bounded_and_the_gap_is_told(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.driver.record.KEPT", 2)
    journal = Journal(run)
    with full_disk(0):
        for kind in "abcd":
            journal.event(kind, kind)
    events, _ = journal.pending()
    assert [event.kind for event in events] == ["c", "d", "record.incomplete"]
    assert events[-1].data == {"lost": 2}


def test_a_line_that_cannot_be_read_is_told_of_and_stops_nothing(run: RunDirectory) -> None:
    journal = Journal(run)
    journal.event("a", "first")
    journal.metric(STEP)
    for path in (run.events, run.metrics):
        with path.open("a") as file:
            file.write('{"at": "2026-{"at": 1}\n')
    again = Journal(run)
    again.event("c", "third")
    again.metric(STEP | {"step": 2})
    events, metrics = again.pending()
    assert [(event.seq, event.kind) for event in events] == [(1, "a"), (2, "record.unreadable"), (3, "c")]
    assert [(item.seq, item.metric.step) for item in metrics] == [(1, 1), (2, 1), (3, 2)]
    again.acknowledged(3, 3)
    assert again.all_told


def test_who_was_overtaken_adds_no_line(run: RunDirectory) -> None:
    assert run.claim(1)
    old = Journal(run, lambda: run.holds(1))
    old.event("a", "of the first")
    assert run.claim(2)
    new = Journal(run, lambda: run.holds(2))
    old.event("late", "of the first, which was held up")
    old.metric(STEP)
    new.event("b", "of the second")
    assert old.fenced
    assert not new.fenced
    assert kinds(run) == ["a", "b"]
    assert not run.metrics.exists() or not run.metrics.read_text()
    assert [event.seq for event in new.pending()[0]] == [1, 2]


def test_who_counts_the_lines_keeps_others_from_adding_any(run: RunDirectory) -> None:
    old = Journal(run)
    old.event("a", "first")
    with run.events.open("r+b") as counting:
        fcntl.flock(counting, fcntl.LOCK_EX)
        old.event("b", "at that moment")
        assert kinds(run) == ["a"]
    old.write()
    assert kinds(run) == ["a", "b"]


def test_a_long_history_is_counted_and_what_is_acknowledged_is_passed_over_unparsed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.driver.record.BLOCK", 1000)  # many blocks, lines across their borders
    first = Journal(run)
    for number in range(1, 301):
        first.event("generation.formed" if number == 7 else "a", str(number), {"generation": number})
        first.metric(STEP | {"step": number, "generation": number // 100})
    parsed: list[int] = []
    original = Metric.model_validate
    monkeypatch.setattr(Metric, "model_validate", lambda record: parsed.append(record["step"]) or original(record))
    second = Journal(run)
    assert second.last_generation == 7
    assert parsed == []
    second.acknowledged(298, 299)
    second.event("b", "301")
    events, metrics = second.pending()
    assert [(event.seq, event.message) for event in events] == [(299, "299"), (300, "300"), (301, "301")]
    assert [(item.seq, item.metric.step) for item in metrics] == [(300, 300)]
    assert parsed == [300]
