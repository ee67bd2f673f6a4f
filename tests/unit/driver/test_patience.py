"""How long a generation may take to be left, and who is taken to hang."""

from __future__ import annotations

from policy_world import World
from test_policy import replica, world

from workers.driver.rendezvous.current import Patience


def leaving() -> World:
    """Two replicas that were asked, at second 0, to leave their generation."""
    here = world(patience=Patience(leave=60, busy=600))
    here.want("a", "b")
    here.start("a")
    here.start("b")
    here.want("a")
    assert all(worker.told_to_leave for worker in here.current())
    return here


def progress(here: World, name: str, busy: str | None = None) -> None:
    for worker in replica(here, name):
        here.apply(here.policy.progressed(worker.key, busy, here.now))


def test_who_steps_is_given_time_to_leave_and_so_are_those_who_wait_for_it() -> None:
    here = leaving()
    here.advance(50)
    progress(here, "a")
    here.advance(50)
    assert len(here.current()) == 4
    assert not any(worker.broken for worker in here.current())
    here.advance(10)
    assert all(worker.broken for worker in here.current()), "who only waits is freed first"
    assert len(here.current()) == 4


def test_a_long_save_is_no_hang() -> None:
    here = leaving()
    progress(here, "a", busy="checkpoint")
    here.advance(500)
    assert len(here.current()) == 4
    assert not any(worker.broken for worker in here.current())
    progress(here, "a")
    assert here.policy.deadline == 560
    here.advance(59)
    assert not any(worker.broken for worker in here.current())
    here.train()
    assert here.formed[-1].replicas == ("a",)


def test_a_save_that_never_ends_is_a_hang_and_only_who_hangs_is_evicted() -> None:
    here = leaving()
    progress(here, "a", busy="checkpoint")
    here.advance(600)
    assert all(worker.broken for worker in here.current())
    for worker in replica(here, "b"):
        here.ready(worker)
    here.advance(60)
    assert not replica(here, "a")
    assert replica(here, "b")


def test_what_a_worker_was_busy_with_ends_with_its_generation() -> None:
    here = world(patience=Patience(leave=60, busy=600))
    here.want("a", "b")
    here.start("a")
    here.start("b")
    progress(here, "a", busy="checkpoint")
    here.apply(here.policy.failed(1, 1, "reset", here.now))
    for worker in here.current():
        here.ready(worker)
    here.apply(here.policy.failed(here.formed[1].keys[0], 2, "reset", here.now))
    assert here.policy.deadline == 60
