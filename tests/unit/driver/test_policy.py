"""The rules by which generations form, each in a case of its own."""

from __future__ import annotations

import pytest
from policy_world import World

from workers.driver.rendezvous.current import Patience
from workers.driver.rendezvous.members import Incarnation, Member, State
from workers.driver.rendezvous.policy import Policy


def world(size: int = 2, *, sharded: bool = False, **options: object) -> World:
    return World(Policy(size, **options), size, sharded=sharded)  # type: ignore[arg-type]


def two_replicas() -> World:
    here = world()
    here.want("a", "b")
    here.start("a")
    here.start("b")
    return here


def replica(here: World, name: str) -> list:
    return [worker for worker in here.workers.values() if worker.incarnation.replica == name]


def test_the_first_generation_waits_for_all_that_are_wanted_and_loads_the_checkpoint() -> None:
    here = world()
    here.want("a", "b")
    here.start("a")
    assert not here.formed
    here.start("b")
    assert here.formed[0].replicas == ("a", "b")
    assert here.formed[0].step is None
    assert here.formed[0].source is None


def test_the_first_generation_does_not_wait_for_ever() -> None:
    here = world(patience=Patience(assemble=5))
    here.want("a", "b")
    here.start("a")
    assert here.policy.deadline == 5
    here.advance(4.9)
    assert not here.formed
    here.advance(0.1)
    assert here.formed[0].replicas == ("a",)


def test_numbers_go_on_from_the_last_attempt() -> None:
    here = world(last_generation=7)
    here.want("a")
    here.start("a")
    assert here.formed[0].number == 8


def test_a_newcomer_enters_at_a_boundary_and_is_healed() -> None:
    here = world()
    here.want("a")
    here.start("a")
    here.train(3)
    here.want("a", "b")
    here.train(2)
    assert len(here.formed) == 1, "nothing changes before the newcomer is ready"
    here.start("b")
    assert all(worker.told_to_leave for worker in here.current())
    here.train(1)
    formed = here.formed[1]
    assert (formed.replicas, formed.step, formed.source, formed.healed) == (("a", "b"), 6, "a", ("b",))
    assert here.ended[-1].cause is None


def test_replicas_of_a_node_are_neighbours_and_so_are_nodes_with_a_fast_link() -> None:
    here = world()
    here.nodes = {"a": "n1", "b": "n2", "c": "n1", "d": "n3", "e": "n2"}
    here.want("a")
    here.start("a")
    here.want("a", "b", "c", "d", "e")
    for name in "bcde":
        here.start(name)
    here.train(1)
    assert here.formed[-1].replicas == ("a", "c", "b", "e", "d")
    assert {worker.order.nodes for worker in here.current() if worker.order} == {("n1", "n1", "n2", "n2", "n3")}
    here.policy.link_speeds = {("n1", "n3"): 900.0, ("n1", "n2"): 100.0}
    here.want("a", "b", "c", "d")
    here.train(1)
    assert here.formed[-1].replicas == ("a", "c", "d", "b")


def test_newcomers_that_have_arrived_are_waited_for_briefly() -> None:
    here = world(patience=Patience(batch=1))
    here.want("a")
    here.start("a")
    here.want("a", "b", "c")
    late = here.start("c", ready=False)
    here.start("b")
    assert not any(worker.told_to_leave for worker in here.current())
    for worker in late:
        here.ready(worker)
    here.train(1)
    assert here.formed[1].replicas == ("a", "b", "c")


def test_a_slow_newcomer_does_not_keep_the_others_out() -> None:
    here = world(patience=Patience(batch=1))
    here.want("a")
    here.start("a")
    here.want("a", "b", "c")
    here.start("c", ready=False)
    here.start("b")
    here.advance(1)
    here.train(1)
    assert here.formed[1].replicas == ("a", "b")


def test_who_is_no_longer_wanted_leaves_at_a_boundary_and_is_let_go() -> None:
    here = two_replicas()
    here.train(2)
    here.want("a")
    here.train(1)
    assert here.formed[1].replicas == ("a",)
    assert here.formed[1].step == 3
    assert here.formed[1].source is None
    assert all(worker.released and not worker.saving for worker in replica(here, "b"))


def test_the_state_goes_over_before_its_last_holder_is_let_go() -> None:
    here = world()
    here.want("a")
    here.start("a")
    here.train(4)
    here.want("b")
    here.train(1)
    assert len(here.formed) == 1
    here.start("b")
    here.train(1)
    assert here.formed[1].replicas == ("a", "b")
    assert here.formed[1].source == "a"
    here.train(1)
    assert here.formed[2].replicas == ("b",)
    assert here.formed[2].step == 7
    assert all(worker.released for worker in replica(here, "a"))


def test_survivors_go_on_at_once_without_the_replica_that_lost_a_worker() -> None:
    here = two_replicas()
    here.train(5)
    victim, mate = replica(here, "b")
    here.kill(victim)
    assert all(worker.broken for worker in replica(here, "a"))
    for worker in replica(here, "a"):
        worker.state = State(5, prepared=True, commit={"norm": 5.0})
        here.ready(worker)
    assert here.formed[1].replicas == ("a",)
    assert here.formed[1].step == 5
    here.kill(mate)
    assert len(here.ended) == 1
    here.start("b")
    here.train(1)
    assert here.formed[2].replicas == ("a", "b")
    assert here.formed[2].healed == ("b",)


def test_a_mate_of_a_lost_worker_is_never_chosen_again() -> None:
    here = two_replicas()
    victim, mate = replica(here, "b")
    here.kill(victim)
    here.ready(mate)
    for worker in replica(here, "a"):
        here.ready(worker)
    assert here.formed[-1].replicas == ("a",)
    assert mate.waiting


def test_one_step_behind_and_prepared_rolls_forward_with_the_commit_of_the_others() -> None:
    here = world()
    here.want("a", "b", "c")
    for name in "abc":
        here.start(name)
    here.train(3)
    here.kill(replica(here, "c")[0])
    for worker in replica(here, "a"):
        worker.state = State(3, prepared=True, commit={"norm": 3.0})
        here.ready(worker)
    for worker in replica(here, "b"):
        worker.state = State(4, commit={"norm": 4.0})
        here.ready(worker)
    formed = here.formed[-1]
    assert (formed.step, formed.source, formed.healed) == (4, None, ())
    assert [worker.order.roll_forward for worker in here.current() if worker.order] == [True, True, False, False]


def test_one_step_behind_and_not_prepared_is_healed() -> None:
    here = world()
    here.want("a", "b", "c")
    for name in "abc":
        here.start(name)
    here.train(3)
    here.kill(replica(here, "c")[0])
    for worker in replica(here, "a"):
        here.ready(worker)
    for worker in replica(here, "b"):
        worker.state = State(4, commit={"norm": 4.0})
        here.ready(worker)
    formed = here.formed[-1]
    assert (formed.step, formed.source, formed.healed) == (4, "b", ("a",))


def test_nothing_forms_while_a_survivor_still_trains() -> None:
    here = two_replicas()
    here.train(5)
    here.kill(replica(here, "b")[0])
    first, second = replica(here, "a")
    here.ready(first)
    assert len(here.formed) == 1
    here.ready(second)
    assert len(here.formed) == 2


def test_when_nobody_with_state_is_left_all_load_the_checkpoint() -> None:
    here = two_replicas()
    here.train(5)
    here.checkpoint = 4
    for worker in list(here.workers.values()):
        here.kill(worker)
    here.start("b")
    here.start("a")
    assert here.formed[1].step is None
    assert {worker.state.step for worker in here.current()} == {4}


def test_a_failure_report_breaks_the_generation_and_the_same_replicas_try_again() -> None:
    here = two_replicas()
    here.train(2)
    teller = replica(here, "b")[0]
    here.apply(here.policy.failed(teller.key, here.formed[-1].number, "reset by peer", here.now))
    for worker in list(here.workers.values()):
        assert worker.broken
        here.ready(worker)
    assert here.formed[1].replicas == ("a", "b")
    assert here.formed[1].step == 2
    assert here.ended[0].cause == "b: reset by peer"


def test_a_late_failure_report_is_of_no_consequence() -> None:
    here = two_replicas()
    here.apply(here.policy.failed(1, 99, "late", here.now))
    assert here.policy.running


def test_workers_that_disagree_about_their_step_are_evicted() -> None:
    here = two_replicas()
    here.train(2)
    here.apply(here.policy.failed(1, here.formed[-1].number, "reset", here.now))
    replica(here, "b")[0].state = State(3)
    for worker in list(here.workers.values()):
        here.ready(worker)
    assert here.formed[1].replicas == ("a",)
    assert not replica(here, "b")


def test_who_does_not_leave_a_broken_generation_is_evicted() -> None:
    here = world(patience=Patience(leave=60))
    here.want("a", "b")
    here.start("a")
    here.start("b")
    here.apply(here.policy.failed(1, 1, "reset", here.now))
    for worker in replica(here, "a"):
        here.ready(worker)
    assert here.policy.deadline == 60
    here.advance(60)
    assert not replica(here, "b")
    assert here.formed[1].replicas == ("a",)


def test_a_replica_that_started_anew_replaces_its_old_workers() -> None:
    here = two_replicas()
    here.train(1)
    old = replica(here, "b")
    here.start("b")
    assert not any(worker.key in here.workers for worker in old)
    for worker in replica(here, "a"):
        here.ready(worker)
    assert here.formed[1].replicas == ("a", "b")
    assert here.formed[1].healed == ("b",)


def test_who_arrives_unwanted_is_let_go_at_once() -> None:
    here = world()
    here.want("a")
    here.start("a")
    late = here.start("b", ready=False)
    assert all(worker.released for worker in late)


def test_who_becomes_unwanted_while_starting_is_let_go_when_ready_and_the_generation_goes_on() -> None:
    here = world()
    here.want("a")
    here.start("a")
    here.want("a", "b")
    late = here.start("b", ready=False)
    here.want("a")
    for worker in late:
        here.ready(worker)
    assert all(worker.released for worker in late)
    assert not any(worker.told_to_leave for worker in here.current())


def test_only_degrees_that_the_batch_can_be_split_into_are_formed() -> None:
    here = world(degrees={1, 2, 4})
    here.want("a", "b", "c")
    for name in "abc":
        here.start(name)
    assert here.formed[0].replicas == ("a", "b")
    here.want("a", "b", "c", "d")
    here.start("d")
    here.train(1)
    assert here.formed[1].replicas == ("a", "b", "c", "d")


def test_it_is_done_when_data_replica_0_has_finished_and_late_joiners_are_let_go() -> None:
    here = two_replicas()
    here.train(2)
    for worker in replica(here, "b"):
        here.finish(worker)
    assert not here.done, "data replica 0 still saves"
    for worker in replica(here, "a"):
        here.finish(worker)
    assert here.done
    for worker in list(here.workers.values()):
        here.depart(worker)
    assert all(worker.released for worker in here.start("a", ready=False))


def test_it_is_not_done_when_data_replica_0_is_lost_before_it_has_saved() -> None:
    here = two_replicas()
    here.train(2)
    for worker in replica(here, "b"):
        here.finish(worker)
        here.depart(worker)
    here.kill(replica(here, "a")[0])
    here.kill(replica(here, "a")[0])
    assert not here.done
    here.start("a")
    here.advance(10)
    assert here.formed[1].replicas == ("a",)
    assert here.formed[1].step is None


def test_a_straggler_one_step_short_redoes_it_alone() -> None:
    here = two_replicas()
    here.train(2)
    for worker in replica(here, "b"):
        here.finish(worker)
        here.depart(worker)
    here.apply(here.policy.failed(replica(here, "a")[0].key, 1, "reset", here.now))
    for worker in replica(here, "a"):
        worker.state = State(1, prepared=True, commit={"norm": 1.0})
        here.ready(worker)
    assert here.formed[1].replicas == ("a",)
    assert here.formed[1].step == 1


def test_stopping_saves_once_at_a_boundary_and_lets_the_others_go_afterwards() -> None:
    here = two_replicas()
    here.train(3)
    here.stop()
    here.train(1)
    saver, other = replica(here, "a"), replica(here, "b")
    assert all(worker.saving for worker in saver)
    assert not any(worker.released for worker in other)
    for worker in saver:
        here.depart(worker)
    assert here.stopped
    assert here.stopped.saved_by == "a"
    assert all(worker.released and not worker.saving for worker in other)


def test_another_replica_saves_when_the_first_dies_of_it() -> None:
    here = two_replicas()
    here.train(3)
    here.stop()
    here.train(1)
    here.kill(replica(here, "a")[0])
    assert all(worker.saving for worker in replica(here, "b"))


def test_stopping_before_anything_was_trained_ends_at_once() -> None:
    here = world()
    here.want("a")
    late = here.start("a", ready=False)
    here.stop()
    assert here.stopped
    assert here.stopped.saved_by is None
    for worker in late:
        here.ready(worker)
    assert all(worker.released for worker in late)


def test_two_workers_cannot_claim_one_place() -> None:
    policy = Policy(2)
    policy.want(["a"], 0.0)
    policy.arrived(Member(1, Incarnation("a", "x"), 0), 0.0)
    with pytest.raises(ValueError, match="place 0"):
        policy.arrived(Member(2, Incarnation("a", "x"), 0), 0.0)


def sharded_replicas() -> World:
    here = world(sharded=True, patience=Patience(assemble=5, batch=0))
    here.want("a", "b")
    here.start("a")
    here.start("b")
    here.train(3)
    return here


def test_a_shared_out_state_changes_hands_at_a_boundary_without_a_step_lost_or_a_wait() -> None:
    here = sharded_replicas()
    here.want("a", "b", "c")
    here.start("c")
    here.train(1)
    formed = here.formed[1]
    assert (formed.replicas, formed.step, formed.source, formed.healed) == (("a", "b", "c"), None, None, ())
    assert {worker.state.step for worker in here.current()} == {4}
    here.want("b", "d")  # who is not there yet is not waited for: it will have its own boundary
    here.train(1)
    assert here.formed[2].replicas == ("b",)
    assert {worker.state.step for worker in here.current()} == {5}
    assert all(worker.released and not worker.saving for worker in replica(here, "a"))


def test_a_lost_shard_takes_everybody_back_and_nobody_rolls_forward() -> None:
    here = sharded_replicas()
    here.checkpoint = 2
    here.kill(replica(here, "b")[0])
    for worker in replica(here, "a"):
        worker.state = State(3, prepared=True, commit={"norm": 3.0})
        here.ready(worker)
    assert len(here.formed) == 1, "the lost one may be back soon"
    here.advance(5)
    formed = here.formed[1]
    assert (formed.replicas, formed.step, formed.source) == (("a",), None, None)
    assert [worker.order.roll_forward for worker in here.current() if worker.order] == [False, False]
    assert {worker.state.step for worker in here.current()} == {2}


def test_stopping_a_job_with_a_shared_out_state_lets_all_go_once_it_is_saved() -> None:
    here = sharded_replicas()
    here.stop()
    here.train(1)
    assert here.checkpoint == 4
    assert here.stopped
    assert all(worker.released and not worker.saving for worker in here.workers.values())
