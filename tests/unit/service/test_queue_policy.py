"""Who may start, and what the others are told."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.queue.policy import Candidate, Decision, Need, Node, Room, Running, decide, impatient

CPU = Need(cpus=1, gpus=0)


def node(cpus: float, free: float | None = None, gpus: float = 0) -> Node:
    return Node(Room(cpus, gpus), Room(cpus if free is None else free, gpus))


def job(name: str, workers: int, number: int = 1, **more: Any) -> Candidate:
    fields: dict[str, Any] = {"priority": 0, "need": CPU, "sizes": [4, 8, 12, 16], **more}
    return Candidate(job=name, number=number, workers=workers, **fields)


def outcome(decisions: list[Decision]) -> dict[str, int | str]:
    return {decision.job: decision.workers or decision.code for decision in decisions}


def test_first_come_first_served_within_a_priority() -> None:
    waiting = [job("late", 4, 3), job("first", 4, 1), job("urgent", 4, 9, priority=5), job("second", 4, 2)]
    decisions = decide(waiting, [node(12)], [])
    assert [decision.job for decision in decisions] == ["urgent", "first", "second", "late"]
    assert outcome(decisions) == {"urgent": 4, "first": 4, "second": 4, "late": "waiting_for_room"}
    assert decisions[-1].message == "waits for 4 workers of 1 CPU each; there is room for 0 now"


def test_nobody_overtakes_a_job_that_waits_for_room() -> None:
    decisions = decide([job("large", 8, 1), job("small", 4, 2)], [node(8, free=4)], [])
    assert outcome(decisions) == {"large": "waiting_for_room", "small": "waiting_behind"}
    assert "large" in decisions[1].message


def test_a_job_larger_than_the_cluster_holds_up_nobody() -> None:
    decisions = decide([job("huge", 16, 1), job("small", 4, 2)], [node(8)], [])
    assert outcome(decisions) == {"huge": "larger_than_cluster", "small": 4}
    assert decisions[0].message == (
        "needs 16 workers of 1 CPU each, and the whole cluster has room for 8; scale it to 8, or add nodes"
    )
    (alone,) = decide([job("huge", 16, sizes=[16])], [node(8)], [])
    assert alone.message.endswith("it waits for nodes to be added")


def test_all_workers_or_none() -> None:
    assert outcome(decide([job("a", 4)], [node(3)], [])) == {"a": "larger_than_cluster"}
    assert outcome(decide([job("a", 4)], [node(8, free=3)], [])) == {"a": "waiting_for_room"}
    assert outcome(decide([job("a", 4)], [node(2), node(2)], [])) == {"a": 4}


def test_a_worker_is_never_cut_in_two() -> None:
    wide = Need(cpus=3, gpus=0)
    assert outcome(decide([job("a", 4, need=wide)], [node(4), node(4), node(4), node(4)], [])) == {"a": 4}
    assert outcome(decide([job("a", 4, need=wide)], [node(8), node(8)], [])) == {"a": 4}
    assert outcome(decide([job("a", 4, need=wide)], [node(5), node(7)], [])) == {"a": "larger_than_cluster"}


def test_gpus_are_counted_where_they_are() -> None:
    need = Need(cpus=1, gpus=1)
    assert outcome(decide([job("a", 4, need=need)], [node(64), node(8, gpus=3)], [])) == {"a": "larger_than_cluster"}
    (decision,) = decide([job("a", 4, need=need)], [node(8, gpus=3)], [])
    assert "1 CPU and 1 GPU" in decision.message
    assert outcome(decide([job("a", 4, need=need)], [node(8, gpus=4)], [])) == {"a": 4}


def test_fractions_of_a_cpu_add_up() -> None:
    tenth = Need(cpus=0.1, gpus=0)
    assert outcome(decide([job("a", 8, need=tenth)], [node(0.8)], [])) == {"a": 8}


def test_workers_that_are_to_come_have_their_places() -> None:
    # Ray shows everything free: the workers of the running job have not begun.
    coming = [Running(CPU, wanted=8, seen=0)]
    assert outcome(decide([job("a", 4)], [node(8)], coming)) == {"a": "waiting_for_room"}
    # All of them train, and what Ray shows is from before: our own count says that nothing is left.
    assert outcome(decide([job("a", 4)], [node(8)], [Running(CPU, 8, 8)])) == {"a": "waiting_for_room"}
    # A job that shrinks holds its places until it has let them go.
    assert outcome(decide([job("a", 4)], [node(8)], [Running(CPU, 4, 8)])) == {"a": "waiting_for_room"}


def test_others_on_the_cluster_have_their_places() -> None:
    assert outcome(decide([job("a", 4)], [node(8, free=3)], [])) == {"a": "waiting_for_room"}


def test_a_job_that_recovers_goes_first_and_may_come_back_smaller() -> None:
    back = job("back", 8, 9, recovering=True)
    decisions = decide([job("new", 4, 1, priority=100), back], [node(8, free=4)], [])
    assert outcome(decisions) == {"back": "waiting_for_room", "new": "waiting_behind"}
    decisions = decide([job("new", 4, 1, priority=100), impatient(back)], [node(8, free=4)], [])
    assert outcome(decisions) == {"back": 4, "new": "waiting_for_room"}
    assert outcome(decide([impatient(back)], [node(8)], [])) == {"back": 8}
    assert outcome(decide([impatient(back)], [node(6)], [])) == {"back": 4}
    assert outcome(decide([impatient(back)], [node(3)], [])) == {"back": "larger_than_cluster"}


def test_an_empty_cluster() -> None:
    assert outcome(decide([job("a", 4)], [], [])) == {"a": "larger_than_cluster"}
    assert decide([], [node(8)], []) == []


@given(
    sizes=st.lists(st.integers(1, 6), max_size=8),
    nodes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4),
    running=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=2),
)
def test_never_more_is_admitted_than_there_is(
    sizes: list[int], nodes: list[tuple[int, int]], running: list[tuple[int, int]]
) -> None:
    waiting = [job(f"j{number}", size, number, sizes=[size]) for number, size in enumerate(sizes)]
    places = [node(total, free=min(total, free)) for total, free in nodes]
    jobs = [Running(CPU, wanted, seen) for wanted, seen in running]
    decisions = decide(waiting, places, jobs)
    assert len(decisions) == len(waiting)
    admitted = sum(decision.workers or 0 for decision in decisions)
    coming = sum(max(0, wanted - seen) for wanted, seen in running)
    ours = sum(max(wanted, seen) for wanted, seen in running)
    assert admitted <= max(0, sum(place.free.cpus for place in places) - coming)
    assert admitted <= max(0, sum(place.total.cpus for place in places) - ours)
    left = [decision.job for decision in decisions if decision.workers is None]
    blocked = [decision for decision in decisions if decision.code == "waiting_for_room"]
    assert len(blocked) <= 1, "only the first that waits for room waits for room; the others wait behind it"
    assert all(decision.message for decision in decisions if decision.job in left)
