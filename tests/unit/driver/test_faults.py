"""Whose fault a loss is, and how many are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from workers.driver.faults import Budget, Casualties, Verdict
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.server import Link, Loss


def link(key: int, incarnation: str = "x") -> Link:
    hello = protocol.Hello(
        secret="", replica="a", incarnation=incarnation, pipeline=0, tensor=key, pid=key, node_ip="", node_id=""
    )
    writer: Any = None
    return Link(key, hello, key, writer, 0.0)


def test_the_worker_that_went_without_a_word_is_the_one_that_was_lost() -> None:
    casualties = Casualties()
    assert casualties.lost(link(1), Loss("replica", "connection closed by peer"), 2) is None
    dead = link(2)
    assert casualties.lost(dead, Loss("unknown", "killed"), 1) == Verdict("hardware", "killed", dead)
    assert casualties.lost(link(3), Loss("replica", "connection closed by peer"), 0) is None


def test_what_mates_of_a_dead_worker_run_into_is_no_fault_of_the_program() -> None:
    casualties = Casualties()
    assert casualties.lost(link(1), Loss("program", "KeyError"), 1) is None
    verdict = casualties.lost(link(2), Loss("unknown", "killed"), 0)
    assert verdict
    assert verdict.fault == "hardware"


def test_an_error_that_nobody_died_of_is_the_programs() -> None:
    casualties = Casualties()
    guilty = link(1)
    assert casualties.lost(guilty, Loss("program", "KeyError: 'x'"), 1) is None
    assert casualties.lost(link(2), Loss("replica", "peer"), 0) == Verdict("program", "KeyError: 'x'", guilty)


def test_when_all_blame_the_connection_it_is_the_machines() -> None:
    casualties = Casualties()
    first = link(1)
    assert casualties.lost(first, Loss("replica", "timed out"), 1) is None
    assert casualties.lost(link(2), Loss("replica", "closed"), 0) == Verdict("hardware", "timed out", first)


def test_what_the_user_has_to_put_right_is_said_at_once_and_once() -> None:
    casualties = Casualties()
    verdict = casualties.lost(link(1), Loss("user", "the corpus is empty"), 3)
    assert verdict
    assert verdict.fault == "user"
    assert casualties.lost(link(2), Loss("user", "the corpus is empty"), 2) is None


def test_each_start_of_a_replica_is_judged_anew() -> None:
    casualties = Casualties()
    assert casualties.lost(link(1), Loss("unknown", "killed"), 0)
    assert casualties.lost(link(2, "y"), Loss("unknown", "killed"), 0)


@pytest.mark.parametrize(("limit", "allowed"), [(0, 0), (2, 2), (-1, 50)])
def test_a_budget_is_spent_one_by_one(limit: int, allowed: int) -> None:
    budget = Budget(limit)
    granted = 0
    while granted < 50 and budget.spend():
        granted += 1
    assert granted == allowed


def test_a_budget_is_of_the_job_not_of_the_attempt() -> None:
    budget = Budget(3, before=2)
    assert budget.spend()
    assert not budget.spend()
    assert budget.spent == 2, "what this attempt tells of is its own"
