"""What a driver shows of its workers, and how it tells of generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rubato.spec import parse_spec
from workers.driver.chronicle import Chronicle
from workers.driver.journal import Journal
from workers.driver.operations import Command
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.orders import Ended, Formed
from workers.driver.rendezvous.server import Link
from workers.driver.view import View
from workers.engine.run import RunDirectory

SPEC = parse_spec(
    {
        "name": "small",
        "model": {"preset": "tiny"},
        "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 16},
        "train": {"steps": 10, "global_batch": 8},
        "parallelism": {"tensor": 2, "micro_batch": 2},
        "workers": {"min": 2, "max": 8},
    }
)


def link(key: int, replica: str, tensor: int, incarnation: str = "x") -> Link:
    hello = protocol.Hello(
        secret="",
        replica=replica,
        incarnation=incarnation,
        pipeline=0,
        tensor=tensor,
        pid=1000 + key,
        node_ip="10.0.0.1",
        node_id="n",
    )
    writer: Any = None
    return Link(key, hello, tensor, writer, 0.0)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(RunDirectory.create(tmp_path / "run"))


def events(journal: Journal) -> list[Any]:
    return journal.pending()[0]


def test_workers_are_shown_by_rank_and_the_lost_until_they_are_replaced() -> None:
    view = View(SPEC)
    a0, a1, b0, b1 = links = [link(1, "a", 0), link(2, "a", 1), link(3, "b", 0), link(4, "b", 1)]
    assert view.layout is None
    view.generation_formed(Formed(1, ("b", "a"), (3, 4, 1, 2), None, None, ()))
    members = view.members(links)
    assert [(member.replica, member.data, member.tensor, member.rank) for member in members] == [
        ("b", 0, 0, 0),
        ("b", 0, 1, 1),
        ("a", 1, 0, 2),
        ("a", 1, 1, 3),
    ]
    assert members[2].pid == 1001
    assert view.layout
    assert (view.layout.data, view.layout.tensor, view.layout.accumulation) == (2, 2, 2)

    view.lost(b1)
    assert [member.state for member in view.members([a0, a1, b0])] == ["training", "lost", "training", "training"]
    view.generation_formed(Formed(2, ("a",), (1, 2), 3, None, ()))
    view.arrived(link(5, "b", 1, "y"))
    assert {member.state for member in view.members([a0, a1])} == {"training"}
    view.lost(b0)
    view.keep_lost(["a"])
    assert len(view.members([a0, a1])) == 2


def test_a_replica_is_ready_once_all_its_workers_are() -> None:
    view = View(SPEC)
    first, second = links = [link(1, "a", 0), link(2, "a", 1)]
    assert view.ready(first, links[:1]) is None
    assert view.ready(first, links) is None, "it says so at each generation"
    assert view.ready(second, links) == first.incarnation
    assert view.ready(second, links) is None


def test_a_generation_is_told_of_when_it_has_trained_with_the_pause_it_cost(journal: Journal) -> None:
    chronicle = Chronicle(journal)
    chronicle.formed(Formed(1, ("a",), (1, 2), None, None, ()))
    assert not chronicle.proved
    assert chronicle.stepped(1, 41, 10.0), "a checkpoint of step 40 was loaded"
    assert not chronicle.stepped(2, 41, 10.1)
    chronicle.formed(Formed(2, ("a", "b"), (1, 2, 3, 4), 41, "a", ("b",)))
    assert not chronicle.stepped(2, 41, 11.0), "who catches up trains nothing"
    assert chronicle.stepped(3, 42, 12.5)
    first, second = events(journal)
    assert (first.data["step"], first.data["pause_s"]) == (40, None)
    assert (second.data["step"], second.data["pause_s"], second.data["source"]) == (41, 1.5, "a")


def test_a_generation_that_never_trained_is_not_told_of(journal: Journal) -> None:
    chronicle = Chronicle(journal)
    chronicle.formed(Formed(1, ("a",), (1, 2), None, None, ()))
    chronicle.ended(Ended(1, "a worker of a was lost"))
    assert chronicle.proved
    assert not events(journal)


def test_a_command_passes_each_phase_once_and_ends_once(journal: Journal) -> None:
    command = Command(journal, "scale", "op-1")
    for phase in ("accepted", "starting", "regrouping", "regrouping", "done", "superseded"):
        command.enter(phase, phase)
    told = [(event.kind, event.operation, event.phase, event.done, event.failed) for event in events(journal)]
    assert told == [
        ("scale.accepted", "op-1", "accepted", False, False),
        ("scale.starting", "op-1", "starting", False, False),
        ("scale.regrouping", "op-1", "regrouping", False, False),
        ("scale.done", "op-1", "done", True, False),
    ]
    json.dumps([event.model_dump(mode="json") for event in events(journal)])
