"""Which replicas are started when, and what is said when one cannot be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from workers.driver.assignment import Assignment
from workers.driver.crew import Crew
from workers.driver.journal import Journal
from workers.driver.replicas import Ending, Replicas
from workers.engine.run import RunDirectory

FREE = {"CPU": 4.0}


class Stage(Replicas):
    """Replicas of two workers that only seem to run."""

    def __init__(self) -> None:
        self.alive_names: set[str] = set()
        self.started: list[str] = []
        self.ended = lambda ending: None

    @property
    def running(self) -> bool:
        return bool(self.alive_names)

    def alive(self, name: str) -> bool:
        return name in self.alive_names

    def start(self, assignment: Assignment) -> None:
        self.alive_names.add(assignment.replica)
        self.started.append(assignment.replica)

    def forget(self, name: str) -> None:
        self.alive_names.remove(name)

    @property
    def needs(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def shortage(self, available: Any) -> str | None:
        return None if available["CPU"] >= 2 else f"{available['CPU']:g} CPU free"


class Play:
    def __init__(self, run: RunDirectory) -> None:
        self.stage = Stage()
        self.journal = Journal(run)
        self.failed: list[tuple[str, str]] = []
        self.crew = Crew(
            self.stage,
            lambda name: Assignment(spec={}, run_dir="", log_dir="", epoch=1, replica=name, host="", port=0, secret=""),
            self.journal,
            lambda: None,
            lambda code, message: self.failed.append((code, message)),
        )

    async def end(self, name: str, kind: Any, cause: str = "why") -> None:
        self.stage.ended(Ending(name, kind, cause))
        await asyncio.sleep(0)  # it is heard in the loop

    def told(self) -> list[tuple[str, str]]:
        return [(event.kind, event.data["replica"]) for event in self.journal.pending()[0]]


@pytest.fixture
async def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(ray, "available_resources", lambda: dict(FREE))
    return Play(RunDirectory.create(tmp_path / "run"))


async def test_what_is_wanted_and_not_there_is_started_once(play: Play) -> None:
    play.crew.want(2, ())
    await play.crew.start_missing()
    await play.crew.start_missing()
    assert play.stage.started == ["replica-0", "replica-1"]
    await play.end("replica-1", "returned")
    await play.crew.start_missing()
    assert play.stage.started[2:] == ["replica-1"]


async def test_who_finds_no_room_says_so_once_and_is_tried_again_later(play: Play) -> None:
    play.crew.want(3, ())
    await play.crew.start_missing()
    assert play.told()[-1] == ("replica.waiting", "replica-2"), "the first two will take what is free"
    await play.end("replica-2", "unplaced", "0 CPU free")
    await play.crew.start_missing()
    assert play.stage.started == ["replica-0", "replica-1", "replica-2"], "not at once"
    assert "replica-2" in play.crew.waits()[0]
    play.crew.want(3, ())  # somebody asks again
    await play.crew.start_missing()
    assert play.stage.started[3:] == ["replica-2"]
    assert [kind for kind, _ in play.told()] == ["replica.starting"] * 3 + ["replica.waiting"]
    play.crew.arrived("replica-2")
    assert play.crew.waits() == []


async def test_a_replica_that_fails_before_anybody_is_there_is_given_up(play: Play) -> None:
    play.crew.want(1, ())
    await play.crew.start_missing()
    play.crew.in_trouble("replica-0", "No module named 'x'")
    play.crew.in_trouble("replica-0", "No module named 'x'")
    assert not play.failed
    play.crew.in_trouble("replica-0", "No module named 'x'")
    code, message = play.failed[0]
    assert code == "replica_cannot_start"
    assert "No module named 'x'" in message


async def test_losing_workers_that_were_there_is_not_a_start_in_vain(play: Play) -> None:
    play.crew.want(1, ())
    await play.crew.start_missing()
    for _ in range(5):
        play.crew.arrived("replica-0")
        play.crew.in_trouble("replica-0", "killed")
    assert not play.failed
    assert ("replica.restarting", "replica-0") not in play.told(), "the loss itself is told elsewhere"


async def test_nothing_is_started_once_it_is_over(play: Play) -> None:
    play.crew.want(1, ())
    await play.crew.start_missing()
    play.crew.arrived("replica-0")
    play.crew.let_go()
    assert play.crew.joined
    await play.end("replica-0", "failed")
    assert not play.crew.joined
    assert not play.failed


async def test_who_is_not_wanted_any_more_is_not_missed(play: Play) -> None:
    play.crew.want(2, ())
    await play.crew.start_missing()
    play.crew.want(1, ("replica-0",))
    await play.end("replica-1", "failed")
    await play.crew.start_missing()
    assert play.stage.started == ["replica-0", "replica-1"]
    assert play.told() == [("replica.starting", "replica-0"), ("replica.starting", "replica-1")]
