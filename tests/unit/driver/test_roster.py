"""Names of replicas, and how often one is started in vain."""

from __future__ import annotations

from workers.driver.roster import LONGEST_PAUSE_S, Standing, choose_replicas


def test_who_is_wanted_stays_and_free_numbers_are_filled() -> None:
    assert choose_replicas(2, [], ()) == ["replica-0", "replica-1"]
    assert choose_replicas(3, ["replica-1"], ()) == ["replica-1", "replica-0", "replica-2"]
    assert choose_replicas(2, ["replica-0", "replica-1"], ["replica-0"]) == ["replica-0", "replica-1"]


def test_who_trains_stays_before_who_does_not() -> None:
    wanted = ["replica-0", "replica-1", "replica-2"]
    assert choose_replicas(1, wanted, ["replica-2"]) == ["replica-2"]
    assert choose_replicas(2, wanted, ["replica-2", "replica-1"]) == ["replica-1", "replica-2"]
    assert choose_replicas(2, wanted, wanted) == ["replica-0", "replica-1"]


def test_starts_in_vain_are_counted_until_a_worker_is_here() -> None:
    standing = Standing()
    assert not standing.failed()
    assert not standing.failed()
    standing.arriving()
    assert not standing.failed(), "this time somebody was here"
    assert not standing.failed()
    assert not standing.failed()
    assert standing.failed()


def test_it_waits_longer_before_each_further_start() -> None:
    standing = Standing()
    pauses = [standing.put_off(100.0) for _ in range(8)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert standing.next_start == 100.0 + LONGEST_PAUSE_S
    standing.arriving()
    assert standing.put_off(0.0) == 1
